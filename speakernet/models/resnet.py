"""Residual networks over mels and frames: blocks, stages, and the families of ResNets.

A block takes `(batch, channels, mels, frames)` and the valid frames, returns both, and leaves zeros past every
utterance's end.
"""

import types
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from speakernet.models.layers import (
    Rectifier,
    SimilarityAttention,
    SqueezeExcitation,
    Trunk,
    initialize_convolutions,
    mask_frames,
    relu,
    strided_length,
)
from speakernet.models.options.trunks import (
    DeepResNetOptions,
    ResNetOptions,
    ResNetSE34LOptions,
    ResNetSE34V2Options,
    SimAMResNetOptions,
)

Stride = tuple[int, int]
"""Along mels and frames."""
MakeBlock = Callable[[int, int, Stride], "Block"]
"""From input channels, channels of the stage, and stride to a block."""


class Block(nn.Module):
    """The abstract block, with `out_channels` and a shortcut."""

    shortcut: nn.Module
    norm_behind: Mapping[str, str]
    """Layers followed by a batch norm, for `fold_batch_norms`."""
    norm_behind_relu: Mapping[str, tuple[str, str, str]] = types.MappingProxyType({})
    """Layers followed by a ReLU, a batch norm and a layer, for the same."""

    def __init__(self, channels: int, stride: Stride = (1, 1)) -> None:
        super().__init__()
        self.out_channels = channels
        self.frame_stride = stride[1]

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        raise NotImplementedError


def make_shortcut(channels_in: int, channels: int, stride: Stride = (1, 1)) -> nn.Module:
    """The identity, or a 1 x 1 convolution with batch norm if the shape changes.

    A block builds it last: the order of its modules is the order in which their initial weights are drawn.
    """
    if stride == (1, 1) and channels_in == channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels))


class ResidualBlock(Block):
    """Two 3 x 3 convolutions with batch norm, an optional gate, and a shortcut around them."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: Stride = (1, 1),
        gate: nn.Module | None = None,
        relu_first: bool = False,
    ) -> None:
        super().__init__(channels, stride)
        self.relu_first = relu_first
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.gate = gate
        self.shortcut = make_shortcut(channels_in, channels, stride)
        self.norm_behind = {"conv2": "norm2"} if relu_first else {"conv1": "norm1", "conv2": "norm2"}
        if relu_first:
            self.rectify = Rectifier()
            self.norm_behind_relu = {"conv1": ("rectify", "norm1", "conv2")}

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        lengths = strided_length(lengths, self.frame_stride)
        hidden = self.conv1(features)
        hidden = self.norm1(self.rectify(hidden)) if self.relu_first else relu(self.norm1(hidden))
        # A norm turns the zeros past an utterance's end into its bias, which the layers after it would read.
        hidden = mask_frames(hidden, lengths)
        hidden = mask_frames(self.norm2(self.conv2(hidden)), lengths)
        if self.gate is not None:
            hidden = self.gate(hidden, lengths)
        shortcut = self.shortcut(features)
        # In place only without gradients.
        hidden = hidden + shortcut if hidden.requires_grad else hidden.add_(shortcut)
        return mask_frames(relu(hidden), lengths), lengths


def gated_block(channels_in: int, channels: int, stride: Stride) -> ResidualBlock:
    """A residual block with squeeze-and-excitation."""
    return ResidualBlock(channels_in, channels, stride, SqueezeExcitation(channels))


class Bottleneck(Block):
    """A 1 x 1, a 3 x 3 and a 1 x 1 convolution with batch norms, four times as wide at the end, and a shortcut."""

    EXPANSION = 4
    norm_behind = types.MappingProxyType({"conv1": "norm1", "conv2": "norm2", "conv3": "norm3"})

    def __init__(self, channels_in: int, channels: int, stride: Stride = (1, 1)) -> None:
        wide = self.EXPANSION * channels
        super().__init__(wide, stride)
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        # The stride is on the 3 x 3 convolution, as in wespeaker; He et al. have it on the 1 x 1 before.
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, wide, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(wide)
        self.shortcut = make_shortcut(channels_in, wide, stride)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features))), lengths)
        lengths = strided_length(lengths, self.frame_stride)
        hidden = self.norm3(self.conv3(relu(self.norm2(self.conv2(hidden)))))
        return mask_frames(relu(hidden + self.shortcut(features)), lengths), lengths


class ResidualStage(nn.Module):
    """Blocks, of which only the first one strides and widens."""

    def __init__(
        self, make_block: MakeBlock, channels_in: int, channels: int, num_blocks: int, stride: Stride = (1, 1)
    ) -> None:
        super().__init__()
        blocks = [make_block(channels_in, channels, stride)]
        self.out_channels = blocks[0].out_channels
        blocks += [make_block(self.out_channels, channels, (1, 1)) for _ in range(num_blocks - 1)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        for block in self.blocks:
            features, lengths = block(features, lengths)
        return features, lengths


class ResidualTrunk(Trunk):
    """A 3 x 3 convolution and stages of blocks, each stage twice as wide as the one before.

    All but the first stage halve mels and frames, unless other strides are given.
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})

    def __init__(
        self,
        num_features: int,
        channels: int,
        blocks: Sequence[int],
        make_block: MakeBlock | Sequence[MakeBlock],
        mel_stride: int = 1,
        strides: Sequence[Stride] | None = None,
    ) -> None:
        super().__init__()
        strides = strides or [(1, 1), *[(2, 2)] * (len(blocks) - 1)]
        kinds = [make_block] * len(blocks) if callable(make_block) else list(make_block)
        self.conv1 = nn.Conv2d(1, channels, 3, stride=(mel_stride, 1), padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        stages: list[ResidualStage] = []
        width_in, num_mels = channels, -(-num_features // mel_stride)
        for index, num_blocks in enumerate(blocks):
            stage = ResidualStage(kinds[index], width_in, channels * 2**index, num_blocks, strides[index])
            stages.append(stage)
            width_in, num_mels = stage.out_channels, -(-num_mels // strides[index][0])
        self.stages = nn.ModuleList(stages)
        self.out_channels = width_in * num_mels

    def stem(self, features: Tensor, lengths: Tensor | None) -> Tensor:
        """(batch, mels, frames) to (batch, channels, mels, frames)."""
        return mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels x remaining mels, fewer frames), and the valid frames of each."""
        hidden = self.stem(features, lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.flatten(1, 2), lengths


class ResNet(ResidualTrunk):
    """Residual network of any size; the defaults make a small one that trains fast on CPUs.

    Source: He et al. 2016, as wespeaker uses it for speakers (32 channels, blocks 3, 4, 6, 3, TSTP, no gates); strides
    along mels rather than frames: Liu et al. 2023, "Golden Gemini is all you need".
    """

    def __init__(self, options: ResNetOptions, num_features: int) -> None:
        make_block = gated_block if options.gated else ResidualBlock
        super().__init__(
            num_features, options.channels, options.blocks, make_block, options.stem_stride, options.strides
        )
        initialize_convolutions(self)


class DeepResNet(ResidualTrunk):
    """Residual network of a published depth, as wespeaker trains it on VoxCeleb, with torch's default initial weights.

    Source: He et al. 2016; the depths from 152 on by wespeaker (Wang et al. 2023) and its entries to VoxSRC.
    """

    def __init__(self, options: DeepResNetOptions, num_features: int) -> None:
        make_block = Bottleneck if options.has_bottlenecks else ResidualBlock
        super().__init__(num_features, options.channels, options.blocks, make_block)


BLOCKS = (3, 4, 6, 3)


class ResNetSE34L(Trunk):
    """Light ResNet-34 with squeeze-and-excitation, 16 to 128 channels; 1,437,078 parameters with SAP at 512 dimensions.

    Source: Chung et al. 2020, "In defence of metric learning for speaker recognition"; voxceleb_trainer f51bab8.
    """

    norm_behind = types.MappingProxyType({"conv1": "norm1"})

    def __init__(self, options: ResNetSE34LOptions, num_features: int) -> None:
        super().__init__()
        channels = (16, 32, 64, 128)
        self.out_channels = channels[-1]
        self.conv1 = nn.Conv2d(1, channels[0], 7, stride=(2, 1), padding=3, bias=False)
        self.norm1 = nn.BatchNorm2d(channels[0])
        self.stages = _stages(channels, strides=(1, 2, 2, 1))
        initialize_convolutions(self)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 128, frames / 4), mean over mels; and the valid frames of each."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.mean(dim=2), lengths


class ResNetSE34V2(Trunk):
    """ResNet-34 with squeeze-and-excitation, 32 to 256 channels.

    8,028,492 parameters with ASP, 64 mels and 512 dimensions.

    Source: Heo et al. 2020, "Clova baseline system for the VoxCeleb Speaker Recognition Challenge 2020";
    voxceleb_trainer f51bab8.
    """

    def __init__(self, options: ResNetSE34V2Options, num_features: int) -> None:
        super().__init__()
        channels = (32, 64, 128, 256)
        # Three strides of 2, each rounding up.
        self.out_channels = channels[-1] * -(-num_features // 8)
        self.conv1 = nn.Conv2d(1, channels[0], 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels[0])
        self.stages = _stages(channels, strides=(1, 2, 2, 2))
        initialize_convolutions(self)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 256 mels / 8, frames / 8), and the valid frames of each."""
        # ReLU before the norm, as in the original; ResNetSE34L has the norm first.
        hidden = mask_frames(self.norm1(relu(self.conv1(features.unsqueeze(1)))), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.flatten(1, 2), lengths


def _se_block(channels_in: int, channels: int, stride: Stride) -> ResidualBlock:
    return ResidualBlock(channels_in, channels, stride, SqueezeExcitation(channels), relu_first=True)


def _stages(channels: tuple[int, ...], strides: tuple[int, ...]) -> nn.ModuleList:
    widths = zip((channels[0], *channels), channels, BLOCKS, strides, strict=False)
    return nn.ModuleList(
        ResidualStage(_se_block, channels_in, width, blocks, (stride, stride))
        for channels_in, width, blocks, stride in widths
    )


class SimAMResNet(ResidualTrunk):
    """Residual network with SimAM attention, 64 to 512 channels.

    Source: Qin et al. 2022, "Simple attention module based speaker verification with iterative noisy label detection";
    the published weights are those of VoxBlink2 (Lin et al. 2024).
    """

    def __init__(self, options: SimAMResNetOptions, num_features: int) -> None:
        super().__init__(num_features, options.channels, options.blocks, _simam_block)


def _simam_block(channels_in: int, channels: int, stride: Stride) -> ResidualBlock:
    # In the place of the gate of SE-ResNets: after the second norm, before the shortcut is added.
    return ResidualBlock(channels_in, channels, stride, SimilarityAttention())
