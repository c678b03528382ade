"""One optimizer step: forward and backward passes of its micro-batches, clipping, rejection of
non-finite numbers.

Accumulation, compilation and several ranks are handled here, so the trainer has a single code path.
Nothing here synchronises with the device (unless the optimizer cannot skip an update itself), so on
a GPU the host runs ahead.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakernet import distributed
from speakernet.machine.device import synchronize
from speakernet.parallel.sharding import local_part, parameters_of, share_of, total_norm
from speakernet.random import DrawingPart
from speakernet.training.checkpoints import capture_random_state, restore_random_state
from speakernet.training.compiling import Compiler
from speakernet.training.optimizers import LEARNING_RATE_FACTOR, BufferGuard
from speakernet.training.options import TrainingOptions
from speakernet.training.precision import Precision
from speakernet.training.profiler import StepProfiler
from speakernet.training.protocols import Batch, Loss, PlainBatch
from speakernet.training.threads import ThreadWatch

NUM_NUMBERS = 3
"""Numbers that a step reports: weight, loss and accuracy."""
NUM_WISHES = 2
"""What a rank can wish after a step: to stop, and to save."""
Wishes: TypeAlias = "Callable[[], Sequence[bool]]"


class Results(NamedTuple):
    """What a step computes, 0-d tensors on the device."""

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    is_bad: Tensor
    """Whether loss or gradient was not finite, so that the step was undone."""
    loss_is_bad: Tensor
    """Whether the loss itself was not finite (with fp16 an overflow of the gradient alone is
    routine)."""


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """What became of one step."""

    results: Results
    num_utterances: int
    """Utterances on all ranks."""
    indices: Tensor
    """(utterances,) int64: this rank's rows of the training list."""
    wishes: Sequence[bool]
    """What any rank wished; on several GPUs, in the previous step."""
    seconds: dict[str, float]
    """Seconds of `data`, `forward_backward` and `optimizer`."""


Recorder: TypeAlias = "Callable[[Batch, float], Results | None]"
"""Takes a step over one batch at a learning rate; None if it has to run as usual."""


@dataclasses.dataclass
class StepTools:
    """What else takes part in a step; by default nothing does."""

    exchange: "OneProcess | None" = None
    """None: this process trains alone."""
    compiler: Compiler | None = None
    """None: nothing is compiled."""
    profiler: StepProfiler | None = None
    threads: ThreadWatch = dataclasses.field(default_factory=lambda: ThreadWatch(1))


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
        tools: StepTools | None = None,
    ) -> None:
        tools = tools or StepTools()
        self.net = net
        self.loss = cast(Loss, loss)
        self.optimizer = optimizer
        self.precision = precision
        self.max_grad_norm = options.max_grad_norm
        self.utterances_per_speaker = utterances_per_speaker
        # A metric loss compares all utterances of a step, so micro-batches pass twice.
        self.gradient_cache = self.loss.is_metric and options.accumulation_steps > 1
        self.exchange = tools.exchange or OneProcess(net)
        self.compiler = tools.compiler or Compiler(net, None)
        self.profiler = tools.profiler
        self.threads = tools.threads
        self.guard = BufferGuard([net, loss])
        parts = [module for module in net.modules() if isinstance(module, DrawingPart)]
        self.drawing: list[DrawingPart] = [part for part in parts if part.num_numbers]
        """What draws numbers for each batch, such as masks and dither."""
        self._parameters = parameters_of(optimizer)
        self.is_sharded = any(share_of(parameter) is not None for parameter in self._parameters)
        self.is_fused = bool(optimizer.defaults.get("fused"))
        # A fused optimizer on a GPU reads `found_inf` on the device; for others the host decides.
        self._skips_on_device = precision.device.type == "cuda" and self.is_fused
        self._recorder: Recorder = lambda batch, learning_rate: None
        # Of the current step: batches held by the gradient cache; the number of utterances whose
        # weight is 1; the sums of weight, weighted loss and weighted accuracy.
        self._held: list[Batch] = []
        self._weight_unit: float
        self._numbers: Tensor | None
        self.forget()

    # The story of a step. Each micro-batch is embedded, its loss weighted by its number of
    # utterances, and its gradients added to those of the micro-batches before it (`add`). The rest
    # happens once (`finish`): gradients are divided by the sum of those weights and clipped in one
    # kernel, and the network is updated. If loss or gradients are not finite, the step is undone
    # instead: the network keeps its weights, and batch-norm statistics, which the forward pass has
    # changed already, are restored.
    #
    # On a GPU none of this waits for the device, which decides by itself whether a step was bad;
    # the trainer reads the numbers of many steps at once. A recorded step does the same by one
    # launch. What several ranks exchange is hidden in `exchange`, so no line below knows how many
    # there are. We are not sure that undoing a step is better than skipping the batch before it
    # does harm, but nothing else keeps a single broken recording from ending a run of days.
    def run(
        self,
        batches: Iterator[Batch],
        count: int,
        name: str,
        learning_rate: float,
        steps_left: float = 0,
    ) -> StepOutcome:
        """A step over the next `count` micro-batches; `steps_left` in the run decides whether
        compiling pays.
        """
        begin = time.perf_counter()
        clock = StepClock()
        results = None
        num_utterances = 0
        indices = []
        for number in range(count):
            distributed.work.at(f"the data of {name}")
            with clock.part("data"):
                batch = next(batches)
            distributed.work.at(name)
            num_utterances += sum(batch.rank_sizes)
            indices.append(batch.indices)
            with clock.part("forward_backward"):
                results = self._recorder(batch, learning_rate)
                if results is None:
                    self.add(batch, is_last=number + 1 == count)
        with clock.part("optimizer"):
            if results is None:
                results = self.finish(learning_rate)
            wishes = self.exchange.agreed_wishes()
        self.threads.step(
            clock.seconds["forward_backward"] + clock.seconds["optimizer"],
            clock.processor_seconds["forward_backward"] + clock.processor_seconds["optimizer"],
            num_utterances,
            is_compiled=self.compiler.is_compiled,
        )
        if self.profiler is not None:
            self.profiler.step()
        if self.compiler.is_observing:
            synchronize(self.precision.device)
            self.compiler.consider(time.perf_counter() - begin, steps_left)
        return StepOutcome(results, num_utterances, torch.cat(indices), wishes, clock.seconds)

    def add(self, batch: Batch, *, is_last: bool = True) -> None:
        """Forward and backward pass of one micro-batch; with the gradient cache, just hold it."""
        if self.gradient_cache:
            if not self._held:
                self.guard.remember()
            self._held.append(batch)
        else:
            self.key_draws(batch)
            self.forward_backward(batch, is_last=is_last)

    def forward_backward(self, batch: PlainBatch, *, is_last: bool = True) -> None:
        """Forward and backward pass; `announce` has given its numbers to each component that
        draws.
        """
        if self._numbers is None:
            self.guard.remember()
        # A loss that compares utterances, or whose head is sharded, is computed on every rank from
        # all of them.
        sees_all = self.loss.sees_all_ranks
        counted = sum(batch.rank_sizes)
        unit = float(counted)
        if not sees_all:
            counted = len(batch.labels)
            unit /= len(batch.rank_sizes)
        # Weighted by number of utterances relative to the first micro-batch, so that fp16 gradients
        # keep their scale.
        self._weight_unit = self._weight_unit or unit
        weight = counted / self._weight_unit
        with self.exchange.micro_batch(is_last):
            with record_function("speakernet.forward"), self.precision.autocast():
                embeddings = self.exchange.embed(batch.waveforms)  # (batch, dim)
                labels = batch.labels
                if sees_all:
                    embeddings = self.exchange.rows_of_all(embeddings, batch.rank_sizes)
                    labels = self.exchange.rows_of_all(labels, batch.rank_sizes)
                value, numbers = self._measure(embeddings, labels, weight)
            with record_function("speakernet.backward"):
                scaled = value * (weight * self.precision.scale)
                self.exchange.backward(scaled, numbers, is_last=is_last)

    def _measure(self, embeddings: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """The loss of embeddings (batch, dim), 0-d, and its numbers (3,), which are added to those
        of the step.
        """
        if self.loss.is_metric:
            per_speaker = self.utterances_per_speaker
            # (speakers * utterances, dim) -> (speakers, utterances, dim)
            embeddings = embeddings.reshape(-1, per_speaker, embeddings.shape[-1])
            labels = labels[::per_speaker]
        loss, accuracy = self.loss(embeddings, labels)
        means = torch.stack([loss.detach().float(), accuracy.detach().float()])
        numbers = torch.cat([means.new_full((1,), weight), means * weight])
        self._numbers = numbers if self._numbers is None else self._numbers + numbers
        return loss, numbers

    def finish(self, learning_rate: float) -> Results:
        """Clip, check, update the weights (or undo the step), and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0)
        if self.gradient_cache:
            self._two_passes()
        return self.update()

    def _two_passes(self) -> None:
        """Embed everything without a graph, get the loss gradient of each embedding, then propagate
        them by batch.
        """
        random_states = []
        # The embeddings of each micro-batch, the leaves of the loss's graph.
        leaves = []
        with torch.no_grad(), self.precision.autocast():
            for batch in self._held:
                random_states.append(capture_random_state())
                self.key_draws(batch)
                leaves.append(self.net(batch.waveforms))
        # Only the second pass may update the batch-norm statistics.
        self.guard.restore()
        # Micro-batch by micro-batch, which gives the order of a single process.
        rows = []
        labels = []
        with self.precision.autocast():
            for batch, leaf in zip(self._held, leaves, strict=True):
                leaf.requires_grad_()
                rows.append(self.exchange.rows_of_all(leaf, batch.rank_sizes))
                labels.append(self.exchange.rows_of_all(batch.labels, batch.rank_sizes))
            value, numbers = self._measure(torch.cat(rows), torch.cat(labels), 1.0)
        head = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(
            value * self.precision.scale, [*leaves, *head], allow_unused=True
        )
        head_gradients = gradients[len(leaves) :]
        after_loss = capture_random_state()
        net_is_trained = any(parameter.requires_grad for parameter in self.net.parameters())
        for number, batch in enumerate(self._held):
            is_last = number == len(self._held) - 1
            if not (net_is_trained or is_last):
                # The network is frozen, and the head already has its gradient.
                continue
            # Draw the same dropout and masks as in the first pass, or the gradient would belong to
            # other embeddings.
            restore_random_state(random_states[number])
            with self.exchange.micro_batch(is_last):
                self.key_draws(batch)
                with self.precision.autocast():
                    embeddings = self.exchange.embed(batch.waveforms)
                # The backward pass of these sums of products propagates the gradients from above.
                sums = []
                if net_is_trained:
                    sums.append((embeddings * gradients[number]).sum())
                if is_last:
                    for parameter, gradient in zip(head, head_gradients, strict=True):
                        if gradient is not None:
                            sums.append((parameter * gradient).sum())
                # Those of the whole step, which ranks exchange once.
                sent = numbers if is_last else torch.zeros_like(numbers)
                self.exchange.backward(torch.stack(sums).sum(), sent, is_last=is_last)
        restore_random_state(after_loss)

    def update(self) -> Results:
        """The part of `finish` after learning rates and gradients are in place."""
        assert self._numbers is not None, "a micro-batch was added"
        weight, loss_sum, accuracy_sum = self.exchange.totals(self._numbers)
        loss = loss_sum / weight
        accuracy = accuracy_sum / weight
        # Dividing once at the end also handles a smaller last micro-batch.
        divisor = self.precision.scale * weight
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self.is_sharded:
            norm = total_norm(self._parameters)
            gradients = [local_part(gradient) for gradient in gradients]
        else:
            norm = nn.utils.get_total_norm(gradients)
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

    def key_draws(self, batch: Batch) -> None:
        """Give the components that draw (masks, dither) the numbers of a batch."""
        if self.drawing:
            device = self.precision.device
            numbers = self.draw(batch)
            if device.type == "cuda":
                # From page-locked memory the copy does not wait for the device.
                numbers = numbers.pin_memory()
            self.announce(numbers.to(device, non_blocking=True))

    def draw(self, batch: Batch) -> Tensor:
        """The numbers of all components that draw, float64 (batch, numbers) on the host."""
        rows = batch.draw_rows
        numbers = [part.draw(batch.draw_key, rows) for part in self.drawing]
        return torch.from_numpy(np.concatenate(numbers, axis=1))

    def announce(self, numbers: Tensor) -> None:
        """Give each component its columns of what `draw` returned, on the device."""
        widths = [part.num_numbers for part in self.drawing]
        for part, columns in zip(self.drawing, numbers.split(widths, dim=1), strict=True):
            part.announce(columns)

    def record(self, recorder: Recorder) -> None:
        """From now on, let a recorder (`recording.StepRecorder`) take the steps."""
        self._recorder = recorder
        # torch's fused kernels skip the update of a bad step on any device.
        self._skips_on_device = self.is_fused

    @property
    def has_begun(self) -> bool:
        """Whether the current step has micro-batches already."""
        return self._numbers is not None or bool(self._held)

    def forget(self) -> None:
        """Begin a step without micro-batches."""
        self._held = []
        self._weight_unit = 0.0
        self._numbers = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Between two steps: inside the block everything runs eagerly and nothing is profiled."""
        with contextlib.ExitStack() as stack:
            if self.compiler.is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self.profiler is not None:
                stack.enter_context(self.profiler.pause())
            yield

    def close(self) -> None:
        """Release everything after the last step."""
        self.exchange.close()
        self.threads.close()
        if self.compiler.is_compiled:
            self.compiler.close()
        if self.profiler is not None:
            self.profiler.close()


class StepClock:
    """The seconds of each part of a step: those that pass, and those of the training thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.processor_seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block, and mark it for the profiler."""
        begin = time.perf_counter()
        processor_begin = time.thread_time()
        with record_function(f"speakernet.{name}"):
            yield
        self.seconds[name] += time.perf_counter() - begin
        self.processor_seconds[name] += time.thread_time() - processor_begin


class OneProcess:
    """What a process that trains alone exchanges with others: nothing."""

    is_alone = True

    def __init__(self, net: nn.Module) -> None:
        self.embed: Callable[[Tensor], Tensor] = net
        """(batch, samples) -> (batch, dim), which prepares the exchange of gradients."""
        self.wishes: Wishes = lambda: [False] * NUM_WISHES

    def listen_to(self, wishes: Wishes) -> None:
        """Call this function after each step: does this rank wish to stop, and to save?"""
        self.wishes = wishes

    def begin_epoch(self) -> None:
        """Prepare for an epoch: the set of trained parameters may have changed."""

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Context for the forward and backward pass of one micro-batch."""
        return contextlib.nullcontext()

    def rows_of_all(self, rows: Tensor, rank_sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, in the order of the batch."""
        return rows

    def backward(self, value: Tensor, numbers: Tensor, *, is_last: bool) -> None:
        """Backward pass of a micro-batch; `numbers` (3,) are its weight, weighted loss and weighted
        accuracy.
        """
        value.backward()

    def totals(self, numbers: Tensor) -> Tensor:
        """The means over the ranks, (3,), of the sums over each rank's micro-batches."""
        return numbers

    def agreed_wishes(self) -> Sequence[bool]:
        """What any rank wished in the step that has ended."""
        return self.wishes()

    def share_statistics(self) -> None:
        """Give every rank the same batch-norm statistics."""

    def close(self) -> None:
        """Free the buffers for exchanging gradients."""
