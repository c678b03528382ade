"""Part `roofline`: the shortest possible time of a step's operations as a share of the measured
time, and plain MFU.

The shortest time is the sum over operations of the larger of FLOP / peak and bytes / bandwidth. The
peak is measured with a matrix product, the bandwidth with a copy, both on the same device. Fused
kernels move fewer bytes than the operations they replace, so a share can exceed 1. float32
convolutions are compared with the peak of TensorFloat-32 if it is allowed; matrix products, which
may not use it, with that of float32. MFU is FLOP / seconds / the peak of the convolutions'
arithmetic.
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
    VARIANTS,
    median_seconds,
    warm_step,
)
from speakernet.assembly.benchmark import arithmetic_of, peak_flops
from speakernet.assembly.training import prepare_machine

QUICK_PRODUCT_SIZE = 384
COPY_BYTES = 1 << 30
QUICK_COPY_BYTES = 1 << 23
PRODUCTS_AT_ONCE = 10
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ARITHMETICS = ("float32", "tf32", "bf16", "fp16")
# They only allocate memory.
WITHOUT_BYTES = ("aten.empty", "aten.new_empty", "aten.detach", "aten.resize_")


@dataclass(frozen=True)
class Operation:
    """The work of one operation."""

    name: str
    flop: float
    num_bytes: int
    arithmetic: str
    """float32, tf32, bf16 or fp16."""


@dataclass
class OperationCounter(TorchDispatchMode):
    """Records FLOP and bytes of every operation inside, backward included; views cost nothing."""

    operations: list[Operation] = field(default_factory=list)
    float32_convolutions: str = "float32"
    """Arithmetic of float32 convolutions: float32 or tf32."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its work."""
        output = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._record(func, args, kwargs or {}, inputs, results, output)
        return output

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
        output: Any,
    ) -> None:
        is_in_place = func._schema.is_mutable
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = bool(results) and all(
            tensor.untyped_storage().data_ptr() in storages for tensor in results
        )
        name = str(func)
        if (is_view and not is_in_place) or name.startswith(WITHOUT_BYTES):
            return
        count = flop_registry.get(func._overloadpacket)
        flop = float(count(*args, **kwargs, out_val=output)) if count else 0.0
        # A tensor changed in place is read and written, even if it is not among the results.
        written = results or (inputs if is_in_place else [])
        moved = sum(map(_bytes, inputs)) + sum(map(_bytes, written))
        dtype = next((one.dtype for one in results if one.is_floating_point()), torch.float32)
        default = self.float32_convolutions if "conv" in name else "float32"
        self.operations.append(Operation(name, flop, moved, NAMES.get(dtype, default)))


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor has fewer bytes than elements.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def least_seconds(
    operations: list[Operation], peaks: Mapping[str, float], bytes_per_second: float
) -> float:
    """Shortest time of the operations on a device with these peaks (FLOP/s) and this bandwidth."""
    return sum(
        max(one.flop / peaks[one.arithmetic], one.num_bytes / bytes_per_second)
        for one in operations
    )


def roofline(setup: Setup) -> Iterator[Row]:
    """Peaks and bandwidth of the device, and the share of the roofline that a step of each network
    reaches.
    """
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
    variants = (
        ("bf16, channels_last",) if setup.is_quick else ("eager", "bf16, channels_last", "all")
    )
    for model in QUICK_MODELS if setup.is_quick else MODELS:
        for variant in variants:
            runtime = VARIANTS[variant]
            if "compile_mode" in runtime and not setup.is_cuda:
                yield left_out(f"{model}, {variant}", NEEDS_CUDA)
                continue
            arithmetic = arithmetic_of(runtime["precision"], setup.device)
            operations = _operations(setup, model, runtime)
            least = least_seconds(operations, peaks, bandwidth)
            flop = sum(one.flop for one in operations)
            seconds = _step_seconds(setup, model, runtime)
            figures = {
                "least_seconds": least,
                "step_seconds": seconds,
                "roofline_share": least / seconds,
            }
            more: Row = {
                "step_flop": flop,
                "arithmetic": arithmetic,
                "mfu": flop / seconds / peaks[arithmetic],
            }
            yield row(f"{model}, {variant}", **figures, **more)


def _bandwidth(setup: Setup) -> float:
    num_bytes = QUICK_COPY_BYTES if setup.is_quick else COPY_BYTES
    source, target = (
        torch.zeros(num_bytes, dtype=torch.uint8, device=setup.device) for _ in range(2)
    )

    def run() -> None:
        for _ in range(PRODUCTS_AT_ONCE):
            target.copy_(source)

    run()
    # Every byte is read and written.
    return PRODUCTS_AT_ONCE * 2 * num_bytes / median_seconds(run, 3 if setup.is_quick else ROUNDS)


def _operations(setup: Setup, model: str, runtime: Mapping[str, Any]) -> list[Operation]:
    # Compiled code hides its operations, so the same step is counted uncompiled.
    uncompiled = {**runtime, "compile": "off", "compile_mode": "default"}
    counter = OperationCounter(float32_convolutions=arithmetic_of("no", setup.device))
    with warm_step(setup, model, uncompiled) as step, counter:
        step()
    return counter.operations


def _step_seconds(setup: Setup, model: str, runtime: Mapping[str, Any]) -> float:
    with warm_step(setup, model, runtime) as step:
        seconds = median_seconds(step, 3 if setup.is_quick else ROUNDS)
    torch.compiler.reset()
    return seconds
