"""Processes that each hold a shard of a pretrained backbone equal one process, and resume in any
number.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("peft", reason="peft is not installed (pip install -e '.[test-all]')")

from speakernet.assembly.runs import train_experiment
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config import load_config
from tests.models.test_pretrained import make
from tests.parallel.several import in_several
from tests.parallel.test_any_number import stopped
from tests.tiny_recipe import write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers", "peft")]
STEPS_OF_EPOCH = 8
CHANGES = yaml.safe_load("""
training: {max_epochs: 2, test_interval: 1, log_interval: 1, keep_checkpoints: 0}
# AdamW would amplify the rounding of gradients that cancel to full steps.
optimizer: {name: sgd, learning_rate: 0.02}
loss: {name: aamsoftmax}
evaluation: {eval_frames: 40, num_crops: 1, bootstrap_samples: 0}
runtime: {parallel: fsdp}
""")


def train(name, *options, until=0):
    """Train in the folder `name`, to the end or until a step."""
    loaded = load_config(
        ["--config", f"{name.partition('-')[0]}.yaml", "--save_path", name, *options]
    )
    if not until:
        train_experiment(loaded)
        return
    with stopped(until):
        train_experiment(loaded)


def two():
    """In two processes: uninterrupted runs of all weights and of adapters, the rest of a run of
    one, part of a run.
    """
    train("all-2")
    train("lora-2")
    train("all-1-2")
    train("all-2-1", until=STEPS_OF_EPOCH + 3)


def test_shards_equal_one_process(tiny_corpus, tmp_path):
    folder = make(tmp_path / "wavlm", "wavlm")
    config = json.loads((folder / "config.json").read_text())
    # Each process would draw its own dropout.
    still = dict.fromkeys([name for name in config if name.endswith("dropout")], 0.0)
    (folder / "config.json").write_text(json.dumps({**config, **still}))
    for name in ("all", "lora"):
        options = {"backbone": str(folder), "trained": name, "lora_rank": 2}
        model = {
            "name": "Pretrained",
            "pooling": "MHFA",
            "options": options,
            "pooling_options": {"heads": 3},
        }
        write_recipe(
            tmp_path / f"{name}.yaml", tiny_corpus, tmp_path / "unused", CHANGES, {"model": model}
        )
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        train("all-1")
        train("lora-1")
        train("all-1-2", until=STEPS_OF_EPOCH + 3)
        in_several(__file__, "two", tmp_path)
        shutil.copytree("all-2-1", "kept")
        train("all-2-1")
    finally:
        os.chdir(before)
    for name, expected in (
        ("all-2", "all-1"),
        ("lora-2", "lora-1"),
        ("all-1-2", "all-1"),
        ("all-2-1", "all-1"),
    ):
        found, wanted = (outcome_of(tmp_path / run) for run in (name, expected))
        # Shards sum in another order: differences up to 1.4e-5 were measured.
        np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=2e-5, err_msg=name)
        for section in ("net", "loss", "best"):
            assert found[section].keys() == wanted[section].keys(), name
            for key, value in wanted[section].items():
                torch.testing.assert_close(
                    found[section][key], value, atol=1e-5, rtol=1e-4, msg=f"{name} {key}"
                )
    assert type(outcome_of(tmp_path / "kept")["net"]["pooling.keys.weight"]) is torch.Tensor


def outcome_of(run):
    """Loss of each step, weights of last.pt and best.pt."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    saved = read_own_checkpoint(run / "last.pt")["training"]
    tensors = {
        part: {k: v for k, v in saved[part].items() if isinstance(v, torch.Tensor)}
        for part in ("net", "loss")
    }
    losses = [row["loss"] for row in lines if row["kind"] == "step"]
    return {**tensors, "best": read_own_checkpoint(run / "best.pt")["weights"], "losses": losses}
