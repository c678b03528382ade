"""Prepare a network and its loss for training by several processes: shared batch norm and a sharded
head.
"""

import logging

import torch
from torch import nn

from speakernet.config.schema import Config
from speakernet.losses.options import LossOptions
from speakernet.losses.sharded import shard
from speakernet.options import Choice
from speakernet.parallel import distributed
from speakernet.parallel.sharding import sharded_names
from speakernet.parallel.sync_norm import synchronize_norms
from speakernet.terminal import counted
from speakernet.training.fully_sharded import FullySharded
from speakernet.training.ranks import SeveralProcesses

logger = logging.getLogger(__name__)

MIN_SHARDED_CLASSES = 20_000
"""`loss.sharded: auto` shards from this number of classes on; a smaller head takes little memory
and little traffic."""
MIN_CROPS = 32
"""Crops per process from which `runtime.sync_batch_norm: auto` keeps statistics local, as published
recipes do."""


def join_ranks(
    config: Config, net: nn.Module, loss: nn.Module, device: torch.device
) -> SeveralProcesses:
    """Adapt `net` and `loss` in place to a run of several processes; return what exchanges their
    gradients.
    """
    shared = choose_shared_norms(config, distributed.world_size())
    # In a later stage, the network may already have shared norms.
    count = synchronize_norms(net, device) if shared.value else 0
    logger.info(
        "batch norm over the batch of all processes: %s; %s changed",
        shared,
        counted(count, "layer"),
    )
    if config.runtime.parallel == "fsdp":
        return FullySharded(net, loss, device)
    shard_head(config.loss, loss)
    return SeveralProcesses(net, loss, device)


def choose_shared_norms(config: Config, num_processes: int) -> Choice[bool]:
    """Whether batch norm uses the batch of all processes, and why."""
    crops = config.data.batch_size * config.data.utterances_per_speaker // num_processes
    asked = config.runtime.sync_batch_norm
    reason = "as configured" if asked != "auto" else f"shared below {MIN_CROPS}"
    is_shared = asked == "on" or (asked == "auto" and crops < MIN_CROPS)
    return Choice(is_shared, f"{counted(crops, 'crop')} per process, {reason}")


def choose_sharding(options: LossOptions, num_classes: int, num_processes: int) -> Choice[bool]:
    """Whether each rank keeps only a share of the head, and why."""
    if options.sharded == "off" or not options.has_head:
        return Choice(False, "switched off" if options.has_head else "the loss has no head")
    several = f"{num_classes:,} classes on {num_processes} processes"
    is_asked = options.sharded == "on"
    reason = (
        f"{several}, as configured"
        if is_asked
        else f"{several}; worthwhile from {MIN_SHARDED_CLASSES:,}"
    )
    return Choice(is_asked or num_classes >= MIN_SHARDED_CLASSES, reason)


def shard_head(options: LossOptions, loss: nn.Module) -> None:
    """Shard the head in place, so that each rank keeps a share of the speakers, if configured or
    worthwhile.

    Must be called after the whole head is initialised and before the optimizer is built.
    """
    # Later stages train the head of the first.
    if sharded_names(loss):
        return
    choice = choose_sharding(options, getattr(loss, "num_classes", 0), distributed.world_size())
    level = logging.INFO if choice.value else logging.DEBUG
    logger.log(level, "loss.sharded: %s: %s", options.sharded, choice)
    if choice.value:
        shard(loss, distributed.rank(), distributed.world_size())
