"""The options of optimizers, trainer and machine, and the table of optimizers. No torch here.

Nothing here checks what depends on the machine (a GPU, a C++ compiler): a configuration is valid on
any machine.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import Field, StringConstraints

from speakernet.machine.options import MachineOptions
from speakernet.options import (
    DEFAULT_SEED,
    ByName,
    Component,
    Count,
    CountOrZero,
    Decay,
    InputPath,
    NotNegative,
    Options,
    Several,
    Share,
    Switch,
    suggestion,
)
from speakernet.training.options.schedules import LearningRate

LARGEST_SEED = 2**48
Changes = ByName[str, Any]
"""Options of a section that a stage changes."""


class OptimizerOptions(Options):
    """The optimizer and its learning rate."""

    name: str = "adam"
    """sgd, adam, adamw, radam or nadam."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate of the schedule."""
    network_learning_rate_factor: Annotated[float, Gt(0.0), Le(1000.0)] = 1.0
    """Factor on the network's learning rate; the head of the loss uses the learning rate itself."""
    weight_decay: Annotated[float, Ge(0.0), Le(100.0)] = 0.0
    """Weight decay: decoupled for adamw, an L2 term in the gradient for the others."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to normalisation weights and biases too, as voxceleb_trainer does."""
    fused: Switch = "auto"
    """Update all weights in one kernel; auto: if torch supports it on the device."""


class SgdOptions(OptimizerOptions):
    """Stochastic gradient descent with momentum, by default Nesterov's."""

    name: str = "sgd"
    momentum: Decay = 0.9
    """Momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Nesterov's momentum without a momentum."""
        if self.nesterov and self.momentum == 0:
            yield (
                "nesterov",
                "Nesterov needs momentum above 0; set optimizer.momentum or optimizer.nesterov: "
                "false",
            )


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
    "adamw": Component(
        AdamOptions, "speakernet.training.optimizers:adam", "Adam with decoupled weight decay."
    ),
    "radam": Component(
        AdamOptions,
        "speakernet.training.optimizers:adam",
        "Rectified Adam: warms up its variance estimate.",
    ),
    "nadam": Component(
        AdamOptions, "speakernet.training.optimizers:adam", "Adam with Nesterov momentum."
    ),
}


class StageOptions(Options):
    """One of several stages: the options that differ from the previous stage, in the sections of a
    configuration.
    """

    name: Annotated[str, StringConstraints(pattern=r"^\w{1,40}$")]
    """Name of the stage in the log, the report and `--stage`, and of its folder."""
    epochs: Count
    """Epochs of this stage."""
    data: Changes = Field(default={})
    """Crops, batches and sampler."""
    augment: Changes = Field(default={})
    """Any option of the section."""
    model: Changes = Field(default={})
    """Only `options`: which part of a pretrained backbone is trained, and how."""
    loss: Changes = Field(default={})
    """Margin, scale and inter_top_k."""
    optimizer: Changes = Field(default={})
    """Any option of the section."""
    schedule: Changes = Field(default={})
    """Any option of the section."""
    training: Changes = Field(default={})
    """Options that each stage can set, such as accumulation_steps and ema_decay."""


class TrainingOptions(Options):
    """How long to train, what to keep, and what happens at the end."""

    initial_model: InputPath = ""
    """Model file or checkpoint whose weights the run starts from (or that --eval scores)."""
    initial_weight: Share = 0.0
    """Share of initial_model's weights in every evaluated and saved model (0.3 keeps more accuracy
    on other data)."""
    freeze_epochs: CountOrZero = 0
    """Epochs at the start in which only the head of the loss is trained; needs initial_model."""
    freeze_norm_statistics: bool = False
    """Keep the batch-norm running statistics of initial_model."""
    max_epochs: Count = 40
    """Total epochs; raising it continues a finished run."""
    test_interval: Count = 5
    """Epochs between two evaluations on the validation trials (the last epoch is always
    evaluated)."""
    accumulation_steps: Annotated[int, Ge(1), Le(1_000_000)] = 1
    """Micro-batches per optimizer step; the effective batch is this times data.batch_size."""
    reference_batch: CountOrZero = 0
    """Utterances per optimizer step for which the learning rates were chosen; 0: as many as in this
    run."""
    batch_scaling: Literal["off", "linear", "sqrt"] = "off"
    """Multiply all learning rates by the ratio of the batch to reference_batch, or by its square
    root."""
    log_interval: Count = 20
    """Optimizer steps between two records in metrics.jsonl and the trackers."""
    trackers: Several[Literal["tensorboard", "wandb", "mlflow"]] = ("tensorboard",)
    """Where to send curves, configuration, figures and model file; wandb and mlflow: pip install
    '.[trackers]'."""
    patience: CountOrZero = 0
    """Stop after this many evaluations in a row without a better EER; 0 never stops early."""
    save_steps: CountOrZero = 0
    """Optimizer steps between writes of last.pt, in addition to the one after each epoch; 0:
    none."""
    save_minutes: Annotated[float, Ge(0.0), Le(1e6)] = 10.0
    """Maximum minutes between writes of last.pt; 0: no limit."""
    max_bad_steps: Count = 10
    """Stop the run after this many steps in a row with a non-finite loss or gradient."""
    average_checkpoints: Annotated[int, Ge(0), Le(100_000)] = 0
    """Average the weights of the last N epochs at the end (batch-norm statistics recomputed); 0
    turns it off."""
    final_model: Literal["best", "last"] = "best"
    """The model in best.pt: the one with the lowest validation EER, or the last one."""
    keep_checkpoints: CountOrZero = 3
    """Number of most recent models kept in checkpoints/."""
    compress_checkpoints: bool = False
    """Compress checkpoint files: smaller by about a tenth, slower to write."""
    max_grad_norm: NotNegative = 5.0
    """Clip gradients to this norm; 0 turns clipping off (the norm is still logged)."""
    stages: Annotated[Several[StageOptions], MaxLen(8)] = ()
    """Consecutive stages, each with its epochs and changed options; empty: a single stage."""
    stage: str = ""
    """Name of the stage to start with; earlier stages are not trained further."""
    save_path: str = ""
    """Run folder; empty: exps/<name of the first config>."""
    mirror: str = ""
    """Folder or address (s3://…) for copies of checkpoints and results; a run in an empty folder
    resumes from them."""
    ema_decay: Decay = 0.0
    """Keep an exponential moving average of the weights (e.g. 0.999) and evaluate it; 0 turns it
    off."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Options that contradict each other or have no effect."""
        if self.patience and self.final_model == "last":
            yield "patience", f"{self.patience} has no effect with final_model: last; set it to 0"
        if self.batch_scaling != "off" and not self.reference_batch:
            yield (
                "batch_scaling",
                f"{self.batch_scaling} needs reference_batch, the batch for which the learning "
                "rates were chosen",
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            yield "stages", f"{', '.join(names)}; expected unique names"
        if self.stages and self.max_epochs != self.stages[0].epochs:
            yield (
                "max_epochs",
                f"{self.max_epochs} conflicts with stages, each of which sets its epochs; remove "
                "it",
            )
        if self.stage and self.stage not in names:
            advice = suggestion(self.stage, names) if names else "set stages"
            yield "stage", f"there is no stage {self.stage!r}; {advice}"


class RuntimeOptions(MachineOptions):
    """The machine: device, precision, compilation, threads, reproducibility, profiling."""

    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """auto: bf16 if the device supports it natively, else fp16 on a GPU, else float32 (no)."""
    loss_scale: Annotated[float, Gt(0.0), Le(2.0**40)] = 65536.0
    """fp16 only: initial factor on the loss, which keeps small gradients from vanishing."""
    loss_scale_growth_interval: Count = 2000
    """fp16 only: good steps after which the scale doubles."""
    compile: Literal["auto", "off", "on"] = "auto"
    """Compile the network; auto: if that saves time over the remaining steps."""
    compile_scope: Literal["auto", "whole", "regional"] = "auto"
    """Compile the whole network or each repeated block, which takes less time; auto: regional if
    blocks repeat."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile; reduce-overhead (CUDA graphs) and max-autotune only matter on GPUs."""
    cuda_graph: Switch = "auto"
    """Record the whole step as a CUDA graph and replay it, for small networks that wait for Python;
    auto: off (not run on a GPU yet)."""
    profiling: bool = False
    """Profile some steps: traces for Perfetto in the run folder, a table in the log."""
    profile_steps: Annotated[int, Ge(1), Le(100_000)] = 5
    """Optimizer steps to profile, after as many warm-up steps."""
    seed: Annotated[int, Ge(0), Le(LARGEST_SEED)] = DEFAULT_SEED
    """Seed of every random choice."""
    channels_last: Switch = "auto"
    """Memory layout of 2-D convolution weights; auto: on, except for float32 on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time; turns keep_memory off."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Kernels chosen by timing, which may differ between runs, in a deterministic run."""
        if self.deterministic and self.cudnn_benchmark is True:
            yield (
                "cudnn_benchmark",
                "on contradicts deterministic: true, since it picks kernels by timing",
            )
        if self.deterministic and self.compile == "on" and self.compile_mode == "max-autotune":
            yield (
                "compile_mode",
                "max-autotune contradicts deterministic: true, since it picks kernels by timing",
            )
