"""Train a model or, with --eval, score a trial list: `python trainSpeakerNet.py --config exp01.yaml`."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
