"""Trial lists: make them from any list, drop trials whose files are missing, rewrite a list for another layout."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "trials", *sys.argv[1:]]))
