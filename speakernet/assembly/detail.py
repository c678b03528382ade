"""What a report shows beyond one figure: slices and the robustness sweep, as the section evaluation asks for them."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from speakernet.config import Config
from speakernet.data.augment.banks import noise_banks, rir_bank
from speakernet.data.sources import AudioCache, AudioSource
from speakernet.evaluation.embedding import Embedder, reader_threads
from speakernet.evaluation.evaluate import Evaluation, score_trials
from speakernet.evaluation.results import Results
from speakernet.evaluation.scoring import Backend
from speakernet.evaluation.slices import all_slices, read_metadata
from speakernet.evaluation.sweep import Step, run_sweep, sweep_steps

logger = logging.getLogger(__name__)

MAX_DRAWS = 200
"""Draws of speakers for the interval of each slice and step: there are many of them."""


def build_sweep(config: Config) -> dict[str, list[Step]]:
    """The steps that evaluation.sweep names, built before anything slow starts.

    Raises:
        ValueError: a kind whose noise or RIRs are not there.
    """
    kinds, augment = config.evaluation.sweep, config.augment
    if not kinds:
        return {}
    rate = config.data.sample_rate
    cache = AudioCache(config.data.cache_megabytes << 20)
    banks = noise_banks(augment.noise_path, rate, cache) if "noise" in kinds and augment.noise_path else {}
    wants_rirs = "reverb" in kinds and augment.rir_path
    # Aligned whatever the style of training: a shift of the speech would not be reverberation.
    rirs = rir_bank(augment.rir_path, rate, cache, is_aligned=True) if wants_rirs else None
    return sweep_steps(kinds, banks, rirs, sample_rate=rate, seed=config.runtime.seed)


def check_slices(config: Config) -> None:
    """Refuse a metadata file that cannot be read, before anything slow starts.

    Raises:
        ValueError: no such file, or no column `path`.
    """
    metadata = config.evaluation.metadata
    if not metadata:
        return
    if not Path(metadata).is_file():
        raise ValueError(f"evaluation.metadata: no such file {metadata}; give a CSV with a column 'path'")
    read_metadata(metadata, ())


def with_detail(
    evaluation: Evaluation,
    config: Config,
    source: AudioSource,
    embedder: Embedder,
    backend: Backend,
    steps: Mapping[str, Sequence[Step]],
) -> Results:
    """The results of a labelled list with slices and sweep; every process takes part, for embedding is shared.

    Raises:
        ValueError: slices by something that the list or its metadata does not have.
    """
    trials, scores, section, speakers = evaluation.trials, evaluation.scores, config.evaluation, evaluation.speakers
    if evaluation.results.why_no_eer or speakers is None:
        return evaluation.results
    num_draws, seed = min(MAX_DRAWS, section.bootstrap_samples), config.runtime.seed
    num_threads = reader_threads(section)
    slices = all_slices(
        trials, scores, speakers, source, section, num_threads=num_threads, num_draws=num_draws, seed=seed
    )
    if not steps:
        return dataclasses.replace(evaluation.results, slices=slices)
    unkept = dataclasses.replace(embedder, stores=())

    def score(degraded: AudioSource) -> np.ndarray:
        return score_trials(unkept, backend, trials, degraded).scores

    sweep = run_sweep(steps, source, score, trials, scores, speakers, num_draws=num_draws, seed=seed)
    return dataclasses.replace(evaluation.results, slices=slices, sweep=sweep)
