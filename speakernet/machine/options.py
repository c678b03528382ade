"""The options of the machine: device, ranks, and torch's switches. No torch is imported here."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from speakernet.options import Options, Processes, Switch


class MachineOptions(Options):
    """Device, threads, memory and the switches of torch's libraries."""

    distributed: bool = False
    """Start one process per GPU of this machine, as torchrun would; with one GPU or none, a single
    process."""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port at which the processes of `distributed` or SLURM meet; 0: a free one, or derived from
    the SLURM job."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Transport of tensors between processes; auto: nccl between GPUs, gloo on CPUs."""
    distributed_timeout_seconds: Annotated[float, Ge(1.0), Le(1e6)] = 1800.0
    """Seconds that a process waits for the others before it names the rank that hangs and ends the
    run."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp divides only the batch among processes; fsdp also divides weights and optimizer state,
    for networks too large for one device."""
    sync_batch_norm: Switch = "auto"
    """Compute batch-norm statistics over the batch of all processes; auto: if each process has
    fewer than 32 crops."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one (CUDA or ROCm; mps is not supported)."""
    gpu_id: Annotated[int, Ge(0), Le(1023)] | None = None
    """Number of the GPU, from 0; empty: the first; with several processes, each uses the GPU with
    its local rank."""
    deterministic: bool = False
    """Use only operations that give the same bits every time, on the same machine and versions."""
    threads: Processes | Literal["auto"] = "auto"
    """Threads within an operation; 0: torch's choice; auto: at most the available cores, and fewer
    if that is faster (unless deterministic)."""
    tf32: bool = True
    """Use TensorFloat-32 in float32 convolutions (NVIDIA Ampere and later): faster, but with 10
    bits of mantissa."""
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    """Let cuDNN choose its algorithms by timing; auto: if all crops have the same length, unless
    deterministic."""
    keep_memory: bool = True
    """Linux: keep the memory of freed tensors for the next step; returning it can take longer than
    the arithmetic."""
