"""One optimizer step: forward and backward of its micro-batches, clipping, the guard against non-finite numbers.

The trainer adds micro-batches and then finishes the step. Nothing here asks the device for a number (except where the
optimizer cannot skip an update by itself), so on a GPU the host runs ahead of it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from speakernet.parallel.sharding import total_norm
from speakernet.training.interfaces import BatchLike, DrawsByRow, HasVocalTracts
from speakernet.training.optimizers import set_learning_rate
from speakernet.training.options import StepControl
from speakernet.training.precision import Precision
from speakernet.training.profiler import NoProfiler, StepProfiler
from speakernet.training.together import OneProcess


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
    """Of all processes."""
    indices: torch.Tensor
    """(utterances,) int64, of this process."""


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
        team: how the gradients come together; None: of this process alone.
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
        team: OneProcess | None = None,
    ) -> None:
        self.net = net
        self.loss = loss
        self.optimizer = optimizer
        self.precision = precision
        self.max_grad_norm = options.max_grad_norm
        self.utterances_per_speaker = utterances_per_speaker
        self.gradient_cache = gradient_cache
        self.profiler = profiler
        self.team = team or OneProcess(net)
        self._keyed = [module for module in net.modules() if isinstance(module, DrawsByRow)]
        self._warping = [module for module in net.modules() if isinstance(module, HasVocalTracts)]
        self._sees_all = bool(getattr(loss, "sees_all_ranks", loss.is_metric))
        self.guard = BufferGuard([net, loss])
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # A fused optimizer on a GPU reads `found_inf` there; the others are asked on the host.
        self._skips_on_device = precision.device.type == "cuda" and bool(optimizer.defaults.get("fused"))
        self._random_before = _random_state(precision.device)
        self._weight_unit: float = 1
        self._has_begun: bool = False
        self._reset()

    def add(self, batch: BatchLike, *, is_last: bool = True) -> None:
        """Forward and backward of one micro-batch (or keep it, with the gradient cache).

        Args:
            batch: this process's share of it.
            is_last: of the step; several processes exchange their gradients with it.
        """
        if not self._indices:
            self.guard.remember()
            if not _is_recording(self.precision.device):
                self._random_before = _random_state(self.precision.device)
        self._indices.append(batch.indices)
        self._num_utterances += sum(batch.shares)
        if self.gradient_cache:
            self._held.append(batch)
            return
        # A loss that compares utterances, or whose head is shared, is computed from all of them in every process.
        counted = sum(batch.shares) if self._sees_all else len(batch.labels)
        if not self._has_begun:
            self._has_begun = True
            self._weight_unit = counted if self._sees_all else sum(batch.shares) / len(batch.shares)
        # Micro-batches count by their utterances, in units of the first, so that fp16 gradients keep their size.
        weight = counted / self._weight_unit
        with self.team.part_of_step(is_last):
            with self.profiler.phase("forward"), self.precision.autocast():
                self.key_draws(batch)
                embeddings = self.team.embed(batch.waveforms)
                value, accuracy = self._loss_of(embeddings, batch.labels, batch.shares)
            numbers = self._record(value, accuracy, weight)
            with self.profiler.phase("backward"):
                scaled = self.precision.scaled(value * weight if weight != 1.0 else value)
                self.team.send_back(scaled, numbers, is_last=is_last)

    def key_draws(self, batch: BatchLike) -> None:
        """Tell the parts of the network that draw (masks, dither) which utterances come, and in which voices."""
        for module in self._keyed:
            module.key_draws(batch.draw_key, batch.indices.numpy())
        for tracts in self._warping:
            tracts.take_warps(batch.warps)

    def finish(self, learning_rate: float) -> StepOutcome:
        """Clip, check, update the weights (or undo the step), and clear the gradients."""
        set_learning_rate(self.optimizer, learning_rate)
        return self._conclude()

    def set_margin(self, margin: float | torch.Tensor) -> None:
        """Give the loss the margin of the coming step."""
        self.loss.margin = margin  # type: ignore[assignment]

    def close(self) -> None:
        """Let go of the other processes; no step comes after it."""
        self.team.close()

    def _conclude(self) -> StepOutcome:
        """What `finish` does on the device, all of it: nothing here depends on a number of this very step."""
        if self.gradient_cache:
            self._two_passes()
        assert self._numbers is not None, "a micro-batch was added"
        weight, loss_sum, accuracy_sum = self.team.totals(self._numbers)
        loss, accuracy = loss_sum / weight, accuracy_sum / weight
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # Divided once at the end: a smaller last micro-batch needs no case of its own.
        divisor = self.precision.scale * weight
        norm = total_norm(self._parameters) / divisor
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
        """Drop a step that was begun, or undone, as if it had not been: gradients, statistics, what it drew."""
        self.optimizer.zero_grad(set_to_none=True)
        self.team.forget()
        self.guard.restore()
        _set_random_state(self.precision.device, self._random_before)
        self._reset()

    def _reset(self) -> None:
        self._indices: list[torch.Tensor] = []
        self._held: list[BatchLike] = []
        self._has_begun = False
        self._num_utterances: int = 0
        # Weight, and loss and accuracy times that, summed over the micro-batches.
        self._numbers: torch.Tensor | None = None

    def _record(self, loss: torch.Tensor, accuracy: torch.Tensor, weight: float) -> torch.Tensor:
        found = torch.stack([loss.detach().float(), accuracy.detach().float()])
        numbers = torch.cat([found.new_full((1,), weight), found * weight])
        self._numbers = numbers if self._numbers is None else self._numbers + numbers
        return numbers

    def _loss_of(
        self, embeddings: torch.Tensor, labels: torch.Tensor, shares: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (batch, dim) and labels (batch,) -> loss and accuracy (0-d)."""
        if self._sees_all:
            embeddings, labels = (self.team.rows_of_all(rows, shares) for rows in (embeddings, labels))
        return self._compare(embeddings, labels) if self.loss.is_metric else self.loss(embeddings, labels)

    def _compare(self, embeddings: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the embeddings and labels of all processes, for a metric loss."""
        per_speaker = self.utterances_per_speaker
        # (speakers * utterances, dim) -> (speakers, utterances, dim)
        grouped = embeddings.reshape(-1, per_speaker, embeddings.shape[-1])
        return self.loss(grouped, labels[::per_speaker])

    def _two_passes(self) -> None:
        """Embed everything without a graph, take the loss's gradient by embedding, then send it back batch by batch."""
        states, embeddings = [], []
        with torch.no_grad(), self.precision.autocast():
            for batch in self._held:
                states.append(_random_state(self.precision.device))
                self.key_draws(batch)
                embeddings.append(self.net(batch.waveforms))
        # The first pass has moved the batch-norm statistics; only the second may.
        self.guard.restore()
        leaves = [one.detach().requires_grad_() for one in embeddings]
        # Micro-batch by micro-batch: the order of one process.
        shares = [batch.shares for batch in self._held]
        with self.precision.autocast():
            rows = [self.team.rows_of_all(*one) for one in zip(leaves, shares, strict=True)]
            labels = [self.team.rows_of_all(batch.labels, batch.shares) for batch in self._held]
            value, accuracy = self._compare(torch.cat(rows), torch.cat(labels))
        numbers = self._record(value, accuracy, 1.0)
        own = [one for one in self.loss.parameters() if one.requires_grad]
        found = torch.autograd.grad(self.precision.scaled(value), [*leaves, *own], allow_unused=True)
        after_loss = _random_state(self.precision.device)
        is_learning = any(parameter.requires_grad for parameter in self.net.parameters())
        for number, (batch, state, gradient) in enumerate(zip(self._held, states, found, strict=False)):
            is_last = number == len(self._held) - 1
            if not (is_learning or is_last):
                # A frozen network: the head has its gradient, and there is nothing to send back.
                continue
            # The same dropout and masks as in the first pass, or the gradient would belong to other embeddings.
            _set_random_state(self.precision.device, state)
            with self.team.part_of_step(is_last):
                self.key_draws(batch)
                with self.precision.autocast():
                    again = self.team.embed(batch.waveforms)
                # Sums of products, whose gradients are the ones that were found.
                parts = [(again * gradient).sum()] if is_learning else []
                if is_last:
                    heads = zip(own, found[len(leaves) :], strict=True)
                    parts += [(one * of_one).sum() for one, of_one in heads if of_one is not None]
                self.team.send_back(
                    torch.stack(parts).sum(), numbers if is_last else torch.zeros_like(numbers), is_last=is_last
                )
        _set_random_state(self.precision.device, after_loss)

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


def _is_recording(device: torch.device) -> bool:
    """Whether a GPU only takes down what it is asked to do; it must not be asked where its generator stands."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _random_state(device: torch.device) -> list[Any]:
    """Everything that dropout in the next forward pass depends on."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), on_device]


def _set_random_state(device: torch.device, state: list[Any]) -> None:
    on_host, on_device = state
    torch.set_rng_state(on_host)
    for one in on_device:
        torch.cuda.set_rng_state(one, device)
