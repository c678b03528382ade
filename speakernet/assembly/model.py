"""From the sections frontend, model and loss to the network and the loss: the only file that imports both."""

from pathlib import Path

from torch import nn

from speakernet.assembly.inputs import voices_of
from speakernet.checkpoint import read_checkpoint
from speakernet.config.schema import Config
from speakernet.losses.options import LOSSES
from speakernet.models.model_file import (
    ModelFile,
    is_model_file,
    load_initial_weights,
    model_file_contents,
    model_of,
)
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create, lookup
from speakernet.parallel import distributed
from speakernet.random import derive_seed

# Key of the random stream for mining triplets, next to the run's seed.
MINING_STREAM = 103


def build_model(config: Config) -> SpeakerNet:
    """The network that the config describes, with fresh weights."""
    net = SpeakerNet(config.model, config.frontend, config.data.sample_rate, config.runtime.seed)
    if (voices := voices_of(config)).has_warps:
        net.front_end.warp(voices.warps)
    return net


def load_for_scoring(config: Config, path: str | Path) -> ModelFile:
    """The network to score with: a model file describes it, the config describes that of a foreign checkpoint."""
    # Other ranks' machines need not have the run folder.
    contents = distributed.from_main(lambda: read_checkpoint(path))
    if is_model_file(contents):
        return model_of(contents, path)
    net = build_model(config)
    load_initial_weights(net, None, path)
    return ModelFile(net.eval(), model_file_contents(net, loss_normalizes=config.loss.normalize_embeddings))


def build_loss(config: Config, num_classes: int) -> nn.Module:
    """The loss that the config names, with a fresh head for `num_classes` speakers if it has one."""
    loss: nn.Module = create(
        lookup(LOSSES, config.loss.name, "loss"),
        config.loss,
        embedding_dim=config.model.embedding_dim,
        num_classes=num_classes,
        seed=derive_seed(config.runtime.seed, MINING_STREAM),
    )
    return loss
