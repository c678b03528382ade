"""An NVIDIA GPU that the machine shows and torch cannot use: its driver, what this torch wants, what would help."""

import os
import re
import shutil
import subprocess
from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")
ASKING_SECONDS = 30
LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver that runs it.

Source: NVIDIA, CUDA Compatibility, section Minor Version Compatibility, table 1.
"""
OLDER_CUDA = 12
FOR_OLDER_CUDA = "pip install 'torch>=2.9,<2.11' 'torchaudio>=2.9,<2.11'"
"""Within the bounds of setup.py: pip's builds of torch 2.9 and 2.10 for Linux are for CUDA 12.8, since 2.11 for 13."""


def driver_version() -> str:
    """The version of the NVIDIA driver, as its kernel module or `nvidia-smi` tells it; empty where there is none."""
    try:
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", VERSION_FILE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return found[1] if found else _asked_version()


def _asked_version() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=ASKING_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.match(r"\d+(?:\.\d+)+", outcome.stdout.strip())
    return found[0] if outcome.returncode == 0 and found else ""


def unusable_gpu() -> tuple[str, str]:
    """What is wrong and what to do, where torch has no GPU and the machine shows one; two empty texts elsewhere."""
    # Late: the doctor's --help needs no torch.
    import torch

    # Set to nothing or to -1 it hides all GPUs, which somebody has asked for.
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if is_hidden or torch.cuda.is_available() or not (driver := driver_version()):
        return "", ""
    wanted, name = torch.version.cuda, f"torch {torch.__version__}"
    if not wanted:
        return (
            f"there is an NVIDIA driver ({driver}), but {name} is built without CUDA",
            f"install a build with CUDA; for drivers from {LEAST_DRIVERS[OLDER_CUDA]} on: {FOR_OLDER_CUDA}",
        )
    found = f"there is an NVIDIA driver ({driver}), but {name}, built for CUDA {wanted}, can use no GPU"
    least = LEAST_DRIVERS.get(int(wanted.split(".")[0]), 0)
    number = int(driver.split(".")[0])
    if number >= least:
        return (
            found,
            "the driver is new enough: in a container the GPUs have to be handed in (docker run --gpus all), and "
            "nvidia-smi has to show one",
        )
    found += f": that takes driver {least} or later"
    if number >= LEAST_DRIVERS[OLDER_CUDA]:
        return found, f"update the driver, or install a torch for CUDA {OLDER_CUDA}: {FOR_OLDER_CUDA}"
    return found, "update the driver: no torch that speakernet runs with works with this one"
