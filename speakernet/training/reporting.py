"""What a run tells while it trains: the numbers of its steps, epochs and evaluations, to the log and the records."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from speakernet.terminal import duration
from speakernet.training.interfaces import BatchLike
from speakernet.training.numbers import RecentSteps
from speakernet.training.options import TrainerOptions
from speakernet.training.parts import Course, Learner, Records
from speakernet.training.precision import report_activations
from speakernet.training.state import Stage, TrainingState, evaluations_left, steps_left
from speakernet.training.step import StepOutcome

logger = logging.getLogger(__name__)

EVALUATIONS_TO_JUDGE, MUCH_OF_THE_TIME = 2, 0.5
"""After so many evaluations: which share of the time they may take before it is said."""


SECONDS_TO_JUDGE = 10.0
"""Of steps, before it is said that they wait for data."""


class Reporter:
    """Collects the numbers of steps and tells them; the counts that a resume needs go into `state`."""

    def __init__(
        self,
        learner: Learner,
        course: Course,
        records: Records,
        options: TrainerOptions,
        state: TrainingState,
        stage: Stage,
    ) -> None:
        self.learner, self.course, self.options = learner, course, options
        self.progress, self.tracker = records.progress, records.tracker
        self.state, self.stage = state, stage
        self._recent = RecentSteps(options.max_bad_steps, course.loader.file_names)
        self._advise = records.advise
        self._is_advised = self._has_told_margin = False
        self._began = time.monotonic()
        self._evaluation_times: list[float] = []

    def before_first_step(self, batch: BatchLike) -> None:
        """Tell whether autocast acts."""
        with self.learner.compiler.paused():
            report_activations(self.learner.step.net, self.learner.step.precision, batch.waveforms)

    def count(self, outcome: StepOutcome, parts: dict[str, float], seconds: float) -> None:
        """Take in a finished step: what it gave, and the seconds of its parts and in all."""
        self._recent.add(self.state.step, outcome)
        self.tracker.update(seconds, outcome.num_utterances, parts)

    def after_step(self, scheduled: float, num_batches: int) -> None:
        """Fetch and tell what is due, in an epoch of `num_batches`; `scheduled` is the schedules' place.

        Raises:
            NonFiniteError: too many steps in a row had to be undone.
        """
        # Asking the device stops the host until all steps are done: once in many steps, but before it is too late.
        if len(self._recent) >= min(self.options.log_interval, self.options.max_bad_steps):
            self.fetch()
        if self.state.step % self.options.log_interval == 0:
            self.fetch()
            self._tell_steps(scheduled, num_batches)
        elif self.progress.is_due:
            self.fetch()
            window = self.tracker.window.summary()
            left = self._time_left(num_batches, window)
            self.progress.show({**window, **self._recent.means(), "run_time_left": left})

    def fetch(self) -> None:
        """Bring the numbers of the steps since the last fetch to the host, all in one transfer.

        Raises:
            NonFiniteError: too many steps in a row had to be undone.
        """
        self._recent.fetch_into(self.state, self.learner.step.precision)

    def tell_epoch(self) -> None:
        """What the epoch that has just been counted came to; once a run, what to change when it waits for data."""
        state, values = self.state, self.state.epoch_means()
        report = self.course.loader.epoch_report()
        self.progress.record("epoch", state.step, state.epoch, {**values, **report, "bad_steps": state.bad_steps})
        loss, accuracy = values["loss"], values["accuracy_percent"]
        logger.info("%s: loss %.4f, accuracy %.2f %%%s", self._epoch_name(), loss, accuracy, self._margin_note())
        # After an epoch and a while: the first steps wait for caches and workers, which says nothing.
        is_early = self.tracker.total.seconds < SECONDS_TO_JUDGE
        share = 0.0 if self._is_advised or is_early else self.tracker.summary().get("data_wait_share", 0.0)
        if advice := self._advise(share):
            logger.warning("%s", advice)
            self._is_advised = True

    def tell_evaluation(self, metrics: Mapping[str, Any], seconds: float, note: str) -> None:
        """What the validation found, and how long it took."""
        self._evaluation_times.append(seconds)
        state, best = self.state, self.state.best_eer_percent
        values = {**metrics, "best_eer_percent": best, "evaluation_seconds": seconds, "note": note}
        self.progress.record("evaluation", state.step, state.epoch, values)
        logger.info(
            "evaluation after %s%s: EER %.2f %% (best %.2f %%), %.1f s",
            self._epoch_name(),
            f" ({note})" if note else "",
            metrics["eer_percent"],
            best,
            seconds,
        )
        # The time left that stands there knows nothing of it.
        window = self.tracker.window.summary()
        left = self._time_left(len(self.course.loader), window)
        self.progress.show({**window, **self._recent.means(), "run_time_left": left})
        share = sum(self._evaluation_times) / max(time.monotonic() - self._began, 1e-9)
        if len(self._evaluation_times) == EVALUATIONS_TO_JUDGE and share > MUCH_OF_THE_TIME:
            logger.warning(
                "evaluations take %.0f %% of the time: raise training.test_interval, or lower evaluation.num_crops or "
                "evaluation.max_trials",
                100 * min(share, 1.0),
            )

    def _margin_note(self) -> str:
        """Said once a start, when the margin begins to act: the figures look like a failure."""
        margin = self.course.margin
        if self._has_told_margin or margin is None or margin(self.state.epoch * margin.steps_per_epoch) <= 0:
            return ""
        self._has_told_margin = True
        ramp = margin.options
        if ramp.margin == "constant" or self.state.epoch >= ramp.margin_end_epoch:
            return " (low by design: the margin makes every utterance look harder than it is)"
        end = f"{ramp.margin_end_epoch:g}"
        return f" (by design loss rises and accuracy falls while the margin grows, until epoch {end}: watch the EER)"

    def _tell_steps(self, scheduled: float, num_batches: int) -> None:
        window = self.tracker.take_window()
        values = {
            **window,
            **self._recent.take(),
            "learning_rate": self.course.learning_rate(scheduled),
            "run_time_left": self._time_left(num_batches, window),
        }
        if self.course.margin is not None:
            values["margin"] = self.course.margin(scheduled)
        self.progress.record("step", self.state.step, self.state.epoch + 1, values)

    def _time_left(self, num_batches: int, window: Mapping[str, float]) -> str:
        """Of training and evaluations, as fast as the last ones were."""
        of_steps = steps_left(self.state, self.options, num_batches) * window.get("step_seconds", 0.0)
        last = self._evaluation_times[-1] if self._evaluation_times else 0.0
        return duration(of_steps + evaluations_left(self.state, self.options) * last)

    def _epoch_name(self) -> str:
        return f"epoch {self.state.epoch}" + (f" of the {self.stage.name}" if self.stage.name else "")
