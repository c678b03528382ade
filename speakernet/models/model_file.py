"""The model file (format version 1): a trained network as plain values and tensors; loads weights
into networks.

A file is self-describing: model and front end by name and options, sample rate, weights, and what
scoring needs (mean embedding, calibration, thresholds). `speakernet.checkpoint` reads and writes
it. Files are untrusted: this module checks the entries, and compares the described network with the
size of the weights before allocating memory.
"""

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.files import place, reading
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import (
    SpeakerNet,
    check_finite,
    check_fits,
    strip_wrappers,
    without_spec_augment,
)
from speakernet.options import PLUGIN_MODULES, lookup

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LOWEST_RATE = 1_000
HIGHEST_RATE = 768_000
"""Hz, the bounds of the option `data.sample_rate`."""
MAX_VALUES = 1_000_000
"""Limit on plain values in an entry; real files have a few hundred."""
LAID_OUT_AT_MOST = 2
MIN_ALLOWED = 1 << 22
"""Limit on the network's values relative to those in the file, and some more for windows and other
fixed tables."""
ALLOCATING = frozenset({"empty", "zeros", "ones", "full", "rand", "randn"})
"""Functions of torch from which parameters begin."""
MAX_MAPS = 10
"""Limit on affine maps of an adaptation; two are fitted, an imported chain has three."""
MAX_REPEAT_SECONDS = 60.0
"""Limit on the length to which an adapted network has recordings repeated."""
BACKUP_MARK = ".before-calibration"
MEAN_MARK = ".before-mean"
"""Part of the name of a model file's backup from before the first such change."""
TENSORS = ("weights", "embedding_mean")
SYNTHETIC_ONLY = (
    "the model was trained on synthetic voices only, so its answers about real voices mean "
    "nothing; use a published model (`speakernet models` lists them), or train on recordings of "
    "people"
)
ADVICE = (
    "the file is damaged or from another program; copy or download it again, or use an "
    "earlier checkpoint"
)


@dataclass(frozen=True)
class ModelFile:
    """A network with its weights, in evaluation mode, and all contents of its model file."""

    net: SpeakerNet
    contents: dict[str, Any]


@dataclass
class LoadReport:
    """The result of `load_initial_weights`."""

    source: str
    """The kind of file: "speakernet", or the toolkit that wrote it."""
    num_loaded: int
    """Tensors loaded into the network and the loss."""
    head: str = "none"
    """The loss's weights: "loaded", "new" or "none"."""
    not_loaded: list[str] = field(default_factory=list)
    """Entries of the file that were not loaded, each with the reason."""


def model_file_contents(
    net: SpeakerNet,
    *,
    loss_normalizes: bool,
    training_summary: Mapping[str, Any] | None = None,
    is_last: bool = False,
) -> dict[str, Any]:
    """The contents of a model file, as plain values and tensors; what scoring adds (mean embedding,
    calibration, thresholds) is still empty.

    Args:
        net: the network; its weights are referenced, not copied.
        loss_normalizes: whether classic scoring normalises embeddings trained with this loss.
        training_summary: facts about the training.
        is_last: whether this is for last.pt, which omits the frozen weights of a pretrained
            backbone.
    """
    # The frozen weights of a backbone of several GB are in files that do not change, so last.pt,
    # which is written every epoch, only refers to them.
    trunk = net.trunk
    fixed = trunk.fixed if is_last or trunk.refers_to_files else {}
    summary = None if training_summary is None else dict(training_summary)
    if summary is not None and trunk.is_pretrained:
        sizes = {"parameters_trained": 0, "parameters_frozen": 0}
        for parameter in net.parameters():
            kind = "parameters_trained" if parameter.requires_grad else "parameters_frozen"
            sizes[kind] += parameter.numel()
        summary |= {kind: size for kind, size in sizes.items() if size}
    weights = net.weights(without_fixed=bool(fixed))
    contents = {
        "format_version": FORMAT_VERSION,
        **net.spec(),
        "weights": {name: value.detach() for name, value in weights.items()},
    }
    if fixed:
        contents["reference"] = dict(fixed)
    contents["loss_normalizes"] = loss_normalizes
    contents |= {"embedding_mean": None, "embedding_mean_of": None, "calibration": None}
    contents["thresholds"] = []
    contents["training_summary"] = summary
    return contents


def load_model_file(path: str | Path, device: torch.device | str = "cpu") -> ModelFile:
    """The network of a model file with its weights, in evaluation mode, on `device`.

    Raises:
        CheckpointError: not a speakernet model file, a newer format, damaged, or weights that do
            not fit the network.
    """
    return model_of(_read(path), path, device)


def _read(path: str | Path) -> dict[str, Any]:
    contents = read_checkpoint(path)
    if not is_model_file(contents):
        raise CheckpointError(
            f"{path} is not a speakernet model file (no format_version); import a foreign "
            "checkpoint with `speakernet import-weights`"
        )
    return contents  # type: ignore[no-any-return]


def model_of(
    contents: dict[str, Any], path: str | Path, device: torch.device | str = "cpu"
) -> ModelFile:
    """The network of a model file's contents, in evaluation mode, on `device`."""
    # A model file may come from anywhere, so nothing in it is trusted: its entries are checked,
    # the network is built without drawing weights and within the memory that they justify, and
    # all names and shapes are compared before they are loaded.
    with reading(path, "a model file of this program", CheckpointError), _in_float32():
        check_entries(contents, path)
        for module, digest in contents.get("components", {}).items():
            if module not in PLUGIN_MODULES:
                raise CheckpointError(
                    f"{path} needs {module}.py, which is not loaded: give --plugin {module}.py"
                )
            if PLUGIN_MODULES[module][1] != digest:
                logger.warning("%s was made with a different version of %s.py", path, module)
        weights = network_weights(contents, path)
        check_finite(weights, path)
        with Undrawn(weights, path):
            net = SpeakerNet.from_spec(contents)
        check_fits(weights, net.state_dict(), path)
        mean = contents.get("embedding_mean")
        if mean is None:
            mean = torch.zeros(net.embedding_dim)
        if mean.shape != (net.embedding_dim,) or not mean.float().isfinite().all():
            raise CheckpointError(
                f"{path}: embedding_mean is not {net.embedding_dim} finite numbers; {ADVICE}"
            )
        if (contents.get("adaptation") or {}).get("score") == "plda":
            between, scales = (weights[f"adaptation.{name}"] for name in ("between", "weights"))
            if not (bool((between >= 0).all()) and bool((scales > 0).all())):
                raise CheckpointError(
                    f"{path}: the PLDA has variances between speakers from "
                    f"{float(between.min()):.4g} and weights from {float(scales.min()):.4g}; "
                    f"expected variances of at least 0 and weights above 0; {ADVICE}"
                )
        net.load_state_dict(weights)
    return ModelFile(net.eval().to(device), contents)


def update_model_file(
    path: str | Path,
    changes: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    backs_up: bool = True,
) -> Path | None:
    """Replace entries of a model file, atomically; its weights do not change.

    Args:
        path: the model file.
        changes: entries and their values.
        out: another file to write instead of changing `path`.
        backs_up: keep a copy from before the first such change next to the file.

    Returns:
        The backup, if this call made one.
    """
    contents = _read(path)
    check_entries(contents, path)
    target = Path(path if out is None else out)
    # A new mean changes every score, a calibration none, so each has its own backup.
    mark = MEAN_MARK if "embedding_mean" in changes else BACKUP_MARK
    backup = target.with_name(f"{target.stem}{mark}{target.suffix}")
    makes_backup = backs_up and target.resolve() == Path(path).resolve() and not backup.exists()
    if makes_backup:
        # A second name for the old file suffices: the new content is written to a new file.
        place(path, backup)
    write_checkpoint(target, {**contents, **changes})
    return backup if makes_backup else None


def voices_caution(contents: Mapping[str, Any]) -> str:
    """A warning if a network was trained on synthetic voices only, otherwise an empty string.

    Foreign weights and files of version 0.3.0 do not say what they were trained on, and count as
    trained on people.

    >>> voices_caution({"training_summary": {"corpus": {"is_synthetic": False}}})
    ''
    """
    summary = contents.get("training_summary")
    while isinstance(summary, Mapping) and _is_synthetic(summary.get("corpus")):
        if not summary.get("initial_model"):
            return SYNTHETIC_ONLY
        # A fine-tuned network also knows the voices of its initial model.
        summary = summary["initial_model"]
    return ""


def _is_synthetic(corpus: Any) -> bool:
    return isinstance(corpus, Mapping) and corpus.get("is_synthetic") is True


def is_model_file(contents: Any) -> bool:
    """Whether the contents of a checkpoint are those of a model file."""
    return isinstance(contents, dict) and "format_version" in contents and "weights" in contents


def network_weights(contents: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The file's network weights, without wrapper prefixes and training-only state."""
    weights = contents["weights"]
    if contents.get("reference"):
        weights = lookup(MODELS, contents["model"]["name"], "model").load().complete(contents, path)
    return without_spec_augment({strip_wrappers(name): value for name, value in weights.items()})


def load_initial_weights(
    net: SpeakerNet, loss: nn.Module | None, path: str | Path, *, speakers: int | None = None
) -> LoadReport:
    """Load only the weights of a model file, or of a checkpoint that an importer supports.

    The network is loaded completely or not at all; the loss's weights only if they belong to the
    same loss with the same speakers (`speakers` is their checksum), otherwise the head starts from
    scratch.
    """
    # Where fine-tuning starts. The network must fit completely, because a layer left at its random
    # values would ruin the others in the first steps; the head of the loss need not fit, because
    # other speakers need another head anyway.
    contents = read_checkpoint(path)
    report = LoadReport("speakernet", 0)
    with reading(
        path, "a model file, or a checkpoint of a toolkit that can be imported", CheckpointError
    ):
        if is_model_file(contents):
            check_entries(contents, path)
            _check_same_architecture(net, contents, path)
            weights = network_weights(contents, path)
            head = _saved_head(contents, speakers)
            # An adaptation only fits the embeddings of the old weights.
            for name in list(weights):
                if name.startswith("adaptation."):
                    del weights[name]
                    report.not_loaded.append(
                        f"{name} (run `speakernet adapt` again after training)"
                    )
        else:
            # Imported late: only files of other toolkits need it.
            from speakernet.models.importers import translate

            translated = translate(contents, net, path)
            weights = translated.weights
            head = translated.head_weights
            report.source = translated.source
            report.not_loaded = list(translated.not_loaded)
        check_finite(weights, path)
        check_fits(weights, net.state_dict(), path)
        net.load_state_dict(weights, strict=False)
        report.num_loaded = len(weights)
        _load_head(loss, head, report)
    logger.info(
        "%s: loaded %d tensors from a %s file; optimizer and schedule start from scratch",
        path,
        report.num_loaded,
        report.source,
    )
    if report.head == "new":
        logger.info("%s: the head of the loss starts from scratch", path)
    for entry in report.not_loaded:
        logger.info("%s: not loaded: %s", path, entry)
    return report


def _saved_head(contents: Mapping[str, Any], speakers: int | None) -> dict[str, Tensor]:
    """The loss's weights: last.pt has them in its training state, best.pt has none."""
    training = contents.get("training") or {}
    saved_speakers = training.get("speakers")
    # Without a checksum on either side the shapes have to decide.
    if None not in (speakers, saved_speakers) and saved_speakers != speakers:
        return {}
    return {strip_wrappers(name): value for name, value in (training.get("loss") or {}).items()}


def _check_same_architecture(
    net: SpeakerNet, contents: Mapping[str, Any], path: str | Path
) -> None:
    name = contents["model"]["name"]
    if name != net.model_name:
        raise CheckpointError(
            f"{path} has the network {name}, but the configuration has {net.model_name}; set "
            f"model.name: {name}"
        )
    spec = net.spec()
    for component in ("model", "front_end"):
        theirs = contents[component]
        ours = spec[component]
        if theirs != ours:
            logger.warning("%s has %s %s, this run has %s", path, component, theirs, ours)


def _load_head(loss: nn.Module | None, head: Mapping[str, Tensor], report: LoadReport) -> None:
    if loss is None or not head:
        report.not_loaded += [f"{name} (weights of the loss, not needed)" for name in head]
        if loss is not None and list(loss.parameters()):
            report.head = "new"
        return
    # All or nothing, as for the network: a head that fits in part would be half trained and half
    # random.
    shapes = {name: tuple(value.shape) for name, value in head.items()}
    ours = {name: tuple(value.shape) for name, value in loss.state_dict().items()}
    if shapes != ours:
        # Different speakers or a different loss; the network is still useful.
        report.head = "new"
        for name, shape in shapes.items():
            here = ours.get(name, "not in this loss")
            report.not_loaded.append(f"loss {name} {shape} (in this run: {here})")
        return
    check_finite(head, "the head of the loss")
    loss.load_state_dict(dict(head))
    report.head = "loaded"
    report.num_loaded += len(head)


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    """Inside the block, networks are built in float32, whatever default the caller has set for
    torch.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# A model file from a stranger may describe a network of a terabyte in one line. Building it on the
# meta device first would be the usual way, but front ends compute their tables while they are
# built. So every tensor that begins inside the block is counted, and the file is refused as soon as
# that is more than twice what its weights hold. Nothing is drawn either: filling a large network
# with random numbers takes longer than loading its weights.
class Undrawn(TorchFunctionMode):
    """Inside the block, networks are built with undrawn weights, which a model file's then replace.

    Whatever the file claims, memory is only allocated for a network that fits its weights: each
    parameter begins as a tensor from one of the functions in `ALLOCATING`, and one too many is
    refused with CheckpointError.
    """

    def __init__(self, weights: Mapping[str, Tensor], path: str | Path) -> None:
        super().__init__()
        self.left = MIN_ALLOWED + LAID_OUT_AT_MOST * sum(
            value.numel() for value in weights.values()
        )
        self.refusal = (
            f"{path} describes a network larger than its {len(weights):,} tensors; {ADVICE}"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ALLOCATING:
            sizes = (kwargs or {}).get("size", args)
            sizes = sizes[0] if sizes and isinstance(sizes[0], tuple | list) else sizes
            self.left -= math.prod(size for size in sizes if isinstance(size, int))
            if self.left < 0:
                raise CheckpointError(self.refusal)
        if name in ("uniform_", "normal_") or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def check_entries(contents: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a newer format, and missing or malformed entries."""
    # Not `isinstance`, which would accept True.
    version = contents["format_version"]
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r:.60}; this speakernet reads up to "
            f"{FORMAT_VERSION}; upgrade it"
        )
    # Walked through before pydantic sees them, which would follow a structure that contains itself
    # without end.
    for name in Entries.model_fields:
        if name not in TENSORS and not _is_plain(contents.get(name)):
            raise CheckpointError(f"{path}: {name} is missing or malformed; {ADVICE}")
    try:
        Entries.model_validate(contents, strict=True)
    except ValidationError as error:
        entry = error.errors(include_input=False)[0]["loc"][0]
        raise CheckpointError(f"{path}: {entry} is missing or malformed; {ADVICE}") from None
    names = set()
    for threshold in contents.get("thresholds") or ():
        key = threshold["name"], json.dumps(threshold["backend"], sort_keys=True)
        if key in names:
            raise CheckpointError(
                f"{path} has two thresholds {threshold['name']!r} for one kind of score, so it is "
                "unclear which one applies; calibrate it again"
            )
        names.add(key)


def _is_plain(value: Any) -> bool:
    """Whether a value contains only plain values, few enough that shared ones cannot make the walk
    endless.
    """
    # A list rather than recursion, which a deeply nested file could overflow.
    waiting = [value]
    left = MAX_VALUES
    while waiting and left:
        value = waiting.pop()
        left -= 1
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif value is not None and not isinstance(value, bool | int | float | str):
            return False
    return not waiting


Count = Annotated[int, Ge(0)]
Size = Annotated[int, Ge(1), Le(MAX_VALUES)]
# Numbers of inputs and outputs.
Map = Annotated[list[Size], MinLen(2), MaxLen(2)]


class Checked(BaseModel):
    """A part of a model file: values of the right kinds, whatever else there is."""

    # Built at the first model file that is read, not at every start.
    model_config = ConfigDict(arbitrary_types_allowed=True, defer_build=True)


class Named(Checked):
    """A component: its name and plain options."""

    name: str
    options: dict[str, Any]


class Threshold(Checked):
    """A decision threshold with the scoring that it belongs to."""

    name: str
    # A threshold that nothing reaches is infinite; the bound refuses NaN.
    threshold: Annotated[float, Ge(-math.inf)]
    backend: dict[str, Any]


class Fit(Checked):
    """The calibration of one scoring."""

    inputs: Annotated[list[str], MinLen(1)]
    weights: list[FiniteFloat]
    offset: FiniteFloat
    prior: FiniteFloat
    backend: dict[str, Any]
    # Files of version 0.2.0 lack the counts.
    num_targets: Count = 0
    num_nontargets: Count = 0


class Calibration(Checked):
    """The calibrations of all scorings."""

    fits: list[Fit] = []


class AdaptationEntry(Checked):
    """The adaptation appended to the embedding layer."""

    name: str
    maps: Annotated[list[Map], MinLen(1), MaxLen(MAX_MAPS)]
    score: Literal["cosine", "plda"]
    speech: Literal["whole", "detected"] = "whole"
    repeat_seconds: Annotated[float, Ge(0.0), Le(MAX_REPEAT_SECONDS)] = 0.0


class Corpus(Checked):
    """What a network was trained on."""

    is_synthetic: bool = False


class Summary(Checked):
    """The facts about the training that other modules read."""

    chosen_by: dict[str, Any] | None = None
    corpus: Corpus | None = None


class Entries(Checked):
    """The entries of a model file; files of version 0.2.0 may lack those with a default."""

    model: Named
    front_end: Named
    sample_rate: Annotated[int, Ge(LOWEST_RATE), Le(HIGHEST_RATE)]
    weights: dict[str, Tensor]
    loss_normalizes: bool
    embedding_mean: Tensor | None = None
    embedding_mean_of: dict[str, Any] | None = None
    calibration: Calibration | None = None
    thresholds: list[Threshold] | None = None
    training_summary: Summary | None = None
    adaptation: AdaptationEntry | None = None
    components: dict[str, str] = {}
    # Weights that are only in the files of a pretrained backbone, with their CRC-32.
    reference: dict[str, int] | None = None
