"""The weighted sum of a loss with a head and a loss that compares utterances, and voxceleb_trainer's case of it."""

from typing import Any, ClassVar

from torch import Tensor

from speakernet.losses.metric import MetricLoss
from speakernet.losses.options import (
    CLASSIFICATIONS,
    METRICS,
    AngularPrototypicalOptions,
    CombinedOptions,
    SoftmaxOptions,
    SoftmaxPrototypicalOptions,
)
from speakernet.options import create


class Combined(MetricLoss):
    """A classification loss over all utterances and a metric loss between them, weighted and added.

    Its accuracy and its margin are those of the classification loss.

    Args:
        options: the two losses with their options and weights.
        embedding_dim: of the embeddings.
        num_classes: speakers of the head.
        seed: of the draws, where the metric loss makes any.

    Source: Heo et al. 2020, "Clova baseline system for the VoxCeleb Speaker Recognition Challenge 2020", section 3.2,
    for softmax and angular prototypical with weights of 1.

    >>> import torch
    >>> options = CombinedOptions(classification=SoftmaxOptions(), metric_weight=0.5)
    >>> loss = Combined(options, embedding_dim=3, num_classes=4)
    >>> _ = loss.classification.weight.data.zero_(), loss.classification.bias.data.zero_()
    >>> value, _ = loss(torch.ones(2, 2, 3), torch.tensor([0, 3]))
    >>> round(value.item(), 4)  # log 4 + (log 2) / 2
    1.7329
    """

    PARTS: ClassVar[tuple[str, str]] = ("classification", "metric")
    """The names under which the two losses keep their weights."""

    def __init__(self, options: CombinedOptions, embedding_dim: int, num_classes: int, seed: int = 0) -> None:
        super().__init__(options)
        self.weights = (options.classification_weight, options.metric_weight)
        facts: dict[str, Any] = {"embedding_dim": embedding_dim, "num_classes": num_classes, "seed": seed}
        for name, chosen, table in zip(
            self.PARTS, (options.classification, options.metric), (CLASSIFICATIONS, METRICS), strict=True
        ):
            self.add_module(name, create(table[chosen.name], chosen, **facts))

    @property
    def margin(self) -> float | Tensor:
        """That of the classification loss.

        Raises:
            AttributeError: it has none.
        """
        return self.get_submodule(self.PARTS[0]).margin  # type: ignore[return-value]

    @margin.setter
    def margin(self, margin: float | Tensor) -> None:
        """Move it, as a schedule does."""
        self.get_submodule(self.PARTS[0]).margin = margin  # type: ignore[assignment]

    @property
    def num_classes(self) -> int:
        """That of the classification loss."""
        return self.get_submodule(self.PARTS[0]).num_classes  # type: ignore[return-value]

    def shard(self, rank: int, world_size: int) -> None:
        """Share the classes of the classification loss; see `ClassificationLoss.shard`."""
        self.get_submodule(self.PARTS[0]).shard(rank, world_size)  # type: ignore[operator]

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Both losses, weighted and added."""
        classification, metric = (self.get_submodule(name) for name in self.PARTS)
        utterances = embeddings.shape[1]
        first, accuracy = classification(embeddings.flatten(0, 1), labels.repeat_interleave(utterances))
        second, _ = metric(embeddings, labels)
        return self.weights[0] * first + self.weights[1] * second, accuracy


class SoftmaxPrototypical(Combined):
    """Softmax and angular prototypical, added, with the names of weights that checkpoints of voxceleb_trainer get here.

    >>> loss = SoftmaxPrototypical(SoftmaxPrototypicalOptions(), embedding_dim=3, num_classes=4)
    >>> list(loss.state_dict())
    ['softmax.weight', 'softmax.bias', 'angular.scale', 'angular.bias']
    """

    PARTS: ClassVar[tuple[str, str]] = ("softmax", "angular")

    def __init__(self, options: SoftmaxPrototypicalOptions, embedding_dim: int, num_classes: int) -> None:
        metric = AngularPrototypicalOptions(initial_scale=options.initial_scale, initial_bias=options.initial_bias)
        super().__init__(CombinedOptions(classification=SoftmaxOptions(), metric=metric), embedding_dim, num_classes)
