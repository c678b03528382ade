"""Upload a model file and a model card to the Hugging Face hub, so that others can load it by name.

    speakernet push ada/voices --model best.pt --licence cc-by-4.0
    speakernet push ada/voices --model best.pt --private

The repository is created if it does not exist. Log in first with `hf auth login`, or set HF_TOKEN.
The card is written from facts in the model file, which `speakernet info` shows.
"""

import argparse

ERROR_STATUS = 2
ARGUMENTS = {
    "name": {"help": "the repository: owner/name"},
    "--model": {"required": True, "help": "a model file, such as exps/exp01/best.pt"},
    "--licence": {
        "default": "",
        "help": "licence of the weights, in the hub's spelling (default: as in the file)",
    },
    "--private": {
        "action": "store_true",
        "help": "make a new repository private, readable only by its owner",
    },
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Check the file and upload it with its card; return the address."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.models.published import push

    # The next command to try, with a threshold that also works for a file without calibration.
    return [
        push(
            arguments.model, arguments.name, licence=arguments.licence, is_private=arguments.private
        ),
        f"next: speakernet verify a.wav b.wav --model {arguments.name} --threshold 0.4",
    ]
