"""Private and shared memory of the ranks on a machine: noise, RIRs, a long list and the index of
its corpus.

    python -m benchmarks.shared_banks --folder /disk/scratch --megabytes 300

Creates noise in MUSAN's layout, RIRs, packed copies of both, and a long list with the index of its
corpus, if missing. Then 1, 2 and 4 ranks, joined by gloo as under torchrun, augment batches and
read every clip and RIR, from the folders and from the packed corpora, or load the list and plan an
epoch. Private memory is `Anonymous` plus `Pss_Shmem`, shared memory is the mapped files
(`Pss_File`), all from `/proc/self/smaps_rollup`; figures are the growth, summed over ranks. Each
rank may cache 64 MiB of RIR spectra. Linux only.
"""

import argparse
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import long_list
from benchmarks.long_list import pages
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import write_audio
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.banks import RirBank, clips_into_ram, noise_banks
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.packing import pack
from speakernet.data.sources import AudioCache
from speakernet.machine.options import MachineOptions
from speakernet.parallel import distributed
from speakernet.parallel.group import joined

CLIP_SAMPLES = 480_000
RIR_SAMPLES = 8000
NUM_RIRS = 400
SAMPLE_RATE = 16_000
CACHE_BYTES = 64 << 20
EPOCHS = 20
BATCH = 64


def make(folder: Path, megabytes: int) -> None:
    """Create and pack both folders, if missing."""
    random = np.random.default_rng(0)
    num_clips = megabytes * 1_000_000 // (2 * CLIP_SAMPLES)
    if not (folder / "noise").exists():
        for number in range(num_clips):
            kind = ("noise", "music", "speech")[number % 3]
            write_audio(
                folder / f"noise/{kind}/{number}.wav", 0.1 * random.standard_normal(CLIP_SAMPLES)
            )
        for number in range(NUM_RIRS):
            decay = np.exp(-np.arange(RIR_SAMPLES) / 800)
            write_audio(
                folder / f"rirs/{number}.wav", 0.2 * random.standard_normal(RIR_SAMPLES) * decay
            )
    for name in ("noise", "rirs"):
        pack(FolderInput(folder / name), folder / f"{name}-packed")


def augment(noise: Path, rirs: Path, megabytes: int) -> Augmenter:
    """Augment batches, then read all clips and RIRs."""
    cache = AudioCache(CACHE_BYTES)
    banks = noise_banks(noise, SAMPLE_RATE, cache)
    rooms = RirBank(rirs, SAMPLE_RATE, cache, is_aligned=True)
    clips_into_ram(banks, 2 * megabytes << 20)
    augmenter = Augmenter(banks, rooms, AugmentOptions())
    for epoch in range(EPOCHS):
        augmenter(torch.randn(BATCH, 2 * SAMPLE_RATE), epoch=epoch, rows=np.arange(BATCH))
    for bank in banks.values():
        for clip in range(len(bank)):
            bank.read_whole(clip)
    for rir in range(len(rooms)):
        rooms.prepared(rir).sum()
    return augmenter


def plan(listed: Path, corpus: Path) -> object:
    """Load a list and the index of its corpus, and plan an epoch."""
    loader = build_training_loader(
        config := long_list.config_of(listed, corpus), Inputs(config, torch.device("cpu"))
    )
    loader.set_epoch(1)
    return loader


def work(rank: int, count: int, port: int, task: tuple[Any, ...], results: Any) -> None:
    """Do a task as one of the ranks on a machine; rank 0 reports private and shared bytes of all
    ranks.
    """
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "localhost"}
    torch.set_num_threads(1)
    with joined(MachineOptions(device="cpu")):
        distributed.barrier()
        before = pages()
        distributed.barrier()
        run, *given = task
        kept = run(*given)
        distributed.barrier()
        after = pages()
        grown = [after[name] - before[name] for name in ("Anonymous", "Pss_Shmem", "Pss_File")]
        private, shared = np.sum(
            distributed.gather_objects((grown[0] + grown[1], grown[2])), axis=0
        )
        del kept
        if not rank:
            results.put((private, shared))


def of_ranks(count: int, task: tuple[Any, ...]) -> tuple[int, int]:
    """Private and shared bytes of `count` ranks."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    results = context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, count, port, task, results))
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see above")
    return results.get()  # type: ignore[no-any-return]


def main() -> int:
    """Create what is missing and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--megabytes", type=int, default=300, help="size of the noise (default %(default)s)"
    )
    parser.add_argument(
        "--rows", type=int, default=1_100_000, help="rows of the list (default %(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 4], help="ranks (default %(default)s)"
    )
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    os.environ["SPEAKERNET_CACHE"] = str(folder / "cache")
    make(folder, arguments.megabytes)
    noise = folder / "noise"
    rirs = folder / "rirs"
    packed = [path.with_name(f"{path.name}-packed") for path in (noise, rirs)]
    tasks: dict[str, tuple[Any, ...]] = {
        "noise and RIRs in folders": (augment, noise, rirs, arguments.megabytes),
        "noise and RIRs, packed": (augment, *packed, arguments.megabytes),
        f"list and index of {arguments.rows:,} rows": (
            plan,
            *long_list.make(folder, arguments.rows),
        ),
    }
    sys.stdout.write(
        "| data | ranks | private, MB | shared, MB | total, MB |\n|---|---:|---:|---:|---:|\n"
    )
    for what, task in tasks.items():
        # The first start creates the tables that all others map.
        of_ranks(max(arguments.processes), task)
        for count in arguments.processes:
            private, shared = (one / 1e6 for one in of_ranks(count, task))
            sys.stdout.write(
                f"| {what} | {count} | {private:,.0f} | {shared:,.0f} | {private + shared:,.0f} |\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
