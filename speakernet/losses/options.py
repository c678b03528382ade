"""The options of every loss, and the table by which a configuration names them. No torch is imported here."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from speakernet.options import NamedOptions, OptionError, Positive, Share, Switch
from speakernet.registry import Part, lookup

Weight = Annotated[float, Ge(0.0), Le(1e6)]
Scalar = Annotated[float, Ge(-1e6), Le(1e6)]


@dataclass(kw_only=True)
class LossOptions(NamedOptions):
    """What the embeddings are taught by."""

    name: str = "aamsoftmax"
    """Name of the loss; `speakernet list losses` shows them all."""
    sharded: Switch = "auto"
    """Of several processes each keeps a share of the speakers of the head; auto: where that saves memory and time."""

    has_head: ClassVar[bool] = True
    """Whether it has weights of each speaker."""
    is_metric: ClassVar[bool] = False
    """Whether utterances of one speaker are compared with each other, (speakers, utterances, dim)."""
    min_utterances: ClassVar[int] = 1
    """Utterances of each speaker that a batch must hold."""
    draws_on_host: ClassVar[bool] = False
    """Whether each step needs numbers that the host draws."""
    normalize_embeddings: ClassVar[bool] = True
    """Whether voxceleb_trainer scores embeddings of this loss after normalising them (its `test_normalize`)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Shares of a head that there is none of."""
        yield from super().problems()
        if self.sharded == "on" and not self.has_head:
            yield "sharded", f"on, but {self.name} has no head of speakers to be shared; leave it at auto"

    def with_margin(self, margin: float) -> "LossOptions":
        """A copy with another margin, of a loss that has one (`hasattr(options, "margin")`)."""
        return dataclasses.replace(self, margin=margin)  # type: ignore[call-arg]  # those that have one take it


@dataclass(kw_only=True)
class SoftmaxOptions(LossOptions):
    """Cross entropy of a linear layer with bias."""

    name: str = "softmax"


@dataclass(kw_only=True)
class AMSoftmaxOptions(LossOptions):
    """Scaled cosines, the speaker's own lowered by a margin."""

    name: str = "amsoftmax"
    margin: Annotated[float, Ge(0.0), Le(3.0)] = 0.2
    """Margin: cosine (amsoftmax), radians (aamsoftmax); schedule.margin_* can ramp it."""
    scale: Positive = 30.0
    """Scale of the cosines before the softmax."""


@dataclass(kw_only=True)
class AAMSoftmaxOptions(AMSoftmaxOptions):
    """Scaled cosines, the angle to the speaker's own vector widened by a margin."""

    name: str = "aamsoftmax"
    easy_margin: bool = False
    """Apply the margin only to angles below 90 degrees."""
    sub_centers: Annotated[int, Ge(1), Le(64)] = 1
    """Vectors of each speaker, of which the nearest counts: sessions and label noise get vectors of their own."""
    inter_top_k: Annotated[int, Ge(0), Le(10_000)] = 0
    """Other speakers, the nearest of each utterance, that are pushed off harder; 0: none."""
    inter_top_k_penalty: Annotated[float, Ge(0.0), Le(1.0)] = 0.06
    """By how many radians those seem nearer; grows with the margin where schedule.margin ramps it."""


@dataclass(kw_only=True)
class SphereFace2Options(LossOptions):
    """One yes-or-no question for every speaker instead of one choice among all."""

    name: str = "sphereface2"
    margin: Annotated[float, Ge(0.0), Le(3.0)] = 0.2
    """Margin: of the cosine (type C, 0.2 is usual), in radians (type A, 0.15); schedule.margin_* can ramp it."""
    scale: Positive = 32.0
    """Scale of the adjusted cosines."""
    margin_type: Literal["A", "C"] = "C"
    """A: the angle is widened, as in aamsoftmax; C: the cosine is lowered, as in amsoftmax."""
    positive_weight: Share = 0.7
    """Weight of an utterance's own speaker against all others together."""
    exponent: Annotated[float, Ge(1.0), Le(100.0)] = 3.0
    """Spreads the cosines of other speakers: g(z) = 2 ((z + 1) / 2) ** exponent - 1."""


@dataclass(kw_only=True)
class HAMSoftmaxOptions(LossOptions):
    """Distances in hyperbolic space, that to the speaker's own centre lengthened by a margin."""

    name: str = "hamsoftmax"
    margin: Annotated[float, Ge(0.0), Le(100.0)] = 0.2
    """Margin of the distance; schedule.margin_* can ramp it."""
    scale: Positive = 30.0
    """Scale of the distances before the softmax."""
    curvature: Annotated[float, Ge(1.0), Le(1e6)] = 1.0
    """Of the space: embeddings and centres stay within 1 / sqrt(curvature) of the origin (3 in wespeaker's results)."""


@dataclass(kw_only=True)
class MetricOptions(LossOptions):
    """The base of losses that compare the utterances of a batch."""

    is_metric: ClassVar[bool] = True
    has_head: ClassVar[bool] = False
    min_utterances: ClassVar[int] = 2


@dataclass(kw_only=True)
class PrototypicalOptions(MetricOptions):
    """Squared distances between a query and the mean of each speaker's other utterances."""

    name: str = "proto"
    normalize_embeddings: ClassVar[bool] = False


@dataclass(kw_only=True)
class LearnedScaleOptions(MetricOptions):
    """The base of losses that learn the scale and bias of their cosines."""

    initial_scale: Scalar = 10.0
    """Starting value of the learned scale."""
    initial_bias: Scalar = -5.0
    """Starting value of the learned bias."""


@dataclass(kw_only=True)
class AngularPrototypicalOptions(LearnedScaleOptions):
    """Scaled cosines between a query and the mean of each speaker's other utterances."""

    name: str = "angleproto"


@dataclass(kw_only=True)
class GE2EOptions(LearnedScaleOptions):
    """Scaled cosines between every utterance and every speaker's centroid, its own left out."""

    name: str = "ge2e"


@dataclass(kw_only=True)
class SupervisedContrastiveOptions(MetricOptions):
    """Every utterance against all others of the batch, those of its own speaker drawn near."""

    name: str = "supcon"
    temperature: Annotated[float, Ge(1e-3), Le(100.0)] = 0.1
    """Cosines are divided by it before the softmax; the lower, the more the nearest others count."""


@dataclass(kw_only=True)
class TripletOptions(MetricOptions):
    """Hinge of squared distances to one utterance of the same and one of another speaker."""

    draws_on_host: ClassVar[bool] = True

    name: str = "triplet"
    margin: Annotated[float, Ge(0.0), Le(100.0)] = 0.2
    """Margin between squared distances; schedule.margin_* can ramp it."""
    hard_probability: Share = 0.5
    """Share of negatives that are chosen among the hardest; the others are random."""
    hard_rank: Annotated[int, Ge(-(10**6)), Le(10**6)] = 10
    """A hard negative is one of the hard_rank + 1 nearest; below 0: semi-hard negatives."""


@dataclass(kw_only=True)
class SoftmaxPrototypicalOptions(LearnedScaleOptions):
    """Softmax and angular prototypical, added; voxceleb_trainer's name of that case of `combined`."""

    name: str = "softmaxproto"
    has_head: ClassVar[bool] = True


CLASSIFICATIONS: dict[str, Part] = {
    "softmax": Part(SoftmaxOptions, "speakernet.losses.classification:Softmax"),
    "amsoftmax": Part(AMSoftmaxOptions, "speakernet.losses.classification:AMSoftmax"),
    "aamsoftmax": Part(AAMSoftmaxOptions, "speakernet.losses.classification:AAMSoftmax"),
    "sphereface2": Part(SphereFace2Options, "speakernet.losses.classification:SphereFace2"),
    "hamsoftmax": Part(HAMSoftmaxOptions, "speakernet.losses.hyperbolic:HAMSoftmax"),
}
"""Losses with a head, each for itself or within `combined`."""
METRICS: dict[str, Part] = {
    "proto": Part(PrototypicalOptions, "speakernet.losses.metric:Prototypical"),
    "angleproto": Part(AngularPrototypicalOptions, "speakernet.losses.metric:AngularPrototypical"),
    "ge2e": Part(GE2EOptions, "speakernet.losses.metric:GE2E"),
    "supcon": Part(SupervisedContrastiveOptions, "speakernet.losses.metric:SupervisedContrastive"),
    "triplet": Part(TripletOptions, "speakernet.losses.metric:Triplet"),
}
"""Losses that compare utterances, each for itself or within `combined`."""


@dataclass(kw_only=True)
class CombinedOptions(MetricOptions):
    """A classification and a metric loss of the same utterances, weighted and added."""

    name: str = "combined"
    has_head: ClassVar[bool] = True
    classification: LossOptions = field(default_factory=AAMSoftmaxOptions)
    """The loss with a head: its name and its options, such as {name: aamsoftmax, margin: 0.3}; its margin is ramped."""
    classification_weight: Weight = 1.0
    """What the classification loss counts."""
    metric: MetricOptions = field(default_factory=AngularPrototypicalOptions)
    """The loss that compares utterances: its name and its options, such as {name: triplet, margin: 0.1}."""
    metric_weight: Weight = 1.0
    """What the metric loss counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part, table in (("classification", CLASSIFICATIONS), ("metric", METRICS)):
            options = getattr(self, part)
            if type(options) is not lookup(table, options.name, f"{part} loss").options:
                raise OptionError(f"{part}: {type(options).__name__} are no options of {options.name}")

    @property
    def margin(self) -> float:
        """The classification loss's, where it has one.

        Raises:
            AttributeError: it has none.
        """
        return float(self.classification.margin)  # type: ignore[attr-defined]

    def with_margin(self, margin: float) -> "CombinedOptions":
        """A copy whose classification loss has another margin."""
        return dataclasses.replace(self, classification=self.classification.with_margin(margin))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Nothing that is added."""
        yield from super().problems()
        if not self.classification_weight and not self.metric_weight:
            yield "metric_weight", "0, and classification_weight too; expected one of them above 0"
        for part in ("classification", "metric"):
            if (value := getattr(self, part).sharded) != "auto":
                yield part, f"sharded: {value} within it; give it as loss.sharded, which holds for the whole loss"


LOSSES: dict[str, Part] = {
    **CLASSIFICATIONS,
    **METRICS,
    "combined": Part(CombinedOptions, "speakernet.losses.combined:Combined"),
    "softmaxproto": Part(SoftmaxPrototypicalOptions, "speakernet.losses.combined:SoftmaxPrototypical"),
}
