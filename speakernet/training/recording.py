"""A training step recorded once on the device and replayed: one launch instead of a thousand.

On a GPU a small network waits for Python: a step of ResNetSE34L is 1,355 launches of some 10 to
50 us each, around 11 ms of work. A CUDA graph holds them all. It computes with the same memory in
every replay, so whatever changes from step to step is a tensor of fixed address that is filled
before: waveforms, labels, the numbers of masks and dither, learning rates and the margin. A Python
number inside the step would stay what it was in the recording; `tests/training/test_recording.py`
finds that on a CPU, where the same step is traced and its trace replayed.

What varies in form runs as usual, and the log says why: several processes, accumulation, optimizers
without a fused update, and code that brings values from the host. The first steps of a form are
ordinary ones, which create the optimizer's moments and let libraries choose their kernels;
recording itself computes nothing.

Not run on a GPU yet, so `runtime.cuda_graph: auto` means off.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speakernet.files import error_line
from speakernet.parallel.sharding import parameters_of
from speakernet.training.optimizers import LEARNING_RATE_FACTOR
from speakernet.training.options import RuntimeOptions
from speakernet.training.protocols import Batch, TunedTrunk
from speakernet.training.step import Results, TrainingStep

logger = logging.getLogger(__name__)

WARMUP_STEPS = 3
"""Ordinary steps of a form before it is recorded; the last one is searched for values that come
from the host."""
MAX_RECORDINGS = 4
"""Forms (batch size, crop length, trained parameters) that are recorded; each holds the memory of a
step."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Results]], tuple[Replay, Results]]
"""Records a step: how to replay it, and the tensors in which it leaves its results."""


class CudaCapture:
    """Records steps as CUDA graphs, which share their memory: a step leaves nothing in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], Results]) -> tuple[Replay, Results]:
        """Record `body`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = body()
        return graph.replay, results


def why_not_recorded(step: TrainingStep, options: RuntimeOptions, num_batches: int) -> str:
    """The reason why the steps of a run, of `num_batches` micro-batches each, cannot be recorded;
    empty if they can.
    """
    trunk = cast(TunedTrunk, step.net.trunk)
    is_compiled = options.compile != "off"
    reasons = {
        "it needs a CUDA device": step.precision.device.type != "cuda",
        "the step accumulates micro-batches": num_batches > 1,
        "several processes share each batch": not step.exchange.is_alone,
        f"optimizer {type(step.optimizer).__name__} has no fused update": not step.is_fused,
        f"compile_mode {options.compile_mode} records by itself": is_compiled
        and options.compile_mode != "default",
        "blocks are checkpointed": options.gradient_checkpointing,
        "something else is drawn on the host for each batch": trunk.is_pretrained,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def record_steps(step: TrainingStep, options: RuntimeOptions, num_batches: int) -> None:
    """Let a step be recorded, or log why it cannot be."""
    reason = why_not_recorded(step, options, num_batches)
    if reason:
        logger.warning("runtime.cuda_graph has no effect: %s", reason)
    else:
        step.record(StepRecorder(step, CudaCapture()))


@dataclasses.dataclass(eq=False)
class StaticBatch:
    """What changes from step to step, in tensors whose address stays."""

    waveforms: Tensor
    labels: Tensor
    rank_sizes: tuple[int, ...]
    rates: Tensor
    """(parameter groups,) float32, because torch's fused kernels read nothing else."""
    numbers: Tensor | None = None
    """(batch, numbers): the draws of masks and dither; None if nothing draws."""
    margin: Tensor | None = None
    """0-d float64; None if the loss has no margin."""


@dataclasses.dataclass(eq=False)
class Form:
    """One form of a step: its tensors and, once made, its recording."""

    static: StaticBatch
    steps: int = 0
    replay: Replay | None = None
    results: Results | None = None


# The story of a recorded step. A form of a step is what a recording cannot change: the shape of the
# batch, which parameters learn, which norms count. The first three steps of a form run as usual,
# but already from the static tensors, so that the optimizer has its moments and cuDNN its choices
# when the recording begins; the last of them is watched for values that come from the host. Then
# the same body is recorded, which computes nothing, and replayed for this step and all later ones.
# Losing a form is never an error: without a recording the step is an ordinary one.
class StepRecorder:
    """Takes the steps of a `TrainingStep` from static tensors and, after a few, by replay."""

    def __init__(self, step: TrainingStep, capture: Capture | None) -> None:
        """`capture` None never records, for comparison."""
        self._step = step
        self._capture = capture
        self._forms: dict[Any, Form] = {}
        self._is_full = False
        self._parameters = parameters_of(step.optimizer)
        self._norms = [module for module in step.net.modules() if isinstance(module, _BatchNorm)]
        for group in step.optimizer.param_groups:
            # Adam refuses to be captured without; its fused update keeps its counters on the
            # device anyway.
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self, batch: Batch, learning_rate: float) -> Results | None:
        """The results of a step over one batch; None if it has to run as usual."""
        # Trials of the compiler compare times of ordinary steps.
        if self._step.compiler.is_observing:
            return None
        form = self._form_of(batch)
        if form is None:
            return None
        self._fill(form.static, batch, learning_rate)
        if form.replay is None and self._capture is not None and form.steps == WARMUP_STEPS:
            self._record(form)
        form.steps += 1
        if form.replay is None:
            with self._on_side_stream(), self._watch_host(form.steps == WARMUP_STEPS):
                return self._body(form.static)
        form.replay()
        assert form.results is not None
        # The next replay overwrites them, and the trainer reads the results of many steps at once,
        # so they are copied, by a single launch.
        return Results(*torch.stack([*map(Tensor.float, form.results)]).unbind())

    def _form_of(self, batch: Batch) -> Form | None:
        step = self._step
        waveforms = batch.waveforms
        # What freezing changes: which parameters learn and which norms are in training mode.
        learning = [parameter.requires_grad for parameter in self._parameters]
        modes = [norm.training for norm in self._norms]
        is_compiled = step.compiler.is_compiled
        # A recording holds addresses and launches. What decides which kernels are launched has to
        # be part of this key; what only changes their numbers has to be in a static tensor.
        key = (waveforms.shape, waveforms.dtype, is_compiled, *learning, *modes)
        if key in self._forms:
            return self._forms[key]
        if len(self._forms) == MAX_RECORDINGS:
            if not self._is_full:
                count = MAX_RECORDINGS
                logger.info("cuda_graph: more than %d forms of a step; others run as usual", count)
            self._is_full = True
            return None
        device = waveforms.device
        static = StaticBatch(
            torch.empty_like(waveforms),
            torch.empty_like(batch.labels),
            batch.rank_sizes,
            torch.empty(len(step.optimizer.param_groups), device=device),
        )
        if step.drawing:
            static.numbers = step.draw(batch).to(device)
        if step.loss.margin is not None:
            static.margin = torch.empty((), dtype=torch.float64, device=device)
        self._forms[key] = Form(static)
        return self._forms[key]

    def _fill(self, static: StaticBatch, batch: Batch, learning_rate: float) -> None:
        static.waveforms.copy_(batch.waveforms, non_blocking=True)
        static.labels.copy_(batch.labels, non_blocking=True)
        if static.numbers is not None:
            numbers = self._step.draw(batch)
            if static.numbers.is_cuda:
                numbers = numbers.pin_memory()
            static.numbers.copy_(numbers, non_blocking=True)
        for number, group in enumerate(self._step.optimizer.param_groups):
            # `fill_` passes the number with the launch: no copy from the host.
            static.rates[number].fill_(learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0))
        if static.margin is not None:
            static.margin.fill_(self._step.loss.margin)

    def _body(self, static: StaticBatch) -> Results:
        """The step itself, with nothing from the host; ordinary, traced and recorded alike."""
        step = self._step
        # The margin is a tensor only in here; everywhere else, as in a checkpoint, it is a number.
        margin = step.loss.margin
        try:
            if static.margin is not None:
                step.loss.set_margin(static.margin)
            if static.numbers is not None:
                step.announce(static.numbers)
            for group, rate in zip(step.optimizer.param_groups, static.rates.unbind(), strict=True):
                group["lr"] = rate
            step.forward_backward(static)
            return step.update()
        finally:
            if static.margin is not None:
                step.loss.set_margin(margin)

    def _record(self, form: Form) -> None:
        assert self._capture is not None
        try:
            form.replay, form.results = self._capture(lambda: self._body(form.static))
            logger.info("cuda_graph: recorded a step of %d crops", len(form.static.labels))
        except RuntimeError as error:
            self._give_up(error_line(error))

    def _give_up(self, reason: str) -> None:
        self._capture = None
        # Not tried again, since a later step would fail for the same reason. The attempt's
        # gradients are in its graph's memory, so they are dropped as well.
        self._step.optimizer.zero_grad(set_to_none=True)
        self._step.forget()
        logger.warning("cuda_graph: steps are not recorded: %s", reason)

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """On a GPU the steps before a recording run on a stream of their own, as torch asks."""
        if self._step.precision.device.type != "cuda" or self._capture is None:
            yield
            return
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            yield
        main.wait_stream(side)

    @contextlib.contextmanager
    def _watch_host(self, is_watched: bool) -> Iterator[None]:
        if not is_watched or self._capture is None:
            yield
            return
        with HostValues(self._step.precision.device) as host:
            yield
        if host.operations:
            self._give_up(f"{', '.join(sorted(host.operations))} bring values from the host")


class HostValues(TorchDispatchMode):
    """Collects the operations that read tensors of the host beside those of the device: a recording
    would keep their first values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self._type = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        # Operations on host tensors alone are not counted: their result only matters once it is
        # copied to the device, and that copy is seen.
        is_on_device = any(tensor.device.type == self._type for tensor in [*inputs, *outputs])
        if is_on_device and any(tensor.device.type != self._type for tensor in inputs):
            self.operations.add(str(func))
        return results
