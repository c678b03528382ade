"""Common Voice, one language: a speaker-disjoint split and balanced trials."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "common_voice", *sys.argv[1:]]))
