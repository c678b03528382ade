"""What training by several processes adds to a network and its loss: shared batch norm, and a sharded head."""

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

FEWEST_SPEAKERS = 20_000
"""From which `loss.sharded: auto` shards: below, a head takes little memory, and its gradients travel with the rest."""
FEWEST_CROPS = 32
"""Of a process, from which `runtime.sync_batch_norm: auto` leaves it its own statistics, as published recipes do."""


def join_ranks(config: Config, net: nn.Module, loss: nn.Module, device: torch.device) -> SeveralProcesses:
    """Make `net` and `loss`, in place, parts of a run of several processes, and return what they exchange."""
    shared = choose_shared_norms(config, distributed.world_size())
    # The network of a second stage may have them already.
    count = synchronize_norms(net, device) if shared.value else 0
    logger.info("batch norm over the batch of all processes: %s; %s changed", shared, counted(count, "layer"))
    if config.runtime.parallel == "fsdp":
        return FullySharded(net, loss, device)
    shard_head(config.loss, loss)
    return SeveralProcesses(net, loss, device)


def choose_shared_norms(config: Config, num_processes: int) -> Choice[bool]:
    """Whether batch norm is over the batch of all processes, and why."""
    crops = config.data.batch_size * config.data.utterances_per_speaker // num_processes
    asked = config.runtime.sync_batch_norm
    reason = "as asked" if asked != "auto" else f"from {FEWEST_CROPS} a process normalises by its own"
    is_shared = asked == "on" or (asked == "auto" and crops < FEWEST_CROPS)
    return Choice(is_shared, f"{counted(crops, 'crop')} a process, {reason}")


def choose_sharding(options: LossOptions, num_classes: int, num_processes: int) -> Choice[bool]:
    """Whether the ranks keep a share each of a head of so many speakers, and why."""
    refusals = {
        "switched off": options.sharded == "off",
        "the loss has no head": not options.has_head,
    }
    for reason, holds in refusals.items():
        if holds:
            return Choice(False, reason)
    several, is_asked = f"{num_classes:,} speakers on {num_processes} processes", options.sharded == "on"
    reason = f"{several}, as asked" if is_asked else f"{several}; it pays from {FEWEST_SPEAKERS:,}"
    return Choice(is_asked or num_classes >= FEWEST_SPEAKERS, reason)


def shard_head(options: LossOptions, loss: nn.Module) -> None:
    """Let each rank keep a share of the speakers, in place, if that was asked for or pays.

    Called when the whole head has its first weights, before the optimizer is made.
    """
    # The second stage trains the head of the first.
    if sharded_names(loss):
        return
    choice = choose_sharding(options, getattr(loss, "num_classes", 0), distributed.world_size())
    asked_in_vain = options.sharded == "on" and not choice.value
    level = logging.WARNING if asked_in_vain else logging.INFO if choice.value else logging.DEBUG
    logger.log(level, "loss.sharded: %s: %s", options.sharded, choice)
    if choice.value:
        shard(loss, distributed.rank(), distributed.world_size())
