"""The table of public corpora (catalogue.yaml): which files, from where, with which MD5 sums; facts, no network."""

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from speakernet.files import MOST_YAML, open_text, read_yaml, reading
from speakernet.options import lookup

BYTES_PER_GIGABYTE = 1_000_000_000
EXPECTED = "a table of corpora, each with 'files' (see catalogue.yaml)"


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch. `urls` are tried in order; they may hold an access key, so they are never logged whole."""

    name: str
    urls: tuple[str, ...]
    md5: str | None
    num_bytes: int | None
    access: str
    needs_key: bool = False


@dataclass(frozen=True)
class JoinedFile:
    """A whole archive that is published in parts, in order."""

    name: str
    parts: tuple[str, ...]
    md5: str | None


@dataclass(frozen=True)
class Corpus:
    """All files of one corpus, by name."""

    files: Mapping[str, RemoteFile]
    joined: Mapping[str, JoinedFile]


def load_catalogue(path: str | Path | None = None) -> dict[str, Any]:
    """The whole table: the shipped one, or a file of the same form.

    Raises:
        ValueError: the file is not a table of corpora.
    """
    if path is None:
        return dict(read_yaml(resources.files(__package__).joinpath("catalogue.yaml").read_text("utf-8"), "catalogue"))
    with reading(path, EXPECTED), open_text(path) as file:
        table = read_yaml(file.read(MOST_YAML + 1), str(path))
    if not isinstance(table, dict) or not all(isinstance(entry, dict) and "files" in entry for entry in table.values()):
        raise ValueError(f"{path}: expected {EXPECTED}")
    return table


def load_corpus(
    name: str, *, key: str = "", base_url: str | None = None, catalogue_path: str | Path | None = None
) -> Corpus:
    """The files of one corpus with their addresses filled in.

    Args:
        name: the corpus in the table.
        key: access key for addresses that have `{key}`.
        base_url: a mirror in place of the table's addresses; `{name}` is filled in, or appended where absent.
        catalogue_path: another table than the shipped one.

    Raises:
        ValueError: the table has no such corpus, or is of another form.
    """
    entry = lookup(load_catalogue(catalogue_path), name, "corpus")
    with reading(catalogue_path or "catalogue.yaml", EXPECTED):
        return _corpus(entry, key, base_url)


def _corpus(entry: Mapping[str, Any], key: str, base_url: str | None) -> Corpus:
    templates = [base_url] if base_url else entry.get("base_urls", [])
    templates = [one if "{name}" in one else one.rstrip("/") + "/{name}" for one in templates]
    files = {}
    for file_name, facts in entry["files"].items():
        # Names and keys become part of an address: a `&` or `#` in one would change what is asked for.
        quoted = urllib.parse.quote(file_name, safe="")
        urls = tuple(
            one.replace("{name}", quoted).replace("{key}", urllib.parse.quote(key, safe="")) for one in templates
        )
        size = facts.get("gigabytes")
        files[file_name] = RemoteFile(
            name=file_name,
            urls=urls,
            md5=facts.get("md5"),
            num_bytes=None if size is None else int(size * BYTES_PER_GIGABYTE),
            access=entry.get("access", ""),
            # A mirror has rules of its own: whether it wants a key is not for this table to say.
            needs_key=bool(entry.get("needs_key")) and base_url is None,
        )
    joined = {
        whole: JoinedFile(name=whole, parts=tuple(facts["parts"]), md5=facts.get("md5"))
        for whole, facts in entry.get("joined", {}).items()
    }
    return Corpus(files=files, joined=joined)
