"""Measurements for developers: against a plain pipeline and plain networks, on a GPU, and of
variants of recipes.
"""
