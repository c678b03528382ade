"""The stages of a run and its optional initial model.

The run starts from the initial model's network, and the two are compared at the end. Each stage
continues training with its own options, all but the first in a subfolder of the run. The table of
learning rates and margins needs no data.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from speakernet import distributed
from speakernet.assembly.data import build_training_loader, loading_facts, reserved_for_training
from speakernet.assembly.evaluation import scores_of_model
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.training import Validate, build_loss, build_schedules, build_trainer
from speakernet.checkpoint import read_checkpoint, read_own_checkpoint
from speakernet.config import ConfigError
from speakernet.config.loading import save_config
from speakernet.config.schema import Config, replaced, stages_of
from speakernet.data.choices import data_wait_advice
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.figures import compare_scores
from speakernet.evaluation.results import headline
from speakernet.files import place, sha256_of
from speakernet.losses.sharded import shard_head
from speakernet.models.model_file import is_model_file, load_initial_weights
from speakernet.models.speaker_net import SpeakerNet
from speakernet.random import derive_seed
from speakernet.run_folder import AVERAGE, BEST, CHECKPOINTS, CONFIG, LAST, move_aside, stage_folder
from speakernet.terminal import counted, text_table
from speakernet.training.checkpoints import find_checkpoint
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
    """The network of a model file as dotted configuration keys; empty for another program's
    file.
    """
    contents = read_checkpoint(path)
    return _settings(contents) if is_model_file(contents) else {}


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """`SpeakerNet.spec` as configuration options."""
    options = dict(spec["model"]["options"])
    sizes = {name: options.pop(name) for name in ("pooling", "embedding_dim")}
    pooling_options = options.pop("pooling_options", {})
    sections = {
        "model": {"name": spec["model"]["name"], **sizes},
        "model.options": options,
        "model.pooling_options": pooling_options,
        "frontend": {"name": spec["front_end"]["name"], **spec["front_end"]["options"]},
        "data": {"sample_rate": spec["sample_rate"]},
    }
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }


def refuse_other_network(config: Config, net: SpeakerNet) -> dict[str, str]:
    """Refuse an initial model that is missing or whose network contradicts the configuration.

    Returns its checksum under a label, which lets the ranks compare it; empty without an initial
    model, and for a resumed run, which has its own weights.
    """
    # Rank 0 writes the run folder; other machines may not see it. Every rank must take part, with
    # or without a model.
    is_resumed = distributed.from_main((Path(config.training.save_path) / LAST).exists)
    if is_resumed or not config.training.initial_model:
        return {}
    path = Path(config.training.initial_model)
    if not path.is_file():
        raise ConfigError(
            f"training.initial_model: no such file {path}; give a model file such as best.pt"
        )
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        # Late: only files of other toolkits need their importers.
        from speakernet.models.importers import translate

        # Called only to refuse early, before the lists are read.
        translate(contents, net, path)
    else:
        found = _settings(contents)
        ours = _settings(net.spec())
        # If the front ends differ, options that ours lacks are skipped; the name is reported.
        others = [
            name
            for name in found
            if found[name] != ours.get(name, found[name]) and name not in FREE
        ]
        if others:
            # If the model differs, so do its sizes; naming the model is enough.
            listed = others[:1] if others[0] == "model.name" else others
            differing = "; ".join(
                f"{name} is {found[name]} in the file, {ours[name]} in the configuration"
                for name in listed
            )
            raise ConfigError(
                f"training.initial_model: {path} differs from the configuration: {differing}. "
                f"Remove {', '.join(listed)} from the configuration; "
                f"{'it is' if len(listed) == 1 else 'they are'} read from {path.name}"
            )
    return {"training.initial_model (SHA-256)": sha256_of(path)}


def begin_with_initial_model(
    config: Config, net: SpeakerNet, loss: nn.Module, speakers: int
) -> dict[str, Any] | None:
    """Load the initial model into the network, and its head into the loss if the speakers (a
    checksum) are the same.

    Returns facts about it for the model files of the run; a resumed run already has them.
    """
    path = Path(config.training.initial_model)

    def own() -> tuple[Path, Any] | None:
        found = find_checkpoint(Path(config.training.save_path))
        return found and (found[0], (found[1].get("training_summary") or {}).get("initial_model"))

    if resumed := distributed.from_main(own):
        logger.info(
            "initial model %s is not read, because the run resumes from %s", path, resumed[0]
        )
        return resumed[1]  # type: ignore[no-any-return]
    load_initial_weights(net, loss, path, speakers=speakers)
    contents = read_checkpoint(path)
    history = (contents.get("training_summary") or {}) if is_model_file(contents) else {}
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        **{name: history[name] for name in KEPT_FACTS if history.get(name)},
    }


def compared_with_initial_model(
    config: Config, inputs: Inputs, summary: Mapping[str, Any], evaluation: Evaluation
) -> Evaluation:
    """The evaluation of best.pt on the test list, with its difference from the initial model.

    Both are scored in the same way and compared on the same draws of speakers.
    """
    path = Path(config.training.initial_model)
    results = evaluation.results
    if results.eer_percent is None or evaluation.speakers is None:
        return evaluation
    before = summary.get("initial_eer_percent")
    best = summary["best_eer_percent"]
    stage = f" of the {summary['best_stage']}" if summary["best_stage"] else ""
    stayed_best = summary["best_epoch"] == 0 and not stage
    values: dict[str, Any] = {"file": path.name, "stayed_best": stayed_best}
    sentences = []
    added = []
    if before is not None and not stayed_best:
        sentences.append(
            f"held-out EER: {before:.2f} % with the initial model (epoch 0), {best:.2f} % with "
            f"best.pt (epoch {summary['best_epoch']}{stage})"
        )
    if stayed_best:
        # The weights are identical, so there is nothing to compare.
        if before is not None:
            added.append(
                "no epoch was better than the initial model on the held-out trials (EER "
                f"{before:.2f} %): best.pt is the initial model itself"
            )
            sentences += added
    elif all(distributed.gather_objects(path.is_file())):
        paired = compare_scores(
            evaluation.trials,
            [scores_of_model(config, inputs, path), evaluation.scores],
            evaluation.speakers,
            num_draws=config.evaluation.bootstrap_samples,
            seed=config.runtime.seed,
            options=config.evaluation,
            priors=config.evaluation.dcf_target_priors,
        )
        initial = paired.systems[0]
        differences = paired.differences[0]
        values |= {
            "sha256": sha256_of(path),
            "eer_percent": initial.eer_percent,
            "min_dcf": initial.min_dcf,
            "best_less_initial": {
                figure.name: {"value": one.value, "interval": one.interval}
                for figure, one in zip(headline(initial), differences, strict=True)
            },
        }
        compared = paired.sentences(["the initial model", "best.pt"])
        sentences += compared
        # EER and costs are errors, so a positive difference is worse. One that may be chance is no
        # warning.
        for sentence, difference in zip(compared, differences, strict=True):
            if difference.value > 0 and difference.is_significant:
                added.append(sentence)
    else:
        added.append(
            f"the initial model {path} no longer exists, so best.pt was not compared with it"
        )
    for one in added:
        logger.warning("%s", one)
    facts = {**values, "sentences": sentences}
    results = dataclasses.replace(
        results, initial_model=facts, warnings=[*(results.warnings or []), *added]
    )
    return dataclasses.replace(evaluation, results=results)


def train_stage(
    config: Config,
    stages: Mapping[str, Config],
    number: int,
    net: SpeakerNet,
    loss: nn.Module | None,
    steps: int,
    inputs: Inputs,
    validate: Validate,
    *,
    stop: StopRequest | None = None,
    chosen_by: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """Train one stage of a run, numbered from 0; return the loss and the stage's summary.

    The first stage builds the loss. A stage resumes when called again, but starts over if earlier
    stages have trained further since, which shows in `steps`, their total. Loader, optimizer and
    averages are freed at the end, to leave memory for the next stage.
    """
    (name, own), run_folder = list(stages.items())[number], Path(config.training.save_path)
    folders = [run_folder, *(stage_folder(run_folder, n, one) for n, one in enumerate(stages) if n)]
    if loss is not None:
        # The stage's epochs restart at 0, and with the run's seed they would repeat the draws of
        # the first stage.
        seed = derive_seed(config.runtime.seed, STAGE_STREAM + number - 1) % LARGEST_SEED
        own = replaced(own, runtime={"seed": seed})
        before = list(stages.values())[number - 1]
        _hand_over(before, net, loss, folders[number - 1 : number + 1], steps)
        loss = next_head(own, loss)
    if config.training.stage and number < list(stages).index(config.training.stage):
        own = _without_further_epochs(own, folders[number], config.training.stage)
    reserved = reserved_for_training(own, net, inputs.device)
    on_start = functools.partial(save_config, config, run_folder / CONFIG)
    with contextlib.closing(build_training_loader(own, inputs, reserved_bytes=reserved)) as loader:
        initial_model: Mapping[str, Any] = {}
        if loss is None:
            loss = build_loss(own, loader.num_classes)
            if own.training.initial_model:
                speakers = loader.identity["speakers"]
                initial_model = begin_with_initial_model(own, net, loss, speakers) or {}
        else:
            best = distributed.from_main(
                lambda: read_own_checkpoint(run_folder / BEST)["training_summary"]
            )
            initial_model = best.get("initial_model", {})
        stage = Stage(
            is_first=not number,
            steps_before=steps,
            initial_model=initial_model,
            chosen_by=chosen_by,
            corpus=inputs.corpus_facts(),
            on_start=on_start,
            # Called at the end, because the speed of the disk only shows during training.
            advise=lambda share: data_wait_advice(share, loading_facts(loader)),
        )
        if name:
            stage = dataclasses.replace(
                stage, name=f"{name} stage", more_epochs=f"epochs: {{}} in the {name} stage"
            )
            logger.info(
                "%s: %s, crops of %d frames, learning rate %g",
                stage.name,
                counted(own.training.max_epochs, "epoch"),
                own.data.crop_frames,
                own.optimizer.learning_rate,
            )
        trainer = build_trainer(
            own,
            net,
            loss,
            loader,
            validate,
            folders[number],
            inputs.device,
            stage=stage,
            stop=stop,
        )
        summary = trainer.train()
    if number:
        is_wanted = own.training.final_model == "last"
        paths = run_folder / BEST, folders[number] / BEST
        distributed.from_main(lambda: adopt_better(*paths, stage.name, is_wanted=is_wanted))
    return loss, summary


def _hand_over(
    before: Config, net: nn.Module, loss: nn.Module, folders: Sequence[Path], steps: int
) -> None:
    """Give network and loss the weights that the previous stage was evaluated with.

    `before` is the configuration of the previous stage; `folders` are its folder and that of the
    new stage.
    """
    # The previous stage's loader, corpus, optimizer and averages form reference cycles, which
    # Python frees late.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    distributed.from_main(lambda: _set_aside_older(folders[1], steps))
    if not distributed.from_main((folders[1] / LAST).exists):
        _load_evaluated_weights(before, net, loss, folders[0])


def next_head(config: Config, before: nn.Module) -> nn.Module:
    """The loss of a stage: built from its own options, with the weights of the previous stage's.

    Every rank must call this.
    """
    # The weights drawn here are replaced at once, so they must not move the generator of dropout.
    with torch.random.fork_rng(devices=[]):
        # Recorded voices keep their labels, so a stage with fewer voices keeps all classes.
        loss = build_loss(config, getattr(before, "num_classes", 0))
    if (teacher := getattr(before, "teacher", None)) is not None:
        del before.teacher
        loss.teacher = teacher
    if distributed.is_distributed():
        # Before the weights are loaded, since each rank then loads its own rows.
        shard_head(config.loss, loss)
    loss.load_state_dict(before.state_dict())
    # The caller still refers to the previous loss, which must not take memory of the device.
    before.to("cpu")
    return loss


def _without_further_epochs(config: Config, folder: Path, wanted: str) -> Config:
    """The configuration of a stage before the wanted one, limited to the epochs it has finished."""
    found = distributed.from_main(lambda: find_checkpoint(folder))
    epochs = found[1]["training"]["state"]["epoch"] if found else 0
    if not epochs:
        raise ConfigError(
            f"--stage {wanted} starts from the model of the previous stage, but {folder} has no "
            "finished epoch; train that stage first, or leave --stage out"
        )
    return replaced(config, training={"max_epochs": epochs})


def _load_evaluated_weights(config: Config, net: nn.Module, loss: nn.Module, folder: Path) -> None:
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
        average = WeightAverage(net, training.ema_decay)
        average.load_state_dict(
            distributed.from_main(lambda: read_own_checkpoint(folder / LAST)["training"]["average"])
        )
        average.swap()
        logger.info("starting from the moving average of the previous stage's weights")


def _set_aside_older(folder: Path, steps: int) -> None:
    found = find_checkpoint(folder)
    before = found[1].get("training", {}).get("first_stage_steps") if found else None
    if before not in (None, steps):
        logger.warning(
            "%s was trained after step %d of the earlier stages, but they have since reached step "
            "%d, so this stage starts over; its old folder is moved to %s",
            folder,
            before,
            steps,
            move_aside(folder).name,
        )


def adopt_better(best: Path, candidate: Path, stage: str, *, is_wanted: bool) -> None:
    """Replace the model file `best` with a stage's `candidate` if its EER is lower or `is_wanted`;
    log which.
    """
    before, after = (read_own_checkpoint(path)["training_summary"] for path in (best, candidate))
    eer_before = before["best_eer_percent"]
    eer_after = after["best_eer_percent"]
    if before == after:
        logger.info("%s: EER %.2f %%; best.pt is already this model", stage, eer_after)
        return
    is_better = is_wanted or eer_after < eer_before
    verdict = "replaced" if is_better else "kept"
    logger.info(
        "%s: EER %.2f %%; best.pt with %.2f %% is %s", stage, eer_after, eer_before, verdict
    )
    if is_better:
        place(candidate, best)


SHOWN_STEPS = 2_000_000
"""Steps of an epoch in a table of the schedule, which is made before the list is read.

So many that the last step of an epoch has the rate at its end, but for a schedule that falls there.
"""


class ScheduledEpoch(NamedTuple):
    """Learning rate and margin of the first and last step of an epoch, counted from 1.

    There is no margin if the loss has none.
    """

    stage: str
    epoch: int
    learning_rates: tuple[float, float]
    margins: tuple[float, float] | None


def scheduled_epochs(config: Config) -> list[ScheduledEpoch]:
    """For each stage, the first and last epochs, the end of warm-up, and start, middle and end of
    the margin ramp.
    """
    found = []
    for name, stage in stages_of(config).items():
        # Two speakers, because no list is read.
        schedules = build_schedules(stage, build_loss(stage, 2), SHOWN_STEPS)
        schedule = stage.schedule
        last = stage.training.max_epochs - 1
        epochs = {0, last, max(0, math.ceil(schedule.warmup_epochs) - 1)}
        if schedule.margin != "constant":
            begin = schedule.margin_begin_epoch
            end = schedule.margin_end_epoch
            epochs |= {int(begin), int((begin + end) / 2), math.ceil(end) - 1, math.ceil(end)}
        # A ramp may end after the run does.
        for epoch in sorted(epochs & set(range(last + 1))):
            # The next step belongs to the next epoch, in which a step schedule may have fallen.
            first_step = epoch * SHOWN_STEPS
            last_step = (epoch + 1) * SHOWN_STEPS - 1
            rate = schedules.learning_rate
            margin = schedules.margin
            margins = (margin(first_step), margin(last_step)) if margin else None
            rates = rate(first_step), rate(last_step)
            found.append(ScheduledEpoch(name, epoch + 1, rates, margins))
    return found


def schedule_table(config: Config) -> str:
    """`scheduled_epochs` as a table of text."""
    rows = [("epoch", "learning rate", "margin")]
    for one in scheduled_epochs(config):
        name = f"{one.epoch} of the {one.stage} stage" if one.stage else str(one.epoch)
        rows.append(
            (name, _span(one.learning_rates), _span(one.margins) if one.margins else "none")
        )
    note = (
        "plateau: multiplies the rate by schedule.decay whenever the EER stops falling, which "
        "is not shown here"
    )
    return "\n".join([*text_table(rows), *([note] if config.schedule.name == "plateau" else [])])


def _span(values: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in values))
