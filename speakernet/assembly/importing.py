"""From another toolkit's checkpoint to a model file: what `speakernet import-weights` does."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from speakernet.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from speakernet.losses.options import LOSSES
from speakernet.models.importers import PUBLISHED, TOOLKITS, import_network, unknown_file, voxceleb_trainer
from speakernet.models.model_file import is_model_file, model_file_contents
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet, check_finite, check_fits
from speakernet.options import lookup

# Options by their default that checkpoints of other toolkits make needless.
VOXCELEB_TRAINER_ONLY = {"no_log_input": False, "pooling": "", "num_mels": 0, "sinc_stride": 10, "loss": ""}


def import_weights(arguments: argparse.Namespace) -> int:
    """Read, recognise, translate, check, write."""
    lookup(dict.fromkeys(TOOLKITS), arguments.source, "toolkit")
    if Path(arguments.out).resolve() == Path(arguments.file).resolve():
        raise ValueError(f"--out is the checkpoint itself, {arguments.file}; give the model file another name")
    contents = read_checkpoint(arguments.file)
    if is_model_file(contents):
        raise ValueError(f"{arguments.file} is a model file of speakernet already; use it as it is")
    if not isinstance(contents, dict):
        raise CheckpointError(f"{arguments.file} holds a {type(contents).__name__}, expected tensors by name")
    if arguments.source in PUBLISHED:
        given = [option for option, value in VOXCELEB_TRAINER_ONLY.items() if getattr(arguments, option) != value]
        if given:
            names = ", ".join(f"--{option.replace('_', '-')}" for option in given)
            raise ValueError(f"{names}: only for voxceleb_trainer; files of {arguments.source} contain it, omit it")
        net, not_loaded = import_network(PUBLISHED[arguments.source], arguments.model, contents, arguments.file)
        normalizes = True
        assumed: list[str] = []
    else:
        net, not_loaded, assumed = _import_classic(arguments, contents)
        loss: Any = lookup(LOSSES, arguments.loss, "loss").options if arguments.loss else None
        normalizes = True if loss is None else loss.normalize_embeddings
    summary = {
        "imported_from": arguments.source,
        "file": Path(arguments.file).name,
        "licence": arguments.licence or "not given",
        "trained_on": arguments.trained_on or "not given",
    }
    write_checkpoint(arguments.out, model_file_contents(net, loss_normalizes=normalizes, training_summary=summary))
    spec, num_parameters = net.spec(), sum(one.numel() for one in net.parameters())
    lines = [
        f"{arguments.out}: {net.model_name}, {num_parameters:,} parameters, model {spec['model']['options']}, "
        f"front end {spec['front_end']}",
        *(f"not loaded: {entry}" for entry in not_loaded),
        *assumed,
        f"next: speakernet info {shlex.quote(str(arguments.out))}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _import_classic(arguments: argparse.Namespace, contents: dict[str, Any]) -> tuple[SpeakerNet, list[str], list[str]]:
    """The network of a checkpoint of voxceleb_trainer, what is not loaded, and what is assumed about it."""
    path = arguments.file
    if not voxceleb_trainer.is_ours_to_read(contents):
        raise unknown_file(contents, path)
    lookup(MODELS, arguments.model, "model")
    described = voxceleb_trainer.describe(contents)
    if described.model != arguments.model:
        raise ValueError(f"{path} is a {described.model}, --model is {arguments.model}")
    pooling, num_mels = arguments.pooling or described.pooling, arguments.num_mels or described.num_mels
    if not pooling:
        raise ValueError(f"{path} does not show its pooling; give --pooling, such as TAP or MAX")
    if not (described.is_raw or num_mels):
        raise ValueError(f"{path} does not hold its filterbank; give --num-mels (its n_mels)")
    options = {"sinc_stride": arguments.sinc_stride} if described.is_raw else {}
    front_end = {} if described.is_raw else {"num_mels": num_mels, "log_input": not arguments.no_log_input}
    dim = described.embedding_dim
    net = SpeakerNet.named(described.model, pooling, dim, options, front_end_options=front_end)
    translated = voxceleb_trainer.translate(contents, net, path)
    check_finite(translated.weights, path)
    check_fits(translated.weights, net.state_dict(), path)
    net.load_state_dict(translated.weights)
    assumed: list[str] = []
    if not described.is_raw:
        way = "without" if arguments.no_log_input else "with"
        assumed.append(f"assumed to be trained {way} log_input, which a checkpoint does not show (--no-log-input)")
    if not arguments.loss and not described.has_head:
        assumed.append("assumed to be trained with a loss on normalised embeddings (else --loss proto)")
    head = [f"{name} (weights of the loss)" for name in translated.head_weights]
    return net, [*head, *translated.not_loaded], assumed
