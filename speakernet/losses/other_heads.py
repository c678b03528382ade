"""Heads other than a softmax over cosines: SphereFace2's binary classifications, and distances in
hyperbolic space.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.classification import ClassificationLoss, cosine_and_sine, rotate
from speakernet.losses.options import HAMSoftmaxOptions, SphereFace2Options

# Keeps points away from the edge of the ball, denominators from 0, and the argument of arcosh from
# 1 (infinite slope).
EPSILON = 1e-5


class SphereFace2(ClassificationLoss):
    """A binary classification for every speaker: is the utterance from this speaker?

    A learned bias shifts all decision boundaries. Accuracy is that of the largest cosine, after
    subtracting the margin from the own speaker's.

    Source: Wen et al. 2022, "SphereFace2", equation 8 (type A is MArcFace's margin, C is
    CosFace's); Han et al. 2023, "Exploring binary classification loss for speaker verification",
    equations 5 to 9.

    >>> loss = SphereFace2(SphereFace2Options(margin=0.0, scale=1.0, positive_weight=0.5), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> value, _ = loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    >>> round(value.item(), 4)  # g(1) = 1, g(0) = -3/4
    0.3501
    """

    def __init__(self, options: SphereFace2Options, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.margin: float = options.margin
        self.scale = options.scale
        self.exponent = options.exponent
        self.positive_weight = options.positive_weight
        self.widens_angle = options.margin_type == "A"
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy in percent, both 0-d."""
        # Equation 8: every speaker answers "is it me?" with a logistic loss, one yes and many noes
        # for each utterance. `positive_weight` keeps the one yes from drowning among thousands of
        # noes. There is no softmax, so speakers do not compete, and a shard only needs the sum.
        with torch.autocast(embeddings.device.type, enabled=False):
            units = functional.normalize(self.classes.shared(embeddings.float()))
            cosine = functional.linear(units, functional.normalize(self.weight))  # (batch, classes)
            label_column = self.classes.own(labels)
            bias = self.classes.shared(self.bias)
            own_cosine = label_column.of(cosine)  # (batch, 1)
            positive = functional.softplus(-self._answer(own_cosine, bias, is_own=True))
            others = functional.softplus(self._answer(cosine, bias, is_own=False))
            weighted = label_column.replaced(
                (1 - self.positive_weight) * others, self.positive_weight * positive
            )
            loss = self.classes.total(weighted.sum(dim=1)).mean()
            lowered = label_column.replaced(cosine, own_cosine - self.margin)
            return loss, self.classes.accuracy_percent(lowered, labels)

    def _answer(self, cosine: Tensor, bias: Tensor, *, is_own: bool) -> Tensor:
        """The logit of "yes"; the margin makes a "yes" harder for the own speaker, and a "no"
        harder for the others.
        """
        margin = self.margin if is_own else -self.margin
        if not self.widens_angle:
            return self.scale * (self._spread(cosine) - margin) + bias
        rotated = rotate(cosine, margin)
        if is_own:
            # Past pi - margin the angle would wrap around; the result then falls linearly in the
            # cosine.
            margin_cosine, _ = cosine_and_sine(margin)
            is_within = cosine > -margin_cosine
            rotated = torch.where(is_within, rotated, cosine - 1.0 + margin_cosine)
        return self.scale * self._spread(rotated) + bias

    def _spread(self, cosine: Tensor) -> Tensor:
        # Rounding may leave a cosine just below -1, where a fractional power is NaN.
        return 2.0 * ((cosine + 1.0) / 2.0).clamp(min=0.0) ** self.exponent - 1.0


class HAMSoftmax(ClassificationLoss):
    """Negative scaled distances in the Poincaré ball between embeddings and centres, with a margin
    on the own centre's.

    Embeddings and centres beyond the radius 1 / sqrt(curvature) are projected onto it. The distance
    between two points is arcosh(1 + 2 |x - y|² / ((1 - |x|²) (1 - |y|²))).

    Source: `ham_margin` in wespeaker dfa7419, `models/projections.py`, after Fang and He 2026,
    "Hyperbolic additive margin softmax with hierarchical information for speaker verification",
    whose own code is unpublished.

    >>> loss = HAMSoftmax(HAMSoftmaxOptions(margin=0.5, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.tensor([[0.0, 0.0], [0.5, 0.0]]))
    >>> logits = loss.logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    >>> round(logits[0, 1].item(), 4)  # -(arcosh(5 / 3) + 0.5)
    -1.5986
    """

    def __init__(self, options: HAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.margin: float = options.margin
        self.scale = options.scale
        self.radius = (1.0 - EPSILON) / options.curvature**0.5
        # Near the origin, where the ball is almost flat.
        nn.init.normal_(self.weight, std=1e-3)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Negative scaled distances, with the margin added to the distance at the label."""
        # In the ball distances grow towards the edge: there is space for many speakers far from
        # each other, with what they have in common near the origin.
        points, points_to_edge = self._project(embeddings)
        centres, centres_to_edge = self._project(self.weight)
        # |x|² + |y|² - 2 x y instead of all differences: (batch, classes), not (batch, classes,
        # dim).
        squares = (
            points.square().sum(dim=1, keepdim=True)
            + centres.square().sum(dim=1)
            - 2.0 * points @ centres.T
        )
        to_edge = (points_to_edge * centres_to_edge.T).clamp(min=EPSILON)
        # No distance is below 0.004, because of the slope at 0.
        distances = (1.0 + 2.0 * squares / to_edge).clamp(min=1.0 + EPSILON).acosh()
        label_column = self.classes.own(labels)
        widened = label_column.of(distances) + self.margin
        return -self.scale * label_column.replaced(distances, widened)

    def _project(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(points, dim), projected onto the radius if beyond it, and 1 - |x|² for each, (points,
        1).
        """
        norms = points.norm(dim=1, keepdim=True)
        points = points * (self.radius / norms.clamp(min=EPSILON)).clamp(max=1.0)
        # At the edge the difference would cancel, but its exact value is known.
        return points, torch.where(norms > self.radius, 1.0 - self.radius**2, 1.0 - norms.square())
