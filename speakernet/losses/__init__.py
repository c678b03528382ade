"""What embeddings are taught by, by name."""

from speakernet.losses.classification import AAMSoftmax, AMSoftmax, ClassificationLoss, Softmax
from speakernet.losses.metric import GE2E, AngularPrototypical, MetricLoss, Prototypical, SoftmaxPrototypical, Triplet

LOSSES: dict[str, type[ClassificationLoss] | type[MetricLoss]] = {
    "softmax": Softmax,
    "amsoftmax": AMSoftmax,
    "aamsoftmax": AAMSoftmax,
    "proto": Prototypical,
    "angleproto": AngularPrototypical,
    "ge2e": GE2E,
    "triplet": Triplet,
    "softmaxproto": SoftmaxPrototypical,
}

__all__ = [
    "GE2E",
    "LOSSES",
    "AAMSoftmax",
    "AMSoftmax",
    "AngularPrototypical",
    "ClassificationLoss",
    "MetricLoss",
    "Prototypical",
    "Softmax",
    "SoftmaxPrototypical",
    "Triplet",
]
