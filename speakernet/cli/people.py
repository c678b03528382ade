"""Manage a store of people: list, remove, purge, reembed, export.

speakernet people list --store people.db
speakernet people remove Ada --store people.db       backups keep her
speakernet people purge Ada --store people.db        nothing of her stays readable, backups included
speakernet people reembed --model new.pt --store people.db
speakernet people export --store people.db --out people.json [--name Ada]
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakernet.cli import add_model, add_store, load_verifier, store_key
from speakernet.terminal import counted

if TYPE_CHECKING:
    from speakernet.inference.people import PeopleStore

ACTIONS = {
    "list": "names, recordings, seconds of speech, dates",
    "remove": "remove a person; backups keep them",
    "purge": "remove a person so that nothing of them can be read in the store or its backups",
    "reembed": "change to another model; the recordings are read again from their paths",
    "export": "write what is kept, embeddings included",
}

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which store."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | remove | purge | reembed | export")
    for name, description in ACTIONS.items():
        action = actions.add_parser(name, help=description, description=description)
        # Left out of the result if it was given before the action.
        action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name in ("remove", "purge"):
            action.add_argument("name", help="the person's name")
        if name == "reembed":
            add_model(action)
            action.add_argument("--drop-missing", action="store_true", help="leave out recordings whose files are gone")
        if name == "export":
            action.add_argument("--out", type=Path, required=True, help="the file to write: .json or .npz")
            action.add_argument("--name", help="name of one person (default: everybody)")
        add_store(action)


def run(arguments: argparse.Namespace) -> int:
    """Do one of these; status 1 if recordings were left out."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.people import PeopleStore

    name: Any = getattr(arguments, "name", None)
    action, status = arguments.action, 0
    with PeopleStore(arguments.store, fingerprint=None, embedding_dim=None, key=store_key(arguments)) as store:
        if action == "list":
            text = _listed(store)
        elif action == "remove":
            count = counted(store.remove(name), "recording")
            text = f"{name} removed ({count}); backups may keep them: `speakernet people purge`"
        elif action == "purge":
            text = f"{name} purged from {', '.join(map(str, store.purge(name)))}"
        elif action == "export":
            text = f"{arguments.out}: {counted(store.export(arguments.out, name), 'recording')}, embeddings readable"
        else:
            verifier = load_verifier(arguments)
            problems = store.reembed(
                lambda one: verifier.embed(one.source or "no file (enrolled from memory)"),
                fingerprint=verifier.fingerprint,
                embedding_dim=verifier.embedding_dim,
                mean=verifier.mean,
                model=verifier.name,
                drops_missing=arguments.drop_missing,
            )
            for problem in problems:
                logger.warning("left out: %s", problem)
            people = counted(len(store), "person")
            text = f"{store.path}: {people} embedded again with {verifier.name}; a backup is beside it"
            status = 1 if problems else 0
    sys.stdout.write(f"{text}\n")
    return status


def _listed(store: "PeopleStore") -> str:
    people, facts = store.people(), store.facts
    rows = [("name", "recordings", "speech", "first", "last")]
    rows += [(one.name, str(one.recordings), f"{one.speech_seconds:.1f} s", one.created, one.changed) for one in people]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    encrypted = ", encrypted" if facts["is_encrypted"] else ""
    model = f"model {facts['model']} (fingerprint {facts['fingerprint'][:12]}, {facts['embedding_dim']} numbers)"
    return "\n".join([*lines, f"{counted(len(people), 'person')}, {model}{encrypted}"])
