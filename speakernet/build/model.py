"""From the sections frontend, model and loss to the network and the loss: the only file that knows both."""

import inspect
import logging
from pathlib import Path
from typing import Any

from torch import nn

from speakernet.config.schema import Config
from speakernet.frontend import FEATURES, SpecAugment
from speakernet.losses import LOSSES
from speakernet.models import MODELS, SpeakerNet
from speakernet.models.importers import voxceleb_trainer
from speakernet.models.model_file import (
    ModelFile,
    is_model_file,
    load_initial_weights,
    load_model_file,
    model_file_contents,
    read_checkpoint,
)
from speakernet.registry import create, lookup
from speakernet.seeding import derive_seed

logger = logging.getLogger(__name__)

# Keys of the random streams that the network's own parts draw from, beside the run's seed.
SPEC_AUGMENT_STREAM = 101
DITHER_STREAM = 102
MINING_STREAM = 103


def build_model(config: Config) -> SpeakerNet:
    """The network that the config describes, with fresh weights.

    Raises:
        ValueError: unknown names or options, or parts that do not fit each other.
    """
    model, frontend = config.model, config.frontend
    lookup(MODELS, model.name, "model")
    return SpeakerNet(
        model=model.name,
        pooling=model.pooling,
        embedding_dim=model.embedding_dim,
        model_options=_model_options(config),
        front_end=frontend.name,
        front_end_options=_front_end_options(config),
        sample_rate=config.data.sample_rate,
        spec_augment=_spec_augment(config) if frontend.spec_augment else None,
    )


def load_for_scoring(config: Config, path: str | Path) -> ModelFile:
    """The network to score with: a model file says itself what it is, a foreign checkpoint is what the config says.

    Raises:
        ValueError: missing, damaged or unsafe; a foreign checkpoint of another architecture than the config's.
    """
    if is_model_file(read_checkpoint(path)):
        return load_model_file(path)
    net = build_model(config)
    load_initial_weights(net, None, path)
    normalizes = LOSSES[config.loss.name].normalize_embeddings
    return ModelFile(net.eval(), model_file_contents(net, loss_normalizes=normalizes))


def is_classic_checkpoint(path: Path) -> bool:
    """Whether a file that is there is a checkpoint of voxceleb_trainer; reading it runs no code from it.

    Raises:
        ValueError: damaged or unsafe.
    """
    return path.is_file() and voxceleb_trainer.is_ours_to_read(read_checkpoint(path))


def build_loss(config: Config, num_classes: int) -> nn.Module:
    """The loss that the config names, with a fresh head for `num_classes` speakers where it has one.

    Raises:
        ValueError: an unknown loss.
    """
    section = config.loss
    offered: dict[str, Any] = {
        "embedding_dim": config.model.embedding_dim,
        "num_classes": num_classes,
        "margin": section.margin,
        "scale": section.scale,
        "easy_margin": section.easy_margin,
        "hard_probability": section.hard_probability,
        "hard_rank": section.hard_rank,
        "initial_scale": section.initial_scale,
        "initial_bias": section.initial_bias,
        "seed": derive_seed(config.runtime.seed, MINING_STREAM),
    }
    declared = inspect.signature(lookup(LOSSES, section.name, "loss")).parameters
    options = {name: value for name, value in offered.items() if name in declared}
    return create(LOSSES, section.name, options, "loss")


def _model_options(config: Config) -> dict[str, Any]:
    options = dict(config.model.options)
    if "sinc_stride" in options and "sinc_stride" not in inspect.signature(MODELS[config.model.name]).parameters:
        # voxceleb_trainer hands it to every model, and all but RawNet3 leave it alone.
        logger.warning("sinc_stride has no effect on %s: it has no sinc filterbank", config.model.name)
        del options["sinc_stride"]
    return options


def _front_end_options(config: Config) -> dict[str, Any]:
    """The section's values that the chosen front end declares; what is `auto` is left to the model's definition."""
    section = config.frontend
    name = section.name
    if name == "auto":
        name = MODELS[config.model.name].front_end_defaults["name"]
    declared = inspect.signature(lookup(FEATURES, name, "front end")).parameters
    offered: dict[str, Any] = {
        "num_mels": section.num_mels,
        "log_input": section.log_input,
        "window": section.window,
        "preemphasis": section.preemphasis,
        "normalize": section.normalize,
        "scale": section.scale,
        "dither": section.dither,
        "seed": derive_seed(config.runtime.seed, DITHER_STREAM),
    }
    return {key: value for key, value in offered.items() if key in declared and value != "auto"}


def _spec_augment(config: Config) -> SpecAugment:
    section = config.frontend
    return SpecAugment(
        num_mel_masks=section.mel_masks,
        max_mel_width=section.mel_mask_width,
        num_frame_masks=section.frame_masks,
        max_frame_width=section.frame_mask_width,
        seed=derive_seed(config.runtime.seed, SPEC_AUGMENT_STREAM),
    )
