"""Part `roofline`: the least time that the operations of a step could take, as a share of what it takes, and plain MFU.

Least is the sum over operations of the larger of FLOP / peak and bytes / bandwidth; peak and bandwidth are those of a
product of matrices and of a copy, measured on the same device. Fused kernels move fewer bytes than the operations that
they stand for, so a share may in theory pass 1. Convolutions of float32 are held against the peak of TensorFloat-32 if
they may use it, products of matrices, which may not, against that of float32. MFU is FLOP / seconds / the peak of the
convolutions' arithmetic.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.on_gpu.record import NEEDS_CUDA, Row, Setup, left_out, row
from benchmarks.on_gpu.step_costs import (
    MODELS,
    QUICK_MODELS,
    ROUNDS,
    WAYS,
    median_seconds,
    warm_step,
)
from speakernet.assembly.benchmark import arithmetic_of, peak_flops
from speakernet.assembly.training import prepare_machine

QUICK_PRODUCT_SIZE = 384
COPY_BYTES, QUICK_COPY_BYTES = 1 << 30, 1 << 23
PRODUCTS_AT_ONCE = 10
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ARITHMETICS = ("float32", "tf32", "bf16", "fp16")
# They give memory out and move nothing.
WITHOUT_BYTES = ("aten.empty", "aten.new_empty", "aten.detach", "aten.resize_")


@dataclass(frozen=True)
class Operation:
    """What one operation needs at least."""

    name: str
    flop: float
    num_bytes: int
    arithmetic: str
    """float32, tf32, bf16 or fp16."""


@dataclass
class OperationCounter(TorchDispatchMode):
    """Notes FLOP and bytes of every operation inside, backward included; views cost nothing."""

    operations: list[Operation] = field(default_factory=list)
    float32_convolutions: str = "float32"
    """What they are computed in: float32 or tf32."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it needs."""
        made = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self._note(func, args, kwargs or {}, given, results, made)
        return made

    def _note(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor], made: Any
    ) -> None:
        is_changing = func._schema.is_mutable
        known = {one.untyped_storage().data_ptr() for one in given}
        is_view = bool(results) and all(one.untyped_storage().data_ptr() in known for one in results)
        name = str(func)
        if (is_view and not is_changing) or name.startswith(WITHOUT_BYTES):
            return
        count = flop_registry.get(func._overloadpacket)
        flop = float(count(*args, **kwargs, out_val=made)) if count else 0.0
        # What is changed in place is read and written, also where it is not among the results.
        written = results or (given if is_changing else [])
        moved = sum(map(_bytes, given)) + sum(map(_bytes, written))
        dtype = next((one.dtype for one in results if one.is_floating_point()), torch.float32)
        of_float32 = self.float32_convolutions if "conv" in name else "float32"
        self.operations.append(Operation(name, flop, moved, NAMES.get(dtype, of_float32)))


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor has fewer bytes than elements.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def least_seconds(operations: list[Operation], peaks: Mapping[str, float], bytes_per_second: float) -> float:
    """What the operations take at least on a device of these peaks (FLOP/s) and this bandwidth."""
    return sum(max(one.flop / peaks[one.arithmetic], one.num_bytes / bytes_per_second) for one in operations)


def roofline(setup: Setup) -> Iterator[Row]:
    """Peaks and bandwidth of the device, and the share of the roofline that a step of each network reaches."""
    prepare_machine(setup.config())
    peaks: dict[str, float] = {}
    for name in ARITHMETICS:
        if name in ("tf32", "fp16") and not setup.is_cuda:
            yield left_out(f"peak of {name}", NEEDS_CUDA)
            continue
        peaks[name] = peak_flops(setup.device, name, QUICK_PRODUCT_SIZE if setup.is_quick else 0)
        yield row(f"peak of {name}", dtype=name, peak_flops=peaks[name])
    bandwidth = _bandwidth(setup)
    yield row("bandwidth of a copy", bytes_per_second=bandwidth)
    ways = ("bf16, channels_last",) if setup.is_quick else ("eager", "bf16, channels_last", "all")
    for model in QUICK_MODELS if setup.is_quick else MODELS:
        # Counted in the way that has the same operations, uncompiled: compiled ones cannot be seen.
        for way in ways:
            runtime = WAYS[way]
            if "compile_mode" in runtime and not setup.is_cuda:
                yield left_out(f"{model}, {way}", NEEDS_CUDA)
                continue
            arithmetic = arithmetic_of(runtime["precision"], setup.device)
            operations = _operations(setup, model, runtime)
            least, flop = least_seconds(operations, peaks, bandwidth), sum(one.flop for one in operations)
            seconds = _step_seconds(setup, model, runtime)
            figures = {"least_seconds": least, "step_seconds": seconds, "roofline_share": least / seconds}
            more: Row = {"step_flop": flop, "arithmetic": arithmetic, "mfu": flop / seconds / peaks[arithmetic]}
            yield row(f"{model}, {way}", **figures, **more)


def _bandwidth(setup: Setup) -> float:
    num_bytes = QUICK_COPY_BYTES if setup.is_quick else COPY_BYTES
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=setup.device) for _ in range(2))

    def run() -> None:
        for _ in range(PRODUCTS_AT_ONCE):
            target.copy_(source)

    run()
    # Read and written.
    return PRODUCTS_AT_ONCE * 2 * num_bytes / median_seconds(run, 3 if setup.is_quick else ROUNDS)


def _operations(setup: Setup, model: str, runtime: Mapping[str, Any]) -> list[Operation]:
    # What compiled code does cannot be seen.
    seen = {**runtime, "compile": "off", "compile_mode": "default"}
    counter = OperationCounter(float32_convolutions=arithmetic_of("no", setup.device))
    with warm_step(setup, model, seen) as step, counter:
        step()
    return counter.operations


def _step_seconds(setup: Setup, model: str, runtime: Mapping[str, Any]) -> float:
    with warm_step(setup, model, runtime) as step:
        seconds = median_seconds(step, 3 if setup.is_quick else ROUNDS)
    torch.compiler.reset()
    return seconds
