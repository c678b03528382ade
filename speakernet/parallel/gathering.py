"""Collectives that gradients flow through; in one process they do nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as torch_distributed

from speakernet import distributed


def gather_rows(rows: Tensor, shares: Sequence[int]) -> Tensor:
    """The rows of all ranks, one rank's after another's.

    Every rank is to compute the same loss from them. In the backward pass each takes the gradient of its own rows times
    the number of ranks, so that the mean over the ranks, which DistributedDataParallel takes, is the gradient.

    Args:
        rows: (own rows, …).
        shares: rows of each rank.

    Returns:
        (all rows, …); where there is one process `rows` itself.
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
