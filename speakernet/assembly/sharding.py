"""Whether the processes of a run share the head of its loss, and why."""

import logging

from torch import nn

from speakernet.data.choices import Choice
from speakernet.losses.options import LossOptions
from speakernet.parallel import distributed
from speakernet.parallel.sharding import sharded_names

logger = logging.getLogger(__name__)

FEWEST_SPEAKERS = 20_000
"""From which `auto` shares: below, a head takes little memory, and its gradients travel beside the network's."""


def share_head(options: LossOptions, loss: nn.Module) -> None:
    """Let each process keep a share of the speakers, in place, where that was asked for or pays.

    Call it when the whole head has its first weights, before the optimizer is made.

    Raises:
        ValueError: shares were asked for, and there are fewer speakers than processes.
    """
    # The second stage trains the head of the first.
    if sharded_names(loss):
        return
    choice = choose_sharding(options, getattr(loss, "num_classes", 0), distributed.world_size())
    asked_in_vain = options.sharded == "on" and not choice.value
    level = logging.WARNING if asked_in_vain else logging.INFO if choice.value else logging.DEBUG
    logger.log(level, "loss.sharded: %s: %s", options.sharded, choice)
    if choice.value:
        loss.shard(distributed.rank(), distributed.world_size())  # type: ignore[operator]


def choose_sharding(options: LossOptions, num_classes: int, num_processes: int) -> Choice[bool]:
    """Whether to share a head of so many speakers, and why."""
    if options.sharded == "off":
        return Choice(False, "switched off")
    if num_processes == 1:
        return Choice(False, "one process keeps every speaker")
    if options.sharded == "on":
        return Choice(True, f"each of {num_processes} processes keeps a share of {num_classes:,} speakers, as asked")
    if not options.has_head:
        return Choice(False, "the loss has no head")
    if num_classes < FEWEST_SPEAKERS:
        return Choice(False, f"{num_classes:,} speakers; from {FEWEST_SPEAKERS:,} on it pays")
    return Choice(True, f"{num_classes:,} speakers on {num_processes} processes; from {FEWEST_SPEAKERS:,} on it pays")
