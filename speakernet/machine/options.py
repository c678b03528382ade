"""The options of this room: which device, and how torch is set on this machine. No torch is imported here."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from speakernet.options import Options, Processes, Share


@dataclass(kw_only=True)
class MachineOptions(Options):
    """Device, threads, memory and the switches of torch's libraries."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one (of CUDA or ROCm; a Mac trains on its CPU, mps is not supported)."""
    gpu_id: Annotated[int, Ge(0), Le(1023)] | None = None
    """Which GPU, counted from 0; empty: the first (several processes: not yet)."""
    deterministic: bool = False
    """Only operations that give the same bits every time, on the same machine and versions."""
    threads: Processes | Literal["auto"] = "auto"
    """Threads inside one operation; 0: torch's choice; auto: within quotas, and (not deterministic) fewer if faster."""
    interop_threads: Processes = 0
    """Threads between operations; 0 leaves torch's choice."""
    tf32: bool = True
    """TensorFloat-32 for float32 convolutions (NVIDIA Ampere and later): faster, 10 bits of mantissa."""
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    """Let cuDNN time its algorithms; auto: on where crops have few lengths, unless deterministic."""
    attention: list[Literal["flash", "efficient", "math", "cudnn"]] = field(default_factory=list)
    """Attention kernels allowed on a GPU; empty allows all."""
    keep_memory: bool = True
    """Linux: keep the memory of freed tensors for the next step; giving it back can take longer than the arithmetic."""
    memory_fraction: Share = 0.0
    """Share of the GPU's memory this process may take; 0: no bound."""
