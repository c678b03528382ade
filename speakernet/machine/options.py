"""The options of the machine: device, ranks, and torch's switches. No torch is imported here."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from speakernet.options import Options, Processes, Share, Switch


class MachineOptions(Options):
    """Device, threads, memory and the switches of torch's libraries."""

    distributed: bool = False
    """Start one process per GPU of this machine, as torchrun would; with one GPU or none, a single process."""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port at which the processes of `distributed` or SLURM meet; 0: a free one, or derived from the SLURM job."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Transport of tensors between processes; auto: nccl between GPUs, gloo on CPUs."""
    distributed_timeout_seconds: Annotated[float, Ge(1.0), Le(1e6)] = 1800.0
    """Seconds that a process waits for the others; then the rank that hangs is named and the run ends."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What is divided among processes: ddp: the batch; fsdp: also weights and moments, for networks that do not fit."""
    sync_batch_norm: Switch = "auto"
    """Batch norm over the batch of all processes; auto: if a process has fewer than 32 crops, else each on its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one (CUDA or ROCm; mps is not supported)."""
    gpu_id: Annotated[int, Ge(0), Le(1023)] | None = None
    """Which GPU, counted from 0; empty: the first, or with several processes the one with the process's number."""
    deterministic: bool = False
    """Use only operations that give the same bits every time, on the same machine and versions."""
    threads: Processes | Literal["auto"] = "auto"
    """Threads within an operation; 0: torch's choice; auto: within quotas, and (not deterministic) fewer if faster."""
    interop_threads: Processes = 0
    """Threads between operations; 0: torch's choice."""
    tf32: bool = True
    """TensorFloat-32 for float32 convolutions (NVIDIA Ampere and later): faster, 10 bits of mantissa."""
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    """Let cuDNN time its algorithms; auto: on if crops have few lengths, unless deterministic."""
    attention: list[Literal["flash", "efficient", "math", "cudnn"]] = Field(default=[])
    """Attention kernels allowed on a GPU; empty: all."""
    keep_memory: bool = True
    """Linux: keep the memory of freed tensors for the next step; returning it can take longer than the arithmetic."""
    memory_fraction: Share = 0.0
    """Share of the GPU's memory that this process may use; 0: no limit."""
