"""Make a speakernet model file of another toolkit's checkpoint.

What the checkpoint shows (embedding size, mel bands, pooling) is taken from it; what it cannot show has an option:
whether mel energies went through the logarithm, the sinc stride of RawNet3, the pooling of a VGGVox without attention,
and the loss where its weights do not tell.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.losses.options import LOSSES
from speakernet.models.options import MODELS
from speakernet.registry import lookup

if TYPE_CHECKING:
    from speakernet.models.importers import Description
    from speakernet.models.speaker_net import SpeakerNet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """File in, file out, and what the checkpoint cannot say of itself."""
    parser.add_argument("file", help="the checkpoint")
    parser.add_argument("--from", dest="source", default="voxceleb_trainer", help="its toolkit (default: %(default)s)")
    parser.add_argument(
        "--model", required=True, help="its architecture, such as ResNetSE34L; checked against the file"
    )
    parser.add_argument("--out", required=True, help="the model file to write")
    parser.add_argument(
        "--no-log-input",
        "--no_log_input",
        action="store_true",
        help="it was trained on mel energies without logarithm (no log_input in its configuration)",
    )
    parser.add_argument(
        "--pooling", "--encoder_type", default="", help="its encoder_type, where its weights do not tell"
    )
    parser.add_argument(
        "--num-mels", "--n_mels", type=int, default=0, help="its n_mels, where its filterbank was not saved"
    )
    parser.add_argument("--sinc-stride", "--sinc_stride", type=int, default=10, help="RawNet3: its sinc_stride")
    parser.add_argument(
        "--loss", "--trainfunc", default="", help="its trainfunc; proto is scored without normalisation"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, recognise, translate, check, write.

    Raises:
        ValueError: another architecture, an option that is needed and missing, a damaged or unsafe file.
    """
    lookup(MODELS, arguments.model, "model")
    # Late: --help and a mistyped name need no torch.
    from speakernet.models.importers import FORMATS
    from speakernet.models.model_file import (
        check_finite,
        check_fits,
        model_file_contents,
        read_checkpoint,
    )

    importer = lookup(FORMATS, arguments.source, "toolkit")
    contents = read_checkpoint(arguments.file)
    if not importer.is_ours_to_read(contents):
        raise ValueError(f"{arguments.file} is no checkpoint of {arguments.source} that this speakernet knows")
    described = importer.describe(contents)
    if described.model != arguments.model:
        raise ValueError(f"{arguments.file} is a {described.model}, --model says {arguments.model}")
    net = _network(arguments, described)
    translated = importer.translate(contents, net, arguments.file)
    check_finite(translated.weights, arguments.file)
    check_fits(translated.weights, net.state_dict(), arguments.file)
    net.load_state_dict(translated.weights)
    normalizes = lookup(LOSSES, arguments.loss, "loss").options.normalize_embeddings if arguments.loss else True  # type: ignore[attr-defined]
    summary = {"imported_from": arguments.source, "file": Path(arguments.file).name}
    write_checkpoint(arguments.out, model_file_contents(net, loss_normalizes=normalizes, training_summary=summary))
    not_loaded = [*(f"{name} (weights of the loss)" for name in translated.head_weights), *translated.not_loaded]
    sys.stdout.write("\n".join(_report(arguments, net, described, not_loaded)) + "\n")
    return 0


def _network(arguments: argparse.Namespace, described: "Description") -> "SpeakerNet":
    # Late: as above.
    from speakernet.models.speaker_net import SpeakerNet

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


def _report(
    arguments: argparse.Namespace, net: "SpeakerNet", described: "Description", not_loaded: list[str]
) -> list[str]:
    spec = net.spec()
    lines = [
        f"{arguments.out}: {net.model_name}, {sum(one.numel() for one in net.parameters()):,} parameters, "
        f"model {spec['model']['options']}, front end {spec['front_end']}",
        *(f"not loaded: {entry}" for entry in not_loaded),
    ]
    if not described.is_raw:
        way = "without" if arguments.no_log_input else "with"
        lines.append(f"taken to be trained {way} log_input, which a checkpoint does not show (--no-log-input)")
    if not arguments.loss and not described.has_head:
        lines.append("taken to be trained with a loss on normalised embeddings (else --loss proto)")
    lines.append(f"next: speakernet info {arguments.out}")
    return lines
