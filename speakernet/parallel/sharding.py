"""Parameters whose rows are divided among the ranks: which rows a rank keeps, and how they are cut
and joined.

A sharded parameter is excluded from the sum of gradients over ranks, joined when it is saved, and
counted once over all ranks in the gradient norm. In one process nothing is sharded.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed

from speakernet import distributed

ROW_SHARE = "row_share"


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

    def join(self, own: Tensor) -> Tensor:
        """The whole tensor in host memory on rank 0, the own rows on the others; every rank must
        call it.
        """
        counts = [len(self._rows_of(rank)) for rank in range(self.world_size)]
        # Padded to equal length, which every backend can gather.
        padded = own.new_zeros((max(counts), *own.shape[1:]))
        padded[: len(own)] = own.detach()
        gathered = [torch.empty_like(padded) for _ in counts] if self.rank == 0 else None
        torch_distributed.gather(padded, gathered, dst=0)
        if gathered is None:
            return own.detach()
        return torch.cat([one[:count].cpu() for one, count in zip(gathered, counts, strict=True)])

    def _rows_of(self, rank: int) -> range:
        first, last = (self.num_units * one // self.world_size for one in (rank, rank + 1))
        return range(first * self.rows_per_unit, last * self.rows_per_unit)


def keep_share(parameter: nn.Parameter, own: RowShare) -> None:
    """Cut a whole parameter down to this rank's rows, in place, and mark it."""
    parameter.data = own.take(parameter.data)
    setattr(parameter, ROW_SHARE, own)


def join_in_state(module: nn.Module) -> None:
    """Make a module's state dictionary whole on rank 0; every rank must call `state_dict` and load
    a whole one.
    """
    module.register_state_dict_post_hook(_join_shares)
    module.register_load_state_dict_pre_hook(_take_shares)


def _join_shares(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in module.named_parameters():
        if (own := share_of(parameter)) is not None:
            state[prefix + name] = own.join(parameter)


def _take_shares(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    for name, parameter in module.named_parameters():
        own = share_of(parameter)
        found = state.get(prefix + name)
        # torch refuses any other number of rows and names the shapes.
        if (
            own is not None
            and isinstance(found, Tensor)
            and found.ndim
            and len(found) == own.num_rows
        ):
            state[prefix + name] = own.take(found)


def share_of(parameter: Tensor) -> RowShare | None:
    """The share of a parameter that this rank keeps; None if it keeps the whole."""
    return getattr(parameter, ROW_SHARE, None)


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
    gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[share_of(parameter) is not None].append(own_part(parameter.grad))
    whole, of_shares = gradients
    norm = torch.nn.utils.get_total_norm(whole)
    if not of_shares:
        return norm
    squares = torch.nn.utils.get_total_norm(of_shares).square()
    if distributed.is_distributed():
        torch_distributed.all_reduce(squares)
    return (norm.to(squares.device).square() + squares).sqrt()


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that torch has sharded, in the same memory; any other tensor
    itself.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def join_state(state: dict, parameters: Iterable[nn.Parameter], *, back: bool = False) -> dict:
    """An optimizer's state with joined moments of sharded parameters, whole on rank 0; every rank
    must call it.

    `back` does the reverse: it cuts a whole state down to this rank's shares.
    """
    changed = dict(state)
    for number, parameter in enumerate(parameters):
        own = share_of(parameter)
        if own is not None and number in state:
            rows, change = (own.num_rows, own.take) if back else (len(own.rows), own.join)
            # A step count is not a moment and has no rows.
            changed[number] = {
                name: change(value)
                if isinstance(value, Tensor) and value.ndim and len(value) == rows
                else value
                for name, value in state[number].items()
            }
    return changed


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Every parameter of an optimizer, in the order in which its state numbers them."""
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
