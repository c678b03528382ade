"""Part `ranks`: utterances per second with one process and several, each with its own GPU and a
batch of equal size.

Started by torchrun, this file runs the steps of one process.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.on_gpu.record import Row, Setup, left_out, row
from benchmarks.on_gpu.step_costs import (
    ALL_BUT_GRAPHS,
    PLAIN,
    ROUNDS,
    VARIANTS,
    WARMUP,
    batch_size_of,
    step_config,
)
from benchmarks.steps import trainer_step
from speakernet import distributed
from speakernet.assembly.benchmark import warm_up
from speakernet.assembly.training import prepare_machine
from speakernet.machine.device import choose_device, synchronize
from speakernet.parallel.group import joined

MODEL = "ResNet34"
QUICK_MODEL = "ResNet"
NORMS = {"own norms": "off", "shared norms": "on"}


def several_ranks(setup: Setup) -> Iterator[Row]:
    """One process, two, four … up to the number of GPUs; on a CPU one and two, to run the code."""
    most = torch.cuda.device_count() if setup.is_cuda else 2
    if most < 2:
        yield left_out("several processes", "needs two or more GPUs")
        return
    alone = batch_size_of(setup) / _seconds(setup, 1, "off")
    yield row(
        "1 process",
        step_seconds=batch_size_of(setup) / alone,
        utterances_per_second=alone,
        scaling=1.0,
    )
    for count, (name, norms) in itertools.product((2, 4, 8, 16), NORMS.items()):
        if count <= most:
            seconds = _seconds(setup, count, norms)
            rate = count * batch_size_of(setup) / seconds
            share = rate / (count * alone)
            yield row(
                f"{count} processes, {name}",
                step_seconds=seconds,
                utterances_per_second=rate,
                scaling=share,
            )


def _seconds(setup: Setup, count: int, norms: str) -> float:
    """Median seconds of a step in `count` processes."""
    out = setup.folder / "ranks.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={count}",
    ]
    words = [setup.device.type, "quick" if setup.is_quick else "whole", norms, str(out)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [*command, "-m", "benchmarks.on_gpu.several", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{count} processes failed: {done.stderr.strip()[-500:]}")
    return float(json.loads(out.read_text(encoding="utf-8")))


def _run(device: str, size: str, norms: str, out: str) -> None:
    """Run one process; rank 0 writes the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(torch.device(device), size == "quick", Path(folder))
        runtime = PLAIN if setup.is_quick else VARIANTS[ALL_BUT_GRAPHS]
        config = step_config(
            setup, QUICK_MODEL if setup.is_quick else MODEL, {**runtime, "sync_batch_norm": norms}
        )
        with joined(config.runtime):
            prepare_machine(config)
            device_of_rank = choose_device(config.runtime)
            step = trainer_step(config, Path(folder), batch_size_of(setup))
            warm_up(step, 1 if setup.is_quick else WARMUP)
            seconds = []
            for _ in range(1 if setup.is_quick else ROUNDS):
                synchronize(device_of_rank)
                begin = time.perf_counter()
                step()
                synchronize(device_of_rank)
                seconds.append(time.perf_counter() - begin)
            if distributed.is_main():
                Path(out).write_text(json.dumps(statistics.median(seconds)), encoding="utf-8")


if __name__ == "__main__":
    _run(*sys.argv[1:])
