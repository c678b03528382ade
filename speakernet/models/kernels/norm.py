"""Batch norm as torch's compiler handles it best on a CPU, used inside compiled networks only.

torch's own definition becomes Welford's update for every vector of channels (and plain means a cascade of sums), which
takes the compiled kernel several times longer than reading the data. Sums over a few hundred frames first, then over
bands and utterances, are plain additions and as exact; they make a compiled step of ResNetSE34L about a twelfth faster
(docs/performance.md).
"""

import types
from typing import Any

import torch
from torch import Tensor, nn


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
        centred = rows - mean
        bias_gradient = channel_sums(gradient)
        weight_gradient = channel_sums(gradient * centred) * inverse
        scale = weight * inverse
        along, level = scale * inverse * weight_gradient / count, scale * bias_gradient / count
        result = gradient * scale - centred * along - level
        return channels_ahead(result.to(features.dtype)), weight_gradient, bias_gradient, None, None


def channels_behind(features: Tensor) -> Tensor:
    """(batch, channels, mels, frames) as (batch, mels, frames, channels): new values are laid out in this order."""
    return features.permute(0, 2, 3, 1)


def channels_ahead(rows: Tensor) -> Tensor:
    """The reverse of `channels_behind`."""
    return rows.permute(0, 3, 1, 2)


def channel_sums(values: Tensor) -> Tensor:
    """Sums of (batch, mels, frames, channels) over all but the channels, in three short sums instead of a long one."""
    return values.sum(2, dtype=torch.float32).sum(1).sum(0)


def use_compiled_norms(net: nn.Module) -> None:
    """Let the network's 2-D batch norms run as `TrainingBatchNorm` when they are compiled for a CPU; call it once."""
    for module in net.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]


def is_compiled_training(module: nn.Module, features: Tensor) -> bool:
    """Whether the module is being compiled for a CPU, to train: everywhere else torch's own definition runs."""
    return torch.compiler.is_compiling() and module.training and features.device.type == "cpu"


def _forward(norm: nn.BatchNorm2d, features: Tensor) -> Tensor:
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
        norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
    return normalized
