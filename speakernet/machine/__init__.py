"""What this machine is and lets us have, how torch is set on it, and measuring that never ends a run."""
