"""The options of `speakernet.machine.limits`: how torch is set on this machine. No torch is imported here."""

from dataclasses import dataclass, field
from typing import Literal

from speakernet.options import Options, Processes, Share


@dataclass(kw_only=True)
class MachineOptions(Options):
    """Threads, memory and the switches of torch's libraries."""

    deterministic: bool = False
    """Only operations that give the same bits every time, on the same machine and versions."""
    threads: Processes | Literal["auto"] = "auto"
    """Threads inside one operation; 0: torch's choice; auto: within quotas, and (not deterministic) fewer if faster."""
    interop_threads: Processes = 0
    """Threads between operations; 0 leaves torch's choice."""
    tf32: bool = True
    """TensorFloat-32 for float32 products (NVIDIA Ampere and later): faster, 10 bits of mantissa."""
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    """Let cuDNN time its algorithms; auto: on unless deterministic (crops have few lengths, so it pays)."""
    attention: list[Literal["flash", "efficient", "math", "cudnn"]] = field(default_factory=list)
    """Attention kernels allowed on a GPU; empty allows all."""
    keep_memory: bool = True
    """Linux: keep the memory of freed tensors for the next step; giving it back can take longer than the arithmetic."""
    memory_fraction: Share = 0.0
    """Share of the GPU's memory this process may take; 0: no bound."""
