"""Validation during training: the lists that choose the best checkpoint and those that are watched,
scored with the current network.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from speakernet.assembly.inputs import Inputs, TrialInput
from speakernet.config import Config
from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import (
    Embedder,
    EmbeddingNet,
    Forward,
    Unions,
    one_pass,
    reader_threads,
)
from speakernet.evaluation.evaluate import evaluate, subset
from speakernet.evaluation.scoring import Backend
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.training.precision import DTYPES, choose_precision

logger = logging.getLogger(__name__)

VALIDATION_DRAWS = 100
VALIDATION_WORK = 20_000_000
"""Draws of speakers for a validation's interval, which is skipped if draws times trials exceed the
latter (2 s)."""


def build_validation(
    config: Config,
    inputs: Inputs,
    net: EmbeddingNet,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Callable[[int], dict[str, Any]]:
    """Return a function of the epoch that evaluates the network on the validation list or a fixed
    subset of it.

    It also evaluates the lists of data.test_lists that are due, and raises `Stopped` soon after
    `is_stopped` becomes true on any rank.
    """
    section = config.evaluation
    prepared = {}
    for name, trial_list in {"": inputs.validation, **inputs.beside(inputs.validation)}.items():
        prepared[name] = _prepare_validation(config, inputs.device, trial_list)
    embedder = build_embedder(config, net, inputs.device, section.validation_precision)
    # A validation may take minutes, longer than a cluster waits for a job that it stops.
    forward = replace(embedder.forward, is_stopped=is_stopped)
    embedder = replace(embedder, forward=forward)
    at_the_end = []
    for name in ("subtract_mean", "plda", "score_norm"):
        if getattr(section, name) not in (False, "none"):
            at_the_end.append(f"evaluation.{name}")
    if at_the_end:
        # Mean and cohort change with the network, so validation does without them.
        logger.info(
            "validation uses plain scores; only the final figures use %s", ", ".join(at_the_end)
        )
    unions = Unions()

    def is_due(name: str, epoch: int) -> bool:
        if not name:
            return True
        # If a list's epoch falls between two validations, the list is due at the second.
        interval = config.data.test_lists[name].test_interval or 1
        return epoch // interval > (epoch - config.training.test_interval) // interval

    def validate(epoch: int) -> dict[str, Any]:
        due = [name for name in prepared if is_due(name, epoch)]
        # Lists share recordings (VoxCeleb1-O is part of E), so those that are due together are
        # embedded in one pass.
        used = embedder
        if len(prepared) > 1:
            pairs = [(prepared[name].trials.recordings, prepared[name].source) for name in due]
            together = one_pass(pairs, unions)
            used = replace(embedder, embed_with=together)
        results = {name: evaluate(used, *prepared[name]).results for name in due}
        # No plot uses the DET band of a validation, which would make each record ten times as long.
        chosen_by = replace(results.pop(""), det_band=None)
        rows = {name: result.as_row(name) for name, result in results.items()}
        figures = replace(chosen_by, test_lists=rows or None).to_dict()
        return {**figures, "trials_checksum": prepared[""].trials.checksum}

    return validate


class _Validation(NamedTuple):
    """A list to validate on: the arguments of `evaluate` after the embedder."""

    backend: Backend
    trials: TrialList
    source: AudioSource
    speakers: Speakers
    seed: int


def _prepare_validation(
    config: Config, device: torch.device, trial_list: TrialInput
) -> _Validation:
    section = config.evaluation
    seed = config.runtime.seed
    # The same subset at every validation, because the best epoch is chosen by comparing them.
    trials = subset(trial_list.trials, section.max_trials, seed)
    if trials.labels is not None and len(np.unique(trials.labels)) < 2:
        raise ValueError(
            f"{trials.source}: the {len(trials):,} trials evaluated during training are all of one "
            "kind; expected targets and non-targets, so raise evaluation.max_trials (0: all) or "
            "correct the list"
        )
    # Its intervals are rough, because many draws take longer than all other figures.
    num_draws = min(VALIDATION_DRAWS, section.bootstrap_samples)
    if num_draws * len(trials) > VALIDATION_WORK:
        num_draws = 0
    options = section.model_copy(update={"score_norm": "none", "bootstrap_samples": num_draws})
    backend = Backend(options, config.loss.normalize_embeddings, device=device)
    speakers = speakers_of(trials, section.speaker_table)
    return _Validation(backend, trials, trial_list.source, speakers, seed)


def build_embedder(
    config: Config, net: EmbeddingNet, device: torch.device, precision: str
) -> Embedder:
    """An embedder with the options of section evaluation, in this precision (auto: that of
    training).
    """
    if precision == "auto":
        precision = config.runtime.precision
    name = choose_precision(precision, device).value
    autocast = functools.partial(torch.autocast, device.type, DTYPES[name], enabled=name != "no")
    # The cores of this process are counted only here.
    options = config.evaluation.model_copy(
        update={"num_workers": reader_threads(config.evaluation)}
    )
    return Embedder(net, options, Forward(device, autocast), name)
