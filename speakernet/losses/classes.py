"""Where the classes of a head lie: all of them here, or a share on each rank, which then add up what they know.

A loss is written once, in terms of this file: scores of its own columns, its label's column, a cross entropy. With
shares the memory and the traffic of a head no longer grow with the number of speakers times that of the ranks.

Source: An et al. 2021, "Partial FC: training 10 million identities on a single machine", section 3.1 (the distributed
head; no classes are left out here, section 3.2's sampling).
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
    """(batch, columns) int64; 0 for what is not here."""
    are_here: Tensor | None = None
    """(batch, columns) bool; None: all are."""

    def of(self, scores: Tensor) -> Tensor:
        """Their scores, (batch, columns); of what is not here some other column's."""
        return scores.gather(1, self.indices)

    def replaced(self, scores: Tensor, values: Tensor) -> Tensor:
        """The scores, these columns' by other values, (batch, columns)."""
        if self.are_here is not None:
            values = torch.where(self.are_here, values, self.of(scores))
        return scores.scatter(1, self.indices, values)

    def only_here(self, values: Tensor) -> Tensor:
        """The values, and zeros for what is not here."""
        return values if self.are_here is None else torch.where(self.are_here, values, 0.0)


class AllClasses:
    """Every class lies here, and every row is this process's own."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def shared(self, values: Tensor) -> Tensor:
        """What every share of the classes is computed from (embeddings, a common bias)."""
        return values

    def own(self, labels: Tensor) -> Columns:
        """The column of each row's label."""
        return Columns(labels.unsqueeze(1))

    def nearest(self, scores: Tensor, count: int) -> Columns:
        """The columns of the `count` highest scores of each row."""
        return Columns(scores.topk(count, dim=1).indices)

    def total(self, values: Tensor) -> Tensor:
        """The sum of what each share of the classes gives."""
        return values

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the rows, 0-d."""
        return functional.cross_entropy(logits, labels)

    def accuracy_percent(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Share of rows whose highest score is the label's, in percent, 0-d on the device."""
        return accuracy_percent(scores, labels)


class ClassShard(AllClasses):
    """Each rank has the columns of its share of the classes, for the rows of all ranks."""

    def __init__(self, num_classes: int, rank: int, world_size: int) -> None:
        super().__init__(num_classes)
        if num_classes < world_size:
            raise ValueError(
                f"loss.sharded: on, but {num_classes} speakers cannot be shared by {world_size} processes; set it to "
                "auto or off"
            )
        self.row_share = RowShare(num_classes, rank, world_size)

    def shared(self, values: Tensor) -> Tensor:
        """See `AllClasses.shared`: in the backward pass its gradient is the sum of all shares'."""
        return _SumGradients.apply(values)  # type: ignore[no-any-return, no-untyped-call]

    def own(self, labels: Tensor) -> Columns:
        """See `AllClasses.own`."""
        here = self.row_share.rows
        are_here = (labels >= here.start) & (labels < here.stop)
        return Columns(torch.where(are_here, labels - here.start, 0).unsqueeze(1), are_here.unsqueeze(1))

    def nearest(self, scores: Tensor, count: int) -> Columns:
        """See `AllClasses.nearest`: the highest of all ranks, as far as they are here."""
        ranks, rank = self.row_share.world_size, self.row_share.rank
        best, indices = scores.topk(min(count, scores.shape[1]), dim=1)
        candidates = functional.pad(best, (0, count - best.shape[1]), value=-torch.inf)
        everybodys = [torch.empty_like(candidates) for _ in range(ranks)]
        torch_distributed.all_gather(everybodys, candidates.contiguous())
        chosen = torch.cat(everybodys, dim=1).topk(count, dim=1).indices  # (batch, count) of ranks x count
        are_chosen = torch.zeros((len(scores), ranks * count), dtype=torch.bool, device=scores.device)
        are_chosen.scatter_(1, chosen, True)
        first = rank * count
        return Columns(indices, are_chosen[:, first : first + best.shape[1]])

    def total(self, values: Tensor) -> Tensor:
        """See `AllClasses.total`."""
        return _Sum.apply(values)  # type: ignore[no-any-return, no-untyped-call]

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See `AllClasses.cross_entropy`; the same on every rank."""
        return _CrossEntropy.apply(logits, *self.own(labels))  # type: ignore[no-any-return, no-untyped-call]

    def accuracy_percent(self, scores: Tensor, labels: Tensor) -> Tensor:
        """See `AllClasses.accuracy_percent`."""
        best, place = scores.detach().max(dim=1)
        # float64 holds every class exactly.
        own = torch.stack([best.double(), (place + self.row_share.rows.start).double()])
        everybodys = [torch.empty_like(own) for _ in range(self.row_share.world_size)]
        torch_distributed.all_gather(everybodys, own)
        bests, classes = torch.stack(everybodys, dim=1)  # (ranks, batch) each
        # Of several equal ones the first wins, here as above.
        winners = classes.gather(0, bests.argmax(dim=0, keepdim=True)).squeeze(0)
        return (winners == labels).float().mean() * 100.0


def accuracy_percent(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest logit is the label's, in percent, 0-d on the device.

    >>> accuracy_percent(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(50.)
    """
    return (logits.detach().argmax(dim=1) == labels).float().mean() * 100.0


class _SumGradients(torch.autograd.Function):
    """Itself, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch_distributed.all_reduce(total)
        return total


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of which each goes on to compute the same."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        torch_distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Every rank has the whole gradient of the sum, of which each share is a summand.
        return gradients[0]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose columns lie on several ranks: two collectives forward, none backward."""

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
