"""What the commands that use a model have in common: its options, its answers before its logs, keys of stores."""

import argparse
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.inference.keys import STORE_KEY_VARIABLE, read_secret

if TYPE_CHECKING:
    from speakernet.inference.verifier import SpeakerVerifier


def add_model(parser: argparse.ArgumentParser) -> None:
    """`--model` and `--device`."""
    parser.add_argument("--model", required=True, help="a model file, such as exps/exp01/best.pt, or an imported one")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto (the default) takes a GPU if any")


def add_store(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    """`--store` and `--key-file`."""
    parser.add_argument("--store", type=Path, required=is_needed, help="the file of people, such as people.db")
    parser.add_argument(
        "--key-file",
        type=Path,
        help=f"file with the key that encrypts its embeddings (default: the variable {STORE_KEY_VARIABLE}, if set)",
    )


def add_decision(parser: argparse.ArgumentParser, rate_help: str) -> None:
    """`--far` and `--threshold`."""
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument("--far", type=float, metavar="RATE", help=rate_help)
    decision.add_argument(
        "--threshold",
        type=_threshold,
        metavar="SCORE",
        help="decide at this score, or at a named one of the model file (eer, far_1%%); default: 0.4",
    )


def load_verifier(arguments: argparse.Namespace, local_rank: int | None = None) -> "SpeakerVerifier":
    """The model that `--model` names; of several processes on a machine each takes the GPU of its own number.

    Raises:
        ValueError: not a model file, or a device that is not here.
    """
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.verifier import load

    return load(arguments.model, arguments.device, local_rank)


def store_key(arguments: argparse.Namespace) -> bytes | None:
    """The key of `--key-file`, else of the environment; None for none."""
    return read_secret(arguments.key_file, STORE_KEY_VARIABLE)


@contextlib.contextmanager
def answer_first(*, is_verbose: bool) -> Iterator[None]:
    """Inside the block nothing is logged unless asked for, so that the answer is the first line that anybody sees."""
    before = logging.root.manager.disable
    if not is_verbose:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _threshold(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
