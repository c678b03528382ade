"""Enrol one or more people: add recordings to a store of people, which is created if it does not
exist.

    speakernet enroll Ada a1.wav a2.wav a3.wav --model best.pt --store people.db
    speakernet enroll --folder my_voices --model best.pt --store people.db      one subfolder per
    person

The store keeps the name, and the embedding and path of each recording, never audio. Too little
speech, clipping, noise, a narrow band or a voice unlike the person's other recordings causes a
warning, or with --strict an error. With --folder, people whose recordings are refused are left out,
the others are enrolled, and the exit status is 1; running the same command again adds only what is
missing.
"""

import argparse
import functools
import logging
import os
import sys
from pathlib import Path

from speakernet.cli import CHANNEL, MODEL, STORE, load_verifier, store_key, warn_of_model
from speakernet.terminal import counted

ARGUMENTS = {
    "name": {"nargs": "?", "help": "the person's name, new or already in the store"},
    "audio": {"nargs": "*", "help": "recordings, lists, and folders to search recursively"},
    "--folder": {
        "type": Path,
        "help": "a folder with one subfolder per person, instead of a name and recordings",
    },
    **MODEL,
    **STORE,
    **CHANNEL,
    "--strict": {"action": "store_true", "help": "refuse recordings that cause a warning"},
}

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Check the recordings, embed them and store the embeddings; the exit status is 1 if people
    were left out.
    """
    folder = arguments.folder
    store = arguments.store
    if bool(folder) == bool(arguments.audio) or (folder and arguments.name):
        raise ValueError(
            "give a person's name and recordings, or --folder with one subfolder per person"
        )
    # Path.is_file would raise for a name that is too long for a file.
    if arguments.name and os.path.isfile(arguments.name):  # noqa: PTH113
        raise ValueError(f"{arguments.name} is a file; the first argument is the person's name")
    people = _people_of(folder) if folder else [(arguments.name, arguments.audio)]
    # Late: --help and a mistyped option need no torch.
    from speakernet.data.audio import AudioError
    from speakernet.inference.people import checked_name
    from speakernet.inference.recordings import audio_inputs
    from speakernet.inference.verifier import enroll

    verifier = load_verifier(arguments)
    warn_of_model(verifier)
    # The word "new" reveals a mistyped path, which creates a second store.
    new = "" if store.exists() else "the new store "
    left_out = 0
    opened = functools.cache(functools.partial(verifier.people, store, store_key(arguments)))
    # All names are checked before anybody is enrolled.
    for name, given in [(checked_name(name), given) for name, given in people]:
        try:
            files = audio_inputs(given, verifier.sample_rate, sys.stdin)[1]
            recordings = [verifier.open(file, channel=arguments.channel) for file in files]
            done = enroll(
                verifier,
                opened() if store.exists() else opened,
                name,
                recordings,
                is_strict=arguments.strict,
            )
        except AudioError as error:
            if not folder:
                raise
            logger.warning("%s is left out: %s", name, error)
            left_out += 1
            continue
        for warning in done.warnings:
            logger.warning("%s", warning)
        seconds = sum(one.speech_seconds for one in done.qualities)
        speech = f" ({seconds:.1f} s of speech)" if done.added else ""
        added = f"{counted(done.added, 'recording')} added{speech}, {done.total} in all"
        sys.stdout.write(f"{done.name}: {added}, in {new}{store}\n")
    if folder:
        sys.stdout.write(
            f"{counted(len(people) - left_out, 'person')} of {len(people)} enrolled in {store}\n"
        )
    return int(left_out > 0)


def _people_of(folder: Path) -> list[tuple[str, list[str]]]:
    """Name and recordings of each person with a subfolder."""
    # Late, as in `run`.
    from speakernet.data.folders import is_hidden

    paths = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    people = [(path.name, [str(path)]) for path in paths if not is_hidden(path.name)]
    if not people:
        raise ValueError(
            f"{folder} has no subfolders; expected one per person, containing recordings"
        )
    return people
