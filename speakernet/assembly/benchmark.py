"""Measure loader and training step of a configuration on its own data (`speakernet benchmark`), and
find the batch size that trains fastest within the available memory (`speakernet find-batch-size`).
"""

import contextlib
import itertools
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs, make_synthetic_corpus
from speakernet.assembly.training import (
    apply_memory_options,
    build_loss,
    build_model,
    build_precision,
    build_trainer,
    prepare_machine,
    refuse_impossible,
)
from speakernet.config.schema import Config, replaced
from speakernet.data.audio import crop_samples
from speakernet.data.batches import BatchRequest, CropMaker, Made
from speakernet.data.lists import read_training_list
from speakernet.data.loader import Batch, TrainingLoader
from speakernet.files import human_bytes
from speakernet.machine.device import choose_device, power_monitor, synchronize, utilisation_monitor
from speakernet.machine.facts import usable_memory_bytes
from speakernet.machine.memory import (
    Monitor,
    is_out_of_memory,
    process_memory_bytes,
    release_freed_memory,
)
from speakernet.training.optimizers import create_optimizer
from speakernet.training.step import TrainingStep

logger = logging.getLogger(__name__)

WARM_STEPS = {"cpu": 3, "cuda": 20}
"""Minimum number of untimed steps: the first find empty queues, allocate memory and choose
kernels."""
QUIET_STEPS = 3
MAX_WARM_STEPS = 200
"""Warm-up ends after this many steps in a row without compiling (the second records a CUDA graph),
or at the limit."""
PRODUCT_SIZES = {"cpu": 1024, "cuda": 8192}
NUM_PRODUCTS = 10
DEFAULT_CLASSES = 1000
"""Classes of the head if not configured; the head is a small part of a step."""
TIMED_STEPS = 3
EQUAL_SHARE = 0.03
"""Among sizes that differ in speed by less than this share, the smallest wins: less memory, and
more updates."""
DEFAULT_MEMORY_SHARE = 0.8
WORTHWHILE_GAIN = 0.15
"""Smaller gains in speed are within timing noise and not worth retuning a recipe."""
MIN_STEPS = 10_000
"""Runs with fewer steps lack updates, not speed. A guess between exp01 (720 steps; with 360 it
learned next to nothing in half of its epochs) and the recipes for VoxCeleb (100,000 and more)."""


def measure(config: Config, num_batches: int) -> dict[str, Any]:
    """Time the loader alone, then as many training steps; returns plain values under `loader` and
    `training`.
    """
    config = make_synthetic_corpus(config)
    prepare_machine(config)
    inputs = Inputs(config, choose_device(config.runtime))
    with contextlib.closing(build_training_loader(config, inputs)) as loader:
        batches = _endless(loader)
        for _ in range(WARM_STEPS[loader.device.type]):
            next(batches)
        times = time_batches(batches, num_batches, lambda batch: len(batch.labels), loader.device)
        return {"loader": times, "training": _measure_training(config, loader, num_batches)}


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `measure` as a Markdown table."""
    batch = figures["loader"]
    steps = figures["training"]
    rows = [
        ("loader alone", f"{batch['utterances_per_second']:,.0f} utterances/s"),
        (
            "batch from the loader alone",
            f"{1000 * batch['median_seconds']:.2f} ms (95 % under "
            f"{1000 * batch['p95_seconds']:.2f} ms, slowest {1000 * batch['slowest_seconds']:.1f} "
            "ms)",
        ),
        (
            "training",
            f"{steps['utterances_per_second']:,.0f} utterances/s, precision {steps['precision']}",
        ),
        ("step", f"{1000 / steps['steps_per_second']:.1f} ms"),
        (
            "step on a ready batch, with the same augmentation",
            f"{1000 * steps['ready_step_seconds']:.1f} ms",
        ),
        ("waiting for data", f"{100 * steps['data_wait_share']:.1f} % of the step"),
        (
            "model FLOP utilisation (MFU)",
            f"{100 * steps['mfu']:.1f} % of {steps['peak_flops'] / 1e12:.2f} TFLOP/s in "
            f"{steps['arithmetic']}",
        ),
        ("epoch", f"{steps['epoch_seconds']:.1f} s"),
    ]
    memory = (("peak memory", "process_peak_bytes"), ("peak GPU memory", "device_peak_bytes"))
    rows += [(name, human_bytes(steps[key])) for name, key in memory if key in steps]
    gpu = (
        ("GPU utilisation", "gpu_utilisation_percent", "%"),
        ("GPU power", "gpu_power_watts", "W"),
    )
    rows += [(name, f"{steps[key]:.0f} {unit}") for name, key, unit in gpu if key in steps]
    return "\n".join(
        ["| measure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    )


def time_batches(
    batches: Iterator[Any], num_batches: int, size_of: Callable[[Any], int], device: torch.device
) -> dict[str, float]:
    """Fetch batches as fast as they come, and return how long they take to arrive."""
    times = [time.perf_counter()]
    sizes = []
    for batch in itertools.islice(batches, num_batches):
        times.append(time.perf_counter())
        sizes.append(size_of(batch))
    # The last copies to the device may still be running.
    synchronize(device)
    times[-1] = time.perf_counter()
    seconds = np.diff(times)
    return {
        "num_batches": len(sizes),
        "utterances_per_second": sum(sizes) / float(seconds.sum()),
        "median_seconds": float(np.median(seconds)),
        "p95_seconds": float(np.percentile(seconds, 95)),
        "slowest_seconds": float(seconds.max()),
    }


def time_steps(
    run_step: Callable[[], None],
    num_steps: int,
    device: torch.device,
    when_warm: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Seconds of `num_steps` steps after the warm-up, and the GPU's mean utilisation and power over
    them.
    """
    warm_up(run_step, WARM_STEPS[device.type])
    when_warm()
    # A GPU runs asynchronously: the clock starts and stops only when it has caught up.
    synchronize(device)
    started = time.perf_counter()
    with utilisation_monitor(device) as utilisation, power_monitor(device) as power:
        host = time.thread_time()
        for _ in range(num_steps):
            run_step()
        host = time.thread_time() - host
        synchronize(device)
        seconds = time.perf_counter() - started
    figures = {"step_seconds": seconds / num_steps, "steps_per_second": num_steps / seconds}
    if device.type == "cuda":
        # This thread's time for a step: if it is near the step's, the GPU waits for Python.
        figures["host_seconds"] = host / num_steps
    if utilisation.mean is not None:
        figures["gpu_utilisation_percent"] = utilisation.mean
    return figures if power.mean is None else {**figures, "gpu_power_watts": power.mean / 1000}


def warm_up(run_step: Callable[[], object], least: int) -> int:
    """Run at least `least` steps, until nothing more is compiled; return their number."""
    quiet = 0
    compiled = num_compiled()
    for done in range(1, MAX_WARM_STEPS + 1):
        run_step()
        before = compiled
        compiled = num_compiled()
        quiet = quiet + 1 if compiled == before else 0
        if done >= least and quiet >= QUIET_STEPS:
            return done
    logger.warning(
        "still compiling after %d steps: the figures include compile time", MAX_WARM_STEPS
    )
    return MAX_WARM_STEPS


def num_compiled() -> int:
    """Number of graphs that torch has compiled in this process; 0 if its compiler is not loaded."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler else 0


class ReadyCrops(CropMaker):
    """Replaces a loader's maker and answers every request immediately with the crops of the first.

    The loader then costs only what the device does for a step: the copy, speed changes and
    augmentation.
    """

    def __init__(self, maker: CropMaker) -> None:
        more = (maker.speakers, maker.speeds, maker.augmenter, maker.changes_speed)
        super().__init__(maker.reader, maker.lengths, maker.seed, *more)
        self.maker = maker
        self._made: Made | None = None

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """Yield the first request, a copy of its crops and its report once per request."""
        for _ in requests:
            if self._made is None:
                request, crops, report = next(iter(self.maker.run(requests[:1])))
                is_copied = crops.device.type == "cpu" and torch.cuda.is_available()
                self._made = (
                    request,
                    crops.clone().pin_memory() if is_copied else crops.clone(),
                    report,
                )
            request, crops, report = self._made
            # Augmentation on the device changes crops in place; those in pinned memory are copied
            # to a GPU first.
            yield request, crops if crops.is_pinned() else crops.clone(), report

    def close(self) -> None:
        """Close the wrapped maker."""
        self.maker.close()


def arithmetic_of(precision: str, device: torch.device) -> str:
    """The arithmetic of a step's convolutions: its precision, float32 or, if a GPU allows it,
    TensorFloat-32.
    """
    has_tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return {"no": "tf32" if has_tf32 else "float32"}.get(precision, precision)


def peak_flops(device: torch.device, arithmetic: str, size: int = 0) -> float:
    """Measured floating-point operations per second of matrix products in float32, tf32, bf16 or
    fp16.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arithmetic)
    size = size or PRODUCT_SIZES[device.type]
    one, other = (
        torch.randn(size, size, device=device).to(dtype or torch.float32) for _ in range(2)
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        seconds = []
        # The first round is a warm-up and does not count.
        for _ in range(1 + TIMED_STEPS):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(NUM_PRODUCTS):
                one @ other
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_float32_matmul_precision(before)
    return NUM_PRODUCTS * 2 * size**3 / min(seconds[1:])


def count_flop(run_step: Callable[[], object]) -> int:
    """Floating-point operations of a step's products and convolutions, forward and backward,
    counted in eager mode.
    """
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        run_step()
    return int(counter.get_total_flops())


def _measure_training(config: Config, loader: TrainingLoader, num_steps: int) -> dict[str, Any]:
    """Time real steps on real batches: seconds per step, share spent waiting for data, epoch time,
    memory.
    """
    # During the timed steps nothing may decide `compile: auto`, log (which empties the window) or
    # write last.pt.
    steady = {"log_interval": 10**9, "save_steps": 0, "save_minutes": 0.0}
    compiling = "off" if config.runtime.compile == "auto" else config.runtime.compile
    config = replaced(config, training=steady, runtime={"compile": compiling})
    net = build_model(config)
    loss = build_loss(config, loader.num_classes)
    device = loader.device
    refuse_impossible(config, net, device)
    num_batches = len(loader)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, net, loss, loader, lambda epoch: {}, Path(folder), device)
        net.train()
        loss.train()
        batches = _endless(loader)

        def run_step() -> None:
            # An endless epoch: the trainer never reaches its last batch.
            trainer.state.micro_batch %= num_batches
            trainer.run_step(batches)

        timed = time_steps(run_step, num_steps, device, trainer.speed.take_window)
        summary = {
            **trainer.speed.summary(),
            **trainer.speed.take_window(),
            **timed,
            "steps": num_steps,
        }
        loader.maker = ReadyCrops(loader.maker)
        batches = _endless(loader)
        ready = time_steps(run_step, num_steps, device)["step_seconds"]
        flop = count_flop(run_step)
    arithmetic = arithmetic_of(summary["precision"], device)
    peak = peak_flops(device, arithmetic)
    # A GPU runs asynchronously, so the host's own waiting says little. The share is therefore how
    # much longer a step takes than one on ready crops, with the same copy, speed changes and
    # augmentation.
    summary |= {
        "host_data_share": summary["data_wait_share"],
        "data_wait_share": max(0.0, 1 - ready / summary["step_seconds"]),
        "ready_step_seconds": ready,
        "step_flop": flop,
        "arithmetic": arithmetic,
        "peak_flops": peak,
        "mfu": flop / summary["step_seconds"] / peak,
    }
    summary["utterances_per_second"] = summary["effective_batch"] * summary["steps_per_second"]
    steps_per_epoch = -(-num_batches // config.training.accumulation_steps)
    return {**summary, "epoch_seconds": steps_per_epoch / summary["steps_per_second"]}


def _endless(loader: TrainingLoader) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


class Measurement(NamedTuple):
    """A batch size that was tried: seconds per step (infinite if it does not fit) and the memory it
    added.
    """

    batch_size: int
    seconds: float
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it fits into memory."""
        return self.seconds < math.inf

    @property
    def throughput(self) -> float:
        """Items per second."""
        return self.batch_size / self.seconds


class BatchSizeFinder:
    """Tries batch sizes with real training steps of any kind.

    `sample` makes a batch of a given size and `step` runs on it. The buffers of `net` are restored
    afterwards; weights that `step` changes are not. On a CPU, a step may use `limit_bytes`
    (default: 80 % of free memory).
    """

    def __init__(
        self,
        net: nn.Module,
        sample: Callable[[int], Any],
        step: Callable[[Any], None],
        limit_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        read_memory: Callable[[], int] = process_memory_bytes,
    ) -> None:
        self.net = net
        self._sample = sample
        self._step = step
        self._clock = clock
        self._read_memory = read_memory
        self.device = next(
            (parameter.device for parameter in net.parameters()), torch.device("cpu")
        )
        self.limit_bytes = limit_bytes or int(usable_memory_bytes() * DEFAULT_MEMORY_SHARE)
        self.tried: dict[int, Measurement] = {}

    @property
    def largest(self) -> int:
        """The largest size tried so far that fits; 0 if there is none."""
        return max((one.batch_size for one in self.tried.values() if one.fits), default=0)

    def find(self, smallest: int, most: int) -> int:
        """The batch size with the best throughput; among equally fast sizes (within 3 %), the
        smallest.
        """
        size = smallest
        while self.measure(size).fits and size < most:
            size = min(2 * size, most)
        if not self.largest:
            limit = f" (limit {human_bytes(self.limit_bytes)})" if self.device.type == "cpu" else ""
            raise ValueError(
                f"not even a batch of {smallest} fits into memory{limit}; use a smaller network, "
                "shorter crops or gradient checkpointing"
            )
        too_large = 0 if self.tried[size].fits else size
        # Searching finer than an eighth is not worth the steps.
        while too_large - self.largest > max(1, self.largest // 8):
            middle = (self.largest + too_large) // 2
            too_large = too_large if self.measure(middle).fits else middle
        fitted = [one for one in self.tried.values() if one.fits]
        best = max(one.throughput for one in fitted)
        return min(one.batch_size for one in fitted if one.throughput >= best * (1 - EQUAL_SHARE))

    def measure(self, size: int) -> Measurement:
        """The measurement of a size; each size is tried only once."""
        if size not in self.tried:
            # Steps update batch-norm statistics.
            buffers = {name: buffer.detach().clone() for name, buffer in self.net.named_buffers()}
            try:
                found = self._run(size)
            finally:
                for name, buffer in self.net.named_buffers():
                    buffer.data.copy_(buffers[name])
            self.tried[size] = found
            outcome = f"{found.throughput:.1f} utterances/s" if found.fits else "does not fit"
            logger.info("batch %d: %s, %s", size, outcome, human_bytes(found.memory_bytes))
        return self.tried[size]

    def _run(self, size: int) -> Measurement:
        fitted = self.tried.get(self.largest)
        is_gpu = self.device.type == "cuda"
        expected = fitted.memory_bytes * size // fitted.batch_size if fitted else 0
        if not is_gpu and expected > self.limit_bytes:
            # Not tried, because the operating system would kill the process instead of raising an
            # error.
            return Measurement(size, math.inf, expected)
        # Memory left over from earlier work would hide how much this size takes.
        release_freed_memory()
        seconds: list[float] = []
        try:
            with Monitor(self._read_memory) as monitor:
                if is_gpu:
                    torch.cuda.reset_peak_memory_stats(self.device)
                sample = self._sample(size)
                # The first step does not count: it allocates memory and chooses kernels.
                for _ in range(1 + TIMED_STEPS):
                    start = self._clock()
                    self._step(sample)
                    synchronize(self.device)
                    seconds.append(self._clock() - start)
                    monitor.sample()
                    if not is_gpu and monitor.peak - monitor.start > self.limit_bytes:
                        break
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Measurement(size, math.inf, self.limit_bytes)
        finally:
            self.net.zero_grad(set_to_none=True)
            if is_gpu:
                torch.cuda.empty_cache()
        if is_gpu:
            return Measurement(
                size, statistics.median(seconds[1:]), torch.cuda.max_memory_allocated(self.device)
            )
        added = int(monitor.peak - monitor.start)
        return Measurement(
            size, math.inf if added > self.limit_bytes else statistics.median(seconds[1:]), added
        )


def find_batch_size(
    config: Config, min_batch_size: int, max_batch_size: int, memory_limit_bytes: int | None = None
) -> tuple[BatchSizeFinder, int]:
    """Try batch sizes (in utterances), including the configured one, with whole training steps.

    Returns:
        The finder with its measurements, and the best size.
    """
    if not 1 <= min_batch_size <= max_batch_size:
        raise ValueError(
            f"found batch sizes {min_batch_size} to {max_batch_size}; expected 1 <= smallest <= "
            "largest"
        )
    prepare_machine(config)
    device = choose_device(config.runtime)
    precision = build_precision(config, device)
    num_classes = config.data.num_classes or DEFAULT_CLASSES
    net = build_model(config).to(device).train()
    loss = build_loss(config, num_classes).to(device).train()
    apply_memory_options(config, net, device, precision)
    per_speaker = config.data.utterances_per_speaker
    step = TrainingStep(
        net,
        loss,
        create_optimizer(config.optimizer, [net, loss], device, is_float32=precision.name == "no"),
        precision,
        # Each size is tried as a whole batch.
        config.training.model_copy(update={"accumulation_steps": 1}),
        utterances_per_speaker=per_speaker,
    )
    num_samples = crop_samples(config.data.crop_frames, config.data.sample_rate)
    generator = torch.Generator().manual_seed(config.runtime.seed)

    def sample(size: int) -> Batch:
        noise = 0.1 * torch.randn(size, num_samples, generator=generator)
        labels = (torch.arange(size) // per_speaker) % num_classes
        device_labels = labels.to(device)
        return Batch(noise.to(device), device_labels, labels, (size,), 0, labels.numpy())

    def run(batch: Batch) -> None:
        step.add(batch)
        # Learning rate 0: the update takes its usual time but leaves the weights unchanged.
        step.finish(learning_rate=0.0)

    # Loads kernel code, tens of megabytes that would otherwise be charged to the first size.
    run(sample(2 * per_speaker))
    finder = BatchSizeFinder(net, sample, run, memory_limit_bytes)
    smallest, most = (
        max(1, size // per_speaker) * per_speaker for size in (min_batch_size, max_batch_size)
    )
    best = finder.find(smallest, most)
    # The configured size is the reference for speed.
    finder.measure(configured_batch_size(config))
    return finder, best


def configured_batch_size(config: Config) -> int:
    """Utterances in a batch of the configuration."""
    return config.data.batch_size * config.data.utterances_per_speaker


def recommendation(config: Config, configured: Measurement, best: Measurement) -> str:
    """Advice, in one sentence, on whether to use the fastest size; counts steps if the training
    list exists.
    """
    data = config.data
    training = config.training
    # data.batch_size counts speakers.
    keep, take = (
        f"--batch_size {max(one.batch_size // data.utterances_per_speaker, 1)}"
        for one in (configured, best)
    )
    if configured.batch_size == best.batch_size:
        return f"keep {keep}, which is the fastest"
    if not configured.fits:
        several = -(-configured.batch_size // best.batch_size) * training.accumulation_steps
        accumulate = "" if config.loss.is_metric else f" --training.accumulation_steps {several}"
        return (
            f"use {take}{accumulate}: a batch of {configured.batch_size} does not fit into memory"
        )
    gain = best.throughput / configured.throughput - 1
    if gain < WORTHWHILE_GAIN:
        # The configured size is measured last and may be the faster one by a little.
        return (
            f"keep {keep}; no size is clearly faster ({best.batch_size} by "
            f"{max(0, round(100 * gain))} %)"
        )
    lists = [one.train_list for one in data.corpora.values()] or [data.train_list]
    exists = all(one and Path(one).is_file() for one in lists)
    utterances = sum(len(read_training_list(one)) for one in lists) if exists else 0
    steps = utterances // (best.batch_size * training.accumulation_steps) * training.max_epochs
    if exists and best.batch_size > configured.batch_size and steps < MIN_STEPS:
        return (
            f"keep {keep}: a batch of {best.batch_size} runs {100 * gain:.0f} % faster, but "
            f"leaves only {steps:,} steps"
        )
    return f"use {take} ({100 * gain:.0f} % faster) and retune the learning rate"
