"""One optimizer step: forward and backward passes of its micro-batches, clipping, rejection of
non-finite numbers.

Accumulation, compilation and several ranks are handled here, so the trainer has a single code path.
Nothing here synchronises with the device (unless the optimizer cannot skip an update itself), so on
a GPU the host runs ahead.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.profiler import record_function

from speakernet import distributed
from speakernet.machine.device import synchronize
from speakernet.parallel.sharding import ROW_SHARE, own_part, parameters_of, total_norm
from speakernet.training.checkpoints import capture_random_state, restore_random_state
from speakernet.training.compiling import Compiler
from speakernet.training.optimizers import LEARNING_RATE_FACTOR, BufferGuard
from speakernet.training.options import TrainingOptions
from speakernet.training.precision import Precision

if TYPE_CHECKING:
    from speakernet.training.profiler import StepProfiler

    class PlainBatch(Protocol):
        """What a step needs from a batch whose draws were announced."""

        waveforms: Tensor
        """(batch, samples) float32."""
        labels: Tensor
        """(batch,) int64."""
        indices: Tensor
        """(batch,) int64 on the CPU, rows of the training list."""
        shares: tuple[int, ...]
        """Number of utterances of the whole batch on each rank."""

    class BatchLike(PlainBatch, Protocol):
        """What a step needs from a batch; the real class is in `speakernet.data`."""

        draw_key: int
        """Keys the random draws of this epoch, together with `draw_rows`."""

        @property
        def draw_rows(self) -> np.ndarray:
            """(batch,) int64: key the random draws of each utterance; repeats in an epoch have
            different ones.
            """


class DrawingModule(Protocol):
    """A component that draws for each utterance (masks, dither); `frontend.perturbation` has it."""

    num_numbers: int
    """Numbers for each utterance."""

    def draw(self, key: int, rows: np.ndarray) -> np.ndarray:
        """The numbers of a pass, float64 (batch, num_numbers)."""

    def announce(self, numbers: Tensor) -> None:
        """Take the numbers of the next pass, on the device."""


NUM_NUMBERS = 3
"""Numbers that a step reports: weight, loss and accuracy."""
NUM_REQUESTS = 2
"""Requests that a rank can make after a step: to stop, and to save."""


class Results(NamedTuple):
    """What a step computes, 0-d tensors on the device."""

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    is_bad: Tensor
    loss_is_bad: Tensor


@dataclasses.dataclass
class StepOutcome:
    """The results of one step, still on the device (0-d tensors), its utterances, and how long it
    took.
    """

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    is_bad: Tensor
    """Whether loss or gradient was not finite, so that the step was undone."""
    loss_is_bad: Tensor
    """Whether the loss itself was not finite (with fp16 an overflow of the gradient alone is
    routine)."""
    num_utterances: int
    """Utterances on all ranks."""
    indices: Tensor
    """(utterances,) int64: this rank's rows of the training list."""
    requests: list[bool] = dataclasses.field(default_factory=list)
    """What any rank requested; on several GPUs, in the previous step."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of `data`, `forward_backward` and `optimizer`; `processor` is this thread's CPU time
    without `data`."""


Recorder: TypeAlias = "Callable[[BatchLike, float], Results | None]"
"""Takes a step over one batch at a learning rate; None if it has to run as usual."""


@dataclasses.dataclass(eq=False)
class OneProcess:
    """A process that trains alone: nothing is exchanged."""

    net: nn.Module
    requests: Callable[[], Sequence[bool]] = tuple
    """This rank's requests after a step: to stop, and to save; set by the trainer."""
    agreed: list[bool] = dataclasses.field(default_factory=list)
    """What any rank requested."""

    def begin_epoch(self) -> None:
        """Prepare for an epoch: the set of trained parameters may have changed."""

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Context for the forward and backward pass of one micro-batch."""
        return contextlib.nullcontext()

    def embed(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) -> (batch, dim)."""
        return self.net(waveforms)  # type: ignore[no-any-return]

    def rows_of_all(self, rows: Tensor, shares: Sequence[int]) -> Tensor:
        """The rows of all ranks, in the order of the batch."""
        return rows

    def backward(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass of a micro-batch; `numbers` (3,) are its weight, weighted loss and weighted
        accuracy.
        """
        value.backward()

    def totals(self, numbers: Tensor) -> Tensor:
        """The means over the ranks, (3,), of the sums over each rank's micro-batches."""
        self.agree()
        return numbers

    def agree(self) -> None:
        """Take this rank's requests, if it is alone; several exchange them with the gradients."""
        self.agreed = list(self.requests())

    def share_statistics(self) -> None:
        """Give every rank the same batch-norm statistics."""

    def close(self) -> None:
        """Free the buffers for exchanging gradients."""


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
        self.net = net
        self.loss = loss
        self.optimizer = optimizer
        self.precision = precision
        self.max_grad_norm = options.max_grad_norm
        self.utterances_per_speaker = utterances_per_speaker
        self.gradient_cache = gradient_cache
        self.ranks = ranks or OneProcess(net)
        self.compiler = compiler or Compiler(net, None)
        self.profiler = profiler
        self.guard = BufferGuard([net, loss])
        # Front-end components whose draws are keyed by utterance.
        modules: list[Any] = list(net.modules())
        self._drawing: list[DrawingModule] = [
            module for module in modules if getattr(module, "num_numbers", 0)
        ]
        self._norms = [module for module in modules if isinstance(module, _BatchNorm)]
        self._sees_all = bool(getattr(loss, "sees_all_ranks", loss.is_metric))
        self._parameters = parameters_of(optimizer)
        self.is_sharded = any(hasattr(one, ROW_SHARE) for one in self._parameters)
        self.is_fused = bool(optimizer.defaults.get("fused"))
        # A fused optimizer on a GPU reads `found_inf` on the device; for others the host decides.
        self._skips_on_device = precision.device.type == "cuda" and self.is_fused
        self._recorder: Recorder | None = None
        self.forget()

    def record(self, recorder: Recorder) -> None:
        """Take steps by this recorder (`recording.StepRecorder`)."""
        self._recorder = recorder
        # torch's fused kernels skip the update of a bad step on any device.
        self._skips_on_device = self.is_fused

    @property
    def is_alone(self) -> bool:
        """Whether nothing is exchanged with other processes."""
        return type(self.ranks) is OneProcess

    @property
    def is_drawing(self) -> bool:
        """Whether the network draws numbers for each batch."""
        return bool(self._drawing)

    @property
    def draws_on_host(self) -> bool:
        """Whether a module takes random decisions in Python (a pretrained backbone)."""
        return any(getattr(module, "is_pretrained", False) for module in self.net.modules())

    def trained_form(self) -> tuple[bool, ...]:
        """What freezing changes: which parameters learn and which modules are in training mode."""
        learning = [parameter.requires_grad for parameter in self._parameters]
        return (*learning, *(module.training for module in self._norms))

    def run(
        self,
        batches: "Iterator[BatchLike]",
        count: int,
        name: str,
        learning_rate: float,
        steps_left: float = 0,
    ) -> StepOutcome:
        """A step over the next `count` micro-batches; `steps_left` in the run decides whether
        compiling pays.
        """
        # The story of a step. Each micro-batch is embedded, its loss weighted by its number of
        # utterances, and its gradients added to those before (`add`). Then everything happens once
        # (`finish`): gradients are divided by the sum of the weights and clipped in one kernel, and
        # the weights move, unless loss or gradients are not finite. Then the step is undone: the
        # weights stay, and batch-norm statistics, which the forward pass has moved already, are put
        # back. On a GPU none of this waits for the device, which decides by itself whether a step
        # was bad; the trainer reads the numbers of many steps at once. A recorded step does the
        # same by one launch. What is exchanged between ranks is hidden in `ranks`.
        data = forward_backward = loading = 0.0
        processor_begin = time.thread_time()
        begin = time.perf_counter()
        mark = begin
        for number in range(count):
            distributed.work.at(f"the data of {name}")
            loading -= time.thread_time()
            with record_function("speakernet.data"):
                batch = next(batches)
            loading += time.thread_time()
            before = mark
            mark = time.perf_counter()
            data += mark - before
            distributed.work.at(name)
            results = None
            if self._recorder is not None:
                results = self._recorder(batch, learning_rate)
            if results is None:
                self.add(batch, is_last=number + 1 == count)
            before = mark
            mark = time.perf_counter()
            forward_backward += mark - before
        if results is not None:
            # A replay runs no Python, so the requests of this step are taken here.
            self.ranks.agree()
            outcome = StepOutcome(*results, sum(batch.shares), batch.indices)
        else:
            with record_function("speakernet.optimizer"):
                outcome = self.finish(learning_rate)
        outcome.requests = self.ranks.agreed
        outcome.seconds = {
            **{
                "data": data,
                "forward_backward": forward_backward,
                "optimizer": time.perf_counter() - mark,
            },
            "processor": time.thread_time() - processor_begin - loading,
        }
        if self.profiler is not None:
            self.profiler.step()
        if self.compiler.is_observing:
            synchronize(self.precision.device)
            self.compiler.consider(time.perf_counter() - begin, steps_left)
        return outcome

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Between two steps: inside the block everything runs eagerly and nothing is profiled."""
        eagerly = (
            torch.compiler.set_stance("force_eager")
            if self.compiler.is_compiled
            else contextlib.nullcontext()
        )
        with eagerly, self.profiler.paused() if self.profiler else contextlib.nullcontext():
            yield

    _weight_unit: float
    _num_utterances: int

    def add(self, batch: "BatchLike", *, is_last: bool = True) -> None:
        """Forward and backward pass of one micro-batch; with the gradient cache, just hold it."""
        if self.gradient_cache:
            self._count(batch)
            self._held.append(batch)
        else:
            self.key_draws(batch)
            self.add_announced(batch, is_last=is_last)

    def add_announced(self, batch: "PlainBatch", *, is_last: bool = True) -> None:
        """`add` after the batch's draws were announced."""
        self._count(batch)
        # A loss that compares utterances, or whose head is sharded, is computed on every rank from
        # all of them.
        counted = sum(batch.shares) if self._sees_all else len(batch.labels)
        if not self._weight_unit:
            self._weight_unit = counted if self._sees_all else sum(batch.shares) / len(batch.shares)
        # Weighted by number of utterances relative to the first micro-batch, so that fp16 gradients
        # keep their scale.
        weight = counted / self._weight_unit
        with self.ranks.micro_batch(is_last):
            with record_function("speakernet.forward"), self.precision.autocast():
                embeddings = self.ranks.embed(batch.waveforms)
                labels = batch.labels
                if self._sees_all:
                    embeddings = self.ranks.rows_of_all(embeddings, batch.shares)
                    labels = self.ranks.rows_of_all(labels, batch.shares)
                compare = self._compare if self.loss.is_metric else self.loss
                value, accuracy = compare(embeddings, labels)
            numbers = self._record(value, accuracy, weight)
            with record_function("speakernet.backward"):
                self.ranks.backward(
                    value * (weight * self.precision.scale), numbers, is_last=is_last
                )

    def _count(self, batch: "PlainBatch") -> None:
        if not self.indices:
            self.guard.remember()
        self.indices.append(batch.indices)
        self._num_utterances += sum(batch.shares)

    def finish(self, learning_rate: float) -> StepOutcome:
        """Clip, check, update the weights (or undo the step), and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0)
        if self.gradient_cache:
            self._two_passes()
        indices = torch.cat(self.indices).detach()
        num_utterances = self._num_utterances
        return StepOutcome(*self.update(), num_utterances, indices)

    def update(self) -> Results:
        """`finish` with the rates in the parameter groups and all gradients computed."""
        assert self._numbers is not None, "a micro-batch was added"
        weight, loss_sum, accuracy_sum = self.ranks.totals(self._numbers)
        loss = loss_sum / weight
        accuracy = accuracy_sum / weight
        # Dividing once at the end also handles a smaller last micro-batch.
        divisor = self.precision.scale * weight
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = (
            total_norm(self._parameters) if self.is_sharded else nn.utils.get_total_norm(gradients)
        )
        if self.is_sharded:
            gradients = [own_part(one) for one in gradients]
        norm = norm / divisor
        loss_is_bad = ~torch.isfinite(loss)
        is_bad = loss_is_bad | ~torch.isfinite(norm)
        if gradients:
            coefficient = 1.0 / divisor
            if self.max_grad_norm > 0:
                coefficient = coefficient * torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            # Loss scale, weights and clipping in one kernel; clip_grad_norm_ would need another
            # pass.
            torch._foreach_mul_(gradients, coefficient)
        if self._skips_on_device:
            # torch's fused kernels skip the update if found_inf is 1 (meant for GradScaler).
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
        self.forget()
        return Results(loss, accuracy, norm, is_bad, loss_is_bad)

    def key_draws(self, batch: "BatchLike") -> None:
        """Give the components that draw (masks, dither) the numbers of a batch."""
        if self._drawing:
            device = self.precision.device
            numbers = self.draw(batch)
            if device.type == "cuda":
                # From page-locked memory the copy does not wait for the device.
                numbers = numbers.pin_memory()
            self.announce(numbers.to(device, non_blocking=True))

    def draw(self, batch: "BatchLike") -> Tensor:
        """The numbers of all components that draw, float64 (batch, numbers) on the host."""
        rows = batch.draw_rows
        numbers = [module.draw(batch.draw_key, rows) for module in self._drawing]
        return torch.from_numpy(np.concatenate(numbers, axis=1))

    def announce(self, numbers: Tensor) -> None:
        """Give each component its columns of what `draw` returned, on the device."""
        widths = [module.num_numbers for module in self._drawing]
        for module, part in zip(self._drawing, numbers.split(widths, dim=1), strict=True):
            module.announce(part)

    def close(self) -> None:
        """Release everything after the last step."""
        self.ranks.close()
        if self.compiler.is_compiled:
            self.compiler.close()
        if self.profiler is not None:
            self.profiler.close()

    def forget(self) -> None:
        """Begin a step without micro-batches."""
        # State of the current step: rows of the training list; held batches, with the gradient
        # cache; and the sums of weight, weighted loss and weighted accuracy over the micro-batches.
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
        """Apply a metric loss: (batch, dim), (batch,) -> loss and accuracy (0-d)."""
        per_speaker = self.utterances_per_speaker
        # (speakers * utterances, dim) -> (speakers, utterances, dim)
        return self.loss(
            embeddings.reshape(-1, per_speaker, embeddings.shape[-1]), labels[::per_speaker]
        )

    def _two_passes(self) -> None:
        """Embed everything without a graph, get the loss gradient of each embedding, then propagate
        them by batch.
        """
        states = []
        embeddings = []
        with torch.no_grad(), self.precision.autocast():
            for batch in self._held:
                states.append(capture_random_state())
                self.key_draws(batch)
                embeddings.append(self.net(batch.waveforms))
        # Only the second pass may update the batch-norm statistics.
        self.guard.restore()
        leaves = [one.detach().requires_grad_() for one in embeddings]
        # Micro-batch by micro-batch, which gives the order of a single process.
        shares = [batch.shares for batch in self._held]
        with self.precision.autocast():
            rows = [self.ranks.rows_of_all(*one) for one in zip(leaves, shares, strict=True)]
            labels = [self.ranks.rows_of_all(batch.labels, batch.shares) for batch in self._held]
            value, accuracy = self._compare(torch.cat(rows), torch.cat(labels))
        numbers = self._record(value, accuracy, 1.0)
        own = [one for one in self.loss.parameters() if one.requires_grad]
        found = torch.autograd.grad(
            value * self.precision.scale, [*leaves, *own], allow_unused=True
        )
        after_loss = capture_random_state()
        is_learning = any(parameter.requires_grad for parameter in self.net.parameters())
        for number, (batch, state, gradient) in enumerate(
            zip(self._held, states, found, strict=False)
        ):
            is_last = number == len(self._held) - 1
            if not (is_learning or is_last):
                # The network is frozen, and the head already has its gradient.
                continue
            # Draw the same dropout and masks as in the first pass, or the gradient would belong to
            # other embeddings.
            restore_random_state(state)
            with self.ranks.micro_batch(is_last):
                self.key_draws(batch)
                with self.precision.autocast():
                    again = self.ranks.embed(batch.waveforms)
                # The backward pass of these sums of products propagates the gradients found above.
                sums = [(again * gradient).sum()] if is_learning else []
                if is_last:
                    heads = zip(own, found[len(leaves) :], strict=True)
                    sums += [(weight * slope).sum() for weight, slope in heads if slope is not None]
                sent = numbers if is_last else torch.zeros_like(numbers)
                self.ranks.backward(torch.stack(sums).sum(), sent, is_last=is_last)
        restore_random_state(after_loss)
