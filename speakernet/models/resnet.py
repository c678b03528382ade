"""Residual networks over mels and frames: blocks, stages, and the families of ResNets.

A block takes `(batch, channels, mels, frames)` and the valid frames, returns both, and leaves zeros
past every utterance's end. It declares its `out_channels`; `norm_behind` maps its layers to the
batch norms that follow them, for `fold_batch_norms`.
"""

import types
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from speakernet.frontend.features import Lengths
from speakernet.models.layers import (
    Foldable,
    Rectifier,
    SqueezeExcitation,
    Trunk,
    initialize_convolutions,
    mask_frames,
    relu,
    valid_length,
)
from speakernet.models.options.trunks import ResNetOptions

Stride = tuple[int, int]
"""Along mels and frames."""
MakeBlock = Callable[[int, int, Stride], nn.Module]
"""Makes a block from input channels, channels of the stage, and stride."""


def make_shortcut(channels_in: int, channels: int, stride: Stride) -> nn.Module:
    """The identity, or a 1 x 1 convolution with batch norm if the shape changes.

    A block creates it last, because initial weights are drawn in the order of creation.
    """
    if stride == (1, 1) and channels_in == channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
    )


class ResidualBlock(Foldable):
    """Two 3 x 3 convolutions with batch norm, an optional gate, and a shortcut around them."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: Stride = (1, 1),
        gate: Callable[[int], nn.Module] | None = None,
        relu_first: bool = False,
    ) -> None:
        super().__init__()
        # Created before the convolutions, because initial weights are drawn in the order of
        # creation, but registered after them, in the order of the forward pass.
        gate_module = gate(channels) if gate else None
        self.out_channels = channels
        self.frame_stride = stride[1]
        self.relu_first = relu_first
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.gate = gate_module
        self.shortcut = make_shortcut(channels_in, channels, stride)
        if relu_first:
            self.rectify = Rectifier()
            self.norm_behind = {"conv2": "norm2"}
            self.norm_behind_relu = {"conv1": ("rectify", "norm1", "conv2")}
        else:
            self.norm_behind = {"conv1": "norm1", "conv2": "norm2"}

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        # What the block computes is added to its input, so it only has to learn a correction, and
        # gradients reach the first layers undiminished. The gate comes last, as in SE-ResNet.
        lengths = valid_length(lengths, 1, self.frame_stride)
        hidden = self.conv1(features)  # (batch, channels, mels / stride, frames / stride)
        hidden = self.norm1(self.rectify(hidden)) if self.relu_first else relu(self.norm1(hidden))
        # A norm turns the zeros past an utterance's end into its bias, which later layers would
        # read.
        hidden = mask_frames(hidden, lengths)
        hidden = mask_frames(self.norm2(self.conv2(hidden)), lengths)
        if self.gate is not None:
            hidden = self.gate(hidden, lengths)
        shortcut = self.shortcut(features)
        # In place only without gradients.
        hidden = hidden + shortcut if hidden.requires_grad else hidden.add_(shortcut)
        return mask_frames(relu(hidden), lengths), lengths


class ResidualStage(nn.Module):
    """A sequence of blocks, of which only the first strides and widens."""

    def __init__(
        self,
        make_block: MakeBlock,
        channels_in: int,
        channels: int,
        num_blocks: int,
        stride: Stride = (1, 1),
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_block(channels_in, channels, stride)])
        self.out_channels = int(self.blocks[0].out_channels)  # type: ignore[arg-type]
        self.blocks.extend(
            make_block(self.out_channels, channels, (1, 1)) for _ in range(num_blocks - 1)
        )

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        for block in self.blocks:
            features, lengths = block(features, lengths)
        return features, lengths


class ResidualTrunk(Trunk):
    """A convolution and stages of blocks, each stage twice as wide as the previous.

    By default `conv1` is 3 x 3, and every stage but the first halves mels and frames.
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})
    norm_first = True
    """Whether the first norm precedes the ReLU."""
    averages_mels = False

    def __init__(
        self,
        num_features: int,
        channels: int,
        blocks: Sequence[int],
        make_block: MakeBlock | Sequence[MakeBlock],
        strides: Sequence[Stride] = (),
        conv1: nn.Conv2d | None = None,
    ) -> None:
        super().__init__()
        kinds = [make_block] * len(blocks) if callable(make_block) else make_block
        strides = strides or [(1, 1), *[(2, 2)] * (len(blocks) - 1)]
        self.conv1 = conv1 or nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.stages = nn.ModuleList()
        # Strides round up.
        num_mels = -(-num_features // self.conv1.stride[0])
        self.out_channels = channels
        for kind, num_blocks, stride in zip(kinds, blocks, strides, strict=True):
            stage = ResidualStage(kind, self.out_channels, channels, num_blocks, stride)
            self.stages.append(stage)
            self.out_channels = stage.out_channels
            num_mels = -(-num_mels // stride[0])
            channels *= 2
        if not self.averages_mels:
            self.out_channels *= num_mels

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, mels, frames) to (batch, channels x remaining mels, fewer frames), and the valid
        frames of each.
        """
        # The features are treated as an image of one channel. Each stage halves it and doubles the
        # channels. In the end every mel row that is left becomes a set of channels of its own: a
        # voice differs from another by where its energy is, and an average over mels (as in
        # ResNetSE34L) would lose that.
        hidden = self.conv1(features.unsqueeze(1))  # (batch, channels, mels, frames)
        hidden = relu(self.norm1(hidden)) if self.norm_first else self.norm1(relu(hidden))
        hidden = mask_frames(hidden, lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        if self.averages_mels:
            return hidden.mean(dim=2), lengths  # (batch, channels, frames)
        return hidden.flatten(1, 2), lengths  # (batch, channels x mels, frames)


class ResNet(ResidualTrunk):
    """Residual network of any size; the defaults make a small one that trains fast on CPUs.

    Source: He et al. 2016, as used for speakers by wespeaker (32 channels, blocks 3, 4, 6, 3, TSTP,
    no gates); strides along mels rather than frames: Liu et al. 2023, "Golden Gemini is all you
    need".
    """

    def __init__(self, options: ResNetOptions, num_features: int) -> None:
        channels = options.channels
        usual = [1, *[2] * (len(options.blocks) - 1)]
        mel_strides = options.mel_strides or usual
        strides = list(zip(mel_strides, options.frame_strides or usual, strict=True))
        conv1 = nn.Conv2d(1, channels, 3, stride=(options.stem_stride, 1), padding=1, bias=False)
        gate = SqueezeExcitation if options.gated else None
        make_block = partial(ResidualBlock, gate=gate)
        super().__init__(num_features, channels, options.blocks, make_block, strides, conv1)
        initialize_convolutions(self)
