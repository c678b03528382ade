"""What a run counts (`TrainingState`): plain values, saved as they are; and which stage of a larger run it is."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from speakernet.training.options import TrainerOptions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a run is part of."""

    name: str = ""
    """What the log and the model files call a run that is a stage of another one; empty for a run of its own."""
    epochs_option: str = "--max_epoch"
    """The option to raise for more epochs."""
    first_stage_steps: int | None = None
    """Steps of the stage before, whose weights this one began with."""
    given: Mapping[str, Any] | None = None
    """What is known of the model whose weights the run was given (file, licence …), in plain values."""

    @property
    def begins_with_given(self) -> bool:
        """Whether the weights of the very start are those that were given."""
        return self.given is not None and self.first_stage_steps is None

    def origin(self) -> dict[str, Any]:
        """What its checkpoints say of the stage before."""
        return {} if self.first_stage_steps is None else {"first_stage_steps": self.first_stage_steps}


WHOLE_RUN = Stage()


@dataclasses.dataclass
class TrainingState:
    """Where the run is; together with the state of its parts this is all that a resume needs."""

    epoch: int = 0
    """Epochs finished."""
    batch: int = 0
    """Batches done of the epoch that is under way."""
    step: int = 0
    """Optimizer steps done, undone ones included."""
    best_eer_percent: float = math.inf
    best_epoch: int = 0
    """0: the weights that the run was given."""
    initial_eer_percent: float | None = None
    """Of the weights that the run was given; None where it was given none."""
    best_stage: str = ""
    """Where best.pt comes from: this run itself, or a stage that followed it."""
    evaluations_without_gain: int = 0
    evaluated_epoch: int = 0
    """The last epoch after which was evaluated."""
    bad_steps: int = 0
    """Steps undone because of non-finite numbers."""
    bad_streak: int = 0
    overflows: int = 0
    """Steps undone because an fp16 gradient overflowed: routine, the scale adapts."""
    utterances: int = 0
    seconds: float = 0.0
    """Training time, evaluations included, over all starts."""
    epoch_loss_sum: float = 0.0
    epoch_accuracy_sum: float = 0.0
    epoch_good_steps: int = 0
    stopped_early: bool = False
    awaits_evaluation: bool = False
    """Whether the last epoch is trained and not yet judged: the run was stopped in its evaluation."""
    averaged: bool = False
    """Whether the mean of the last checkpoints has been tried."""
    metrics_lines: int = 0
    """Lines of metrics.jsonl that belong to the run as it is; what follows them is done, and written, again."""
    trials_checksum: int = 0
    """Of the trials that the best EER was measured on."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def load_dict(self, values: dict[str, Any]) -> None:
        """Take the values of `to_dict`; fields that the saved run did not have keep theirs."""
        # Saved by an earlier or a later version: what it does not have, or has beyond ours, changes nothing.
        known = {field.name for field in dataclasses.fields(self)}
        for name, value in values.items():
            if name not in known:
                continue
            own = getattr(self, name)
            are_numbers = isinstance(own, int | float) and isinstance(value, int | float)
            if None not in (own, value) and type(value) is not type(own) and not are_numbers:
                raise ValueError(f"{name} is {value!r:.60}; expected {type(own).__name__}")
            setattr(self, name, value)

    def epochs_done(self, options: TrainerOptions) -> bool:
        """Whether all epochs are trained and judged, or the run was stopped early."""
        return (self.epoch >= options.max_epochs or self.stopped_early) and not self.awaits_evaluation

    def is_finished(self, options: TrainerOptions) -> bool:
        """Whether nothing is left to do: epochs trained (or stopped early), last checkpoints averaged."""
        return self.epochs_done(options) and (self.averaged or options.average_checkpoints == 0)

    def take_eer(self, eer_percent: float, stage: str, *, costs_patience: bool, is_wanted: bool = False) -> bool:
        """Take in what an evaluation found; returns whether the model is to be best.pt: as a rule the best one so far.

        Args:
            eer_percent: of the model of now.
            stage: this run's own.
            costs_patience: whether it counts for early stopping where it is no better.
            is_wanted: whether it is to be best.pt whatever its EER.
        """
        is_best = is_wanted or eer_percent < self.best_eer_percent
        if is_best:
            self.best_eer_percent, self.best_epoch, self.best_stage = eer_percent, self.epoch, stage
            self.evaluations_without_gain = 0
        elif costs_patience:
            self.evaluations_without_gain += 1
        return is_best

    def begin_validation(self, trials_checksum: int) -> bool:
        """Forget the best EER where it was measured on other trials; returns whether it was."""
        # 0: nothing was evaluated yet, or by a version that kept no checksum.
        is_other = bool(self.trials_checksum) and trials_checksum != self.trials_checksum
        if is_other:
            logger.warning(
                "the trials to choose the best checkpoint by are others than before (validation list, max_trials or "
                "seed): EERs from here on are not compared with the %.2f %% of then, and best.pt begins anew",
                self.best_eer_percent,
            )
            self.best_eer_percent, self.best_epoch, self.evaluations_without_gain = math.inf, 0, 0
            self.best_stage, self.initial_eer_percent = "", None
        self.trials_checksum = trials_checksum
        return is_other

    def take_up_best(self, summary: Mapping[str, Any], stage: str) -> None:
        """Let a model that another stage has put in the place of best.pt be the one to beat.

        Args:
            summary: `training_summary` of best.pt.
            stage: this run's own.
        """
        # Its own best.pt is known from last.pt; only another stage can have put a better one there.
        if summary.get("stage", "") != stage and summary["best_eer_percent"] < self.best_eer_percent:
            best = best_of_run(summary)
            self.best_eer_percent, self.best_epoch = best["best_eer_percent"], best["best_epoch"]
            self.best_stage = best["best_stage"]

    def epoch_means(self) -> dict[str, float]:
        """Loss and accuracy over the good steps of the epoch."""
        # Of no good step there is no mean: 0 would read as a perfect loss.
        good = self.epoch_good_steps or math.nan
        return {"loss": self.epoch_loss_sum / good, "accuracy_percent": self.epoch_accuracy_sum / good}

    def begin_epoch_sums(self) -> None:
        """Forget the running sums of the epoch before."""
        self.epoch_loss_sum, self.epoch_accuracy_sum, self.epoch_good_steps = 0.0, 0.0, 0


def steps_for_schedules(state: TrainingState, accumulation_steps: int, num_batches: int, usual: int) -> float:
    """How many steps lie behind for the schedules: those of the epochs done and the share of this one.

    The count of steps would lie where the batch size was changed before a resume, or where epochs differ in length.

    Args:
        state: where the run is.
        accumulation_steps: batches of a step.
        num_batches: of the epoch under way.
        usual: steps of an epoch, as the schedules were told.
    """
    # A last step of fewer batches is a step too: rounded up.
    in_epoch, all_of_epoch = -(-state.batch // accumulation_steps), -(-num_batches // accumulation_steps)
    return state.epoch * usual + in_epoch * (usual / all_of_epoch)


def steps_left(state: TrainingState, options: TrainerOptions, num_batches: int) -> int:
    """Steps to the end of the run, its epochs taken to be as long as this one of `num_batches`."""
    per_epoch = -(-num_batches // options.accumulation_steps)
    in_epoch = -(-(num_batches - state.batch) // options.accumulation_steps)
    return in_epoch + per_epoch * max(0, options.max_epochs - state.epoch - 1)


def evaluations_left(state: TrainingState, options: TrainerOptions) -> int:
    """Evaluations to the end of the run: one every `test_interval` epochs, and one after the last."""
    interval, last = options.test_interval, options.max_epochs
    return max(0, -(-last // interval) - state.epoch // interval)


def run_summary(state: TrainingState) -> dict[str, Any]:
    """What a run came to, by the names that the report uses."""
    return {
        "epochs": state.epoch,
        "steps": state.step,
        "best_eer_percent": state.best_eer_percent,
        "best_epoch": state.best_epoch,
        "best_stage": state.best_stage,
        "initial_eer_percent": state.initial_eer_percent,
        "bad_steps": state.bad_steps,
        "fp16_overflows": state.overflows,
        "stopped_early": state.stopped_early,
        "utterances": state.utterances,
        "seconds": state.seconds,
    }


def best_of_run(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Of best.pt's `training_summary` what `run_summary` tells of the best model."""
    return {
        "best_eer_percent": summary["best_eer_percent"],
        "best_epoch": summary["epoch"],
        "best_stage": summary.get("stage", ""),
    }


def say_finished(state: TrainingState, options: TrainerOptions, stage: Stage, best_path: object) -> None:
    """Tell that there is nothing left to train, and how to go on."""
    more = max(state.epoch, options.max_epochs) + 10
    logger.info(
        "this %s %s (%d epochs, best EER %.2f %%): nothing to train. To go on: %s. To score: --eval --initial_model %s",
        stage.name or "run",
        "was stopped early" if state.stopped_early else "is finished",
        state.epoch,
        state.best_eer_percent,
        "a larger --patience" if state.stopped_early else f"{stage.epochs_option} {more}",
        best_path,
    )
