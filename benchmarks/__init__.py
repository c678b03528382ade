"""Measurements for developers: comparisons with a plain pipeline and plain networks, and the picture in the README."""
