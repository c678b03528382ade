"""What is exported: a network with its front end as one module of waveforms, made of what every runtime has."""

import torch
from torch import Tensor, nn

from speakernet.evaluation.backend import mean_of_whole_utterances
from speakernet.frontend.features import use_convolution
from speakernet.models.model_file import ModelFile
from speakernet.models.speaker_net import folded

EPSILON = 1e-12
"""Least length that an embedding is divided by."""


class ExportedNet(nn.Module):
    """Waveforms of one length to embeddings, as they are and ready to be compared.

    Args:
        model: the file that was read; its network stays as it is.

    >>> from speakernet.models.speaker_net import SpeakerNet
    >>> net = SpeakerNet.named("ResNet", embedding_dim=8).eval()
    >>> embeddings, directions = ExportedNet(ModelFile(net, {}))(torch.randn(2, 16000))
    >>> embeddings.shape, torch.allclose(directions.norm(dim=1), torch.ones(2))
    (torch.Size([2, 8]), True)
    """

    def __init__(self, model: ModelFile) -> None:
        super().__init__()
        self.net = folded(model.net).requires_grad_(False)
        self.net.spec_augment = None
        use_convolution(self.net.front_end)
        mean = mean_of_whole_utterances(model.contents)
        self.register_buffer("mean", torch.zeros(self.net.embedding_dim) if mean is None else torch.tensor(mean))

    def forward(self, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings, and the same without the mean and of length 1, (batch, dim) each; (batch, samples) in -1..1."""
        embeddings = self.net(waveforms)
        centred = embeddings - self.mean
        return embeddings, centred / centred.norm(dim=1, keepdim=True).clamp(min=EPSILON)
