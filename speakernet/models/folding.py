"""Batch norms merged into the layers before them, for networks that are only used.

In evaluation mode a batch norm multiplies and adds per channel. Where a convolution or linear layer stands before it
and nothing else takes that layer's result, its weights can do both: the network gives the same to a few units of the
last place, and reads and writes its activations once less.
"""

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from speakernet.models.layers import ChannelFloor

Net = TypeVar("Net", bound=nn.Module)
Layer = nn.Conv1d | nn.Conv2d | nn.Linear
"""What a batch norm is merged into."""


def fold_batch_norms(net: nn.Module) -> int:
    """Merge every batch norm that directly follows a layer into it, in place; the network can no longer be trained.

    A module names such pairs in `norm_behind` (layer, also within a part, such as `part.conv` -> the norm of its own
    that alone takes the layer's result; lists of modules pair member by member). In a sequence they are found. In
    `norm_behind_relu` it names those with a ReLU between (layer -> the ReLU, the norm, and the layer that alone takes
    the norm's result): the layer before takes the norm, and a floor for each channel the place of the ReLU.

    Returns:
        How many were merged.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> net[1].running_mean.fill_(3.0)
    tensor([3., 3.])
    >>> before = net(torch.ones(1, 2)).detach()
    >>> fold_batch_norms(net), torch.allclose(net(torch.ones(1, 2)), before)
    (1, True)
    """
    found = [pair for module in net.modules() for pair in _pairs(module)]
    for layer, holder, name in found:
        _merge(layer, holder._modules[name])  # type: ignore[arg-type]
        holder._modules[name] = nn.Identity()
    rectified = [(module, names) for module in net.modules() for names in _rectified(module)]
    for module, names in rectified:
        _merge_rectified(module, *names)
    return len(found) + len(rectified)


def folded(net: Net) -> Net:
    """A copy of a network in evaluation mode with its batch norms merged; the network itself stays as it is."""
    twin = copy.deepcopy(net).eval()
    fold_batch_norms(twin)
    return twin


def _pairs(module: nn.Module) -> Iterator[tuple[Layer, nn.Module, str]]:
    """Layers with a batch norm behind them: the layer, the module that holds the norm, and the norm's name in it."""
    places: list[tuple[nn.Module, nn.Module, str]] = []
    if isinstance(module, nn.Sequential):
        names = list(module._modules)
        places += [(module[index], module, names[index + 1]) for index in range(len(names) - 1)]
    for layer_name, norm_name in getattr(module, "norm_behind", {}).items():
        layer, norm = module.get_submodule(layer_name), module.get_submodule(norm_name)
        if isinstance(layer, nn.ModuleList):
            places += [(one, norm, str(index)) for index, one in enumerate(layer)]
        else:
            places.append((layer, module, norm_name))
    for layer, holder, name in places:
        if isinstance(layer, Layer) and isinstance(holder._modules[name], nn.modules.batchnorm._BatchNorm):
            yield layer, holder, name


def _rectified(module: nn.Module) -> Iterator[tuple[str, str, str, str]]:
    """Names of a layer, the ReLU behind it, the batch norm behind that, and the layer behind all."""
    for layer, (activation, norm, behind) in getattr(module, "norm_behind_relu", {}).items():
        if isinstance(module.get_submodule(norm), nn.modules.batchnorm._BatchNorm):
            yield layer, activation, norm, behind


def _merge(layer: Layer, norm: nn.modules.batchnorm._BatchNorm) -> None:
    """Give the layer the weights of both."""
    _rescale(layer, *_scale_and_shift(norm))


def _merge_rectified(module: nn.Module, layer: str, activation: str, norm: str, behind: str) -> None:
    """Give the layer before a ReLU the weights of the norm behind it.

    Channels that the norm turns round would need a ceiling: they are turned back, and so are the weights behind.
    """
    scale, shift = _scale_and_shift(module.get_submodule(norm))  # type: ignore[arg-type]
    signs = torch.where(scale < 0, -1.0, 1.0).double()
    _rescale(module.get_submodule(layer), scale * signs, shift * signs)  # type: ignore[arg-type]
    module._modules[activation] = ChannelFloor((shift * signs).float())
    module._modules[norm] = nn.Identity()
    reader = module.get_submodule(behind)
    assert isinstance(reader, Layer)
    turned = reader.weight.double() * signs.view(-1, *(1 for _ in reader.weight.shape[2:]))
    reader.weight = nn.Parameter(turned.float(), requires_grad=False)


def _scale_and_shift(norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """What a norm multiplies by and then adds, (channels,) each, in float64: the weights are rounded once."""
    assert norm.running_mean is not None and norm.running_var is not None and not norm.training
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift + norm.bias.double() if norm.affine else shift


def _rescale(layer: Layer, scale: Tensor, shift: Tensor) -> None:
    """Let the layer give its result times a scale plus a shift, both (channels,)."""
    if layer.bias is not None:
        shift = shift + layer.bias.double() * scale
    # Elementwise, so that the weights keep their order in memory.
    weight = layer.weight.double() * scale.view(-1, *(1 for _ in layer.weight.shape[1:]))
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    layer.bias = nn.Parameter(shift.float(), requires_grad=False)
