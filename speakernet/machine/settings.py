"""How torch is set on this machine: each switch applied once, with the reason for its value.

Settings are process-wide, so the code that starts a run applies them.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from speakernet.machine.facts import usable_cores
from speakernet.machine.memory import huge_pages, keep_freed_memory, return_freed_memory
from speakernet.machine.options import MachineOptions
from speakernet.parallel import distributed

ATTENTION_SWITCHES = {
    "flash": "enable_flash_sdp",
    "efficient": "enable_mem_efficient_sdp",
    "math": "enable_math_sdp",
    "cudnn": "enable_cudnn_sdp",
}
MOST_THREADS_A_CORE = 4
NO_EFFECT = "no effect"


@dataclass(frozen=True)
class AppliedSetting:
    """One setting of torch: its name, what it is now, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.reason})"


def optimize_torch_settings(
    options: MachineOptions,
    device: torch.device | None = None,
    *,
    save_memory: bool = False,
    varies_lengths: bool = False,
) -> list[AppliedSetting]:
    """Set torch for speed, or for the same bits every time.

    Returns:
        Every setting that was applied, or asked for and without effect here, each with its reason.
    """
    deterministic = options.deterministic
    if deterministic:
        # cuBLAS reads it when its handle is made, that is before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Also if it is off: an earlier run of this process may have switched it on.
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    reason = "asked for" if deterministic else "the fastest kernels are used"
    applied = [AppliedSetting("deterministic", deterministic, reason)]
    applied += _set_threads(options.threads, options.interop_threads)
    if options.keep_memory or save_memory:
        applied.append(AppliedSetting("keep_memory", *(return_freed_memory() if save_memory else keep_freed_memory())))
        applied.append(AppliedSetting("huge_pages", *huge_pages()))
    if torch.cuda.is_available():
        return applied + _set_gpu(options, device, varies_lengths=varies_lengths)
    asked = {
        "attention": list(options.attention),
        "memory_fraction": options.memory_fraction,
        "cudnn_benchmark": options.cudnn_benchmark is True,
    }
    return applied + [AppliedSetting(name, NO_EFFECT, "there is no GPU") for name, value in asked.items() if value]


@contextlib.contextmanager
def many_shapes() -> Iterator[None]:
    """Inside, cuDNN times no algorithms: with a new shape in each batch it would time them every time."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _set_gpu(options: MachineOptions, device: torch.device | None, *, varies_lengths: bool) -> list[AppliedSetting]:
    attention, tf32, memory_fraction = options.attention, options.tf32, options.memory_fraction
    asked = options.cudnn_benchmark
    benchmark = not (options.deterministic or varies_lengths) if asked == "auto" else bool(asked)
    # Timing every algorithm of a convolution pays if its shapes come again, and picks by the clock, not by the bits.
    torch.backends.cudnn.benchmark = benchmark
    reason = "crops have many lengths" if varies_lengths and asked == "auto" else "asked for"
    reason = "crops have few lengths" if benchmark else reason
    applied = [AppliedSetting("cudnn_benchmark", benchmark, reason)]
    # Products of matrices and cuDNN's convolutions have a switch each. Products are what filters, phases, pooling and
    # heads are made of, forward and backward: there float32 is float32. A trunk's arithmetic is in its convolutions.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = tf32
    reason = "float32 convolutions with 10 bits of mantissa; products of matrices keep theirs"
    applied.append(AppliedSetting("tf32", tf32, reason if tf32 else "asked for"))
    if attention:
        for name, switch in ATTENTION_SWITCHES.items():
            getattr(torch.backends.cuda, switch)(name in attention)
        applied.append(AppliedSetting("attention", list(attention), "asked for"))
    if memory_fraction and device is not None and device.type != "cuda":
        applied.append(AppliedSetting("memory_fraction", NO_EFFECT, "this run is on the CPU"))
    elif memory_fraction:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
        applied.append(AppliedSetting("memory_fraction", memory_fraction, "asked for"))
    return applied


def _set_threads(threads: int | Literal["auto"], interop_threads: int) -> list[AppliedSetting]:
    applied = []
    cores = usable_cores()
    if threads == "auto":
        # torch counts the cores of the machine, or those of OMP_NUM_THREADS, but no quota.
        ranks = distributed.local_world_size()
        chosen = min(torch.get_num_threads(), max(1, cores // ranks))
        torch.set_num_threads(chosen)
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        applied.append(AppliedSetting("threads", chosen, f"auto, {cores} cores may be used{shared}"))
        threads = 0
    for name, number in (("threads", threads), ("interop_threads", interop_threads)):
        # Refused, not lowered: a few too many may be meant (and are called slow), thousands are a typing mistake.
        if not 0 <= number <= MOST_THREADS_A_CORE * cores:
            most = MOST_THREADS_A_CORE * cores
            raise ValueError(f"{name}: {number} on {cores} cores; expected 0 (torch's choice) to {most}")
    if threads:
        torch.set_num_threads(threads)
        reason = "asked for" if threads <= cores else f"asked for; slow, there are {cores} cores for them"
        applied.append(AppliedSetting("threads", threads, reason))
    if interop_threads:
        reason = "asked for"
        try:
            torch.set_num_interop_threads(interop_threads)
        except RuntimeError:
            reason = "torch takes it once, before its first parallel operation"
        applied.append(AppliedSetting("interop_threads", torch.get_num_interop_threads(), reason))
    return applied
