"""What goes beyond one training from fresh weights: a given model at the start, a second stage at the end.

The initial model's network becomes the run's, and both are compared at the end. The large-margin stage trains on with a
larger margin and longer crops, in a folder within the run's own. Learning rate and margin of both stages as a table
need no data.
"""

import contextlib
import dataclasses
import gc
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from speakernet.assembly.data import build_training_loader, reserved_for_training
from speakernet.assembly.evaluation import scores_of_model
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.training import Validate, build_loss, build_schedules, build_trainer
from speakernet.checkpoint import read_checkpoint, read_own_checkpoint
from speakernet.config import ConfigError
from speakernet.config.schema import Config, replaced
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.figures import compare_scores
from speakernet.evaluation.results import headline
from speakernet.files import place, sha256_of
from speakernet.models.model_file import is_model_file, load_initial_weights
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.random import derive_seed
from speakernet.run_folder import AVERAGE, BEST, CHECKPOINTS, LAST, SECOND_STAGE, move_aside
from speakernet.terminal import counted
from speakernet.training.checkpoints import find_checkpoint
from speakernet.training.optimizers import WeightAverage
from speakernet.training.options import LARGEST_SEED
from speakernet.training.options.schedules import ExponentialOptions, FloorOptions
from speakernet.training.progress import Stage, StopRequest

logger = logging.getLogger(__name__)

KEPT_FACTS = ("imported_from", "licence", "trained_on", "initial_model")
"""The facts of a model file that hold for what is made of it."""
FREE = frozenset({"frontend.dither", "frontend.energy_floor_db"})
"""What may differ from an initial model: noise of training alone, and the floor that narrow-band recordings need."""
STAGE = "large-margin stage"
STAGE_STREAM = 104
"""Key of the stage's own random draws, beside the run's seed."""


def settings_of_file(path: Path) -> dict[str, Any]:
    """The network of a model file as dotted keys of the configuration; empty for a file of another program."""
    contents = read_checkpoint(path)
    return _settings(contents) if is_model_file(contents) else {}


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """`SpeakerNet.spec` in the words of a configuration."""
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
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def refuse_other_network(config: Config, net: SpeakerNet) -> dict[str, str]:
    """Refuse an initial model that is missing, or whose network contradicts the configuration.

    Returns its checksum, by its option: several processes must have the same. Empty without one, and if the run is
    resumed, which has weights of its own.
    """
    # Rank 0 writes the run folder; other machines may not see it. Every rank asks, whether it was given a model or not.
    is_resumed = distributed.from_main((Path(config.training.save_path) / LAST).exists)
    if is_resumed or not config.training.initial_model:
        return {}
    path = Path(config.training.initial_model)
    if not path.is_file():
        raise ConfigError(f"training.initial_model: no such file {path}; give a model file such as best.pt")
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        # Late: only files of other toolkits need their importers.
        from speakernet.models.importers import translate

        # For its refusals, before the lists are read.
        translate(contents, net, path)
    else:
        found, ours = _settings(contents), _settings(net.spec())
        # Another front end has other options; its name says enough.
        others = [name for name in found if found[name] != ours.get(name, found[name]) and name not in FREE]
        if others:
            # Another model has other sizes too.
            listed = others[:1] if others[0] == "model.name" else others
            differing = "; ".join(
                f"{name} is {found[name]} in the file, {ours[name]} in the configuration" for name in listed
            )
            raise ConfigError(
                f"training.initial_model: {path} differs from the configuration: {differing}. "
                "Leave these options out: the file brings its own"
            )
    return {"training.initial_model (SHA-256)": sha256_of(path)}


def begin_with_initial_model(config: Config, net: SpeakerNet, loss: nn.Module, speakers: int) -> dict[str, Any] | None:
    """Load the initial model into the network (and the loss, if `speakers`, their checksum, are the same).

    Returns facts about it, for the model files of the run; None without one. A resumed run has its own.
    """
    path = Path(config.training.initial_model)
    if not config.training.initial_model:
        return None

    def own() -> tuple[Path, Any] | None:
        found = find_checkpoint(Path(config.training.save_path))
        return found and (found[0], (found[1].get("training_summary") or {}).get("initial_model"))

    if resumed := distributed.from_main(own):
        logger.info("initial model %s: not read; the run resumes from %s", path, resumed[0])
        facts: dict[str, Any] | None = resumed[1]
        return facts
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
    """The evaluation of best.pt on the test list, with its difference to the initial model.

    Both are scored in the same way and compared under the same draws of speakers.
    """
    path, results = Path(config.training.initial_model), evaluation.results
    if results.eer_percent is None or evaluation.speakers is None:
        return evaluation
    before, best = summary.get("initial_eer_percent"), summary["best_eer_percent"]
    stage = f" of the {summary['best_stage']}" if summary["best_stage"] else ""
    stayed_best = summary["best_epoch"] == 0 and not stage
    values: dict[str, Any] = {"file": path.name, "stayed_best": stayed_best}
    sentences, added = [], []
    if before is not None and not stayed_best:
        sentences.append(
            f"held-out EER: {before:.2f} % of the initial model (epoch 0), {best:.2f} % of best.pt "
            f"(epoch {summary['best_epoch']}{stage})"
        )
    if stayed_best:
        # The same weights: there is nothing to compare.
        if before is not None:
            added.append(
                f"no epoch was better than the initial model on the held-out trials (EER {before:.2f} %): best.pt is "
                "the initial model itself"
            )
            sentences += added
    elif all(distributed.gather_objects(path.is_file())):
        paired = compare_scores(
            evaluation.trials,
            [scores_of_model(config, inputs, path), evaluation.scores],
            evaluation.speakers,
            num_draws=config.evaluation.bootstrap_samples,
            seed=config.runtime.seed,
            priors=config.evaluation.dcf_target_priors,
        )
        initial, differences = paired.systems[0], paired.differences[0]
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
        # EER and costs are errors: what has grown is worse.
        added += [one for one, of in zip(compared, differences, strict=True) if of.value > 0]
    else:
        added.append(f"the initial model {path} no longer exists: best.pt was not compared with it")
    for one in added:
        logger.warning("%s", one)
    facts = {**values, "sentences": sentences}
    results = dataclasses.replace(results, initial_model=facts, warnings=[*(results.warnings or []), *added])
    return dataclasses.replace(evaluation, results=results)


def large_margin_config(config: Config) -> Config:
    """The configuration of the second stage: longer crops, larger margin, small learning rate, voices as recorded.

    Source: Thienpondt et al. 2021, "The IDLab VoxCeleb speaker recognition challenge 2020 system description"; the fall
    of the learning rate is that of wespeaker's `resnet_lm.yaml` or of 3D-Speaker's `eres2netv2_lm.yaml`.
    """
    training = config.training
    rate, final = training.large_margin_learning_rate, training.large_margin_final_learning_rate
    is_cosine = training.large_margin_schedule == "cosine"
    schedule = (FloorOptions if is_cosine else ExponentialOptions)(
        final_learning_rate=rate / 4 if final == "auto" else final,
        warmup_epochs=training.large_margin_warmup_epochs,
        warmup_overlaps=not is_cosine,
    )
    loss = config.loss.with_margin(training.large_margin).model_dump()
    for values in (loss, *(one for one in loss.values() if isinstance(one, dict))):
        # As wespeaker: the larger margin replaces the penalty on the nearest other speakers.
        if "inter_top_k" in values:
            values["inter_top_k"] = 0
    return replaced(
        config,
        data={
            "crop_frames": training.large_margin_crop_frames,
            "crop_frames_max": 0,
            "batch_size": training.large_margin_batch_size or config.data.batch_size,
        },
        augment={
            "speed_factors": [1.0],
            "warp_factors": [1.0],
            "real_share": "auto",
            "real_epochs": 0,
            "enabled": config.augment.enabled and training.large_margin_augment,
        },
        loss=loss,
        optimizer={"learning_rate": rate},
        schedule=schedule.model_dump(),
        training={
            "max_epochs": training.large_margin_epochs,
            "test_interval": min(training.test_interval, training.large_margin_epochs),
            "large_margin_epochs": 0,
            "average_checkpoints": 0,
            "freeze_epochs": 0,
            "initial_weight": 0.0,
            "patience": 0,
        },
        # Its epochs are counted from 0 again: with the run's own seed they would repeat the draws of the first ones.
        runtime={"seed": derive_seed(config.runtime.seed, STAGE_STREAM) % LARGEST_SEED},
    )


def train_large_margin_stage(
    config: Config,
    net: SpeakerNet,
    loss: nn.Module,
    inputs: Inputs,
    validate: Validate,
    run_folder: str | Path,
    first_stage_steps: int,
    *,
    stop: StopRequest | None = None,
    chosen_by: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The second stage, in `<run folder>/large_margin`; its best model replaces best.pt if its EER is lower.

    Called after the first stage with the same network and head. It begins with what the first stage evaluated: the
    average of its checkpoints, or the moving average of its weights, if it keeps one. Like the first it resumes when
    called again; if the first stage has continued since (`first_stage_steps`), it starts over.
    """
    whole, config, folder = config, large_margin_config(config), Path(run_folder)
    margin = whole.training.large_margin
    # The first stage's loader, corpus, optimizer and averages hang together in cycles, which Python frees at leisure.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    usual, loss.margin = loss.margin, margin  # type: ignore[assignment]
    for module in loss.modules():
        if hasattr(module, "inter_top_k"):
            module.inter_top_k = 0  # type: ignore[assignment]
    logger.info(
        "%s: %s, margin %g, crops of %d frames, learning rate %g",
        *(STAGE, counted(config.training.max_epochs, "epoch"), margin),
        *(config.data.crop_frames, config.optimizer.learning_rate),
    )
    if isinstance(usual, float) and margin < usual:
        logger.warning("training.large_margin: %g is below the first stage's %g", margin, usual)
    distributed.from_main(lambda: _set_aside_older_stage(folder / SECOND_STAGE, first_stage_steps))
    if not distributed.from_main((folder / SECOND_STAGE / LAST).exists):
        _begin_with_evaluated_weights(whole, net, loss, folder)
    reserved = reserved_for_training(config, net, inputs.device)
    with contextlib.closing(build_training_loader(config, inputs, reserved_bytes=reserved)) as loader:
        best = distributed.from_main(lambda: read_own_checkpoint(folder / BEST)["training_summary"])
        given = best.get("initial_model")
        stage = Stage(STAGE, "--training.large_margin_epochs", first_stage_steps, given, chosen_by)
        trainer = build_trainer(
            config, net, loss, loader, validate, folder / SECOND_STAGE, inputs.device, stage=stage, stop=stop
        )
        summary = trainer.train()
    is_wanted = config.training.final_model == "last"
    distributed.from_main(lambda: adopt_better(folder / BEST, folder / SECOND_STAGE / BEST, is_wanted=is_wanted))
    return summary


def _begin_with_evaluated_weights(config: Config, net: nn.Module, loss: nn.Module, folder: Path) -> None:
    """Give the network the average of checkpoints, else the moving average, if the first stage was judged by one."""
    training = config.training
    if training.average_checkpoints:
        contents = distributed.from_main(lambda: read_own_checkpoint(folder / CHECKPOINTS / AVERAGE))
        # What a model file does not hold (the position in keyed draws) stays as it is.
        net.load_state_dict({**net.state_dict(), **contents["weights"]})
        loss.load_state_dict(contents["head"])
        logger.info("%s: begins with the average of the checkpoints of the first stage", STAGE)
    elif training.ema_decay:
        average = WeightAverage(net, training.ema_decay)
        average.load_state_dict(
            distributed.from_main(lambda: read_own_checkpoint(folder / LAST)["training"]["average"])
        )
        average.swap()
        logger.info("%s: begins with the moving average of the weights of the first stage", STAGE)


def _set_aside_older_stage(folder: Path, first_stage_steps: int) -> None:
    found = find_checkpoint(folder)
    before = found[1].get("training", {}).get("first_stage_steps") if found else None
    if before not in (None, first_stage_steps):
        logger.warning(
            "the large-margin stage followed step %d of the first stage, which is at step %d now: it starts over, the "
            "old one is moved to %s",
            *(before, first_stage_steps, move_aside(folder).name),
        )


def adopt_better(best: Path, candidate: Path, *, is_wanted: bool) -> None:
    """Replace the model file `best` by `candidate` if its held-out EER is lower, or it is wanted; logs which."""
    before, after = (read_own_checkpoint(path)["training_summary"] for path in (best, candidate))
    eer_before, eer_after = before["best_eer_percent"], after["best_eer_percent"]
    if before == after:
        logger.info("%s: EER %.2f %%; best.pt is its model already", STAGE, eer_after)
        return
    is_better = is_wanted or eer_after < eer_before
    verdict = "kept" if is_better else "not kept"
    logger.info("%s: EER %.2f %%, best.pt before %.2f %%: %s", STAGE, eer_after, eer_before, verdict)
    if is_better:
        place(candidate, best)


class ScheduledEpoch(NamedTuple):
    """Learning rate and margin (if the loss has one) at the beginning and end of an epoch, counted from 1."""

    stage: str
    epoch: int
    learning_rates: tuple[float, float]
    margins: tuple[float, float] | None


def scheduled_epochs(config: Config) -> list[ScheduledEpoch]:
    """Of both stages: the first and last epoch, and those in which warm-up and margin ramp begin, are half way, end."""
    stages = [("", config)]
    if config.training.large_margin_epochs:
        stages.append((STAGE, large_margin_config(config)))
    found = []
    for name, stage in stages:
        # A step of its own for each epoch: the schedules count in fractions of one. Two speakers: there is no list.
        rate, margin = build_schedules(stage, build_loss(stage, 2), steps_per_epoch=1)
        schedule, last = stage.schedule, stage.training.max_epochs - 1
        epochs = {0, last, max(0, math.ceil(schedule.warmup_epochs) - 1)}
        if schedule.margin != "constant":
            begin, end = schedule.margin_begin_epoch, schedule.margin_end_epoch
            epochs |= {int(begin), int((begin + end) / 2), math.ceil(end) - 1, math.ceil(end)}
        # A ramp may end after the run does.
        for one in sorted(epochs & set(range(last + 1))):
            margins = (margin(one), margin(one + 1)) if margin else None
            found.append(ScheduledEpoch(name, one + 1, (rate(one), rate(one + 1)), margins))
    return found


def schedule_table(config: Config) -> str:
    """`scheduled_epochs` as lines of text."""
    rows = [("epoch", "learning rate", "margin")]
    for one in scheduled_epochs(config):
        name = f"{one.epoch} of the {one.stage}" if one.stage else str(one.epoch)
        rows.append((name, _span(one.learning_rates), _span(one.margins) if one.margins else "none"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = "plateau: multiplied by schedule.decay whenever the EER stops falling; not known beforehand"
    return "\n".join([*lines, note] if config.schedule.name == "plateau" else lines)


def _span(values: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in values))
