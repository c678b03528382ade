"""What this machine is and how torch is set on it: facts for the log and the results, settings with their reasons.

Knows nothing of models or data. Settings are process-wide, so they are applied once, by whoever starts the run.
"""

import contextlib
import functools
import importlib.metadata
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import psutil
import torch

from speakernet.files import human_bytes
from speakernet.machine.allocation import huge_pages, keep_freed_memory, return_freed_memory
from speakernet.machine.limits import total_memory_bytes, usable_cores
from speakernet.machine.measuring import measuring
from speakernet.machine.options import MachineOptions

logger = logging.getLogger(__name__)

PACKAGES = ("speakernet", "torch", "torchaudio", "numpy", "scipy", "soundfile")
ATTENTION_SWITCHES = {
    "flash": "enable_flash_sdp",
    "efficient": "enable_mem_efficient_sdp",
    "math": "enable_math_sdp",
    "cudnn": "enable_cudnn_sdp",
}
SAMPLE_SECONDS = 0.01
MOST_THREADS_A_CORE = 4

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class AppliedSetting:
    """One setting of torch: its name, what it is now, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.reason})"


def system_info() -> dict[str, Any]:
    """Versions, processor, memory and GPUs as plain values, as `results.json` and the report keep them."""
    info: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu_name(),
        "cpu_cores": usable_cores(),
        "gpus": [],
    }
    with measuring("memory of the machine"):
        info["memory_bytes"] = total_memory_bytes()
    with measuring("name and memory of the GPUs"):
        if torch.cuda.is_available():
            info["cuda"] = torch.version.cuda
            info["gpus"] = [
                {"name": properties.name, "memory_bytes": int(properties.total_memory)}
                for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            ]
    return info


def log_system_info() -> dict[str, Any]:
    """Write the machine's facts to the log in two lines and return them."""
    info = system_info()
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items() if version)
    gpus = ", ".join(f"{gpu['name']} ({human_bytes(gpu['memory_bytes'])})" for gpu in info["gpus"]) or "no GPU"
    logger.info("python %s, %s", info["python"], versions)
    memory = human_bytes(info["memory_bytes"]) if "memory_bytes" in info else "an unknown amount"
    logger.info("%s, %d cores, %s of memory; %s", info["cpu"], info["cpu_cores"], memory, gpus)
    return info


def performance_info() -> dict[str, Any]:
    """How torch is set at this moment, as plain values."""
    info = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    with measuring("memory of the process"):
        info["process_memory_bytes"] = process_memory_bytes()
    return info


def log_performance_info() -> dict[str, Any]:
    """Write torch's settings to the log in one line and return them."""
    info = performance_info()
    shown = {name: human_bytes(value) if name.endswith("_bytes") else value for name, value in info.items()}
    logger.info("torch: %s", ", ".join(f"{name} {value}" for name, value in shown.items()))
    return info


def optimize_torch_settings(
    options: MachineOptions, device: torch.device | None = None, *, save_memory: bool = False
) -> list[AppliedSetting]:
    """Set torch for speed, or for the same bits every time, and say what was applied and why.

    Args:
        options: what is asked for.
        device: of the run, which the bound of its memory is for; None: torch's current GPU.
        save_memory: the contrary of `keep_memory`, whatever that says: give every large tensor back when it is freed.

    Returns:
        Every setting that was applied, or asked for and without effect here, each with its reason.

    Raises:
        ValueError: threads far beyond the cores.
    """
    applied = [_set_determinism(options.deterministic), *_set_threads(options.threads, options.interop_threads)]
    if options.keep_memory or save_memory:
        applied.append(AppliedSetting("keep_memory", *(return_freed_memory() if save_memory else keep_freed_memory())))
        applied.append(AppliedSetting("huge_pages", *huge_pages()))
    if torch.cuda.is_available():
        return applied + _set_gpu(options, device)
    asked = {
        "attention": list(options.attention),
        "memory_fraction": options.memory_fraction,
        "cudnn_benchmark": options.cudnn_benchmark is True,
    }
    return applied + [AppliedSetting(name, "no effect", "there is no GPU") for name, value in asked.items() if value]


def process_memory_bytes() -> int:
    """Memory of this process in RAM now (resident set size)."""
    return int(psutil.Process().memory_info().rss)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Log how long the block took.

    >>> with timed("adding"):
    ...     total = 1 + 1
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        logger.info("%s took %.2f s", name, time.perf_counter() - start)


def log_time(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: log how long each call took, by the function's name."""

    @functools.wraps(function)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> R:
        with timed(function.__qualname__):
            return function(*arguments, **options)

    return wrapper


class MemoryMonitor:
    """Samples this process's memory in a thread while the block runs.

    Attributes:
        start_bytes: resident memory at the beginning.
        peak_bytes: the most that was seen.
    """

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS, read: Callable[[], int] = process_memory_bytes) -> None:
        self._sample_seconds = sample_seconds
        self._read = read
        self._stop = threading.Event()
        self.start_bytes = self.peak_bytes = 0

    def __enter__(self) -> "MemoryMonitor":
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start_bytes = self.peak_bytes = 0
        self._sample()
        self.start_bytes = self.peak_bytes
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    @property
    def added_bytes(self) -> int:
        """How much the peak lies above the beginning."""
        return self.peak_bytes - self.start_bytes

    def _watch(self) -> None:
        while not self._stop.wait(self._sample_seconds):
            self._sample()

    def _sample(self) -> None:
        with measuring("memory of the process"):
            self.peak_bytes = max(self.peak_bytes, self._read())


def _set_determinism(deterministic: bool) -> AppliedSetting:
    if deterministic:
        # cuBLAS reads it when its handle is made, that is before the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    return AppliedSetting(
        "deterministic", deterministic, "asked for" if deterministic else "the fastest kernels are used"
    )


def _set_gpu(options: MachineOptions, device: torch.device | None) -> list[AppliedSetting]:
    attention, tf32, memory_fraction = options.attention, options.tf32, options.memory_fraction
    wanted = options.cudnn_benchmark
    benchmark = not options.deterministic if wanted == "auto" else bool(wanted)
    torch.backends.cudnn.benchmark = benchmark
    applied = [AppliedSetting("cudnn_benchmark", benchmark, "crops have few lengths" if benchmark else "asked for")]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    applied.append(AppliedSetting("tf32", tf32, "float32 products with 10 bits of mantissa" if tf32 else "asked for"))
    if attention:
        for name, switch in ATTENTION_SWITCHES.items():
            getattr(torch.backends.cuda, switch)(name in attention)
        applied.append(AppliedSetting("attention", list(attention), "asked for"))
    if memory_fraction and device is not None and device.type != "cuda":
        applied.append(AppliedSetting("memory_fraction", "no effect", "this run is on the CPU"))
    elif memory_fraction:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
        applied.append(AppliedSetting("memory_fraction", memory_fraction, "asked for"))
    return applied


def _set_threads(threads: int | Literal["auto"], interop_threads: int) -> list[AppliedSetting]:
    applied = []
    cores = usable_cores()
    if threads == "auto":
        # torch counts the cores of the machine, or those of OMP_NUM_THREADS, but no quota.
        chosen = min(torch.get_num_threads(), cores)
        torch.set_num_threads(chosen)
        applied.append(AppliedSetting("threads", chosen, f"auto, {cores} cores may be used"))
        threads = 0
    for name, number in (("threads", threads), ("interop_threads", interop_threads)):
        if not 0 <= number <= MOST_THREADS_A_CORE * cores:
            raise ValueError(
                f"{name}: {number} on {cores} cores; expected 0 (torch's choice) to {MOST_THREADS_A_CORE * cores}"
            )
    if threads:
        torch.set_num_threads(threads)
        reason = "asked for" if threads <= cores else f"asked for; slow, there are {cores} cores for them"
        applied.append(AppliedSetting("threads", threads, reason))
    if interop_threads:
        try:
            torch.set_num_interop_threads(interop_threads)
            applied.append(AppliedSetting("interop_threads", interop_threads, "asked for"))
        except RuntimeError:
            now = torch.get_num_interop_threads()
            applied.append(
                AppliedSetting("interop_threads", now, "torch takes it once, before its first parallel operation")
            )
    return applied


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
