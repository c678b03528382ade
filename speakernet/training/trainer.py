"""The training loop, from the first step (or the last checkpoint) to the summary.

Takes parts that others built, in the groups of `speakernet.training.parts`. Knows no model, no loss and no audio. Reads
from top to bottom: `train`, `train_epoch`, `run_step`, `evaluate`, then the end of the run.
"""

import contextlib
import functools
import gc
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from speakernet.machine.threads import Stopped
from speakernet.parallel import distributed
from speakernet.random import capture_random_state, restore_random_state
from speakernet.run_folder import held
from speakernet.terminal import Bar
from speakernet.training.averaging import average_checkpoints, recompute_statistics
from speakernet.training.interfaces import BatchLike
from speakernet.training.interrupts import Interrupted, StopRequest
from speakernet.training.keeping import Keeper
from speakernet.training.numbers import check_epoch
from speakernet.training.options import TrainerOptions
from speakernet.training.parts import Course, Learner, Records
from speakernet.training.reporting import Reporter
from speakernet.training.resuming import resume
from speakernet.training.state import (
    WHOLE_RUN,
    Stage,
    TrainingState,
    run_summary,
    say_finished,
    steps_for_schedules,
    steps_left,
)
from speakernet.training.step import StepOutcome
from speakernet.training.store import to_cpu
from speakernet.training.supply import Supply

logger = logging.getLogger(__name__)

STATISTICS_BATCHES = 50
"""Batches over which batch-norm statistics are measured after averaging."""


class Trainer:
    """Trains a network; see the module's docstring.

    `train()` takes the run up from last.pt where there is one. Everything it writes lies in the store's folder.
    """

    def __init__(
        self,
        learner: Learner,
        course: Course,
        records: Records,
        options: TrainerOptions,
        stage: Stage = WHOLE_RUN,
        stop: StopRequest | None = None,
    ) -> None:
        self.options, self.stage = options, stage
        # What is trained.
        self.step, self.average, self.compiler = learner.step, learner.average, learner.compiler
        self.freezing, self.threads = learner.freezing, learner.threads
        self.net, self.loss, self.optimizer = self.step.net, self.step.loss, self.step.optimizer
        self.precision, self.profiler = self.step.precision, self.step.profiler
        # What drives it.
        self.loader, self.validate = course.loader, course.validate
        self.supply = Supply(course.loader)
        self.learning_rate, self.margin = course.learning_rate, course.margin
        # A request that nobody has made yet counts as false.
        self.stop = StopRequest() if stop is None else stop
        # What every process tells the others with a step.
        self.step.team.wishes = self._wishes
        # Where it is.
        self.state = TrainingState()
        self._scheduled = 0.0
        # What it keeps and tells.
        self.store, self.progress, self.tracker = records.store, records.progress, records.tracker
        self.on_start = records.on_start
        self.keeper = Keeper(learner, course, records, self.state, stage)
        self.reporter = Reporter(learner, course, records, options, self.state, stage)

    def _wishes(self) -> list[bool]:
        saves = self.keeper.is_due_by_minutes(self.options)
        return [*self.stop.wishes(), saves, self.supply.error is not None]

    def train(self) -> dict[str, Any]:
        """Train to the end, or from where the run was stopped; returns the summary.

        Raises:
            Interrupted: after Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, once last.pt is written.
            NonFiniteError: too many steps in a row, or all of an epoch, had to be undone.
            ValueError: the run folder is in use, or its checkpoint is of another model.
        """
        with self._in_its_folder():
            self._take_up()
            if self.is_finished():
                say_finished(self.state, self.options, self.stage, self.store.best_path)
                return self.summary()
            self.progress.open(self.state.step, self.state.metrics_lines or None)
            with self.stop.listening():
                try:
                    self._train_on()
                except Stopped:
                    # Nothing is kept of an evaluation that was left: the run that goes on begins with it.
                    self.stop.agree()
                    self.save_last()
                    self._stop_if_asked()
            self.store.close()
            return self.summary()

    def _train_on(self) -> None:
        """All that is left to do.

        Raises:
            Stopped: in an evaluation.
        """
        self._evaluate_start()
        while not self.state.epochs_done(self.options):
            if not self.state.awaits_evaluation:
                self.train_epoch()
                self._count_epoch()
            self._judge_epoch()
            self.stop.agree()
            self._stop_if_asked()
        self._average_last()

    def is_finished(self) -> bool:
        """Whether nothing is left to do: epochs trained (or stopped early), last checkpoints averaged."""
        return self.state.is_finished(self.options)

    def summary(self) -> dict[str, Any]:
        """What the run came to: plain values for the report."""
        return {
            **run_summary(self.state),
            "precision": self.precision.name,
            "best_path": str(self.store.best_path),
            "last_path": str(self.store.last_path),
            "performance": self.tracker.summary(),
        }

    @contextlib.contextmanager
    def _in_its_folder(self) -> Iterator[None]:
        """Hold the run folder, and leave nothing open or half written behind, whatever happens inside."""
        with contextlib.ExitStack() as stack:
            if distributed.is_main():
                stack.enter_context(held(self.store.folder))
            # They run from the last to the first: the folder is let go of when nothing is written any more.
            stack.callback(self.store.wait)
            for part in (self.profiler, self.progress, self.threads, self.compiler, self.step):
                stack.callback(part.close)
            yield

    def _take_up(self) -> None:
        """Go on from what the folder holds, or make room for a run that begins."""
        if distributed.is_main():
            self.store.remove_leftovers()
        is_resumed = resume(self.keeper, self.options)
        if not is_resumed and distributed.is_main():
            self.store.set_aside_earlier_run()
        if self.is_finished():
            if not distributed.from_main(self.store.best_path.exists):
                self.evaluate("best.pt made again")
                self.save_last()
        elif distributed.is_main():
            self.on_start()

    def train_epoch(self) -> None:
        """All steps of one epoch, from its first batch or from where it was left."""
        state = self.state
        if state.batch == 0:
            state.begin_epoch_sums()
            self.loader.set_epoch(state.epoch)
        self.freezing.begin_training(state.epoch)
        self.loss.train()
        self.step.team.begin_epoch()
        num_batches = len(self.loader)
        self.progress.start_epoch(state.epoch, self.options.max_epochs, num_batches, state.batch)
        batches = iter(self.loader)
        while state.batch < num_batches and self.run_step(batches):
            pass
        # On a GPU what was told with the last step has not been read yet.
        if self.supply.has_failed():
            self._end_without_data(0)
        self.reporter.fetch()

    def run_step(self, batches: Iterator[BatchLike]) -> bool:
        """One optimizer step and what comes between two; False when the loader had nothing left."""
        begin, processor_begin = time.perf_counter(), time.thread_time()
        distributed.work.at(f"the data of step {self.state.step + 1}")
        num_batches = len(self.loader)
        wanted = min(self.options.accumulation_steps, num_batches - self.state.batch)
        self._look_up_schedules(num_batches)
        taken, parts = self._add_batches(batches, wanted)
        if taken == 0:
            # Fewer batches than announced (bad files were skipped, say): the epoch is over all the same.
            self.state.batch = num_batches
            return False
        before_update = time.perf_counter()
        with self.profiler.phase("optimizer"):
            outcome = self.step.finish(self.learning_rate(self._scheduled))
            if self.step.team.agreed()[-1]:
                self._end_without_data(taken)
            self.average.update()
        parts["optimizer"] = time.perf_counter() - before_update
        self.state.batch += taken if taken == wanted else num_batches - self.state.batch
        seconds, ran = time.perf_counter() - begin, time.thread_time() - processor_begin
        self._count(outcome, parts, seconds)
        is_compiled = self.compiler.is_compiled
        self.threads.step(seconds - parts["data"], ran, outcome.num_utterances, is_compiled=is_compiled)
        self._after_step(num_batches)
        return True

    def _look_up_schedules(self, num_batches: int) -> None:
        """Find the place of the coming step in the schedules, and give the loss its margin."""
        self._scheduled = steps_for_schedules(
            self.state, self.options.accumulation_steps, num_batches, self.learning_rate.steps_per_epoch
        )
        if self.margin is not None:
            self.step.set_margin(self.margin(self._scheduled))

    def _add_batches(self, batches: Iterator[BatchLike], wanted: int) -> tuple[int, dict[str, float]]:
        """Forward and backward of the step's micro-batches; how many there were, and seconds by part of the step."""
        parts = {"data": 0.0, "forward_backward": 0.0}
        for taken in range(wanted):
            before_data = time.perf_counter()
            with self.profiler.phase("data"):
                batch = self._next_batch(batches, taken)
            after_data = time.perf_counter()
            parts["data"] += after_data - before_data
            if batch is None:
                return taken, parts
            distributed.work.at(f"step {self.state.step + 1}")
            if self.state.step == 0 and taken == 0:
                self.reporter.before_first_step(batch)
            self.compiler.run(functools.partial(self.step.add, batch, is_last=taken + 1 == wanted))
            parts["forward_backward"] += time.perf_counter() - after_data
            self.progress.advance()
        return wanted, parts

    def _next_batch(self, batches: Iterator[BatchLike], taken: int) -> BatchLike | None:
        batch = self.supply.next(batches, is_kept=self.state.step > 0)
        if batch is None and self.supply.error is not None:
            self._end_without_data(taken)
        return batch

    def _end_without_data(self, taken: int) -> NoReturn:
        """Put the step under way back, with the micro-batches that it has taken; write last.pt, and end the run."""
        if taken:
            self.step.forget()
            self.loader.put_back(taken)
        self.save_last()
        self.store.close()
        self.supply.raise_error(self.state.step)

    def _count(self, outcome: StepOutcome, parts: dict[str, float], seconds: float) -> None:
        self.state.step += 1
        self.state.utterances += outcome.num_utterances
        self.state.seconds += seconds
        self.reporter.count(outcome, parts, seconds)

    def _after_step(self, num_batches: int) -> None:
        """Profiler, numbers, compilation, saving, and requests to stop, between two steps."""
        self.profiler.step()
        self.reporter.after_step(self._scheduled, num_batches)
        self.compiler.consider(self.state.step, steps_left(self.state, self.options, num_batches))
        *asked, is_due, _is_without_data = self.step.team.agreed()
        self.stop.take(asked)
        if self.stop or is_due or self.keeper.is_due_by_steps(self.options):
            self.save_last()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """End the run, which has been saved, where a signal asked for it."""
        if self.stop:
            self.store.close()
            logger.warning("stopped by %s after step %d; the same command goes on", self.stop.name, self.state.step)
            raise Interrupted(self.stop.agreed)

    def save_last(self) -> None:
        """Write everything that a resume needs, the numbers that still lie on the device included."""
        self.reporter.fetch()
        self.state.metrics_lines = self.progress.num_lines
        self.keeper.save_last()

    def _evaluate_start(self) -> None:
        """Evaluate weights that were given, as epoch 0: they are best.pt until an epoch beats them."""
        state = self.state
        if not self.stage.begins_with_given or state.step or state.initial_eer_percent is not None:
            return
        state.initial_eer_percent = self.evaluate("initial model")
        self.save_last()
        self.stop.agree()
        self._stop_if_asked()

    def _count_epoch(self) -> None:
        """An epoch is trained: whether it came to anything, and what."""
        state = self.state
        state.epoch, state.batch, state.awaits_evaluation = state.epoch + 1, 0, True
        check_epoch(state, is_last=state.epoch >= self.options.max_epochs)
        self.reporter.tell_epoch()

    def _judge_epoch(self) -> None:
        """Evaluate when it is time, write checkpoints, decide about early stopping."""
        state, options = self.state, self.options
        is_last = state.epoch >= options.max_epochs
        is_changed = not self.freezing.is_frozen(state.epoch - 1)
        # A frozen network is still the one that was evaluated last.
        is_evaluated = is_last or (is_changed and state.epoch % options.test_interval == 0)
        if is_evaluated:
            self.learning_rate.observe(self.evaluate())
            if options.patience and state.evaluations_without_gain >= options.patience:
                state.stopped_early = True
                logger.info("early stopping: no better EER in %d evaluations", state.evaluations_without_gain)
        if is_evaluated or options.average_checkpoints:
            self.keeper.save_epoch(with_head=options.average_checkpoints > 0)
        state.awaits_evaluation = False
        self.save_last()

    def evaluate(self, note: str = "", *, of_average: bool = True) -> float:
        """Run `validate` on the weights; keep the model when it is the best. Returns the EER in percent.

        Args:
            note: why, where it is no evaluation of an epoch, which alone costs patience.
            of_average: let the moving average stand in for the weights, where one is kept.
        """
        start, state = time.perf_counter(), self.state
        distributed.work.at(f"the evaluation after epoch {state.epoch}")
        with self._training_set_aside(of_average):
            # What was measured for the model before belongs to its training.
            begin = time.perf_counter()
            # What follows from the figures is decided by those of one process.
            metrics = distributed.broadcast_object(dict(self.validate()))
            eer = metrics["eer_percent"] = float(metrics["eer_percent"])
            if state.begin_validation(int(metrics.get("trials_checksum", 0))):
                self.learning_rate.load_state_dict({"observed_eers": []})
            is_wanted = self.options.final_model == "last"
            if state.take_eer(eer, self.stage.name, costs_patience=not note, is_wanted=is_wanted):
                self.keeper.save_best()
            seconds = time.perf_counter() - begin
        state.evaluated_epoch = state.epoch
        state.seconds += time.perf_counter() - start
        self.reporter.tell_evaluation(metrics, seconds, note)
        return eer

    @contextlib.contextmanager
    def _training_set_aside(self, of_average: bool) -> Iterator[None]:
        """Inside the block the network is evaluated; afterwards training goes on as if nothing had been."""
        self._free_memory()
        # Evaluation must not change what training draws next.
        random_state = capture_random_state()
        average = self.average.applied() if of_average else contextlib.nullcontext()
        # Weights that nothing was averaged into have the statistics that they came with.
        measures = of_average and self.options.ema_statistics == "measured" and self.state.step > 0
        with average, self.compiler.paused(), self.profiler.paused():
            if measures:
                self._measure_statistics()
            self.step.team.share_statistics()
            self.net.eval()
            try:
                yield
            finally:
                self.net.train()
                restore_random_state(random_state)
        self._free_memory()

    def _free_memory(self) -> None:
        # Training and evaluation need their memory in pieces of other sizes, which would not fit between each other.
        gc.collect()
        if self.precision.device.type == "cuda":
            torch.cuda.empty_cache()

    def _average_last(self) -> None:
        """Try the mean of the last checkpoints; it becomes best.pt when its EER is better."""
        if self.is_finished():
            return
        number, weights, head = distributed.from_main(self._average)
        own = to_cpu(self.net.state_dict())
        # What is no weight of the model file (the position in keyed draws) stays as it is.
        self.net.load_state_dict({**own, **weights})
        logger.info("averaged the last %d checkpoints", number)
        if not self.freezing.keeps_statistics:
            self._measure_statistics()
        # The moving average must not stand in for these weights.
        try:
            self.evaluate(f"average of {number} checkpoints", of_average=False)
            self.keeper.save_average(head)
        finally:
            self.net.load_state_dict(own)
        self.state.averaged = True
        self.save_last()

    def _average(self) -> tuple[int, dict[str, Any], dict[str, Any] | None]:
        """How many checkpoints there are, and the means of their weights and heads."""
        self.store.wait()
        paths = self.store.epoch_paths()[-self.options.average_checkpoints :]
        return len(paths), *average_checkpoints(paths, self.options.average_checkpoints)

    def _measure_statistics(self) -> None:
        """Measure the batch-norm statistics anew: those of averaged weights are no average of statistics."""
        self.loader.set_epoch(self.state.epoch)
        with self.precision.autocast(), self.compiler.paused():
            some = itertools.islice(iter(self.loader), STATISTICS_BATCHES)
            most = min(STATISTICS_BATCHES, len(self.loader))
            with Bar("batch-norm statistics", most, "batch", is_shown=self.progress.show_bar) as bar:
                num_batches = recompute_statistics(self.net, map(self._waveforms, bar.over(some)))
        # Those batches belong to no epoch: the one to come begins with its first.
        self.loader.set_epoch(self.state.epoch)
        logger.info("batch-norm statistics measured over %d batches", num_batches)

    def _waveforms(self, batch: BatchLike) -> torch.Tensor:
        self.step.key_draws(batch)
        return batch.waveforms
