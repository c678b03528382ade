"""A model file behind HTTP: a JSON API and one page, for this machine or, with a token, for other machines."""
