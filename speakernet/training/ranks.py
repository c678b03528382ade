"""Several processes that share every batch: what a training step exchanges between them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from speakernet.parallel import distributed
from speakernet.parallel.sharding import sharded_names
from speakernet.parallel.sync_norm import SynchronizedNorm
from speakernet.training.step import NUM_NUMBERS, NUM_REQUESTS, OneProcess


class SeveralProcesses(OneProcess):
    """Ranks that share every batch, by DistributedDataParallel.

    They exchange nothing but gradients: loss, accuracy and requests travel as the gradient of a small parameter of its
    own, in the same collectives.
    """

    def __init__(self, net: nn.Module, loss: nn.Module, device: torch.device) -> None:
        super().__init__(net)
        self._all = _Everything(net, loss, device)
        self._device = device
        self._parallel: DistributedDataParallel | None = None
        self._trained: list[bool] = []
        # On a GPU the host reads a step's requests one step later, when they have long been there.
        self._on_host: tuple[Tensor, torch.cuda.Event] | None = None
        self.agreed = [False] * NUM_REQUESTS
        self._no_wishes = torch.zeros(NUM_REQUESTS, device=device)

    def begin_epoch(self) -> None:
        """Build the buckets of gradients again if other parameters are trained than before."""
        trained = [one.requires_grad for one in self._all.parameters()]
        if self._parallel is not None and trained == self._trained:
            return
        self._trained = trained
        # Each rank has its own share of these, with the whole gradient of it.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._all, sharded_names(self._all))
        self._parallel = DistributedDataParallel(
            self._all,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        # Not before each step: nobody reads running statistics until they are shared (`share_statistics`). As an
        # attribute, since torch 2.14 warns of the argument and older versions have no other.
        self._parallel.broadcast_buffers = False

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are summed on each rank until the last micro-batch."""
        assert self._parallel is not None, "an epoch was begun"
        return contextlib.nullcontext() if is_last else self._parallel.no_sync()

    def embed(self, waveforms: Tensor) -> Tensor:
        """As alone, with the exchange of gradients prepared."""
        assert self._parallel is not None
        return self._parallel(waveforms)  # type: ignore[no-any-return]

    def rows_of_all(self, rows: Tensor, shares: Sequence[int]) -> Tensor:
        """Gathered, with gradients."""
        return gather_rows(rows, shares)

    def backward(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass; at the last micro-batch the gradients of all ranks are averaged meanwhile."""
        # The gradient of a sum of products is what the parameter is multiplied by.
        (value + (self._all.messages * self._said(numbers, is_last)).sum()).backward()  # type: ignore[no-untyped-call]

    def totals(self, numbers: Tensor) -> Tensor:
        """The messages of all ranks, averaged."""
        assert self._all.messages.grad is not None
        means = self._all.messages.grad.clone()
        self._all.messages.grad = None
        self._read(means[NUM_NUMBERS:])
        return means[:NUM_NUMBERS]

    def share_statistics(self) -> None:
        """Rank 0's, if each rank has its own."""
        for norm in self._own_norms():
            for buffer in norm.buffers():
                torch_distributed.broadcast(buffer, src=0)

    def close(self) -> None:
        """Its buckets are as large as the gradients, which a second stage needs."""
        self._parallel = None

    def _said(self, numbers: Tensor, is_last: bool) -> Tensor:
        """The messages of this rank: numbers of a micro-batch and, with the last one, requests."""
        requests = self.requests() if is_last else ()
        wishes = self._no_wishes
        if any(requests):
            # Only then: even a copy that nobody waits for costs the host time in every step.
            wishes = torch.tensor(requests, dtype=numbers.dtype).to(self._device, non_blocking=True)
        return torch.cat([numbers, wishes])

    def _read(self, requests: Tensor) -> None:
        if self._device.type == "cpu":
            self.agreed = [one > 0 for one in requests.tolist()]
            return
        if self._on_host is not None:
            copy, is_there = self._on_host
            is_there.synchronize()
            self.agreed = [one > 0 for one in copy.tolist()]
        copy = torch.empty(requests.shape, dtype=requests.dtype, pin_memory=True)
        copy.copy_(requests, non_blocking=True)
        self._on_host = copy, torch.cuda.current_stream(self._device).record_event()

    def _own_norms(self) -> list[nn.Module]:
        """The norms whose statistics are each rank's own."""
        shared = (nn.SyncBatchNorm, SynchronizedNorm)
        norms = [one for one in self._all.modules() if isinstance(one, _BatchNorm) and not isinstance(one, shared)]
        return [one for one in norms if one.track_running_stats]


class _Everything(nn.Module):
    """All that learns, for the exchange of its gradients; the loss is computed outside."""

    def __init__(self, net: nn.Module, loss: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.messages = nn.Parameter(torch.zeros(NUM_NUMBERS + NUM_REQUESTS, device=device))

    def forward(self, waveforms: Tensor) -> Tensor:
        return self.net(waveforms)  # type: ignore[no-any-return]


def gather_rows(rows: Tensor, shares: Sequence[int]) -> Tensor:
    """The rows of all ranks, one rank's after another's.

    Every rank is to compute the same loss from them. In the backward pass each takes the gradient of its own rows times
    the number of ranks, so that the mean over the ranks, which DistributedDataParallel takes, is the gradient.

    Returns:
        (all rows, …); in one process `rows` itself.
    """
    if not distributed.is_distributed():
        return rows
    gathered: Tensor = _GatherRows.apply(rows, tuple(shares))  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: tuple[int, ...]) -> Tensor:
        rank = distributed.rank()
        assert shares[rank] == len(rows), "every rank knows the shares"
        ctx.begin, ctx.end, ctx.world_size = sum(shares[:rank]), sum(shares[: rank + 1]), len(shares)
        # Of equal length, which every backend can gather: the longest share's.
        padded = rows.new_zeros((max(shares), *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in shares]
        torch_distributed.all_gather(gathered, padded)
        return torch.cat([one[:count] for one, count in zip(gathered, shares, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.begin : ctx.end] * ctx.world_size, None
