"""Comparisons with a plain pipeline and with plain networks, and the picture of the README; no user needs them."""
