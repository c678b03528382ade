"""A run resumes with any number of processes, between and inside epochs; all need the same
options.
"""

import contextlib
import gc
import logging
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from speakernet import distributed
from speakernet.assembly.reports import score_experiment
from speakernet.assembly.runs import train_experiment
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config import load_config
from speakernet.data.audio import write_audio
from speakernet.training.stopping import Interrupted
from speakernet.training.trainer import Trainer
from tests.outcomes import numbers
from tests.parallel.several import in_several
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.slow
STEPS_OF_EPOCH = 8
LAST_STEP = 14
CHANGES = {
    "training": {"max_epochs": 2, "test_interval": 1, "log_interval": 1},
    # Small steps, because large ones amplify rounding, which depends on the number of processes and
    # the processor.
    "optimizer": {"name": "sgd", "learning_rate": 0.02},
    "frontend": {"spec_augment": True},
    "loss": {"name": "aamsoftmax", "sharded": "on"},
    "evaluation": {"eval_frames": 40, "num_crops": 1, "bootstrap_samples": 0},
}


@contextlib.contextmanager
def stopped(step):
    """The last process is asked to stop in this step; 0: in the first evaluation."""
    before = Trainer.run_step, Trainer.evaluate

    def ask():
        if distributed.rank() == distributed.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def run_step(self, batches):
        if step == self.state.step + 1:
            ask()
        before[0](self, batches)

    def evaluate(self, *note, **how):
        if step == 0:
            ask()
        return before[1](self, *note, **how)

    Trainer.run_step, Trainer.evaluate = run_step, evaluate
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        Trainer.run_step, Trainer.evaluate = before


def train(folder, name, step, *options):
    """Train the recipe of `folder`/`name` up to a step."""
    line = f"--config {folder}/run.yaml --save_path {folder}/{name}"
    with stopped(step):
        train_experiment(load_config([*line.split(), *options]))


def refused(call, own="", common=""):
    """The error if the second process has different options."""
    line = f"--config run.yaml --save_path refused --initial_model whole2/last.pt {common} "
    if distributed.rank() == 1:
        line += own
    with pytest.raises(ValueError) as caught:
        call(load_config(line.split()))
    return str(caught.value)


def two():
    """In two processes: an uninterrupted run, a stopped one, and refusals."""
    folder = Path.cwd()
    # First, because a process remembers for the rest of its life that it was asked to stop.
    again = is_found_finished()
    train(folder, "straight", LAST_STEP)
    train(folder, "whole2", 0)
    noise = "--augment.enabled true --augment.noise_path noise"
    found = {
        "again": str(again),
        # Any left would keep the group alive, and the memory of its gradients during a second
        # stage.
        "left": str(sum(type(item) is DistributedDataParallel for item in gc.get_objects())),
        "option": refused(train_experiment, "--loss.margin 0.3"),
        "model": refused(train_experiment, "--initial_model straight/last.pt"),
        "command": refused(score_experiment if distributed.is_main() else train_experiment),
        "noise": refused(train_experiment, "--augment.noise_path other_noise", noise),
    }
    return found


def is_found_finished():
    """Whether a finished run is recognised if the second process does not see the first one's
    folder.
    """
    outcomes = []
    for name in ("finished", "finished" if distributed.is_main() else "nothing"):
        line = f"--config run.yaml --max_epoch 1 --save_path {name}"
        outcomes.append(train_experiment(load_config(line.split())))
    return outcomes[0].evaluation is not None and outcomes[1].evaluation is None


def three():
    """In three processes: runs of one and of two processes resume; batches that cannot be shared
    (evenly).
    """
    folder = Path.cwd()
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("speakernet").addHandler(handler)
    logging.getLogger("speakernet").setLevel("INFO")
    for name in ("half1-3", "whole2-3"):
        train(folder, name, LAST_STEP)
    line = "--config run.yaml --save_path refused --data.batch_size 2"
    with pytest.raises(ValueError) as caught:
        train_experiment(load_config(line.split()))
    return {"small": str(caught.value), "logged": "\n".join(logged)}


def test_resuming(tiny_corpus, tmp_path):
    write_recipe(tmp_path / "run.yaml", tiny_corpus, tmp_path / "unused", CHANGES)
    for name, count in (("noise", 2), ("other_noise", 1)):
        (tmp_path / name / "noise" / "x").mkdir(parents=True)
        for clip in range(count):
            write_audio(tmp_path / name / "noise" / "x" / f"{clip}.wav", np.full(16000, 0.1), 16000)
    first, second = in_several(__file__, "two", tmp_path)
    train(tmp_path, "half1", STEPS_OF_EPOCH + 4)
    for name, count in (("half1", 3), ("whole2", 3), ("whole2", 1)):
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-{count}")
    of_three = in_several(__file__, "three", tmp_path, count=3)
    train(tmp_path, "whole2-1", LAST_STEP)
    straight = outcome(tmp_path / "straight")
    for name in ("half1-3", "whole2-3", "whole2-1"):
        compare(name, outcome(tmp_path / name), straight)
    assert first == second
    assert first.pop("left") == "0" and first.pop("again") == "True"
    assert (
        "training.initial_model (SHA-256)" in first["model"]
        and "augment.noise_path" in first["noise"]
    )
    assert (
        "the command is 'scoring (--eval)' on rank 0 and 'training' on rank 1" in first["command"]
    )
    assert "loss.margin is 0.2 on rank 0 and 0.3 on rank 1" in first["option"]
    assert all("Start all of them with the same" in text for text in first.values())
    assert not (tmp_path / "refused").exists()
    for answer in of_three:
        assert "data.batch_size" in answer["small"] and "3 processes" in answer["small"]
    assert "3 processes, which get 1 or 2 each" in of_three[0]["logged"]
    assert of_three[0]["logged"].count("resumed from") == 2


def outcome(run):
    """Weights, head and the records of the steps."""
    saved = read_own_checkpoint(run / "last.pt")["training"]
    assert saved["state"]["step"] == LAST_STEP, run
    steps = [row for row in numbers(run / "metrics.jsonl") if row["kind"] == "step"]
    return {**saved["net"], **saved["loss"]}, steps


def compare(name, found, expected):
    """Assert equal batches and schedules, and weights up to the order of sums."""
    assert [row["step"] for row in found[1]] == list(range(1, LAST_STEP + 1)), name
    for row, other in zip(found[1], expected[1], strict=True):
        assert (row["epoch"], row["learning_rate"]) == (other["epoch"], other["learning_rate"]), (
            name
        )
        np.testing.assert_allclose(row["loss"], other["loss"], rtol=1e-3, err_msg=name)
    for key, value in expected[0].items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            difference = (found[0][key] - value).abs().max() if value.numel() else torch.zeros(())
            # Statistics and weights accumulate the rounding of every step.
            assert difference <= 5e-3 * max(1.0, float(value.abs().max())), (
                f"{name}: {key} {difference}"
            )
