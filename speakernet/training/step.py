"""One optimizer step: its micro-batches forward and backward, clipping, the gate against non-finite numbers.

What accumulation, compilation and several ranks need is here, so the trainer has one code path. Nothing here asks the
device for a number (unless the optimizer cannot skip an update by itself), so on a GPU the host runs ahead of it.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakernet.machine.device import synchronize
from speakernet.parallel import distributed
from speakernet.parallel.sharding import ROW_SHARE, own_part, parameters_of, total_norm
from speakernet.training.checkpoints import capture_random_state, restore_random_state
from speakernet.training.compiling import Compiler
from speakernet.training.optimizers import LEARNING_RATE_FACTOR, BufferGuard
from speakernet.training.options import TrainingOptions
from speakernet.training.precision import Precision

if TYPE_CHECKING:
    from speakernet.training.profiler import StepProfiler

    class BatchLike(Protocol):
        """What a step needs of a batch; `speakernet.data` has the real one."""

        waveforms: Tensor
        """(batch, samples) float32."""
        labels: Tensor
        """(batch,) int64."""
        indices: Tensor
        """(batch,) int64 on the CPU, rows of the training list."""
        shares: tuple[int, ...]
        """Utterances that each rank has of the whole batch."""
        draw_key: int
        """Of the random draws in this epoch, together with the rows."""

        @property
        def warps(self) -> np.ndarray:
            """(batch,) int64: the vocal tract of each utterance."""


NUM_NUMBERS = 3
"""Of a step: weight, loss and accuracy."""
NUM_REQUESTS = 2
"""Of a rank, after a step: to stop, and to save."""


@dataclasses.dataclass
class StepOutcome:
    """What one step gave, still on the device (0-d tensors), which utterances it saw, and how long it took."""

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    is_bad: Tensor
    """Whether loss or gradient was not finite, so that the step was undone."""
    loss_is_bad: Tensor
    """Whether the loss itself was not finite (with fp16 an overflow of the gradient alone is routine)."""
    num_utterances: int
    """Of all ranks."""
    indices: Tensor
    """(utterances,) int64, of this rank."""
    requests: list[bool] = dataclasses.field(default_factory=list)
    """What some rank asked for; on several GPUs that of the step before."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of `data`, `forward_backward` and `optimizer`; `processor` is what this thread ran beside the data."""


@dataclasses.dataclass(eq=False)
class OneProcess:
    """A process that trains alone: nothing is exchanged."""

    net: nn.Module
    requests: Callable[[], Sequence[bool]] = tuple
    """What this rank asks for after a step: to stop, and to save; the trainer's."""
    agreed: list[bool] = dataclasses.field(default_factory=list)
    """What some rank asked for."""

    def begin_epoch(self) -> None:
        """What is trained may have changed."""

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward pass of one micro-batch."""
        return contextlib.nullcontext()

    def embed(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) -> (batch, dim)."""
        return self.net(waveforms)  # type: ignore[no-any-return]

    def rows_of_all(self, rows: Tensor, shares: Sequence[int]) -> Tensor:
        """The rows of all ranks, in the order of the batch."""
        return rows

    def backward(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass of a micro-batch; `numbers` (3,) are its weight, and loss and accuracy times that."""
        value.backward()

    def totals(self, numbers: Tensor) -> Tensor:
        """From the sums of this rank's micro-batches, (3,), to the means over the ranks."""
        self.agreed = list(self.requests())
        return numbers

    def share_statistics(self) -> None:
        """Give every rank the same batch-norm statistics."""

    def close(self) -> None:
        """Free what exchanges gradients."""


class TrainingStep:
    """Runs optimizer steps over a network, a loss and an optimizer."""

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        options: TrainingOptions,
        *,
        utterances_per_speaker: int,
        gradient_cache: bool,
        ranks: OneProcess | None = None,
        compiler: Compiler | None = None,
        profiler: "StepProfiler | None" = None,
    ) -> None:
        self.net, self.loss, self.optimizer, self.precision = net, loss, optimizer, precision
        self.max_grad_norm = options.max_grad_norm
        self.utterances_per_speaker, self.gradient_cache = utterances_per_speaker, gradient_cache
        self.ranks = ranks or OneProcess(net)
        self.compiler, self.profiler = compiler or Compiler(net, None), profiler
        self.guard = BufferGuard([net, loss])
        # Components of the front end whose draws are keyed by utterance, or that change vocal tracts.
        modules: list[Any] = list(net.modules())
        self._keyed = [one for one in modules if hasattr(one, "key_draws")]
        self._warping = [one for one in modules if hasattr(one, "take_warps")]
        self._teacher: Any = getattr(loss, "teacher", None)
        self._sees_all = bool(getattr(loss, "sees_all_ranks", loss.is_metric))
        self._parameters = parameters_of(optimizer)
        self._is_sharded = any(hasattr(one, ROW_SHARE) for one in self._parameters)
        # A fused optimizer on a GPU reads `found_inf` there; the others are asked on the host.
        self._skips_on_device = precision.device.type == "cuda" and bool(optimizer.defaults.get("fused"))
        self._reset()

    def run(
        self, batches: "Iterator[BatchLike]", count: int, name: str, learning_rate: float, steps_left: float = 0
    ) -> StepOutcome:
        """A step over the next `count` micro-batches; `steps_left` of the run decide whether compiling pays."""
        data = forward_backward = 0.0
        processor_begin, begin = time.thread_time(), time.perf_counter()
        mark = begin
        for number in range(count):
            distributed.work.at(f"the data of {name}")
            with record_function("speakernet.data"):
                batch = next(batches)
            before, mark = mark, time.perf_counter()
            data += mark - before
            distributed.work.at(name)
            self.add(batch, is_last=number + 1 == count)
            before, mark = mark, time.perf_counter()
            forward_backward += mark - before
        with record_function("speakernet.optimizer"):
            outcome = self.finish(learning_rate)
        outcome.requests = self.ranks.agreed
        outcome.seconds = {
            **{"data": data, "forward_backward": forward_backward, "optimizer": time.perf_counter() - mark},
            "processor": time.thread_time() - processor_begin,
        }
        if self.profiler is not None:
            self.profiler.step()
        if self.compiler.is_observing:
            synchronize(self.precision.device)
            self.compiler.consider(time.perf_counter() - begin, steps_left)
        return outcome

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, between two steps, everything runs eagerly and nothing is profiled."""
        eagerly = torch.compiler.set_stance("force_eager") if self.compiler.is_compiled else contextlib.nullcontext()
        with eagerly, self.profiler.paused() if self.profiler else contextlib.nullcontext():
            yield

    _weight_unit: float
    _num_utterances: int

    def add(self, batch: "BatchLike", *, is_last: bool = True) -> None:
        """Forward and backward of one micro-batch (or keep it, with the gradient cache)."""
        if not self.indices:
            self.guard.remember()
        self.indices.append(batch.indices)
        self._num_utterances += sum(batch.shares)
        if self.gradient_cache:
            self._held.append(batch)
            return
        # A loss that compares utterances, or whose head is shared, is computed from all of them in every rank.
        counted = sum(batch.shares) if self._sees_all else len(batch.labels)
        if not self._weight_unit:
            self._weight_unit = counted if self._sees_all else sum(batch.shares) / len(batch.shares)
        # Micro-batches count by their utterances, in units of the first, so that fp16 gradients keep their size.
        weight = counted / self._weight_unit
        with self.ranks.micro_batch(is_last):
            with record_function("speakernet.forward"), self.precision.autocast():
                self.key_draws(batch)
                embeddings, labels = self.ranks.embed(batch.waveforms), batch.labels
                wanted = [] if self._teacher is None else [self._teacher.wanted(batch)]
                if self._sees_all:
                    rows = [embeddings, labels, *wanted]
                    embeddings, labels, *wanted = (self.ranks.rows_of_all(one, batch.shares) for one in rows)
                compare = self._compare if self.loss.is_metric else self.loss
                value, accuracy = compare(embeddings, labels)
                if wanted:
                    value = value + self._teacher(embeddings, *wanted, labels)
            numbers = self._record(value, accuracy, weight)
            with record_function("speakernet.backward"):
                self.ranks.backward(value * (weight * self.precision.scale), numbers, is_last=is_last)

    def finish(self, learning_rate: float) -> StepOutcome:
        """Clip, check, update the weights (or undo the step), and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0)
        if self.gradient_cache:
            self._two_passes()
        assert self._numbers is not None, "a micro-batch was added"
        weight, loss_sum, accuracy_sum = self.ranks.totals(self._numbers)
        loss, accuracy = loss_sum / weight, accuracy_sum / weight
        # Divided once at the end: a smaller last micro-batch needs no case of its own.
        divisor = self.precision.scale * weight
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = total_norm(self._parameters) if self._is_sharded else nn.utils.get_total_norm(gradients)
        if self._is_sharded:
            gradients = [own_part(one) for one in gradients]
        norm = norm / divisor
        loss_is_bad = ~torch.isfinite(loss)
        is_bad = loss_is_bad | ~torch.isfinite(norm)
        if gradients:
            coefficient = 1.0 / divisor
            if self.max_grad_norm > 0:
                coefficient = coefficient * torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            # Loss scale, weights and clipping in one kernel; clip_grad_norm_ would pass over them once more.
            torch._foreach_mul_(gradients, coefficient)
        if self._skips_on_device:
            # torch's fused kernels leave weights and moments alone if found_inf is 1 (made for GradScaler).
            self.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            self.guard.restore_where(is_bad)
        elif bool(is_bad):
            self.guard.restore()
        else:
            self.optimizer.step()
        if self.precision.scales:
            self.precision.update(is_bad)
        self.optimizer.zero_grad(set_to_none=True)
        indices, num_utterances = torch.cat(self.indices).detach(), self._num_utterances
        self._reset()
        return StepOutcome(loss, accuracy, norm, is_bad, loss_is_bad, num_utterances, indices)

    def key_draws(self, batch: "BatchLike") -> None:
        """Name the coming utterances, and their vocal tracts, to the components that draw (masks, dither)."""
        for module in self._keyed:
            module.key_draws(batch.draw_key, batch.indices.numpy())
        for tracts in self._warping:
            tracts.take_warps(batch.warps)

    def close(self) -> None:
        """No step comes after it."""
        self.ranks.close()
        if self.compiler.is_compiled:
            self.compiler.close()
        if self.profiler is not None:
            self.profiler.close()

    def _reset(self) -> None:
        # Of the step under way: rows of the training list; batches, with the gradient cache; and weight, and loss and
        # accuracy times that, summed over the micro-batches.
        self.indices: list[Tensor] = []
        self._held: list[BatchLike] = []
        self._weight_unit = 0.0
        self._num_utterances = 0
        self._numbers: Tensor | None = None

    def _record(self, loss: Tensor, accuracy: Tensor, weight: float) -> Tensor:
        found = torch.stack([loss.detach().float(), accuracy.detach().float()])
        numbers = torch.cat([found.new_full((1,), weight), found * weight])
        self._numbers = numbers if self._numbers is None else self._numbers + numbers
        return numbers

    def _compare(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A metric loss: (batch, dim), (batch,) -> loss and accuracy (0-d)."""
        per_speaker = self.utterances_per_speaker
        # (speakers * utterances, dim) -> (speakers, utterances, dim)
        return self.loss(embeddings.reshape(-1, per_speaker, embeddings.shape[-1]), labels[::per_speaker])

    def _two_passes(self) -> None:
        """Embed everything without a graph, take the loss's gradient by embedding, then propagate it by batch."""
        states, embeddings = [], []
        with torch.no_grad(), self.precision.autocast():
            for batch in self._held:
                states.append(capture_random_state())
                self.key_draws(batch)
                embeddings.append(self.net(batch.waveforms))
        # The first pass has moved the batch-norm statistics; only the second may.
        self.guard.restore()
        leaves = [one.detach().requires_grad_() for one in embeddings]
        # Micro-batch by micro-batch: the order of one process.
        shares = [batch.shares for batch in self._held]
        with self.precision.autocast():
            rows = [self.ranks.rows_of_all(*one) for one in zip(leaves, shares, strict=True)]
            labels = [self.ranks.rows_of_all(batch.labels, batch.shares) for batch in self._held]
            value, accuracy = self._compare(torch.cat(rows), torch.cat(labels))
        numbers = self._record(value, accuracy, 1.0)
        own = [one for one in self.loss.parameters() if one.requires_grad]
        found = torch.autograd.grad(value * self.precision.scale, [*leaves, *own], allow_unused=True)
        after_loss = capture_random_state()
        is_learning = any(parameter.requires_grad for parameter in self.net.parameters())
        for number, (batch, state, gradient) in enumerate(zip(self._held, states, found, strict=False)):
            is_last = number == len(self._held) - 1
            if not (is_learning or is_last):
                # A frozen network: the head has its gradient already.
                continue
            # The same dropout and masks as in the first pass, or the gradient would belong to other embeddings.
            restore_random_state(state)
            with self.ranks.micro_batch(is_last):
                self.key_draws(batch)
                with self.precision.autocast():
                    again = self.ranks.embed(batch.waveforms)
                # Sums of products, whose gradients are the ones that were found.
                sums = [(again * gradient).sum()] if is_learning else []
                if is_last:
                    heads = zip(own, found[len(leaves) :], strict=True)
                    sums += [(one * of_one).sum() for one, of_one in heads if of_one is not None]
                sent = numbers if is_last else torch.zeros_like(numbers)
                self.ranks.backward(torch.stack(sums).sum(), sent, is_last=is_last)
        restore_random_state(after_loss)
