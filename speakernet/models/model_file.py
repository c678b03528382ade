"""The model file (format version 1): a trained network as plain values and tensors, and how weights enter a network.

A file describes itself: model and front end by name and options, sample rate, weights, and what scoring needs (mean
embedding, calibration, thresholds). `speakernet.checkpoint` reads and writes it. A file comes from outside: its entries
are checked here, and the network it describes is counted against its weights before memory is taken.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.files import place, reading
from speakernet.models.speaker_net import (
    SPEC_AUGMENT_PREFIX,
    SpeakerNet,
    check_finite,
    check_fits,
    folded,
    strip_wrappers,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
"""Hz, as the option `data.sample_rate` has them."""
MOST_VALUES = 1_000_000
"""Plain values in an entry; a file has some hundred."""
LAID_OUT_AT_MOST = 2
"""Times the numbers and parameters in the file: some are registered a second time under another name."""
BACKUP_MARK, MEAN_MARK = ".before-calibration", ".before-mean"
"""Part of the name of the backup of a model file before the first such change."""
ADVICE = "the file is damaged or from another program; copy or download it again, or take an earlier checkpoint"


@dataclass(frozen=True)
class ModelFile:
    """A network with its weights, in evaluation mode, and everything else that its model file holds."""

    net: SpeakerNet
    contents: dict[str, Any]

    @functools.cached_property
    def folded(self) -> SpeakerNet:
        """The network with its batch norms merged: the same numbers to a few units of the last place, faster."""
        return folded(self.net)


@dataclass
class LoadReport:
    """What `load_initial_weights` did."""

    source: str
    """The kind of file: "speakernet", or the toolkit it came from."""
    num_loaded: int
    """Tensors loaded into the network and the loss."""
    head: str = "none"
    """The loss's weights: "loaded", "new" or "none"."""
    not_loaded: list[str] = field(default_factory=list)
    """What the file holds and nothing took, each with the reason."""


def model_file_contents(
    net: SpeakerNet,
    *,
    loss_normalizes: bool,
    embedding_mean: Tensor | None = None,
    embedding_mean_of: Mapping[str, Any] | None = None,
    calibration: Mapping[str, Any] | None = None,
    thresholds: Sequence[Mapping[str, Any]] = (),
    training_summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything a model file holds, as plain values and tensors.

    Args:
        net: the network; its weights are referred to, not copied.
        loss_normalizes: whether classic scoring normalises embeddings of the loss it was trained with.
        embedding_mean: (dim,) subtracted before scoring.
        embedding_mean_of: the way of embedding that the mean was measured with and belongs to.
        calibration: score to log-likelihood ratio.
        thresholds: decisions, each with the scoring it belongs to.
        training_summary: how it was trained.
    """
    return {
        "format_version": FORMAT_VERSION,
        **net.spec(),
        "weights": {strip_wrappers(name): value.detach() for name, value in net.weights().items()},
        "loss_normalizes": loss_normalizes,
        "embedding_mean": embedding_mean,
        "embedding_mean_of": None if embedding_mean_of is None else dict(embedding_mean_of),
        "calibration": None if calibration is None else dict(calibration),
        "thresholds": [dict(threshold) for threshold in thresholds],
        "training_summary": None if training_summary is None else dict(training_summary),
    }


def load_model_file(path: str | Path, device: torch.device | str = "cpu") -> ModelFile:
    """The network of a model file with its weights, in evaluation mode, on `device`.

    Raises:
        CheckpointError: not a model file of speakernet, of a newer format, damaged, or with other weights than it says.
    """
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        raise CheckpointError(
            f"{path} is not a speakernet model file (no format_version); import a foreign checkpoint with "
            "`speakernet import-weights`"
        )
    return model_of(contents, path, device)


def model_of(contents: dict[str, Any], path: str | Path, device: torch.device | str = "cpu") -> ModelFile:
    """The network of a model file that was read, in evaluation mode, on `device`."""
    with reading(path, "a model file of this program", CheckpointError):
        check_entries(contents, path)
        weights = network_weights(contents)
        check_finite(weights, path)
        # Before building: whatever the file claims, memory is taken for what fits its weights.
        with laid_out(weights, path):
            expected = SpeakerNet.from_spec(contents).state_dict()
        check_fits(weights, expected, path)
        net = SpeakerNet.from_spec(contents)
        mean = contents.get("embedding_mean")
        if mean is not None and not (tuple(mean.shape) == (net.embedding_dim,) and bool(torch.isfinite(mean).all())):
            raise CheckpointError(f"{path}: embedding_mean is not {net.embedding_dim} finite numbers; {ADVICE}")
        net.load_state_dict(weights)
    return ModelFile(net.eval().to(device), contents)


def update_model_file(
    path: str | Path, changes: Mapping[str, Any], *, out: str | Path | None = None, backs_up: bool = True
) -> Path | None:
    """Replace entries of a model file, atomically; its weights stay as they are on disk.

    Args:
        path: of the model file.
        changes: entries and their values.
        out: another file to write; the file itself is then not changed.
        backs_up: keep the file as it was before the first such change, next to it.

    Returns:
        The backup, if this call made one.
    """
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        raise CheckpointError(
            f"{path} is a checkpoint of another program and cannot keep {', '.join(changes)}; import it with "
            "`speakernet import-weights`"
        )
    check_entries(contents, path)
    target = Path(path if out is None else out)
    # A mean changes every score, a calibration none: each has its own backup.
    mark = MEAN_MARK if "embedding_mean" in changes else BACKUP_MARK
    backup = target.with_name(f"{target.stem}{mark}{target.suffix}")
    makes_backup = backs_up and target.resolve() == Path(path).resolve() and not backup.exists()
    if makes_backup:
        # A second name is enough: the new content is written as a new file.
        place(path, backup)
    write_checkpoint(target, {**contents, **changes})
    return backup if makes_backup else None


def is_model_file(contents: Any) -> bool:
    """Whether a checkpoint that was read is ours."""
    return isinstance(contents, dict) and "format_version" in contents and "weights" in contents


def network_weights(contents: Mapping[str, Any]) -> dict[str, Tensor]:
    """The file's network weights without wrapper prefixes and without training-only state."""
    named = ((strip_wrappers(name), value) for name, value in contents["weights"].items())
    return {name: value for name, value in named if not name.startswith(SPEC_AUGMENT_PREFIX)}


def load_initial_weights(
    net: SpeakerNet, loss: nn.Module | None, path: str | Path, *, speakers: int | None = None
) -> LoadReport:
    """Load the weights of one of our files or of a checkpoint that an importer knows, and nothing else.

    The network is loaded whole or not at all; the loss's weights only if they are those of the same loss with the same
    speakers (`speakers` is their checksum), else the head stays new.
    """
    contents = read_checkpoint(path)
    with reading(path, "a model file, or a checkpoint of a toolkit that can be imported", CheckpointError):
        if is_model_file(contents):
            check_entries(contents, path)
            _check_same_architecture(net, contents, path)
            weights, head = network_weights(contents), _saved_head(contents, speakers)
            report = LoadReport("speakernet", 0)
        else:
            # Late: only files of other toolkits need their importers.
            from speakernet.models.importers import translate

            translated = translate(contents, net, path)
            weights, head = translated.weights, translated.head_weights
            report = LoadReport(translated.source, 0, not_loaded=list(translated.not_loaded))
        check_finite(weights, path)
        check_fits(weights, net.state_dict(), path)
        net.load_state_dict(weights, strict=False)
        report.num_loaded = len(weights)
        _load_head(loss, head, report)
    logger.info(
        "%s: loaded %d tensors of a %s file; optimizer and schedule start from scratch",
        *(path, report.num_loaded, report.source),
    )
    if report.head == "new":
        logger.info("%s: the head of the loss starts from scratch", path)
    for entry in report.not_loaded:
        logger.info("%s: not loaded: %s", path, entry)
    return report


def _saved_head(contents: Mapping[str, Any], speakers: int | None) -> dict[str, Tensor]:
    """The loss's weights: last.pt has them in its training state, best.pt has none."""
    saved = contents.get("training") or {}
    if None not in (speakers, saved.get("speakers")) and saved["speakers"] != speakers:
        return {}
    return {strip_wrappers(name): value for name, value in (saved.get("loss") or {}).items()}


def _check_same_architecture(net: SpeakerNet, contents: Mapping[str, Any], path: str | Path) -> None:
    ours, name = net.spec(), contents["model"]["name"]
    if name != ours["model"]["name"]:
        raise CheckpointError(
            f"{path} is a {name}, the configuration has {ours['model']['name']}; set model.name: {name}"
        )
    for component in ("model", "front_end"):
        if contents[component] != ours[component]:
            logger.warning("%s has %s %s, this run has %s", path, component, contents[component], ours[component])


def _load_head(loss: nn.Module | None, head: Mapping[str, Tensor], report: LoadReport) -> None:
    if loss is None or not head:
        report.not_loaded += [f"{name} (weights of the loss, not needed)" for name in head]
        report.head = "none" if loss is None or not any(True for _ in loss.parameters()) else "new"
        return
    own = loss.state_dict()
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in head.items()}:
        # Other speakers or another loss: the trunk is useful all the same.
        report.head = "new"
        for name, value in head.items():
            here = tuple(own[name].shape) if name in own else "not in this loss"
            report.not_loaded.append(f"loss {name} {tuple(value.shape)} (here: {here})")
        return
    check_finite(head, "the head of the loss")
    loss.load_state_dict(dict(head))
    report.head = "loaded"
    report.num_loaded += len(head)


@contextlib.contextmanager
def laid_out(weights: Mapping[str, Tensor], path: str | Path) -> Iterator[None]:
    """In the block networks are built without memory, and no larger than the weights of a file."""
    most_parameters = LAID_OUT_AT_MOST * len(weights)
    most_numbers = LAID_OUT_AT_MOST * sum(value.numel() for value in weights.values())
    parameters = numbers = 0

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal parameters, numbers
        parameters += parameter is not None
        numbers += 0 if parameter is None else parameter.numel()
        if parameters > most_parameters or numbers > most_numbers:
            raise CheckpointError(f"{path} describes a larger network than its {len(weights):,} tensors; {ADVICE}")

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"), _NoNumbers():
            yield
    finally:
        hook.remove()


class _NoNumbers(TorchFunctionMode):
    """Draws no random weights: on the meta device torch loads its compiler to draw them, which takes two seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("uniform_", "normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def check_entries(contents: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a newer format, and entries that are missing or of another kind than the format has."""
    version = contents["format_version"]
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r:.60}; this speakernet reads up to {FORMAT_VERSION}: upgrade it"
        )
    for name, is_right in ENTRIES.items():
        try:
            is_fine = is_right(contents.get(name))
        except (AttributeError, KeyError, TypeError, ValueError):
            is_fine = False
        if not is_fine:
            raise CheckpointError(f"{path}: {name} is missing or not what a model file holds; {ADVICE}")


def _is_component(value: Any) -> bool:
    return isinstance(value["name"], str) and _is_plain(value) and all(isinstance(key, str) for key in value["options"])


def _is_model(value: Any) -> bool:
    return _is_component(value) and {"pooling", "embedding_dim"} <= value["options"].keys()


def _is_rate(value: Any) -> bool:
    return type(value) is int and LOWEST_RATE <= value <= HIGHEST_RATE


def _is_weights(value: Any) -> bool:
    return all(isinstance(name, str) for name in value) and all(
        isinstance(one, Tensor) and not one.is_complex() for one in value.values()
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mean(value: Any) -> bool:
    return value is None or (value.is_floating_point() and value.ndim == 1)


def _is_summary(value: Any) -> bool:
    return value is None or (_is_plain(value) and isinstance(value.get("chosen_by") or {}, dict))


def _is_calibration(value: Any) -> bool:
    return value is None or (_is_plain(value) and all(map(_is_fit, value.get("fits", []))))


def _is_fit(value: Any) -> bool:
    numbers = [*value["weights"], value["offset"], value["prior"]]
    # Files of 0.2.0 do not hold the counts.
    counts = [value.get("num_targets", 0), value.get("num_nontargets", 0)]
    return (
        len(value["inputs"]) == len(value["weights"]) > 0
        and all(_is_number(one) and abs(one) < math.inf for one in numbers)
        and all(type(one) is int and one >= 0 for one in counts)
        and isinstance(value["backend"], dict)
    )


def _are_thresholds(value: Any) -> bool:
    return value is None or (
        _is_plain(value)
        and not isinstance(value, str)
        and all(
            isinstance(one["name"], str) and _is_number(one["threshold"]) and isinstance(one["backend"], dict)
            for one in value
        )
    )


def _is_number(value: Any) -> bool:
    # A threshold that nothing reaches is infinite; NaN is not equal to itself.
    return type(value) in (int, float) and value == value


def _is_plain(value: Any) -> bool:
    """Whether there are only plain values below, and not so many that a walk over shared ones takes for ever."""
    waiting, left = [value], MOST_VALUES
    while waiting and left:
        one, left = waiting.pop(), left - 1
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif one is not None and not isinstance(one, bool | int | float | str):
            return False
    return not waiting


ENTRIES: dict[str, Callable[[Any], bool]] = {
    "model": _is_model,
    "front_end": _is_component,
    "sample_rate": _is_rate,
    "weights": _is_weights,
    "loss_normalizes": _is_flag,
    "embedding_mean": _is_mean,
    "embedding_mean_of": _is_summary,
    "calibration": _is_calibration,
    "thresholds": _are_thresholds,
    "training_summary": _is_summary,
}
