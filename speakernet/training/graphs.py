"""Whole optimizer steps recorded once and then repeated by one launch: CUDA graphs.

A step of a small network is thousands of launches, for which a GPU waits. What a recorded step reads has to lie where
it lay when it was recorded: batches, dither and masks are copied into tensors of its own, learning rate and margin are
filled in, and loss scale, bad steps and batch-norm statistics never leave the device. `TrainingStep` is written so;
this file only records and repeats it. Who records is handed in, so that a CPU proves that nothing else is read.
"""

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from speakernet.files import error_line
from speakernet.training.interfaces import BatchLike
from speakernet.training.optimizers import keep_rates_on_device, set_learning_rate
from speakernet.training.step import StepOutcome, TrainingStep

logger = logging.getLogger(__name__)

# Steps of a shape that run as they are before one is recorded: the compiler and cuDNN make their choices in them.
PLAIN_STEPS = 2
# Further ones on the stream that will be recorded, as torch asks for.
WARMUP_STEPS = 3
# Batches have one shape, and the last step of an epoch may have fewer of them.
MOST_RECORDINGS = 4

Repeat = Callable[[], None]


class Recorder(Protocol):
    """Records what a device is asked to do."""

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Inside, work runs as it will be recorded."""

    def record(self, run: Callable[[], StepOutcome]) -> tuple[StepOutcome, Repeat]:
        """Record `run` without doing it; what it returns holds the result of whichever repetition was the last."""


class CudaRecorder:
    """Records CUDA graphs, which share the memory of their activations: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the stream that is recorded; the stream of now waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], StepOutcome]) -> tuple[StepOutcome, Repeat]:
        """See `Recorder.record`."""
        current = torch.cuda.current_stream(self._device)
        made = torch.cuda.CUDAGraph()
        try:
            # Of other threads nothing is recorded, and what they ask of the device does not end the recording.
            with torch.cuda.graph(made, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outcome = run()
        finally:
            # Where it failed torch leaves the recording's stream behind.
            torch.cuda.set_stream(current)
        return outcome, made.replay


@dataclasses.dataclass
class StaticBatch:
    """A batch in memory that stays where it is."""

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    shares: tuple[int, ...]
    draw_key: int
    warps: np.ndarray

    @classmethod
    def like(cls, batch: BatchLike) -> "StaticBatch":
        """Room for batches of that shape, in which this one lies."""
        room = batch.waveforms.clone(), batch.labels.clone()
        return cls(*room, batch.indices, batch.shares, batch.draw_key, batch.warps)

    def fill(self, batch: BatchLike) -> None:
        """Take another batch's numbers over."""
        self.waveforms.copy_(batch.waveforms, non_blocking=True)
        self.labels.copy_(batch.labels, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A step that can be repeated: its room for batches and draws, where its outcome lies, and what repeats it."""

    batches: list[StaticBatch]
    draws: list[list[tuple[torch.Tensor, ...]]]
    """Of each batch, of each part of the network that draws."""
    outcome: StepOutcome
    repeat: Repeat


class RecordedStep(TrainingStep):
    """A training step that is recorded once its shape has come several times, and repeated from then on.

    Steps of other shapes, the first ones, and all of them where recording fails, run as `TrainingStep` runs them, with
    the same result. What was recorded is dropped where the network is compiled, frozen or set into another mode.

    Args:
        recorder: of the device.
        made: arguments of `TrainingStep`.
        options: the others of its arguments.

    Raises:
        ValueError: an optimizer that cannot skip a bad step on the device, a gradient cache, or vocal tracts, which the
            host says for each batch.
    """

    def __init__(self, recorder: Recorder, *made: Any, **options: Any) -> None:
        super().__init__(*made, **options)
        if not self.optimizer.defaults.get("fused") or self.gradient_cache or self._warping:
            raise ValueError("recorded steps need a fused optimizer, no gradient cache and no other vocal tracts")
        self._recorder = recorder
        self._skips_on_device = True
        keep_rates_on_device(self.optimizer, self.precision.device)
        self._margin: torch.Tensor | None = None
        self._waiting: list[BatchLike] = []
        self._shapes: list[Hashable] = []
        self._seen: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, Recording] = {}
        self._mode: Hashable = None
        self._is_given_up = False

    def set_margin(self, margin: float | torch.Tensor) -> None:
        """Fill in the margin of the coming step; the loss reads it from the device."""
        if self._margin is None:
            self._margin = torch.zeros((), dtype=torch.float64, device=self.precision.device)
            super().set_margin(self._margin)
        self._margin.fill_(margin)

    def add(self, batch: BatchLike, *, is_last: bool = True) -> None:
        """Run a micro-batch, or keep it for `finish` where the whole step may be repeated."""
        if self._waiting or (not self._shapes and self._is_usual(batch)):
            self._waiting.append(batch)
            return
        self._shapes.append(_shape(batch))
        super().add(batch, is_last=is_last)

    def finish(self, learning_rate: float) -> StepOutcome:
        """Repeat the step of this shape, or finish it as it was begun."""
        if not self._waiting:
            self._seen[tuple(self._shapes)] += 1
            return super().finish(learning_rate)
        batches, self._waiting = self._waiting, []
        key = tuple(map(_shape, batches))
        self._seen[key] += 1
        recording = self._recordings.get(key)
        if recording is None and self._seen[key] > PLAIN_STEPS + WARMUP_STEPS:
            recording = self._recorded(key, batches)
        if recording is None:
            with self._recorder.warming_up():
                return self._run_plainly(batches, learning_rate)
        for room, draws, batch in zip(recording.batches, recording.draws, batches, strict=True):
            room.fill(batch)
            self.key_draws(batch)
            for module, kept in zip(self._keyed, draws, strict=True):
                module.draw_into(kept)
        set_learning_rate(self.optimizer, learning_rate)
        recording.repeat()
        found = recording.outcome
        # The next repetition writes over them.
        return StepOutcome(
            loss=found.loss.clone(),
            accuracy=found.accuracy.clone(),
            grad_norm=found.grad_norm.clone(),
            is_bad=found.is_bad.clone(),
            loss_is_bad=found.loss_is_bad.clone(),
            num_utterances=found.num_utterances,
            indices=torch.cat([batch.indices for batch in batches]),
        )

    def forget(self) -> None:
        """See `TrainingStep.forget`; batches that only wait have done nothing yet."""
        if self._waiting:
            self._waiting = []
            return
        super().forget()

    def close(self) -> None:
        """Give the recordings' memory back, and the loss a plain margin."""
        super().close()
        self._recordings.clear()
        if self._margin is not None:
            super().set_margin(float(self._margin))
            self._margin = None

    def _reset(self) -> None:
        super()._reset()
        self._shapes = []

    def _is_usual(self, batch: BatchLike) -> bool:
        """Whether a step that begins with such a batch has come often enough to be worth a recording."""
        if self._is_given_up:
            return False
        mode = self._mode_of_modules()
        if mode != self._mode:
            self._recordings.clear()
            self._seen.clear()
            self._mode = mode
        first = _shape(batch)
        return any(count >= PLAIN_STEPS and key[0] == first for key, count in self._seen.items())  # type: ignore[index]

    def _mode_of_modules(self) -> Hashable:
        """What a recording of the network would be another for, beside the shapes of its batches."""
        modules = [*self.net.modules(), *self.loss.modules()]
        modes = tuple((module.training, getattr(module, "_compiled_call_impl", None) is None) for module in modules)
        return modes, tuple(parameter.requires_grad for parameter in self._parameters)

    def _run_plainly(self, batches: list[BatchLike], learning_rate: float) -> StepOutcome:
        for number, batch in enumerate(batches):
            super().add(batch, is_last=number + 1 == len(batches))
        return super().finish(learning_rate)

    def _recorded(self, key: Hashable, batches: list[BatchLike]) -> Recording | None:
        """A recording of the step, None where there is none to be had."""
        if len(self._recordings) >= MOST_RECORDINGS:
            return None
        rooms = [StaticBatch.like(batch) for batch in batches]
        draws = [[module.room() for module in self._keyed] for _ in batches]

        def run() -> StepOutcome:
            for number, room in enumerate(rooms):
                for module, kept in zip(self._keyed, draws[number], strict=True):
                    module.take_from(kept)
                TrainingStep.add(self, room, is_last=number + 1 == len(rooms))
            return self._conclude()

        try:
            outcome, repeat = self._recorder.record(run)
        except RuntimeError as error:
            self._is_given_up = True
            # Nothing of it was done: there are gradients to drop, and no statistics to put back.
            self.optimizer.zero_grad(set_to_none=True)
            self._reset()
            for module in self._keyed:
                module.take_from(())
            logger.warning("CUDA graphs: a step could not be recorded, going on without: %s", error_line(error))
            return None
        logger.info("CUDA graphs: steps of %d batches of %d x %d samples are repeated by one launch from now on",
                    len(rooms), *rooms[0].waveforms.shape)  # fmt: skip
        self._recordings[key] = Recording(rooms, draws, outcome, repeat)
        return self._recordings[key]


def _shape(batch: BatchLike) -> Hashable:
    return tuple(batch.waveforms.shape), tuple(batch.shares)
