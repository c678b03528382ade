"""The classes of a head: all of them on every rank, or a shard on each rank.

A loss is written once, in terms of this file: scores of its columns, its label's column, a cross entropy. With shards
the memory and traffic of a head no longer grow with the number of speakers times the number of ranks.

Source: An et al. 2021, "Partial FC: training 10 million identities on a single machine", section 3.1 (the distributed
head, without section 3.2's sampling of classes).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as torch_distributed
from torch.nn import functional

from speakernet.parallel.sharding import RowShare


class Columns(NamedTuple):
    """Some columns of each row of a matrix of scores."""

    indices: Tensor
    """(batch, columns) int64; 0 for columns of other ranks."""
    are_here: Tensor | None = None
    """(batch, columns) bool; None if all columns are on this rank."""

    def of(self, scores: Tensor) -> Tensor:
        """Their scores, (batch, columns); arbitrary for columns of other ranks."""
        return scores.gather(1, self.indices)

    def replaced(self, scores: Tensor, values: Tensor) -> Tensor:
        """The scores with these columns replaced by values, (batch, columns)."""
        if self.are_here is not None:
            values = torch.where(self.are_here, values, self.of(scores))
        return scores.scatter(1, self.indices, values)


def accuracy_percent(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest logit is the label's, in percent, 0-d on the device.

    >>> accuracy_percent(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(50.)
    """
    return (logits.detach().argmax(dim=1) == labels).float().mean() * 100.0


class AllClasses:
    """Every rank has all classes, for its own rows."""

    cross_entropy = staticmethod(functional.cross_entropy)
    """Of logits (batch, columns) and labels, the mean over the rows, 0-d."""
    accuracy_percent = staticmethod(accuracy_percent)

    def shared(self, values: Tensor) -> Tensor:
        """An input of all shards (embeddings, a common bias)."""
        return values

    total = shared
    """The sum over the shards."""

    def own(self, labels: Tensor) -> Columns:
        """The column of each row's label."""
        return Columns(labels.unsqueeze(1))

    def nearest(self, scores: Tensor, count: int) -> Columns:
        """The columns of the `count` highest scores of each row."""
        return Columns(scores.topk(count, dim=1).indices)


class ClassShard(AllClasses):
    """Each rank has the columns of its shard of the classes, for the rows of all ranks."""

    def __init__(self, num_classes: int, rank: int, world_size: int) -> None:
        if num_classes < world_size:
            raise ValueError(
                f"loss.sharded: on, but {num_classes} speakers cannot be sharded over {world_size} ranks; set it to "
                "auto or off"
            )
        self.row_share = RowShare(num_classes, rank, world_size)

    def shared(self, values: Tensor) -> Tensor:
        return _Sum.apply(values, True)  # type: ignore[no-any-return, no-untyped-call]

    def own(self, labels: Tensor) -> Columns:
        here = self.row_share.rows
        are_here = (labels >= here.start) & (labels < here.stop)
        return Columns(torch.where(are_here, labels - here.start, 0).unsqueeze(1), are_here.unsqueeze(1))

    def nearest(self, scores: Tensor, count: int) -> Columns:
        ranks, rank = self.row_share.world_size, self.row_share.rank
        best, indices = scores.topk(min(count, scores.shape[1]), dim=1)
        candidates = functional.pad(best, (0, count - best.shape[1]), value=-torch.inf)
        chosen = torch.cat(self._of_all_ranks(candidates), dim=1).topk(count, dim=1).indices  # of ranks x count
        are_chosen = torch.zeros((len(scores), ranks * count), dtype=torch.bool, device=scores.device)
        are_chosen.scatter_(1, chosen, True)
        return Columns(indices, are_chosen[:, rank * count :][:, : best.shape[1]])

    def total(self, values: Tensor) -> Tensor:
        return _Sum.apply(values, False)  # type: ignore[no-any-return, no-untyped-call]

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return _CrossEntropy.apply(logits, *self.own(labels))  # type: ignore[no-any-return, no-untyped-call]

    def accuracy_percent(self, scores: Tensor, labels: Tensor) -> Tensor:
        best, place = scores.detach().max(dim=1)
        # float64 holds every class exactly.
        own = torch.stack([best.double(), (place + self.row_share.rows.start).double()])
        bests, classes = torch.stack(self._of_all_ranks(own), dim=1)  # (ranks, batch) each
        # Of several equal ones the first wins, as in argmax.
        winners = classes.gather(0, bests.argmax(dim=0, keepdim=True)).squeeze(0)
        return (winners == labels).float().mean() * 100.0

    def _of_all_ranks(self, values: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(values) for _ in range(self.row_share.world_size)]
        torch_distributed.all_gather(gathered, values.contiguous())
        return gathered


class _Sum(torch.autograd.Function):
    """The sum over the ranks of the values, from which all compute the same; or of the gradients of common values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, of_gradients: bool) -> Tensor:
        ctx.of_gradients = of_gradients
        return values.view_as(values) if of_gradients else _summed(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Every rank has the whole gradient of a sum of values, of which its shard is a summand.
        return _summed(gradients[0]) if ctx.of_gradients else gradients[0], None


def _summed(values: Tensor) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    torch_distributed.all_reduce(total)
    return total


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose columns are on several ranks: two collectives forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, are_here: Tensor) -> Tensor:
        highest = logits.amax(dim=1)
        torch_distributed.all_reduce(highest, torch_distributed.ReduceOp.MAX)
        own = torch.where(are_here, logits.gather(1, indices), 0.0).squeeze(1)
        sums = torch.stack([(logits - highest.unsqueeze(1)).exp().sum(dim=1), own])  # (2, batch)
        torch_distributed.all_reduce(sums)
        normalizer = highest + sums[0].log()
        ctx.save_for_backward(logits, normalizer, indices, are_here)
        return (normalizer - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, normalizer, indices, are_here = ctx.saved_tensors
        shares = (logits - normalizer.unsqueeze(1)).exp_()
        shares.scatter_add_(1, indices, -are_here.to(shares.dtype))
        return shares * (gradients[0] / len(logits)), None, None
