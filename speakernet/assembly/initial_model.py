"""The model that a training run starts from: its network becomes the run's, and both are compared at the end."""

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

# The facts of a model file that hold for what is made of it.
KEPT_FACTS = ("imported_from", "licence", "trained_on", "initial_model")
# Noise of training alone: features that are scored have none.
TRAINING_ONLY = frozenset({"frontend.dither"})


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


def refuse_other_network(config: Config, net: SpeakerNet) -> None:
    """Refuse an initial model that is missing, or whose network contradicts the configuration."""
    path = Path(config.training.initial_model)
    # A resumed run has weights of its own. Every rank asks, whether it was given a model or not.
    if _is_resumed(config) or not config.training.initial_model:
        return
    if not path.is_file():
        raise ConfigError(f"training.initial_model: no such file {path}; give a model file such as best.pt")
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
            f"training.initial_model: {path} differs from the configuration: {'; '.join(others)}. "
            "Leave these options out: the file brings its own"
        )


def initial_model_checksum(config: Config) -> dict[str, str]:
    """Of the weights that a run begins with, by their option; several processes must have the same."""
    if _is_resumed(config) or not config.training.initial_model:
        return {}
    return {"training.initial_model (SHA-256)": sha256_of(Path(config.training.initial_model))}


def _is_resumed(config: Config) -> bool:
    # Rank 0 writes the run folder; other machines may not see it.
    return distributed.from_main((Path(config.training.save_path) / LAST).exists)


def _own_checkpoint(config: Config) -> tuple[Path | None, dict[str, Any] | None]:
    found = find_checkpoint(Path(config.training.save_path))
    if found is None:
        return None, None
    return found[0], (found[1].get("training_summary") or {}).get("initial_model")


def begin_with_initial_model(config: Config, net: SpeakerNet, loss: nn.Module, speakers: int) -> dict[str, Any] | None:
    """Load the initial model into the network (and the loss, if `speakers`, their checksum, are the same).

    Returns facts about it, for the model files of the run; None without one. A resumed run has its own.
    """
    initial_model = config.training.initial_model
    if not initial_model:
        return None
    own, facts_of_own = distributed.from_main(lambda: _own_checkpoint(config))
    if own:
        logger.info("initial model %s: not read; the run resumes from %s", initial_model, own)
        return facts_of_own
    load_initial_weights(net, loss, initial_model, speakers=speakers)
    contents = read_checkpoint(initial_model)
    history = (contents.get("training_summary") or {}) if is_model_file(contents) else {}
    facts = {name: history[name] for name in KEPT_FACTS if history.get(name)}
    return {"file": Path(initial_model).name, "sha256": sha256_of(Path(initial_model)), **facts}


def compared_with_initial_model(
    config: Config, inputs: Inputs, summary: Mapping[str, Any], evaluation: Evaluation
) -> Evaluation:
    """The evaluation of best.pt on the test list, with its difference to the initial model.

    Both are scored in the same way and compared under the same draws of speakers.
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
        compared = paired.sentences(["the initial model", "best.pt"])
        values |= {"sha256": sha256_of(path), **_figures(paired)}
        sentences += compared
        # EER and costs are errors: what has grown is worse.
        added += [one for one, of in zip(compared, paired.differences[0], strict=True) if of.value > 0]
    else:
        added.append(f"the initial model {path} no longer exists: best.pt was not compared with it")
    for one in added:
        logger.warning("%s", one)
    results = dataclasses.replace(
        results, initial_model={**values, "sentences": sentences}, warnings=[*warnings, *added]
    )
    return dataclasses.replace(evaluation, results=results)


def _stayed_best(summary: Mapping[str, Any]) -> bool:
    return summary["best_epoch"] == 0 and not summary["best_stage"]


def _held_out(summary: Mapping[str, Any]) -> str:
    """The held-out EER of the initial model and of best.pt, in a sentence."""
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
    """Figures of the initial model, and the difference of best.pt to it, with intervals."""
    names = [one.name for one in headline(paired.systems[0])]
    return {
        "eer_percent": paired.systems[0].eer_percent,
        "min_dcf": paired.systems[0].min_dcf,
        "best_less_initial": {
            name: {"value": one.value, "interval": one.interval}
            for name, one in zip(names, paired.differences[0], strict=True)
        },
    }
