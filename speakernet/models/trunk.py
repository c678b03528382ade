"""The base of every trunk: what the network around it asks of it, and how one class gets many sizes.

A trunk is what lies between features and pooling. It is a row of `tables.MODELS`; its options are the keywords of its
constructor, its sizes are class attributes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn


class Trunk(nn.Module):
    """The abstract trunk: from (batch, mels, frames) to (batch, channels, frames)."""

    front_end_defaults: ClassVar[Mapping[str, Any]] = {"name": "fbank"}
    """Name and options of the front end that its published models have."""
    default_pooling: ClassVar[str] = "TSTP"
    """The pooling that its published models have."""
    pooling_names: ClassVar[Mapping[str, str]] = {}
    """Common names that mean a pooling of its own, such as SAP of ResNetSE34V2."""
    tested_poolings: ClassVar[Sequence[str]] = ("TSTP",)
    """Poolings that the tests run over; any other works as well."""
    paper: ClassVar[str] = ""
    """Who published it."""
    published_dim: ClassVar[int] = 256
    """Numbers in the embeddings of its published models."""
    published_mels: ClassVar[int] = 80
    """Mel bands that its published models hear; 0 where they hear samples."""

    has_norm_after_pooling: bool = False
    """Batch norm between pooling and embedding layer."""
    embedding_layer: str = "linear"
    """What turns the pooled vector into an embedding; a name of `embedding.EMBEDDING_LAYERS`."""
    pooling_options: Mapping[str, Any] = {}
    """Options of the pooling, where the pooling has them."""
    out_channels: int
    """Channels handed to the pooling."""

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, mels, frames) to (batch, channels, frames), and the valid frames of each."""
        raise NotImplementedError


def sized(family: type[Trunk], sizes: Mapping[str, Mapping[str, Any]]) -> dict[str, type[Trunk]]:
    """A class for every size of a family: its class attributes set to the size's values.

    Args:
        family: the class that reads those attributes.
        sizes: name of a size to its attributes, smallest first.
    """
    return {
        name: type(name, (family,), {"__doc__": family.__doc__, "__module__": family.__module__, **values})
        for name, values in sizes.items()
    }
