"""How the gradients of a step come together: of one process, or of several that share every batch.

Several exchange nothing but gradients: what else they have to tell each other once a step (loss, accuracy, whether one
of them was asked to stop) travels as the gradient of a small parameter of its own, in the same collectives.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from speakernet.parallel.sharding import gather_rows, sharded_names, share_of
from speakernet.parallel.sync_norm import SynchronizedNorm

Wishes = Callable[[], Sequence[bool]]
NUM_NUMBERS = 3
"""Of a step: weight, loss and accuracy."""


class OneProcess:
    """A process that trains alone: nothing is exchanged.

    Attributes:
        wishes: what this process asks all to do after the step, each true or false; the trainer's.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.wishes: Wishes = tuple

    def begin_epoch(self) -> None:
        """Called where what is trained may have changed."""

    def part_of_step(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward pass of one micro-batch."""
        return contextlib.nullcontext()

    def embed(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) -> (batch, dim), from which gradients are sent back."""
        embeddings: Tensor = self.net(waveforms)
        return embeddings

    def rows_of_all(self, rows: Tensor, shares: Sequence[int]) -> Tensor:
        """The rows of all processes, in the order of the batch; see `gather_rows`."""
        return rows

    def send_back(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass of a micro-batch.

        Args:
            value: 0-d.
            numbers: (3,) its weight, and loss and accuracy times that.
            is_last: of the step.
        """
        value.backward()

    def totals(self, numbers: Tensor) -> Tensor:
        """From the sums of this process's micro-batches, (3,), to the means over the processes."""
        return numbers

    def agreed(self) -> list[bool]:
        """What some process asked for, wish by wish, after a step."""
        return list(self.wishes())

    def forget(self) -> None:
        """Drop what a step that is not finished has left behind."""

    def share_statistics(self) -> None:
        """Let every process have the same batch-norm statistics."""

    def close(self) -> None:
        """Let go of what exchanges gradients, and of the group with it."""


class SeveralProcesses(OneProcess):
    """Processes that share every batch, by DistributedDataParallel.

    Args:
        net: the network.
        loss: its parameters learn too.
        num_wishes: how many `wishes` gives.
        device: of both.
    """

    def __init__(self, net: nn.Module, loss: nn.Module, num_wishes: int, device: torch.device) -> None:
        super().__init__(net)
        self._all = _Everything(net, loss, NUM_NUMBERS + num_wishes, device)
        self._device = device
        self._parallel: DistributedDataParallel | None = None
        self._trained: list[bool] = []
        self._is_reduced = False
        # On a GPU the host reads a step's wishes one step later, when they have long been there.
        self._on_host: tuple[Tensor, torch.cuda.Event] | None = None
        self._told: list[bool] = [False] * num_wishes

    def begin_epoch(self) -> None:
        """Build the buckets of gradients anew where other parameters are trained than before."""
        trained = [one.requires_grad for one in self._all.parameters()]
        if self._parallel is not None and trained == self._trained:
            return
        self._trained = trained
        # Of these each process has its own part, and the whole gradient of it.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._all, sharded_names(self._all))
        self._parallel = DistributedDataParallel(
            self._all,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # Rank 0's statistics hold where each process normalises by its own share of the batch.
            **_broadcast_of_buffers(self._has_own_statistics()),
        )

    def part_of_step(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are added up where they are until the last micro-batch."""
        assert self._parallel is not None, "an epoch was begun"
        return contextlib.nullcontext() if is_last else self._parallel.no_sync()

    def embed(self, waveforms: Tensor) -> Tensor:
        """As alone, with the exchange of gradients prepared."""
        assert self._parallel is not None, "an epoch was begun"
        embeddings: Tensor = self._parallel(waveforms)
        return embeddings

    def rows_of_all(self, rows: Tensor, shares: Sequence[int]) -> Tensor:
        """Gathered, with gradients."""
        return gather_rows(rows, shares)

    def send_back(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass; at the last micro-batch the gradients of all processes are averaged meanwhile."""
        wishes = [float(one) for one in self.wishes()] if is_last else [0.0] * len(self._told)
        told = torch.cat([numbers, numbers.new_tensor(wishes)])
        # The gradient of a sum of products is what the messages are multiplied by.
        (value + (self._all.messages * told).sum()).backward()  # type: ignore[no-untyped-call]
        self._is_reduced = is_last

    def totals(self, numbers: Tensor) -> Tensor:
        """What was told, averaged."""
        if not self._is_reduced:
            # The loader had fewer micro-batches than it had announced.
            for parameter in self._all.parameters():
                if parameter.grad is not None and share_of(parameter) is None:
                    torch_distributed.all_reduce(parameter.grad)
                    parameter.grad /= torch_distributed.get_world_size()
        told = self._all.messages.grad
        assert told is not None
        told = told.clone()
        self.forget()
        self._read(told[NUM_NUMBERS:])
        return told[:NUM_NUMBERS]

    def agreed(self) -> list[bool]:
        """What some process asked for: all read the same, on a GPU that of the step before."""
        return self._told

    def forget(self) -> None:
        """The messages; all other gradients are the optimizer's to clear."""
        self._all.messages.grad = None
        self._is_reduced = False

    def share_statistics(self) -> None:
        """Rank 0's, where each process has its own."""
        if not self._has_own_statistics():
            return
        for module in self._all.modules():
            if isinstance(module, _BatchNorm):
                for buffer in module.buffers():
                    torch_distributed.broadcast(buffer, src=0)

    def close(self) -> None:
        """See `OneProcess.close`: its buckets are as large as the gradients, which a second stage needs."""
        self._parallel = None

    def _read(self, wishes: Tensor) -> None:
        if self._device.type == "cpu":
            self._told = [one > 0 for one in wishes.tolist()]
            return
        if self._on_host is not None:
            copy, is_there = self._on_host
            is_there.synchronize()
            self._told = [one > 0 for one in copy.tolist()]
        copy = torch.empty(wishes.shape, dtype=wishes.dtype, pin_memory=True)
        copy.copy_(wishes, non_blocking=True)
        self._on_host = copy, torch.cuda.current_stream(self._device).record_event()

    def _has_own_statistics(self) -> bool:
        return any(
            isinstance(module, _BatchNorm)
            and module.track_running_stats
            and not isinstance(module, nn.SyncBatchNorm | SynchronizedNorm)
            for module in self._all.modules()
        )


def _broadcast_of_buffers(is_wanted: bool) -> dict[str, Any]:
    """The argument of DistributedDataParallel, which has another name, and warns of the old one, from torch 2.14 on."""
    new, old = "forward_sync_buffers", "broadcast_buffers"
    return {new if new in inspect.signature(DistributedDataParallel).parameters else old: is_wanted}


class _Everything(nn.Module):
    """All that learns, for the exchange of its gradients; the loss is computed outside."""

    def __init__(self, net: nn.Module, loss: nn.Module, num_messages: int, device: torch.device) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.messages = nn.Parameter(torch.zeros(num_messages, device=device))

    def forward(self, waveforms: Tensor) -> Tensor:
        embeddings: Tensor = self.net(waveforms)
        return embeddings
