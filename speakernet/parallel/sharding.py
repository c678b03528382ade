"""Parameters whose rows are divided among the ranks: which rows a rank keeps, and how they are cut
and joined.

A sharded parameter is excluded from the sum of gradients over ranks, joined when it is saved, and
counted once over all ranks in the gradient norm. In one process nothing is sharded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed

from speakernet import distributed


# A head of a million speakers and 192 dimensions takes 768 MB, four times that with gradient and
# moments, on every rank, although a rank can compute with any part of its rows. So rows are
# divided. Everything else must not notice: a checkpoint has the whole, whatever the number of ranks
# that wrote it or will read it, and the norm that gradients are clipped to is that of the whole.
@dataclass(frozen=True)
class RowShare:
    """The contiguous rows of a tensor that one of several ranks keeps; shares differ by at most one
    unit.

    >>> [RowShare(10, rank, 4).rows for rank in range(4)]
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    """

    num_units: int
    """Units of the whole tensor, such as speakers."""
    rank: int
    world_size: int
    rows_per_unit: int = 1
    """Rows that stay together, such as the centres of a speaker."""

    @property
    def rows(self) -> range:
        """This rank's rows of the whole tensor."""
        return self._rows_of(self.rank)

    @property
    def num_rows(self) -> int:
        """Rows of the whole tensor."""
        return self.num_units * self.rows_per_unit

    def take(self, whole: Tensor) -> Tensor:
        """A copy of this rank's rows of a whole tensor, (rows of the whole, …)."""
        return whole[self.rows.start : self.rows.stop].clone()

    def join(self, rows: Tensor) -> Tensor:
        """The whole tensor in host memory on rank 0, this rank's rows on the others; every rank
        must call it.
        """
        counts = [len(self._rows_of(rank)) for rank in range(self.world_size)]
        # Padded to equal length, which every backend can gather.
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows.detach()
        gathered = [torch.empty_like(padded) for _ in counts] if self.rank == 0 else None
        torch_distributed.gather(padded, gathered, dst=0)
        if gathered is None:
            return rows.detach()
        pieces = zip(gathered, counts, strict=True)
        return torch.cat([piece[:count].cpu() for piece, count in pieces])

    def _rows_of(self, rank: int) -> range:
        first = self.num_units * rank // self.world_size
        last = self.num_units * (rank + 1) // self.world_size
        return range(first * self.rows_per_unit, last * self.rows_per_unit)


def keep_share(parameter: nn.Parameter, share: RowShare) -> None:
    """Cut a whole parameter down to this rank's rows, in place, and mark it."""
    parameter.data = share.take(parameter.data)
    mark_share(parameter, share)


def mark_share(parameter: nn.Parameter, share: RowShare) -> None:
    """Note on a parameter which share of the whole it is."""
    parameter.row_share = share  # type: ignore[attr-defined]


def share_of(parameter: Tensor) -> RowShare | None:
    """The share of a parameter that this rank keeps; None if it keeps the whole."""
    return getattr(parameter, "row_share", None)


def join_in_state(module: nn.Module) -> None:
    """Make a module's state dictionary whole on rank 0; every rank must call `state_dict` and load
    a whole one.
    """
    module.register_state_dict_post_hook(_join_shares)
    module.register_load_state_dict_pre_hook(_take_shares)


def _join_shares(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in module.named_parameters():
        if (share := share_of(parameter)) is not None:
            state[prefix + name] = share.join(parameter)


def _take_shares(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    for name, parameter in module.named_parameters():
        share = share_of(parameter)
        whole = state.get(prefix + name)
        # A tensor with other rows stays, and torch refuses it, naming the shapes.
        if share is not None and _has_rows(whole, share.num_rows):
            state[prefix + name] = share.take(whole)  # type: ignore[arg-type]


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def sharded_names(module: nn.Module) -> list[str]:
    """Names of the sharded parameters, whose gradients are complete on the rank that has the
    rows.
    """
    return [
        name for name, parameter in module.named_parameters() if share_of(parameter) is not None
    ]


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, 0-d and the same on every rank; each share counts once.

    Gradients of whole parameters must be the same on every rank.
    """
    of_whole: list[Tensor] = []
    of_shares: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local_part(parameter.grad)
        if share_of(parameter) is None:
            of_whole.append(gradient)
        else:
            of_shares.append(gradient)
    norm = torch.nn.utils.get_total_norm(of_whole)
    if not of_shares:
        return norm
    squares = torch.nn.utils.get_total_norm(of_shares).square()
    if distributed.is_distributed():
        torch_distributed.all_reduce(squares)
    return (norm.to(squares.device).square() + squares).sqrt()


def is_cut_by_torch(tensor: Tensor) -> bool:
    """Whether torch keeps only this rank's part of the tensor (`fully_shard`)."""
    # Not by its class DTensor, whose import takes long.
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that torch has sharded, in the same memory; any other tensor
    itself.
    """
    return tensor.to_local() if is_cut_by_torch(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def convert_state(state: dict, parameters: Iterable[nn.Parameter], *, to_whole: bool) -> dict:
    """An optimizer's state whose moments of sharded parameters are whole (on rank 0; every rank
    must call it), or again only this rank's shares of whole ones.
    """
    converted = dict(state)
    for number, parameter in enumerate(parameters):
        share = share_of(parameter)
        if share is None or number not in state:
            continue
        num_rows = len(share.rows) if to_whole else share.num_rows
        convert = share.join if to_whole else share.take
        converted[number] = {}
        for name, value in state[number].items():
            # A step count is not a moment and has no rows.
            converted[number][name] = convert(value) if _has_rows(value, num_rows) else value
    return converted


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Every parameter of an optimizer, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
