"""Enrol one or more people: add recordings to a store of people, which is created if it does not
exist.

    speakernet enroll Ada a1.wav a2.wav a3.wav --model best.pt --store people.db
    speakernet enroll --folder my_voices --model best.pt --store people.db   a subfolder per person

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

from speakernet.cli.shared import CHANNEL, MODEL, STORE, load_verifier, store_key, warn_of_model
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


# One person and a folder of people take the same path: a folder gives more pairs of a name and its
# inputs.
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
    # Late: --help and a mistyped option need no torch.
    from speakernet.data.audio import AudioError

    people = [(arguments.name, arguments.audio)]
    if folder:
        people = _subfolders(folder)
    # Late, as above.
    from speakernet.inference.people import checked_name
    from speakernet.inference.recordings import audio_inputs
    from speakernet.inference.verifier import enroll

    # All names are checked before anybody is enrolled.
    people = [(checked_name(name), recordings) for name, recordings in people]
    verifier = load_verifier(arguments)
    warn_of_model(verifier)
    # The word "new" reveals a mistyped path, which creates a second store.
    new = "" if store.exists() else "the new store "
    num_left_out = 0
    open_store = functools.cache(functools.partial(verifier.people, store, store_key(arguments)))
    for name, inputs in people:
        try:
            files = audio_inputs(inputs, verifier.sample_rate, sys.stdin)[1]
            recordings = [verifier.open(file, channel=arguments.channel) for file in files]
            # A store that does not exist is created once there is somebody to add.
            opened = open_store() if store.exists() else open_store
            enrolled = enroll(verifier, opened, name, recordings, is_strict=arguments.strict)
        except AudioError as error:
            if not folder:
                raise
            logger.warning("%s is left out: %s", name, error)
            num_left_out += 1
            continue
        # A poor recording is better than none, so warnings only stop an enrolment with --strict.
        for warning in enrolled.warnings:
            logger.warning("%s", warning)
        added = f"{counted(enrolled.added, 'recording')} added"
        if enrolled.added:
            seconds = sum(quality.speech_seconds for quality in enrolled.qualities)
            added += f" ({seconds:.1f} s of speech)"
        sys.stdout.write(f"{enrolled.name}: {added}, {enrolled.total} in all, in {new}{store}\n")
    if folder:
        enrolled_people = counted(len(people) - num_left_out, "person")
        sys.stdout.write(f"{enrolled_people} of {len(people)} enrolled in {store}\n")
    # A status rather than an error, because the others are enrolled.
    return int(num_left_out > 0)


def _subfolders(folder: Path) -> list[tuple[str, list[str]]]:
    """Each person's name and the folder with their recordings."""
    # Late: --help and a mistyped option need not read audio.
    from speakernet.data.folders import is_hidden

    people = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not is_hidden(path.name):
            people.append((path.name, [str(path)]))
    if not people:
        raise ValueError(
            f"{folder} has no subfolders; expected one per person, containing recordings"
        )
    return people
