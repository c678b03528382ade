"""Pack a corpus in parts, each by another machine, and join them by naming them in one description: nothing is copied.

Each part is a packed corpus below the corpus's folder, written, killed and gone on with like any other. Whoever
finishes the last of them joins all; so does `--merge`, for parts that were brought together by hand. Joining writes one
file, the same whoever does it, so it may be done twice or at the same moment.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import speakernet
from speakernet.data.packed.corpus import (
    DESCRIPTION,
    FORMAT_NAME,
    PARTS_VERSION,
    PLAN_OF_PARTS,
    PackedError,
    is_packed,
    read_description,
)
from speakernet.data.packed.writer import PackInput, PackSummary, already_there, digest_of, pack
from speakernet.files import atomic_write, open_text, reading
from speakernet.options import SAMPLE_RATE
from speakernet.parts import WorkPart, list_parts, missing_parts, parts_in, share

logger = logging.getLogger(__name__)

ORIGIN = "part_of"
"""In the description of a part: the digest of the whole's names, rate and number of parts."""


class PartInput(PackInput):
    """A part's share of the utterances of another input."""

    def __init__(self, whole: PackInput, part: WorkPart) -> None:
        """Take the share.

        Raises:
            PackedError: there are fewer utterances than parts.
        """
        rows = share(range(len(whole.names)), part.number, part.count)
        if not rows:
            raise PackedError(
                f"--part {part}: {whole.description} has {len(whole.names)} utterances, too few for {part.count} "
                "parts; take fewer"
            )
        super().__init__(whole.names.take(np.asarray(rows)), f"part {part} of {whole.description}")
        self._whole, self._first = whole, rows.start

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """See `PackInput.items`."""
        for row, content in self._whole.items([row + self._first for row in rows]):
            yield row - self._first, content

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """See `PackInput.decode`."""
        return self._whole.decode(row + self._first, content, sample_rate)


def pack_part(
    source: PackInput,
    corpus: str | Path,
    part: WorkPart,
    *,
    sample_rate: int = SAMPLE_RATE,
    num_threads: int = 2,
    skip_bad: bool = False,
    show_progress: bool = False,
) -> tuple[PackSummary, list[WorkPart]]:
    """Write (or finish) one part, and join all of them where it was the last.

    Args:
        source: names and decoded audio of the whole; its order decides what each part gets.
        corpus: the folder of all parts.
        part: which one.
        sample_rate: see `pack`.
        num_threads: see `pack`.
        skip_bad: see `pack`; each part may say it or not.
        show_progress: see `pack`.

    Returns:
        What the part holds, and the parts that are still missing.

    Raises:
        AudioError: see `pack`.
        PackedError: likewise; or the other parts are of other names, another rate or another number of parts.
    """
    corpus = Path(corpus)
    if (corpus / DESCRIPTION).exists():
        return already_there(source, corpus, sample_rate), []
    if corpus.exists() and not is_packed(corpus) and any(corpus.iterdir()):
        raise PackedError(f"{corpus}: exists and is not a packed corpus; give a name that is not taken")
    own = PartInput(source, part)
    origin = _agree_on_plan(source, corpus, part, sample_rate)
    summary = pack(
        own,
        corpus / part.name,
        sample_rate=sample_rate,
        num_threads=num_threads,
        skip_bad=skip_bad,
        show_progress=show_progress,
        facts={ORIGIN: origin},
    )
    missing = missing_parts(list(parts_in(corpus)), corpus)
    if not missing:
        join_parts(corpus)
    return summary, missing


def join_parts(corpus: str | Path) -> PackSummary:
    """Let the parts below a folder be one corpus.

    Raises:
        PackedError: some are missing (they are named), damaged, or not parts of the same whole.
    """
    corpus = Path(corpus)
    found = parts_in(corpus)
    if not found:
        raise PackedError(f"{corpus}: holds no parts to join; make them with speakernet pack … --part 1/N")
    if missing := missing_parts(list(found), corpus):
        raise PackedError(f"{corpus}: the parts {list_parts(missing)} are missing; run speakernet pack with them first")
    parts = {part: {**read_description(path), **_told_by(path)} for part, path in found.items()}
    first = next(iter(found))
    if strange := [part for part, one in parts.items() if one["origin"] != parts[first]["origin"]]:
        raise PackedError(
            f"{corpus}: the parts {list_parts(strange)} are of another list, source, rate or number of parts than "
            f"{first}; pack them again with the command of the others"
        )
    counted = ("num_utterances", "num_samples", "num_skipped")
    totals = {name: sum(one[name] for one in parts.values()) for name in counted}
    named = [{"name": part.name, "index_sha256": one["index_sha256"]} for part, one in parts.items()]
    description = {
        "format": FORMAT_NAME,
        "version": PARTS_VERSION,
        "sample_rate": parts[first]["sample_rate"],
        **totals,
        # Of the digests in their order: by it two copies are known for the same.
        "index_sha256": hashlib.sha256("".join(one["index_sha256"] for one in named).encode()).hexdigest(),
        "parts": named,
        "written_by": f"speakernet {speakernet.__version__}",
    }
    with atomic_write(corpus / DESCRIPTION) as file:
        json.dump(description, file, indent=1)
    logger.info("%s: %d parts are one corpus", corpus, len(found))
    return PackSummary(totals["num_utterances"], totals["num_samples"], 0, totals["num_skipped"])


def _agree_on_plan(source: PackInput, corpus: Path, part: WorkPart, sample_rate: int) -> str:
    """The digest of what these are parts of, which the first part writes down for the others.

    Raises:
        PackedError: the others are parts of something else.
    """
    plan = {"names_sha256": digest_of(source.names), "sample_rate": sample_rate, "parts": part.count}
    path = corpus / PLAN_OF_PARTS
    if not path.exists():
        with atomic_write(path) as file:
            json.dump(plan, file)
    # Read in any case: two that began at the same moment have both written theirs.
    with reading(path, f"the plan of a corpus in parts; remove {corpus} and pack it again", PackedError):
        with open_text(path) as file:
            begun = json.load(file)
        differing = [name for name in plan if begun[name] != plan[name]]
    words = {
        "names_sha256": "other utterances (another list or source, or files that came or went)",
        "sample_rate": f"{begun['sample_rate']} Hz, not {sample_rate}",
        "parts": f"{begun['parts']} parts, not {part.count}",
    }
    if differing:
        raise PackedError(
            f"{corpus}: was begun with {', '.join(words[name] for name in differing)}; give every part the same list, "
            "source and options, or remove it to begin anew"
        )
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _told_by(path: Path) -> dict[str, Any]:
    """The rest of a part's description."""
    with reading(path / DESCRIPTION, "the description of a part", PackedError), open_text(path / DESCRIPTION) as file:
        description = json.load(file)
        return {"origin": str(description.get(ORIGIN, "")), "num_skipped": int(description["num_skipped"])}
