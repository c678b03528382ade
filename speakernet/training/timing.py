"""How fast batches arrive, steps run and the device multiplies, measured as `speakernet benchmark`
reports it.
"""

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from speakernet.files import human_bytes
from speakernet.machine.device import power_monitor, synchronize, utilisation_monitor

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
TIMED_ROUNDS = 3


def time_batches(
    batches: Iterator[Any], num_batches: int, size_of: Callable[[Any], int], device: torch.device
) -> dict[str, float]:
    """Fetch batches as fast as they come, and return how long they take to arrive."""
    # Each arrival is timed, because a mean hides stalls: one slow batch in ten shows in the 95th
    # percentile, a single one in the maximum.
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
    # Compilation comes in waves: a first version, one for another shape, the recording of a CUDA
    # graph. So the warm-up ends after steps without any, not after a fixed number.
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
    # Large square products are the best case; the convolutions of a step reach less.
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        seconds = []
        # The first round is a warm-up and does not count. Of the others the fastest does, because a
        # peak excludes whatever else the machine is doing.
        for _ in range(1 + TIMED_ROUNDS):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(NUM_PRODUCTS):
                left @ right
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_float32_matmul_precision(before)
    return NUM_PRODUCTS * 2 * size**3 / min(seconds[1:])


def count_flop(run_step: Callable[[], object]) -> int:
    """Floating-point operations of a step's products and convolutions, forward and backward,
    counted in eager mode.
    """
    # In eager mode, because the counter does not see into compiled kernels.
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        run_step()
    return int(counter.get_total_flops())


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `speakernet benchmark` as a Markdown table."""
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
