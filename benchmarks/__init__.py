"""Comparisons with a plain pipeline and with plain networks, which a user of the package does not need."""
