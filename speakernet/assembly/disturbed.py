"""Uses of degraded audio after training: the sweep over degraded trials, and PLDA for other
microphones.

Few recipes use either, so `speakernet.assembly.evaluation` imports this file only if one does.
"""

import logging
from pathlib import Path

import numpy as np

from speakernet import distributed
from speakernet.assembly.inputs import Inputs
from speakernet.checkpoint import write_checkpoint
from speakernet.config import Config
from speakernet.data.augment.banks import RirBank, device_responses, noise_banks
from speakernet.data.sources import AudioCache
from speakernet.evaluation import adaptation
from speakernet.evaluation.embedding import Forward, embed_utterances
from speakernet.evaluation.scoring import WHOLE
from speakernet.evaluation.sweep import DegradedSource, Step, augmenting, sweep_steps
from speakernet.inference.adapt import adapted_contents
from speakernet.models.model_file import ModelFile
from speakernet.models.speaker_net import fold_network
from speakernet.random import derive_seed

logger = logging.getLogger(__name__)

PLDA_STREAM = 6204
SHRINKAGE = 0.5
"""Chosen on held-out training speakers; 0.3 gives the same result (docs/experiments.md)."""


def build_sweep(config: Config) -> dict[str, list[Step]]:
    """The steps of the kinds in evaluation.sweep, built before anything slow starts."""
    kinds = config.evaluation.sweep
    augment = config.augment
    rate = config.data.sample_rate
    cache = AudioCache(config.data.cache_megabytes << 20)
    # Opened only if needed, because reading the headers of a noise collection takes a while.
    banks = (
        noise_banks(augment.noise_path, rate, cache)
        if "noise" in kinds and augment.noise_path
        else {}
    )
    wants_rirs = {"reverb", "distance"} & set(kinds) and augment.rir_path
    # Aligned regardless of the training style: shifting the speech is not reverberation.
    rirs = RirBank(augment.rir_path, rate, cache, is_aligned=True) if wants_rirs else None
    return sweep_steps(kinds, banks, rirs, sample_rate=rate, seed=config.runtime.seed)


def fit_plda(config: Config, inputs: Inputs, model: ModelFile, path: Path) -> None:
    """Add PLDA, fitted on the training list (with the run's simulated microphones), to a model file
    that has none.
    """
    # A finished run that is started again already has PLDA. Fitting it again could change the
    # fingerprint, and stores of people would no longer match the model.
    if model.contents.get("adaptation"):
        return
    rows, source = inputs.training
    augment = config.augment
    rate = config.data.sample_rate
    if augment.microphone_probability:
        devices = (
            device_responses(augment.microphone_path, rate) if augment.microphone_path else None
        )
        # Every file is filtered: if some were left as recorded, PLDA would mistake the microphone
        # for the voice.
        section = augment.model_copy(
            update={"categories": [], "components": {}, "microphone_probability": 1.0}
        )
        seed = derive_seed(config.runtime.seed, PLDA_STREAM)
        through = augmenting({}, None, section, sample_rate=rate, seed=seed, devices=devices)
        source = DegradedSource(source, rows.paths, Step("", through))
    net = fold_network(model.net.to(inputs.device))
    embeddings = embed_utterances(
        net, source, rows.paths, WHOLE, Forward(inputs.device), description="embedding for PLDA"
    )
    # All ranks share the embedding, but only one may write the file.
    if distributed.is_main():
        # In float64, because the covariances are inverted.
        fitted = adaptation.plda(
            embeddings[:, 0].astype(np.float64), rows.labels, shrinkage=SHRINKAGE
        )
        facts = {
            "method": f"plda {SHRINKAGE}",
            "recordings": len(rows),
            "speakers": len(rows.speakers),
        }
        write_checkpoint(
            path, {**model.contents, **adapted_contents(model.contents, model.net, fitted, facts)}
        )
        logger.info(
            "wrote PLDA, fitted on %d recordings of %d speakers, to %s",
            len(rows),
            len(rows.speakers),
            path,
        )
