"""The options of optimizers, schedules, the trainer and its machine, and the tables of the first two. No torch here.

What depends on the machine (no GPU, no C++ compiler) is not checked here: a configuration reads the same on any.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from speakernet.machine.options import MachineOptions
from speakernet.options import (
    Count,
    CountOrZero,
    Decay,
    Epochs,
    Frames,
    InputPath,
    NamedOptions,
    NotNegative,
    Options,
    Share,
    Switch,
)
from speakernet.registry import Part

LearningRate = Annotated[float, Gt(0.0), Le(1000.0)]
Factor = Annotated[float, Gt(0.0), Le(1.0)]
Interval = Annotated[float, Gt(0.0), Le(1e6)]
LARGEST_SEED = 2**48
DECAY_INTERVAL = 10.0  # epochs; voxceleb_trainer's, with its default test_interval


@dataclass(kw_only=True)
class OptimizerOptions(NamedOptions):
    """Which optimizer moves the weights, and how far."""

    name: str = "adam"
    """sgd, adam, adamw, radam or nadam."""
    learning_rate: LearningRate = 1e-3
    """Learning rate at the top of the schedule."""
    network_learning_rate_factor: Annotated[float, Gt(0.0), Le(1000.0)] = 1.0
    """The network learns at the learning rate times this, the head of the loss at the learning rate itself."""
    weight_decay: Annotated[float, Ge(0.0), Le(100.0)] = 0.0
    """Weight decay: decoupled for adamw, an L2 term in the gradient for the others."""
    decay_norms_and_biases: bool = False
    """Whether normalisation weights and biases decay too (they only lose by it; voxceleb_trainer does it)."""
    fused: Switch = "auto"
    """Use the one-kernel update: auto uses it where this torch has it for the device."""


@dataclass(kw_only=True)
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


@dataclass(kw_only=True)
class AdamOptions(OptimizerOptions):
    """Adam; weight decay is an L2 term in the gradient."""

    name: str = "adam"
    beta1: Decay = 0.9
    """Decay of the running mean of gradients."""
    beta2: Decay = 0.999
    """Decay of the running mean of squared gradients."""
    epsilon: Annotated[float, Gt(0.0), Le(1.0)] | Literal["auto"] = "auto"
    """Added to the denominator; auto: 1e-8 in float32, 1e-7 under bf16 or fp16."""


@dataclass(kw_only=True)
class AdamWOptions(AdamOptions):
    """Adam with decoupled weight decay."""

    name: str = "adamw"


@dataclass(kw_only=True)
class RAdamOptions(AdamOptions):
    """Rectified Adam: its own warm-up of the variance estimate."""

    name: str = "radam"


@dataclass(kw_only=True)
class NAdamOptions(AdamOptions):
    """Adam with Nesterov's look-ahead."""

    name: str = "nadam"


OPTIMIZERS: dict[str, Part] = {
    "sgd": Part(SgdOptions, "speakernet.training.optimizers:sgd"),
    "adam": Part(AdamOptions, "speakernet.training.optimizers:adam"),
    "adamw": Part(AdamWOptions, "speakernet.training.optimizers:adamw"),
    "radam": Part(RAdamOptions, "speakernet.training.optimizers:radam"),
    "nadam": Part(NAdamOptions, "speakernet.training.optimizers:nadam"),
}


@dataclass(kw_only=True)
class MarginOptions(Options):
    """How the margin of a loss grows."""

    margin: Literal["constant", "linear", "exponential"] = "constant"
    """How the margin of the loss grows from `margin_initial` to its full value."""
    margin_initial: Annotated[float, Ge(0.0), Le(100.0)] = 0.0
    """Margin before the ramp begins."""
    margin_begin_epoch: Epochs = 0.0
    """Epoch (from 0) at which the ramp begins."""
    margin_end_epoch: Epochs = 10.0
    """Epoch at which the margin reaches its full value."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A ramp has to end after it began."""
        yield from super().problems()
        if self.margin != "constant" and self.margin_end_epoch <= self.margin_begin_epoch:
            yield (
                "margin_end_epoch",
                f"{self.margin_end_epoch}; expected an epoch after margin_begin_epoch ({self.margin_begin_epoch})",
            )


@dataclass(kw_only=True)
class ScheduleOptions(MarginOptions, NamedOptions):
    """How learning rate and margin change over the run; both are pure functions of the optimizer step."""

    name: str = "cosine"
    """constant, step, linear, cosine, cosine_restarts, polynomial, exponential, one_cycle or plateau (on the EER)."""
    warmup_epochs: Epochs = 0.0
    """Epochs of linear rise from (almost) zero before the schedule begins; fractions are fine."""
    warmup_overlaps: bool = False
    """The schedule begins with the run and the warm-up is a factor on it (wespeaker), not a stretch before it."""


@dataclass(kw_only=True)
class ConstantOptions(ScheduleOptions):
    """Always the top."""

    name: str = "constant"


@dataclass(kw_only=True)
class FloorOptions(ScheduleOptions):
    """The base of schedules that end at a floor."""

    final_learning_rate: Annotated[float, Ge(0.0), Le(1000.0)] = 1e-6
    """Where the learning rate ends; plateau never goes below it."""


@dataclass(kw_only=True)
class FactorOptions(ScheduleOptions):
    """The base of schedules that multiply by a factor."""

    decay: Factor = 0.95
    """The factor."""


@dataclass(kw_only=True)
class StepOptions(FactorOptions):
    """Times `decay` after each `decay_interval` epochs."""

    name: str = "step"
    decay_interval: Interval = DECAY_INTERVAL
    """Epochs between two factors."""


@dataclass(kw_only=True)
class ExponentialOptions(ScheduleOptions):
    """Down in equal factors: to `final_learning_rate` at the end, or by `decay` every `decay_interval` epochs."""

    name: str = "exponential"
    final_learning_rate: LearningRate | Literal["auto"] = "auto"
    """Where the learning rate ends; auto: it falls by `decay`."""
    decay: Factor | Literal["auto"] = "auto"
    """The factor; auto: that of step, where no final_learning_rate is given."""
    decay_interval: Interval = DECAY_INTERVAL
    """Epochs per factor."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """An end and a factor contradict each other."""
        yield from super().problems()
        if self.decay != "auto" and self.final_learning_rate != "auto":
            yield (
                "final_learning_rate",
                f"{self.final_learning_rate:g} together with decay: {self.decay:g}; exponential falls to the one or by "
                "the other: give one of them (before final_learning_rate had an effect here, runs fell by decay)",
            )


@dataclass(kw_only=True)
class LinearOptions(FloorOptions):
    """A straight line from the top to the floor."""

    name: str = "linear"


@dataclass(kw_only=True)
class CosineOptions(FloorOptions):
    """Half a cosine from the top to the floor."""

    name: str = "cosine"


@dataclass(kw_only=True)
class CosineRestartsOptions(FloorOptions):
    """Half cosines one after the other, each `restart_factor` times as long as the one before (SGDR)."""

    name: str = "cosine_restarts"
    restart_epochs: Annotated[float, Gt(0.0), Le(1e6)] = 10.0
    """Length of the first cycle, in epochs."""
    restart_factor: Annotated[float, Ge(1.0), Le(1000.0)] = 2.0
    """Each cycle is this many times as long as the one before."""


@dataclass(kw_only=True)
class PolynomialOptions(FloorOptions):
    """From the top to the floor as (1 - share of the run) to the `power`."""

    name: str = "polynomial"
    power: Annotated[float, Gt(0.0), Le(100.0)] = 2.0
    """Exponent."""


@dataclass(kw_only=True)
class OneCycleOptions(FloorOptions):
    """Half a cosine up from a 25th of the top, then half a cosine down to the floor (Smith and Topin)."""

    name: str = "one_cycle"
    peak_share: Share = 0.3
    """Share of the run after which the learning rate reaches its top."""


@dataclass(kw_only=True)
class PlateauOptions(FloorOptions, FactorOptions):
    """The top, times `decay` whenever `plateau_patience` evaluations brought no better EER."""

    name: str = "plateau"
    plateau_patience: Count = 3
    """Evaluations without a better EER before the next factor."""


SCHEDULES: dict[str, Part] = {
    "constant": Part(ConstantOptions, "speakernet.training.schedules:constant"),
    "step": Part(StepOptions, "speakernet.training.schedules:step"),
    "linear": Part(LinearOptions, "speakernet.training.schedules:linear"),
    "cosine": Part(CosineOptions, "speakernet.training.schedules:cosine"),
    "cosine_restarts": Part(CosineRestartsOptions, "speakernet.training.schedules:cosine_restarts"),
    "polynomial": Part(PolynomialOptions, "speakernet.training.schedules:polynomial"),
    "exponential": Part(ExponentialOptions, "speakernet.training.schedules:exponential"),
    "one_cycle": Part(OneCycleOptions, "speakernet.training.schedules:one_cycle"),
    # The shape of plateau is constant; its drops come from the observed EERs (LearningRateSchedule).
    "plateau": Part(PlateauOptions, "speakernet.training.schedules:constant"),
}


@dataclass(kw_only=True)
class TrainerOptions(Options):
    """The numbers that steer the loop over epochs and steps."""

    max_epochs: Count = 40
    """Epochs in all; raising it continues a finished run."""
    test_interval: Count = 5
    """Evaluate on the validation trials every so many epochs (and after the last)."""
    accumulation_steps: Annotated[int, Ge(1), Le(1_000_000)] = 1
    """Micro-batches per optimizer step; the effective batch is this times data.batch_size."""
    log_interval: Count = 20
    """Optimizer steps between two records of the numbers (metrics.jsonl, TensorBoard); what is shown is fresher."""
    patience: CountOrZero = 0
    """Stop after so many evaluations in a row without a better EER; 0 never stops early."""
    save_steps: CountOrZero = 0
    """Write last.pt every so many optimizer steps, besides the end of each epoch; 0: only there."""
    save_minutes: Annotated[float, Ge(0.0), Le(1e6)] = 10.0
    """Write last.pt at least this often; 0 turns it off."""
    max_bad_steps: Count = 10
    """Steps in a row with a non-finite loss or gradient after which the run stops."""
    average_checkpoints: Annotated[int, Ge(0), Le(100_000)] = 0
    """Average the weights of the last N epochs at the end (batch-norm statistics recomputed); 0 turns it off."""


@dataclass(kw_only=True)
class CheckpointOptions(TrainerOptions):
    """What is kept of a run on disk, which has to hold what its end averages."""

    keep_checkpoints: CountOrZero = 3
    """Older models kept in checkpoints/, newest first."""
    compress_checkpoints: bool = False
    """Compress checkpoint files: smaller by about a tenth, slower to write."""


@dataclass(kw_only=True)
class StepControl(Options):
    """What bounds one optimizer step."""

    max_grad_norm: NotNegative = 5.0
    """Gradients are scaled down to this norm; 0 turns clipping off (the norm is logged all the same)."""
    gradient_cache: Switch = "auto"
    """Two passes for metric losses under accumulation, so that they keep all their negatives; off refuses the pair."""


@dataclass(kw_only=True)
class LargeMarginOptions(Options):
    """A second stage with a larger margin and longer crops."""

    large_margin_epochs: CountOrZero = 0
    """Epochs of a second stage with a larger margin and longer crops; 0: no second stage."""
    large_margin: Annotated[float, Ge(0.0), Le(3.0)] = 0.5
    """Margin of the second stage."""
    large_margin_crop_frames: Frames = 600
    """Crop length of the second stage, in frames of 10 ms."""
    large_margin_batch_size: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Batch size of the second stage, whose crops take more memory; 0: data.batch_size."""
    large_margin_learning_rate: LearningRate = 1e-4
    """Learning rate at the start of the second stage."""
    large_margin_final_learning_rate: LearningRate | Literal["auto"] = "auto"
    """Where the second stage's learning rate ends; auto: a quarter of its start."""
    large_margin_schedule: Literal["exponential", "cosine"] = "exponential"
    """How it falls: in equal factors, also in the warm-up (wespeaker), or as half a cosine after it (3D-Speaker)."""
    large_margin_warmup_epochs: Epochs = 0.0
    """Epochs of linear rise at the beginning of the second stage."""
    large_margin_augment: bool = True
    """Whether the second stage's audio is disturbed as the first's; its speed never is."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A learning rate that rises."""
        yield from super().problems()
        final = self.large_margin_final_learning_rate
        if final != "auto" and final > self.large_margin_learning_rate:
            yield (
                "large_margin_final_learning_rate",
                f"{final:g}; expected at most large_margin_learning_rate ({self.large_margin_learning_rate:g})",
            )


@dataclass(kw_only=True)
class FineTuningOptions(Options):
    """How a run treats the weights that it was given."""

    initial_model: InputPath = ""
    """Model file or checkpoint whose weights the run starts from (or that --eval scores)."""
    freeze_epochs: CountOrZero = 0
    """Epochs at the start in which only the head of the loss learns; needs initial_model."""
    freeze_norm_statistics: bool = False
    """Leave the running statistics of batch norm as initial_model has them, through the whole run."""


@dataclass(kw_only=True)
class TrainingOptions(FineTuningOptions, LargeMarginOptions, StepControl, CheckpointOptions):
    """How long to train, what to keep, and what happens at the end."""

    save_path: str = ""
    """Run folder; empty: exps/<name of the first config>."""
    mirror: str = ""
    """Folder or address (s3://…) for copies of checkpoints and results; a run in an empty folder goes on from them."""
    ema_decay: Decay = 0.0
    """Keep an exponential moving average of the weights (0.999, say) and evaluate that; 0 turns it off."""


@dataclass(kw_only=True)
class PrecisionOptions(Options):
    """In how many bits the network computes."""

    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """auto: bf16 where the device computes it natively, else fp16 on a GPU, else float32 (no)."""
    loss_scale: Annotated[float, Gt(0.0), Le(2.0**40)] = 65536.0
    """fp16 only: what the loss is multiplied by at the start, so that small gradients do not vanish."""
    loss_scale_growth_interval: Count = 2000
    """fp16 only: good steps after which the scale doubles."""


@dataclass(kw_only=True)
class CompileOptions(Options):
    """Whether torch's compiler makes the network's code."""

    compile: Literal["auto", "off", "on"] = "auto"
    """Compile the network; auto does so once the steps left repay the cost."""
    compile_scope: Literal["auto", "whole", "regional"] = "auto"
    """Compile the whole network or each repeated block; auto: whole."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode; reduce-overhead and max-autotune act on GPUs."""


@dataclass(kw_only=True)
class ProfileOptions(Options):
    """Whether steps are profiled."""

    profiling: bool = False
    """Profile some steps: traces for TensorBoard and Perfetto in the run folder, a table in the log."""
    profile_steps: Annotated[int, Ge(1), Le(100_000)] = 5
    """Optimizer steps recorded by the profiler, after as many of warm-up."""


@dataclass(kw_only=True)
class RuntimeOptions(MachineOptions, PrecisionOptions, CompileOptions, ProfileOptions):
    """The machine: device, precision, compilation, threads, reproducibility, profiling."""

    seed: Annotated[int, Ge(0), Le(LARGEST_SEED)] = 10
    """Every random choice follows from this number."""
    channels_last: Switch = "auto"
    """Memory layout of 2-D convolution weights; auto: on, but for float32 on a GPU (up to a quarter faster on CPUs)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, up to twice the time; `keep_memory` is then off."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Kernels that are picked by timing are not the same every time."""
        if self.deterministic and self.cudnn_benchmark is True:
            yield "cudnn_benchmark", "on together with deterministic: true; benchmark mode picks kernels by timing"
        if self.deterministic and self.compile == "on" and self.compile_mode == "max-autotune":
            yield "compile_mode", "max-autotune picks kernels by timing, which deterministic: true forbids"
