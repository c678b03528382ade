"""Measure loader and step: `python benchmark_performance.py --config exp01.yaml --num_batches 100 [--compare]`."""

import sys

from speakernet.cli import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
