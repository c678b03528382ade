"""Poolings over the layers and frames of a pretrained model: (batch, layers, channels, frames) to
(batch, dim).
"""

import torch
from torch import Tensor, nn

from speakernet.frontend.features import Lengths, valid_frames
from speakernet.models.attentive_pooling import ChannelAttentivePooling, softmax_over_frames
from speakernet.models.options.poolings import (
    POOLINGS,
    AdapterMFAOptions,
    LayerSumOptions,
    MHFAOptions,
)
from speakernet.models.pooling import Pooling
from speakernet.options import create, lookup


class LayerWeights(nn.Module):
    """Weighted sum over layers; the learned weights sum to one and are initially equal.

    >>> LayerWeights(2)(torch.tensor([[[[1.0]], [[3.0]]]]))
    tensor([[[2.]]], grad_fn=<SumBackward1>)
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(layers))

    def forward(self, states: Tensor) -> Tensor:
        """(batch, layers, channels, frames) to (batch, channels, frames)."""
        weights = self.logits.softmax(0)[:, None, None]  # (layers, 1, 1)
        return (states * weights).sum(dim=1)


class LayerSum(Pooling):
    """Learned weighted sum over layers, then a pooling over frames.

    Source: Yang et al. 2021, "SUPERB: Speech processing universal performance benchmark", section
    3.

    >>> LayerSum(LayerSumOptions(over_frames="TAP"), 4, 3)(torch.ones(2, 3, 4, 7)).shape
    torch.Size([2, 4])
    """

    def __init__(self, options: LayerSumOptions, channels: int, layers: int) -> None:
        component = lookup(POOLINGS, options.over_frames, "pooling over frames")
        if component.options.takes_layers:
            raise ValueError(
                f"model.pooling_options.over_frames: {options.over_frames} pools over layers, not "
                "frames; use TSTP"
            )
        over_frames = create(component, component.options(), channels=channels)
        super().__init__(over_frames.dim)
        self.weights = LayerWeights(layers)
        self.over_frames = over_frames

    def forward(self, states: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, layers, channels, frames) to the output of the pooling over frames, (batch,
        dim).
        """
        return self.over_frames(self.weights(states), lengths)  # type: ignore[no-any-return]


class MHFA(Pooling):
    """Multi-head factorized attentive pooling; with context, a head's logits also depend on
    neighbouring frames.

    Source: Peng et al. 2022, "An attention-based backend allowing efficient fine-tuning of
    transformer models for speaker verification", equations 1 to 5; its last linear layer is the
    network's embedding layer. Peng et al. 2024, "CA-MHFA: A context-aware multi-head factorized
    attentive pooling for SSL-based speaker verification", section 3, with one query per group.

    >>> MHFA(MHFAOptions(heads=3, compression=5), 4, 2)(torch.ones(2, 2, 4, 7)).shape
    torch.Size([2, 15])
    """

    def __init__(self, options: MHFAOptions, channels: int, layers: int) -> None:
        super().__init__(options.heads * options.compression)
        self.key_weights = LayerWeights(layers)
        self.value_weights = LayerWeights(layers)
        self.keys = nn.Linear(channels, options.compression)
        self.values = nn.Linear(channels, options.compression)
        # Keys (batch, compression, frames) to logits (batch, heads, frames); as published, no bias
        # with context.
        context = options.context
        self.attention = nn.Conv1d(
            options.compression, options.heads, 2 * context + 1, padding=context, bias=context == 0
        )

    def forward(self, states: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, layers, channels, frames) to the weighted means of each head, (batch, heads x
        compression).
        """
        # The layers of a speech model specialise, and those that tell one sound from another (keys:
        # where to look) are not those that tell one voice from another (values: what to take). So
        # the two have separate sums over layers.
        keys = self.keys(self.key_weights(states).transpose(1, 2))  # (batch, frames, compression)
        values = self.values(self.value_weights(states).transpose(1, 2))
        if lengths is not None:
            # Zeros past a shorter utterance's end, as the convolution's padding gives the longest
            # one.
            keys = keys * valid_frames(lengths, keys.shape[1]).unsqueeze(2)
        logits = self.attention(keys.transpose(1, 2))  # (batch, heads, frames)
        weights = softmax_over_frames(logits, lengths)
        return (weights @ values).flatten(1)  # (batch, heads x compression)


class AdapterMFA(Pooling):
    """An adapter of two linear layers for each layer's states, concatenated, then attentive
    statistics per channel.

    Source: Li et al. 2025, "Enhancing speaker verification with w2v-BERT 2.0 and knowledge
    distillation guided structured pruning" (arXiv 2510.04213), section 2, in wespeaker's form
    (`w2vbert_adapter_mfa.py`).

    >>> AdapterMFA(AdapterMFAOptions(dim=5), 4, 3)(torch.rand(2, 3, 4, 7)).shape
    torch.Size([2, 30])
    """

    def __init__(self, options: AdapterMFAOptions, channels: int, layers: int) -> None:
        dim = options.dim
        super().__init__(2 * dim * layers)
        self.adapters = nn.ModuleList()
        for _ in range(layers):
            self.adapters.append(
                nn.Sequential(
                    nn.Linear(channels, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, dim)
                )
            )
        self.attentive = ChannelAttentivePooling(dim * layers, bottleneck=dim)

    def forward(self, states: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, layers, channels, frames) to means and deviations, (batch, 2 x layers x dim)."""
        adapted = []
        for adapter, state in zip(self.adapters, states.unbind(1), strict=True):
            adapted.append(adapter(state.transpose(1, 2)))  # (batch, frames, dim)
        frames = torch.cat(adapted, dim=2).transpose(1, 2)  # (batch, layers x dim, frames)
        return self.attentive(frames, lengths)  # type: ignore[no-any-return]
