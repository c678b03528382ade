"""The model that a training run starts from: its network becomes the run's, and what came of it is said at the end."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from speakernet.assembly.evaluation import scores_of_model
from speakernet.assembly.inputs import Inputs
from speakernet.checkpoint import read_checkpoint
from speakernet.config import Config, ConfigError
from speakernet.evaluation.evaluate import Evaluation
from speakernet.evaluation.figures import Comparison, compare_scores
from speakernet.evaluation.results import headline
from speakernet.files import sha256_of
from speakernet.models.model_file import is_model_file, load_initial_weights
from speakernet.models.speaker_net import SpeakerNet
from speakernet.parallel import distributed
from speakernet.run_folder import LAST
from speakernet.training.checkpoints import find_checkpoint

logger = logging.getLogger(__name__)

# What is kept of a model file's own history: whoever uses what is made of it must know these.
KEPT_FACTS = ("imported_from", "licence", "trained_on", "initial_model")
# Noise of training alone: features that are scored have none.
TRAINING_ONLY = frozenset({"frontend.dither"})


def settings_of_file(path: Path) -> dict[str, Any]:
    """What a model file says of its network, as dotted keys of the configuration; empty where it is none of ours.

    Raises:
        CheckpointError: damaged or unsafe.
    """
    contents = read_checkpoint(path)
    return _settings(contents) if is_model_file(contents) else {}


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """`SpeakerNet.spec` in the words of a configuration."""
    options = dict(spec["model"]["options"])
    sizes = {name: options.pop(name) for name in ("pooling", "embedding_dim")}
    pooling_options = options.pop("pooling_options", {})
    # Files of before 0.2 also hold the seed of the dither, which describes no feature.
    features = {name: value for name, value in spec["front_end"]["options"].items() if name != "seed"}
    parts = {
        "model": {"name": spec["model"]["name"], **sizes},
        "model.options": options,
        "model.pooling_options": pooling_options,
        "frontend": {"name": spec["front_end"]["name"], **features},
        "data": {"sample_rate": spec["sample_rate"]},
    }
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def refuse_other_network(config: Config, net: SpeakerNet) -> None:
    """Refuse an initial model that is not there, or of which the configuration says that it is another network.

    Raises:
        ConfigError: naming the options that contradict the file, and both values.
        CheckpointError: neither a model file nor a checkpoint that is known here.
    """
    path = Path(config.training.initial_model)
    # A run that goes on has weights of its own.
    # All processes ask, whether each of them was given a model or not.
    if _goes_on(config) or not config.training.initial_model:
        return
    if not path.is_file():
        raise ConfigError(f"training.initial_model: there is no file {path}; give a model file such as best.pt")
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        # Late: only files of other toolkits need their importers.
        from speakernet.models.importers import translate

        # For its refusals, before the lists are read.
        translate(contents, net, path)
        return
    found, ours = _settings(contents), _settings(net.spec())
    if found["model.name"] != ours["model.name"]:
        raise ConfigError(
            f"training.initial_model: {path} is a {found['model.name']}, model.name says {ours['model.name']}; leave "
            "the sections model and frontend out of the configuration: the file brings its own"
        )
    others = [
        f"{name} is {value} in the file, {ours[name]} in the configuration"
        for name, value in found.items()
        # Another front end has other options; its name says enough.
        if name in ours and ours[name] != value and name not in TRAINING_ONLY
    ]
    if others:
        raise ConfigError(
            f"training.initial_model: {path} was made otherwise than the configuration says: {'; '.join(others)}. "
            "Leave these options out: the file brings its own"
        )


def initial_model_checksum(config: Config) -> dict[str, str]:
    """Of the weights that a run begins with, by their option; several processes must have the same."""
    if _goes_on(config) or not config.training.initial_model:
        return {}
    return {"training.initial_model (SHA-256)": sha256_of(Path(config.training.initial_model))}


def _goes_on(config: Config) -> bool:
    # Rank 0 is asked: it writes the run folder, and others may lie on machines that do not see it.
    return distributed.from_main((Path(config.training.save_path) / LAST).exists)


def _own_checkpoint(config: Config) -> tuple[Path | None, dict[str, Any] | None]:
    found = find_checkpoint(Path(config.training.save_path))
    if found is None:
        return None, None
    return found[0], (found[1].get("training_summary") or {}).get("initial_model")


def begin_with_initial_model(config: Config, net: SpeakerNet, loss: nn.Module, speakers: int) -> dict[str, Any] | None:
    """Load the weights that the run is given, unless it goes on from its own.

    Args:
        config: names the model.
        net: the run's network.
        loss: the run's loss, which takes a head of the same speakers.
        speakers: their checksum.

    Returns:
        What is known of them, in plain values, for the model files of the run; None where it is given none.

    Raises:
        CheckpointError: the file is damaged, or its weights are not those of this network.
    """
    initial_model = config.training.initial_model
    if not initial_model:
        return None
    # A run that goes on has weights of its own; the same command again would otherwise begin anew.
    own, facts_of_own = distributed.from_main(lambda: _own_checkpoint(config))
    if own:
        logger.info("initial model %s: not read, the run goes on from %s", initial_model, own)
        return facts_of_own
    load_initial_weights(net, loss, initial_model, speakers=speakers)
    contents = read_checkpoint(initial_model)
    history = (contents.get("training_summary") or {}) if is_model_file(contents) else {}
    facts = {name: history[name] for name in KEPT_FACTS if history.get(name)}
    return {"file": Path(initial_model).name, "sha256": sha256_of(Path(initial_model)), **facts}


def compared_with_initial_model(
    config: Config, inputs: Inputs, summary: Mapping[str, Any], evaluation: Evaluation
) -> Evaluation:
    """The evaluation of a run's best model, with what training has changed for the better or the worse.

    Both models are scored on the test list in the same way and compared under the same draws of speakers.

    Args:
        config: of the run.
        inputs: its lists and audio.
        summary: of the training.
        evaluation: of best.pt on the test list.
    """
    path = Path(config.training.initial_model)
    if not config.training.initial_model or evaluation.results.eer_percent is None or evaluation.speakers is None:
        return evaluation
    results, warnings = evaluation.results, list(evaluation.results.warnings or [])
    values: dict[str, Any] = {"file": path.name, "stayed_best": _stayed_best(summary)}
    sentences = [_held_out(summary)] if summary.get("initial_eer_percent") is not None else []
    added = sentences[:] if values["stayed_best"] else []
    if values["stayed_best"]:
        # The same weights: there is nothing to compare.
        pass
    elif all(distributed.gather_objects(path.is_file())):
        paired = compare_scores(
            evaluation.trials,
            [scores_of_model(config, inputs, path), evaluation.scores],
            evaluation.speakers,
            num_draws=config.evaluation.bootstrap_samples,
            seed=config.runtime.seed,
            priors=config.evaluation.dcf_target_priors,
        )
        said = paired.sentences(["the initial model", "best.pt"])
        values |= {"sha256": sha256_of(path), **_figures(paired)}
        sentences += said
        # EER and costs are errors: what has grown is worse.
        added += [one for one, of in zip(said, paired.differences[0], strict=True) if of.value > 0]
    else:
        added.append(f"the initial model {path} is gone: best.pt was not compared with it")
    for one in added:
        logger.warning("%s", one)
    results = dataclasses.replace(
        results, initial_model={**values, "sentences": sentences}, warnings=[*warnings, *added]
    )
    return dataclasses.replace(evaluation, results=results)


def _stayed_best(summary: Mapping[str, Any]) -> bool:
    return summary["best_epoch"] == 0 and not summary["best_stage"]


def _held_out(summary: Mapping[str, Any]) -> str:
    """What the validation said of the given weights, and of the best ones."""
    before, best = summary["initial_eer_percent"], summary["best_eer_percent"]
    if _stayed_best(summary):
        return (
            f"no epoch was better than the initial model on the held-out trials (EER {before:.2f} %): best.pt is the "
            "initial model itself"
        )
    stage = f" of the {summary['best_stage']}" if summary["best_stage"] else ""
    return (
        f"held-out EER: {before:.2f} % of the initial model (epoch 0), {best:.2f} % of best.pt "
        f"(epoch {summary['best_epoch']}{stage})"
    )


def _figures(paired: Comparison) -> dict[str, Any]:
    """Figures of the initial model, and how far best.pt is from it, with intervals."""
    names = [one.name for one in headline(paired.systems[0])]
    return {
        "eer_percent": paired.systems[0].eer_percent,
        "min_dcf": paired.systems[0].min_dcf,
        "best_less_initial": {
            name: {"value": one.value, "interval": one.interval}
            for name, one in zip(names, paired.differences[0], strict=True)
        },
    }
