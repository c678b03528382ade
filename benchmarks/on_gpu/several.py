"""Part `ranks`: utterances per second with one process and several, each with its own GPU and a
batch of equal size.

Started by torchrun, this file runs the steps of one process.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.on_gpu.record import Row, Setup, left_out, row
from benchmarks.on_gpu.step_costs import (
    PLAIN,
    QUICK_ROUNDS,
    ROUNDS,
    VARIANTS,
    batch_size_of,
    step_config,
)
from benchmarks.steps import trainer_step
from speakernet import distributed
from speakernet.assembly.training import prepare_machine
from speakernet.parallel.group import join_ranks
from speakernet.training.timing import time_steps

MODEL = "ResNet34"
QUICK_MODEL = "ResNet"
NORMS = {"own norms": "off", "shared norms": "on"}


def several_ranks(setup: Setup) -> Iterator[Row]:
    """One process, two, four … up to the number of GPUs; on a CPU one and two, to run the code."""
    most = torch.cuda.device_count() if setup.is_cuda else 2
    if most < 2:
        yield left_out("several processes", "needs two or more GPUs")
        return
    batch_size = batch_size_of(setup)
    alone = _measure(setup, 1, "off")
    speed = batch_size / alone["step_seconds"]
    yield row("1 process", utterances_per_second=speed, scaling=1.0, **alone)
    for count, (name, norms) in itertools.product((2, 4, 8, 16), NORMS.items()):
        if count <= most:
            figures = _measure(setup, count, norms)
            together = count * batch_size / figures["step_seconds"]
            yield row(
                f"{count} processes, {name}",
                utterances_per_second=together,
                scaling=together / (count * speed),
                **figures,
            )


def _measure(setup: Setup, count: int, norms: str) -> dict[str, float]:
    """Rank 0's figures of a step in `count` processes."""
    out = setup.folder / "ranks.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    size = "quick" if setup.is_quick else "whole"
    words = ["-m", "benchmarks.on_gpu.several", setup.device.type, size, norms, str(out)]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, *torchrun, *words],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{count} processes failed: {done.stderr.strip()[-500:]}")
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _run(device_type: str, size: str, norms: str, out: str) -> None:
    """Run one process; rank 0 writes the figures of a step."""
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(torch.device(device_type), size == "quick", Path(folder))
        runtime = PLAIN if setup.is_quick else VARIANTS["bf16, channels_last, compile"]
        model = QUICK_MODEL if setup.is_quick else MODEL
        config = step_config(setup, model, {**runtime, "sync_batch_norm": norms})
        with join_ranks(config.runtime):
            device = prepare_machine(config)
            step = trainer_step(config, Path(folder), batch_size_of(setup))
            # All ranks take the same steps: they exchange gradients.
            figures = time_steps(step, QUICK_ROUNDS if setup.is_quick else ROUNDS, device)
            if distributed.is_main():
                Path(out).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    _run(*sys.argv[1:])
