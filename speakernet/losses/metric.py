"""Losses that compare the utterances of a batch with each other: prototypical, angular prototypical.

They take embeddings `(speakers, utterances, dim)`, each row one speaker and no speaker twice, and the speakers' labels,
which only the losses with a head look at; they give `(loss, accuracy)` on the device, in float32.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.classification import accuracy_percent


class MetricLoss(nn.Module):
    """What every metric loss shares: the check of its input and the float32 rule."""

    is_metric: ClassVar[bool] = True
    min_utterances: ClassVar[int] = 2
    normalize_embeddings: ClassVar[bool] = True
    """Whether voxceleb_trainer scores embeddings of this loss after normalising them (its `test_normalize`)."""

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of float32 embeddings (speakers, utterances, dim)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and accuracy in percent, both 0-d.

        Args:
            embeddings: (speakers, utterances, dim).
            labels: (speakers,) int64.

        Raises:
            ValueError: fewer utterances of a speaker than the loss compares.
        """
        if embeddings.ndim != 3 or embeddings.shape[1] < self.min_utterances:
            raise ValueError(
                f"{type(self).__name__} compares at least {self.min_utterances} utterances of each speaker, found "
                f"embeddings of shape {tuple(embeddings.shape)}; set data.utterances_per_speaker (nPerSpeaker)"
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compare(embeddings.float(), labels)


class Prototypical(MetricLoss):
    """Each speaker's first utterance has to be nearest to the mean of that speaker's other utterances.

    Source: Snell et al. 2017, "Prototypical Networks", equations 1 and 2, squared Euclidean distance.

    >>> apart = torch.tensor([[[0.0], [0.0]], [[1.0], [1.0]]])
    >>> round(Prototypical()(apart, torch.arange(2))[0].item(), 4)  # log(1 + 1 / e)
    0.3133
    """

    # Scored on raw Euclidean distances, which is what it trains.
    normalize_embeddings: ClassVar[bool] = False

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy over minus the squared distances."""
        queries, prototypes = query_and_prototype(embeddings)
        logits = -squared_distances(queries, prototypes)
        return _cross_entropy_of_diagonal(logits)


class AngularPrototypical(MetricLoss):
    """Prototypical loss on scaled cosines with a learned scale and bias.

    Args:
        initial_scale: starting value of the scale.
        initial_bias: starting value of the bias.

    Source: Chung et al. 2020, "In defence of metric learning for speaker recognition", section 2.2.

    >>> same = torch.ones(2, 2, 3)
    >>> round(AngularPrototypical()(same, torch.arange(2))[0].item(), 4)  # log 2: all cosines alike
    0.6931
    """

    def __init__(self, initial_scale: float = 10.0, initial_bias: float = -5.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(initial_scale))
        self.bias = nn.Parameter(torch.tensor(initial_bias))

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy over scale x cosine + bias."""
        queries, prototypes = query_and_prototype(embeddings)
        cosine = functional.normalize(queries, eps=1e-8) @ functional.normalize(prototypes, eps=1e-8).T
        return _cross_entropy_of_diagonal(cosine * self.scale + self.bias)


def query_and_prototype(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """(speakers, utterances, dim) to the first utterance and the mean of the others, each (speakers, dim)."""
    return embeddings[:, 0], embeddings[:, 1:].mean(dim=1)


def squared_distances(left: Tensor, right: Tensor) -> Tensor:
    """Squared Euclidean distances of all pairs, (left rows, right rows).

    >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[25.,  1.]])
    """
    # By difference, not by the expanded square: that one cancels when distances are small beside the norms.
    return (left.unsqueeze(1) - right.unsqueeze(0)).square().sum(dim=2)


def _cross_entropy_of_diagonal(logits: Tensor) -> tuple[Tensor, Tensor]:
    own = torch.arange(logits.shape[0], device=logits.device)
    return functional.cross_entropy(logits, own), accuracy_percent(logits, own)
