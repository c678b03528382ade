"""The x-vector network: five time-delay layers, the last one wide."""

from torch import Tensor, nn

from speakernet.models.layers import Trunk, check_frames, mask_frames, relu_then_norm
from speakernet.models.options.trunks import XVectorOptions

# (kernel, dilation) of each layer; nothing is padded.
LAYERS = ((5, 1), (3, 2), (3, 3), (1, 1), (1, 1))


class XVector(Trunk):
    """Time-delay network of the x-vector; 4.61 million parameters with TSTP, 80 mels and 512 dimensions.

    Source: Snyder et al. 2018, "X-vectors: robust DNN embeddings for speaker recognition", table 1; norms and the
    second embedding layer as in wespeaker.
    """

    # 1 + 4 + 4 + 6: what the kernels of the first three layers span.
    min_frames = 15

    def __init__(self, options: XVectorOptions, num_features: int) -> None:
        super().__init__()
        statistics_channels = options.statistics_channels
        widths = (num_features, *(options.channels,) * 4, statistics_channels)
        self.out_channels = statistics_channels
        self.convs = nn.ModuleList(
            nn.Conv1d(widths[index], widths[index + 1], kernel, dilation=dilation)
            for index, (kernel, dilation) in enumerate(LAYERS)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, affine=False) for width in widths[1:])

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, 1500, frames - 14), and the valid frames of each."""
        check_frames(features, lengths, self.min_frames, "XVector")
        hidden = features
        for conv, norm in zip(self.convs, self.norms, strict=True):
            hidden = relu_then_norm(conv(hidden), norm)
        lengths = None if lengths is None else lengths - (self.min_frames - 1)
        return mask_frames(hidden, lengths), lengths
