"""Write a model file in another format: ONNX, an archive of torch.export, or safetensors.

The ending of --out says which. ONNX and the archive hold front end and network as one graph: waveforms (batch, samples)
at the model's rate in, two outputs (batch, dim): `embedding`, as `embed` gives it, and `direction`, that without the
model's mean embedding and of length 1, whose dot products are the scores. The file is written only if its embeddings
are those of the model.
"""

import argparse
from pathlib import Path

from speakernet.cli import MODEL_ARGUMENT

ARGUMENTS = {
    "model": MODEL_ARGUMENT,
    "--out": {"required": True, "metavar": "FILE", "help": "ends in .onnx, .pt2 or .safetensors"},
    "--speech": {
        "type": Path,
        "nargs": "+",
        "default": [],
        "metavar": "FILE",
        "help": "recordings to compare the embeddings on (default: some of --trials, else synthetic voices)",
    },
    "--for": {
        "dest": "runtime",
        "default": "",
        "metavar": "PROGRAM",
        "help": ".onnx: sherpa-onnx (a graph of features, with the metadata that it reads) or onnxruntime-web",
    },
    "--int8": {"action": "store_true", "help": ".onnx: weights and activations in eight bits"},
    "--trials": {"type": Path, "metavar": "LIST", "help": "a labelled trial list: to measure the EER of int8"},
    "--audio": {"type": Path, "metavar": "FOLDER", "help": "the folder that its paths are relative to"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Write and compare; how close it is."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.exchange import export

    return export(arguments)
