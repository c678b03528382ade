"""One optimizer step: forward and backward of its micro-batches, clipping, the guard against non-finite numbers.

The trainer adds micro-batches and then finishes the step. Nothing here asks the device for a number (except where the
optimizer cannot skip an update by itself), so on a GPU the host runs ahead of it.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from speakernet.training.interfaces import BatchLike
from speakernet.training.optimizers import set_learning_rate
from speakernet.training.options import StepControl
from speakernet.training.precision import Precision
from speakernet.training.profiler import NoProfiler, StepProfiler


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """What one step gave, still on the device (0-d tensors), and which utterances it saw."""

    loss: torch.Tensor
    accuracy: torch.Tensor
    grad_norm: torch.Tensor
    is_bad: torch.Tensor
    """Whether loss or gradient was not finite, so that the step was undone."""
    loss_is_bad: torch.Tensor
    """Whether the loss itself was not finite (with fp16 an overflow of the gradient alone is routine)."""
    num_utterances: int
    indices: torch.Tensor
    """(utterances,) int64."""


class BufferGuard:
    """Remembers the buffers that a forward pass changes (batch-norm statistics) and can put them back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [
            buffer
            for module in modules
            for owner in module.modules()
            if getattr(owner, "track_running_stats", True)
            for name, buffer in owner.named_buffers(recurse=False)
            if name in ("running_mean", "running_var", "num_batches_tracked")
        ]
        self._copies = [buffer.clone() for buffer in self._buffers]

    def remember(self) -> None:
        """Take the values to which `restore` goes back."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        """Put the remembered values back."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)

    def restore_where(self, is_bad: torch.Tensor) -> None:
        """Put them back where `is_bad` (0-d bool) is true, without asking the device which."""
        if not self._buffers:
            return
        for dtype in {buffer.dtype for buffer in self._buffers}:
            now, kept = ([one for one in some if one.dtype == dtype] for some in (self._buffers, self._copies))
            # End to end, chosen at once, copied back at once: a few launches for hundreds of small tensors. Chosen,
            # not mixed by a factor: what was undone may be NaN.
            sizes = [one.numel() for one in now]
            before, after = (torch.cat([one.reshape(-1) for one in some]) for some in (kept, now))
            chosen = torch.where(is_bad, before, after).split(sizes)
            parts = [part.view_as(one) for part, one in zip(chosen, now, strict=True)]
            torch._foreach_copy_(now, parts)


class TrainingStep:
    """Runs optimizer steps over a network, a loss and an optimizer.

    Args:
        net: waveforms (batch, samples) -> embeddings (batch, dim).
        loss: (embeddings, labels) -> (loss, accuracy); embeddings (speakers, utterances, dim) when `is_metric`.
        optimizer: over the parameters of both.
        precision: autocast and loss scale.
        options: to which norm gradients are clipped.
        profiler: is told the phases of the step.
        utterances_per_speaker: rows of a batch that belong to one speaker, in row order.
        gradient_cache: hold the micro-batches back and compute the loss over all their embeddings at once, in two
            passes (metric losses keep all their negatives under accumulation). Source: Gao et al. 2021, "Scaling deep
            contrastive learning batch size under memory limited setup", section 3.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        options: StepControl,
        *,
        profiler: StepProfiler | NoProfiler,
        utterances_per_speaker: int,
        gradient_cache: bool,
    ) -> None:
        self.net = net
        self.loss = loss
        self.optimizer = optimizer
        self.precision = precision
        self.max_grad_norm = options.max_grad_norm
        self.utterances_per_speaker = utterances_per_speaker
        self.gradient_cache = gradient_cache
        self.profiler = profiler
        self.guard = BufferGuard([net, loss])
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # A fused optimizer on a GPU reads `found_inf` there; the others are asked on the host.
        self._skips_on_device = precision.device.type == "cuda" and bool(optimizer.defaults.get("fused"))
        self._weight_unit = 1
        self._reset()

    def add(self, batch: BatchLike) -> None:
        """Forward and backward of one micro-batch (or keep it, with the gradient cache)."""
        if not self._indices:
            self.guard.remember()
        self._indices.append(batch.indices)
        num_utterances = len(batch.labels)
        self._num_utterances += num_utterances
        if self.gradient_cache:
            self._held.append(batch)
            return
        if not self._weight:
            self._weight_unit = num_utterances
        # Micro-batches count by their utterances, in units of the first, so that fp16 gradients keep their size.
        weight = num_utterances / self._weight_unit
        with self.profiler.phase("forward"), self.precision.autocast():
            embeddings = self.net(batch.waveforms)
            value, accuracy = self._loss_of(embeddings, batch.labels)
        self._record(value, accuracy, weight)
        with self.profiler.phase("backward"):
            self.precision.scaled(value * weight if weight != 1.0 else value).backward()

    def finish(self, learning_rate: float) -> StepOutcome:
        """Clip, check, update the weights (or undo the step), and clear the gradients."""
        if self.gradient_cache:
            self._two_passes()
        set_learning_rate(self.optimizer, learning_rate)
        loss, accuracy = self._loss_sum / self._weight, self._accuracy_sum / self._weight
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # Divided once at the end: a smaller last micro-batch needs no case of its own.
        divisor = self.precision.scale * self._weight
        norm = torch.nn.utils.get_total_norm(gradients) / divisor
        loss_is_bad = ~torch.isfinite(loss)
        is_bad = loss_is_bad | ~torch.isfinite(norm)
        self._rescale(gradients, norm, divisor)
        self._update(is_bad)
        self.precision.update(is_bad)
        self.optimizer.zero_grad(set_to_none=True)
        outcome = StepOutcome(
            loss, accuracy, norm, is_bad, loss_is_bad, self._num_utterances, torch.cat(self._indices).detach()
        )
        self._reset()
        return outcome

    def forget(self) -> None:
        """Drop a step that could not be finished: its gradients, and what it did to the batch-norm statistics."""
        self.optimizer.zero_grad(set_to_none=True)
        self.guard.restore()
        self._reset()

    def _reset(self) -> None:
        self._indices: list[torch.Tensor] = []
        self._held: list[BatchLike] = []
        self._weight: float = 0.0
        self._num_utterances: int = 0
        zero = torch.zeros((), device=self.precision.device)
        self._loss_sum, self._accuracy_sum = zero, zero.clone()

    def _record(self, loss: torch.Tensor, accuracy: torch.Tensor, weight: float) -> None:
        self._weight += weight
        self._loss_sum += loss.detach().float() * weight
        self._accuracy_sum += accuracy.detach().float() * weight

    def _loss_of(self, embeddings: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (batch, dim) and labels (batch,) -> loss and accuracy (0-d)."""
        if not self.loss.is_metric:
            return self.loss(embeddings, labels)
        per_speaker = self.utterances_per_speaker
        # (speakers * utterances, dim) -> (speakers, utterances, dim)
        grouped = embeddings.reshape(-1, per_speaker, embeddings.shape[-1])
        return self.loss(grouped, labels[::per_speaker])

    def _two_passes(self) -> None:
        """Embed everything without a graph, take the loss's gradient by embedding, then send it back batch by batch."""
        states, embeddings = [], []
        with torch.no_grad(), self.precision.autocast():
            for batch in self._held:
                states.append(_random_state(self.net, self.precision.device))
                embeddings.append(self.net(batch.waveforms))
        # The first pass has moved the batch-norm statistics; only the second may.
        self.guard.restore()
        leaf = torch.cat(embeddings).detach().requires_grad_()
        labels = torch.cat([batch.labels for batch in self._held])
        with self.precision.autocast():
            value, accuracy = self._loss_of(leaf, labels)
        self._record(value, accuracy, 1.0)
        self.precision.scaled(value).backward()
        if not any(parameter.requires_grad for parameter in self.net.parameters()):
            # A frozen network: the head has its gradient, and there is nothing to send back.
            return
        assert leaf.grad is not None
        gradients = leaf.grad.split([len(one) for one in embeddings])
        after_loss = _random_state(self.net, self.precision.device)
        for batch, state, gradient in zip(self._held, states, gradients, strict=True):
            # The same dropout and masks as in the first pass, or the gradient would belong to other embeddings.
            _set_random_state(self.net, self.precision.device, state)
            with self.precision.autocast():
                again = self.net(batch.waveforms)
            again.backward(gradient)
        _set_random_state(self.net, self.precision.device, after_loss)

    def _rescale(self, gradients: list[torch.Tensor], norm: torch.Tensor, divisor: torch.Tensor) -> None:
        """Loss scale, micro-batch weights and clipping in one multiplication."""
        if not gradients:
            return
        coefficient = 1.0 / divisor
        if self.max_grad_norm > 0:
            coefficient = coefficient * torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        # One kernel for all parameters; clip_grad_norm_ would pass over them once more.
        torch._foreach_mul_(gradients, coefficient)

    def _update(self, is_bad: torch.Tensor) -> None:
        if self._skips_on_device:
            # torch's fused kernels leave weights and moments alone where found_inf is 1 (made for GradScaler).
            optimizer: Any = self.optimizer
            optimizer.found_inf = is_bad.float()
            optimizer.step()
            self.guard.restore_where(is_bad)
        elif bool(is_bad):
            self.guard.restore()
        else:
            self.optimizer.step()


def _stateful(net: nn.Module) -> list[nn.Module]:
    """Modules with state of their own beside parameters and buffers: the counters of keyed draws (masks, dither)."""
    return [module for module in net.modules() if type(module).get_extra_state is not nn.Module.get_extra_state]


def _random_state(net: nn.Module, device: torch.device) -> list[Any]:
    """Everything that the masks and dropout of the next forward pass depend on."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), on_device, [module.get_extra_state() for module in _stateful(net)]]


def _set_random_state(net: nn.Module, device: torch.device, state: list[Any]) -> None:
    on_host, on_device, extra = state
    torch.set_rng_state(on_host)
    for one in on_device:
        torch.cuda.set_rng_state(one, device)
    for module, value in zip(_stateful(net), extra, strict=True):
        module.set_extra_state(value)
