"""Write a model file in another format: ONNX, an archive of torch.export, or safetensors.

The ending of --out says which. ONNX and the archive hold front end and network as one graph: waveforms (batch, samples)
at the model's rate in, two outputs (batch, dim): `embedding`, as `embed` gives it, and `direction`, that without the
model's mean embedding and of length 1, whose dot products are the scores. The file is written only if its embeddings
are those of the model.
"""

import argparse
from pathlib import Path

from speakernet.cli import missing_extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to write where, and what to compare it on."""
    parser.add_argument("model", help="a model file, such as exps/exp01/best.pt")
    parser.add_argument("--out", required=True, metavar="FILE", help="ends in .onnx, .pt2 or .safetensors")
    parser.add_argument(
        "--speech",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="recordings to compare the embeddings on (default: some of --trials, else synthetic voices)",
    )
    parser.add_argument("--int8", action="store_true", help=".onnx: weights and activations in eight bits")
    parser.add_argument("--trials", type=Path, metavar="LIST", help="a labelled trial list: to measure the EER of int8")
    parser.add_argument("--audio", type=Path, metavar="FOLDER", help="the folder that its paths are relative to")


def run(arguments: argparse.Namespace) -> int:
    """Write, compare, print how close it is."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.exchange import export

    try:
        return export(arguments)
    except ModuleNotFoundError as error:
        raise missing_extra("exporting", "export", error) from error
