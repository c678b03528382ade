"""What is gathered of a list's files: whether they are there, headers, samples; by one machine or by several.

Of several each looks at its share of every list and leaves what it found in a folder that all of them see. Whichever
comes last joins what all have found, which is what one machine would have found.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.arrays import read_arrays
from speakernet.checks.samples import SampleFacts, read_facts
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable, pack_texts, unpack_texts
from speakernet.data.sources import AudioSource
from speakernet.files import atomic_write, reading
from speakernet.parts import PartError, WorkPart, list_parts, missing_parts, parts_in, share

SUFFIX = ".npz"
WHAT = "what a part of `speakernet doctor` leaves"
SAMPLE_COLUMNS: dict[str, type[np.generic]] = {
    "rms": np.float32,
    "clipped": np.float32,
    "hashes": np.uint64,
    "cut_off": np.bool_,
}


@dataclass(frozen=True)
class ListedAudio:
    """The files of one list, and where they lie."""

    names: StringTable
    source: AudioSource
    check: str
    """What the list is, as "training audio"."""


@dataclass(frozen=True)
class AudioFacts:
    """What is known of them.

    Attributes:
        absent: rows that are not there, int64, ascending.
        lookup: what the headers say, row for row.
        samples: what was read of the rows whose headers are good, in their order; None where none were to be read.
    """

    absent: np.ndarray
    lookup: LookupTable
    samples: SampleFacts | None

    @property
    def good(self) -> np.ndarray:
        """Rows whose headers are good, int64, ascending."""
        is_good = np.ones(len(self.lookup), dtype=bool)
        is_good[list(self.lookup.problems)] = False
        return np.flatnonzero(is_good)

    def missing(self, _names: StringTable) -> np.ndarray:
        """As a source says it; of the very names that this was gathered of."""
        return self.absent


def gather(audio: ListedAudio, *, is_fast: bool, num_jobs: int) -> AudioFacts:
    """Look at every file of a list, several at once; with `is_fast` at its header alone."""
    source, names = audio.source, audio.names
    # Headers wait for the disk: four reads a core keep it busy.
    facts = AudioFacts(source.missing(names), source.lookup_table(names, num_threads=4 * num_jobs), None)
    good = facts.good
    if is_fast:
        return facts
    # What cannot be read is said by the header check; the samples are those of the rest.
    chosen = names if len(good) == len(names) else names.take(good)
    return AudioFacts(facts.absent, facts.lookup, read_facts(source, chosen, num_jobs, audio.check))


def gather_part(
    lists: Sequence[ListedAudio], part: WorkPart, folder: Path, *, is_fast: bool, num_jobs: int
) -> tuple[list[AudioFacts], list[WorkPart]]:
    """Look at one part of every list, unless that was done; join all parts where it was the last.

    Args:
        lists: whole.
        part: which of the parts.
        folder: where the parts leave what they found.
        is_fast: see `gather`.
        num_jobs: likewise.

    Returns:
        The facts of each list, and the parts that are still missing; with any missing there are no facts.

    Raises:
        PartError: other parts there are of other lists, or of another number.
    """
    key = _key(lists, part.count, is_fast)
    path = folder / (part.name + SUFFIX)
    if not path.exists():
        missing_parts([part, *parts_in(folder, SUFFIX)], folder)
        content: dict[str, np.ndarray] = {"key": np.array(key)}
        for number, one in enumerate(lists):
            rows = np.asarray(share(range(len(one.names)), part.number, part.count))
            own = ListedAudio(one.names.take(rows), one.source, one.check)
            found = gather(own, is_fast=is_fast, num_jobs=num_jobs)
            content |= {f"{number}.{name}": column for name, column in _columns(found).items()}
        with atomic_write(path, "wb") as file:
            np.savez(file, allow_pickle=False, **content)  # type: ignore[arg-type]
    done = parts_in(folder, SUFFIX)
    if missing := missing_parts(list(done), folder):
        return [], missing
    stored = {one: read_arrays(where, WHAT) for one, where in done.items()}
    if strange := [one for one, arrays in stored.items() if str(arrays.get("key")) != key]:
        raise PartError(
            f"{folder}: the parts {list_parts(strange)} are of other lists, another rate or another thoroughness; give "
            "all parts the same options, or another --part_folder"
        )
    return [
        _join([_facts(arrays, f"{number}.", one.source.sample_rate, done[part]) for part, arrays in stored.items()])
        for number, one in enumerate(lists)
    ], []


def _key(lists: Sequence[ListedAudio], count: int, is_fast: bool) -> str:
    """By which parts of the same check are known; folders may differ, as those of each machine's own disk do."""
    digest = hashlib.sha256(json.dumps([count, is_fast]).encode())
    for one in lists:
        digest.update(json.dumps([one.check, one.source.sample_rate, len(one.names)]).encode())
        digest.update(one.names.offsets.tobytes())
        digest.update(one.names.content.tobytes())
    return digest.hexdigest()


def _columns(facts: AudioFacts) -> dict[str, np.ndarray]:
    columns = {"absent": facts.absent, **facts.lookup.arrays()}
    if facts.samples is not None:
        columns |= {name: getattr(facts.samples, name) for name in SAMPLE_COLUMNS}
        columns["damage"] = pack_texts(facts.samples.problems)
    return columns


def _facts(arrays: Mapping[str, np.ndarray], prefix: str, sample_rate: int, path: Path) -> AudioFacts:
    with reading(path, f"{WHAT}; remove it and do that part again"):
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        lookup = LookupTable.from_arrays(own, sample_rate)
        if "damage" not in own:
            return AudioFacts(own["absent"], lookup, None)
        columns = {name: own[name].astype(dtype, copy=False) for name, dtype in SAMPLE_COLUMNS.items()}
        return AudioFacts(own["absent"], lookup, SampleFacts(**columns, problems=unpack_texts(own["damage"])))


def _join(parts: Sequence[AudioFacts]) -> AudioFacts:
    """The parts one after the other."""
    begins = np.cumsum([0, *(len(one.lookup) for one in parts)]).tolist()
    absent = np.concatenate([one.absent + begin for one, begin in zip(parts, begins, strict=False)])
    lookup = LookupTable.joined([one.lookup for one in parts])
    samples = [one.samples for one in parts if one.samples is not None]
    if not samples:
        return AudioFacts(absent, lookup, None)
    firsts = np.cumsum([0, *(len(one.rms) for one in samples)]).tolist()
    damage = {
        row + first: text for one, first in zip(samples, firsts, strict=False) for row, text in one.problems.items()
    }
    columns = {name: np.concatenate([getattr(one, name) for one in samples]) for name in SAMPLE_COLUMNS}
    return AudioFacts(absent, lookup, SampleFacts(**columns, problems=damage))
