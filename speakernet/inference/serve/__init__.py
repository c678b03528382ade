"""A model file over HTTP: a JSON API and a page, for this machine or, with a token, for other
machines.
"""
