"""Your own voices, ready to train: lists, split, trials, a configuration, and the next command."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "folder", *sys.argv[1:]]))
