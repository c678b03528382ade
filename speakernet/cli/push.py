"""Put a model file and a card about it on the Hugging Face hub, so that others can load it by name.

    speakernet push ada/voices --model best.pt --licence cc-by-4.0
    speakernet push ada/voices --model best.pt --private

The repository is made if it is missing; log in with `hf auth login`, or set HF_TOKEN. What the model file says of
itself goes into the card: `speakernet info` shows it before.
"""

import argparse

ERROR_STATUS = 2
ARGUMENTS = {
    "name": {"help": "the repository: owner/name"},
    "--model": {"required": True, "help": "a model file, such as exps/exp01/best.pt"},
    "--licence": {"default": "", "help": "of the weights, in the hub's spelling (default: the file's)"},
    "--private": {"action": "store_true", "help": "gated: people have to ask you for access; for a new repository"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Check the file, upload it with its card; where it is."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.published import push

    address = push(arguments.model, arguments.name, licence=arguments.licence, is_private=arguments.private)
    return [address, f"next: speakernet verify a.wav b.wav --model {arguments.name} --threshold 0.4"]
