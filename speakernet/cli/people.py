"""Look after a store of people: list, remove, purge, reembed, export.

speakernet people list --store people.db
speakernet people remove Ada --store people.db       not known any more; backups keep her
speakernet people purge Ada --store people.db        nothing of her stays readable, backups included
speakernet people reembed --model new.pt --store people.db
speakernet people export --store people.db --out people.json [--name Ada]
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.cli import add_model, add_store, load_verifier, store_key

if TYPE_CHECKING:
    from speakernet.inference.people import PeopleStore

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which store."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="list | remove | purge | reembed | export")
    for name, words in PARTS.items():
        part = parts.add_parser(name, help=words, description=words)
        # Left out where it was said before the part.
        part.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name in ("remove", "purge"):
            part.add_argument("name", help="of the person")
        if name == "reembed":
            add_model(part)
            part.add_argument("--drop-missing", action="store_true", help="leave out recordings whose files are gone")
        if name == "export":
            part.add_argument("--out", type=Path, required=True, help="the file to write: .json or .npz")
            part.add_argument("--name", help="of one person; everybody where left out")
        add_store(part)


PARTS = {
    "list": "names, recordings, seconds of speech, dates",
    "remove": "forget a person",
    "purge": "forget a person so that nothing of them can be read in the store or its backups",
    "reembed": "go over to another model; the recordings are read again where they lay",
    "export": "write what is kept, embeddings included",
}


def run(arguments: argparse.Namespace) -> int:
    """Do one of these.

    Raises:
        ValueError: a store, a name or a model that cannot be used.
    """
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.people import PeopleStore

    with PeopleStore(arguments.store, fingerprint=None, embedding_dim=None, key=store_key(arguments)) as store:
        lines = ANSWERS[arguments.part](store, arguments)
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def _list(store: "PeopleStore", arguments: argparse.Namespace) -> list[str]:
    people = store.people()
    rows = [("name", "recordings", "speech", "first", "last")]
    rows += [(one.name, str(one.recordings), f"{one.speech_seconds:.1f} s", one.created, one.changed) for one in people]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    facts = store.facts
    sealed = ", encrypted" if facts["is_encrypted"] else ""
    model = f"model {facts['model']} (fingerprint {facts['fingerprint'][:12]}, {facts['embedding_dim']} numbers)"
    return [*lines, f"{len(people)} people, {model}{sealed}"]


def _remove(store: "PeopleStore", arguments: argparse.Namespace) -> list[str]:
    count = store.remove(arguments.name)
    return [f"{arguments.name} removed ({count} recordings); backups may hold them: `speakernet people purge`"]


def _purge(store: "PeopleStore", arguments: argparse.Namespace) -> list[str]:
    return [f"{arguments.name} purged from {', '.join(map(str, store.purge(arguments.name)))}"]


def _reembed(store: "PeopleStore", arguments: argparse.Namespace) -> list[str]:
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
    return [f"{store.path}: {len(store)} people are of {verifier.name} now; a backup lies beside it"]


def _export(store: "PeopleStore", arguments: argparse.Namespace) -> list[str]:
    return [f"{arguments.out}: {store.export(arguments.out, arguments.name)} recordings, embeddings readable"]


ANSWERS = {"list": _list, "remove": _remove, "purge": _purge, "reembed": _reembed, "export": _export}
