"""Verify and measure the GPU path; without a GPU, run the code of every part on the CPU.

    python benchmarks/gpu.py --out figures.json
    python benchmarks/gpu.py --part correctness --out figures.json
    python benchmarks/gpu.py --device cpu --quick --out figures.json

Parts, in the order of their use if time is short: pipeline (training from disk to weights),
evaluation, steps (time and memory of each variant), launches (kernels of a step), correctness
(against the CPU in float32), ranks (one and several). Every row is stored in FILE as it is
measured, a part ends after 90 s, and finished parts are not run again; at the end a table of every
part is printed. Without CUDA, measurements that need it are marked as missing.
"""

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Started by path: Python then searches this folder for modules instead of the checkout.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.on_gpu.correctness import correctness
from benchmarks.on_gpu.end_to_end import evaluation, pipeline
from benchmarks.on_gpu.record import Record, Row, Setup, left_out
from benchmarks.on_gpu.several import several_ranks
from benchmarks.on_gpu.step_costs import launches, step_costs

logger = logging.getLogger("benchmarks.gpu")

PARTS: dict[str, Callable[[Setup], Iterable[Row]]] = {
    "pipeline": pipeline,
    "evaluation": evaluation,
    "steps": step_costs,
    "launches": launches,
    "correctness": correctness,
    "ranks": several_ranks,
}
PART_SECONDS = 90.0
"""All parts together take ten minutes on a fast GPU; --quick has no limit."""


class PartOver(BaseException):
    """The time of a part is over; not an Exception, which compilers and tests catch."""


def measure(record: Record, setup: Setup, parts: Sequence[str]) -> bool:
    """Run the parts that are not yet done; returns whether every comparison passed.

    Raises:
        ValueError: a part could not be run; all rows before that are stored.
    """
    # The story of a measurement. Time on a borrowed GPU is short and ends without notice, so every
    # row is written as soon as it is known, a part that was measured to its end is skipped by the
    # next start, and no part may take the time of the others. What a part could not finish stands
    # in the table as left out, with the reason.
    for name in parts:
        if record.is_done(name):
            logger.info("%s: already done", name)
            continue
        begin = time.perf_counter()
        rows: list[Row] = []
        try:
            with limited(0.0 if setup.is_quick else PART_SECONDS):
                for measured in PARTS[name](setup):
                    logger.info("%s: %s", name, measured)
                    rows.append(measured)
                    record.put(name, rows, time.perf_counter() - begin)
        # The part counts as done: measured again, it would take as long and end in the same place.
        except PartOver:
            rows.append(left_out("what follows", f"{PART_SECONDS:g} s were over"))
        record.put(name, rows, time.perf_counter() - begin, is_done=True)
    all_rows = [row for name in parts for row in record.parts[name]["rows"]]
    return all(row.get("passed", True) for row in all_rows)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise PartOver after some seconds, even in the middle of a row; 0 means never."""

    # A timer and its signal reach Python between any two lines, also in the middle of a
    # compilation, which can take minutes and asks nobody.
    def end(*_: object) -> None:
        raise PartOver

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # The timer goes first: its signal may otherwise arrive when the old handler, which ends the
        # process, is back.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write, print; returns 1 if a comparison failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="only this part (can be repeated)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU, if any"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, only to check that the code runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON, with the table beside it as .md",
    )
    parser.add_argument(
        "--folder", type=Path, help="for generated data (a few GB); default: a temporary folder"
    )
    arguments = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    has_gpu = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_gpu:
        raise SystemExit(
            "--device cuda: torch sees no GPU; use --device cpu --quick to run the code"
        )
    device = torch.device("cuda" if has_gpu and arguments.device != "cpu" else "cpu")
    with tempfile.TemporaryDirectory(prefix="speakernet-gpu-") as folder:
        # With --folder a later start finds the generated corpus, which takes minutes to make.
        setup = Setup(device, arguments.quick, arguments.folder or Path(folder))
        setup.folder.mkdir(parents=True, exist_ok=True)
        try:
            record = Record(arguments.out, setup)
            passed = measure(record, setup, arguments.part or list(PARTS))
        except ValueError as error:
            raise SystemExit(str(error)) from error
    table = record.markdown()
    arguments.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    sys.stdout.write(f"\n{table}\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
