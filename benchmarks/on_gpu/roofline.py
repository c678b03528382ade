"""Part `roofline`: the shortest possible time of a step's operations, as a share of the measured
time, and plain MFU.

The shortest time is the sum over operations of the larger of FLOP / peak and bytes / bandwidth.
Peaks are measured with matrix products, the bandwidth with a copy, both on the same device. Fused
kernels move fewer bytes than the operations they replace, so a share can exceed 1. MFU is FLOP /
seconds / the peak of the convolutions' arithmetic.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.on_gpu.record import NEEDS_CUDA, Row, Setup, left_out, row
from benchmarks.on_gpu.step_costs import (
    HALF,
    MODELS,
    PLAIN,
    QUICK_MODELS,
    QUICK_ROUNDS,
    ROUNDS,
    median_seconds,
    warm_step,
)
from speakernet.assembly.training import prepare_machine
from speakernet.training.timing import arithmetic_of, peak_flops

QUICK_PRODUCT_SIZE = 384
COPY_BYTES = 1 << 30
QUICK_COPY_BYTES = 1 << 23
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# They only allocate memory.
WITHOUT_BYTES = ("aten.empty", "aten.new_empty", "aten.detach", "aten.resize_")
VARIANTS = {"eager": PLAIN, "bf16, channels_last": HALF}


class Operation(NamedTuple):
    """The work of one operation."""

    flop: float
    num_bytes: int
    arithmetic: str
    """float32, tf32, bf16 or fp16."""


# The mode sees what torch passes to its kernels, after autograd and autocast, so forward and
# backward passes are counted alike. Kernels of compiled code bypass it, so only eager steps are
# counted.
class OperationCounter(TorchDispatchMode):
    """Records FLOP and bytes of every operation inside, backward included; views cost nothing."""

    def __init__(self, float32_convolutions: str = "float32") -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.float32_convolutions = float32_convolutions
        """Arithmetic of float32 convolutions: float32 or tf32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its work."""
        output = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        results = tensors_in(output)
        is_in_place = func._schema.is_mutable
        # A result in the memory of an input is a view and costs nothing, unless the operation has
        # written there.
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_new = any(tensor.untyped_storage().data_ptr() not in storages for tensor in results)
        does_work = is_new or is_in_place or not results
        if does_work and not str(func).startswith(WITHOUT_BYTES):
            # torch's own formulas for products and convolutions. Everything else counts no FLOP,
            # since its time is that of moving its bytes.
            count = flop_registry.get(func._overloadpacket)
            flop = float(count(*args, **(kwargs or {}), out_val=output)) if count else 0.0
            # A tensor changed in place is read and written, even if it is not among the results.
            written = results or (inputs if is_in_place else [])
            num_bytes = sum(bytes_of(tensor) for tensor in inputs + written)
            self.operations.append(Operation(flop, num_bytes, self._arithmetic(func, results)))
        return output

    def _arithmetic(self, func: Any, results: list[torch.Tensor]) -> str:
        for tensor in results:
            if tensor.dtype in NAMES:
                return NAMES[tensor.dtype]
        # By default torch allows TF32 in convolutions, but not in products.
        return self.float32_convolutions if "conv" in str(func) else "float32"


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor moves; an expanded one has fewer than its elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def least_seconds(
    operations: list[Operation], peaks: Mapping[str, float], bytes_per_second: float
) -> float:
    """Shortest time of the operations on a device with these peaks (FLOP/s) and this bandwidth."""
    seconds = 0.0
    for operation in operations:
        computing = operation.flop / peaks[operation.arithmetic]
        # Either the arithmetic or the memory is the bottleneck of an operation. As operations run
        # one after the other, the shortest time of a step is the sum, not the larger of two totals.
        seconds += max(computing, operation.num_bytes / bytes_per_second)
    return seconds


def roofline(setup: Setup) -> Iterator[Row]:
    """Peaks and bandwidth of the device, and the share of the roofline that steps reach."""
    prepare_machine(setup.config())
    rounds = QUICK_ROUNDS if setup.is_quick else ROUNDS
    peaks: dict[str, float] = {}
    for arithmetic in ("float32", "tf32", "bf16", "fp16"):
        if arithmetic in ("tf32", "fp16") and not setup.is_cuda:
            yield left_out(f"peak of {arithmetic}", NEEDS_CUDA)
            continue
        size = QUICK_PRODUCT_SIZE if setup.is_quick else 0
        peaks[arithmetic] = peak_flops(setup.device, arithmetic, size)
        yield row(f"peak of {arithmetic}", peak_flops=peaks[arithmetic])
    num_bytes = QUICK_COPY_BYTES if setup.is_quick else COPY_BYTES
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setup.device)
    target = torch.zeros_like(source)
    # Every byte is read and written.
    bandwidth = 2 * num_bytes / median_seconds(lambda: target.copy_(source), rounds, setup.device)
    yield row("bandwidth of a copy", bytes_per_second=bandwidth)
    for model in QUICK_MODELS if setup.is_quick else MODELS:
        for name, runtime in VARIANTS.items():
            counter = OperationCounter(arithmetic_of("no", setup.device))
            with warm_step(setup, model, runtime) as step:
                seconds = median_seconds(step, rounds, setup.device)
                with counter:
                    step()
            least = least_seconds(counter.operations, peaks, bandwidth)
            flop = sum(operation.flop for operation in counter.operations)
            # For comparison with other papers and tools, which divide by the peak of the step's
            # main arithmetic.
            peak = peaks[arithmetic_of(str(runtime["precision"]), setup.device)]
            yield row(
                f"{model}, {name}",
                step_seconds=seconds,
                least_seconds=least,
                roofline_share=least / seconds,
                mfu=flop / seconds / peak,
            )
