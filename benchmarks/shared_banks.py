"""Noise and room responses of several processes: private and shared memory, from folders and from packed corpora.

    python -m benchmarks.shared_banks --folder /disk/scratch --megabytes 300

Makes noise in MUSAN's layout and room responses once, packs both, and has 1, 2 and 4 processes augment batches with
them: from the folders, whose noise each process decodes into memory (`data.cache_megabytes`), and from the packed
corpora, which all of them map. Private is `Anonymous` and shared memory of its own (`Pss_Shmem`), shared is the mapped
files (`Pss_File`, less what a process has before); both are sums over the processes. Linux only.
"""

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_list import pages
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import write_audio
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.banks import RirBank, clips_into_ram, noise_banks
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.packing import pack
from speakernet.data.sources import AudioCache

CLIP_SAMPLES, RIR_SAMPLES, NUM_RIRS, SAMPLE_RATE = 480_000, 8000, 400, 16_000
CACHE_BYTES = 64 << 20


def make(folder: Path, megabytes: int) -> None:
    """Write both folders and pack them, if they are not there."""
    random, num_clips = np.random.default_rng(0), megabytes * 1_000_000 // (2 * CLIP_SAMPLES)
    if not (folder / "noise").exists():
        for number in range(num_clips):
            kind = ("noise", "music", "speech")[number % 3]
            write_audio(folder / f"noise/{kind}/{number}.wav", 0.1 * random.standard_normal(CLIP_SAMPLES))
        for number in range(NUM_RIRS):
            decay = np.exp(-np.arange(RIR_SAMPLES) / 800)
            write_audio(folder / f"rirs/{number}.wav", 0.2 * random.standard_normal(RIR_SAMPLES) * decay)
    for name in ("noise", "rirs"):
        pack(FolderInput(folder / name), folder / f"{name}-packed")


def work(noise: Path, rirs: Path, megabytes: int, barrier: Any, results: Any) -> None:
    """Augment some batches and report."""
    torch.set_num_threads(1)
    before, cache = pages(), AudioCache(CACHE_BYTES)
    banks, rooms = noise_banks(noise, SAMPLE_RATE, cache), RirBank(rirs, SAMPLE_RATE, cache, is_aligned=True)
    clips_into_ram(banks, 2 * megabytes << 20)
    augmenter = Augmenter(banks, rooms, AugmentOptions())
    for epoch in range(20):
        augmenter(torch.randn(64, 2 * SAMPLE_RATE), epoch=epoch, rows=np.arange(64))
    barrier.wait()
    after = pages()
    grown = {name: after[name] - before[name] for name in ("Anonymous", "Pss_Shmem", "Pss_File")}
    results.put((grown["Anonymous"] + grown["Pss_Shmem"], grown["Pss_File"]))
    barrier.wait()


def main() -> int:
    """Make what is missing and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=300, help="of noise (default %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="default %(default)s")
    arguments = parser.parse_args()
    folder, context = arguments.folder.absolute(), multiprocessing.get_context("spawn")
    make(folder, arguments.megabytes)
    sys.stdout.write("| noise and responses from | processes | private, MB | shared, MB |\n|---|---:|---:|---:|\n")
    for what, suffix in (("folders", ""), ("packed corpora", "-packed")):
        for count in arguments.processes:
            barrier, results = context.Barrier(count), context.Queue()
            paths = folder / f"noise{suffix}", folder / f"rirs{suffix}"
            given = (*paths, arguments.megabytes, barrier, results)
            started = [context.Process(target=work, args=given) for _ in range(count)]
            for process in started:
                process.start()
            found = [results.get() for _ in started]
            for process in started:
                process.join()
            private, shared = (sum(column) / 1e6 for column in zip(*found, strict=True))
            sys.stdout.write(f"| {what} | {count} | {private:,.0f} | {shared:,.0f} |\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
