"""The stages of a run and its optional initial model.

The run starts from the initial model's network; `reports.py` compares the two at the end. Each
stage continues training with its own options, all but the first in a subfolder of the run.
"""

import contextlib
import functools
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from speakernet import distributed
from speakernet.assembly.data import build_training_loader, loading_facts, reserved_for_training
from speakernet.assembly.inputs import Inputs, chosen_by_validation
from speakernet.assembly.training import Parts, Validate, build_loss, build_trainer
from speakernet.checkpoint import read_checkpoint, read_own_checkpoint
from speakernet.config import ConfigError
from speakernet.config.loading import save_config
from speakernet.config.schema import Config, stages_of, with_changes
from speakernet.data.choices import data_wait_advice
from speakernet.evaluation.calibration import identity_of
from speakernet.files import sha256_of
from speakernet.losses.classification import SpeakerLoss
from speakernet.losses.sharded import shard_head
from speakernet.models.model_file import is_model_file, load_initial_weights
from speakernet.models.speaker_net import SpeakerNet
from speakernet.random import derive_seed
from speakernet.run_folder import AVERAGE, BEST, CHECKPOINTS, CONFIG, LAST, stage_folder
from speakernet.terminal import counted
from speakernet.training.checkpoints import adopt_better, find_checkpoint, set_aside_older
from speakernet.training.optimizers import WeightAverage
from speakernet.training.options import LARGEST_SEED
from speakernet.training.state import Stage
from speakernet.training.stopping import StopRequest

logger = logging.getLogger(__name__)

KEPT_FACTS = ("imported_from", "licence", "trained_on", "corpus", "initial_model")
"""Facts of a model file that also apply to models made from it."""
FREE = frozenset({"frontend.dither", "frontend.energy_floor_db"})
"""Options that may differ from an initial model: training noise, and the floor that narrow-band
recordings need."""
STAGE_STREAM = 104
"""With the run's seed, the key of the random draws of the second stage; later stages use the next
numbers."""


def settings_of_file(path: Path) -> dict[str, Any]:
    """The network of a model file as dotted options; empty for another program's file."""
    contents = read_checkpoint(path)
    return _settings(contents) if is_model_file(contents) else {}


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """`SpeakerNet.spec` as dotted options."""
    options = dict(spec["model"]["options"])
    settings = {
        "model.name": spec["model"]["name"],
        "model.pooling": options.pop("pooling"),
        "model.embedding_dim": options.pop("embedding_dim"),
        "frontend.name": spec["front_end"]["name"],
        "data.sample_rate": spec["sample_rate"],
    }
    sections = {
        "model.pooling_options": options.pop("pooling_options", {}),
        "model.options": options,
        "frontend": spec["front_end"]["options"],
    }
    for section, values in sections.items():
        settings |= {f"{section}.{name}": value for name, value in values.items()}
    return settings


def refuse_other_network(config: Config, net: SpeakerNet) -> dict[str, str]:
    """Refuse an initial model that is missing or whose network contradicts the configuration.

    Returns its checksum under a label, which lets the ranks compare it; empty without an initial
    model, and for a resumed run, which has its own weights.
    """
    # Rank 0 writes the run folder; other machines may not see it. Every rank must take part, with
    # or without a model.
    is_resumed = distributed.from_main((config.run_folder / LAST).exists)
    if not config.training.initial_model:
        return {}
    path = Path(config.training.initial_model)
    if is_resumed:
        # It may have been removed since, which must not stop the run; a typing error looks alike.
        if not path.is_file():
            logger.warning(
                "training.initial_model: no such file %s; the run resumes without it", path
            )
        return {}
    if not path.is_file():
        raise ConfigError(
            f"training.initial_model: no such file {path}; give a model file such as best.pt"
        )
    contents = read_checkpoint(path)
    if is_model_file(contents):
        _refuse_contradictions(_settings(contents), _settings(net.spec()), path)
    else:
        # Late: only files of other toolkits need their importers.
        from speakernet.models.importers import translate

        # Called only to refuse early, before the lists are read.
        translate(contents, net, path)
    return {"training.initial_model (SHA-256)": sha256_of(path)}


def _refuse_contradictions(theirs: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    differing = []
    for option, value in theirs.items():
        # If the front ends differ, ours lacks some options; their name is reported.
        if option not in FREE and value != ours.get(option, value):
            differing.append(
                f"{option} is {value} in the file, {ours[option]} in the configuration"
            )
        if differing and option == "model.name":
            # If the model differs, so do its sizes; naming the model is enough.
            break
    if differing:
        raise ConfigError(
            f"training.initial_model: {path} differs from the configuration: "
            f"{'; '.join(differing)}. Remove these options from the configuration; the network is "
            "read from the file"
        )


def begin_with_initial_model(
    config: Config, net: SpeakerNet, loss: SpeakerLoss, speakers: int
) -> dict[str, Any] | None:
    """Load the initial model, if there is one, into the network, and its head into the loss if the
    speakers (a checksum) are the same.

    Returns facts about it for the model files of the run; a resumed run already has them.
    """
    if not config.training.initial_model:
        return None
    path = Path(config.training.initial_model)
    resumed = distributed.from_main(lambda: find_checkpoint(config.run_folder))
    if resumed:
        logger.info(
            "initial model %s is not read, because the run resumes from %s", path, resumed[0]
        )
        summary = resumed[1].get("training_summary") or {}
        return summary.get("initial_model")  # type: ignore[no-any-return]
    # The head is kept only for the same speakers in the same order, because a class is only a row
    # number.
    load_initial_weights(net, loss, path, speakers=speakers)
    contents = read_checkpoint(path)
    history = (contents.get("training_summary") or {}) if is_model_file(contents) else {}
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        **{name: history[name] for name in KEPT_FACTS if history.get(name)},
    }


class StagedRun:
    """The stages of a run, trained one after another on one network; without stages there is one.

    Each stage has a loader, an optimizer and a checkpoint folder of its own, and resumes from that
    folder like a run of its own. What passes from one stage to the next is the network, which stays
    the same object, and the weights of the loss, which is rebuilt with the options of the stage.
    Both are those that the previous stage was *evaluated* with: if it averaged its checkpoints or
    kept a moving average, the next stage starts from that average, not from the last step.

    A killed run does not know in which stage it was, and need not: called again, a finished stage
    reads its last.pt, finds no epoch left and returns at once, so the first stage with epochs left
    resumes in the middle. If instead the first stage was prolonged, the later ones have been
    trained on a network that no longer exists; they notice by the number of steps before them
    (`first_stage_steps` in their last.pt), move their folder aside and start over.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        net: SpeakerNet,
        validate: Validate,
        stop: StopRequest | None = None,
        changed_lists: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.stages = list(stages_of(config).items())
        self.inputs = inputs
        self.net = net
        self.validate = validate
        self.stop = stop
        self.changed_lists = changed_lists
        """Names of the lists whose contents have changed since the run was finished."""
        run_folder = config.run_folder
        self.folders = [run_folder]
        for number, (name, _) in enumerate(self.stages[1:], start=1):
            self.folders.append(stage_folder(run_folder, number, name))
        self.loss: SpeakerLoss | None = None
        """The loss of the latest stage; None before the first."""
        self.steps = 0
        """Optimizer steps of the stages trained so far."""

    def train(self) -> dict[str, Any]:
        """Train or resume all stages; return the summary of the run."""
        return _merge_summaries([self.train_stage(number) for number in range(len(self.stages))])

    def train_stage(self, number: int) -> dict[str, Any]:
        """Train or resume the stage numbered from 0, and return its summary.

        Loader, optimizer and averages are freed at the end, to leave memory for the next stage.
        """
        name, config = self.stages[number]
        run_folder = self.folders[0]
        if self.loss is not None:
            # The epochs of a stage restart at 0; with the seed of the run they would repeat the
            # draws of the first stage.
            seed = derive_seed(config.runtime.seed, STAGE_STREAM + number - 1) % LARGEST_SEED
            config = with_changes(config, runtime={"seed": seed})
            self._take_evaluated_weights(number, self.loss)
            self.loss = next_head(config, self.loss)
        first = self.config.training.stage
        # Earlier stages are run without a step, because the next stage takes over their loss.
        if first and number < [stage for stage, _ in self.stages].index(first):
            config = _without_further_epochs(config, self.folders[number], first)
        # Training has priority over a corpus on the device, so its memory is reserved first.
        reserved = reserved_for_training(config, self.net, self.inputs.device)
        made = build_training_loader(config, self.inputs, reserved_bytes=reserved)
        with contextlib.closing(made) as loader:
            if self.loss is None:
                self.loss = build_loss(config, loader.num_classes)
                speakers = loader.identity["speakers"]
                initial_model = begin_with_initial_model(config, self.net, self.loss, speakers)
            else:
                # Read from the model file, because an earlier process may have trained the first
                # stage.
                best = distributed.from_main(lambda: read_own_checkpoint(run_folder / BEST))
                initial_model = best["training_summary"].get("initial_model", {})
            stage = Stage(
                is_first=number == 0,
                steps_before=self.steps,
                initial_model=initial_model or {},
                chosen_by=self._chosen_by(),
                changed_lists=self.changed_lists,
                corpus=self.inputs.corpus_facts(),
                on_start=functools.partial(save_config, self.config, run_folder / CONFIG),
                # Called at the end, because the speed of the disk only shows during training.
                advise=lambda share: data_wait_advice(share, loading_facts(loader)),
            )
            if name:
                stage = replace(
                    stage, name=f"{name} stage", more_epochs=f"epochs: {{}} in the {name} stage"
                )
                logger.info(
                    "%s: %s, crops of %d frames, learning rate %g",
                    stage.name,
                    counted(config.training.max_epochs, "epoch"),
                    config.data.crop_frames,
                    config.optimizer.learning_rate,
                )
            trainer = build_trainer(
                config,
                Parts(self.net, self.loss, loader, self.inputs.device),
                self.validate,
                self.folders[number],
                stage=stage,
                stop=self.stop,
            )
            summary = trainer.train()
        if number:
            # Users look for the final model in the run folder, not in that of a stage.
            is_wanted = config.training.final_model == "last"
            best_path = run_folder / BEST
            candidate = self.folders[number] / BEST
            distributed.from_main(
                lambda: adopt_better(best_path, candidate, stage.name, is_wanted=is_wanted)
            )
        self.steps += summary["steps"]
        return summary

    def _chosen_by(self) -> dict[str, Any]:
        """The list that selects the best model; empty if no model is selected."""
        if not chosen_by_validation(self.config):
            return {}
        return identity_of(self.inputs.validation.trials)

    def _take_evaluated_weights(self, number: int, loss: SpeakerLoss) -> None:
        """Give network and loss the weights that the previous stage was evaluated with."""
        # The previous stage's loader, corpus, optimizer and averages form reference cycles, which
        # Python frees late.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        folder = self.folders[number]
        distributed.from_main(lambda: set_aside_older(folder, self.steps))
        # A stage that resumes has weights of its own.
        if not distributed.from_main((folder / LAST).exists):
            before = self.stages[number - 1][1]
            _load_evaluated_weights(before, self.net, loss, self.folders[number - 1])


def _merge_summaries(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of all stages; speed and precision are those of the last stage that this process
    trained.
    """
    # Stages that were finished before this process started have no speed to report.
    trained = [summary for summary in summaries if summary["performance"]["steps"]]
    merged = dict((trained or summaries)[-1])
    for name in ("epochs", "steps", "bad_steps", "fp16_overflows", "utterances", "seconds"):
        merged[name] = sum(summary[name] for summary in summaries)
    # The first stage starts from the initial model, and its folder is the run folder.
    for name in ("initial_eer_percent", "best_path", "last_path"):
        merged[name] = summaries[0][name]
    return merged


def next_head(config: Config, before: SpeakerLoss) -> SpeakerLoss:
    """The loss of a stage: built from its own options, with the weights of the previous stage's.

    Every rank must call this.
    """
    # The weights drawn here are replaced at once, so they must not move the generator of dropout.
    with torch.random.fork_rng(devices=[]):
        # Recorded voices keep their labels, so a stage with fewer voices keeps all classes.
        loss = build_loss(config, before.num_classes)
    if distributed.is_distributed():
        # Before the weights are loaded, since each rank then loads its own rows.
        shard_head(config.loss, loss)
    loss.load_state_dict(before.state_dict())
    # The caller still refers to the previous loss, which must not take memory of the device.
    before.to("cpu")
    return loss


def _without_further_epochs(config: Config, folder: Path, first: str) -> Config:
    """The configuration of a stage before the `first` to train, limited to its finished epochs."""
    # A stage without epochs left takes no step, so its averages and last.pt stay as they are.
    checkpoint = distributed.from_main(lambda: find_checkpoint(folder))
    epochs = checkpoint[1]["training"]["state"]["epoch"] if checkpoint else 0
    if not epochs:
        raise ConfigError(
            f"--stage {first} starts from the model of the previous stage, but {folder} has no "
            "finished epoch; train that stage first, or leave --stage out"
        )
    return with_changes(config, training={"max_epochs": epochs})


def _load_evaluated_weights(
    config: Config, net: SpeakerNet, loss: SpeakerLoss, folder: Path
) -> None:
    """Load the average of checkpoints or the moving average, if the previous stage was evaluated
    with one.
    """
    training = config.training
    if training.average_checkpoints:
        contents = distributed.from_main(
            lambda: read_own_checkpoint(folder / CHECKPOINTS / AVERAGE)
        )
        # State that a model file does not hold (the position in keyed draws) is kept.
        net.load_state_dict({**net.state_dict(), **contents["weights"]})
        loss.load_state_dict(contents["head"])
        logger.info("starting from the average of the previous stage's checkpoints")
    elif training.ema_decay:
        # The network still has the weights of the last step, but the stage was evaluated with the
        # average, which last.pt also contains.
        average = WeightAverage(net, training.ema_decay)
        average.load_state_dict(
            distributed.from_main(lambda: read_own_checkpoint(folder / LAST)["training"]["average"])
        )
        average.swap()
        logger.info("starting from the moving average of the previous stage's weights")
