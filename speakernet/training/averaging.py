"""Averages of weights: the exponential moving average during training, and the mean of the last epochs at its end.

Batch-norm statistics cannot be averaged with the weights (they belong to other activations), so `recompute_statistics`
measures them anew.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from speakernet.checkpoint import read_own_checkpoint

logger = logging.getLogger(__name__)


class WeightAverage:
    """Exponential moving average of a network's weights, kept beside it.

    Early on the average follows more closely, `min(decay, (1 + steps) / (10 + steps))`, so that the random start is
    soon forgotten. Buffers (batch-norm statistics) are averaged too where they are floating point, else copied.
    With decay 0 it keeps nothing and does nothing. (torch's `AveragedModel` begins with a copy of the first weights and
    has no such early stretch, copies the whole module with what was compiled into it, and cannot change places.)

    >>> net = nn.Linear(1, 1, bias=False); _ = net.weight.data.fill_(1.0)
    >>> average = WeightAverage(net, decay=0.5); average.update(); _ = net.weight.data.fill_(0.0)
    >>> average.update()
    >>> with average.applied():
    ...     round(net.weight.item(), 4)
    0.1818
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self._steps = 0
        self._live = _tensors(net) if decay > 0 else []
        self._floats = [index for index, tensor in enumerate(self._live) if tensor.is_floating_point()]
        self._kept = [tensor.detach().clone() for tensor in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights of now."""
        if not self._live:
            return
        # The first update is the start itself: (1 + 0) / (10 + 0) of the old would be a share of nothing learned.
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        self._steps += 1
        floats = [self._kept[index] for index in self._floats]
        torch._foreach_lerp_(floats, [self._live[index] for index in self._floats], 1.0 - decay)
        for index, tensor in enumerate(self._live):
            if not tensor.is_floating_point():
                self._kept[index].copy_(tensor)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the network holds the average; afterwards its own weights again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of updates."""
        return {"steps": self._steps, "kept": list(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was taken; from the network's weights of now where no average was kept then."""
        if not self._live:
            return
        self._steps = int(state["steps"])
        for kept, saved in zip(self._kept, state["kept"] or self._live, strict=True):
            kept.copy_(saved)

    @torch.no_grad()
    def _swap(self) -> None:
        for live, kept in zip(self._live, self._kept, strict=True):
            # One tensor at a time: the whole network would be in memory three times.
            held = live.detach().clone()
            live.copy_(kept)
            kept.copy_(held)


def average_weights(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The mean of several state dictionaries, entry by entry; what is not floating point comes from the last.

    Raises:
        ValueError: no state, or their keys differ.
    """
    total: dict[str, torch.Tensor] = {}
    count = 0
    latest: dict[str, Any] = {}
    for state in states:
        if count and state.keys() != latest.keys():
            raise ValueError("the checkpoints to average belong to different models (their weights have other names)")
        latest = state
        count += 1
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                # float64: the sum of many float32 values would lose bits.
                total[key] = total[key] + value.double() if key in total else value.double()
    if count == 0:
        raise ValueError("no checkpoint to average: none has been kept in checkpoints/")
    return {key: (total[key] / count).to(value.dtype) if key in total else value for key, value in latest.items()}


def average_checkpoints(paths: Sequence[Path], wanted: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The mean weights and the mean head of the last `wanted` of `paths`; no head where one of them holds none.

    Raises:
        ValueError: see `average_weights`.
    """
    taken = paths[-wanted:]
    if len(taken) < wanted:
        names = ", ".join(path.name for path in taken)
        logger.warning("%d checkpoints to average, %d there: %s", wanted, len(taken), names)
    # File after file: all of them at once would take the memory of as many networks.
    weights = average_weights(read_own_checkpoint(path)["weights"] for path in taken)
    if not all("head" in read_own_checkpoint(path) for path in taken):
        return weights, None
    return weights, average_weights(read_own_checkpoint(path)["head"] for path in taken)


def recompute_statistics(net: nn.Module, batches: Iterable[torch.Tensor]) -> int:
    """Measure the batch-norm statistics anew over `batches` of waveforms; returns how many batches there were.

    The statistics are plain means over the batches, not a moving average.
    """
    count = 0

    def counted() -> Iterator[torch.Tensor]:
        nonlocal count
        for waveforms in batches:
            count += 1
            yield waveforms

    update_bn(counted(), net)
    return count


def _tensors(net: nn.Module) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers()]
