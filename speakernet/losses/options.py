"""The options of all losses, and their table. No torch here."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import Field, SerializeAsAny, model_validator

from speakernet.options import Component, Options, Positive, Share, Switch, lookup

Weight = Annotated[float, Ge(0.0), Le(1e6)]
Scalar = Annotated[float, Ge(-1e6), Le(1e6)]


class LossOptions(Options):
    """The training loss."""

    name: str = "aamsoftmax"
    """Name of the loss; `speakernet list losses` shows all."""
    sharded: Switch = "auto"
    """Shard the speakers of the head over the ranks; auto: if that saves memory and time."""

    has_head: ClassVar[bool] = True
    """Whether the loss has weights for each speaker."""
    is_metric: ClassVar[bool] = False
    """Whether the loss compares utterances, (speakers, utterances, dim)."""
    min_utterances: ClassVar[int] = 1
    """Minimum number of utterances of each speaker in a batch."""
    normalize_embeddings: ClassVar[bool] = True
    """Whether voxceleb_trainer normalises embeddings of this loss before scoring (its
    `test_normalize`)."""

    @property
    def has_margin(self) -> bool:
        """Whether the loss has a margin, which a schedule can change."""
        return "margin" in type(self).model_fields

    def problems(self) -> Iterator[tuple[str, str]]:
        """Sharding a loss that has no head."""
        yield from super().problems()
        if self.sharded == "on" and not self.has_head:
            yield "sharded", f"on, but {self.name} has no head to shard; leave it at auto"


class SoftmaxOptions(LossOptions):
    """Cross entropy of a linear layer with bias."""

    name: str = "softmax"


class AMSoftmaxOptions(LossOptions):
    """Scaled cosines; the cosine to the utterance's own speaker is lowered by a margin."""

    name: str = "amsoftmax"
    margin: Annotated[float, Ge(0.0), Le(3.0)] = 0.2
    """Margin: cosine (amsoftmax), radians (aamsoftmax); schedule.margin_* can ramp it."""
    scale: Positive = 30.0
    """Scale of the cosines before the softmax."""


class AAMSoftmaxOptions(AMSoftmaxOptions):
    """Scaled cosines; the angle to the utterance's own speaker is widened by a margin."""

    name: str = "aamsoftmax"
    easy_margin: bool = False
    """Apply the margin only to angles below 90 degrees."""
    sub_centers: Annotated[int, Ge(1), Le(64)] = 1
    """Vectors per speaker, of which the nearest counts; helps with several sessions and noisy
    labels."""
    inter_top_k: Annotated[int, Ge(0), Le(10_000)] = 0
    """Number of nearest other speakers of each utterance whose angles are penalised; 0: none."""
    inter_top_k_penalty: Annotated[float, Ge(0.0), Le(1.0)] = 0.06
    """Radians by which the angles to those speakers are narrowed at a margin of 0.2; proportional
    to the margin."""


class SphereFace2Options(LossOptions):
    """A binary classification for every speaker instead of one choice among all."""

    name: str = "sphereface2"
    margin: Annotated[float, Ge(0.0), Le(3.0)] = 0.2
    """Margin: cosine (type C, usually 0.2), radians (type A, usually 0.15); schedule.margin_* can
    ramp it."""
    scale: Positive = 32.0
    """Scale of the adjusted cosines."""
    margin_type: Literal["A", "C"] = "C"
    """A: the angle is widened, as in aamsoftmax; C: the cosine is lowered, as in amsoftmax."""
    positive_weight: Share = 0.7
    """Weight of an utterance's own speaker against all others together."""
    exponent: Annotated[float, Ge(1.0), Le(100.0)] = 3.0
    """Spreads the cosines of other speakers: g(z) = 2 ((z + 1) / 2) ** exponent - 1."""


class HAMSoftmaxOptions(LossOptions):
    """Distances in hyperbolic space, with a margin on the distance to the own speaker's centre."""

    name: str = "hamsoftmax"
    margin: Annotated[float, Ge(0.0), Le(100.0)] = 0.2
    """Margin of the distance; schedule.margin_* can ramp it."""
    scale: Positive = 30.0
    """Scale of the distances before the softmax."""
    curvature: Annotated[float, Ge(1.0), Le(1e6)] = 1.0
    """Curvature: embeddings and centres stay within 1 / sqrt(curvature) of the origin; wespeaker
    reports results with 3."""


class MetricOptions(LossOptions):
    """Base class for losses that compare the utterances of a batch."""

    is_metric = True
    has_head = False
    min_utterances = 2


class PrototypicalOptions(MetricOptions):
    """Squared distances between a query and the mean of each speaker's other utterances."""

    name: str = "proto"
    normalize_embeddings = False


class AngularPrototypicalOptions(MetricOptions):
    """Scaled cosines between a query and the mean of each speaker's other utterances."""

    name: str = "angleproto"
    initial_scale: Scalar = 10.0
    """Starting value of the learned scale."""
    initial_bias: Scalar = -5.0
    """Starting value of the learned bias."""


class GE2EOptions(AngularPrototypicalOptions):
    """Scaled cosines between every utterance and every speaker's centroid, which excludes the
    utterance itself.
    """

    name: str = "ge2e"


class SupervisedContrastiveOptions(MetricOptions):
    """Every utterance against all others in the batch."""

    name: str = "supcon"
    temperature: Annotated[float, Ge(1e-3), Le(100.0)] = 0.1
    """Divisor of the cosines before the softmax; lower values emphasise the nearest utterances."""


class TripletOptions(MetricOptions):
    """Hinge loss on squared distances to an utterance of the same speaker and one of another
    speaker.
    """

    name: str = "triplet"
    margin: Annotated[float, Ge(0.0), Le(100.0)] = 0.2
    """Margin between squared distances; schedule.margin_* can ramp it."""
    hard_probability: Share = 0.5
    """Share of negatives chosen from the hardest; the others are random."""
    hard_rank: Annotated[int, Ge(-(10**6)), Le(10**6)] = 10
    """A hard negative is one of the hard_rank + 1 nearest; below 0: semi-hard negatives."""


class SoftmaxPrototypicalOptions(AngularPrototypicalOptions):
    """The sum of softmax and angular prototypical; voxceleb_trainer's name for this case of
    `combined`.
    """

    name: str = "softmaxproto"
    has_head = True


CLASSIFICATIONS: dict[str, Component] = {
    "softmax": Component(SoftmaxOptions, "speakernet.losses.classification:Softmax"),
    "amsoftmax": Component(AMSoftmaxOptions, "speakernet.losses.classification:AMSoftmax"),
    "aamsoftmax": Component(AAMSoftmaxOptions, "speakernet.losses.classification:AAMSoftmax"),
    "sphereface2": Component(SphereFace2Options, "speakernet.losses.other_heads:SphereFace2"),
    "hamsoftmax": Component(HAMSoftmaxOptions, "speakernet.losses.other_heads:HAMSoftmax"),
}
"""Losses with a head, used alone or within `combined`."""
METRICS: dict[str, Component] = {
    "proto": Component(PrototypicalOptions, "speakernet.losses.metric:Prototypical"),
    "angleproto": Component(
        AngularPrototypicalOptions, "speakernet.losses.metric:AngularPrototypical"
    ),
    "ge2e": Component(GE2EOptions, "speakernet.losses.metric:GE2E"),
    "supcon": Component(
        SupervisedContrastiveOptions, "speakernet.losses.metric:SupervisedContrastive"
    ),
    "triplet": Component(TripletOptions, "speakernet.losses.metric:Triplet"),
}
"""Losses that compare utterances, used alone or within `combined`."""


class CombinedOptions(MetricOptions):
    """The weighted sum of a classification and a metric loss over the same utterances."""

    name: str = "combined"
    has_head = True
    classification: SerializeAsAny[LossOptions] = Field(default_factory=AAMSoftmaxOptions)
    """The loss with a head: name and options, such as {name: aamsoftmax, margin: 0.3}; schedules
    ramp its margin."""
    classification_weight: Weight = 1.0
    """Weight of the classification loss."""
    metric: SerializeAsAny[MetricOptions] = Field(default_factory=AngularPrototypicalOptions)
    """The loss that compares utterances: name and options, such as {name: triplet, margin: 0.1}."""
    metric_weight: Weight = 1.0
    """Weight of the metric loss."""

    @model_validator(mode="after")
    def _has_losses_of_both_kinds(self) -> "CombinedOptions":
        for kind, table in (("classification", CLASSIFICATIONS), ("metric", METRICS)):
            options = getattr(self, kind)
            named = lookup(table, options.name, f"{kind} loss")
            if type(options) is not named.options:
                raise ValueError(
                    f"{kind}: {type(options).__name__} does not belong to {options.name}"
                )
        return self

    @property
    def has_margin(self) -> bool:
        """As the classification loss."""
        return self.classification.has_margin

    @property
    def margin(self) -> float:
        """The margin of the classification loss."""
        return float(self.classification.margin)  # type: ignore[attr-defined]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Two weights of 0, or a component that sets `sharded`."""
        yield from super().problems()
        if not self.classification_weight and not self.metric_weight:
            yield (
                "metric_weight",
                "0, like classification_weight; expected at least one of them above 0",
            )
        for part, options in (("classification", self.classification), ("metric", self.metric)):
            if options.sharded != "auto":
                yield (
                    part,
                    f"sharded: {options.sharded}; set loss.sharded instead, for the whole loss",
                )


LOSSES: dict[str, Component] = {
    **CLASSIFICATIONS,
    **METRICS,
    "combined": Component(CombinedOptions, "speakernet.losses.metric:Combined"),
    "softmaxproto": Component(
        SoftmaxPrototypicalOptions, "speakernet.losses.metric:SoftmaxPrototypical"
    ),
}
