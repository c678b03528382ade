"""What this machine is and how torch is set on it; a reading that fails never ends a run."""
