"""Parts `steps` and `launches`: time, memory and kernels of a training step."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.record import NEEDS_CUDA, Row, Setup, left_out, row
from benchmarks.steps import published_config, trainer_step
from speakernet.assembly.training import prepare_machine
from speakernet.config.schema import Config, with_changes
from speakernet.machine.device import synchronize, utilisation_monitor
from speakernet.machine.memory import process_peak_bytes
from speakernet.training.timing import warm_up

# One network for each kind of load: many tiny kernels, large convolutions, wide one-dimensional
# ones, and a long chain of small layers.
MODELS = ("ResNetSE34L", "ResNet34", "ECAPA_TDNN_1024", "CAMPPlus")
QUICK_MODELS = ("ResNet",)
# Large enough to fill the GPU. With smaller batches the host would be the bottleneck in every row,
# and no variant could help.
BATCH = 256
QUICK_BATCH = 2
ROUNDS = 10
QUICK_ROUNDS = 1
# The minimum; warm-up continues while anything is still being compiled.
WARMUP = 8
PLAIN = {"precision": "no", "channels_last": "off", "compile": "off"}
HALF = {**PLAIN, "precision": "bf16", "channels_last": "on"}
# Variant -> its options in `runtime`. Those that compile come last: they may take the rest of the
# time.
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": PLAIN,
    "bf16, channels_last": HALF,
    "bf16, channels_last, recorded": {**HALF, "cuda_graph": "on"},
    "channels_last": {**PLAIN, "channels_last": "on"},
    "bf16, channels_last, compile": {**HALF, "compile": "on"},
    "bf16, channels_last, compile, recorded": {**HALF, "compile": "on", "cuda_graph": "on"},
}


def step_config(setup: Setup, model: str, runtime: Mapping[str, Any]) -> Config:
    """A published network trained by SGD with AAM-softmax; nothing is logged during the
    measurement.
    """
    config = with_changes(
        published_config(setup.config(), model),
        loss={"name": "aamsoftmax"},
        optimizer={"name": "sgd", "learning_rate": 0.1},
        training={"log_interval": 1000},
    )
    return with_changes(config, runtime=dict(runtime))


def batch_size_of(setup: Setup) -> int:
    """Number of crops (of 2 s) in a batch."""
    return QUICK_BATCH if setup.is_quick else BATCH


def step_costs(setup: Setup) -> Iterator[Row]:
    """Seconds and peak memory of a step of each network in each variant."""
    for variant, runtime in VARIANTS.items():
        for model in QUICK_MODELS if setup.is_quick else MODELS:
            name = f"{model}, {variant}"
            if "cuda_graph" in runtime and not setup.is_cuda:
                yield left_out(name, NEEDS_CUDA)
            # Compiling takes minutes on a CPU, and its code is tested elsewhere.
            elif setup.is_quick and "compile" in variant:
                yield left_out(name, "--quick does not compile")
            else:
                with warm_step(setup, model, runtime) as step:
                    yield _measure(setup, name, step)
                # Compiled code is useless to the next network and keeps memory.
                torch.compiler.reset()


def launches(setup: Setup) -> Iterator[Row]:
    """Kernels that a step launches: at some 10 us each on the host, they bound small networks."""
    if not setup.is_cuda:
        yield left_out("kernel launches", NEEDS_CUDA)
        return
    for model in MODELS:
        with warm_step(setup, model, HALF) as step:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                step()
            # Events of the device are kernels and copies; each was a call of the driver by the
            # host.
            kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
            shares = host_and_busy(step, ROUNDS, setup.device)
            yield row(model, launches=len(kernels), **shares)


@contextlib.contextmanager
def warm_step(setup: Setup, model: str, runtime: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """A training step of a network, after warming up."""
    config = step_config(setup, model, runtime)
    prepare_machine(config)
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        step = trainer_step(config, Path(folder), batch_size_of(setup))
        warm_up(step, 1 if setup.is_quick else WARMUP)
        yield step


def _measure(setup: Setup, name: str, step: Callable[[], None]) -> Row:
    if setup.is_cuda:
        # The peak of this variant, not of the warm-up of an earlier one.
        torch.cuda.reset_peak_memory_stats(setup.device)
    rounds = QUICK_ROUNDS if setup.is_quick else ROUNDS
    seconds = median_seconds(step, rounds, setup.device)
    if setup.is_cuda:
        peak = torch.cuda.max_memory_allocated(setup.device)
    else:
        peak = process_peak_bytes()
    return row(
        name,
        step_seconds=seconds,
        utterances_per_second=batch_size_of(setup) / seconds,
        peak_bytes=peak,
        **host_and_busy(step, rounds, setup.device),
    )


def median_seconds(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median seconds of a run, including the device's work."""
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def host_and_busy(run: Callable[[], Any], count: int, device: torch.device) -> dict[str, float]:
    """This thread's time for one of `count` runs in a row, and how busy the GPU was meanwhile (by
    NVML).
    """
    synchronize(device)
    with utilisation_monitor(device) as utilisation:
        begin = time.thread_time()
        for _ in range(count):
            run()
        # Read before the host waits for the device: if this is as long as the step, the GPU waits
        # for Python.
        host = time.thread_time() - begin
        synchronize(device)
    figures = {"host_seconds": host / count}
    if utilisation.mean is not None:
        figures["gpu_utilisation_percent"] = utilisation.mean
    return figures
