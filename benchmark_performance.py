"""Measure loader and step: `python benchmark_performance.py --config exp01.yaml --num_batches 100
[--compare]`.
"""

import sys

from speakernet.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("benchmarks.command", "benchmark_performance.py", sys.argv[1:]))
