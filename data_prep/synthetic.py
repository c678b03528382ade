"""A corpus of synthetic speakers with lists, trials, noises and room responses."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "synthetic", *sys.argv[1:]]))
