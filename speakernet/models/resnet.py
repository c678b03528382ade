"""ResNet: a residual network of any width and depth, for fast training on small machines as well as for large ones."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from speakernet.models.layers import ResidualStage, initialize_convolutions, mask_frames, relu


class ResNet(nn.Module):
    """Residual network whose size is set by options; the defaults make a small one that trains fast on CPUs.

    Args:
        num_features: mel bands of the front end.
        channels: of the first stage; each following stage has twice as many.
        blocks: residual blocks of each stage; (3, 4, 6, 3) is ResNet-34.
        stem_stride: stride along mels of the first convolution; 2 halves all later work.
        gated: squeeze-and-excitation in every block.

    Source: He et al. 2016, as wespeaker uses it for speakers (32 channels, blocks 3, 4, 6, 3, TSTP, no gates).
    """

    front_end_defaults: ClassVar[dict[str, Any]] = {"name": "log_mel"}
    default_pooling: ClassVar[str] = "TSTP"
    pooling_names: ClassVar[dict[str, str]] = {}
    tested_poolings: ClassVar[Sequence[str]] = ("TSTP", "ASP", "ChannelASP")
    has_norm_after_pooling: ClassVar[bool] = False

    def __init__(
        self,
        num_features: int,
        channels: int = 16,
        blocks: Sequence[int] = (2, 2, 2, 2),
        stem_stride: int = 1,
        gated: bool = False,
    ) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1 or channels < 8 or stem_stride < 1:
            raise ValueError(
                f"ResNet got channels {channels}, blocks {list(blocks)}, stem_stride {stem_stride}; "
                "expected at least 8 channels, a list of block counts of at least 1, and a stride of at least 1"
            )
        self.conv1 = nn.Conv2d(1, channels, 3, stride=(stem_stride, 1), padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        stages = []
        width_in, num_mels = channels, -(-num_features // stem_stride)
        for index, num_blocks in enumerate(blocks):
            width, stride = channels * 2**index, 1 if index == 0 else 2
            stages.append(ResidualStage(width_in, width, num_blocks, stride, gated))
            width_in, num_mels = width, -(-num_mels // stride)
        self.stages = nn.ModuleList(stages)
        self.out_channels = width_in * num_mels
        initialize_convolutions(self)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels x remaining mels, frames / 8), and the valid frames of each."""
        hidden = mask_frames(relu(self.norm1(self.conv1(features.unsqueeze(1)))), lengths)
        for stage in self.stages:
            hidden, lengths = stage(hidden, lengths)
        return hidden.flatten(1, 2), lengths
