"""Manage a store of people: list, remove, reembed, export.

speakernet people list --store people.db           names, recordings, seconds of speech, dates
speakernet people remove Ada --store people.db     also erases copies in backups
speakernet people reembed --model new.pt --store people.db
                                                   reads recordings again from their paths
speakernet people export --store people.db --out people.json [--name Ada]
                                                   includes embeddings
"""

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from speakernet.cli.shared import (
    MODEL,
    MODEL_ARGUMENT,
    STORE,
    load_verifier,
    output_path,
    store_key,
)
from speakernet.terminal import counted, text_table

if TYPE_CHECKING:
    from speakernet.inference.people import PeopleStore

ARGUMENTS = {
    "action": {
        "choices": ("list", "remove", "purge", "reembed", "export"),
        "help": "what to do; purge is an earlier name of remove",
    },
    "name": {"nargs": "?", "help": "the person to remove"},
    **STORE,
    **MODEL,
    "--model": {**MODEL_ARGUMENT, "help": "reembed: the model file to change to"},
    "--drop-missing": {
        "action": "store_true",
        "help": "reembed: leave out recordings whose files are gone",
    },
    "--out": {"type": output_path, "help": "export: output file, .json"},
    "--name": {"dest": "person", "help": "export: name of one person (default: everybody)"},
}

NEEDS = {
    "remove": ("name", "the person's name"),
    "purge": ("name", "the person's name"),
    "reembed": ("model", "the new model with --model"),
    "export": ("out", "the output file with --out"),
}
"""Action -> the argument it needs, and how to give it."""

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Perform the action; the exit status is 1 if recordings were left out."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.people import PeopleStore
    from speakernet.inference.store_file import backups_of

    action = arguments.action
    name = arguments.name
    problems = []
    # argparse cannot require an argument for one action only.
    if action in NEEDS and not getattr(arguments, NEEDS[action][0]):
        raise ValueError(f"to {action}, give {NEEDS[action][1]}")
    with PeopleStore(arguments.store, key=store_key(arguments)) as store:
        if action == "list":
            text = _list_names(store)
        elif action in ("remove", "purge"):
            # Backups too, as on the served page: whoever removes a voice does not expect copies.
            text = f"{name} was removed from {', '.join(map(str, store.purge(name)))}"
        elif action == "export":
            count = counted(store.export(arguments.out, arguments.person), "recording")
            text = f"{arguments.out}: {count}, with unencrypted embeddings"
        else:
            verifier = load_verifier(arguments)
            problems = store.reembed(
                # A recording enrolled from an array has no file; its name makes the error say why.
                lambda recording: verifier.embed(
                    recording.source or "no file (enrolled from memory)", speech=True
                ),
                verifier.store_model,
                drops_missing=arguments.drop_missing,
            )
            # The old embeddings cannot be recovered from the new ones, so a store that was embedded
            # again with the wrong model needs this backup.
            backup = max(backups_of(store.path), key=lambda path: path.stat().st_mtime)
            text = (
                f"{store.path} now has embeddings of {counted(len(store), 'person')} from "
                f"{verifier.name}; the old store is kept as {backup}"
            )
    for problem in problems:
        logger.warning("left out: %s", problem)
    sys.stdout.write(f"{text}\n")
    return int(bool(problems))


def _list_names(store: "PeopleStore") -> str:
    people = store.people()
    facts = store.facts
    rows = [("name", "recordings", "speech", "first", "last")]
    for person in people:
        seconds = f"{person.speech_seconds:.1f} s"
        rows.append((person.name, str(person.recordings), seconds, person.created, person.changed))
    encrypted = ", encrypted" if facts["is_encrypted"] else ""
    model = (
        f"model {facts['model']} (fingerprint {facts['fingerprint'][:12]}, "
        f"{facts['embedding_dim']}-dimensional)"
    )
    return "\n".join([*text_table(rows), f"{counted(len(people), 'person')}, {model}{encrypted}"])
