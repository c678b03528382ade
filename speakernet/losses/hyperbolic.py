"""Classification by distance in hyperbolic space: HAM-softmax."""

import torch
from torch import Tensor, nn

from speakernet.losses.classification import ClassificationLoss
from speakernet.losses.options import HAMSoftmaxOptions

# Kept from the edge of the ball, from a denominator of 0 and, of the cosh, from 1, where the slope of its inverse is
# infinite.
EPSILON = 1e-5
# Deviation of the centres at the start: near the origin, as far from every edge.
INITIAL_DEVIATION = 1e-3


class HAMSoftmax(ClassificationLoss):
    """Minus the scaled distances in the Poincaré ball between embedding and centres, the own one's plus a margin.

    Embeddings and centres beyond the radius 1 / sqrt(curvature) are drawn back to it. The distance between two points
    is arcosh(1 + 2 |x - y|² / ((1 - |x|²) (1 - |y|²))).

    Source: wespeaker dfa7419, `models/projections.py`, its `ham_margin`, after Fang and He 2026, "Hyperbolic additive
    margin softmax with hierarchical information for speaker verification", whose own code is not published.

    >>> loss = HAMSoftmax(HAMSoftmaxOptions(margin=0.5, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.tensor([[0.0, 0.0], [0.5, 0.0]]))
    >>> round(loss.logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))[0, 1].item(), 4)  # -(arcosh(5 / 3) + 0.5)
    -1.5986
    """

    def __init__(self, options: HAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options, num_classes)
        self.margin: float | Tensor = options.margin  # of its own, since a schedule moves it
        self.scale = options.scale
        self.radius = (1.0 - EPSILON) / options.curvature**0.5
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Minus scale times (distance, plus the margin at the label)."""
        distances = self.distances(embeddings, self.weight)
        own = self.classes.own(labels)
        return -self.scale * own.replaced(distances, own.of(distances) + self.margin)

    def distances(self, left: Tensor, right: Tensor) -> Tensor:
        """Of all pairs, (left rows, right rows); a few thousandths at least."""
        left, left_edge = self._inside(left)
        right, right_edge = self._inside(right)
        squares = left.square().sum(dim=1, keepdim=True) + right.square().sum(dim=1) - 2.0 * left @ right.T
        from_edge = (left_edge * right_edge.T).clamp(min=EPSILON)
        return (1.0 + 2.0 * squares / from_edge).clamp(min=1.0 + EPSILON).acosh()

    def _inside(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(points, dim), those beyond the radius drawn back to it, and 1 - |x|² of each, (points, 1)."""
        norms = points.norm(dim=1, keepdim=True)
        points = points * (self.radius / norms.clamp(min=EPSILON)).clamp(max=1.0)
        # At the edge the difference is small beside what it is of: there it is known beforehand.
        return points, torch.where(norms > self.radius, 1.0 - self.radius**2, 1.0 - norms.square())
