"""Losses with a head of one weight vector a speaker: softmax, AM-softmax, AAM-softmax.

They take embeddings `(batch, dim)` and labels `(batch,)` and give `(loss, accuracy)`, both on the device, accuracy in
percent. They compute in float32 whatever the precision of the trunk.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from speakernet.losses.options import AAMSoftmaxOptions, AMSoftmaxOptions, LossOptions, SoftmaxOptions

# Keeps the square root of 1 - cos² differentiable where an embedding lies exactly on its speaker's vector.
SINE_FLOOR = 1e-12


class SpeakerLoss(nn.Module):
    """The abstract base of all losses: it holds its options, and what training asks of them."""

    def __init__(self, options: LossOptions) -> None:
        super().__init__()
        self.options = options

    @property
    def is_metric(self) -> bool:
        """Whether it takes (speakers, utterances, dim)."""
        return self.options.is_metric


class ClassificationLoss(SpeakerLoss):
    """The abstract loss with a head: the float32 rule and the accuracy."""

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(batch, dim) and (batch,) to (batch, classes)."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and accuracy in percent, both 0-d.

        Args:
            embeddings: (batch, dim).
            labels: (batch,) int64 in 0..classes-1.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.logits(embeddings.float(), labels)
            return functional.cross_entropy(logits, labels), accuracy_percent(logits, labels)


class Softmax(ClassificationLoss):
    """Cross entropy of a linear layer with bias.

    >>> loss = Softmax(SoftmaxOptions(), embedding_dim=2, num_classes=3)
    >>> _ = nn.init.zeros_(loss.weight), nn.init.zeros_(loss.bias)
    >>> round(loss(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))[0].item(), 4)  # log 3
    1.0986
    """

    def __init__(self, options: SoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options)
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.bias = nn.Parameter(torch.empty(num_classes))
        bound = 1 / math.sqrt(embedding_dim)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """W x + b."""
        return functional.linear(embeddings, self.weight, self.bias)


class AMSoftmax(ClassificationLoss):
    """Scaled cosines, the speaker's own lowered by a margin.

    Source: Wang et al. 2018, "Additive Margin Softmax for Face Verification", equation 6.

    >>> loss = AMSoftmax(AMSoftmaxOptions(margin=0.5, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> loss.logits(torch.tensor([[3.0, 0.0]]), torch.tensor([0]))
    tensor([[0.5000, 0.0000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, options: AMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options)
        self.margin = options.margin  # of its own, since a schedule moves it
        self.scale = options.scale
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.xavier_normal_(self.weight)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scale times (cosine, minus the margin at the label)."""
        cosine = functional.linear(functional.normalize(embeddings), functional.normalize(self.weight))
        own = labels.unsqueeze(1)
        lowered = cosine.gather(1, own) - self.margin
        return cosine.scatter(1, own, lowered) * self.scale


class AAMSoftmax(ClassificationLoss):
    """Scaled cosines, the angle to the speaker's own vector widened by a margin.

    Past the angle where widening would wrap around (pi - margin), the cosine is lowered by margin x sin(margin)
    instead; with `easy_margin` angles above 90 degrees are left alone.

    Source: Deng et al. 2019, "ArcFace", equation 3, with the common continuation past pi - margin.

    >>> loss = AAMSoftmax(AAMSoftmaxOptions(margin=math.pi / 3, scale=1.0), 2, 2)
    >>> _ = loss.weight.data.copy_(torch.eye(2))
    >>> loss.logits(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).round(decimals=3).tolist()  # cos 60 degrees
    [[0.5, 0.0]]
    """

    def __init__(self, options: AAMSoftmaxOptions, embedding_dim: int, num_classes: int) -> None:
        super().__init__(options)
        self.margin = options.margin  # of its own, since a schedule moves it
        self.scale = options.scale
        self.easy_margin = options.easy_margin
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.xavier_normal_(self.weight)

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Scale times (cosine, of the widened angle at the label)."""
        cosine = functional.linear(functional.normalize(embeddings), functional.normalize(self.weight))
        own = labels.unsqueeze(1)
        # Only the label's column needs the angle: (batch, 1) instead of (batch, classes).
        own_cosine = cosine.gather(1, own)
        sine = (1.0 - own_cosine.square()).clamp(SINE_FLOOR, 1.0).sqrt()
        widened = own_cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        if self.easy_margin:
            widened = torch.where(own_cosine > 0, widened, own_cosine)
        else:
            beyond = own_cosine - math.sin(math.pi - self.margin) * self.margin
            widened = torch.where(own_cosine > math.cos(math.pi - self.margin), widened, beyond)
        return cosine.scatter(1, own, widened) * self.scale


def accuracy_percent(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest logit is the label's, in percent, 0-d on the device.

    >>> accuracy_percent(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(50.)
    """
    return (logits.detach().argmax(dim=1) == labels).float().mean() * 100.0
