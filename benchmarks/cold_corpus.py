"""A packed corpus larger than memory: crops per second and waiting time per step, with and without
reading ahead.

    python -m benchmarks.cold_corpus --folder /disk/scratch --gigabytes 4 --rounds 5

Creates a corpus of that size in the folder if missing, and deletes nothing. Before every run its
pages are dropped from the system's cache (`posix_fadvise`), so every crop comes from disk, as for a
corpus much larger than memory. A step is simulated by sleeping, as a GPU step leaves the cores
idle. Linux only.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.timing import Way, run_in_turn
from speakernet.data.batches import BatchMaker, BatchRequest, CropMaker
from speakernet.data.lists import StringTable
from speakernet.data.packed import SAMPLES, PackedRows, PackedSource, open_samples
from speakernet.data.packing import PackInput, pack
from speakernet.data.workers import ReadAhead

UTTERANCE_SAMPLES = 128_000
"""8 s, about the mean of VoxCeleb2."""
CROP_SAMPLES = 32_000
NAME = "cold_corpus"


class Noise(PackInput):
    """Utterances of noise; only their size matters."""

    def __init__(self, num_utterances: int) -> None:
        super().__init__(
            StringTable.from_strings([f"{row:07d}.wav" for row in range(num_utterances)]), "noise"
        )
        self._samples = np.random.default_rng(0).integers(
            -3000, 3000, 2 * UTTERANCE_SAMPLES, dtype=np.int16
        )

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """See `PackInput.decode`."""
        first = row % UTTERANCE_SAMPLES
        return self._samples[first : first + UTTERANCE_SAMPLES]


@dataclass
class Course:
    """One way of loading batches, and its measurements other than time."""

    corpus: Path
    num_batches: int
    batch_size: int
    step_seconds: float
    is_mapped: bool
    is_ahead: bool
    seed: int = 0
    waited: list[float] = field(default_factory=list)
    """Seconds per batch, for each run."""
    read: list[float] = field(default_factory=list)
    """Bytes from disk per byte of crops, for each run."""

    def way(self) -> Way:
        """For `run_in_turn`."""
        return Way(self._run, self._prepare)

    def _prepare(self) -> list[tuple[CropMaker, list[BatchRequest]]]:
        """Return the maker in a list from which `_run` removes it: pages that are still mapped
        cannot be dropped.
        """
        self.seed += 1
        source = PackedSource(self.corpus)
        table = source.lookup_table(source.index.names)
        samples = open_samples(self.corpus, source.index.num_samples, is_mapped=self.is_mapped)
        reader = PackedRows(
            str(self.corpus),
            samples,
            table.data_offsets,
            table.native_samples,
            is_mapped=self.is_mapped,
        )
        planner = BatchMaker(reader, table.num_samples, seed=self.seed)
        random = np.random.default_rng(self.seed)
        speeds = np.zeros(self.batch_size, dtype=np.int64)
        requests = [
            BatchRequest(
                0, random.integers(0, len(source), self.batch_size), speeds, CROP_SAMPLES, batch
            )
            for batch in range(self.num_batches)
        ]
        drop_pages(self.corpus / SAMPLES)
        return [(ReadAhead(planner, planner) if self.is_ahead else planner, requests)]

    def _run(self, ready: list[tuple[CropMaker, list[BatchRequest]]]) -> int:
        maker, requests = ready.pop()
        before = bytes_from_disk()
        waited = 0.0
        asked = time.perf_counter()
        for _ in maker.run(requests):
            waited += time.perf_counter() - asked
            time.sleep(self.step_seconds)
            asked = time.perf_counter()
        num_crops = self.num_batches * self.batch_size
        self.waited.append(waited / self.num_batches)
        self.read.append((bytes_from_disk() - before) / (2 * CROP_SAMPLES * num_crops))
        return num_crops


def drop_pages(path: Path) -> None:
    """Drop the pages of a file from the system's cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def bytes_from_disk() -> int:
    """Bytes read from disk for this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def measure(
    corpus: Path,
    num_batches: int,
    batch_size: int,
    step_seconds: float,
    rounds: int,
    say: Callable[[str], object],
) -> None:
    """Run the three ways in turn, and write a table row for each with `say`."""
    ways = {
        "memory map": (True, False),
        "read from the file": (False, False),
        "read from the file, and ahead": (False, True),
    }
    courses = {
        name: Course(corpus, num_batches, batch_size, step_seconds, is_mapped, is_ahead)
        for name, (is_mapped, is_ahead) in ways.items()
    }
    samples = run_in_turn(
        {name: course.way() for name, course in courses.items()}, rounds=rounds, warmup=0
    )
    for name, course in courses.items():
        rates = samples[name].rates
        waits = [1000 * one for one in course.waited]
        say(
            f"| {1000 * step_seconds:g} ms | {name} | {statistics.median(rates):,.0f} "
            f"({min(rates):,.0f} to {max(rates):,.0f}) | {statistics.median(waits):.1f} "
            f"({min(waits):.1f} to {max(waits):.1f}) ms | {statistics.median(course.read):.1f} |\n"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument(
        "--gigabytes", type=float, default=4.0, help="size of the corpus (default %(default)s)"
    )
    parser.add_argument(
        "--batches", type=int, default=40, help="batches per run (default %(default)s)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=64, help="crops of 2 s per batch (default %(default)s)"
    )
    parser.add_argument(
        "--step_milliseconds", type=float, nargs="+", default=[0.0, 20.0], help="duration of a step"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default %(default)s)")


def main() -> int:
    """Create the corpus if missing, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    corpus = arguments.folder / NAME
    pack(
        Noise(max(1, int(arguments.gigabytes * 1e9 / 2 / UTTERANCE_SAMPLES))),
        corpus,
        show_progress=True,
    )
    sys.stdout.write(
        "| step | loading | crops per second | wait per batch | bytes read per byte of crop |\n"
    )
    sys.stdout.write("|---:|---|---:|---:|---:|\n")
    for milliseconds in arguments.step_milliseconds:
        measure(
            corpus,
            arguments.batches,
            arguments.batch_size,
            milliseconds / 1000,
            arguments.rounds,
            sys.stdout.write,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
