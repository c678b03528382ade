"""Losses with a head of one weight vector per speaker: softmax, AM-softmax and AAM-softmax.

They take embeddings `(batch, dim)` and labels `(batch,)` and return `(loss, accuracy)`, both on the
device, accuracy in percent. They compute in float32, whatever the precision of the trunk.

A rank has all classes of the head, or a shard of them (`sharded.py`). Each loss is written only
once, in terms of the scores of its columns, the label's column and a cross entropy.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.options import (
    AAMSoftmaxOptions,
    AMSoftmaxOptions,
    LossOptions,
    SoftmaxOptions,
)

# Keeps the square root of 1 - cos² differentiable if an embedding coincides with its speaker's
# vector.
SINE_FLOOR = 1e-12
PENALTY_MARGIN = 0.2
"""Margin in radians for which the penalty of inter-top-K is given; it is proportional to the
margin."""


class SpeakerLoss(nn.Module):
    """The abstract base of all losses, with everything that training asks of a loss."""

    num_classes = 0
    """Classes of the head; 0 without one."""
    margin: float | None = None
    """The margin, which a schedule may change; None if the loss has none."""

    def __init__(self, options: LossOptions) -> None:
        super().__init__()
        self.options = options
        self.is_metric = options.is_metric
        """Whether its input is (speakers, utterances, dim)."""
        self.sees_all_ranks = options.is_metric
        """Whether each rank computes the same loss from the embeddings of all ranks."""

    @property
    def head(self) -> Any:
        """The loss with one weight vector per speaker: this one, or a part of it."""
        return self

    def set_margin(self, margin: float) -> None:
        """Change the margin, as a schedule does before every step."""
        self.margin = margin


class ClassificationLoss(SpeakerLoss):
    """The abstract loss with a head, whose classes may be sharded over the ranks.

    The state dictionary of a sharded head is the whole head, gathered on rank 0, so all ranks must
    call `state_dict` together; a whole head can be loaded into any number of shards.
    """

    def __init__(
        self, options: LossOptions, embedding_dim: int, num_classes: int, rows_per_class: int = 1
    ) -> None:
        super().__init__(options)
        self.num_classes = num_classes
        """Classes of the whole head: speakers times voices."""
        # The operations over classes; a sharded head has a `ClassShard` instead.
        self.classes = AllClasses()
        self.weight = nn.Parameter(torch.empty(num_classes * rows_per_class, embedding_dim))

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(batch, dim) and (batch,) to (batch, classes of this rank)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and accuracy in percent, both 0-d."""
        # In float32: bfloat16 rounds logits of 16 to 32 to eighths. A rank with a shard of the head
        # sees the rows of all ranks, but only its columns; `classes` combines them, so that no loss
        # has to know about ranks.
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.logits(self.classes.shared(embeddings.float()), labels)
            loss = self.classes.cross_entropy(logits, labels)
            return loss, self.classes.accuracy_percent(logits, labels)


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
        # As torch's linear layers start.
        bound = 1 / math.sqrt(embedding_dim)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """W x + b."""
        return functional.linear(embeddings, self.weight, self.bias)


class AMSoftmax(ClassificationLoss):
    """Scaled cosines; the cosine to the utterance's own speaker is lowered by a margin.

    Source: Wang et al. 2018, "Additive Margin Softmax for Face Verification", equation 6.

    >>> loss = AMSoftmax(AMSoftmaxOptions(margin=0.5, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> loss.logits(torch.tensor([[3.0, 0.0]]), torch.tensor([0]))
    tensor([[0.5000, 0.0000]], grad_fn=<MulBackward0>)
    """

    def __init__(
        self, options: AMSoftmaxOptions, embedding_dim: int, num_classes: int, centers: int = 1
    ) -> None:
        super().__init__(options, embedding_dim, num_classes, centers)
        self.margin: float = options.margin
        self.scale = options.scale
        nn.init.xavier_normal_(self.weight)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scaled cosines, with the margin subtracted at the label."""
        cosine = self.cosines(embeddings)
        label_column = self.classes.own(labels)
        return label_column.replaced(cosine, label_column.of(cosine) - self.margin) * self.scale

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Cosines to all vectors of the head, (batch, vectors of this rank)."""
        return functional.linear(
            functional.normalize(embeddings), functional.normalize(self.weight)
        )


class AAMSoftmax(AMSoftmax):
    """Scaled cosines; the angle to the utterance's own speaker is widened by a margin.

    Past pi - margin, where widening would wrap around, the cosine is lowered by margin x
    sin(margin) instead; with `easy_margin` angles above 90 degrees do not change. If speakers have
    several centres, the nearest one counts. The angles to the `inter_top_k` nearest other speakers
    are narrowed by `inter_top_k_penalty` x margin / 0.2.

    Source: Deng et al. 2019, "ArcFace", equation 3, with the common continuation past pi - margin;
    Deng et al. 2020, "Sub-center ArcFace", equation 3; Zhao et al. 2021, "The SpeakIn system for
    VoxCeleb speaker recognition challenge 2021", section 3.3 (inter-top-K); wespeaker dfa7419,
    `models/projections.py` (its penalty follows the margin).

    >>> loss = AAMSoftmax(AAMSoftmaxOptions(margin=math.pi / 3, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> logits = loss.logits(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    >>> logits.round(decimals=3).tolist()  # cos 60 degrees
    [[0.5, 0.0]]
    """

    def __init__(self, options: AAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes, options.sub_centers)
        self.inter_top_k = options.inter_top_k

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scaled cosines, with the angle widened at the label."""
        # Equation 3 of ArcFace replaces cos(theta) of the utterance's own speaker by cos(theta +
        # margin), so that it must be nearer than the others by the margin. The addition theorem
        # gives it without an arccos.
        options: Any = self.options
        cosine = self.cosines(embeddings)  # (batch, classes x centres)
        if options.sub_centers > 1:
            cosine = cosine.unflatten(1, (-1, options.sub_centers)).amax(dim=2)  # (batch, classes)
        label_column = self.classes.own(labels)
        # Only the label's column needs the angle: (batch, 1) instead of (batch, classes).
        own_cosine = label_column.of(cosine)
        # theta + margin must not pass pi, where the cosine would rise again and reward mistakes.
        if options.easy_margin:
            limit = 0.0
            beyond_limit = own_cosine
        else:
            limit, sine = cosine_and_sine(math.pi - self.margin)
            beyond_limit = own_cosine - sine * self.margin
        widened = torch.where(own_cosine > limit, rotate(own_cosine, self.margin), beyond_limit)
        if self.inter_top_k:
            # Cosines are never below -1, so -2 keeps the utterance's own speaker out of the
            # nearest.
            others = label_column.replaced(cosine.detach(), torch.full_like(own_cosine, -2))
            nearest = self.classes.nearest(others, min(self.inter_top_k, self.num_classes - 1))
            penalty = options.inter_top_k_penalty * self.margin / PENALTY_MARGIN
            cosine = nearest.replaced(cosine, rotate(nearest.of(cosine), -penalty))
        return label_column.replaced(cosine, widened) * self.scale


def cosine_and_sine(angle: float | Tensor) -> tuple[Any, Any]:
    """Cosine and sine of a number, or of a 0-d tensor, which is what the margin of a recorded step
    is.
    """
    if isinstance(angle, Tensor):
        return angle.cos(), angle.sin()
    return math.cos(angle), math.sin(angle)


def rotate(cosine: Tensor, angle: float | Tensor) -> Tensor:
    """cos(theta + angle) from cos(theta).

    >>> rotate(torch.tensor([1.0]), math.pi / 3).round(decimals=3)
    tensor([0.5000])
    """
    sine = (1.0 - cosine.square()).clamp(SINE_FLOOR, 1.0).sqrt()
    turn_cosine, turn_sine = cosine_and_sine(angle)
    return cosine * turn_cosine - sine * turn_sine


class Columns(NamedTuple):
    """Selected columns in each row of a score matrix."""

    indices: Tensor
    """(batch, columns) int64; 0 for columns of other ranks."""
    is_local: Tensor | None = None
    """(batch, columns) bool: whether the column is on this rank; None if all are."""

    def of(self, scores: Tensor) -> Tensor:
        """The scores in these columns, (batch, columns); arbitrary for columns of other ranks."""
        return scores.gather(1, self.indices)

    def replaced(self, scores: Tensor, values: Tensor) -> Tensor:
        """The scores with these columns replaced by `values` (batch, columns)."""
        if self.is_local is not None:
            values = torch.where(self.is_local, values, self.of(scores))
        return scores.scatter(1, self.indices, values)


def accuracy_percent(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest logit is the label's, in percent, 0-d on the device.

    >>> accuracy_percent(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(50.)
    """
    return (logits.detach().argmax(dim=1) == labels).float().mean() * 100.0


class AllClasses:
    """The operations of a rank that has all classes, on its own rows."""

    cross_entropy = staticmethod(functional.cross_entropy)
    """Mean cross entropy of logits (batch, columns) and labels, 0-d."""
    accuracy_percent = staticmethod(accuracy_percent)

    def shared(self, values: Tensor) -> Tensor:
        """Mark an input used by all shards (embeddings, a common bias)."""
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over the shards."""
        return values

    def own(self, labels: Tensor) -> Columns:
        """The column of each row's label."""
        return Columns(labels.unsqueeze(1))

    def nearest(self, scores: Tensor, count: int) -> Columns:
        """The columns of the `count` highest scores of each row."""
        return Columns(scores.topk(count, dim=1).indices)
