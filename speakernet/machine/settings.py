"""Applies torch's settings for this machine, and seeds the global generators.

They are process-wide, so the code that starts a run applies them.
"""

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from speakernet import distributed
from speakernet.machine.facts import usable_cores
from speakernet.machine.memory import bound_compiled_shapes, huge_pages, keep_freed_memory
from speakernet.machine.options import MachineOptions

logger = logging.getLogger(__name__)

MAX_THREADS_PER_CORE = 4


def optimize_torch_settings(
    options: MachineOptions,
    device: torch.device | None = None,
    *,
    save_memory: bool = False,
    varies_lengths: bool = False,
) -> dict[str, Any]:
    """Configure torch for speed or for bitwise reproducibility; warns of options that have no
    effect here.

    Returns:
        Every applied setting by name.
    """
    deterministic = options.deterministic
    if deterministic:
        # cuBLAS reads this variable when it creates its handle, before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Also off again after an earlier run in this process. Otherwise not called: it imports torch's
    # compiler, which takes seconds.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    _set_threads(options)
    applied: dict[str, Any] = {
        "deterministic": deterministic,
        "threads": torch.get_num_threads(),
    }
    if options.keep_memory or save_memory:
        applied["keep_memory"] = keep_freed_memory(keeps=not save_memory) and not save_memory
        applied["huge_pages"] = huge_pages()
    has_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    if has_gpu:
        applied |= _set_gpu(options, varies_lengths=varies_lengths)
    elif options.cudnn_benchmark is True:
        logger.warning("runtime.cudnn_benchmark has no effect: this run uses the CPU")
    return applied


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (dropout and weight initialisation use
    torch's).
    """
    random.seed(seed)
    # NumPy's global generator accepts 32 bits only.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _set_threads(options: MachineOptions) -> None:
    cores = usable_cores()
    # torch counts the machine's cores or OMP_NUM_THREADS, but ignores quotas.
    if options.threads == "auto":
        share = max(1, cores // distributed.local_world_size())
        threads = min(torch.get_num_threads(), share)
    else:
        threads = options.threads
    most = MAX_THREADS_PER_CORE * cores
    # Refused, not lowered: a few too many may be intended, thousands are a typo.
    if threads > most:
        raise ValueError(
            f"runtime.threads is {threads} on {cores} cores; expected 0 (torch's choice) to {most}"
        )
    if threads > cores:
        logger.warning(
            "runtime.threads is %d, which is slow: only %d cores are available", threads, cores
        )
    if threads:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def many_shapes() -> Iterator[None]:
    """Stop cuDNN from timing its algorithms in the block, because it would time them again for
    every new shape.

    On a CPU, what is kept for each shape is limited, if nothing was computed before.
    """
    bound_compiled_shapes()
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _set_gpu(options: MachineOptions, *, varies_lengths: bool) -> dict[str, Any]:
    benchmark = options.cudnn_benchmark
    if benchmark == "auto":
        # Timing every algorithm of a convolution pays off if shapes repeat, but the choice varies
        # from run to run.
        benchmark = not (options.deterministic or varies_lengths)
    torch.backends.cudnn.benchmark = benchmark
    # Matrix products and cuDNN's convolutions have separate switches. Filters, phases, pooling and
    # heads are matrix products, forward and backward, and keep full float32; a trunk's arithmetic
    # is in its convolutions.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = options.tf32
    return {"cudnn_benchmark": benchmark, "tf32": options.tf32}
