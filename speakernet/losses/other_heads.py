"""Heads other than a softmax over cosines: SphereFace2's binary classifications, and distances in
hyperbolic space.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.classification import ClassificationLoss, cosine_of, turned
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
    >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))[0].item(), 4)  # g(1) = 1, g(0) = -3/4
    0.3501
    """

    def __init__(self, options: SphereFace2Options, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.margin = options.margin  # a schedule changes it
        self.scale = options.scale
        self.exponent = options.exponent
        self.positive_weight = options.positive_weight
        self.widens_angle = options.margin_type == "A"
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy in percent, both 0-d."""
        with torch.autocast(embeddings.device.type, enabled=False):
            rows = functional.normalize(self.classes.shared(embeddings.float()))
            cosine = functional.linear(rows, functional.normalize(self.weight))
            own = self.classes.own(labels)
            bias = self.classes.shared(self.bias)
            own_cosine = own.of(cosine)
            positive = functional.softplus(
                -self._answer(own_cosine, bias, is_own=True)
            )  # (batch, 1)
            others = functional.softplus(self._answer(cosine, bias, is_own=False))
            weighted = own.replaced(
                (1 - self.positive_weight) * others, self.positive_weight * positive
            )
            loss = self.classes.total(weighted.sum(dim=1))
            return loss.mean(), self.classes.accuracy_percent(
                own.replaced(cosine, own_cosine - self.margin), labels
            )

    def _answer(self, cosine: Tensor, bias: Tensor, *, is_own: bool) -> Tensor:
        """The logit of "yes"; the margin makes a "yes" harder for the own speaker, and a "no"
        harder for the others.
        """
        margin = self.margin if is_own else -self.margin
        if not self.widens_angle:
            return self.scale * (self._spread(cosine) - margin) + bias
        moved = turned(cosine, margin)
        if is_own:
            # Past pi - margin the angle would wrap around; the result then falls linearly in the
            # cosine.
            lowest = cosine_of(margin)
            moved = torch.where(cosine > -lowest, moved, cosine - 1.0 + lowest)
        return self.scale * self._spread(moved) + bias

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
    >>> round(loss.logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))[0, 1].item(), 4)  # -(arcosh(5 / 3) + 0.5)
    -1.5986
    """

    def __init__(self, options: HAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, embedding_dim, num_classes)
        self.margin, self.scale = options.margin, options.scale  # a schedule changes the margin
        self.radius = (1.0 - EPSILON) / options.curvature**0.5
        nn.init.normal_(self.weight, std=1e-3)  # near the origin

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Negative scaled distances, with the margin added to the distance at the label."""
        (left, left_edge), (right, right_edge) = self._inside(embeddings), self._inside(self.weight)
        squares = (
            left.square().sum(dim=1, keepdim=True)
            + right.square().sum(dim=1)
            - 2.0 * left @ right.T
        )
        from_edge = (left_edge * right_edge.T).clamp(min=EPSILON)
        # The clamp keeps distances above a few thousandths.
        distances = (1.0 + 2.0 * squares / from_edge).clamp(min=1.0 + EPSILON).acosh()
        own = self.classes.own(labels)
        return -self.scale * own.replaced(distances, own.of(distances) + self.margin)

    def _inside(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(points, dim), projected onto the radius if beyond it, and 1 - |x|² for each, (points,
        1).
        """
        norms = points.norm(dim=1, keepdim=True)
        points = points * (self.radius / norms.clamp(min=EPSILON)).clamp(max=1.0)
        # At the edge the difference would cancel, but its exact value is known.
        return points, torch.where(norms > self.radius, 1.0 - self.radius**2, 1.0 - norms.square())
