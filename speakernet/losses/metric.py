"""Losses that compare the utterances of a batch, and their weighted sum with a loss that has a
head.

They take embeddings `(speakers, utterances, dim)`, with a different speaker in each row, and the
speakers' labels, which only a head needs; they return `(loss, accuracy)` on the device, in float32.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.classification import SpeakerLoss, accuracy_percent
from speakernet.losses.options import (
    LOSSES,
    AngularPrototypicalOptions,
    CombinedOptions,
    SoftmaxOptions,
    SoftmaxPrototypicalOptions,
    SupervisedContrastiveOptions,
    TripletOptions,
)
from speakernet.options import create


class MetricLoss(SpeakerLoss):
    """The abstract metric loss, which checks its input and computes in float32."""

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of float32 embeddings (speakers, utterances, dim)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and accuracy in percent, both 0-d."""
        if embeddings.ndim != 3 or embeddings.shape[1] < self.options.min_utterances:
            raise ValueError(
                f"{type(self).__name__} needs at least {self.options.min_utterances} utterances of "
                f"each speaker, found embeddings of shape {tuple(embeddings.shape)}; set "
                "data.utterances_per_speaker (nPerSpeaker)"
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compare(embeddings.float(), labels)


class Prototypical(MetricLoss):
    """Each speaker's first utterance must be nearest to the mean of that speaker's other
    utterances.

    Source: Snell et al. 2017, "Prototypical Networks", equations 1 and 2, squared Euclidean
    distance.

    >>> apart = torch.tensor([[[0.0], [0.0]], [[1.0], [1.0]]])
    >>> from speakernet.losses.options import PrototypicalOptions
    >>> value, _ = Prototypical(PrototypicalOptions())(apart, torch.arange(2))
    >>> round(value.item(), 4)  # log(1 + 1 / e)
    0.3133
    """

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy over negative squared distances."""
        queries, prototypes = query_and_prototype(embeddings)
        # voxceleb_trainer differs: under torch 2 its `pairwise_distance` accidentally uses a
        # different axis.
        return _cross_entropy_of_diagonal(-squared_distances(queries, prototypes))


class LearnedScale(MetricLoss):
    """The abstract metric loss with a learned scale and bias for its cosines."""

    def __init__(self, options: AngularPrototypicalOptions) -> None:
        super().__init__(options)
        self.scale = nn.Parameter(torch.tensor(options.initial_scale))
        self.bias = nn.Parameter(torch.tensor(options.initial_bias))


class AngularPrototypical(LearnedScale):
    """Prototypical loss on scaled cosines with a learned scale and bias.

    Source: Chung et al. 2020, "In defence of metric learning for speaker recognition", section 2.2.

    >>> same = torch.ones(2, 2, 3)
    >>> loss = AngularPrototypical(AngularPrototypicalOptions())
    >>> round(loss(same, torch.arange(2))[0].item(), 4)  # log 2: all cosines are equal
    0.6931
    """

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy over scale x cosine + bias."""
        queries, prototypes = query_and_prototype(embeddings)
        queries = functional.normalize(queries, eps=1e-8)
        prototypes = functional.normalize(prototypes, eps=1e-8)
        cosine = queries @ prototypes.T  # (speakers, speakers)
        return _cross_entropy_of_diagonal(cosine * self.scale + self.bias)


class GE2E(LearnedScale):
    """Every utterance must be nearest to its own speaker's centroid, computed without that
    utterance.

    Cosines are floored at 1e-6 before scale and bias, as in voxceleb_trainer.

    Source: Wan et al. 2018, "Generalized end-to-end loss for speaker verification", equations 5, 6,
    8 and 9.

    >>> from speakernet.losses.options import GE2EOptions
    >>> same = torch.ones(2, 3, 4)
    >>> value, _ = GE2E(GE2EOptions())(same, torch.arange(2))
    >>> round(value.item(), 4)  # log 2: all cosines are equal
    0.6931
    """

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of every utterance over all centroids."""
        speakers, utterances, _ = embeddings.shape
        # A centroid that contains the utterance would be too easy a target, so its own speaker's is
        # computed from the sum without it (equation 8); those of the others need no such care.
        total = embeddings.sum(dim=1, keepdim=True)  # (speakers, 1, dim)
        own_centroids = functional.normalize(
            (total - embeddings) / (utterances - 1), dim=2, eps=1e-8
        )
        centroids = functional.normalize(total.squeeze(1) / utterances, eps=1e-8)
        unit = functional.normalize(embeddings, dim=2, eps=1e-8)
        cosine = unit @ centroids.T  # (speakers, utterances, speakers)
        own_cosine = (unit * own_centroids).sum(dim=2, keepdim=True)  # (speakers, utterances, 1)
        rows = torch.arange(speakers, device=embeddings.device)
        own_column = rows.view(-1, 1, 1).expand(-1, utterances, 1)  # (speakers, utterances, 1)
        cosine = cosine.scatter(2, own_column, own_cosine)
        # (speakers x utterances, speakers)
        logits = (cosine.clamp(min=1e-6) * self.scale + self.bias).flatten(0, 1)
        targets = rows.repeat_interleave(utterances)
        return functional.cross_entropy(logits, targets), accuracy_percent(logits, targets)


class SupervisedContrastive(MetricLoss):
    """Every utterance must be nearer to each other utterance of its speaker than to the rest of the
    batch.

    Accuracy is the share of utterances whose nearest other utterance is from the same speaker.

    Source: Khosla et al. 2020, "Supervised contrastive learning", equation 2, averaged over the
    utterances.

    >>> same = torch.ones(2, 2, 3)
    >>> loss = SupervisedContrastive(SupervisedContrastiveOptions())
    >>> round(loss(same, torch.arange(2))[0].item(), 4)  # log 3: the other three are equal
    1.0986
    """

    options: SupervisedContrastiveOptions

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of every utterance over all others, averaged over those of its speaker."""
        speakers, utterances, _ = embeddings.shape
        # Not one positive against the rest, but the mean over all positives, each against the whole
        # batch including the other positives (the paper's `L_out`, its better variant).
        unit = functional.normalize(embeddings.flatten(0, 1), eps=1e-8)  # (utterances of all, dim)
        itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
        logits = (unit @ unit.T / self.options.temperature).masked_fill(itself, -torch.inf)
        speaker_of = torch.arange(speakers, device=unit.device).repeat_interleave(utterances)
        positive = (speaker_of.unsqueeze(1) == speaker_of) & ~itself
        likelihoods = logits.log_softmax(dim=1).masked_fill(~positive, 0.0).sum(dim=1)
        nearest = speaker_of[logits.detach().argmax(dim=1)]
        accuracy = (nearest == speaker_of).float().mean() * 100.0
        return -likelihoods.mean() / (utterances - 1), accuracy


class Triplet(MetricLoss):
    """Anchor and positive must be nearer, in squared distance of unit vectors, than anchor and a
    mined negative.

    The anchor is a speaker's first utterance, the positive the second, the negative another
    speaker's second. Accuracy is the share of triplets whose positive is nearer than the negative.

    Semi-hard negatives (`hard_rank` below 0) are drawn from those farther than the positive by less
    than the margin; if there are none, from all.

    Source: Schroff et al. 2015, "FaceNet", equation 3 and section 3.2; mining by rank as in
    voxceleb_trainer.

    >>> speakers = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    >>> loss = Triplet(TripletOptions(margin=0.5))
    >>> [value.item() for value in loss(speakers, torch.arange(2))]  # squared distances 0 and 2
    [0.0, 100.0]
    """

    def __init__(self, options: TripletOptions, seed: int = 0) -> None:
        super().__init__(options)
        self.margin: float = options.margin
        self.hard_probability = options.hard_probability
        self.hard_rank = options.hard_rank
        # Always on the host, so that its state can be resumed on any machine.
        self.generator = torch.Generator().manual_seed(seed)

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean hinge of squared distances."""
        speakers, utterances, _ = embeddings.shape
        if utterances != 2 or speakers < 2:
            raise ValueError(
                f"Triplet needs exactly 2 utterances of at least 2 speakers, found {utterances} of "
                f"{speakers}; set data.utterances_per_speaker (nPerSpeaker) to 2"
            )
        anchors, positives = functional.normalize(embeddings, dim=2).unbind(dim=1)  # (batch, dim)
        # Most random triplets are already right and teach nothing, and the hardest ones are often
        # wrong labels. `mine` draws in between.
        with torch.no_grad():
            negatives = self.mine(squared_distances(anchors, positives))
        to_positive = (anchors - positives).square().sum(dim=1)
        to_negative = (anchors - positives[negatives]).square().sum(dim=1)
        nearer = (to_positive.detach() < to_negative.detach()).float().mean() * 100.0
        return (to_positive - to_negative + self.margin).relu().mean(), nearer

    def mine(self, distances: Tensor) -> Tensor:
        """A negative for every anchor: (speakers,) indices of other speakers."""
        count = distances.shape[0]
        # One uniform number picks the candidate, the other decides whether it is a hard one.
        draws = torch.rand((2, count), generator=self.generator)
        pick, is_hard = draws.to(distances.device, non_blocking=True)
        is_own = torch.eye(count, dtype=torch.bool, device=distances.device)
        # Nearest first, the own speaker last.
        order = distances.masked_fill(is_own, torch.inf).argsort(dim=1)
        anyone = torch.full_like(pick, count - 1)
        if self.hard_rank < 0:
            own_distance = distances.diagonal().unsqueeze(1)
            is_farther = (distances > own_distance) & ~is_own
            is_semi = is_farther & (distances < own_distance + self.margin)
            # In `order` the semi-hard negatives follow each other, after those that are too hard.
            num_harder = ((distances <= own_distance) & ~is_own).sum(dim=1)
            candidates = is_semi.sum(dim=1)
            semi_hard = num_harder + (pick * candidates).long()
            place = torch.where(candidates > 0, semi_hard, (pick * anyone).long())
        else:
            hardest = anyone.clamp(max=self.hard_rank + 1)
            place = (pick * torch.where(is_hard < self.hard_probability, hardest, anyone)).long()
        return order.gather(1, place.unsqueeze(1)).squeeze(1)

    def get_extra_state(self) -> Tensor:
        """The generator's state, so that a resumed run mines the same triplets."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the generator's state."""
        self.generator.set_state(state.cpu())


def query_and_prototype(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """(speakers, utterances, dim) to the first utterance and the mean of the others, each
    (speakers, dim).
    """
    return embeddings[:, 0], embeddings[:, 1:].mean(dim=1)


def squared_distances(left: Tensor, right: Tensor) -> Tensor:
    """Squared Euclidean distances of all pairs, (left rows, right rows).

    >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[25.,  1.]])
    """
    # Not by expanding the square, which loses precision if distances are much smaller than the
    # norms.
    return (left.unsqueeze(1) - right.unsqueeze(0)).square().sum(dim=2)


def _cross_entropy_of_diagonal(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Row i should score column i highest."""
    targets = torch.arange(logits.shape[0], device=logits.device)
    return functional.cross_entropy(logits, targets), accuracy_percent(logits, targets)


class Combined(MetricLoss):
    """The weighted sum of a classification loss and a metric loss over the same utterances.

    Accuracy and margin are those of the classification loss.

    Source: Heo et al. 2020, "Clova baseline system for the VoxCeleb Speaker Recognition Challenge
    2020", section 3.2, for softmax and angular prototypical with weights of 1.

    >>> options = CombinedOptions(classification=SoftmaxOptions(), metric_weight=0.5)
    >>> loss = Combined(options, embedding_dim=3, num_classes=4)
    >>> _ = loss.classification.weight.data.zero_(), loss.classification.bias.data.zero_()
    >>> value, _ = loss(torch.ones(2, 2, 3), torch.tensor([0, 3]))
    >>> round(value.item(), 4)  # log 4 + (log 2) / 2
    1.7329
    """

    NAMES: ClassVar[tuple[str, str]] = ("classification", "metric")
    """The submodule names of the two losses."""

    def __init__(
        self, options: CombinedOptions, embedding_dim: int, num_classes: int, seed: int = 0
    ) -> None:
        super().__init__(options)
        self.weights = (options.classification_weight, options.metric_weight)
        self.num_classes = num_classes
        facts: dict[str, Any] = {
            "embedding_dim": embedding_dim,
            "num_classes": num_classes,
            "seed": seed,
        }
        for name, part in zip(self.NAMES, (options.classification, options.metric), strict=True):
            self.add_module(name, create(LOSSES[part.name], part, **facts))

    @property
    def head(self) -> Any:
        """The classification loss."""
        return self.get_submodule(self.NAMES[0])

    @property
    def margin(self) -> float | None:  # type: ignore[override]
        """The margin of the classification loss."""
        return self.head.margin  # type: ignore[no-any-return]

    @margin.setter
    def margin(self, margin: float | None) -> None:
        self.head.margin = margin

    def compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of both losses."""
        # The head does not care who is next to whom: (speakers x utterances, dim) and as many
        # labels.
        rows = embeddings.flatten(0, 1)
        classification, accuracy = self.head(rows, labels.repeat_interleave(embeddings.shape[1]))
        metric, _ = self.get_submodule(self.NAMES[1])(embeddings, labels)
        return self.weights[0] * classification + self.weights[1] * metric, accuracy


class SoftmaxPrototypical(Combined):
    """The sum of softmax and angular prototypical, with the names used for imported
    voxceleb_trainer checkpoints.

    >>> loss = SoftmaxPrototypical(SoftmaxPrototypicalOptions(), embedding_dim=3, num_classes=4)
    >>> list(loss.state_dict())
    ['softmax.weight', 'softmax.bias', 'angular.scale', 'angular.bias']
    """

    NAMES: ClassVar[tuple[str, str]] = ("softmax", "angular")

    def __init__(
        self, options: SoftmaxPrototypicalOptions, embedding_dim: int, num_classes: int
    ) -> None:
        metric = AngularPrototypicalOptions(
            initial_scale=options.initial_scale, initial_bias=options.initial_bias
        )
        super().__init__(
            CombinedOptions(classification=SoftmaxOptions(), metric=metric),
            embedding_dim,
            num_classes,
        )
