"""Write a packed corpus: decode in threads, append in order, keep a journal, take the final name only when whole.

While it is written, a corpus lies beside its name as `<name>.partial`. The journal says which utterances are safely in
the array; a run that was killed at any moment is finished by starting the same command again.
"""

import hashlib
import json
import logging
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

import speakernet
from speakernet.data.audio import AudioError
from speakernet.data.lists import NameIndex, StringTable
from speakernet.data.packed import (
    DESCRIPTION,
    FORMAT_NAME,
    FORMAT_VERSION,
    INDEX,
    NOT_HERE,
    PARTS_VERSION,
    PLAN_OF_PARTS,
    SAMPLES,
    PackedError,
    describe_samples,
    is_packed,
    partial_of,
    read_description,
    read_index,
)
from speakernet.files import (
    LOCK_NAME,
    WorkPart,
    atomic_write,
    exclusive,
    list_parts,
    missing_parts,
    naming,
    open_text,
    parallel_map,
    parts_in,
    reading,
    sha256_of,
    share,
)
from speakernet.options import SAMPLE_RATE

logger = logging.getLogger(__name__)

PLAN, JOURNAL, SKIPPED = "plan.json", "journal.bin", "skipped.txt"
# A record per utterance, in order: its length (-1: left out) and the CRC-32 of its bytes.
RECORD = np.dtype([("num_samples", "<i8"), ("checksum", "<u4")])
HEADER_BYTES = len(describe_samples(0))
# How much work a kill can cost at most.
FLUSH_BYTES = 64 << 20
FLUSH_SECONDS = 20.0


class PackInput(ABC):
    """Utterances in a fixed order, to be decoded one by one in threads.

    Args:
        names: of the utterances.
        description: of the source, for messages.
        speakers: of the utterances, empty where it is not said; None where the source says none.
    """

    def __init__(self, names: StringTable, description: str, speakers: StringTable | None = None) -> None:
        self.names = names
        self.description = description
        self.speakers = speakers

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """(row, content) for `decode`, rows ascending; the content is None where `decode` fetches it itself."""
        for row in rows:
            yield row, None

    @abstractmethod
    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """One utterance as mono int16 (samples,); called from several threads.

        Raises:
            AudioError: it is not there or cannot be read.
        """


@dataclass(frozen=True)
class PackSummary:
    """What a run of `pack` left behind.

    Attributes:
        num_utterances: in the corpus.
        num_samples: of all of them together.
        num_resumed: utterances that an earlier run had written already.
        num_skipped: utterances that could not be read and were left out; `skipped.txt` in the corpus names them.
    """

    num_utterances: int
    num_samples: int
    num_resumed: int
    num_skipped: int


def pack(
    source: PackInput,
    corpus: str | Path,
    *,
    sample_rate: int = SAMPLE_RATE,
    num_threads: int = 2,
    skip_bad: bool = False,
    show_progress: bool = False,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> PackSummary:
    """Write (or finish) the packed corpus of `source`.

    Args:
        source: names and decoded audio.
        corpus: the folder to make.
        sample_rate: Hz of the corpus.
        num_threads: files decoded at a time.
        skip_bad: leave out what cannot be read (counted and named) instead of stopping.
        show_progress: show a progress bar.
        facts: more for its description.

    Raises:
        AudioError: an utterance cannot be read; what was packed so far is kept for the next run.
        PackedError: `corpus` exists and holds something else, or was begun with other names.
    """
    corpus = Path(corpus)
    if not len(source.names):
        raise PackedError(f"{source.description}: there is nothing to pack; expected at least one audio file")
    if corpus.exists():
        return already_there(source, corpus, sample_rate)
    partial = partial_of(corpus)
    # Under its final name a folder is always a whole corpus; a killed run is found under this one.
    with naming(partial), exclusive(partial):
        with _Writer(partial, source.names, sample_rate) as writer:
            num_resumed = writer.num_done
            if num_resumed:
                logger.info("%s: %d of %d utterances are there already", partial, num_resumed, len(source.names))
            _append_all(source, writer, num_threads, skip_bad, sample_rate, show_progress)
        summary = _finish(partial, source.names, sample_rate, num_resumed, facts)
    (partial / LOCK_NAME).unlink(missing_ok=True)
    # The one moment at which the corpus comes to be.
    partial.rename(corpus)
    _sync_folder(corpus.parent)
    return summary


def _append_all(
    source: PackInput, writer: "_Writer", num_threads: int, skip_bad: bool, sample_rate: int, show_progress: bool
) -> None:
    num_rows = len(source.names)

    def decode(item: tuple[int, bytes | None]) -> tuple[np.ndarray, int] | AudioError:
        try:
            samples = source.decode(*item, sample_rate)
        except AudioError as error:
            return error
        # The checksum here and not by the writer: it runs in the threads.
        return samples, zlib.crc32(samples.data)

    remaining = range(writer.num_done, num_rows)
    description = "pack" if show_progress else ""
    results = parallel_map(decode, source.items(remaining), num_threads, description, total=len(remaining))
    for row, result in zip(remaining, results, strict=True):
        if not isinstance(result, AudioError):
            writer.append(*result)
        elif skip_bad:
            writer.skip(f"{source.names[row]}\t{result}")
        else:
            raise AudioError(
                f"{result}; what was packed so far is kept: mend the file and run the same command again, "
                "or add --skip-bad to leave such files out"
            ) from result


class _Writer:
    """The growing array and its journal; what the journal names is in the array, whatever happens."""

    def __init__(self, folder: Path, names: StringTable, sample_rate: int) -> None:
        self._check_plan(folder, names, sample_rate)
        self._samples = (folder / SAMPLES).open("ab")
        self._journal = (folder / JOURNAL).open("ab")
        self._skipped = (folder / SKIPPED).open("a", encoding="utf-8", newline="\n")
        self._records: list[tuple[int, int]] = []
        self._unflushed_bytes = 0
        self._last_flush = time.monotonic()
        self.num_done = self._cut_to_journal(folder)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # After an error too: what was decoded before it need not be decoded again. A full disk fails here again.
            if not isinstance(error, OSError):
                self.flush()
        finally:
            for file in (self._samples, self._journal, self._skipped):
                file.close()

    def append(self, samples: np.ndarray, checksum: int) -> None:
        """Add the next utterance, int16 (samples,)."""
        self._samples.write(samples.data)
        self._record(len(samples), checksum, samples.nbytes)

    def skip(self, line: str) -> None:
        """Leave the next utterance out and note why."""
        self._skipped.write(line.replace("\n", " ") + "\n")
        self._record(NOT_HERE, 0, 0)

    def flush(self) -> None:
        """Bring samples to the disk, and only then the records that promise them."""
        for file in (self._samples, self._skipped):
            file.flush()
            os.fsync(file.fileno())
        self._journal.write(np.array(self._records, dtype=RECORD).tobytes())
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._records = []
        self._unflushed_bytes = 0
        self._last_flush = time.monotonic()

    def _record(self, num_samples: int, checksum: int, num_bytes: int) -> None:
        self._records.append((num_samples, checksum))
        self._unflushed_bytes += num_bytes
        self.num_done += 1
        if self._unflushed_bytes >= FLUSH_BYTES or time.monotonic() - self._last_flush > FLUSH_SECONDS:
            self.flush()

    def _cut_to_journal(self, folder: Path) -> int:
        """Cut away what a killed run wrote after its last journal entry; returns the utterances that are done."""
        records = _read_journal(folder)
        # Half a record is what a kill in the middle of a write leaves.
        os.truncate(folder / JOURNAL, len(records) * RECORD.itemsize)
        num_skipped = int((records["num_samples"] < 0).sum())
        lines = (folder / SKIPPED).read_bytes().splitlines(keepends=True)[:num_skipped]
        os.truncate(folder / SKIPPED, sum(map(len, lines)))
        wanted = HEADER_BYTES + 2 * int(np.maximum(records["num_samples"], 0).sum())
        found = os.fstat(self._samples.fileno()).st_size
        if found == 0:
            self._samples.write(describe_samples(0))
            self._samples.flush()
        elif found < wanted:
            raise PackedError(
                f"{folder}: holds {found} bytes of samples where its journal names {wanted}; remove it and pack again"
            )
        else:
            os.truncate(folder / SAMPLES, wanted)
        return len(records)

    @staticmethod
    def _check_plan(folder: Path, names: StringTable, sample_rate: int) -> None:
        """Refuse to go on with what another list or rate began."""
        plan = {"version": FORMAT_VERSION, "sample_rate": sample_rate, "names_sha256": digest_of(names)}
        path = folder / PLAN
        if path.exists():
            try:
                begun = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise PackedError(f"{path}: damaged ({error}); remove {folder} and pack again") from error
            if begun != plan:
                raise PackedError(
                    f"{folder}: was begun with other names or another rate; "
                    "remove it, or give the list, source and --sample-rate that began it"
                )
        else:
            with atomic_write(path) as file:
                json.dump(plan, file)


def digest_of(names: StringTable) -> str:
    """SHA-256 of names in their order, as lower-case hex."""
    digest = hashlib.sha256(names.offsets.tobytes())
    digest.update(names.content.tobytes())
    return digest.hexdigest()


def _read_journal(folder: Path) -> np.ndarray:
    content = (folder / JOURNAL).read_bytes()
    return np.frombuffer(content[: len(content) // RECORD.itemsize * RECORD.itemsize], dtype=RECORD)


def _finish(
    partial: Path, names: StringTable, sample_rate: int, num_resumed: int, facts: Mapping[str, str]
) -> PackSummary:
    """Write header, index and description, and clear the journal away."""
    records = _read_journal(partial)
    kept = np.flatnonzero(records["num_samples"] >= 0)
    if not len(kept):
        raise PackedError(f"{partial}: not one of {len(names)} utterances could be read; see {SKIPPED} there")
    offsets = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum(records["num_samples"][kept], out=offsets[1:])
    kept_names = names if len(kept) == len(names) else names.take(kept)
    with (partial / SAMPLES).open("r+b") as file:
        file.write(describe_samples(int(offsets[-1])))
        file.flush()
        os.fsync(file.fileno())
    with atomic_write(partial / INDEX, "wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            name_content=kept_names.content,
            name_offsets=kept_names.offsets,
            sample_offsets=offsets,
            checksums=records["checksum"][kept],
        )
    description = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "sample_rate": sample_rate,
        "num_utterances": len(kept),
        "num_samples": int(offsets[-1]),
        "num_skipped": len(names) - len(kept),
        "index_sha256": sha256_of(partial / INDEX),
        "written_by": f"speakernet {speakernet.__version__}",
        **facts,
    }
    with atomic_write(partial / DESCRIPTION) as file:
        json.dump(description, file, indent=1)
    for name in (PLAN, JOURNAL):
        (partial / name).unlink()
    if len(kept) == len(names):
        (partial / SKIPPED).unlink()
    return PackSummary(len(kept), int(offsets[-1]), num_resumed, len(names) - len(kept))


def already_there(source: PackInput, corpus: Path, sample_rate: int) -> PackSummary:
    """The summary of a corpus that already holds just these names.

    Raises:
        PackedError: something else is at its place, or it is not finished.
    """
    if not is_packed(corpus):
        raise PackedError(f"{corpus}: exists and is not a packed corpus; give a name that is not taken")
    index = read_index(corpus)
    lists = [corpus / SKIPPED, *(path / SKIPPED for path in parts_in(corpus).values())]
    num_skipped = sum(len(one.read_text(encoding="utf-8").splitlines()) for one in lists if one.exists())
    found = NameIndex(source.names).find(index.names)
    if index.sample_rate != sample_rate or (found < 0).any() or len(found) + num_skipped != len(source.names):
        raise PackedError(
            f"{corpus}: exists with other utterances or another rate "
            f"({len(found)} utterances at {index.sample_rate} Hz; asked for {len(source.names)} at {sample_rate} Hz); "
            "remove it or give another name"
        )
    logger.info("%s: is packed already", corpus)
    return PackSummary(len(found), index.num_samples, len(found), num_skipped)


def _sync_folder(folder: Path) -> None:
    """Make a rename outlive a power cut, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
