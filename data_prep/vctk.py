"""VCTK 0.92: download, unpack, a speaker-disjoint split, balanced trials."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "vctk", *sys.argv[1:]]))
