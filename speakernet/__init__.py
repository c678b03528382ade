"""Training, scoring and using speaker-verification models; docs/architecture.md has the map of the rooms."""

__version__ = "0.1.0"
