"""Facts about this machine for the log, the results and the doctor: versions, processor, memory, GPUs."""

import functools
import importlib.metadata
import logging
import platform
from pathlib import Path
from typing import Any

import speakernet
from speakernet.files import human_bytes
from speakernet.machine.limits import total_memory_bytes, usable_cores
from speakernet.machine.measuring import measuring

logger = logging.getLogger(__name__)

TORCH_PAIR = "pip install 'torch>=2.9,<2.15' 'torchaudio>=2.9,<2.12'"
"""Brings a torch and a torchaudio that belong together; the bounds of setup.py."""
PACKAGES = ("torch", "torchaudio", "numpy", "scipy", "soundfile")


def system_info() -> dict[str, Any]:
    """Versions, processor, memory and GPUs as plain values, as `results.json` and the report keep them."""
    info: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        # Ours from the code that runs: what an editable install says is of the day it was made.
        "versions": {"speakernet": speakernet.__version__, **{name: version_of(name) for name in PACKAGES}},
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "gpus": [],
    }
    with measuring("memory of the machine"):
        info["memory_bytes"] = total_memory_bytes()
    with measuring("name and memory of the GPUs"):
        info |= gpu_facts()
    return info


def log_system_info() -> dict[str, Any]:
    """Write the machine's facts to the log, as details, and return them."""
    info = system_info()
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items() if version)
    names = ", ".join(f"{gpu['name']} ({human_bytes(gpu['memory_bytes'])})" for gpu in info["gpus"]) or "no GPU"
    logger.debug("python %s, %s", info["python"], versions)
    memory = human_bytes(info["memory_bytes"]) if "memory_bytes" in info else "an unknown amount"
    logger.debug("%s, %d cores, %s of memory; %s", info["cpu"], info["cpu_cores"], memory, names)
    return info


def version_of(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    # Not `__version__`: a torchaudio that does not fit its torch takes the process down when it is imported.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_facts() -> dict[str, Any]:
    """`gpus`, name and memory of each one that torch can use, `cuda`, its version, and `tf32`; empty without one."""
    # Late: the doctor's --help and the facts above need no torch.
    import torch

    if not torch.cuda.is_available():
        return {}
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    # CUDA is the one that torch was built with; the driver's own may be newer.
    return {
        "cuda": torch.version.cuda,
        "tf32": bool(torch.backends.cudnn.allow_tf32),
        "gpus": [{"name": one.name, "memory_bytes": int(one.total_memory)} for one in found],
    }


def cpu_name() -> str:
    """The processor's name as its maker writes it, where the system tells; else its family."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The processor's instruction-set flags as Linux names them; empty on other systems."""
    facts = _cpu_facts()
    # x86 calls them flags, Arm features.
    return frozenset((facts.get("flags") or facts.get("Features", "")).split())


@functools.cache
def _cpu_facts() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first core; the others are alike."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts
