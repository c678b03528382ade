"""A long list with a packed corpus: loading time, sampling time per epoch, memory per row of
several processes.

    python -m benchmarks.long_list --rows 1000000 10000000 --folder /disk/scratch

Creates a list, and a corpus whose index has that many rows and whose samples are a sparse file.
Every process loads list and lengths, builds the loader and plans an epoch, then waits for the
others and reports its private memory (growth of `Anonymous` in `/proc/self/smaps_rollup`). The
first start, which creates the lookup tables, has a separate row. Linux only.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config import Config
from speakernet.config.schema import replaced
from speakernet.data.packed import DESCRIPTION, FORMAT_NAME, INDEX, SAMPLES, describe_samples
from speakernet.files import sha256_of

UTTERANCE_SAMPLES = 32_000
ROWS_AT_ONCE = 100_000
ROWS_A_SPEAKER = 200


def make(folder: Path, num_rows: int) -> tuple[Path, Path]:
    """Create a list and a corpus of `num_rows` rows."""
    listed = folder / f"{num_rows}.txt"
    corpus = folder / f"corpus-{num_rows}"
    if (corpus / DESCRIPTION).exists():
        return listed, corpus
    corpus.mkdir(parents=True, exist_ok=True)
    name_bytes = len("id0000000/000000000.wav")
    with listed.open("w") as text, (corpus / "names").open("wb") as names:
        for first in range(0, num_rows, ROWS_AT_ONCE):
            rows = range(first, min(first + ROWS_AT_ONCE, num_rows))
            found = [(f"id{row // ROWS_A_SPEAKER:07d}", f"{row:09d}.wav") for row in rows]
            text.writelines(f"{speaker} {speaker}/{name}\n" for speaker, name in found)
            names.write("".join(f"{speaker}/{name}" for speaker, name in found).encode())
    offsets = np.arange(num_rows + 1, dtype=np.int64)
    with (corpus / INDEX).open("wb") as file:
        np.savez(
            file,
            name_content=np.fromfile(corpus / "names", np.uint8),
            name_offsets=offsets * name_bytes,
            sample_offsets=offsets * UTTERANCE_SAMPLES,
            checksums=np.zeros(num_rows, dtype=np.uint32),
        )
    (corpus / "names").unlink()
    num_samples = num_rows * UTTERANCE_SAMPLES
    with (corpus / SAMPLES).open("wb") as file:
        file.write(describe_samples(num_samples))
        file.truncate(len(describe_samples(0)) + 2 * num_samples)
    facts = {"format": FORMAT_NAME, "version": 1, "sample_rate": 16_000, "num_utterances": num_rows}
    facts |= {"num_samples": num_samples, "index_sha256": sha256_of(corpus / INDEX)}
    (corpus / DESCRIPTION).write_text(json.dumps(facts))
    return listed, corpus


def pages() -> dict[str, int]:
    """Memory of this process by kind, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}


def config_of(listed: Path, corpus: Path) -> Config:
    """The configuration for training on the list, without augmentation."""
    data = {
        "train_list": str(listed),
        "train_path": str(corpus),
        "num_workers": 0,
        "batch_size": 256,
    }
    return replaced(Config(), data=data, augment={"enabled": False}, loss={"name": "softmax"})


def work(listed: Path, corpus: Path, barrier: Any, results: Any) -> None:
    """Start like a training process, plan an epoch, and report."""
    torch.set_num_threads(1)
    empty = pages()["Anonymous"]
    begin = time.perf_counter()
    config = config_of(listed, corpus)
    inputs = Inputs(config, torch.device("cpu"))
    _ = inputs.training
    loaded = time.perf_counter()
    loader = build_training_loader(config, inputs)
    built = time.perf_counter()
    loader.set_epoch(1)
    plan_digest = hashlib.sha256(loader.plan.rows[:1000].tobytes()).hexdigest()
    planned = time.perf_counter()
    barrier.wait()
    found = pages()
    results.put(
        (
            loaded - begin,
            built - loaded,
            planned - built,
            found["Anonymous"] - empty,
            found["Pss"],
            plan_digest,
        )
    )
    barrier.wait()


def start(listed: Path, corpus: Path, count: int) -> tuple[float, list[tuple]]:
    """Seconds until `count` processes are ready, and their reports."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    results = context.Queue()
    begin = time.perf_counter()
    started = [
        context.Process(target=work, args=(listed, corpus, barrier, results)) for _ in range(count)
    ]
    for process in started:
        process.start()
    found = [results.get() for _ in started]
    seconds = time.perf_counter() - begin
    for process in started:
        process.join()
    return seconds, found


def main() -> int:
    """Create what is missing and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1_000_000, 10_000_000], help="default %(default)s"
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 4], help="default %(default)s"
    )
    arguments = parser.parse_args()
    os.environ["SPEAKERNET_CACHE"] = str(arguments.folder.absolute() / "cache")
    sys.stdout.write(
        "| rows | processes | all ready | list | loader | epoch plan | private bytes per row, "
        "total |\n"
    )
    sys.stdout.write("|---:|---:|---:|---:|---:|---:|---:|\n")
    for num_rows in arguments.rows:
        listed, corpus = make(arguments.folder.absolute(), num_rows)
        for name, count in [
            ("1, first start", 1),
            *((str(one), one) for one in arguments.processes),
        ]:
            seconds, found = start(listed, corpus, count)
            assert len({one[-1] for one in found}) == 1, "all processes plan the same epoch"
            load, build, plan = (max(one[place] for one in found) for place in range(3))
            private = sum(one[3] for one in found) / num_rows
            sys.stdout.write(
                f"| {num_rows:,} | {name} | {seconds:.1f} s | {load:.1f} s | {build:.1f} s | "
                f"{plan:.2f} s | {private:.1f} |\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
