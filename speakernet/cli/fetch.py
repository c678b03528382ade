"""Fetch a published model and convert it to a model file in the cache (segmentation: as it is).

    speakernet fetch wespeaker/resnet34-LM                  prints the path of the model file
    speakernet fetch wespeaker/resnet34-LM --out model.pt   also writes a copy to change
    speakernet fetch owner/name@revision                    a hub repository made by `push`

`speakernet models` lists the names. The download's SHA-256 is checked, and none of its code is run.
HF_HUB_OFFLINE, HF_TOKEN and HF_HOME work as in huggingface_hub; SPEAKERNET_CACHE sets another cache
folder for model files.
"""

import argparse

from speakernet.cli.shared import output_path
from speakernet.files import human_bytes, place

ERROR_STATUS = 2
ARGUMENTS = {
    "name": {"help": "a name from `speakernet models`, or a hub repository"},
    "--out": {"type": output_path, "metavar": "FILE", "help": "also write the model file here"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Fetch, check and import; return the path."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.published import fetch

    path = fetch(arguments.name)
    if arguments.out is not None:
        # The cache holds links; a copy (or hard link) of the file itself outlives the cache.
        place(path.resolve(), arguments.out)
        path = arguments.out
    hint = f"`speakernet info {path}` shows its licence"
    if path.suffix == ".onnx":
        hint = "`speakernet who` uses it; `speakernet models` shows its licence"
    return [f"{path}: {arguments.name}, {human_bytes(path.stat().st_size)}; {hint}"]
