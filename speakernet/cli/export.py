"""Export a model file to ONNX, a torch.export archive, or safetensors.

The suffix of --out selects the format. ONNX and the archive hold front end and network as one
graph, with waveforms (batch, samples) at the model's rate as input and two outputs (batch, dim):
`embedding`, as from `embed`, and `direction`, the embedding minus the model's mean, scaled to
length 1, whose dot products are the scores. The file is written only if it reproduces the model's
embeddings.
"""

import argparse
from pathlib import Path

from speakernet.cli.shared import MODEL_ARGUMENT, output_path

ARGUMENTS = {
    "model": MODEL_ARGUMENT,
    "--out": {
        "type": output_path,
        "required": True,
        "metavar": "FILE",
        "help": "output file, ending in .onnx, .pt2 or .safetensors",
    },
    "--speech": {
        "type": Path,
        "nargs": "+",
        "default": [],
        "metavar": "FILE",
        "help": "recordings to compare embeddings on (default: some of --trials, otherwise "
        "synthetic voices)",
    },
    "--for": {
        "dest": "runtime",
        "default": "",
        "metavar": "PROGRAM",
        "help": "for .onnx: sherpa-onnx (a graph from features, with its metadata) or "
        "onnxruntime-web",
    },
    "--seconds": {
        "type": float,
        "metavar": "S",
        "help": "for .onnx and .pt2: accept exactly one recording of this length, for accelerators "
        "that need static shapes (default: any number of any length)",
    },
    "--int8": {"action": "store_true", "help": "for .onnx: 8-bit weights and activations"},
    "--trials": {
        "type": Path,
        "metavar": "LIST",
        "help": "labelled trial list to measure the EER of int8 on",
    },
    "--audio": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "the folder that the paths of --trials are relative to",
    },
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Export and compare; return how close the embeddings are."""
    # `assembly` does the work: an export needs the model, the front end and trials, which no other
    # package may import together.
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.exchange import export

    return export(arguments)
