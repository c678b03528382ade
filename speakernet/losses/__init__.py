"""What embeddings are taught by, by name."""

from speakernet.losses.classification import AAMSoftmax, AMSoftmax, ClassificationLoss, Softmax
from speakernet.losses.metric import AngularPrototypical, MetricLoss, Prototypical

LOSSES: dict[str, type[ClassificationLoss] | type[MetricLoss]] = {
    "softmax": Softmax,
    "amsoftmax": AMSoftmax,
    "aamsoftmax": AAMSoftmax,
    "proto": Prototypical,
    "angleproto": AngularPrototypical,
}

__all__ = [
    "LOSSES",
    "AAMSoftmax",
    "AMSoftmax",
    "AngularPrototypical",
    "ClassificationLoss",
    "MetricLoss",
    "Prototypical",
    "Softmax",
]
