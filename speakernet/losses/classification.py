"""Losses with a head of one weight vector a speaker: softmax, AM-softmax, AAM-softmax, SphereFace2, HAM-softmax.

They take embeddings `(batch, dim)` and labels `(batch,)` and give `(loss, accuracy)`, both on the device, accuracy in
percent. They compute in float32 whatever the precision of the trunk.

Every rank has all classes of the head, or a shard of them: a loss is written once, in terms of scores of its columns,
its label's column and a cross entropy. With shards the memory and traffic of a head no longer grow with the number of
speakers times the number of ranks.

Source: An et al. 2021, "Partial FC: training 10 million identities on a single machine", section 3.1 (the distributed
head, without section 3.2's sampling of classes).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.nn import functional

from speakernet.losses.options import (
    AAMSoftmaxOptions,
    AMSoftmaxOptions,
    HAMSoftmaxOptions,
    LossOptions,
    SoftmaxOptions,
    SphereFace2Options,
)
from speakernet.parallel.sharding import RowShare, keep_share, share_of

# Keeps the square root of 1 - cos² differentiable if an embedding is exactly on its speaker's vector.
SINE_FLOOR = 1e-12


class SpeakerLoss(nn.Module):
    """The abstract base of all losses."""

    def __init__(self, options: LossOptions) -> None:
        super().__init__()
        self.options = options
        self.is_metric = options.is_metric
        """Whether it takes (speakers, utterances, dim)."""
        self.sees_all_ranks = options.is_metric
        """Whether it takes the embeddings of all ranks together and gives the same on each."""


class ClassificationLoss(SpeakerLoss):
    """The abstract loss with a head, whose classes may be sharded over the ranks.

    The state dictionary of a sharded head is the whole head on rank 0, so every rank must ask for it at once; a whole
    head can be loaded into any number of shards.
    """

    def __init__(self, options: LossOptions, embedding_dim: int, num_classes: int, rows_per_class: int = 1) -> None:
        super().__init__(options)
        self.num_classes = num_classes
        """Speakers of the whole head, at all speeds."""
        self.classes = AllClasses()
        self.weight = nn.Parameter(torch.empty(num_classes * rows_per_class, embedding_dim))

    def shard(self, rank: int, world_size: int) -> None:
        """Keep only this rank's shard of the classes; call it on every rank before the optimizer is built."""
        self.classes, self.sees_all_ranks = ClassShard(self.num_classes, rank, world_size), True
        self.register_state_dict_post_hook(_join_shards)
        self.register_load_state_dict_pre_hook(_take_shards)
        for parameter in self.parameters(recurse=False):
            # A single number belongs to all classes.
            if parameter.ndim:
                rows_per_class = len(parameter) // self.num_classes
                keep_share(parameter, RowShare(self.num_classes, rank, world_size, rows_per_class))

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(batch, dim) and (batch,) to (batch, classes of this rank)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and accuracy in percent, both 0-d."""
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.logits(self.classes.shared(embeddings.float()), labels)
            return self.classes.cross_entropy(logits, labels), self.classes.accuracy_percent(logits, labels)


class Softmax(ClassificationLoss):
    """Cross entropy of a linear layer with bias.

    >>> loss = Softmax(SoftmaxOptions(), embedding_dim=2, num_classes=3)
    >>> _ = nn.init.zeros_(loss.weight), nn.init.zeros_(loss.bias)
    >>> round(loss(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))[0].item(), 4)  # log 3
    1.0986
    """

    def __init__(self, options: SoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.bias = nn.Parameter(torch.empty(num_classes))
        bound = 1 / math.sqrt(embedding_dim)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """W x + b."""
        return functional.linear(embeddings, self.weight, self.bias)


class AMSoftmax(ClassificationLoss):
    """Scaled cosines, the speaker's own lowered by a margin.

    Source: Wang et al. 2018, "Additive Margin Softmax for Face Verification", equation 6.

    >>> loss = AMSoftmax(AMSoftmaxOptions(margin=0.5, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> loss.logits(torch.tensor([[3.0, 0.0]]), torch.tensor([0]))
    tensor([[0.5000, 0.0000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, options: AMSoftmaxOptions, embedding_dim: int, num_classes: int, centers: int = 1) -> None:
        super().__init__(options, embedding_dim, num_classes, centers)
        self.margin, self.scale = options.margin, options.scale  # a schedule changes the margin
        nn.init.xavier_normal_(self.weight)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scale times (cosine, minus the margin at the label)."""
        cosine = functional.linear(functional.normalize(embeddings), functional.normalize(self.weight))
        own = self.classes.own(labels)
        return own.replaced(cosine, own.of(cosine) - self.margin) * self.scale


class AAMSoftmax(AMSoftmax):
    """Scaled cosines, the angle to the speaker's own vector widened by a margin.

    Past pi - margin, from which widening would wrap around, the cosine is lowered by margin x sin(margin)
    instead; with `easy_margin` angles above 90 degrees stay as they are. Of several centres a speaker the nearest
    counts. The angles to the `inter_top_k` nearest other speakers are narrowed by `inter_top_k_penalty`.

    Source: Deng et al. 2019, "ArcFace", equation 3, with the common continuation past pi - margin; Deng et al. 2020,
    "Sub-center ArcFace", equation 3; Zhao et al. 2021, "The SpeakIn system for VoxCeleb speaker recognition challenge
    2021", section 3.3 (inter-top-K).

    >>> loss = AAMSoftmax(AAMSoftmaxOptions(margin=math.pi / 3, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> loss.logits(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).round(decimals=3).tolist()  # cos 60 degrees
    [[0.5, 0.0]]
    """

    def __init__(self, options: AAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes, options.sub_centers)
        self.inter_top_k = min(options.inter_top_k, num_classes - 1)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scale times (cosine, of the widened angle at the label)."""
        options: Any = self.options
        cosine = functional.linear(functional.normalize(embeddings), functional.normalize(self.weight))
        if options.sub_centers > 1:
            cosine = cosine.unflatten(1, (-1, options.sub_centers)).amax(dim=2)  # (batch, classes)
        own = self.classes.own(labels)
        # Only the label's column needs the angle: (batch, 1) instead of (batch, classes).
        own_cosine = own.of(cosine)
        if options.easy_margin:
            least, beyond = 0.0, own_cosine
        else:
            least = math.cos(math.pi - self.margin)
            beyond = own_cosine - math.sin(math.pi - self.margin) * self.margin
        widened = torch.where(own_cosine > least, turned(own_cosine, self.margin), beyond)
        if self.inter_top_k:
            # A cosine is never below -1: at -2 the own speaker is not among the nearest.
            others = own.replaced(cosine.detach(), torch.full_like(own_cosine, -2))
            nearest = self.classes.nearest(others, self.inter_top_k)
            share = min(1.0, self.margin / options.margin) if options.margin else 1.0
            cosine = nearest.replaced(cosine, turned(nearest.of(cosine), -options.inter_top_k_penalty * share))
        return own.replaced(cosine, widened) * self.scale


class SphereFace2(ClassificationLoss):
    """One yes-or-no question for every speaker: is the utterance this speaker's?

    The learned bias moves the boundary of all questions. Its accuracy is that of the largest cosine, with the own one
    lowered by the margin.

    Source: Wen et al. 2022, "SphereFace2", equation 8 (type A is MArcFace's margin, C is CosFace's); Han et al. 2023,
    "Exploring binary classification loss for speaker verification", equations 5 to 9.

    >>> loss = SphereFace2(SphereFace2Options(margin=0.0, scale=1.0, positive_weight=0.5), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))[0].item(), 4)  # g(1) = 1, g(0) = -3/4
    0.3501
    """

    def __init__(self, options: SphereFace2Options, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.margin = options.margin  # a schedule changes it
        self.scale, self.exponent, self.positive_weight = options.scale, options.exponent, options.positive_weight
        self.widens_angle = options.margin_type == "A"
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy in percent, both 0-d."""
        with torch.autocast(embeddings.device.type, enabled=False):
            rows = functional.normalize(self.classes.shared(embeddings.float()))
            cosine = functional.linear(rows, functional.normalize(self.weight))
            own, bias = self.classes.own(labels), self.classes.shared(self.bias)
            own_cosine = own.of(cosine)
            positive = functional.softplus(-self._answer(own_cosine, bias, is_own=True))  # (batch, 1)
            others = functional.softplus(self._answer(cosine, bias, is_own=False))
            weighted = own.replaced((1 - self.positive_weight) * others, self.positive_weight * positive)
            loss = self.classes.total(weighted.sum(dim=1))
            return loss.mean(), self.classes.accuracy_percent(own.replaced(cosine, own_cosine - self.margin), labels)

    def _answer(self, cosine: Tensor, bias: Tensor, *, is_own: bool) -> Tensor:
        """The logit of yes; the margin makes yes harder for the own speaker, and no harder for others."""
        margin = self.margin if is_own else -self.margin
        if not self.widens_angle:
            return self.scale * (self._spread(cosine) - margin) + bias
        moved = turned(cosine, margin)
        if is_own:
            # Past pi - margin the angle would wrap around; from there the cosine falls linearly.
            lowest = math.cos(margin)
            moved = torch.where(cosine > -lowest, moved, cosine - 1.0 + lowest)
        return self.scale * self._spread(moved) + bias

    def _spread(self, cosine: Tensor) -> Tensor:
        # Rounding may leave a cosine just below -1; its fractional power is not a number.
        return 2.0 * ((cosine + 1.0) / 2.0).clamp(min=0.0) ** self.exponent - 1.0


def turned(cosine: Tensor, angle: float) -> Tensor:
    """cos(theta + angle) of cos(theta).

    >>> turned(torch.tensor([1.0]), math.pi / 3).round(decimals=3)
    tensor([0.5000])
    """
    sine = (1.0 - cosine.square()).clamp(SINE_FLOOR, 1.0).sqrt()
    return cosine * math.cos(angle) - sine * math.sin(angle)


def _join_shards(loss: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in loss.named_parameters(recurse=False):
        own = share_of(parameter)
        if own is not None:
            state[prefix + name] = own.join(parameter)


def _take_shards(loss: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    for name, parameter in loss.named_parameters(recurse=False):
        own, found = share_of(parameter), state.get(prefix + name)
        # torch refuses another number of classes and names the shapes.
        if own is not None and isinstance(found, Tensor) and found.ndim and len(found) == own.num_rows:
            state[prefix + name] = own.take(found)


# Keeps points off the edge of the ball, denominators off 0, and the cosh off 1 (infinite slope of its inverse).
EPSILON = 1e-5


class HAMSoftmax(ClassificationLoss):
    """Minus the scaled distances in the Poincaré ball between embedding and centres, the own one's plus a margin.

    Embeddings and centres beyond the radius 1 / sqrt(curvature) are projected onto it. The distance between two points
    is arcosh(1 + 2 |x - y|² / ((1 - |x|²) (1 - |y|²))).

    Source: wespeaker dfa7419, `models/projections.py`, its `ham_margin`, after Fang and He 2026, "Hyperbolic additive
    margin softmax with hierarchical information for speaker verification", whose own code is not published.

    >>> loss = HAMSoftmax(HAMSoftmaxOptions(margin=0.5, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.tensor([[0.0, 0.0], [0.5, 0.0]]))
    >>> round(loss.logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))[0, 1].item(), 4)  # -(arcosh(5 / 3) + 0.5)
    -1.5986
    """

    def __init__(self, options: HAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.margin, self.scale = options.margin, options.scale  # a schedule changes the margin
        self.radius = (1.0 - EPSILON) / options.curvature**0.5
        nn.init.normal_(self.weight, std=1e-3)  # near the origin

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Minus scale times (distance, plus the margin at the label)."""
        (left, left_edge), (right, right_edge) = self._inside(embeddings), self._inside(self.weight)
        squares = left.square().sum(dim=1, keepdim=True) + right.square().sum(dim=1) - 2.0 * left @ right.T
        from_edge = (left_edge * right_edge.T).clamp(min=EPSILON)
        # A few thousandths at least.
        distances = (1.0 + 2.0 * squares / from_edge).clamp(min=1.0 + EPSILON).acosh()
        own = self.classes.own(labels)
        return -self.scale * own.replaced(distances, own.of(distances) + self.margin)

    def _inside(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(points, dim), projected onto the radius if beyond it, and 1 - |x|² of each, (points, 1)."""
        norms = points.norm(dim=1, keepdim=True)
        points = points * (self.radius / norms.clamp(min=EPSILON)).clamp(max=1.0)
        # At the edge the difference cancels, but its value is known.
        return points, torch.where(norms > self.radius, 1.0 - self.radius**2, 1.0 - norms.square())


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
