"""The training loop, from the first step (or the last checkpoint) to the summary.

Takes parts that others built: network, loss, optimizer, schedules, loader, a `validate` callable. Knows no model, no
loss and no audio. Reads from top to bottom: `train`, `train_epoch`, `_finish_epoch`, `evaluate`, then what they use.
"""

import functools
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from speakernet import distributed
from speakernet.seeding import capture_random_state, restore_random_state
from speakernet.training.averaging import WeightAverage, average_checkpoints, recompute_statistics
from speakernet.training.checkpoint import CheckpointStore, RunLock, to_cpu
from speakernet.training.compiling import NoCompiler
from speakernet.training.interfaces import BatchLike, Loader
from speakernet.training.interrupts import Interrupted, StopRequest
from speakernet.training.numbers import NonFiniteError, RecentSteps
from speakernet.training.optimizers import OptimizerState
from speakernet.training.options import TrainerOptions
from speakernet.training.precision import Precision, report_activations
from speakernet.training.progress import Progress, clock
from speakernet.training.resuming import resume
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule
from speakernet.training.snapshot import HasState, training_contents
from speakernet.training.state import (
    Stage,
    TrainingState,
    run_summary,
    say_finished,
    steps_for_schedules,
    steps_left,
)
from speakernet.training.step import TrainingStep
from speakernet.training.tracker import PerformanceTracker

__all__ = ["Interrupted", "Loader", "NonFiniteError", "Trainer"]
logger = logging.getLogger(__name__)

STATISTICS_BATCHES = 50
"""Batches over which batch-norm statistics are measured after averaging."""


class Trainer:
    """Trains a network; see the module's docstring.

    `train()` takes the run up from last.pt where there is one. Everything it writes lies in the store's folder.
    """

    def __init__(
        self,
        *,
        net: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRateSchedule,
        margin: MarginSchedule | None,
        loader: Loader,
        validate: Callable[[], Mapping[str, Any]],
        precision: Precision,
        store: CheckpointStore,
        tracker: PerformanceTracker,
        model_contents: Callable[[dict[str, Any]], dict[str, Any]],
        options: TrainerOptions,
        step: TrainingStep,
        stage: Stage | None = None,
        average: WeightAverage | None = None,
        progress: Progress | None = None,
        compiler: Any = None,
        extra_contents: Mapping[str, Any] | None = None,
        advise: Callable[[float], str] | None = None,
    ) -> None:
        # What is trained.
        self.net = net
        self.loss = loss
        self.optimizer = optimizer
        self.average = average or WeightAverage(net, 0.0)
        # What drives it.
        self.loader = loader
        self.validate = validate
        self.learning_rate = learning_rate
        self.margin = margin
        self.precision = precision
        self.step = step
        self.options = options
        self.stage = stage or Stage()
        # Where it is.
        self.state = TrainingState()
        self.recent = RecentSteps(options.max_bad_steps, loader.file_names)
        # What it tells and keeps.
        self.store = store
        self.tracker = tracker
        self.progress = progress or Progress(None)
        self.compiler = compiler or NoCompiler()
        self.profiler = step.profiler
        self.model_contents = model_contents
        self.extra_contents = dict(extra_contents or {})
        self.advise = advise or (lambda data_wait_share: "")
        self.stop = StopRequest()
        self.on_start: Callable[[], None] = lambda: None
        """Called on the main process once the run folder is locked, the last checkpoint loaded, and something left."""
        self._last_save_time = time.monotonic()
        self._saved_step = 0
        self._scheduled = 0.0

    def train(self) -> dict[str, Any]:
        """Train to the end, or from where the run was stopped; returns the summary.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, once last.pt is written.
            NonFiniteError: too many steps in a row had to be undone.
            ValueError: the run folder is in use, or its checkpoint is of another model.
        """
        lock = RunLock(self.store.folder)
        if distributed.is_main():
            lock.acquire()
        try:
            self.store.remove_leftovers()
            is_resumed = resume(self)
            if distributed.is_main():
                if not is_resumed:
                    self.store.set_aside_earlier_run()
                if not self.is_finished():
                    self.on_start()
            if self.is_finished():
                say_finished(self.state, self.options, self.stage, self.store.best_path)
                return self.summary()
            self.progress.open(self.state.step)
            with self.stop.listening():
                while not self.epochs_done():
                    self.train_epoch()
                    self._finish_epoch()
                    self._stop_if_asked()
                self._average_last()
            self.store.close()
            return self.summary()
        finally:
            self.compiler.close()
            self.progress.close()
            self.profiler.close()
            self.store.wait()
            lock.release()

    def is_finished(self) -> bool:
        """Whether nothing is left to do: epochs trained (or stopped early), last checkpoints averaged."""
        return self.epochs_done() and (self.state.averaged or self.options.average_checkpoints == 0)

    def epochs_done(self) -> bool:
        """Whether all epochs are trained, or the run was stopped early."""
        return self.state.epoch >= self.options.max_epochs or self.state.stopped_early

    def summary(self) -> dict[str, Any]:
        """What the run came to: plain values for the report."""
        return {
            **run_summary(self.state),
            "precision": self.precision.name,
            "best_path": str(self.store.best_path),
            "last_path": str(self.store.last_path),
            "performance": self.tracker.summary(),
        }

    def train_epoch(self) -> None:
        """All steps of one epoch, from its first batch or from where it was left; public for who measures epochs."""
        state = self.state
        if state.batch == 0:
            state.begin_epoch_sums()
            self.loader.set_epoch(state.epoch)
        self.net.train()
        self.loss.train()
        num_batches = len(self.loader)
        self.progress.start_epoch(state.epoch, self.options.max_epochs, num_batches, state.batch)
        batches = iter(self.loader)
        while state.batch < num_batches and self.run_step(batches):
            pass
        self._fetch()
        self.progress.end_epoch()

    def run_step(self, batches: Iterator[BatchLike]) -> bool:
        """One step and what comes between two; False when no batch was left. Public for who measures steps."""
        num_batches = len(self.loader)
        if not self._one_step(batches, num_batches):
            return False
        self._after_step(num_batches)
        return True

    def _one_step(self, batches: Iterator[BatchLike], num_batches: int) -> bool:
        """One optimizer step; False when the loader had nothing left (it skipped bad files, say)."""
        begin = time.perf_counter()
        data_seconds = compute_seconds = 0.0
        wanted = min(self.options.accumulation_steps, num_batches - self.state.batch)
        self._scheduled = steps_for_schedules(
            self.state, self.options.accumulation_steps, num_batches, self.learning_rate.steps_per_epoch
        )
        if self.margin is not None:
            self.loss.margin = self.margin(self._scheduled)  # type: ignore[assignment]
        taken = 0
        for _ in range(wanted):
            before_data = time.perf_counter()
            with self.profiler.phase("data"):
                batch = self._next_batch(batches, taken)
            after_data = time.perf_counter()
            data_seconds += after_data - before_data
            if batch is None:
                break
            if self.state.step == 0 and taken == 0:
                self._say_once(batch)
            self.compiler.run(functools.partial(self.step.add, batch))
            compute_seconds += time.perf_counter() - after_data
            taken += 1
            self.progress.advance()
        if taken == 0:
            # Fewer batches than announced: the epoch is over all the same.
            self.state.batch = num_batches
            return False
        before_update = time.perf_counter()
        with self.profiler.phase("optimizer"):
            outcome = self.step.finish(self.learning_rate(self._scheduled))
            self.average.update()
        after_update = time.perf_counter()
        self.state.step += 1
        self.state.batch += taken if taken == wanted else num_batches - self.state.batch
        self.state.utterances += outcome.num_utterances
        self.recent.add(self.state.step, outcome)
        parts = {"data": data_seconds, "forward_backward": compute_seconds, "optimizer": after_update - before_update}
        seconds = time.perf_counter() - begin
        self.state.seconds += seconds
        self.tracker.update(seconds, outcome.num_utterances, parts=parts)
        return True

    def _next_batch(self, batches: Iterator[BatchLike], taken: int) -> BatchLike | None:
        """The next batch, None where there is none left; what was trained is kept where the loader fails."""
        try:
            return next(batches, None)
        except Exception as error:
            if self.state.step > self._saved_step:
                if taken:  # The step under way is dropped whole, with the micro-batches that it had taken.
                    self.step.forget()
                    self.state.batch += taken
                self.save_last()
                self.store.close()
                logger.error("%s: last.pt was written after step %d", type(error).__name__, self.state.step)
            raise

    def _after_step(self, num_batches: int) -> None:
        """Numbers, profiler, compilation, saving, and requests to stop, between two steps."""
        state, options = self.state, self.options
        self.profiler.step()
        if len(self.recent) >= min(options.log_interval, options.max_bad_steps):
            self._fetch()
        if state.step % options.log_interval == 0:
            self._report(num_batches)
        self.compiler.consider(state.step, steps_left(self.state, self.options, num_batches))
        due = options.save_steps and state.step % options.save_steps == 0
        waited = time.monotonic() - self._last_save_time
        if due or self.stop or (options.save_minutes and waited > 60 * options.save_minutes):
            self.save_last()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """End the run, which has been saved, where a signal asked for it."""
        if self.stop:
            self.store.close()
            logger.warning("stopped by %s after step %d; the same command goes on", self.stop.name, self.state.step)
            raise Interrupted(self.stop.number)

    def _finish_epoch(self) -> None:
        """Evaluate when it is time, write checkpoints, decide about early stopping."""
        state, options = self.state, self.options
        values = state.epoch_means()
        state.epoch, state.batch = state.epoch + 1, 0
        report = dict(self.loader.epoch_report())
        self.progress.record("epoch", state.step, state.epoch, {**values, **report, "bad_steps": state.bad_steps})
        logger.info("%s: loss %.4f, accuracy %.2f %%", self._epoch_name(), values["loss"], values["accuracy_percent"])
        self._say_advice()
        is_last = state.epoch >= options.max_epochs
        if state.epoch % options.test_interval == 0 or is_last:
            eer = self.evaluate()
            self.learning_rate.observe(eer)
            if options.patience and state.evaluations_without_gain >= options.patience:
                state.stopped_early = True
                logger.info("early stopping: no better EER in %d evaluations", state.evaluations_without_gain)
            self._keep_epoch()
        elif options.average_checkpoints:
            self._keep_epoch()
        self.save_last()

    def evaluate(self, note: str = "") -> float:
        """Run `validate` on the weights (their average where one is kept); keep the model when it is the best."""
        begin = time.perf_counter()
        self._free_memory()
        # Evaluation must not change what training draws next.
        random_state = capture_random_state()
        state = self.state
        with self.average.applied(), self.compiler.paused(), self.profiler.paused():
            self.net.eval()
            metrics = dict(self.validate())
            self.net.train()
            eer = float(metrics["eer_percent"])
            if state.begin_validation(int(metrics.get("trials_checksum", 0))):
                self.learning_rate.load_state_dict({"observed_eers": []})
            is_best = eer < state.best_eer_percent
            if is_best:
                state.best_eer_percent, state.best_epoch, state.evaluations_without_gain = eer, state.epoch, 0
                state.best_stage = self.stage.name
                if distributed.is_main():
                    self.store.save_best(self.model_contents(self._training_summary()))
            elif not note:
                state.evaluations_without_gain += 1
        restore_random_state(random_state)
        self._free_memory()
        state.evaluated_epoch = state.epoch
        seconds = time.perf_counter() - begin
        state.seconds += seconds
        values = {**metrics, "best_eer_percent": state.best_eer_percent, "evaluation_seconds": seconds, "note": note}
        self.progress.record("evaluation", state.step, state.epoch, values)
        logger.info(
            "evaluation after %s%s: EER %.2f %% (best %.2f %%), %.1f s",
            self._epoch_name(),
            f" ({note})" if note else "",
            eer,
            state.best_eer_percent,
            seconds,
        )
        return eer

    def _average_last(self) -> None:
        """Try the mean of the last checkpoints; it becomes best.pt when its EER is better."""
        if self.is_finished():
            return
        self.store.wait()
        paths = self.store.epoch_paths()[-self.options.average_checkpoints :]
        weights, head = average_checkpoints(paths, self.options.average_checkpoints)
        own = to_cpu(self.net.state_dict())
        # What is no weight of the model file (the position in keyed draws) stays as it is.
        self.net.load_state_dict({**own, **weights})
        self.loader.set_epoch(self.state.epoch)
        with self.precision.autocast(), self.compiler.paused():
            some = itertools.islice(iter(self.loader), STATISTICS_BATCHES)
            num_batches = recompute_statistics(self.net, (batch.waveforms for batch in some))
        logger.info("averaged the last %d checkpoints; statistics measured over %d batches", len(paths), num_batches)
        # The moving average must not stand in for these weights.
        kept, self.average = self.average, WeightAverage(self.net, 0.0)
        self.evaluate(f"average of {len(paths)} checkpoints")
        self.average = kept
        if distributed.is_main():
            head = self.loss.state_dict() if head is None else head
            self.store.save_average({**self.model_contents(self._training_summary()), "head": head})
        self.net.load_state_dict(own)
        self.state.averaged = True
        self.save_last()

    def _keep_epoch(self) -> None:
        if distributed.is_main():
            # The head is averaged too, for a stage that follows.
            head = {"head": self.loss.state_dict()} if self.options.average_checkpoints else {}
            self.store.save_epoch(self.state.epoch, {**self.model_contents(self._training_summary()), **head})

    def save_last(self) -> None:
        """Write everything that a resume needs."""
        self._fetch()
        self._last_save_time = time.monotonic()
        self._saved_step = self.state.step
        if distributed.is_main():
            self.store.save_last(self.contents())

    def contents(self) -> dict[str, Any]:
        """The contents of last.pt: the model file's own, and under `training` the state of every part."""
        training = training_contents(self.state, self.modules(), self.parts(), self.loader)
        return {**self.model_contents(self._training_summary()), "training": {**training, **self.extra_contents}}

    def modules(self) -> dict[str, nn.Module]:
        """What is trained, by its name in a checkpoint."""
        return {"net": self.net, "loss": self.loss}

    def parts(self) -> dict[str, HasState]:
        """Everything else that has state, by its name in a checkpoint."""
        return {
            "optimizer": OptimizerState(self.optimizer),
            "learning_rate": self.learning_rate,
            "precision": self.precision,
            "average": self.average,
        }

    def _training_summary(self) -> dict[str, Any]:
        state = self.state
        summary = {"epoch": state.epoch, "step": state.step, "best_eer_percent": state.best_eer_percent}
        return summary | ({"stage": self.stage.name} if self.stage.name else {})

    def _epoch_name(self) -> str:
        return f"epoch {self.state.epoch}" + (f" of the {self.stage.name}" if self.stage.name else "")

    def _fetch(self) -> None:
        """Bring the numbers of the steps since the last fetch to the host, all in one transfer."""
        self.recent.fetch_into(self.state, scale=self.precision)

    def _report(self, num_batches: int) -> None:
        self._fetch()
        window = self.tracker.take_window()
        left = steps_left(self.state, self.options, num_batches) * window.get("step_seconds", 0.0)
        values = {
            **window,
            **self.recent.take(),
            "learning_rate": self.learning_rate(self._scheduled),
            "run_time_left": clock(left),
        }
        if self.margin is not None:
            values["margin"] = self.margin(self._scheduled)
        self.progress.record("step", self.state.step, self.state.epoch + 1, values)

    def _say_advice(self) -> None:
        """Once a run: what to change when it waits for data."""
        advice = self.advise(self.tracker.summary().get("data_wait_share", 0.0))
        if advice:
            logger.warning("%s", advice)
            self.advise = lambda data_wait_share: ""

    def _free_memory(self) -> None:
        gc.collect()
        if self.precision.device.type == "cuda":
            torch.cuda.empty_cache()

    def _say_once(self, batch: BatchLike) -> None:
        """Before the very first step: whether autocast acts, and what training accuracy means."""
        with self.compiler.paused():
            report_activations(self.net, self.precision, batch.waveforms)
        if self.margin is not None and self.margin.full > 0:
            logger.info("training accuracy is low by design: the margin makes every utterance look harder than it is")
