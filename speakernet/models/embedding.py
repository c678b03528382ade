"""From the pooled vector to the embedding: one linear layer in most models, a little more in some."""

from collections.abc import Callable

from torch import nn


def linear(dim_in: int, dim: int) -> nn.Module:
    """One linear layer."""
    return nn.Linear(dim_in, dim)


def normed_linear(dim_in: int, dim: int) -> nn.Module:
    """A linear layer and a batch norm (`emb_bn` in wespeaker and ReDimNet)."""
    return nn.Sequential(nn.Linear(dim_in, dim), nn.BatchNorm1d(dim))


def plain_normed_linear(dim_in: int, dim: int) -> nn.Module:
    """A linear layer without bias and a batch norm without weights (CAM++)."""
    return nn.Sequential(nn.Linear(dim_in, dim, bias=False), nn.BatchNorm1d(dim, affine=False))


def two_linear(dim_in: int, dim: int) -> nn.Module:
    """Two linear layers with ReLU and a batch norm without weights between (x-vector, `two_emb_layer` in wespeaker)."""
    return nn.Sequential(nn.Linear(dim_in, dim), nn.ReLU(), nn.BatchNorm1d(dim, affine=False), nn.Linear(dim, dim))


EMBEDDING_LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": linear,
    "normed_linear": normed_linear,
    "plain_normed_linear": plain_normed_linear,
    "two_linear": two_linear,
}
