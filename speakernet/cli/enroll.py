"""Enroll a person: add recordings to a store of people, which is made if it is missing.

    speakernet enroll Ada a1.wav a2.wav a3.wav --model best.pt --store people.db

Kept are name, embedding and path of each recording, never audio. Little speech, clipping, noise, a narrow band and a
voice unlike the person's other recordings cause warnings; --strict refuses them.
"""

import argparse
import functools
import logging
import sys

from speakernet.cli import MODEL, STORE, load_verifier, store_key
from speakernet.terminal import counted

ARGUMENTS = {
    "name": {"help": "the person's name; new, or already in the store"},
    "audio": {"nargs": "+", "help": "recordings, lists and folders, which are walked"},
    **MODEL,
    **STORE,
    "--strict": {"action": "store_true", "help": "refuse what causes a warning"},
}

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> list[str]:
    """Inspect the recordings, embed them, keep the embeddings."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.people import checked_name
    from speakernet.inference.recordings import audio_inputs
    from speakernet.inference.verifier import enroll

    verifier = load_verifier(arguments)
    _, files = audio_inputs(arguments.audio, verifier.sample_rate, sys.stdin)
    checked_name(arguments.name)
    recordings = [verifier.open(file) for file in files]
    # A mistyped path makes a second store without the people of the first.
    new = "" if arguments.store.exists() else "the new store "
    made = functools.partial(verifier.people, arguments.store, store_key(arguments))
    done = enroll(verifier, made if new else made(), arguments.name, recordings, is_strict=arguments.strict)
    for warning in done.warnings:
        logger.warning("%s", warning)
    seconds = sum(one.speech_seconds for one in done.qualities)
    added = f"{counted(done.added, 'recording')} added ({seconds:.1f} s of speech), {done.total} in all"
    return [f"{done.name}: {added}, in {new}{arguments.store}"]
