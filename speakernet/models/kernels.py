"""Operations of networks that are compiled for a CPU, where torch's own leave time on the table.

Gradients of wide 3 x 3 convolutions by Winograd's minimal filtering. The forward pass is torch's own. In the backward
pass three neighbouring frames need nine multiplications by a row of the kernel; from five sums of neighbouring frames
they need five. The sums cost memory traffic, which torch's compiler merges with its neighbours, and only wide layers
have enough arithmetic to pay for it (docs/performance.md). In bfloat16 the sums are rounded once more, which is little
beside what the rest of the backward pass rounds (docs/decisions.md).

Batch norm by short sums. torch's own definition becomes Welford's update for every vector of channels (and plain means
a cascade of sums), which takes the compiled kernel several times longer than reading the data. Sums over a few hundred
frames first, then over bands and utterances, are plain additions and as exact; they make a compiled step of ResNetSE34L
about a twelfth faster (docs/performance.md).

Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", section 4: F(3, 3), with the
interpolation points 0, 1, -1, 2 and infinity. The matrices keep the paper's names.
"""

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Frames of the result that are computed together: two saved 3 % of a compiled step, three 7 to 9 %, four 4 to 5 %
# (fewer products, more sums).
TILE = 3
A = ((1, 0, 0), (1, 1, 1), (1, -1, 1), (1, 2, 4), (0, 0, 1))  # (products, frames of the result)
G = ((1 / 2, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 6, -1 / 6, 1 / 6), (1 / 6, 1 / 3, 2 / 3), (0, 0, 1))  # (products, taps)
B = ((2, -1, -2, 1, 0), (0, 2, 1, -1, 0), (0, -2, 3, -1, 0), (0, -1, 0, 1, 0), (0, 2, -1, -2, 1))  # (products, frames)
# Input times output channels from which the saved arithmetic outweighs the traffic: 64 times 64 gained nothing on two
# CPU cores, 64 times 128 did.
LEAST_WIDTH = 64 * 128


def use_compiled_kernels(net: nn.Module) -> None:
    """Let the network's layers run as the classes below once they are compiled for a CPU; call it before that."""
    use_compiled_norms(net)
    use_compiled_convolutions(net)


def use_compiled_convolutions(net: nn.Module) -> int:
    """Let the network's wide convolutions run as `WinogradGradient` when they are compiled for a CPU; call it once.

    Returns:
        How many there are.
    """
    wide = [module for module in net.modules() if type(module) is nn.Conv2d and _is_wide(module)]
    for convolution in wide:
        # A compiled step of ResNetSE34L takes 0.94 of its time with it (12 rounds in turn).
        convolution.forward = types.MethodType(_convolve, convolution)  # type: ignore[method-assign]
    return len(wide)


def use_compiled_norms(net: nn.Module) -> None:
    """Let the network's 2-D batch norms run as `TrainingBatchNorm` when they are compiled for a CPU; call it once."""
    for module in net.modules():
        # Without a momentum torch keeps a cumulative mean, which `_normalize` leaves to torch.
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
            module.forward = types.MethodType(_normalize, module)  # type: ignore[method-assign]


def is_compiled_training(module: nn.Module, features: Tensor) -> bool:
    """Whether the module is being compiled for a CPU, to train: everywhere else torch's own definition runs."""
    return torch.compiler.is_compiling() and module.training and features.device.type == "cpu"


class WinogradGradient(torch.autograd.Function):
    """3 x 3 convolution with stride 1, padding 1 and no bias, and with Winograd's backward pass."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor) -> Tensor:
        """The convolution in the precision of `features`.

        Args:
            ctx: torch's.
            features: (batch, channels, mels, frames).
            weight: (output channels, channels, 3, 3), float32 whatever the precision of the features.

        Returns:
            (batch, output channels, mels, frames).
        """
        ctx.save_for_backward(features, weight)
        # Direct, as in evaluation: with both passes by Winograd eight of nine seeds ended with a higher EER.
        return functional.conv2d(features, weight.to(features.dtype), padding=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of features and weight, in their shapes and precisions."""
        features, weight = ctx.saved_tensors
        dtype, num_frames = features.dtype, features.shape[3]
        # Padded along mels only in the products below: along frames the sums hold the zeros beyond the edges already.
        tiles = _every_third(gradients[0])
        # Five convolutions: one with five groups gave 400 instead of 480 GFLOP/s.
        pairs = [
            torch.ops.aten.convolution_backward(
                _combine(row, tiles).to(dtype), frames, taps, None,
                [1, 1], [1, 0], [1, 1], False, [0, 0], 1, [True, True, False],
            )[:2]
            for row, frames, taps in zip(A, _sums_of_frames(features), _sums_of_taps(weight, dtype), strict=True)
        ]  # fmt: skip
        of_sums, of_taps = zip(*pairs, strict=True)
        before, first, middle, last, behind = (_combine(column, of_sums) for column in zip(*B, strict=True))
        tiles = [first + _of_tile_before(behind), middle, last + _of_tile_behind(before)]
        of_weight = torch.cat([_combine(column, of_taps) for column in zip(*G, strict=True)], dim=3)
        return _interleave([tile.to(dtype) for tile in tiles], num_frames), of_weight.to(weight.dtype)


class TrainingBatchNorm(torch.autograd.Function):
    """Batch norm of (batch, channels, mels, frames) by the batch's own statistics.

    Source: Ioffe & Szegedy 2015, "Batch Normalization", algorithm 1 and the gradients of section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, near_mean: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised features, and the batch's mean and biased variance of each channel, float32.

        Args:
            ctx: torch's.
            features: (batch, channels, mels, frames).
            weight: (channels,).
            bias: (channels,).
            near_mean: (channels,) any values near the means: squares of what is left of them lose no digits.
            epsilon: added to the variance.
        """
        rows = channels_behind(features)
        count = rows.numel() // rows.shape[-1]
        centred = rows - near_mean
        offset = channel_sums(centred) / count
        # A difference of two sums: rounding can push it below zero, and the root could be NaN.
        variance = (channel_sums(centred.square()) / count - offset.square()).clamp_min(0)
        mean = near_mean + offset
        inverse = torch.rsqrt(variance + epsilon)
        scale = weight * inverse
        normalized = rows * scale + (bias - mean * scale)
        ctx.save_for_backward(features, weight, mean, inverse)
        ctx.mark_non_differentiable(mean, variance)
        return channels_ahead(normalized.to(features.dtype)), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Gradients of features (in their shape and precision), weight and bias, (channels,) in float32."""
        features, weight, mean, inverse = ctx.saved_tensors
        rows, gradient = channels_behind(features), channels_behind(gradients[0])
        count = rows.numel() // rows.shape[-1]
        # Widened where they are used: widened at the start, the compiler stored bf16 gradients as float32.
        centred = rows - mean
        bias_gradient = channel_sums(gradient)
        weight_gradient = channel_sums(gradient * centred) * inverse
        scale = weight * inverse
        along, level = scale * inverse * weight_gradient / count, scale * bias_gradient / count
        result = gradient * scale - centred * along - level
        return channels_ahead(result.to(features.dtype)), weight_gradient, bias_gradient, None, None


def _convolve(convolution: nn.Conv2d, features: Tensor) -> Tensor:
    if not is_compiled_training(convolution, features):
        return nn.Conv2d.forward(convolution, features)
    if torch.is_autocast_enabled("cpu"):
        features = features.to(torch.get_autocast_dtype("cpu"))
    return WinogradGradient.apply(features, convolution.weight)


def _normalize(norm: nn.BatchNorm2d, features: Tensor) -> Tensor:
    count = features.numel() // features.shape[1]
    # A single value for each channel has no variance: torch's own definition says so.
    if not is_compiled_training(norm, features) or norm.momentum is None or count < 2:
        return nn.BatchNorm2d.forward(norm, features)
    assert norm.running_mean is not None and norm.running_var is not None
    assert norm.num_batches_tracked is not None
    near_mean = norm.running_mean.clone()
    normalized, mean, variance = TrainingBatchNorm.apply(features, norm.weight, norm.bias, near_mean, norm.eps)
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        # torch normalises by the biased variance and keeps the unbiased one.
        norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
    return normalized


def _is_wide(module: nn.Conv2d) -> bool:
    shape = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    is_plain = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and module.bias is None
    return is_plain and module.in_channels * module.out_channels >= LEAST_WIDTH


def _combine(factors: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the tensors times their factors, in float32 at least."""
    total: Tensor | None = None
    for factor, tensor in zip(factors, tensors, strict=True):
        if factor:
            term = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
            total = term if total is None else total + term
    assert total is not None
    return total


def _every_third(features: Tensor) -> list[Tensor]:
    """Frames 0, 3, 6 …, frames 1, 4, 7 … and frames 2, 5, 8 …, with zeros where the last tile is not full."""
    num_tiles = -(-features.shape[3] // TILE)
    parts = [features[..., offset::TILE] for offset in range(TILE)]
    # A width of no frames pads nothing, and leaves out a masked read in the compiled code.
    return [
        functional.pad(part, (0, num_tiles - part.shape[3])) if part.shape[3] < num_tiles else part for part in parts
    ]


def _of_tile_before(tiles: Tensor) -> Tensor:
    """What the tile before has, zeros at the first."""
    return functional.pad(tiles, (1, 0))[..., :-1]


def _of_tile_behind(tiles: Tensor) -> Tensor:
    """What the next tile has, zeros at the last."""
    return functional.pad(tiles, (0, 1))[..., 1:]


def _sums_of_frames(features: Tensor) -> list[Tensor]:
    """Of each tile's five input frames the five sums that are multiplied, (batch, channels, mels, tiles) each."""
    first, middle, last = _every_third(features)
    frames = (_of_tile_before(last), first, middle, last, _of_tile_behind(first))
    return [_combine(row, frames).to(features.dtype) for row in B]


def _sums_of_taps(weight: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The kernel's sums that belong to them, (output channels, channels, 3, 1) each."""
    taps = weight.split(1, dim=3)
    return [_combine(row, taps).to(dtype).contiguous(memory_format=torch.channels_last) for row in G]


def _interleave(tiles: Sequence[Tensor], num_frames: int) -> Tensor:
    """The frames of all tiles in order: the reverse of `_every_third`.

    The tiles are joined as (batch, mels x tiles, channels): three dimensions that the compiler lays out as they are.
    """
    batch, channels, mels, num_tiles = tiles[0].shape
    # Neither `torch.stack` nor a four-dimensional `torch.cat`: the compiler turns both into reads of single numbers.
    rows = torch.cat([tile.permute(0, 2, 3, 1).reshape(batch, mels * num_tiles, channels) for tile in tiles], dim=2)
    return rows.reshape(batch, mels, TILE * num_tiles, channels).permute(0, 3, 1, 2)[..., :num_frames]


def channels_behind(features: Tensor) -> Tensor:
    """(batch, channels, mels, frames) as (batch, mels, frames, channels): new values are laid out in this order."""
    # torch's compiler lays a result out in the order of its loops, and wrote gradients transposed without this.
    return features.permute(0, 2, 3, 1)


def channels_ahead(rows: Tensor) -> Tensor:
    """The reverse of `channels_behind`."""
    return rows.permute(0, 3, 1, 2)


def channel_sums(values: Tensor) -> Tensor:
    """Sums of (batch, mels, frames, channels) over all but the channels, in three short sums instead of a long one."""
    # torch adds in a cascade where a sum has over 4,096 terms: a step of ResNetSE34L went from 0.527 to 0.505 s with
    # one long sum, to 0.478 to 0.498 with three short ones.
    return values.sum(2, dtype=torch.float32).sum(1).sum(0)
