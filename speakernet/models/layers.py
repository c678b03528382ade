"""Shared parts of the model families: trunk, length masks, convolutions, gates, Res2Net's split,
embedding layer.

With `lengths` (valid frames of each utterance) every layer zeroes the frames past an utterance's
end, like a convolution's padding of that utterance alone. Without `lengths` (training on crops)
nothing is masked.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from speakernet.frontend.features import Lengths, valid_frames
from speakernet.models.options.trunks import TrunkOptions

# Channels that oneDNN's kernels process at once.
ONEDNN_BLOCK = 16
# Ratio of channels to hidden channels in a gate.
REDUCTION = 8


class Foldable(nn.Module):
    """A module that says which of its batch norms `fold_batch_norms` may merge into which layers.

    Keys and values are names of submodules, possibly nested ("conv", "bottleneck.conv").
    """

    norm_behind: Mapping[str, str] = types.MappingProxyType({})
    """Layer -> the norm that directly follows it."""
    norm_behind_relu: Mapping[str, tuple[str, str, str]] = types.MappingProxyType({})
    """Layer -> the ReLU and the norm that follow it, and the only layer that reads the norm."""


def mask_frames(features: Tensor, lengths: Lengths, value: float = 0.0) -> Tensor:
    """Set the frames (last axis) past each utterance's end to zero or another value."""
    if lengths is None:
        return features
    past = ~valid_frames(lengths, features.shape[-1])
    middle = [1] * (features.ndim - 2)
    past = past.view(past.shape[0], *middle, past.shape[1])  # (batch, 1, ..., 1, frames)
    return features.masked_fill(past, value)


def mean_over_frames(features: Tensor, lengths: Lengths) -> Tensor:
    """Mean over the valid frames of (batch, channels, frames), (batch, channels); invalid frames
    must be zero.
    """
    if lengths is None:
        return features.mean(dim=-1)
    # In 16 bits a sum over hundreds of frames may overflow even if the mean does not.
    sums = features.sum(dim=-1, dtype=torch.promote_types(features.dtype, torch.float32))
    # (batch, channels) / (batch, 1)
    return (sums / lengths.unsqueeze(1)).to(features.dtype)


def valid_length(lengths: Lengths, kernel: int, stride: int, padding: int = 0) -> Lengths:
    """Valid frames after a convolution or pooling; one padded by half its kernel counts like a
    kernel of 1.
    """
    if lengths is None:
        return None
    return (lengths + 2 * padding - kernel) // stride + 1


class MaskedConvolution(nn.Conv2d):
    """A padded convolution over mels and frames that masks its input past each utterance's end."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        kernel: tuple[int, int] = (3, 3),
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        padding = (kernel[0] // 2, kernel[1] // 2)
        super().__init__(channels_in, channels, kernel, padding=padding, groups=groups, bias=bias)

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:  # type: ignore[override]
        """(batch, channels, mels, frames) in and out; `lengths` is (batch,) valid frames."""
        return super().forward(mask_frames(features, lengths))


def check_frames(
    features: Tensor, lengths: Lengths, fewest: int, name: str, unit: str = "frames"
) -> None:
    """Refuse utterances that are too short for a model."""
    shortest = features.shape[2] if lengths is None else int(lengths.min())
    if shortest < fewest:
        raise ValueError(f"{name} needs {fewest} {unit} or more, but an utterance has {shortest}")


def relu(features: Tensor) -> Tensor:
    """ReLU, in place in eager networks.

    A network compiled for a CPU saves the result for the backward pass instead of a byte mask,
    which torch's CPU code stores and loads one byte at a time (a compiled residual block is 2.7x
    slower with it).
    """
    # 40 ms per block with torch's mask, 15 with the saved result, 23 eager (16 channels, batch of
    # 16, one core).
    if torch.compiler.is_compiling() and features.requires_grad and features.device.type == "cpu":
        return CompiledReLU.apply(features)
    return features.relu_()


class Rectifier(nn.Module):
    """ReLU as a module, so that `fold_batch_norms` can replace it with a `ChannelFloor`."""

    def forward(self, features: Tensor) -> Tensor:
        """max(features, 0), any shape."""
        return relu(features)


class ChannelFloor(nn.Module):
    """The larger of each feature and its channel's floor: ReLU and the batch norm after it in one
    pass.

    The norm gives scale x max(feature, 0) + shift, which for a positive scale is max(scale x
    feature + shift, shift).
    """

    floors: Tensor

    def __init__(self, floors: Tensor) -> None:
        super().__init__()
        self.register_buffer("floors", floors[:, None, None])

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, mels, frames) in and out."""
        return features.clamp_min_(self.floors)


class CompiledReLU(torch.autograd.Function):
    """ReLU that computes its gradient from its result."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        """max(features, 0)."""
        result = features.relu()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient where the result is above zero, else zero."""
        (result,) = ctx.saved_tensors
        # The result is never negative, so its sign is the mask, one or zero.
        return gradients[0] * result.sign()


def is_safe_in_channels_last(net: nn.Module) -> bool:
    """Whether every 2-D convolution of `net` can run in channels_last on a CPU.

    oneDNN (in torch 2.14) overruns its buffers in the weight gradient of strided 1 x 1 convolutions
    with fewer than 16 input channels, which crashes the process.
    """
    return not any(
        isinstance(part, nn.Conv2d)
        and max(part.kernel_size) == 1
        and max(part.stride) > 1
        # 8 and 12 channels crash ("free(): invalid next size"); 16, 20, 24 and 40 give correct
        # results.
        and part.in_channels < ONEDNN_BLOCK
        for part in net.modules()
    )


class SqueezeExcitation(nn.Module):
    """Scales every channel by a gate computed from the means of all channels.

    Source: Hu et al. 2018, "Squeeze-and-Excitation Networks", equations 2 to 4.
    """

    def __init__(self, channels: int, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or channels // REDUCTION
        self.squeeze = nn.Linear(channels, hidden)
        self.excite = nn.Linear(hidden, channels)

    def gate(self, means: Tensor) -> Tensor:
        """(batch, channels) means to factors in 0..1."""
        return self.excite(self.squeeze(means).relu()).sigmoid()

    def forward(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """(batch, channels, mels, frames) in and out, in place without gradients; invalid frames
        must be zero.
        """
        # TrainingGate makes an eager training step of ResNetSE34L 1.15x faster, a compiled one
        # 1.02x.
        if lengths is None and features.requires_grad:
            weights = self.squeeze.weight, self.squeeze.bias, self.excite.weight, self.excite.bias
            return TrainingGate.apply(features, *weights)
        num_frames = features.shape[3] if lengths is None else lengths.unsqueeze(1)
        means = _sum_channels(features, torch.float32) / (features.shape[2] * num_frames)
        gate = self.gate(means.to(features.dtype))[:, :, None, None]  # (batch, channels, 1, 1)
        return features * gate if features.requires_grad else features.mul_(gate)


class TrainingGate(torch.autograd.Function):
    """Squeeze-and-excitation of full crops as one function whose backward pass reads the features
    once.

    Autograd would write the scaled gradient first and add the gradient through the means in a
    second pass, which on a CPU is several times slower than the first. The gate is computed in the
    precision of its weights, not of autocast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        squeeze: Tensor,
        squeeze_bias: Tensor,
        excite: Tensor,
        excite_bias: Tensor,
    ) -> Tensor:
        """The scaled features, in their precision."""
        with torch.autocast(features.device.type, enabled=False):
            # (batch, channels), then (batch, hidden channels), then (batch, channels)
            means = _sum_channels(features, squeeze.dtype) / features[0, 0].numel()
            hidden = torch.addmm(squeeze_bias, means, squeeze.t()).relu()
            gate = torch.addmm(excite_bias, hidden, excite.t()).sigmoid()
        ctx.save_for_backward(features, squeeze, excite, means, hidden, gate)
        return features * gate.to(features.dtype)[:, :, None, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients of features and weights, in their shapes and precisions."""
        features, squeeze, excite, means, hidden, gate = ctx.saved_tensors
        (gradient,) = gradients
        # float16 products overflow above 65,504, close to which the loss scale brings gradients.
        wide = gradient.float() if gradient.dtype == torch.float16 else gradient
        # Backwards through the forward pass, one line each: product, sigmoid, ReLU, means.
        d_gate = _sum_channels(wide * features, gate.dtype)  # (batch, channels)
        d_excited = d_gate * gate * (1 - gate)
        d_squeezed = (d_excited @ excite) * hidden.sign()  # (batch, hidden channels)
        d_means = (d_squeezed @ squeeze) / features[0, 0].numel()
        # Autograd's second pass, which adds the broadcast means, took 10 ms and its first 1.3 ms
        # (16 channels).
        d_means = d_means.to(features.dtype)[:, :, None, None]  # (batch, channels, 1, 1)
        gate = gate.to(features.dtype)[:, :, None, None]
        d_features = torch.addcmul(d_means, gradient, gate)
        d_weights = (
            d_squeezed.t() @ means,
            d_squeezed.sum(0),
            d_excited.t() @ hidden,
            d_excited.sum(0),
        )
        return d_features, *d_weights


def _sum_channels(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums over mels and frames, (batch, channels) of `dtype`."""
    # A CPU copies all features to float32 for a float32 sum; only float16 needs that, against
    # overflow.
    sum_dtype = features.dtype if features.dtype == torch.bfloat16 else dtype
    # One sum over both axes takes 0.06 ms for 10 crops of the first stage, two successive sums
    # 0.45.
    return features.sum((2, 3), dtype=sum_dtype).to(dtype)


def initialize_convolutions(module: nn.Module) -> None:
    """Kaiming-normal (fan out, ReLU) for every 2-D convolution, ones and zeros for every 2-D batch
    norm.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


class Trunk(Foldable):
    """The abstract trunk between features and pooling, with all that others ask a trunk for.

    It maps features (batch, mels, frames) to frames (batch, channels, frames). It also takes the
    number of valid frames of each utterance, or None, and returns the new numbers.
    """

    out_channels: int
    """Channels of the output."""
    num_states: int = 1
    """Number of layers in the output, each with `out_channels`."""
    min_frames: int = 1
    """Frames of the shortest possible utterance."""
    options: TrunkOptions | None = None
    """The options that the trunk has completed, such as the configuration of a pretrained backbone;
    None: those that it was built with."""
    is_pretrained: bool = False
    """Whether it starts from published weights, of which a stage may train a part."""
    refers_to_files: bool = False
    """Whether model files refer to the files of fixed weights instead of containing them."""
    fixed: Mapping[str, int] = types.MappingProxyType({})
    """CRC-32 of each weight that is unchanged from those files."""

    def refuse_impossible(self, options: Any) -> None:
        """ValueError if a stage's options ask for something that this trunk cannot do."""

    def tune(self, options: Any, net: nn.Module) -> Any:
        """Prepare a stage's training; the object with the network's state for last.pt, or None for
        the network itself.
        """
        return None

    def begin_epoch(self, epoch: int) -> None:
        """Set what is trained in this epoch (from 0), for gradual unfreezing."""

    def learning_rate_factors(self) -> Iterable[tuple[nn.Parameter, float]]:
        """Parameters that learn more slowly than the rest, each with its factor."""
        return ()

    def plain_weights(
        self, weights: Mapping[str, Tensor], *, without_fixed: bool
    ) -> dict[str, Tensor]:
        """The network's state dictionary for a model file, without `fixed` if requested."""
        return dict(weights)


def make_embedding(kind: str, dim_in: int, dim: int) -> nn.Module:
    """The layer from pooled vector to embedding.

    `linear`; `normed_linear`, followed by a batch norm (`emb_bn` in wespeaker and ReDimNet);
    `plain_normed_linear`, without bias and followed by a batch norm without weights (CAM++);
    `two_linear`, two layers with ReLU and a batch norm without weights in between (x-vector,
    `two_emb_layer` in wespeaker).
    """
    # A bias before a norm without weights would be subtracted again.
    layer = nn.Linear(dim_in, dim, bias=kind != "plain_normed_linear")
    if kind == "linear":
        return layer
    if kind == "two_linear":
        return nn.Sequential(
            layer, nn.ReLU(), nn.BatchNorm1d(dim, affine=False), nn.Linear(dim, dim)
        )
    return nn.Sequential(layer, nn.BatchNorm1d(dim, affine=kind == "normed_linear"))


Passed = Literal["none", "first", "last"]
"""The group without a convolution."""
# Activations in Res2Net and ERes2Net are clipped here.
CEILING = 20.0


def multi_scale(
    features: Tensor,
    lengths: Lengths,
    convs: Sequence[nn.Module] | nn.ModuleList,
    norms: Sequence[nn.Module] | nn.ModuleList,
    finish: Callable[[Tensor, nn.Module], Tensor],
    passed: Passed = "none",
    fusions: Sequence[nn.Module] | nn.ModuleList = (),
) -> Tensor:
    """Res2Net's split: groups of channels pass through convolutions, each combined with the
    previous group's result.

    `passed` names the group without a convolution, `finish` applies norm and activation in the
    right order, and `fusions` combine a group with the previous result; without them the two are
    added.

    Source: Gao et al. 2019, "Res2Net: a new multi-scale backbone architecture", section 3.1.
    """
    # A chain: the second group sees the first one's result, the third the second's, and so on, so
    # that the groups see ever wider stretches at the cost of one narrow convolution each. The group
    # without a convolution keeps the input as it is.
    groups = features.chunk(len(convs) + (passed != "none"), dim=1)  # (batch, width, ..., frames)
    first = groups[: int(passed == "first")]
    results: list[Tensor] = []
    for index, (conv, norm) in enumerate(zip(convs, norms, strict=True)):
        group = groups[len(first) + index]
        if results and fusions:
            group = fusions[index - 1](results[-1], group)
        elif results:
            group = group + results[-1]
        results.append(finish(conv(group, lengths), norm))
    last = groups[len(first) + len(convs) :]
    return torch.cat((*first, *results, *last), dim=1)  # (batch, channels, ..., frames)


def relu_then_norm(features: Tensor, norm: nn.Module) -> Tensor:
    """ReLU before batch norm, as in time-delay networks."""
    return norm(features.relu_())  # type: ignore[no-any-return]


def norm_then_clipped_relu(features: Tensor, norm: nn.Module) -> Tensor:
    """Batch norm before a ReLU clipped at 20, as in Res2Net and ERes2Net."""
    return clipped_relu(norm(features))


def clipped_relu(features: Tensor) -> Tensor:
    """ReLU clipped at 20, in place."""
    return features.clamp_(0.0, CEILING)
