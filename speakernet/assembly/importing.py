"""From another toolkit's checkpoint to a model file: what `speakernet import-weights` does."""

import argparse
import sys
from pathlib import Path
from typing import Any

from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.losses.options import LOSSES
from speakernet.models.importers import FORMATS, PUBLISHED, Description
from speakernet.models.importers.published import fits_of_others, import_network, likeness
from speakernet.models.model_file import check_finite, check_fits, is_model_file, model_file_contents
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import lookup

# Options by their default, which the files of other toolkits have no use for.
VOXCELEB_TRAINER_ONLY = {"no_log_input": False, "pooling": "", "num_mels": 0, "sinc_stride": 10, "loss": ""}


def import_weights(arguments: argparse.Namespace) -> int:
    """Read, recognise, translate, check, write.

    Raises:
        ValueError: another architecture, an option that is needed and missing, a damaged or unsafe file.
    """
    lookup({**FORMATS, **PUBLISHED}, arguments.source, "toolkit")
    if Path(arguments.out).resolve() == Path(arguments.file).resolve():
        raise ValueError(f"--out is the checkpoint itself, {arguments.file}; give the model file a name of its own")
    contents = read_checkpoint(arguments.file)
    if is_model_file(contents):
        raise ValueError(f"{arguments.file} is a model file of speakernet already; use it as it is")
    if not isinstance(contents, dict):
        raise ValueError(f"{arguments.file} holds a {type(contents).__name__}, expected tensors by name")
    if arguments.source in PUBLISHED:
        return _import_published(arguments, contents)
    importer = lookup(FORMATS, arguments.source, "toolkit")
    if not importer.is_ours_to_read(contents):
        raise ValueError(
            f"{arguments.file} is no checkpoint of {arguments.source} that this speakernet knows{likeness(contents)}"
        )
    lookup(MODELS, arguments.model, "model")
    described = importer.describe(contents)
    if described.model != arguments.model:
        raise ValueError(f"{arguments.file} is a {described.model}, --model says {arguments.model}")
    net = _network(arguments, described)
    translated = importer.translate(contents, net, arguments.file)
    check_finite(translated.weights, arguments.file)
    check_fits(translated.weights, net.state_dict(), arguments.file)
    net.load_state_dict(translated.weights)
    normalizes = lookup(LOSSES, arguments.loss, "loss").options.normalize_embeddings if arguments.loss else True  # type: ignore[attr-defined]
    _save(arguments, net, normalizes)
    not_loaded = [*(f"{name} (weights of the loss)" for name in translated.head_weights), *translated.not_loaded]
    sys.stdout.write("\n".join(_report(arguments, net, described, not_loaded)) + "\n")
    return 0


def _import_published(arguments: argparse.Namespace, contents: dict[str, Any]) -> int:
    """As `import_weights`, from a toolkit whose files say enough of themselves.

    Raises:
        ValueError: an option that only voxceleb_trainer has, or another model.
    """
    given = [option for option, value in VOXCELEB_TRAINER_ONLY.items() if getattr(arguments, option) != value]
    if given:
        names = ", ".join(f"--{option.replace('_', '-')}" for option in given)
        raise ValueError(f"{names}: only for voxceleb_trainer; a file of {arguments.source} shows it, leave it out")
    imported = import_network(PUBLISHED[arguments.source], arguments.model, contents, arguments.file)
    _save(arguments, imported.net, normalizes=True)
    lines = [_summary(arguments, imported.net), *(f"not loaded: {entry}" for entry in imported.not_loaded)]
    if others := fits_of_others(contents, PUBLISHED[arguments.source]):
        lines.append(
            f"these weights also fit {' and '.join(others)}, which hear another front end: the file does not tell "
            "whose they are; if in doubt, compare an embedding with the original's"
        )
    sys.stdout.write("\n".join([*lines, f"next: speakernet info {arguments.out}"]) + "\n")
    return 0


def _save(arguments: argparse.Namespace, net: SpeakerNet, normalizes: bool) -> None:
    """Write the model file, with where its weights came from."""
    summary = {
        "imported_from": arguments.source,
        "file": Path(arguments.file).name,
        "licence": arguments.licence or "not given",
        "trained_on": arguments.trained_on or "not given",
    }
    write_checkpoint(arguments.out, model_file_contents(net, loss_normalizes=normalizes, training_summary=summary))


def _summary(arguments: argparse.Namespace, net: SpeakerNet) -> str:
    spec = net.spec()
    return (
        f"{arguments.out}: {net.model_name}, {sum(one.numel() for one in net.parameters()):,} parameters, "
        f"model {spec['model']['options']}, front end {spec['front_end']}"
    )


def _network(arguments: argparse.Namespace, described: Description) -> SpeakerNet:
    pooling = arguments.pooling or described.pooling
    if not pooling:
        raise ValueError(f"{arguments.file} does not tell its pooling; give --pooling, such as TAP or MAX")
    if described.is_raw:
        options = {"sinc_stride": arguments.sinc_stride}
        return SpeakerNet.named(described.model, pooling, described.embedding_dim, options)
    num_mels = arguments.num_mels or described.num_mels
    if not num_mels:
        raise ValueError(f"{arguments.file} does not hold its filterbank; give --num-mels (its n_mels)")
    front_end = {"num_mels": num_mels, "log_input": not arguments.no_log_input}
    return SpeakerNet.named(described.model, pooling, described.embedding_dim, front_end_options=front_end)


def _report(arguments: argparse.Namespace, net: SpeakerNet, described: Description, not_loaded: list[str]) -> list[str]:
    lines = [
        _summary(arguments, net),
        *(f"not loaded: {entry}" for entry in not_loaded),
    ]
    if not described.is_raw:
        way = "without" if arguments.no_log_input else "with"
        lines.append(f"taken to be trained {way} log_input, which a checkpoint does not show (--no-log-input)")
    if not arguments.loss and not described.has_head:
        lines.append("taken to be trained with a loss on normalised embeddings (else --loss proto)")
    lines.append(f"next: speakernet info {arguments.out}")
    return lines
