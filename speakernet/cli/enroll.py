"""Add recordings of somebody to a store of people, which is made where it is missing.

    speakernet enroll Ada a1.wav a2.wav a3.wav --model best.pt --store people.db

Kept are name, embedding and place of each recording, never audio. Too little speech, clipping, noise, a narrow band and
a voice that is not like the person's other recordings are warned about; --strict refuses them.
"""

import argparse
import logging
import sys

from speakernet.cli import add_model, add_store, load_verifier, store_key

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Who, which recordings, which store."""
    parser.add_argument("name", help="of the person, who is new or was there before")
    parser.add_argument("audio", nargs="+", help="recordings; folders are walked")
    add_model(parser)
    add_store(parser)
    parser.add_argument("--strict", action="store_true", help="refuse what is otherwise warned about")


def run(arguments: argparse.Namespace) -> int:
    """Look at the recordings, embed them, keep the embeddings.

    Raises:
        ValueError: audio, a model, a name or a store that cannot be used.
    """
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.enrolment import enroll
    from speakernet.inference.recordings import audio_inputs

    verifier = load_verifier(arguments)
    files = list(audio_inputs(arguments.audio, verifier.sample_rate, sys.stdin).names)
    # Before a store is made of it.
    recordings = [verifier.open(file) for file in files]
    # A slip of the pen makes a second store, in which nobody of the first is known.
    new = "" if arguments.store.exists() else "the new store "
    with verifier.people(arguments.store, store_key(arguments)) as store:
        done = enroll(verifier, store, arguments.name, recordings, is_strict=arguments.strict)
    for warning in done.warnings:
        logger.warning("%s", warning)
    seconds = sum(one.speech_seconds for one in done.qualities)
    several = "recording" if done.added == 1 else "recordings"
    sys.stdout.write(
        f"{done.name}: {done.added} {several} added ({seconds:.1f} s of speech), {done.total} in all, "
        f"in {new}{arguments.store}\n"
    )
    return 0
