"""Interim version by the lead (05:12), to unblock training; EVAL replaces this file. Keep both functions' signatures.

Keep `load_for_scoring` too: it also reads voxceleb_trainer's checkpoints (`--eval --model NAME --initial_model FILE`),
and `contents["loss_normalizes"]` says whether mean_distance normalises.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from speakernet.build.data import build_source
from speakernet.build.model import load_for_scoring
from speakernet.config import Config
from speakernet.data.lists import read_trials
from speakernet.evaluation.embedding import EmbeddingNet
from speakernet.evaluation.evaluate import Evaluation, evaluate


def build_validation(config: Config, net: EmbeddingNet, device: torch.device) -> Callable[[], dict[str, Any]]:
    """A callable that evaluates the network on the validation list."""
    data = config.data
    trials = read_trials(data.validation_list)
    source = build_source(config, data.validation_path)
    return lambda: evaluate(net, trials, source, **_options(config, device), bootstrap_samples=0).results


def run_evaluation(config: Config, model_path: str | Path) -> Evaluation:
    """Score the test list with a model file."""
    device = torch.device("cuda" if torch.cuda.is_available() and config.runtime.device != "cpu" else "cpu")
    model = load_for_scoring(config, model_path)
    model.net.to(device)
    data = config.data
    return evaluate(
        model.net,
        read_trials(data.test_list),
        build_source(config, data.test_path),
        is_normalised=model.contents["loss_normalizes"],
        **_options(config, device),
    )


def _options(config: Config, device: torch.device) -> dict[str, Any]:
    section = config.evaluation
    workers = 2 if section.num_workers == "auto" else section.num_workers
    return {
        "score": section.score, "eval_frames": section.eval_frames, "num_crops": section.num_crops,
        "batch_size": section.batch_size, "num_workers": workers, "device": device, "autocast": contextlib.nullcontext,
    }  # fmt: skip
