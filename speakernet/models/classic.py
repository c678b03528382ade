"""The mel-band networks of voxceleb_trainer (f51bab8): two ResNets and VGGVox."""

import types
from functools import partial

from torch import Tensor, nn

from speakernet.frontend.features import Lengths
from speakernet.models.layers import (
    Foldable,
    SqueezeExcitation,
    Trunk,
    check_frames,
    initialize_convolutions,
    mask_frames,
    relu,
    valid_length,
)
from speakernet.models.options.trunks import (
    RESNET34,
    ResNetSE34LOptions,
    ResNetSE34V2Options,
    VGGVoxOptions,
)
from speakernet.models.resnet import ResidualBlock, ResidualTrunk

NUM_MELS = 40
# voxceleb_trainer's block has its first ReLU before the norm, unlike He et al.
make_gated_block = partial(ResidualBlock, gate=SqueezeExcitation, relu_first=True)


class ResNetSE34L(ResidualTrunk):
    """Light ResNet-34 with squeeze-and-excitation, 16 to 128 channels; 1,437,078 parameters (SAP,
    512-dimensional).

    Source: Chung et al. 2020, "In defence of metric learning for speaker recognition".
    """

    averages_mels = True

    def __init__(self, options: ResNetSE34LOptions, num_features: int) -> None:
        conv1 = nn.Conv2d(1, 16, 7, stride=(2, 1), padding=3, bias=False)
        strides = [(1, 1), (2, 2), (2, 2), (1, 1)]
        super().__init__(num_features, 16, RESNET34, make_gated_block, strides, conv1)
        initialize_convolutions(self)


class ResNetSE34V2(ResidualTrunk):
    """ResNet-34 with squeeze-and-excitation, 32 to 256 channels.

    8,028,492 parameters (ASP, 64 mels, 512-dimensional).

    Source: Heo et al. 2020, "Clova baseline system for the VoxCeleb Speaker Recognition Challenge
    2020".
    """

    norm_behind = types.MappingProxyType({})
    norm_first = False

    def __init__(self, options: ResNetSE34V2Options, num_features: int) -> None:
        conv1 = nn.Conv2d(1, 32, 3, padding=1)
        super().__init__(num_features, 32, RESNET34, make_gated_block, conv1=conv1)
        initialize_convolutions(self)


class VGGVox(Trunk):
    """VGG-M on 40 log-mel bands; 4,032,448 parameters (SAP, 512-dimensional).

    Source: Nagrani et al. 2017, "VoxCeleb".
    """

    # Fewer frames leave none for the last pooling.
    min_frames = 63

    def __init__(self, options: VGGVoxOptions, num_features: int) -> None:
        super().__init__()
        if num_features != NUM_MELS:
            raise ValueError(
                f"VGGVox is defined for 40 mel bands, found {num_features}; set frontend.num_mels: "
                "40"
            )
        self.out_channels = 512
        self.layers = nn.ModuleList(
            [
                _Convolution(
                    1, 96, (5, 7), stride=(1, 2), padding=(2, 2), pool=(1, 3), pool_stride=(1, 2)
                ),
                _Convolution(
                    96, 256, (5, 5), stride=(2, 2), padding=(1, 1), pool=(3, 3), pool_stride=(2, 2)
                ),
                _Convolution(256, 384, (3, 3), padding=(1, 1)),
                _Convolution(384, 256, (3, 3), padding=(1, 1)),
                _Convolution(256, 256, (3, 3), padding=(1, 1), pool=(3, 3), pool_stride=(2, 2)),
                # Spans the four remaining rows of the 40 mel bands.
                _Convolution(256, 512, (4, 1)),
            ]
        )

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, 40, frames) to (batch, 512, about frames / 16), and the valid frames of each."""
        # An image network whose poolings shrink mels from 40 to 4 rows; its last convolution spans
        # all four, so that one row is left and no average over mels is needed.
        check_frames(features, lengths, self.min_frames, "VGGVox")
        hidden = features.unsqueeze(1)  # (batch, 1, 40, frames)
        for layer in self.layers:
            hidden, lengths = layer(hidden, lengths)
        return hidden.squeeze(2), lengths  # (batch, 512, about frames / 16)


class _Convolution(Foldable):
    """Convolution, batch norm, ReLU, and max pooling if `pool` is given; sizes are (mels,
    frames).
    """

    norm_behind = types.MappingProxyType({"conv": "norm"})

    def __init__(
        self,
        channels_in: int,
        channels: int,
        kernel: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        pool: tuple[int, int] | None = None,
        pool_stride: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, kernel, stride=stride, padding=padding)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(pool, stride=pool_stride) if pool else nn.Identity()
        self.grid = (kernel[1], stride[1], padding[1])
        self.pool_grid = (pool[1], pool_stride[1]) if pool else (1, 1)

    def forward(self, features: Tensor, lengths: Lengths) -> tuple[Tensor, Lengths]:
        """(batch, channels, mels, frames) and valid frames, in and out."""
        lengths = valid_length(lengths, *self.grid)
        hidden = relu(self.norm(self.conv(features)))
        # Pooling is not padded: valid outputs depend on valid inputs only, so one mask at the end
        # suffices.
        lengths = valid_length(lengths, *self.pool_grid)
        return mask_frames(self.pool(hidden), lengths), lengths
