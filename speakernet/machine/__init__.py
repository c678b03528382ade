"""Facts about this machine, and torch's settings on it; a failed measurement never ends a run."""
