"""MUSAN (music, speech and noise for augmentation): download, verify, unpack, cut into pieces."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "musan", *sys.argv[1:]]))
