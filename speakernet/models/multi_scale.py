"""Res2Net's split: groups of channels that pass through convolutions one after another, each hearing the one before.

Blocks over frames (ECAPA-TDNN, RawNet3) and over mels and frames (Res2Net, ERes2Net) differ in which group goes past
the convolutions, in the order of norm and activation, and in how a group joins the result before it.

Source: Gao et al. 2019, "Res2Net: a new multi-scale backbone architecture", section 3.1.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Passed = Literal["none", "first", "last"]
"""The group that goes past the convolutions."""
# Activations in Res2Net and ERes2Net are clipped here.
CEILING = 20.0


def multi_scale(
    features: Tensor,
    lengths: Tensor | None,
    convs: Sequence[nn.Module] | nn.ModuleList,
    norms: Sequence[nn.Module] | nn.ModuleList,
    finish: Callable[[Tensor, nn.Module], Tensor],
    passed: Passed = "none",
    fusions: Iterable[nn.Module] = (),
) -> Tensor:
    """The groups' results, one after another along channels.

    Args:
        features: (batch, channels, …, frames); channels are shared evenly among the groups.
        lengths: (batch,) valid frames, or None when all are full.
        convs: a convolution for each group but the one that is passed, which masks for itself.
        norms: a norm behind each.
        finish: norm and activation, in their order.
        passed: the group without convolution.
        fusions: how each group after the first joins the result before it; they are added where none is given.
    """
    num_groups = len(convs) + (passed != "none")
    groups = list(features.chunk(num_groups, dim=1))
    beside = {"none": [], "first": groups[:1], "last": groups[-1:]}[passed]
    if passed == "first":
        groups = groups[1:]
    joins = list(fusions)
    results: list[Tensor] = []
    for index, (conv, norm) in enumerate(zip(convs, norms, strict=True)):
        entering = groups[index]
        if results:
            # The first convolution has nothing before it to join.
            entering = joins[index - 1](results[-1], entering) if joins else entering + results[-1]
        results.append(finish(conv(entering, lengths), norm))
    return torch.cat((*beside, *results) if passed == "first" else (*results, *beside), dim=1)


def relu_then_norm(features: Tensor, norm: nn.Module) -> Tensor:
    """ReLU before batch norm, as in time-delay networks."""
    return norm(features.relu_())  # type: ignore[no-any-return]


def norm_then_clipped_relu(features: Tensor, norm: nn.Module) -> Tensor:
    """Batch norm before a ReLU that ends at 20, as in Res2Net and ERes2Net."""
    return clipped_relu(norm(features))


def clipped_relu(features: Tensor) -> Tensor:
    """ReLU that ends at 20, in place in eager networks."""
    # A compiled batch norm is a function of its own (`kernels`), whose result may not be changed.
    if torch.compiler.is_compiling():
        return features.clamp(0.0, CEILING)
    return features.clamp_(0.0, CEILING)
