"""A training step recorded once on the device and replayed: one launch instead of a thousand.

On a GPU a small network waits for Python: a step of ResNetSE34L is 1,355 launches of some 10 to
50 us each, around 11 ms of work. A CUDA graph holds them all. It computes with the same memory in
every replay, so whatever changes from step to step is a tensor of fixed address that is filled
before: waveforms, labels, the numbers of masks and dither, learning rates and the margin. A Python
number inside the step would stay what it was in the recording; `tests/training/test_recording.py`
finds that on a CPU, where the same step is traced and its trace replayed.

What varies in form runs as usual, and the log says why: several processes, accumulation, the
gradient cache, sharded heads, optimizers without a fused update, and code that brings values from
the host. The first steps of a form are ordinary ones, which create the optimizer's moments and let
libraries choose their kernels; recording itself computes nothing.

Not run on a GPU yet, so `runtime.cuda_graph: auto` means off.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speakernet.training.optimizers import LEARNING_RATE_FACTOR
from speakernet.training.options import RuntimeOptions
from speakernet.training.step import Results, TrainingStep

if TYPE_CHECKING:
    from speakernet.training.step import BatchLike

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
    reasons = {
        "it needs a CUDA device": step.precision.device.type != "cuda",
        "the step accumulates micro-batches": num_batches > 1,
        "the gradient cache passes every batch twice": step.gradient_cache,
        "several processes share each batch": not step.is_alone,
        "the head is sharded": step.is_sharded,
        f"optimizer {type(step.optimizer).__name__} has no fused update": not step.is_fused,
        f"compile_mode {options.compile_mode} records by itself": options.compile != "off"
        and options.compile_mode != "default",
        "blocks are checkpointed": options.gradient_checkpointing,
        "something else is drawn on the host for each batch": step.draws_on_host,
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
    numbers: Tensor | None
    """(batch, numbers): the draws of masks and dither."""
    rates: Tensor
    """(parameter groups,) float32, because torch's fused kernels read nothing else."""
    margin: Tensor | None
    """0-d float64; None if the loss has no margin."""
    # Host facts that the step counts; they are the same for a form, except for the indices.
    shares: tuple[int, ...] = ()
    indices: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclasses.dataclass(eq=False)
class Form:
    """One form of a step: its tensors and, once made, its recording."""

    static: StaticBatch
    steps: int = 0
    replay: Replay | None = None
    results: Results | None = None


class StepRecorder:
    """Takes the steps of a `TrainingStep` from static tensors and, after a few, by replay."""

    def __init__(self, step: TrainingStep, capture: Capture | None) -> None:
        """`capture` None never records, for comparison."""
        self._step = step
        self._capture = capture
        self._forms: dict[Any, Form] = {}
        self._is_full = False
        for group in step.optimizer.param_groups:
            # Adam refuses to be captured without; its fused update keeps its counters on the
            # device anyway.
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self, batch: "BatchLike", learning_rate: float) -> Results | None:
        """The results of a step over one batch; None if it has to run as usual."""
        step = self._step
        # Trials of the compiler compare times of ordinary steps.
        if step.compiler.is_observing:
            return None
        form = self._form_of(batch)
        if form is None:
            return None
        self._fill(form.static, batch, learning_rate)
        if form.replay is None and self._capture is not None and form.steps == WARMUP_STEPS:
            self._record(form)
        form.steps += 1
        if form.replay is None:
            with self._beside(), self._searched(form.steps == WARMUP_STEPS):
                return self._body(form.static)
        form.replay()
        assert form.results is not None
        # The next replay overwrites them.
        return type(form.results)(*torch.stack([*map(Tensor.float, form.results)]).unbind())

    def _form_of(self, batch: "BatchLike") -> Form | None:
        step = self._step
        waveforms = batch.waveforms
        key = (waveforms.shape, waveforms.dtype, step.compiler.is_compiled, step.trained_form())
        form = self._forms.get(key)
        if form is None and len(self._forms) < MAX_RECORDINGS:
            device = waveforms.device
            margin = getattr(step.loss, "margin", None)
            form = self._forms[key] = Form(
                StaticBatch(
                    torch.empty_like(waveforms),
                    torch.empty_like(batch.labels),
                    step.draw(batch).to(device) if step.is_drawing else None,
                    torch.empty(len(step.optimizer.param_groups), device=device),
                    None if margin is None else torch.empty((), dtype=torch.float64, device=device),
                )
            )
        if form is None and not self._is_full:
            self._is_full = True
            logger.info(
                "cuda_graph: more than %d forms of a step; further ones run as usual",
                MAX_RECORDINGS,
            )
        return form

    def _fill(self, static: StaticBatch, batch: "BatchLike", learning_rate: float) -> None:
        static.waveforms.copy_(batch.waveforms, non_blocking=True)
        static.labels.copy_(batch.labels, non_blocking=True)
        static.shares = batch.shares
        static.indices = batch.indices
        if static.numbers is not None:
            numbers = self._step.draw(batch)
            if static.numbers.is_cuda:
                numbers = numbers.pin_memory()
            static.numbers.copy_(numbers, non_blocking=True)
        for number, group in enumerate(self._step.optimizer.param_groups):
            # `fill_` passes the number with the launch: no copy from the host.
            static.rates[number].fill_(learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0))
        if static.margin is not None:
            static.margin.fill_(self._step.loss.margin)  # type: ignore[arg-type]

    def _body(self, static: StaticBatch) -> Results:
        """The step itself, with nothing from the host; ordinary, traced and recorded alike."""
        step = self._step
        loss: Any = step.loss
        margin = loss.margin if static.margin is not None else None
        try:
            if static.margin is not None:
                loss.margin = static.margin
            if static.numbers is not None:
                step.announce(static.numbers)
            for group, rate in zip(step.optimizer.param_groups, static.rates.unbind(), strict=True):
                group["lr"] = rate
            step.add_announced(static)
            return step.update()
        finally:
            if static.margin is not None:
                loss.margin = margin

    def _record(self, form: Form) -> None:
        assert self._capture is not None
        try:
            form.replay, form.results = self._capture(lambda: self._body(form.static))
            logger.info("cuda_graph: recorded a step of %d crops", len(form.static.labels))
        except RuntimeError as error:
            self._give_up(str(error).partition("\n")[0])

    def _give_up(self, reason: str) -> None:
        self._capture = None
        # Gradients of an attempt lie in the memory of its graph.
        self._step.optimizer.zero_grad(set_to_none=True)
        self._step.forget()
        logger.warning("cuda_graph: steps are not recorded: %s", reason)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU the steps before a recording run on a stream of their own, as torch asks."""
        if self._step.precision.device.type != "cuda" or self._capture is None:
            yield
            return
        main = torch.cuda.current_stream()
        beside = torch.cuda.Stream()
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            yield
        main.wait_stream(beside)

    @contextlib.contextmanager
    def _searched(self, is_searched: bool) -> Iterator[None]:
        if not is_searched or self._capture is None:
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
        is_on_device = any(tensor.device.type == self._type for tensor in [*inputs, *outputs])
        if is_on_device and any(tensor.device.type != self._type for tensor in inputs):
            self.operations.add(str(func))
        return results
