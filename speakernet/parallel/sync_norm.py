"""Batch norm over the batch of all ranks, so that a recipe means the same on any number of
processes.

On a GPU it is torch's own, which has no CPU path; on a CPU it is the class below, with the results
of one process.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as torch_distributed
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


def synchronize_norms(module: nn.Module, device: torch.device) -> int:
    """Synchronise every batch norm below `module` over all ranks, in place; returns how many were
    changed.

    Weights, statistics and names stay. Norms that are synchronised already, as in a second stage,
    are left alone. Call it before anything keeps references to the modules.
    """
    count = 0
    for owner in list(module.modules()):
        for name, norm in list(owner.named_children()):
            if isinstance(norm, _BatchNorm) and not isinstance(norm, SYNCHRONIZED):
                if device.type == "cuda":
                    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
                else:
                    synchronized = SynchronizedNorm(norm.num_features)
                    vars(synchronized).update(vars(norm))
                setattr(owner, name, synchronized)
                count += 1
    return count


class SynchronizedNorm(_BatchNorm):
    """Batch norm of (batch, channels, …) with mean and variance, in training, over the batches of
    all ranks.

    One collective in the forward pass and one in the backward pass.

    Source: Ioffe and Szegedy 2015, "Batch normalization", algorithm 1, and its backward pass in
    section 3; Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances", equation 2.1, for the variance.
    """

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, …), normalised."""
        if not (self.training or self.running_mean is None):
            return functional.batch_norm(
                features,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        normalized, mean, variance, count = _SynchronizedNorm.apply(
            features, self.weight, self.bias, self.eps
        )
        if self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share = self.momentum
                if share is None:
                    # The plain mean over the batches, as in torch.
                    share = 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * float(count / (count - 1.0)), share)
        return normalized  # type: ignore[no-any-return]


SYNCHRONIZED = (nn.SyncBatchNorm, SynchronizedNorm)
"""Batch norms over the batch of all ranks."""


class _SynchronizedNorm(torch.autograd.Function):
    # Ranks may have unequal batches, so each sends its count along. Variances are joined from means
    # and variances, not from sums of squares, which would lose the digits of a small variance
    # around a large mean; in float64, as there are only a few numbers for each channel. The
    # backward pass needs two sums over all ranks, of the gradient and of its product with the
    # normalised values, and sends them together.
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [axis for axis in range(features.ndim) if axis != 1]
        wide = features.float()
        variance, mean = torch.var_mean(wide, axes, correction=0)
        channels = features.shape[1]
        count = mean.new_tensor([features.numel() / channels])
        of_rank = torch.cat([mean, variance, count]).double()
        gathered = [torch.empty_like(of_rank) for _ in range(torch_distributed.get_world_size())]
        torch_distributed.all_gather(gathered, of_rank)
        table = torch.stack(gathered)  # (ranks, 2 x channels + 1)
        counts = table[:, -1:]
        means = table[:, :channels]
        variances = table[:, channels:-1]
        total = counts.sum()
        if total < 2:
            raise ValueError(
                "batch norm needs more than one value per channel in training; raise "
                "data.batch_size"
            )
        common = (means * counts).sum(dim=0) / total
        # Moves each rank's variance from its own mean to the common one.
        spread = ((variances + (means - common).square()) * counts).sum(dim=0) / total
        mean, variance = common.to(mean.dtype), spread.to(mean.dtype)
        # torch's own kernel, given these statistics.
        normalized = functional.batch_norm(
            wide, mean, variance, weight, bias, False, 0.0, epsilon
        ).to(features.dtype)
        ctx.save_for_backward(features, weight, mean, (variance + epsilon).rsqrt(), total)
        ctx.mark_non_differentiable(mean, variance, total)
        return normalized, mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        features, weight, mean, deviation, total = ctx.saved_tensors
        axes = [axis for axis in range(features.ndim) if axis != 1]
        shape = [1, -1] + [1] * (features.ndim - 2)
        gradient = gradients[0].float()
        unit = (features.float() - mean.view(shape)) * deviation.view(shape)
        of_bias = gradient.sum(axes)
        of_weight = (gradient * unit).sum(axes)
        sums = torch.cat([of_bias, of_weight])
        torch_distributed.all_reduce(sums)
        by_mean, by_spread = (sums / total.to(sums.dtype)).chunk(2)
        scale = deviation if weight is None else deviation * weight.float()
        inner = gradient - by_mean.view(shape) - unit * by_spread.view(shape)
        back = (inner * scale.view(shape)).to(features.dtype)
        if weight is None:
            return back, None, None, None
        # Of this rank's batch: parameter gradients are summed over the ranks later.
        return back, of_weight.to(weight.dtype), of_bias, None
