"""Where a run stands: its stage, and the position that a resume continues from."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from speakernet.training.options import TrainingOptions


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run, and what the caller does at its points."""

    name: str = ""
    """Name in the log and in model files; empty if the run has a single stage."""
    more_epochs: str = "--max_epoch {}"
    """How to request more epochs; {} is replaced by their number."""
    is_first: bool = True
    """Whether no stage comes before it."""
    steps_before: int = 0
    """Steps of the earlier stages, whose weights this one starts from."""
    initial_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts about the initial model (file, licence …), as plain values; empty without one."""
    chosen_by: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The list that selects the best model; empty if no model is selected."""
    corpus: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts about the training list (speakers, hours …), as plain values."""
    on_start: Callable[[], None] = lambda: None
    """Called on rank 0 when training starts or resumes."""
    advise: Callable[[float], str] = lambda data_wait_share: ""
    """What to change if this share of the time is spent waiting for data; empty: nothing."""


WHOLE_RUN = Stage()


@dataclasses.dataclass
class TrainingState:
    """The position of a run; with the state of its components, this is all that a resume needs."""

    epoch: int = 0
    """Finished epochs."""
    micro_batch: int = 0
    """Finished micro-batches of the current epoch; saved as `batch`."""
    step: int = 0
    """Optimizer steps taken, including those undone."""
    best_eer_percent: float = math.inf
    best_epoch: int = 0
    """0 is the initial model."""
    initial_eer_percent: float | None = None
    """EER of the initial model; None without one."""
    best_stage: str = ""
    """The stage that produced best.pt."""
    evaluations_without_gain: int = 0
    bad_steps: int = 0
    """Steps undone because of non-finite numbers."""
    bad_streak: int = 0
    overflows: int = 0
    """Steps undone because an fp16 gradient overflowed, which is routine while the scale adapts."""
    utterances: int = 0
    seconds: float = 0.0
    """Training time, evaluations included, over all starts and resumes."""
    epoch_loss_sum: float = 0.0
    epoch_accuracy_sum: float = 0.0
    epoch_good_steps: int = 0
    stopped_early: bool = False
    awaits_evaluation: bool = False
    """Whether the last epoch is trained but not evaluated, because the run was stopped during its
    evaluation."""
    averaged: bool = False
    """Whether the mean of the last checkpoints has been tried."""
    metrics_lines: int = 0
    """Lines of metrics.jsonl up to this state; a resume removes and rewrites those after them."""
    trials_checksum: int = 0
    """Checksum of the trials of the best EER; 0 if nothing was evaluated yet."""

    def state_dict(self) -> dict[str, Any]:
        """The values by the names that run folders of all versions have."""
        values = vars(self).copy()
        values["batch"] = values.pop("micro_batch")
        return values

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restore saved values; fields that only one of two versions has are ignored."""
        own = vars(self)
        for name, value in values.items():
            name = "micro_batch" if name == "batch" else name
            if name in own:
                own[name] = value

    def epochs_done(self, options: TrainingOptions) -> bool:
        """Whether all epochs are trained and evaluated, or the run stopped early."""
        has_all = self.epoch >= options.max_epochs or self.stopped_early
        return has_all and not self.awaits_evaluation

    def is_finished(self, options: TrainingOptions) -> bool:
        """Whether nothing is left to do, including the average of the last checkpoints."""
        return self.epochs_done(options) and (self.averaged or options.average_checkpoints == 0)

    def set_best(self, eer_percent: float, epoch: int, stage: str) -> None:
        """Remember which model best.pt holds."""
        self.best_eer_percent = eer_percent
        self.best_epoch = epoch
        self.best_stage = stage

    def forget_best(self) -> None:
        """Reset the best result: there is no best.pt to beat."""
        self.set_best(math.inf, 0, "")
        self.evaluations_without_gain = 0

    def start_epoch(self) -> None:
        """Begin the sums of a new epoch."""
        self.epoch_loss_sum = 0.0
        self.epoch_accuracy_sum = 0.0
        self.epoch_good_steps = 0
