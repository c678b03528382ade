"""A corpus in one memory-mapped array: its format, its names, what it is made from, and its writer."""
