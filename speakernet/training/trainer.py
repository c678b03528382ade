"""The training loop, from the first step (or the last checkpoint) to the summary.

It is independent of models, losses and audio. Read it from top to bottom: `train`, `train_epoch`,
`run_step`, `judge_epoch`, `evaluate`, then resuming, checkpoints and logging.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import update_bn

from speakernet import distributed
from speakernet.checkpoint import CheckpointError
from speakernet.files import error_line, reading
from speakernet.machine.device import utilisation_monitor
from speakernet.machine.threads import Stopped
from speakernet.run_folder import CHECKPOINTS, lock_folder
from speakernet.terminal import Bar, counted, duration
from speakernet.training.checkpoints import (
    TENSOR_SECTIONS,
    CheckpointStore,
    average_checkpoints,
    capture_random_state,
    changed_options,
    epoch_paths,
    find_checkpoint,
    log_changes,
    refuse_other_speakers,
    restore_random_state,
    to_cpu,
)
from speakernet.training.optimizers import Freezing, OptimizerState, WeightAverage
from speakernet.training.options import TrainingOptions
from speakernet.training.progress import Progress, RunSpeed, performance_sentence, rates
from speakernet.training.protocols import Batch, Loader
from speakernet.training.schedules import Schedules
from speakernet.training.state import WHOLE_RUN, NonFiniteError, RecentSteps, Stage, TrainingState
from speakernet.training.step import TrainingStep
from speakernet.training.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)

STATISTICS_BATCHES = 50
"""Batches over which batch-norm statistics are measured after averaging."""
SECONDS_TO_JUDGE = 10.0
"""Training time before a warning about waiting for data: the first steps wait for caches and
workers."""


@dataclasses.dataclass(frozen=True)
class RunOutput:
    """Where a run writes, and what its files contain besides the training state."""

    store: CheckpointStore
    progress: Progress
    model_contents: Callable[..., dict[str, Any]]
    """Makes the contents of a model file of `training_summary` and `is_last`."""
    origin: Mapping[str, Any]
    """What a resumed run is compared with: options, speakers, training list."""
    net_state: Any = None
    """The object with the network's state for last.pt; None: the network itself."""


class Trainer:
    """Trains a network; writes everything to the store's folder."""

    def __init__(
        self,
        step: TrainingStep,
        loader: Loader,
        validate: Callable[[int], Mapping[str, Any]],
        schedules: Schedules,
        options: TrainingOptions,
        output: RunOutput,
        stage: Stage = WHOLE_RUN,
        stop: StopRequest | None = None,
    ) -> None:
        self.step = step
        self.net = step.net
        self.loss = step.loss
        self.precision = step.precision
        self.loader = loader
        self.validate = validate
        self.learning_rate = schedules.learning_rate
        self.margin = schedules.margin
        self.options = options
        self.output = output
        self.store = output.store
        self.progress = output.progress
        self.stage = stage
        self._of_stage = f" of the {stage.name}" if stage.name else ""
        self.stop = stop or StopRequest()
        step.exchange.listen_to(self._wishes)
        # How the network is trained.
        self.freezing = Freezing(self.net, options)
        self.average = WeightAverage(self.net, options.ema_decay, options.initial_weight)
        # Where the run stands, and how fast it is.
        self.state = TrainingState()
        self.recent = RecentSteps(options.max_bad_steps, loader.file_names)
        self.speed = RunSpeed(
            self.precision.name, options.accumulation_steps, self.precision.device
        )
        # Components with state, by their name in last.pt, which also holds the loader's and the
        # random state.
        self.components: dict[str, Any] = {
            "net": output.net_state or self.net,
            "loss": self.loss,
            "optimizer": OptimizerState(step.optimizer),
            "learning_rate": self.learning_rate,
            "precision": self.precision,
            "average": self.average,
        }
        self._utilisation = utilisation_monitor(self.precision.device)
        self._saved_at = time.monotonic()
        self._evaluation_seconds = 0.0
        self._num_steps = options.max_epochs * self.learning_rate.steps_per_epoch
        self._is_advised = False

    # The story of a run. An epoch is a row of steps, then a judgement: an evaluation if one is due,
    # checkpoints, and the decision to stop early. Whatever interrupts this (a signal, a full disk,
    # a kill) finds a last.pt from which the same command goes on as if nothing had happened; so
    # everything that influences the next step is in `state`, in `components`, or follows from
    # them. Every rank walks through the same lines in the same order, because any line may be a
    # collective, for which a rank that took another branch would wait forever.
    def train(self) -> dict[str, Any]:
        """Train to the end, resuming if the run was stopped; returns the summary."""
        with contextlib.ExitStack() as stack:
            if distributed.is_main():
                stack.enter_context(lock_folder(self.store.folder))
            # Called in reverse order: the folder is released after the last write.
            stack.callback(self.store.wait)
            stack.callback(self.progress.close)
            stack.callback(self.step.close)
            self._resume()
            if self.state.is_finished(self.options):
                self._log_finished()
                return self.summary()
            self.progress.open(self.state.step, self.state.metrics_lines)
            with self.stop.listening(), self._utilisation:
                try:
                    self._train_on()
                except Stopped:
                    # An interrupted evaluation keeps no results; the resumed run starts by
                    # repeating it.
                    self.stop.agree()
                    self.save_last()
                    self._end_if_stopped()
            self.store.close()
            return self.summary()

    def _train_on(self) -> None:
        """Do the remaining work."""
        state = self.state
        has_given_weights = self.stage.is_first and self.stage.initial_model
        if has_given_weights and not state.step and state.initial_eer_percent is None:
            # The initial weights are best.pt until an epoch beats them.
            state.initial_eer_percent = self.evaluate("initial model")
            self.save_last()
            self.stop.agree()
            self._end_if_stopped()
        while not state.has_finished_epochs(self.options):
            if not state.awaits_evaluation:
                self.train_epoch()
            self.judge_epoch()
            self.stop.agree()
            self._end_if_stopped()
        if not state.is_finished(self.options):
            self._average_last()

    def train_epoch(self) -> None:
        """Run the remaining steps of an epoch."""
        state = self.state
        num_batches = len(self.loader)
        if state.micro_batch == 0:
            state.epoch_loss_sum = state.epoch_accuracy_sum = 0.0
            state.epoch_good_steps = 0
            self.loader.set_epoch(state.epoch)
        self.freezing.begin_training(state.epoch)
        self.loss.train()
        self.step.exchange.begin_epoch()
        done = state.micro_batch
        self.progress.start_epoch(state.epoch, self.options.max_epochs, num_batches, done)
        batches = iter(self.loader)
        while state.micro_batch < num_batches:
            self.run_step(batches)
        self.recent.fetch_into(state, self.precision)
        state.epoch = state.epoch + 1
        state.micro_batch = 0
        state.awaits_evaluation = True
        is_over = state.bad_streak or state.epoch >= self.options.max_epochs
        if is_over and not state.epoch_good_steps:
            raise NonFiniteError(
                f"epoch {state.epoch}: every step was undone, so there is nothing to evaluate. "
                "Lower optimizer.learning_rate, try --mixed-precision no, or check the audio named "
                "in the log"
            )
        self._report_epoch()

    @property
    def position(self) -> float:
        """The position of the run in optimizer steps of the schedules."""
        # Derived from epochs: the count of steps would be wrong if the batch size changed before a
        # resume.
        count = self.options.accumulation_steps
        per_epoch = self.learning_rate.steps_per_epoch
        done = -(-self.state.micro_batch // count)
        in_epoch = -(-len(self.loader) // count)
        return self.state.epoch * per_epoch + done * (per_epoch / in_epoch)

    def run_step(self, batches: Iterator[Batch]) -> None:
        """Take one optimizer step, then count, log and save as needed."""
        begin = time.perf_counter()
        state = self.state
        position = self.position
        count = min(self.options.accumulation_steps, len(self.loader) - state.micro_batch)
        if self.margin is not None:
            self.loss.set_margin(self.margin(position))
        name = f"step {state.step + 1}"
        learning_rate = self.learning_rate(position)
        try:
            outcome = self.step.run(batches, count, name, learning_rate, self._num_steps - position)
        except Exception:
            # The loader failed before the first micro-batch: the state is still that after the last
            # step.
            if state.step and not self.step.has_begun and not distributed.is_distributed():
                self.save_last()
                self.store.close()
            raise
        if self.average.is_kept:
            self.average.update()
        state.step += 1
        state.micro_batch += count
        state.utterances += outcome.num_utterances
        self.recent.waiting.append((state.step, outcome))
        seconds = time.perf_counter() - begin
        state.seconds += seconds
        self.speed.update(seconds, outcome.num_utterances, outcome.seconds)
        self.progress.advance(count)
        self._report_step(position)
        stops, saves = outcome.wishes
        save_steps = self.options.save_steps
        if stops or saves or (save_steps and state.step % save_steps == 0):
            if stops:
                self.stop.agree()
            self.save_last()
            self._end_if_stopped()

    def _wishes(self) -> list[bool]:
        """What this rank wishes after a step: to stop, and to save, which only rank 0's clock
        decides.
        """
        seconds = 60 * self.options.save_minutes
        is_late = seconds > 0 and time.monotonic() - self._saved_at > seconds
        return [self.stop.known != 0, is_late and distributed.is_main()]

    def judge_epoch(self) -> None:
        """Evaluate if due, write checkpoints, decide on early stopping."""
        state = self.state
        options = self.options
        is_last = state.epoch >= options.max_epochs
        # A frozen network has not changed since its last evaluation.
        is_changed = state.epoch > options.freeze_epochs
        is_evaluated = is_last or (is_changed and state.epoch % options.test_interval == 0)
        if is_evaluated:
            self.learning_rate.observed_eers.append(self.evaluate())
            count = state.evaluations_without_gain
            if options.patience and count >= options.patience:
                state.stopped_early = True
                logger.info("early stopping: no better EER in %d evaluations", count)
        if self.store.keep > 0 and (is_evaluated or options.average_checkpoints):
            contents = self._model()
            if options.average_checkpoints:
                # The head of the loss will be averaged too.
                contents["head"] = self.loss.state_dict()
            self.store.save(
                self.store.folder / CHECKPOINTS / f"epoch_{state.epoch:04d}.pt", contents
            )
        state.awaits_evaluation = False
        self.save_last()

    def evaluate(self, note: str = "", *, of_average: bool = True) -> float:
        """Run `validate` on the weights (or their moving average); keep the best model. Returns the
        EER in percent.

        `note` gives the reason for an evaluation that does not follow an epoch and so does not
        count towards patience.
        """
        start = time.perf_counter()
        state = self.state
        distributed.work.at(f"the evaluation after epoch {state.epoch}")
        with self._training_paused(of_average):
            begin = time.perf_counter()
            # All ranks use the figures of rank 0.
            metrics = distributed.broadcast_object(dict(self.validate(state.epoch)))
            seconds = time.perf_counter() - begin
            eer = metrics["eer_percent"] = float(metrics["eer_percent"])
            # State of the run, not a figure of the network.
            self._compare_trials(int(metrics.pop("trials_checksum", 0)))
            if self.options.final_model == "last" or eer < state.best_eer_percent:
                state.set_best(eer, state.epoch, self.stage.name)
                state.evaluations_without_gain = 0
                self.store.save(self.store.best_path, self._model())
            elif not note:
                state.evaluations_without_gain += 1
        state.seconds += time.perf_counter() - start
        self._evaluation_seconds = seconds
        best = state.best_eer_percent
        values = {**metrics, "best_eer_percent": best, "evaluation_seconds": seconds, "note": note}
        self.progress.record("evaluation", state.step, state.epoch, values)
        figures = f"EER {eer:.2f} %"
        if self.options.final_model != "last":
            figures += f" (best {best:.2f} %)"
        for name, of_list in metrics.get("test_lists", {}).items():
            figures += f", {name} {of_list['eer_percent']:.2f} %"
        after = f"epoch {state.epoch}{self._of_stage}"
        if note:
            after += f" ({note})"
        logger.info("evaluation after %s: %s, %.1f s", after, figures, seconds)
        return eer

    def _compare_trials(self, checksum: int) -> None:
        """Forget the best EER if it was measured on other trials."""
        state = self.state
        if state.trials_checksum and checksum != state.trials_checksum:
            logger.warning(
                "the validation trials have changed (list, max_trials or seed): new EERs "
                "cannot be compared with the earlier %.2f %%, and best.pt is replaced",
                state.best_eer_percent,
            )
            state.forget_best()
            state.initial_eer_percent = None
            self.learning_rate.observed_eers.clear()
        state.trials_checksum = checksum

    @contextlib.contextmanager
    def _training_paused(self, of_average: bool) -> Iterator[None]:
        """Prepare the network for an evaluation inside the block; training then continues
        undisturbed.
        """
        _release_memory()
        # Evaluation must not change what training draws next.
        random_state = capture_random_state()
        with contextlib.ExitStack() as stack:
            if of_average and self.average.is_kept:
                stack.enter_context(self.average.apply())
            stack.enter_context(self.step.pause())
            self.step.exchange.share_statistics()
            self.net.eval()
            try:
                yield
            finally:
                self.net.train()
                restore_random_state(random_state)
        _release_memory()

    def _average_last(self) -> None:
        """Evaluate the mean of the last checkpoints; it becomes best.pt if its EER is better."""
        self.store.wait()
        number = self.options.average_checkpoints
        paths = epoch_paths(self.store.folder)
        mean = functools.partial(average_checkpoints, paths, number)
        weights, head = distributed.from_main(mean)
        trained = to_cpu(self.net.state_dict())
        # Keep state that a model file does not hold (the position in keyed draws).
        self.net.load_state_dict({**trained, **weights})
        logger.info("averaged the last %d checkpoints", number)
        if not self.freezing.keeps_statistics:
            self._measure_statistics()
        try:
            self.evaluate(f"average of {number} checkpoints", of_average=False)
            # On every rank: the state of a sharded head has to be gathered.
            contents = {**self._model(), "head": head or self.loss.state_dict()}
            self.store.save(self.store.average_path, contents)
        finally:
            self.net.load_state_dict(trained)
        self.state.averaged = True
        self.save_last()

    def _measure_statistics(self) -> None:
        """Measure the batch-norm statistics: averaged weights need statistics of their own, not
        averaged ones.
        """
        self.loader.set_epoch(self.state.epoch)
        count = min(STATISTICS_BATCHES, len(self.loader))

        def waveforms_of(batches: Iterator[Batch]) -> Iterator[torch.Tensor]:
            for batch in batches:
                self.step.key_draws(batch)
                yield batch.waveforms

        title = "batch-norm statistics"
        with (
            self.precision.autocast(),
            self.step.pause(),
            Bar(title, count, "batch", is_shown=self.progress.show_bar) as bar,
        ):
            batches = itertools.islice(iter(self.loader), count)
            update_bn(waveforms_of(bar.over(batches)), self.net)
        # These batches do not belong to an epoch; the next epoch starts from its first batch.
        self.loader.set_epoch(self.state.epoch)
        logger.info("batch-norm statistics measured over %d batches", count)

    # The story of a resume. Rank 0 looks for last.pt (or the file before it, if last.pt is damaged:
    # a disk may lie about what it has written) and tells the others, who may not see its disk. A
    # checkpoint of other speakers, or one that does not fit the network, is refused before anything
    # is changed. Then every component takes its state, the loader skips to its place in the epoch,
    # and the random state comes last, because loading may draw. best.pt is a file of its own and
    # may be newer or older than last.pt: it is trusted over what last.pt remembers of it, since it
    # is what users get.
    def _resume(self) -> None:
        """Resume from the folder's checkpoint, or prepare the folder for a new run."""
        state = self.state
        store = self.store
        distributed.from_main(store.remove_leftovers)
        checkpoint = distributed.from_main(functools.partial(find_checkpoint, store.folder))
        if checkpoint is None:
            distributed.from_main(store.set_aside_earlier_run)
            distributed.from_main(self.stage.on_start)
            return
        source, contents = checkpoint
        self._restore(contents, source)
        if source == store.previous_path:
            # Only now, so that a refused start changes nothing.
            distributed.from_main(store.replace_damaged)
        best = distributed.from_main(store.best_summary)
        if best is None:
            state.forget_best()
        else:
            # Another stage may have written a better best.pt, or this one's best was never written
            # (a full disk).
            is_better = best["best_eer_percent"] < state.best_eer_percent
            stage = best.get("stage", "")
            if is_better == (stage != self.stage.name):
                state.set_best(best["best_eer_percent"], best["epoch"], stage)
        # max_epochs may now be lower than the number of finished epochs.
        num_epochs = max(self.options.max_epochs, state.epoch)
        position = f"{state.epoch} of {num_epochs} epochs, step {state.step}"
        logger.info("resumed from %s: %s", source, position)
        if not state.is_finished(self.options):
            distributed.from_main(self.stage.on_start)
        elif best is None:
            self.evaluate("best.pt was missing")
            self.save_last()

    def _restore(self, contents: Mapping[str, Any], source: object) -> None:
        """Restore every component from what `save_last` wrote."""
        state = self.state
        origin = self.output.origin
        saved = contents.get("training")
        if not isinstance(saved, dict) or "state" not in saved:
            raise CheckpointError(
                f"{source} has a model but no training state; use it as --initial_model instead"
            )
        refuse_other_speakers(saved, origin, source)
        try:
            for name, component in self.components.items():
                component.load_state_dict(saved[name])
        except CheckpointError:
            # Raised by a pretrained backbone whose files differ; its message says what to do.
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            changes = changed_options(
                saved.get("config", {}), origin.get("config", {}), TENSOR_SECTIONS
            )
            raise CheckpointError(
                f"{source} was saved with a different model, loss, optimizer or number of "
                f"speakers: {'; '.join(changes) or error_line(error)}. Change this back to resume, "
                "choose a different --save_path, or remove the folder to start over"
            ) from error
        log_changes(saved, origin, source)
        with reading(
            source,
            "the training state of this program; choose a different --save_path",
            CheckpointError,
        ):
            state.load_state_dict(saved["state"])
            # Last, because loading may draw random numbers.
            restore_random_state(saved["random"])
        patience = self.options.patience
        if patience == 0 or state.evaluations_without_gain < patience:
            state.stopped_early = False
        # If max_epochs was raised, there will be other checkpoints to average.
        state.averaged = state.averaged and state.has_finished_epochs(self.options)
        if state.micro_batch:
            self.loader.set_epoch(state.epoch)
            try:
                self.loader.load_state_dict(saved["loader"])
            except ValueError as error:
                logger.warning("restarting epoch %d: %s", state.epoch + 1, error)
                state.micro_batch = 0

    def save_last(self) -> None:
        """Write everything that a resume needs, including the numbers still on the device."""
        self._saved_at = time.monotonic()
        self.recent.fetch_into(self.state, self.precision)
        self.state.metrics_lines = self.progress.num_lines
        training = {"state": self.state.state_dict()}
        # On every rank: sharded state has to be gathered.
        for name, component in self.components.items():
            training[name] = component.state_dict()
        training["loader"] = self.loader.state_dict()
        training["random"] = capture_random_state()
        training |= self.output.origin
        self.store.save(self.store.last_path, {**self._model(is_last=True), "training": training})

    def _model(self, is_last: bool = False) -> dict[str, Any]:
        """A model file's contents with the current weights; last.pt omits weights of a pretrained
        backbone's files.
        """
        state = self.state
        stage = self.stage
        summary = {
            "epoch": state.epoch,
            "step": state.step,
            # For comparison with other stages and runs.
            "best_eer_percent": state.best_eer_percent,
            "performance": self.speed.summary(),
        }
        if stage.name:
            summary["stage"] = stage.name
        # The initial model's licence and training data apply to this model too.
        for name in ("initial_model", "corpus", "chosen_by"):
            if facts := vars(stage)[name]:
                summary[name] = dict(facts)
        return self.output.model_contents(training_summary=summary, is_last=is_last)

    def _end_if_stopped(self) -> None:
        """End the run if the ranks agreed on a signal; everything is saved already."""
        if self.stop.agreed:
            self.store.close()
            stopped = Interrupted(self.stop.agreed)
            logger.warning(
                "stopped by %s after step %d; the same command resumes", stopped, self.state.step
            )
            raise stopped

    def summary(self) -> dict[str, Any]:
        """The results of the run, as plain values for the report."""
        state = self.state
        performance = self.speed.summary(self._utilisation.mean)
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
            "precision": self.precision.name,
            "best_path": str(self.store.best_path),
            "last_path": str(self.store.last_path),
            "performance": performance,
            "performance_sentence": performance_sentence(performance),
        }

    def _log_finished(self) -> None:
        """Say why no epoch is left to train, and how to go on."""
        state = self.state
        name = f"the {self.stage.name}" if self.stage.name else "this run"
        best = f"best EER {state.best_eer_percent:.2f} %"
        if state.best_stage not in ("", self.stage.name):
            best += f" in the {state.best_stage}"
        ended = "is finished"
        more = self.stage.more_epochs.format(max(state.epoch, self.options.max_epochs) + 10)
        if state.stopped_early:
            ended = "stopped early"
            more = "a larger --patience"
        run = f"{name} {ended} ({counted(state.epoch, 'epoch')}, {best})"
        score = f"--eval --initial_model {self.store.best_path}"
        if self.stage.changed_lists:
            names = " and ".join(self.stage.changed_lists)
            logger.warning(
                "%s, but %s has changed since. To train a new model on it: a new --save_path. To "
                "continue this model on it: %s",
                run,
                names,
                more,
            )
            return
        logger.info("%s: nothing to train. To continue: %s. To score: %s", run, more, score)

    def _report_epoch(self) -> None:
        """Record the means of an epoch; warn once if the run waits for data."""
        state = self.state
        # Without a good step the mean is NaN: 0 would look like a perfect loss.
        count = state.epoch_good_steps or math.nan
        loss = state.epoch_loss_sum / count
        accuracy = state.epoch_accuracy_sum / count
        report = {
            "loss": loss,
            "accuracy_percent": accuracy,
            **self.loader.epoch_report(),
            **self.speed.take_epoch(),
            "bad_steps": state.bad_steps,
        }
        self.progress.record("epoch", state.step, state.epoch, report)
        name = f"epoch {state.epoch}{self._of_stage}"
        logger.info("%s: loss %.4f, accuracy %.2f %%", name, loss, accuracy)
        total = self.speed.total
        if not self._is_advised and total["seconds"] >= SECONDS_TO_JUDGE:
            advice = self.stage.advise(total["data"] / total["seconds"])
            if advice:
                self._is_advised = True
                logger.warning("%s", advice)

    def _report_step(self, position: float) -> None:
        """Fetch, record and show the numbers that are due."""
        interval = self.options.log_interval
        step = self.state.step
        is_recorded = step % interval == 0
        is_shown = self.progress.is_due
        # Fetching stalls the host until the device is done, so it is rare, but often enough to
        # notice bad steps. Ranks fetch after the same steps, to gather the files of a bad one;
        # `is_due` follows each rank's own clock.
        is_full = len(self.recent.waiting) >= min(interval, self.options.max_bad_steps)
        if is_recorded or is_full or (is_shown and not distributed.is_distributed()):
            self.recent.fetch_into(self.state, self.precision)
        if is_recorded:
            values: dict[str, Any] = {**self.speed.take_window(), **self.recent.take()}
            values["learning_rate"] = self.learning_rate(position)
            values["run_time_left"] = self._time_left(values)
            if self.margin is not None:
                values["margin"] = self.margin(position)
            self.progress.record("step", step, self.state.epoch + 1, values)
        elif is_shown:
            values = {**rates(self.speed.window), **self.recent.means()}
            values["run_time_left"] = self._time_left(values)
            self.progress.show(values)

    def _time_left(self, values: Mapping[str, Any]) -> str:
        """Time left for training and evaluations, at the speed of the latest ones."""
        interval = self.options.test_interval
        num_evaluations = -(-self.options.max_epochs // interval) - self.state.epoch // interval
        step_seconds = (self._num_steps - self.position) * values.get("step_seconds", 0.0)
        return duration(step_seconds + max(0, num_evaluations) * self._evaluation_seconds)


def _release_memory() -> None:
    # Training and evaluation allocate blocks of different sizes; freeing them avoids fragmentation.
    gc.collect()
    torch.cuda.empty_cache()
