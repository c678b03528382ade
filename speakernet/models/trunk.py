"""The base of every trunk: what the network around it asks of it."""

from torch import Tensor, nn


class Trunk(nn.Module):
    """The abstract trunk, what lies between features and pooling: (batch, mels, frames) to (batch, channels, frames).

    A trunk is made of an object of its own options class, which says what it is called and what belongs around it.
    """

    out_channels: int
    """Channels handed to the pooling."""
    min_frames: int = 1
    """Frames of the shortest utterance that it can hear."""

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels, frames), and the valid frames of each."""
        raise NotImplementedError
