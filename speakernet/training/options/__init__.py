"""The options of optimizers, the trainer and its machine, and the table of the first. No torch here.

What depends on the machine (no GPU, no C++ compiler) is not checked here: a configuration reads the same on any.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import Field, StringConstraints

from speakernet.machine.options import MachineOptions
from speakernet.options import (
    DEFAULT_SEED,
    LARGE_MARGIN,
    Component,
    Count,
    CountOrZero,
    Decay,
    Epochs,
    Frames,
    InputPath,
    NotNegative,
    Options,
    Share,
    Switch,
    suggestion,
)
from speakernet.training.options.schedules import LearningRate

LARGEST_SEED = 2**48
Changes = dict[str, Any]


class OptimizerOptions(Options):
    """The optimizer and its learning rate."""

    name: str = "adam"
    """sgd, adam, adamw, radam or nadam."""
    learning_rate: LearningRate = 1e-3
    """Learning rate at the top of the schedule."""
    network_learning_rate_factor: Annotated[float, Gt(0.0), Le(1000.0)] = 1.0
    """Factor of the network's learning rate; the head of the loss has the learning rate itself."""
    weight_decay: Annotated[float, Ge(0.0), Le(100.0)] = 0.0
    """Weight decay: decoupled for adamw, an L2 term in the gradient for the others."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to normalisation weights and biases too, as voxceleb_trainer does."""
    fused: Switch = "auto"
    """Update all weights in one kernel; auto: if torch has it for the device."""


class SgdOptions(OptimizerOptions):
    """Stochastic gradient descent with momentum, by default Nesterov's."""

    name: str = "sgd"
    momentum: Decay = 0.9
    """Momentum."""
    nesterov: bool = True
    """Whether the momentum looks ahead (Nesterov)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Nesterov's look ahead needs a momentum."""
        if self.nesterov and self.momentum == 0:
            yield "nesterov", "Nesterov needs momentum above 0; set optimizer.momentum or optimizer.nesterov: false"


class AdamOptions(OptimizerOptions):
    """Adam; weight decay is an L2 term in the gradient."""

    name: str = "adam"
    beta1: Decay = 0.9
    """Decay of the running mean of gradients."""
    beta2: Decay = 0.999
    """Decay of the running mean of squared gradients."""
    epsilon: Annotated[float, Gt(0.0), Le(1.0)] | Literal["auto"] = "auto"
    """Added to the denominator; auto: 1e-8 in float32, 1e-7 under bf16 or fp16."""


OPTIMIZERS: dict[str, Component] = {
    "sgd": Component(SgdOptions, "speakernet.training.optimizers:sgd"),
    "adam": Component(AdamOptions, "speakernet.training.optimizers:adam"),
    "adamw": Component(AdamOptions, "speakernet.training.optimizers:adam", "Adam with decoupled weight decay."),
    "radam": Component(
        AdamOptions, "speakernet.training.optimizers:adam", "Rectified Adam: its own warm-up of the variance estimate."
    ),
    "nadam": Component(AdamOptions, "speakernet.training.optimizers:adam", "Adam with Nesterov's look-ahead."),
}


class StageOptions(Options):
    """One of several stages: in sections as a configuration has them, the options in which it differs from the last."""

    name: Annotated[str, StringConstraints(pattern=r"^\w{1,40}$")]
    """In log, report and `--stage`, and of its folder."""
    epochs: Count
    """Of this stage."""
    data: Changes = Field(default={})
    """Crops, batches and sampler."""
    augment: Changes = Field(default={})
    """Any of its options."""
    model: Changes = Field(default={})
    """Under options, what of a pretrained backbone is trained, and how."""
    loss: Changes = Field(default={})
    """Margin, scale and inter_top_k."""
    optimizer: Changes = Field(default={})
    """Any of its options."""
    schedule: Changes = Field(default={})
    """Any of its options."""
    training: Changes = Field(default={})
    """What holds for each stage alone, such as accumulation_steps and ema_decay."""


class TrainingOptions(Options):
    """How long to train, what to keep, and what happens at the end."""

    initial_model: InputPath = ""
    """Model file or checkpoint whose weights the run starts from (or that --eval scores)."""
    initial_weight: Share = 0.0
    """Share of initial_model's weights in every model that is evaluated and kept (0.3 loses less elsewhere)."""
    freeze_epochs: CountOrZero = 0
    """First epochs, in which only the head of the loss learns; needs initial_model."""
    freeze_norm_statistics: bool = False
    """Keep the running statistics of batch norm as they are in initial_model."""
    max_epochs: Count = 40
    """Epochs in all; raising it continues a finished run."""
    test_interval: Count = 5
    """Epochs between two evaluations on the validation trials (the last epoch is always evaluated)."""
    accumulation_steps: Annotated[int, Ge(1), Le(1_000_000)] = 1
    """Micro-batches per optimizer step; the effective batch is this times data.batch_size."""
    reference_batch: CountOrZero = 0
    """Utterances per optimizer step that the learning rates were chosen for; 0: as many as this run has."""
    batch_scaling: Literal["off", "linear", "sqrt"] = "off"
    """Multiply all learning rates by the batch divided by reference_batch, or by the square root of that."""
    log_interval: Count = 20
    """Optimizer steps between two records in metrics.jsonl and the trackers."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "csv"]] = Field(default=["tensorboard"])
    """Where curves, configuration, figures and the model file go too; wandb and mlflow: pip install '.[trackers]'."""
    patience: CountOrZero = 0
    """Stop after this many evaluations in a row without a better EER; 0 never stops early."""
    save_steps: CountOrZero = 0
    """Optimizer steps between two writes of last.pt, besides the end of each epoch; 0: only there."""
    save_minutes: Annotated[float, Ge(0.0), Le(1e6)] = 10.0
    """Write last.pt at least this often; 0 turns it off."""
    max_bad_steps: Count = 10
    """Steps in a row with a non-finite loss or gradient after which the run stops."""
    average_checkpoints: Annotated[int, Ge(0), Le(100_000)] = 0
    """Average the weights of the last N epochs at the end (batch-norm statistics recomputed); 0 turns it off."""
    final_model: Literal["best", "last"] = "best"
    """Which model best.pt is: that of the lowest validation EER, or the last one."""
    ema_statistics: Literal["averaged", "measured"] = "averaged"
    """Batch-norm statistics of the moving average: averaged with the weights, or measured for each evaluation."""
    keep_checkpoints: CountOrZero = 3
    """Older models kept in checkpoints/, newest first."""
    compress_checkpoints: bool = False
    """Compress checkpoint files: smaller by about a tenth, slower to write."""
    max_grad_norm: NotNegative = 5.0
    """Gradients are scaled down to this norm; 0 turns clipping off (the norm is logged all the same)."""
    gradient_cache: Switch = "auto"
    """Two passes for metric losses with accumulation, which keeps all negatives; off: refuse the combination."""
    stages: Annotated[list[StageOptions], MaxLen(8)] = Field(default=[])
    """Stages one after the other, each with its epochs and the options that change with it; empty: a single one."""
    stage: str = ""
    """Name of the stage to begin with: those before it are taken as they are in the run folder."""
    large_margin_epochs: CountOrZero = 0
    """Epochs of a last stage with a larger margin and longer crops, short for an entry of stages; 0: no such stage."""
    large_margin: Annotated[float, Ge(0.0), Le(3.0)] = 0.5
    """Margin of that stage."""
    large_margin_crop_frames: Frames = 600
    """Crop length of that stage, in frames of 10 ms."""
    large_margin_batch_size: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Batch size of that stage, whose crops take more memory; 0: data.batch_size."""
    large_margin_learning_rate: LearningRate = 1e-4
    """Learning rate at the start of that stage."""
    large_margin_final_learning_rate: LearningRate | Literal["auto"] = "auto"
    """Where that stage's learning rate ends; auto: a quarter of its start."""
    large_margin_schedule: Literal["exponential", "cosine"] = "exponential"
    """How the learning rate falls: in equal factors, warm-up included (wespeaker), or half a cosine after it."""
    large_margin_warmup_epochs: Epochs = 0.0
    """Epochs of linear warm-up of that stage."""
    large_margin_augment: bool = True
    """Augment that stage's audio like the one before (never its speed)."""
    save_path: str = ""
    """Run folder; empty: exps/<name of the first config>."""
    mirror: str = ""
    """Folder or address (s3://…) for copies of checkpoints and results; a run in an empty folder resumes from them."""
    ema_decay: Decay = 0.0
    """Keep an exponential moving average of the weights (0.999, say) and evaluate that; 0 turns it off."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Options that contradict each other or have no effect."""
        if self.patience and self.final_model == "last":
            yield "patience", f"{self.patience} has no effect with final_model: last; set it to 0"
        if self.batch_scaling != "off" and not self.reference_batch:
            yield (
                "batch_scaling",
                f"{self.batch_scaling} needs reference_batch, the batch that the rates were chosen for",
            )
        names = [one.name for one in self.stages] + ([LARGE_MARGIN] if self.large_margin_epochs else [])
        if len(set(names)) < len(names):
            yield "stages", f"{', '.join(names)}; expected names of their own"
        if self.stages and self.max_epochs != self.stages[0].epochs:
            yield "max_epochs", f"{self.max_epochs} beside stages, each of which has its own epochs; leave it out"
        if self.stage and self.stage not in names:
            yield (
                "stage",
                f"there is no stage {self.stage!r}; {suggestion(self.stage, names) if names else 'set stages'}",
            )
        final = self.large_margin_final_learning_rate
        if final != "auto" and final > self.large_margin_learning_rate:
            highest = f"large_margin_learning_rate ({self.large_margin_learning_rate:g})"
            yield "large_margin_final_learning_rate", f"{final:g}; expected at most {highest}"
        if self.ema_statistics == "measured" and not self.ema_decay:
            yield "ema_statistics", "measured has no effect: no moving average is kept; set ema_decay"
        if self.ema_statistics == "measured" and self.freeze_norm_statistics:
            yield (
                "ema_statistics",
                "measured contradicts freeze_norm_statistics: true; leave one out",
            )


class RuntimeOptions(MachineOptions):
    """The machine: device, precision, compilation, threads, reproducibility, profiling."""

    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """auto: bf16 if the device computes it natively, else fp16 on a GPU, else float32 (no)."""
    loss_scale: Annotated[float, Gt(0.0), Le(2.0**40)] = 65536.0
    """fp16 only: initial factor of the loss, so that small gradients do not vanish."""
    loss_scale_growth_interval: Count = 2000
    """fp16 only: good steps after which the scale doubles."""
    compile: Literal["auto", "off", "on"] = "auto"
    """Compile the network; auto: if the remaining steps repay the cost."""
    compile_scope: Literal["auto", "whole", "regional"] = "auto"
    """Compile the whole network or each repeated block; auto: whole."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode; reduce-overhead (CUDA graphs) and max-autotune act on GPUs."""
    profiling: bool = False
    """Profile some steps: traces for TensorBoard and Perfetto in the run folder, a table in the log."""
    profile_steps: Annotated[int, Ge(1), Le(100_000)] = 5
    """Optimizer steps recorded by the profiler, after as many of warm-up."""
    seed: Annotated[int, Ge(0), Le(LARGEST_SEED)] = DEFAULT_SEED
    """Every random choice follows from this number."""
    channels_last: Switch = "auto"
    """Memory layout of 2-D convolution weights; auto: on, except for float32 on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time; turns keep_memory off."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Kernels that are chosen by timing are not the same every time."""
        if self.deterministic and self.cudnn_benchmark is True:
            yield "cudnn_benchmark", "on together with deterministic: true; benchmark mode picks kernels by timing"
        if self.deterministic and self.compile == "on" and self.compile_mode == "max-autotune":
            yield "compile_mode", "max-autotune picks kernels by timing, which deterministic: true forbids"
