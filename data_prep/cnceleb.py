"""CN-Celeb 1 and 2: download, unpack, join short utterances, lists, and the published trials."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "cnceleb", *sys.argv[1:]]))
