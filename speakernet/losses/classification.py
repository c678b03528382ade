"""Losses with a head of one weight vector a speaker: softmax, AM-softmax, AAM-softmax.

They take embeddings `(batch, dim)` and labels `(batch,)` and give `(loss, accuracy)`, both on the device, accuracy in
percent. They compute in float32 whatever the precision of the trunk.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.classes import AllClasses, ClassShard, Columns
from speakernet.losses.options import (
    AAMSoftmaxOptions,
    AMSoftmaxOptions,
    LossOptions,
    SoftmaxOptions,
    SphereFace2Options,
)
from speakernet.parallel.sharding import RowShare, keep_share, share_of

# Keeps the square root of 1 - cos² differentiable where an embedding lies exactly on its speaker's vector.
SINE_FLOOR = 1e-12
Margin = float | Tensor
"""A margin is a number, or a 0-d tensor of float64 that is filled in before each step (`training.graphs`)."""


class SpeakerLoss(nn.Module):
    """The abstract base of all losses: it holds its options, and what training asks of them."""

    def __init__(self, options: LossOptions) -> None:
        super().__init__()
        self.options = options

    @property
    def is_metric(self) -> bool:
        """Whether it takes (speakers, utterances, dim)."""
        return self.options.is_metric

    @property
    def sees_all_ranks(self) -> bool:
        """Whether it takes the embeddings of all ranks together, and then gives the same on each."""
        return self.is_metric


class ClassificationLoss(SpeakerLoss):
    """The abstract loss with a head: the float32 rule, the accuracy, and where its classes lie.

    The state dictionary of a head that is shared by several ranks holds the whole head on rank 0, so that every rank
    has to ask for it at once; a whole head can be loaded into any number of shares.
    """

    def __init__(self, options: LossOptions, num_classes: int) -> None:
        super().__init__(options)
        self.classes = AllClasses(num_classes)
        self.register_state_dict_post_hook(_join_shares)
        self.register_load_state_dict_pre_hook(_take_shares)

    @property
    def num_classes(self) -> int:
        """Speakers of the whole head, those of all speeds."""
        return self.classes.num_classes

    @property
    def sees_all_ranks(self) -> bool:
        """See `SpeakerLoss`."""
        return isinstance(self.classes, ClassShard)

    def shard(self, rank: int, world_size: int) -> None:
        """Keep only this rank's share of the classes; call it before an optimizer is made, the same on every rank.

        Raises:
            ValueError: there are fewer classes than ranks.
        """
        num_classes = self.classes.num_classes
        self.classes = ClassShard(num_classes, rank, world_size)
        for parameter in self.parameters(recurse=False):
            # A single number belongs to all classes.
            if parameter.ndim:
                keep_share(parameter, RowShare(num_classes, rank, world_size, len(parameter) // num_classes))

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(batch, dim) and (batch,) to (batch, classes that lie here)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and accuracy in percent, both 0-d.

        Args:
            embeddings: (batch, dim).
            labels: (batch,) int64 in 0..classes-1.
        """
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
        super().__init__(options, num_classes)
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
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

    def __init__(self, options: AMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, num_classes)
        self.margin: Margin = options.margin  # of its own, since a schedule moves it
        self.scale = options.scale
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.xavier_normal_(self.weight)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scale times (cosine, minus the margin at the label)."""
        cosine = functional.linear(functional.normalize(embeddings), functional.normalize(self.weight))
        own = self.classes.own(labels)
        return own.replaced(cosine, own.of(cosine) - self.margin) * self.scale


class AAMSoftmax(ClassificationLoss):
    """Scaled cosines, the angle to the speaker's own vector widened by a margin.

    Past the angle where widening would wrap around (pi - margin), the cosine is lowered by margin x sin(margin)
    instead; with `easy_margin` angles above 90 degrees are left alone. Of several centres a speaker the nearest counts.
    The `inter_top_k` nearest other speakers of each utterance seem nearer than they are by `inter_top_k_penalty`.

    Source: Deng et al. 2019, "ArcFace", equation 3, with the common continuation past pi - margin; Deng et al. 2020,
    "Sub-center ArcFace", equation 3; Zhao et al. 2021, "The SpeakIn system for VoxCeleb speaker recognition challenge
    2021", section 3.3 (inter-top-K).

    >>> loss = AAMSoftmax(AAMSoftmaxOptions(margin=math.pi / 3, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> loss.logits(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).round(decimals=3).tolist()  # cos 60 degrees
    [[0.5, 0.0]]
    """

    def __init__(self, options: AAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, num_classes)
        self.margin: Margin = options.margin  # of its own, since a schedule moves it
        self.full_margin = options.margin
        self.scale = options.scale
        self.easy_margin = options.easy_margin
        self.sub_centers = options.sub_centers
        self.inter_top_k = min(options.inter_top_k, num_classes - 1)
        self.inter_top_k_penalty = options.inter_top_k_penalty
        # The centres of a speaker are neighbours: row = speaker * centres + centre.
        self.weight = nn.Parameter(torch.empty(num_classes * options.sub_centers, embedding_dim))
        nn.init.xavier_normal_(self.weight)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scale times (cosine, of the widened angle at the label)."""
        cosine = functional.linear(functional.normalize(embeddings), functional.normalize(self.weight))
        if self.sub_centers > 1:
            cosine = cosine.unflatten(1, (-1, self.sub_centers)).amax(dim=2)  # (batch, classes)
        own = self.classes.own(labels)
        # Only the label's column needs the angle: (batch, 1) instead of (batch, classes).
        widened = self._widened(own.of(cosine))
        if self.inter_top_k:
            cosine = self._with_neighbours_nearer(cosine, own)
        return own.replaced(cosine, widened) * self.scale

    def _widened(self, own_cosine: Tensor) -> Tensor:
        widened = turned(own_cosine, self.margin)
        if self.easy_margin:
            return torch.where(own_cosine > 0, widened, own_cosine)
        beyond = own_cosine - sine_of(math.pi - self.margin) * self.margin
        return torch.where(own_cosine > cosine_of(math.pi - self.margin), widened, beyond)

    def _with_neighbours_nearer(self, cosine: Tensor, own: Columns) -> Tensor:
        # A cosine is never below -1: at -2 the own speaker is nobody's neighbour.
        others = own.replaced(cosine.detach(), torch.full_like(own.indices, -2, dtype=cosine.dtype))
        nearest = self.classes.nearest(others, self.inter_top_k)
        share = self.margin / self.full_margin if self.full_margin else 1.0
        share = share.clamp(max=1.0) if isinstance(share, Tensor) else min(1.0, share)
        return nearest.replaced(cosine, turned(nearest.of(cosine), -self.inter_top_k_penalty * share))


class SphereFace2(ClassificationLoss):
    """One yes-or-no question for every speaker: is the utterance this speaker's?

    The learned bias moves the boundary of all questions. Its accuracy is that of the largest cosine, the own one
    lowered by the margin.

    Source: Wen et al. 2022, "SphereFace2", equation 8 (type A is MArcFace's margin, C is CosFace's); Han et al. 2023,
    "Exploring binary classification loss for speaker verification", equations 5 to 9.

    >>> loss = SphereFace2(SphereFace2Options(margin=0.0, scale=1.0, positive_weight=0.5), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))[0].item(), 4)  # g(1) = 1, g(0) = -3/4
    0.3501
    """

    def __init__(self, options: SphereFace2Options, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, num_classes)
        self.margin: Margin = options.margin  # of its own, since a schedule moves it
        self.scale = options.scale
        self.widens_angle = options.margin_type == "A"
        self.positive_weight = options.positive_weight
        self.exponent = options.exponent
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy in percent, both 0-d.

        Args:
            embeddings: (batch, dim).
            labels: (batch,) int64 in 0..classes-1.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            rows = functional.normalize(self.classes.shared(embeddings.float()))
            cosine = functional.linear(rows, functional.normalize(self.weight))
            own, bias = self.classes.own(labels), self.classes.shared(self.bias)
            own_cosine = own.of(cosine)
            positive = functional.softplus(-self._answer(own_cosine, bias, is_own=True))  # (batch, 1)
            others = functional.softplus(self._answer(cosine, bias, is_own=False))
            others = own.replaced(others, torch.zeros_like(own_cosine))
            loss = self.positive_weight * own.only_here(positive).squeeze(1)
            loss = self.classes.total(loss + (1 - self.positive_weight) * others.sum(dim=1))
            return loss.mean(), self.classes.accuracy_percent(own.replaced(cosine, own_cosine - self.margin), labels)

    def _answer(self, cosine: Tensor, bias: Tensor, *, is_own: bool) -> Tensor:
        """How strongly the answer is yes, made harder by the margin: for yes where the speaker is the own one."""
        if self.widens_angle:
            return self.scale * self._spread(self._widened(cosine) if is_own else turned(cosine, -self.margin)) + bias
        margin = self.margin if is_own else -self.margin
        return self.scale * (self._spread(cosine) - margin) + bias

    def _widened(self, cosine: Tensor) -> Tensor:
        # Past pi - margin the angle would wrap around; the cosine falls on from there.
        lowest = cosine_of(self.margin)
        return torch.where(cosine > -lowest, turned(cosine, self.margin), cosine - 1.0 + lowest)

    def _spread(self, cosine: Tensor) -> Tensor:
        # Rounding may leave a cosine a hair below -1, where a fractional power is not a number.
        return 2.0 * ((cosine + 1.0) / 2.0).clamp(min=0.0) ** self.exponent - 1.0


def turned(cosine: Tensor, angle: Margin) -> Tensor:
    """cos(theta + angle) of cos(theta).

    >>> turned(torch.tensor([1.0]), math.pi / 3).round(decimals=3)
    tensor([0.5000])
    """
    sine = (1.0 - cosine.square()).clamp(SINE_FLOOR, 1.0).sqrt()
    return cosine * cosine_of(angle) - sine * sine_of(angle)


def cosine_of(angle: Margin) -> Margin:
    """Cosine of an angle, computed where that is kept."""
    return angle.cos() if isinstance(angle, Tensor) else math.cos(angle)


def sine_of(angle: Margin) -> Margin:
    """Sine of an angle, computed where that is kept."""
    return angle.sin() if isinstance(angle, Tensor) else math.sin(angle)


def _join_shares(loss: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in loss.named_parameters(recurse=False):
        own = share_of(parameter)
        if own is not None:
            state[prefix + name] = own.join(parameter)


def _take_shares(loss: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    for name, parameter in loss.named_parameters(recurse=False):
        own, found = share_of(parameter), state.get(prefix + name)
        # What is of another number of classes is refused by torch, which names the shapes.
        if own is not None and isinstance(found, Tensor) and found.ndim and len(found) == own.num_rows:
            state[prefix + name] = own.take(found)
