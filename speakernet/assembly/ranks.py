"""Adapts network and loss to a run of several processes."""

import logging

import torch
from torch import nn

from speakernet import distributed
from speakernet.config.schema import Config
from speakernet.losses.sharded import shard_head
from speakernet.options import Choice
from speakernet.parallel.sync_norm import synchronize_norms
from speakernet.terminal import counted
from speakernet.training.exchange import SeveralProcesses

logger = logging.getLogger(__name__)

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
        # Late: its library imports the compiler.
        from speakernet.training.fully_sharded import FullySharded

        return FullySharded(net, loss, device)
    # The head of many speakers is larger than the network, so each rank holds some of its rows.
    shard_head(config.loss, loss)
    return SeveralProcesses(net, loss, device)


def choose_shared_norms(config: Config, num_processes: int) -> Choice[bool]:
    """Whether batch norm uses the batch of all processes, and why."""
    # Statistics of few crops are noisy. With many crops, sharing them gains little, and ranks would
    # wait for each other in every layer.
    crops = config.data.utterances_per_batch // num_processes
    asked = config.runtime.sync_batch_norm
    reason = "as configured" if asked != "auto" else f"shared below {MIN_CROPS}"
    is_shared = asked == "on" or (asked == "auto" and crops < MIN_CROPS)
    return Choice(is_shared, f"{counted(crops, 'crop')} per process, {reason}")
