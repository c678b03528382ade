"""Heads whose classes are sharded over the ranks.

Memory and traffic of a head then no longer grow with the number of speakers times the number of
ranks.

Source: An et al. 2021, "Partial FC: training 10 million identities on a single machine", section
3.1 (the distributed head, without the class sampling of section 3.2).
"""

import inspect
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.nn import functional

from speakernet import distributed
from speakernet.losses.classification import AllClasses, ClassificationLoss, Columns, SpeakerLoss
from speakernet.losses.options import LossOptions
from speakernet.options import Choice
from speakernet.parallel.sharding import RowShare, join_in_state, keep_share, sharded_names

logger = logging.getLogger(__name__)

MIN_SHARDED_CLASSES = 20_000
"""`loss.sharded: auto` shards from this number of classes on; a smaller head takes little memory
and little traffic."""


def shard_head(options: LossOptions, module: nn.Module) -> None:
    """Shard the head in place, so that each rank keeps a share of the speakers, if configured or
    worthwhile.

    Must be called after the whole head is initialised and before the optimizer is built. A head
    that is sharded already stays as it is.

    Raises:
        ValueError: `sharded: on` for a loss that computes with whole heads only.
    """
    # With a million speakers the head is larger than the network, and each rank would hold, update
    # and exchange all of it. Instead every rank keeps some of the speakers: embeddings are gathered
    # on all ranks, each scores them against its own speakers, and only sums are exchanged.
    loss = cast(SpeakerLoss, module)
    if sharded_names(loss):
        return
    choice = choose_sharding(options, loss.num_classes, distributed.world_size())
    if choice.value and not can_be_sharded(loss):
        if options.sharded == "on":
            raise ValueError(
                f"loss.sharded is on, but the loss {options.name} does not use self.classes, so it "
                "cannot compute with the classes of one process; use self.classes.own(labels) as "
                "docs/components.md shows, or set sharded: auto"
            )
        choice = Choice(
            False,
            f"{options.name} does not use self.classes, so every process keeps the whole head",
        )
    level = logging.INFO if choice.value else logging.DEBUG
    logger.log(level, "loss.sharded: %s: %s", options.sharded, choice)
    if choice.value:
        shard(loss)


def choose_sharding(options: LossOptions, num_classes: int, num_processes: int) -> Choice[bool]:
    """Whether each rank keeps only a share of the head, and why."""
    if not options.has_head:
        return Choice(False, "the loss has no head")
    if options.sharded == "off":
        return Choice(False, "switched off")
    size = f"{num_classes:,} classes on {num_processes} processes"
    if options.sharded == "on":
        return Choice(True, f"{size}, as configured")
    reason = f"{size}; worthwhile from {MIN_SHARDED_CLASSES:,}"
    return Choice(num_classes >= MIN_SHARDED_CLASSES, reason)


def shard(loss: SpeakerLoss) -> None:
    """Keep only this rank's shard of the classes, in place; call it on every rank before building
    the optimizer.

    The state dictionary of a sharded head is the whole head, gathered on rank 0, so all ranks must
    call `state_dict` together; a whole head can be loaded into any number of shards.
    """
    # The loss is written in terms of `classes`, so it needs no other change.
    head = loss.head
    rank = distributed.rank()
    world_size = distributed.world_size()
    head.classes = ClassShard(head.num_classes, rank, world_size)
    head.sees_all_ranks = True
    join_in_state(head)
    for parameter in head.parameters(recurse=False):
        # A scalar belongs to all classes.
        if parameter.ndim:
            rows_per_class = len(parameter) // head.num_classes
            keep_share(parameter, RowShare(head.num_classes, rank, world_size, rows_per_class))


def can_be_sharded(loss: SpeakerLoss) -> bool:
    """Whether the loss computes with the columns of one rank: ours do, and others whose own code
    uses `self.classes`.

    Other code would mistake a label for the number of a column, but a rank has only some of the
    columns.
    """
    for kind in type(loss.head).__mro__:
        if kind.__module__.startswith(__package__ + "."):
            return issubclass(kind, ClassificationLoss)
        functions = [value for value in vars(kind).values() if inspect.isfunction(value)]
        if {"logits", "forward"} & vars(kind).keys():
            return any("classes" in function.__code__.co_names for function in functions)
    return False


class ClassShard(AllClasses):
    """The operations of a rank that has a shard of the classes, on the rows of all ranks."""

    def __init__(self, num_classes: int, rank: int, world_size: int) -> None:
        if num_classes < world_size:
            raise ValueError(
                f"loss.sharded is on, but {num_classes} classes cannot be sharded over "
                f"{world_size} ranks; set it to auto or off"
            )
        self.row_share = RowShare(num_classes, rank, world_size)

    def shared(self, values: Tensor) -> Tensor:
        return _Sum.apply(values, True)  # type: ignore[no-any-return, no-untyped-call]

    def own(self, labels: Tensor) -> Columns:
        rows = self.row_share.rows
        is_local = (labels >= rows.start) & (labels < rows.stop)
        return Columns(
            torch.where(is_local, labels - rows.start, 0).unsqueeze(1), is_local.unsqueeze(1)
        )

    def nearest(self, scores: Tensor, count: int) -> Columns:
        # Every rank proposes its own best; only `count` of all proposals win.
        best, indices = scores.topk(min(count, scores.shape[1]), dim=1)
        proposals = functional.pad(best, (0, count - best.shape[1]), value=-torch.inf)
        proposals = torch.cat(self._gather(proposals), dim=1)  # (batch, ranks x count)
        is_chosen = torch.zeros(proposals.shape, dtype=torch.bool, device=scores.device)
        is_chosen.scatter_(1, proposals.topk(count, dim=1).indices, True)
        first = self.row_share.rank * count
        return Columns(indices, is_chosen[:, first : first + best.shape[1]])

    def total(self, values: Tensor) -> Tensor:
        return _Sum.apply(values, False)  # type: ignore[no-any-return, no-untyped-call]

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return _CrossEntropy.apply(logits, *self.own(labels))  # type: ignore[no-any-return, no-untyped-call]

    def accuracy_percent(self, scores: Tensor, labels: Tensor) -> Tensor:
        best, place = scores.detach().max(dim=1)
        # float64 represents every class index exactly.
        winner = torch.stack([best.double(), (place + self.row_share.rows.start).double()])
        bests, classes = torch.stack(self._gather(winner), dim=1)  # (ranks, batch) each
        # Among equal scores the first wins, as in argmax.
        winners = classes.gather(0, bests.argmax(dim=0, keepdim=True)).squeeze(0)
        return (winners == labels).float().mean() * 100.0

    def _gather(self, values: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(values) for _ in range(self.row_share.world_size)]
        torch_distributed.all_gather(gathered, values.contiguous())
        return gathered


class _Sum(torch.autograd.Function):
    """The sum over the ranks, either of values in the forward pass or of their gradients in the
    backward pass.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, sums_gradients: bool) -> Tensor:
        ctx.sums_gradients = sums_gradients
        return values.view_as(values) if sums_gradients else _sum_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # For summed values, every rank already has the gradient of the total, which is also that of
        # its own summand.
        gradient = gradients[0]
        return _sum_over_ranks(gradient) if ctx.sums_gradients else gradient, None


def _sum_over_ranks(values: Tensor) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    torch_distributed.all_reduce(total)
    return total


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose columns are on several ranks: two collectives forward, none
    backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, is_local: Tensor) -> Tensor:
        # The softmax needs a maximum and a sum over all classes. Each rank has both for its
        # columns; the logit of the label is on one rank only and 0 on the others, so it can be
        # summed along.
        highest = logits.amax(dim=1)  # (batch,)
        torch_distributed.all_reduce(highest, torch_distributed.ReduceOp.MAX)
        label_logit = torch.where(is_local, logits.gather(1, indices), 0.0).squeeze(1)
        exponentials = (logits - highest.unsqueeze(1)).exp().sum(dim=1)
        sums = torch.stack([exponentials, label_logit])  # (2, batch)
        torch_distributed.all_reduce(sums)
        normalizer = highest + sums[0].log()
        ctx.save_for_backward(logits, normalizer, indices, is_local)
        return (normalizer - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Probabilities minus one at the label: known on each rank from what it has saved.
        logits, normalizer, indices, is_local = ctx.saved_tensors
        shares = (logits - normalizer.unsqueeze(1)).exp_()
        shares.scatter_add_(1, indices, -is_local.to(shares.dtype))
        return shares * (gradients[0] / len(logits)), None, None
