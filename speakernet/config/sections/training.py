"""The sections optimizer, schedule, training and runtime: how weights are moved, for how long, on what and how exactly.

Only values and range checks live here; `build/training.py` turns them into objects. What depends on the machine (no
GPU, no native bfloat16, no C++ compiler) is checked there too: a config must be readable on any machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from speakernet.config.sections.ranges import at_least, between, positive

OptimizerName = Literal["sgd", "adam", "adamw", "radam", "nadam"]
ScheduleName = Literal[
    "constant",
    "step",
    "linear",
    "cosine",
    "cosine_restarts",
    "polynomial",
    "exponential",
    "one_cycle",
    "plateau",
]


@dataclass
class OptimizerSection:
    """Which optimizer moves the weights, and how far."""

    name: OptimizerName = "adam"
    """sgd, adam, adamw, radam or nadam."""
    learning_rate: float = 1e-3
    """Learning rate at the top of the schedule."""
    weight_decay: float = 0.0
    """Weight decay: decoupled for adamw, an L2 term in the gradient for the others."""
    decay_norms_and_biases: bool = False
    """Whether normalisation weights and biases decay too (they only lose by it; voxceleb_trainer does it)."""
    momentum: float = 0.9
    """Momentum of sgd."""
    nesterov: bool = True
    """Whether sgd looks ahead (Nesterov)."""
    beta1: float = 0.9
    """Decay of the running mean of gradients (adam family)."""
    beta2: float = 0.999
    """Decay of the running mean of squared gradients (adam family)."""
    epsilon: float | Literal["auto"] = "auto"
    """Added to the denominator (adam family); auto: 1e-8 in float32, 1e-7 under bf16 or fp16."""
    fused: Literal["auto", "on", "off"] = "auto"
    """Use the one-kernel update: auto uses it where this torch has it for the device."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from positive(self, "learning_rate")
        yield from at_least(self, 0.0, "weight_decay")
        yield from between(self, 0.0, 0.9999999, "momentum", "beta1", "beta2")
        if self.epsilon != "auto":
            yield from positive(self, "epsilon")
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            yield "nesterov", "Nesterov needs momentum above 0; set optimizer.momentum or optimizer.nesterov: false"


@dataclass
class ScheduleSection:
    """How learning rate and margin change over the run; both are pure functions of the optimizer step."""

    name: ScheduleName = "cosine"
    """constant, step, linear, cosine, cosine_restarts, polynomial, exponential, one_cycle or plateau (on the EER)."""
    warmup_epochs: float = 0.0
    """Epochs of linear rise from (almost) zero before the schedule begins; fractions are fine."""
    decay: float = 0.95
    """Factor of step, exponential and plateau."""
    decay_interval: float = 10.0
    """Epochs between two factors of `step`, and per factor of `exponential`."""
    final_learning_rate: float = 1e-6
    """Where linear, cosine, cosine_restarts, polynomial and one_cycle end, and what plateau never goes below."""
    power: float = 2.0
    """Exponent of polynomial."""
    restart_epochs: float = 10.0
    """Length of the first cycle of cosine_restarts, in epochs."""
    restart_factor: float = 2.0
    """Each cycle of cosine_restarts is this many times as long as the one before."""
    peak_share: float = 0.3
    """Share of the run after which one_cycle reaches its top."""
    plateau_patience: int = 3
    """Evaluations without a better EER before plateau multiplies by `decay`."""
    margin: Literal["constant", "linear", "exponential"] = "constant"
    """How the margin of the loss grows from `margin_initial` to its full value."""
    margin_initial: float = 0.0
    """Margin before the ramp begins."""
    margin_begin_epoch: float = 0.0
    """Epoch (from 0) at which the ramp begins."""
    margin_end_epoch: float = 10.0
    """Epoch at which the margin reaches its full value."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from at_least(self, 0.0, "warmup_epochs", "final_learning_rate", "margin_initial", "margin_begin_epoch")
        yield from positive(self, "decay", "decay_interval", "power", "restart_epochs")
        yield from between(self, 0.0, 1.0, "decay", "peak_share")
        yield from at_least(self, 1.0, "restart_factor")
        yield from at_least(self, 1, "plateau_patience")
        if self.margin != "constant" and self.margin_end_epoch <= self.margin_begin_epoch:
            yield (
                "margin_end_epoch",
                f"{self.margin_end_epoch}; expected an epoch after margin_begin_epoch ({self.margin_begin_epoch})",
            )


@dataclass
class TrainingSection:
    """How long to train, what to keep, and what happens at the end."""

    max_epochs: int = 40
    """Epochs in all; raising it continues a finished run."""
    test_interval: int = 5
    """Evaluate on the validation trials every so many epochs (and after the last)."""
    accumulation_steps: int = 1
    """Micro-batches per optimizer step; the effective batch is this times data.batch_size."""
    max_grad_norm: float = 5.0
    """Gradients are scaled down to this norm; 0 turns clipping off (the norm is logged all the same)."""
    log_interval: int = 20
    """Optimizer steps between two fetches of the numbers from the device (log, progress line, TensorBoard)."""
    patience: int = 0
    """Stop after so many evaluations in a row without a better EER; 0 never stops early."""
    save_path: str = ""
    """Run folder; empty: exps/<name of the first config>."""
    save_steps: int = 0
    """Write last.pt every so many optimizer steps, besides the end of each epoch; 0: only there."""
    save_minutes: float = 10.0
    """Write last.pt at least this often; 0 turns it off."""
    keep_checkpoints: int = 3
    """Older models kept in checkpoints/, newest first."""
    compress_checkpoints: bool = False
    """Compress checkpoint files: smaller by about a tenth, slower to write."""
    initial_model: str = ""
    """Model file or checkpoint whose weights the run starts from (or that --eval scores)."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights (0.999, say) and evaluate that; 0 turns it off."""
    average_checkpoints: int = 0
    """Average the weights of the last N epochs at the end (batch-norm statistics recomputed); 0 turns it off."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient after which the run stops."""
    gradient_cache: Literal["auto", "on", "off"] = "auto"
    """Two passes for metric losses under accumulation, so that they keep all their negatives; off refuses the pair."""
    large_margin_epochs: int = 0
    """Epochs of a second stage with a larger margin and longer crops; 0: no second stage."""
    large_margin: float = 0.5
    """Margin of the second stage."""
    large_margin_crop_frames: int = 600
    """Crop length of the second stage, in frames of 10 ms."""
    large_margin_learning_rate: float = 1e-4
    """Learning rate at the start of the second stage."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from at_least(
            self, 1, "max_epochs", "test_interval", "accumulation_steps", "log_interval", "max_bad_steps"
        )
        yield from at_least(
            self,
            0,
            "max_grad_norm",
            "patience",
            "save_steps",
            "save_minutes",
            "keep_checkpoints",
            "average_checkpoints",
            "large_margin_epochs",
            "large_margin",
        )
        yield from between(self, 0.0, 0.9999999, "ema_decay")
        yield from at_least(self, 1, "large_margin_crop_frames")
        yield from positive(self, "large_margin_learning_rate")


@dataclass
class RuntimeSection:
    """The machine: device, precision, compilation, threads, reproducibility, profiling."""

    seed: int = 10
    """Every random choice follows from this number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    gpu_id: int | None = None
    """Which GPU, counted from 0; empty: the first (several processes: not yet)."""
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """auto: bf16 where the device computes it natively, else fp16 on a GPU, else float32 (no)."""
    loss_scale: float = 65536.0
    """fp16 only: what the loss is multiplied by at the start, so that small gradients do not vanish."""
    loss_scale_growth_interval: int = 2000
    """fp16 only: good steps after which the scale doubles."""
    compile: Literal["auto", "off", "on"] = "auto"
    """Compile the network; auto does so once the steps left repay the cost."""
    compile_scope: Literal["auto", "whole", "regional"] = "auto"
    """Compile the whole network or each repeated block; auto: whole on one device, blocks under several."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode; reduce-overhead and max-autotune act on GPUs."""
    deterministic: bool = False
    """Only operations that give the same bits every time, on the same machine and versions."""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """Memory layout of 2-D convolution weights; auto: on, but for float32 on a GPU (up to a quarter faster on CPUs)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, up to twice the time; `keep_memory` is then off."""
    threads: int | Literal["auto"] = "auto"
    """Threads inside one operation; 0: torch's choice; auto: within quotas, and (not deterministic) fewer if faster."""
    interop_threads: int = 0
    """Threads between operations; 0 leaves torch's choice."""
    tf32: bool = True
    """TensorFloat-32 for float32 products (NVIDIA Ampere and later): faster, 10 bits of mantissa."""
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    """Let cuDNN time its algorithms; auto: on unless deterministic (crops have few lengths, so it pays)."""
    attention: list[Literal["flash", "efficient", "math", "cudnn"]] = field(default_factory=list)
    """Attention kernels allowed on a GPU; empty allows all."""
    keep_memory: bool = True
    """Linux: keep the memory of freed tensors for the next step; giving it back can take longer than the arithmetic."""
    memory_fraction: float = 0.0
    """Share of the GPU's memory this process may take; 0: no bound."""
    profiling: bool = False
    """Profile some steps: traces for TensorBoard and Perfetto in the run folder, a table in the log."""
    profile_steps: int = 5
    """Optimizer steps recorded by the profiler, after as many of warm-up."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from at_least(self, 0, "seed", "interop_threads")
        if self.threads != "auto":
            yield from at_least(self, 0, "threads")
        yield from at_least(self, 1, "profile_steps", "loss_scale_growth_interval")
        yield from positive(self, "loss_scale")
        yield from between(self, 0.0, 1.0, "memory_fraction")
        if self.gpu_id is not None and self.gpu_id < 0:
            yield "gpu_id", f"{self.gpu_id}; expected 0 or more"
        if self.deterministic and self.cudnn_benchmark is True:
            yield "cudnn_benchmark", "on together with deterministic: true; benchmark mode picks kernels by timing"
        if self.deterministic and self.compile == "on" and self.compile_mode == "max-autotune":
            yield "compile_mode", "max-autotune picks kernels by timing, which deterministic: true forbids"
