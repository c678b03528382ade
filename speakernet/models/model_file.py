"""The model file (format version 1): what a trained network is kept in, and how weights come into a network.

A file holds plain values and tensors only and says what it is: model and front end by name and options, sample rate,
weights, and what scoring needs (mean embedding, calibration, thresholds). `speakernet.checkpoint` reads and writes it.
Foreign checkpoints are translated by `speakernet.models.importers`.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.files import place, reading
from speakernet.models.folding import folded
from speakernet.models.importers import translate
from speakernet.models.model_schema import check_entries, check_mean, laid_out
from speakernet.models.speaker_net import SPEC_AUGMENT_PREFIX, SpeakerNet

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
# What torch.compile and DistributedDataParallel put before parameter names.
WRAPPER_PREFIXES = ("_orig_mod.", "module.")
MOST_NAMES_SHOWN = 10
BACKUP_MARK, MEAN_MARK = ".before-calibration", ".before-mean"
"""Stands in the name of what a model file was before something was first written into it."""


@dataclass(frozen=True)
class ModelFile:
    """A model file that was read: the network with its weights, in evaluation mode, and everything else it held."""

    net: SpeakerNet
    contents: dict[str, Any]

    @functools.cached_property
    def folded(self) -> SpeakerNet:
        """The network as it is used: the same numbers to a few units of the last place, sooner (`fold_batch_norms`)."""
        return folded(self.net)


@dataclass
class LoadReport:
    """What `load_initial_weights` did."""

    source: str
    """The kind of file: "speakernet", or the toolkit it came from."""
    num_loaded: int
    """Tensors that went into the network and the loss."""
    head: str
    """What became of the loss's weights: "loaded", "new" or "none"."""
    not_loaded: list[str] = field(default_factory=list)
    """What the file holds and nothing took, each with the reason."""

    def lines(self) -> list[str]:
        """The report in words, for the log."""
        lines = [f"loaded {self.num_loaded} tensors from a {self.source} file; optimizer and schedule start fresh"]
        if self.head == "new":
            lines.append("the head of the loss starts new")
        return lines + [f"not loaded: {entry}" for entry in self.not_loaded]


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
        embedding_mean_of: the way of embedding that the mean was measured with, and belongs to.
        calibration: score to log-likelihood ratio.
        thresholds: decisions, each with the scoring it belongs to.
        training_summary: how it came to be.
    """
    weights = {strip_wrappers(name): value.detach() for name, value in net.weights().items()}
    return {
        "format_version": FORMAT_VERSION,
        **net.spec(),
        "weights": weights,
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
            f"{path} is not a speakernet model file (no format_version); "
            "turn a foreign checkpoint into one with `speakernet import-weights`"
        )
    return model_of(contents, path, device)


def model_of(contents: dict[str, Any], path: str | Path, device: torch.device | str = "cpu") -> ModelFile:
    """The network of a model file that was read, in evaluation mode, on `device`.

    Raises:
        CheckpointError: of a newer format, damaged, or with other weights than it says.
    """
    with reading(path, "a model file of this program", CheckpointError):
        check_version(contents, path)
        check_entries(contents, path)
        weights = network_weights(contents)
        check_finite(weights, path)
        # Before loading: torch's own error names at most the tensors, never the file or what to do. Before building:
        # whatever the file claims, memory is taken for what fits its weights.
        with laid_out(weights, path):
            expected = SpeakerNet.from_spec(contents).state_dict()
        check_fits(weights, expected, path)
        net = SpeakerNet.from_spec(contents)
        check_mean(contents.get("embedding_mean"), net.embedding_dim, path)
        net.load_state_dict(weights)
    return ModelFile(net.eval().to(device), contents)


def update_model_file(
    path: str | Path, changes: Mapping[str, Any], *, out: str | Path | None = None, backs_up: bool = True
) -> Path | None:
    """Write entries of a model file anew, atomically; its weights stay as they are on disk.

    Args:
        path: of the model file.
        changes: entries and their values.
        out: where to write instead; the file itself is then not touched.
        backs_up: keep the file as it was before the first such change, beside it.

    Returns:
        The backup, where this call made one.

    Raises:
        CheckpointError: not a model file of speakernet.
        OSError: it cannot be written; the file is whole and as it was.
    """
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        raise CheckpointError(
            f"{path} is a checkpoint of another program and cannot keep {', '.join(changes)}; make a model file of it "
            "with `speakernet import-weights`"
        )
    check_version(contents, path)
    target = Path(path if out is None else out)
    # A mean changes every score, a calibration none: who takes back the one need not lose the other.
    mark = MEAN_MARK if "embedding_mean" in changes else BACKUP_MARK
    backup = target.with_name(f"{target.stem}{mark}{target.suffix}")
    makes_backup = backs_up and target.resolve() == Path(path).resolve() and not backup.exists()
    if makes_backup:
        # A second name is enough: the new content comes as a file of its own.
        place(path, backup)
    write_checkpoint(target, {**contents, **changes})
    return backup if makes_backup else None


def is_model_file(contents: Any) -> bool:
    """Whether a checkpoint that was read is ours."""
    return isinstance(contents, dict) and "format_version" in contents and "weights" in contents


def check_version(contents: Mapping[str, Any], path: str | Path) -> None:
    """Refuse files of a newer speakernet.

    Raises:
        CheckpointError: a format version that this speakernet does not know.
    """
    version = contents["format_version"]
    # True == 1 in Python.
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"{path} has the format version {version!r:.60}; expected a number from 1 to {FORMAT_VERSION}"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this speakernet reads up to {FORMAT_VERSION}: upgrade it"
        )


def network_weights(contents: Mapping[str, Any]) -> dict[str, Tensor]:
    """The file's network weights without wrapper prefixes and without training-only state."""
    named = ((strip_wrappers(name), value) for name, value in contents["weights"].items())
    return {name: value for name, value in named if not name.startswith(SPEC_AUGMENT_PREFIX)}


def strip_wrappers(name: str) -> str:
    """A parameter's name without what compilation and data parallelism put before it.

    >>> strip_wrappers("module._orig_mod.trunk.conv1.weight")
    'trunk.conv1.weight'
    """
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def check_finite(weights: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights with NaN or infinity.

    Raises:
        CheckpointError: naming the first ten such tensors.
    """
    tensors = {
        name: value for name, value in weights.items() if isinstance(value, Tensor) and value.is_floating_point()
    }
    broken = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise CheckpointError(
            f"{path} has NaN or infinite values in {len(broken)} of {len(weights)} tensors: {_some(broken)}; "
            "the training that wrote it had diverged, take an earlier checkpoint"
        )


def check_fits(found: Mapping[str, Tensor], expected: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights that are not exactly those of the network.

    Raises:
        CheckpointError: listing missing and unknown names, and both shapes where they differ.
    """
    expected = {name: value for name, value in expected.items() if not name.startswith(SPEC_AUGMENT_PREFIX)}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unknown {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {tuple(found[name].shape)} in the file, {tuple(value.shape)} in the network"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit the network: {_some(problems, '; ')}")


def load_initial_weights(
    net: SpeakerNet, loss: nn.Module | None, path: str | Path, *, speakers: int | None = None
) -> LoadReport:
    """Start from the weights of a file, and from nothing else in it.

    The file may be ours (best.pt or last.pt) or a checkpoint that an importer knows. The network is loaded whole or not
    at all; the loss's weights are loaded where they are those of the same loss with the same number of speakers, else
    the head stays new.

    Args:
        net: takes the weights.
        loss: likewise, where it has any.
        path: the file.
        speakers: checksum of the speakers of now; a head of others stays new, whatever their number.

    Raises:
        CheckpointError: another architecture (both are named), other shapes (both are listed), NaN, damage.
    """
    contents = read_checkpoint(path)
    with reading(path, "a model file, or a checkpoint of a toolkit that can be imported", CheckpointError):
        if is_model_file(contents):
            check_version(contents, path)
            check_entries(contents, path)
            _check_same_architecture(net, contents, path)
            source, weights, head = "speakernet", network_weights(contents), _saved_head(contents, speakers)
            not_loaded: list[str] = []
        else:
            translated = translate(contents, net, path)
            source, weights, head = translated.source, translated.weights, translated.head_weights
            not_loaded = list(translated.not_loaded)
        check_finite(weights, path)
        check_fits(weights, net.state_dict(), path)
        net.load_state_dict(weights, strict=False)
        report = LoadReport(source, len(weights), "none", not_loaded)
        _load_head(loss, head, report)
    for line in report.lines():
        logger.info("%s: %s", path, line)
    return report


def _saved_head(contents: Mapping[str, Any], speakers: int | None) -> dict[str, Tensor]:
    """The loss's weights: last.pt has them among the state of training, best.pt has none."""
    saved = contents.get("training") or {}
    if None not in (speakers, saved.get("speakers")) and saved["speakers"] != speakers:
        return {}
    return {strip_wrappers(name): value for name, value in (saved.get("loss") or {}).items()}


def _check_same_architecture(net: SpeakerNet, contents: Mapping[str, Any], path: str | Path) -> None:
    ours = net.spec()
    if contents["model"]["name"] != ours["model"]["name"]:
        raise CheckpointError(
            f"{path} is a {contents['model']['name']}, the configuration asks for {ours['model']['name']}; "
            f"set model.name: {contents['model']['name']}"
        )
    for part in ("model", "front_end"):
        if contents[part] != ours[part]:
            logger.warning("%s was made with %s %s, this run has %s", path, part, contents[part], ours[part])


def _load_head(loss: nn.Module | None, head: Mapping[str, Tensor], report: LoadReport) -> None:
    if loss is None or not head:
        report.not_loaded += [f"{name} (weights of the loss, not needed)" for name in head]
        report.head = "none" if loss is None or not any(True for _ in loss.parameters()) else "new"
        return
    own = loss.state_dict()
    mismatches = [name for name in own if name not in head] + [
        name for name in head if name not in own or own[name].shape != head[name].shape
    ]
    if mismatches:
        # Other speakers, or another loss: the trunk is worth having all the same.
        report.head = "new"
        for name, value in head.items():
            here = tuple(own[name].shape) if name in own else "not in this loss"
            report.not_loaded.append(f"loss {name} {tuple(value.shape)} (here: {here}); the head starts new")
        return
    check_finite(head, "the head of the loss")
    loss.load_state_dict(dict(head))
    report.head = "loaded"
    report.num_loaded += len(head)


def _some(names: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(names[:MOST_NAMES_SHOWN])
    return shown if len(names) <= MOST_NAMES_SHOWN else f"{shown} and {len(names) - MOST_NAMES_SHOWN} more"
