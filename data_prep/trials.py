"""Trial lists: make them from any list, clean a list against the files that exist, rewrite it."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "trials", *sys.argv[1:]]))
