"""What a training step exchanges between several processes that share every batch."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from speakernet import distributed
from speakernet.parallel.sharding import sharded_names
from speakernet.parallel.sync_norm import SYNCHRONIZED
from speakernet.training.step import NUM_NUMBERS, NUM_WISHES, OneProcess


# Why loss and wishes travel as a gradient. A collective of its own for three numbers costs as much
# time as one for a megabyte, in every step. DistributedDataParallel averages gradients in buckets
# anyway, so the numbers of a step are made the gradient of a small parameter that is in one of
# them. On a GPU the host must not wait for them either: it reads the wishes of a step in the next
# one, which is why a run stops one step later there.
class SeveralProcesses(OneProcess):
    """Ranks that share every batch, by DistributedDataParallel.

    They exchange only gradients: loss, accuracy and wishes travel as the gradient of an extra small
    parameter, in the same collectives.
    """

    is_alone = False

    def __init__(self, net: nn.Module, loss: nn.Module, device: torch.device) -> None:
        super().__init__(net)
        self._all = _Everything(net, loss, device)
        self._device = device
        self._parallel: DistributedDataParallel | None = None
        self._trained: list[bool] = []
        # On a GPU the host reads a step's wishes one step later, when the copy has long finished.
        self._on_host: tuple[Tensor, torch.cuda.Event] | None = None
        self._agreed = [False] * NUM_WISHES
        self._no_wishes = torch.zeros(NUM_WISHES, device=device)

    def begin_epoch(self) -> None:
        """Rebuild the gradient buckets if the set of trained parameters has changed."""
        trained = [parameter.requires_grad for parameter in self._all.parameters()]
        if self._parallel is not None and trained == self._trained:
            return
        self._trained = trained
        # Each rank has its own rows of these, and computes the whole gradient of those rows.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self._all, sharded_names(self._all)
        )
        self._parallel = DistributedDataParallel(
            self._all,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        # No broadcast before each step: running statistics are not read until `share_statistics`
        # shares them. Set as an attribute because torch 2.14 warns about the argument and older
        # versions lack its replacement.
        self._parallel.broadcast_buffers = False
        self.embed = self._parallel

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are summed on each rank until the last micro-batch."""
        assert self._parallel is not None, "begin_epoch was called"
        return contextlib.nullcontext() if is_last else self._parallel.no_sync()

    def rows_of_all(self, rows: Tensor, rank_sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, gathered with gradients."""
        return _GatherRows.apply(rows, tuple(rank_sizes))  # type: ignore[no-any-return, no-untyped-call]

    def backward(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass; at the last micro-batch it also averages the gradients of all ranks."""
        # The gradient of (messages * sent).sum() by the parameter `messages` is `sent`.
        sent = self._message(numbers, is_last)
        (value + (self._all.messages * sent).sum()).backward()  # type: ignore[no-untyped-call]

    def totals(self, numbers: Tensor) -> Tensor:
        """The messages of all ranks, averaged."""
        assert self._all.messages.grad is not None
        means = self._all.messages.grad.clone()
        self._all.messages.grad = None
        return self._read_message(means)

    def agreed_wishes(self) -> Sequence[bool]:
        """What any rank wished; on a GPU, in the step before."""
        return self._agreed

    def share_statistics(self) -> None:
        """Broadcast rank 0's statistics of norms that are not synchronised."""
        for norm in self._all.modules():
            if isinstance(norm, _BatchNorm) and not isinstance(norm, SYNCHRONIZED):
                for buffer in norm.buffers() if norm.track_running_stats else ():
                    torch_distributed.broadcast(buffer, src=0)

    def close(self) -> None:
        """Free the buckets: they take as much memory as the gradients, which the next stage
        needs.
        """
        self._parallel = None
        self.embed = self._all

    def _message(self, numbers: Tensor, is_last: bool) -> Tensor:
        """This rank's message: the numbers of a micro-batch and, with the last one, wishes."""
        wishes = self.wishes() if is_last else ()
        sent = self._no_wishes
        if any(wishes):
            # Only if needed: even an asynchronous copy costs host time in every step.
            sent = torch.tensor(wishes, dtype=numbers.dtype).to(self._device, non_blocking=True)
        return torch.cat([numbers, sent])

    def _read_message(self, means: Tensor) -> Tensor:
        """Take the wishes from the mean of all messages, and return the numbers, (3,)."""
        wishes = means[NUM_NUMBERS:]
        if self._device.type == "cpu":
            self._agreed = [share > 0 for share in wishes.tolist()]
            return means[:NUM_NUMBERS]
        if self._on_host is not None:
            copy, is_copied = self._on_host
            is_copied.synchronize()
            self._agreed = [share > 0 for share in copy.tolist()]
        copy = torch.empty(wishes.shape, dtype=wishes.dtype, pin_memory=True)
        copy.copy_(wishes, non_blocking=True)
        self._on_host = copy, torch.cuda.current_stream(self._device).record_event()
        return means[:NUM_NUMBERS]


class _Everything(nn.Module):
    """All trainable parameters, for the exchange of their gradients; the loss is computed
    outside.
    """

    def __init__(self, net: nn.Module, loss: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.messages = nn.Parameter(torch.zeros(NUM_NUMBERS + NUM_WISHES, device=device))

    def forward(self, waveforms: Tensor) -> Tensor:
        return self.net(waveforms)  # type: ignore[no-any-return]


class _GatherRows(torch.autograd.Function):
    """The rows of all ranks, in the order of the ranks.

    Every rank must compute the same loss from them. In the backward pass each rank takes the
    gradient of its own rows times the number of ranks, so that DistributedDataParallel's mean over
    the ranks is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, rank_sizes: tuple[int, ...]) -> Tensor:
        rank = distributed.rank()
        assert rank_sizes[rank] == len(rows), "every rank knows the sizes"
        ctx.begin = sum(rank_sizes[:rank])
        ctx.end = ctx.begin + len(rows)
        ctx.world_size = len(rank_sizes)
        # Padded to the largest size: every backend can gather equal lengths.
        padded = rows.new_zeros((max(rank_sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in rank_sizes]
        torch_distributed.all_gather(gathered, padded)
        pieces = zip(gathered, rank_sizes, strict=True)
        return torch.cat([piece[:count] for piece, count in pieces])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.begin : ctx.end] * ctx.world_size, None
