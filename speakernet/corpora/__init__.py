"""Data preparation: download, verify, unpack, convert, list, split, pair; data_prep/ holds thin scripts over it."""
