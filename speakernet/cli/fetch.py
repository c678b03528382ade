"""Fetch a published model and make it a model file, which stays in the cache.

    speakernet fetch wespeaker/resnet34-LM                  the path of the model file
    speakernet fetch wespeaker/resnet34-LM --out model.pt   and a copy of it, to calibrate or adapt
    speakernet fetch owner/name@revision                    a repository of the hub that `speakernet push` wrote

`speakernet models` lists the names. Its SHA-256 is checked, and no code from it is run. HF_HUB_OFFLINE, HF_TOKEN and
HF_HOME mean what they mean to huggingface_hub; SPEAKERNET_CACHE names another cache for model files.
"""

import argparse
from pathlib import Path

from speakernet.files import human_bytes, place

ERROR_STATUS = 2
ARGUMENTS = {
    "name": {"help": "a name that `speakernet models` lists, or a repository of the hub"},
    "--out": {"type": Path, "metavar": "FILE", "help": "also write the model file here"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Fetch, check, import; where it is."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.published import fetch

    path = fetch(arguments.name)
    if arguments.out is not None:
        place(path.resolve(), arguments.out)
        path = arguments.out
    return [f"{path}: {arguments.name}, {human_bytes(path.stat().st_size)}; `speakernet info {path}` shows its licence"]
