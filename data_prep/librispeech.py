"""LibriSpeech: download, unpack, lists by its own parts, balanced trials."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "librispeech", *sys.argv[1:]]))
