"""The device of a run: choosing it, waiting for it, measuring its load and power."""

import functools
import logging
from collections.abc import Callable

import torch

from speakernet import distributed
from speakernet.machine.facts import cpu_name, unusable_gpu, usable_cores
from speakernet.machine.memory import Monitor
from speakernet.machine.options import MachineOptions

logger = logging.getLogger(__name__)

UTILISATION_SECONDS = 0.25
"""Seconds between samples; NVML averages over 1/6 to 1 s."""


def choose_device(options: MachineOptions) -> torch.device:
    """The device selected by the options, made torch's current one and logged with the reason."""
    device = find_device(options)
    # Refused in one process too, or the mistake would show only when a second one joins.
    choose_backend(options, device)
    if device.type == "cpu":
        # Training on a CPU instead of a GPU takes days longer, so the reason is logged, with a
        # warning if the machine has a GPU.
        reason = "as configured"
        if options.device != "cpu":
            reason = "no GPU that torch can use"
            problem, advice = unusable_gpu()
            if problem:
                logger.warning(
                    "%s; this run uses the CPU, which is many times slower. To use the GPU: %s",
                    problem,
                    advice,
                )
        cores = f"{cpu_name()}, {usable_cores()} cores"
        logger.info("device: cpu (%s): %s, threads: %d", reason, cores, torch.get_num_threads())
        return device
    # Pinned memory, the profiler and libraries use the current GPU, which is the first by default.
    torch.cuda.set_device(device)
    logger.info("device: %s (%s)", device, torch.cuda.get_device_name(device))
    return device


def find_device(options: MachineOptions, local_rank: int | None = None) -> torch.device:
    """The device selected by the options, without logging or side effects."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cpu" or (options.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        problem, advice = unusable_gpu()
        problem = problem or "torch finds no GPU here"
        advice = advice or "use --runtime.device auto or cpu"
        raise ValueError(f"runtime.device is cuda, which needs a GPU: {problem}; {advice}")
    number = options.gpu_id
    if number is None:
        number = distributed.local_rank() if local_rank is None else local_rank
    if number >= count:
        if options.gpu_id is None:
            raise ValueError(
                f"local rank {number} (counted from 0) has no GPU: this machine has {count}, and "
                "each rank needs one; start fewer processes, or use --runtime.device cpu"
            )
        raise ValueError(
            f"runtime.gpu_id is {number}, but no GPU has this number ({count} found, numbered from "
            "0)"
        )
    return torch.device("cuda", number)


def choose_backend(options: MachineOptions, device: torch.device) -> str:
    """The backend of several processes for tensors of the device; objects always use gloo."""
    if options.backend == "nccl" and device.type != "cuda":
        raise ValueError(
            "runtime.backend is nccl, which needs GPUs, but this run uses the CPU; use gloo or auto"
        )
    return "gloo" if options.backend == "gloo" or device.type != "cuda" else "cpu:gloo,cuda:nccl"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def utilisation_monitor(device: torch.device) -> Monitor:
    """Samples a GPU's utilisation in percent while the block runs; no samples on a CPU or without
    NVML.
    """
    return _monitor(torch.cuda.utilization, device, "the utilisation of the GPU")


def power_monitor(device: torch.device) -> Monitor:
    """Samples a GPU's power draw in milliwatts while the block runs; no samples on a CPU or without
    NVML.
    """
    return _monitor(torch.cuda.power_draw, device, "the power of the GPU")


def _monitor(read: Callable[[torch.device], float], device: torch.device, what: str) -> Monitor:
    # `Monitor` tolerates errors: some containers lack NVML, and some GPUs do not report power.
    has_gpu = device.type == "cuda"
    sample = functools.partial(read, device) if has_gpu else None
    return Monitor(sample, what, sample_seconds=UTILISATION_SECONDS)
