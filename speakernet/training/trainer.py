"""The training loop, from the first step (or the last checkpoint) to the summary.

It is independent of models, losses and audio. Read it from top to bottom: `train`, `train_epoch`,
`run_step`, `judge_epoch`, `evaluate`, then checkpoints and logging.
"""

import contextlib
import functools
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.swa_utils import update_bn

from speakernet import distributed
from speakernet.checkpoint import CheckpointError
from speakernet.files import error_line, reading
from speakernet.machine.device import utilisation_monitor
from speakernet.machine.threads import Stopped
from speakernet.run_folder import CHECKPOINTS, held
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
from speakernet.training.progress import (
    WHOLE_RUN,
    Interrupted,
    NonFiniteError,
    Progress,
    RecentSteps,
    RunSpeed,
    Stage,
    StopRequest,
    TrainingState,
    performance_sentence,
    rates,
)
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule
from speakernet.training.step import TrainingStep
from speakernet.training.threads import ThreadWatch

if TYPE_CHECKING:
    from speakernet.training.step import BatchLike

    class Loader(Protocol):
        """What the trainer needs from a loader; the real class is in `speakernet.data.loader`."""

        def set_epoch(self, epoch: int) -> None:
            """Choose the epoch (from 0) of the next iteration."""

        def __len__(self) -> int: ...

        def __iter__(self) -> Iterator[Any]: ...

        def state_dict(self) -> dict[str, Any]:
            """The position inside the epoch."""

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Continue from a position; ValueError if the batches of the epoch have changed."""

        def file_names(self, indices: torch.Tensor) -> list[str]:
            """The files of some utterances."""

        def epoch_report(self) -> Mapping[str, Any]:
            """Statistics of the epoch: files skipped, cache hits …"""


logger = logging.getLogger(__name__)

STATISTICS_BATCHES = 50
"""Batches over which batch-norm statistics are measured after averaging."""
SECONDS_TO_JUDGE = 10.0
"""Training time before a warning about waiting for data: the first steps wait for caches and
workers."""


class Trainer:
    """Trains a network; writes everything to the store's folder."""

    def __init__(
        self,
        step: TrainingStep,
        loader: "Loader",
        validate: Callable[[int], Mapping[str, Any]],
        learning_rate: LearningRateSchedule,
        margin: MarginSchedule | None,
        options: TrainingOptions,
        *,
        store: CheckpointStore,
        progress: Progress,
        threads: ThreadWatch,
        model_contents: Callable[..., dict[str, Any]],
        origin: Mapping[str, Any],
        net_state: Any = None,
        stage: Stage = WHOLE_RUN,
        stop: StopRequest | None = None,
        advise: Callable[[float], str] = lambda data_wait_share: "",
    ) -> None:
        self.step = step
        self.net = step.net
        self.loss = step.loss
        self.optimizer = step.optimizer
        self.precision = step.precision
        self.loader = loader
        self.validate = validate
        self.learning_rate = learning_rate
        self.margin = margin
        self.freezing, self.average = (
            Freezing(self.net, options),
            WeightAverage(self.net, options.ema_decay, options.initial_weight),
        )
        self.options = options
        self.stage = stage
        self.stop = stop or StopRequest()
        step.ranks.requests = self._requests
        self.store = store
        self.progress = progress
        self.threads = threads
        self.model_contents = model_contents
        self.origin = origin
        self.advise = advise
        self.state = TrainingState()
        self.tracker = RunSpeed(
            step.precision.name, options.accumulation_steps, step.precision.device
        )
        self.recent = RecentSteps(options.max_bad_steps, loader.file_names)
        # Components with state, by their name in last.pt, which also holds the loader's and the
        # random state.
        self.components: dict[str, Any] = {
            "net": net_state or self.net,
            "loss": self.loss,
            "optimizer": OptimizerState(self.optimizer),
            "learning_rate": learning_rate,
            "precision": self.precision,
            "average": self.average,
        }
        self._utilisation = utilisation_monitor(self.precision.device)
        self._saved_at = time.monotonic()
        self._evaluation_seconds = 0.0
        self._num_steps = options.max_epochs * learning_rate.steps_per_epoch
        self._of_stage = f" of the {stage.name}" if stage.name else ""
        self._is_advised = False

    def train(self) -> dict[str, Any]:
        """Train to the end, resuming if the run was stopped; returns the summary."""
        with contextlib.ExitStack() as stack:
            if distributed.is_main():
                stack.enter_context(held(self.store.folder))
            # Called in reverse order: the folder is released after the last write.
            stack.callback(self.store.wait)
            for one in (self.progress, self.threads, self.step):
                stack.callback(one.close)
            self._resume()
            state = self.state
            stage = self.stage
            if state.is_finished(self.options):
                more = stage.more_epochs.format(max(state.epoch, self.options.max_epochs) + 10)
                logger.info(
                    "%s %s (%s, best EER %.2f %%%s): nothing to train. To continue: %s. To score: "
                    "--eval --initial_model %s",
                    f"the {stage.name}" if stage.name else "this run",
                    "stopped early" if state.stopped_early else "is finished",
                    counted(state.epoch, "epoch"),
                    state.best_eer_percent,
                    f" in the {state.best_stage}"
                    if state.best_stage not in ("", stage.name)
                    else "",
                    "a larger --patience" if state.stopped_early else more,
                    self.store.best_path,
                )
                return self.summary()
            self.progress.open(state.step, state.metrics_lines)
            with self.stop.listening(), self._utilisation:
                try:
                    self._train_on()
                except Stopped:
                    # An interrupted evaluation keeps no results; the resumed run starts by
                    # repeating it.
                    self._stop_if_asked(saves=True)
            self.store.close()
            return self.summary()

    def _train_on(self) -> None:
        """Do the remaining work."""
        state = self.state
        is_first_stage = self.stage.given is not None and self.stage.steps_before is None
        if is_first_stage and not state.step and state.initial_eer_percent is None:
            # The initial weights are best.pt until an epoch beats them.
            state.initial_eer_percent = self.evaluate("initial model")
            self.save_last()
            self._stop_if_asked()
        while not state.epochs_done(self.options):
            if not state.awaits_evaluation:
                self.train_epoch()
            self.judge_epoch()
            self._stop_if_asked()
        if not state.is_finished(self.options):
            self._average_last()

    def train_epoch(self) -> None:
        """Run the remaining steps of an epoch."""
        state = self.state
        num_batches = len(self.loader)
        if state.batch == 0:
            state.epoch_loss_sum = 0.0
            state.epoch_accuracy_sum = 0.0
            state.epoch_good_steps = 0
            self.loader.set_epoch(state.epoch)
        self.freezing.begin_training(state.epoch)
        self.loss.train()
        self.step.ranks.begin_epoch()
        self.progress.start_epoch(state.epoch, self.options.max_epochs, num_batches, state.batch)
        batches = iter(self.loader)
        while state.batch < num_batches:
            self.run_step(batches)
        self.recent.fetch_into(state, self.precision)
        state.epoch = state.epoch + 1
        state.batch = 0
        state.awaits_evaluation = True
        if not state.epoch_good_steps and (
            state.bad_streak or state.epoch >= self.options.max_epochs
        ):
            raise NonFiniteError(
                f"epoch {state.epoch}: every step was undone, so there is nothing to evaluate. "
                "Lower optimizer.learning_rate, try --mixed-precision no, or check the audio named "
                "in the log"
            )
        # Without a good step the mean is NaN: 0 would look like a perfect loss.
        good = state.epoch_good_steps or math.nan
        values = {
            "loss": state.epoch_loss_sum / good,
            "accuracy_percent": state.epoch_accuracy_sum / good,
        }
        report = {
            **self.loader.epoch_report(),
            **self.tracker.take_epoch(),
            "bad_steps": state.bad_steps,
        }
        self.progress.record("epoch", state.step, state.epoch, {**values, **report})
        shown = values["loss"], values["accuracy_percent"]
        logger.info("epoch %d%s: loss %.4f, accuracy %.2f %%", state.epoch, self._of_stage, *shown)
        total = self.tracker.total
        is_early = self._is_advised or total["seconds"] < SECONDS_TO_JUDGE
        # Advice about waiting for data, once per run.
        if advice := "" if is_early else self.advise(total["data"] / total["seconds"]):
            self._is_advised = True
            logger.warning("%s", advice)

    @property
    def position(self) -> float:
        """The position of the run in optimizer steps of the schedules."""
        # Derived from epochs: the count of steps would be wrong if the batch size changed before a
        # resume.
        count = self.options.accumulation_steps
        per_epoch = self.learning_rate.steps_per_epoch
        done = -(-self.state.batch // count)
        in_epoch = -(-len(self.loader) // count)
        return self.state.epoch * per_epoch + done * (per_epoch / in_epoch)

    def run_step(self, batches: "Iterator[BatchLike]") -> None:
        """Take one optimizer step, then count, log and save as needed."""
        begin = time.perf_counter()
        state = self.state
        options = self.options
        position = self.position
        count = min(options.accumulation_steps, len(self.loader) - state.batch)
        if self.margin is not None:
            self.loss.margin = self.margin(position)  # type: ignore[assignment]
        name = f"step {state.step + 1}"
        learning_rate = self.learning_rate(position)
        try:
            outcome = self.step.run(batches, count, name, learning_rate, self._num_steps - position)
        except Exception:
            # The loader failed before the first micro-batch: the state is still that after the last
            # step.
            if state.step and not self.step.indices and not distributed.is_distributed():
                self.save_last()
                self.store.close()
            raise
        if self.average.is_kept:
            self.average.update()
        state.step += 1
        state.batch += count
        state.utterances += outcome.num_utterances
        seconds = time.perf_counter() - begin
        state.seconds += seconds
        self.recent.outcomes.append((state.step, outcome))
        self.tracker.update(seconds, outcome.num_utterances, outcome.seconds)
        self.progress.advance(count)
        if self.threads.most > 1:
            self.threads.step(
                seconds - outcome.seconds["data"],
                outcome.seconds["processor"],
                outcome.num_utterances,
                is_compiled=self.step.compiler.is_compiled,
            )
        self._report_step(position)
        stops, saves = outcome.requests
        if stops or saves or (options.save_steps and state.step % options.save_steps == 0):
            self._stop_if_asked(saves=True, agrees=stops)

    def _requests(self) -> list[bool]:
        """This rank's requests after a step: to stop, and to save, which only rank 0's clock
        decides.
        """
        minutes = self.options.save_minutes
        is_late = minutes > 0 and time.monotonic() - self._saved_at > 60 * minutes
        return [self.stop.number != 0, is_late and distributed.is_main()]

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
            if options.patience and state.evaluations_without_gain >= options.patience:
                state.stopped_early = True
                logger.info(
                    "early stopping: no better EER in %d evaluations",
                    state.evaluations_without_gain,
                )
        if self.store.keep > 0 and (is_evaluated or options.average_checkpoints):
            # Include the head of the loss if it will be averaged too.
            head = {"head": self.loss.state_dict()} if options.average_checkpoints else {}
            path = self.store.folder / CHECKPOINTS / f"epoch_{state.epoch:04d}.pt"
            self.store.save(path, {**self._model(), **head})
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
            checksum = int(metrics.pop("trials_checksum", 0))
            # 0: nothing was evaluated yet.
            if state.trials_checksum and checksum != state.trials_checksum:
                logger.warning(
                    "the validation trials have changed (list, max_trials or seed): new EERs "
                    "cannot be compared with the earlier %.2f %%, and best.pt is replaced",
                    state.best_eer_percent,
                )
                state.forget_best()
                state.initial_eer_percent = None
                self.learning_rate.load_state_dict({"observed_eers": []})
            state.trials_checksum = checksum
            if self.options.final_model == "last" or eer < state.best_eer_percent:
                state.best_eer_percent, state.best_epoch, state.best_stage = (
                    eer,
                    state.epoch,
                    self.stage.name,
                )
                state.evaluations_without_gain = 0
                self.store.save(self.store.best_path, self._model())
            elif not note:
                state.evaluations_without_gain += 1
        state.seconds += time.perf_counter() - start
        best = state.best_eer_percent
        self._evaluation_seconds = seconds
        values = {**metrics, "best_eer_percent": best, "evaluation_seconds": seconds, "note": note}
        self.progress.record("evaluation", state.step, state.epoch, values)
        lists = metrics.get("test_lists", {}).items()
        others = "".join(f", {name} {one['eer_percent']:.2f} %" for name, one in lists)
        logger.info(
            "evaluation after epoch %d%s%s: EER %.2f %%%s%s, %.1f s",
            state.epoch,
            self._of_stage,
            note and f" ({note})",
            eer,
            "" if self.options.final_model == "last" else f" (best {best:.2f} %)",
            others,
            seconds,
        )
        return eer

    @contextlib.contextmanager
    def _training_paused(self, of_average: bool) -> Iterator[None]:
        """Prepare the network for an evaluation inside the block; training then continues
        undisturbed.
        """
        # Training and evaluation allocate blocks of different sizes; freeing them avoids
        # fragmentation.
        gc.collect()
        torch.cuda.empty_cache()
        # Evaluation must not change what training draws next.
        random_state = capture_random_state()
        is_averaged = of_average and self.average.is_kept
        with (
            self.average.applied() if is_averaged else contextlib.nullcontext(),
            self.step.paused(),
        ):
            # Before the first step the average is the initial weights, whose statistics are right.
            if is_averaged and self.options.ema_statistics == "measured" and self.state.step > 0:
                self._measure_statistics()
            self.step.ranks.share_statistics()
            self.net.eval()
            try:
                yield
            finally:
                self.net.train()
                restore_random_state(random_state)
        gc.collect()
        torch.cuda.empty_cache()

    def _average_last(self) -> None:
        """Evaluate the mean of the last checkpoints; it becomes best.pt if its EER is better."""
        self.store.wait()
        number = self.options.average_checkpoints
        mean = functools.partial(average_checkpoints, epoch_paths(self.store.folder), number)
        weights, head = distributed.from_main(mean)
        own = to_cpu(self.net.state_dict())
        # Keep state that a model file does not hold (the position in keyed draws).
        self.net.load_state_dict({**own, **weights})
        logger.info("averaged the last %d checkpoints", number)
        if not self.freezing.keeps_statistics:
            self._measure_statistics()
        try:
            self.evaluate(f"average of {number} checkpoints", of_average=False)
            head = self.loss.state_dict() if head is None else head
            self.store.save(self.store.average_path, {**self._model(), "head": head})
        finally:
            self.net.load_state_dict(own)
        self.state.averaged = True
        self.save_last()

    def _measure_statistics(self) -> None:
        """Measure the batch-norm statistics: averaged weights need statistics of their own, not
        averaged ones.
        """
        self.loader.set_epoch(self.state.epoch)
        most = min(STATISTICS_BATCHES, len(self.loader))
        with (
            self.precision.autocast(),
            self.step.paused(),
            Bar("batch-norm statistics", most, "batch", is_shown=self.progress.show_bar) as bar,
        ):
            some = itertools.islice(iter(self.loader), STATISTICS_BATCHES)
            update_bn(map(self._waveforms, bar.over(some)), self.net)
        # These batches do not belong to an epoch; the next epoch starts from its first batch.
        self.loader.set_epoch(self.state.epoch)
        logger.info("batch-norm statistics measured over %d batches", most)

    def _waveforms(self, batch: "BatchLike") -> torch.Tensor:
        self.step.key_draws(batch)
        return batch.waveforms

    def _resume(self) -> None:
        """Resume from the folder's checkpoint, or prepare the folder for a new run."""
        state = self.state
        options = self.options
        store = self.store
        distributed.from_main(store.remove_leftovers)
        found = distributed.from_main(functools.partial(find_checkpoint, store.folder))
        if found is None:
            distributed.from_main(store.set_aside_earlier_run)
            distributed.from_main(self.stage.on_start)
            return
        source, contents = found
        self._restore(contents, source)
        if source == store.previous_path:
            # Only now, so that a refused start changes nothing.
            distributed.from_main(store.replace_damaged)
        best = distributed.from_main(store.best_summary)
        if best is None:
            state.forget_best()
        # Another stage may have written a better best.pt, or this one's best was never written (a
        # full disk).
        elif (best["best_eer_percent"] < state.best_eer_percent) == (
            best.get("stage", "") != self.stage.name
        ):
            state.best_eer_percent = best["best_eer_percent"]
            state.best_epoch = best["epoch"]
            state.best_stage = best.get("stage", "")
        # max_epochs may now be lower than the number of finished epochs.
        wanted = max(options.max_epochs, state.epoch)
        logger.info(
            "resumed from %s: %d of %d epochs, step %d", source, state.epoch, wanted, state.step
        )
        if not state.is_finished(options):
            distributed.from_main(self.stage.on_start)
        elif best is None:
            self.evaluate("best.pt was missing")
            self.save_last()

    def _restore(self, contents: Mapping[str, Any], source: object) -> None:
        """Restore every component from what `save_last` wrote."""
        state = self.state
        options = self.options
        saved = contents.get("training")
        if not isinstance(saved, dict) or "state" not in saved:
            raise CheckpointError(
                f"{source} has a model but no training state; use it as --initial_model instead"
            )
        refuse_other_speakers(saved, self.origin, source)
        try:
            for name, component in self.components.items():
                component.load_state_dict(saved[name])
        except CheckpointError:
            # Raised by a pretrained backbone whose files differ; its message says what to do.
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            changes = changed_options(
                saved.get("config", {}), self.origin.get("config", {}), TENSOR_SECTIONS
            )
            raise CheckpointError(
                f"{source} was saved with a different model, loss, optimizer or number of "
                f"speakers: {'; '.join(changes) or error_line(error)}. Change this back to resume, "
                "choose a different --save_path, or remove the folder to start over"
            ) from error
        log_changes(saved, self.origin, source)
        with reading(
            source,
            "the training state of this program; choose a different --save_path",
            CheckpointError,
        ):
            state.load(saved["state"])
            # Last, because loading may draw random numbers.
            restore_random_state(saved["random"])
        if options.patience == 0 or state.evaluations_without_gain < options.patience:
            state.stopped_early = False
        # If max_epochs was raised, there will be other checkpoints to average.
        state.averaged = state.averaged and state.epochs_done(options)
        if state.batch:
            self.loader.set_epoch(state.epoch)
            try:
                self.loader.load_state_dict(saved["loader"])
            except ValueError as error:
                logger.warning("restarting epoch %d: %s", state.epoch + 1, error)
                state.batch = 0

    def save_last(self) -> None:
        """Write everything that a resume needs, including the numbers still on the device."""
        self._saved_at = time.monotonic()
        self.recent.fetch_into(self.state, self.precision)
        self.state.metrics_lines = self.progress.num_lines
        # On every rank: sharded state has to be gathered.
        training = {
            "state": vars(self.state).copy(),
            **{name: component.state_dict() for name, component in self.components.items()},
            "loader": self.loader.state_dict(),
            "random": capture_random_state(),
            **self.origin,
        }
        self.store.save(self.store.last_path, {**self._model(is_last=True), "training": training})

    def _model(self, is_last: bool = False) -> dict[str, Any]:
        """A model file's contents with the current weights; last.pt omits weights of a pretrained
        backbone's files.
        """
        state = self.state
        summary = {
            "epoch": state.epoch,
            "step": state.step,
            # For comparison with other stages and runs.
            "best_eer_percent": state.best_eer_percent,
            "performance": self.tracker.summary(),
            **({"stage": self.stage.name} if self.stage.name else {}),
            # The initial model's licence and training data apply to this model too.
            **({} if self.stage.given is None else {"initial_model": dict(self.stage.given)}),
            **({} if self.stage.corpus is None else {"corpus": dict(self.stage.corpus)}),
            **({} if self.stage.chosen_by is None else {"chosen_by": dict(self.stage.chosen_by)}),
        }
        return self.model_contents(training_summary=summary, is_last=is_last)

    def _stop_if_asked(self, *, saves: bool = False, agrees: bool = True) -> None:
        """Save the run if `saves`; end it if any rank received a signal. Every rank calls it."""
        if agrees:
            self.stop.agreed = self.stop.agreed or max(distributed.gather_objects(self.stop.number))
        if saves:
            self.save_last()
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
        utilisation = self._utilisation.mean
        performance = self.tracker.summary(utilisation)
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

    def _report_step(self, position: float) -> None:
        """Fetch, record and show the numbers that are due."""
        options = self.options
        step = self.state.step
        is_recorded = step % options.log_interval == 0
        is_shown = self.progress.is_due
        # Fetching stalls the host until the device is done, so it is rare, but often enough to
        # notice bad steps. Ranks fetch after the same steps, to gather the files of a bad one;
        # `is_due` follows each rank's own clock.
        is_full = len(self.recent.outcomes) >= min(options.log_interval, options.max_bad_steps)
        if is_recorded or is_full or (is_shown and not distributed.is_distributed()):
            self.recent.fetch_into(self.state, self.precision)
        if is_recorded:
            values: dict[str, Any] = {**self.tracker.take_window(), **self.recent.take()}
            values["learning_rate"] = self.learning_rate(position)
            values["run_time_left"] = self._time_left(values)
            if self.margin is not None:
                values["margin"] = self.margin(position)
            self.progress.record("step", step, self.state.epoch + 1, values)
        elif is_shown:
            window = rates(self.tracker.window)
            self.progress.show(
                {**window, **self.recent.means(), "run_time_left": self._time_left(window)}
            )

    def _time_left(self, rates_now: Mapping[str, Any]) -> str:
        """Time left for training and evaluations, at the speed of the latest ones."""
        interval = self.options.test_interval
        last = self.options.max_epochs
        evaluations = max(0, -(-last // interval) - self.state.epoch // interval)
        step_seconds = (self._num_steps - self.position) * rates_now.get("step_seconds", 0.0)
        return duration(step_seconds + evaluations * self._evaluation_seconds)
