"""Data preparation: download, verify, unpack, convert, list, split, pair; data_prep/ has thin
scripts for it.
"""
