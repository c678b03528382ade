"""Write a packed corpus: decode in threads, append in order, keep a journal, take the final name
only when complete.

While it is being written, a corpus is called `<name>.partial`. The journal records which utterances
are safely in the array; after a kill at any moment, the same command finishes the corpus. With
several machines, each packs a shard: a packed corpus below the corpus's folder. Joining copies
nothing; it writes one description that names the shards and does not depend on the writer, so it
may be done twice or concurrently.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy import ndarray

import speakernet
from speakernet.data.audio import AudioError
from speakernet.data.lists import NameIndex, StringTable
from speakernet.data.packed import (
    DESCRIPTION,
    FORMAT_VERSION,
    INDEX,
    NOT_HERE,
    PARTS_VERSION,
    PLAN_OF_PARTS,
    SAMPLES,
    Description,
    PackedError,
    ShardDescription,
    is_packed,
    make_header,
    partial_of,
    read_description,
    read_index,
)
from speakernet.data.parts import WorkPart, list_parts, missing_parts, parts_in, share
from speakernet.files import (
    LOCK_NAME,
    atomic_write,
    exclusive,
    open_text,
    parallel_map,
    reading,
    sha256_of,
    writing,
)
from speakernet.options import HIGHEST_SAMPLE_RATE, LOWEST_SAMPLE_RATE, SAMPLE_RATE

logger = logging.getLogger(__name__)

PLAN = "plan.json"
JOURNAL = "journal.bin"
SKIPPED = "skipped.txt"
# One record per utterance, in order: its length (-1: left out) and the CRC-32 of its bytes.
RECORD = np.dtype([("num_samples", "<i8"), ("checksum", "<u4")])
# The maximum amount of work that a kill can cost.
FLUSH_BYTES = 64 << 20
FLUSH_SECONDS = 20.0
HEADER_BYTES = len(make_header(0))


@dataclass(eq=False)
class PackInput(ABC):
    """Utterances in a fixed order, to be decoded one by one in threads."""

    names: StringTable
    description: str
    speakers: StringTable | None = None

    part_of = ""
    """Of a shard: the digest of the whole corpus's names, rate and number of shards."""

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """(row, content) for `decode`, rows ascending; content is None if `decode` reads it
        itself.
        """
        for row in rows:
            yield row, None

    @abstractmethod
    def decode(self, row: int, content: bytes | None, sample_rate: int) -> ndarray:
        """Decode one utterance to mono int16 (samples,); called from several threads."""


class Shard(PackInput):
    """Some rows of a whole input."""

    def __init__(self, whole: PackInput, rows: range, description: str, part_of: str) -> None:
        super().__init__(whole.names.take(np.asarray(rows)), description)
        self.part_of = part_of
        self._whole = whole
        self._rows = rows

    def items(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """See `PackInput.items`."""
        # `index` of a range is arithmetic, not a search.
        for row, content in self._whole.items([self._rows[row] for row in rows]):
            yield self._rows.index(row), content

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> ndarray:
        """See `PackInput.decode`."""
        return self._whole.decode(self._rows[row], content, sample_rate)


@dataclass(frozen=True)
class PackSummary:
    """The result of packing."""

    num_utterances: int
    num_samples: int
    num_skipped: int
    num_resumed: int

    @classmethod
    def of(cls, descriptions: Collection[Description], num_resumed: int) -> "PackSummary":
        """The summary of a corpus or of several shards together."""
        return cls(
            sum(description.num_utterances for description in descriptions),
            sum(description.num_samples for description in descriptions),
            sum(description.num_skipped for description in descriptions),
            num_resumed,
        )


# Nearly all the time goes into decoding (m4a and FLAC, from archives or a slow disk), so threads
# decode a few utterances ahead, and this thread appends the results in the order of the list. The
# corpus is therefore the same for any number of threads, and after a kill it is enough to know how
# many utterances have been written.
def pack(
    source: PackInput,
    corpus: str | Path,
    *,
    sample_rate: int = SAMPLE_RATE,
    num_threads: int = 2,
    skip_bad: bool = False,
    show_progress: bool = False,
) -> PackSummary:
    """Write (or finish) the packed corpus of `source`."""
    corpus = Path(corpus)
    check_rate(sample_rate)
    if not len(source.names):
        raise PackedError(
            f"{source.description}: there is nothing to pack; expected at least one audio file"
        )
    if corpus.exists():
        return _check_existing(source, corpus, sample_rate)
    partial = partial_of(corpus)

    # A folder with the final name is always a complete corpus; a killed run leaves this one.
    with writing(partial, "free some space, then run the same command"), exclusive(partial):
        plan = {
            "version": FORMAT_VERSION,
            "sample_rate": sample_rate,
            "names_sha256": _digest_of(source.names),
        }
        _check_plan(partial / PLAN, plan)
        with contextlib.closing(_Writer(partial)) as writer:
            num_resumed = writer.num_done
            if num_resumed:
                logger.info("%s: %d utterances already packed", partial, num_resumed)
            description = "pack" if show_progress else ""
            decoded = _decode_from(source, num_resumed, sample_rate, num_threads, description)
            try:
                for row, result in decoded:
                    if not isinstance(result, AudioError):
                        writer.append(*result)
                    elif skip_bad:
                        writer.skip(f"{source.names[row]}\t{result}")
                    else:
                        raise AudioError(
                            f"{result}. Correct the file or the list and run the same command "
                            "again (what is packed is kept), or add --skip-bad to leave such files "
                            "out"
                        ) from result
            finally:
                # Utterances decoded before an error need not be decoded again.
                writer.flush()
        finished = _finish(partial, source, sample_rate)
    (partial / LOCK_NAME).unlink(missing_ok=True)
    partial.rename(corpus)
    return PackSummary.of([finished], num_resumed)


def _decode_from(
    source: PackInput, first_row: int, sample_rate: int, num_threads: int, description: str
) -> Iterator[tuple[int, tuple[ndarray, int] | AudioError]]:
    """The rows from `first_row` on, each with its samples and their checksum, or with the error
    that says why it cannot be read.
    """

    def decode(item: tuple[int, bytes | None]) -> tuple[ndarray, int] | AudioError:
        try:
            samples = source.decode(*item, sample_rate)
        except AudioError as error:
            return error
        # The checksum is computed here, in the threads, rather than by the writer.
        return samples, zlib.crc32(samples.data)

    rows = range(first_row, len(source.names))
    items = source.items(rows)
    results = parallel_map(decode, items, num_threads, description, total=len(rows))
    return zip(rows, results, strict=True)


def check_rate(sample_rate: int) -> None:
    """Refuse a rate that no corpus has; resampling to it would take gigabytes for one recording."""
    if not LOWEST_SAMPLE_RATE <= sample_rate <= HIGHEST_SAMPLE_RATE:
        raise PackedError(
            f"a sample rate of {sample_rate} Hz; expected {LOWEST_SAMPLE_RATE} to "
            f"{HIGHEST_SAMPLE_RATE} Hz, usually {SAMPLE_RATE}"
        )


def _check_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Refuse to continue a corpus under a different plan; write the plan of a new corpus."""
    if not path.exists():
        with atomic_write(path) as file:
            json.dump(plan, file)
    # Read in any case: two processes that start at the same moment both write their plans.
    with (
        reading(path, f"a plan of packing; remove {path.parent} and pack again", PackedError),
        open_text(path) as file,
    ):
        begun = json.load(file)
    if begun != plan:
        raise PackedError(
            f"{path.parent}: started with different utterances, a different rate or a different "
            "number of parts; remove it, or give the original sources, lists and options"
        )


# What a kill may leave. Samples are flushed to disk before the journal that counts them, so the
# array may be longer than the journal says, never shorter; a restart cuts it to what the journal
# has and goes on from there. The header of the array, which needs the final length, and the index
# are written last, and the folder gets its name after that. An fsync for each utterance would be
# simpler, but takes longer than decoding; 64 MiB or 20 seconds of work is what a kill may cost.
class _Writer:
    """The growing array and its journal; every utterance in the journal is in the array, whatever
    happens.
    """

    def __init__(self, folder: Path) -> None:
        self._samples = (folder / SAMPLES).open("ab")
        self._skipped = (folder / SKIPPED).open("ab")
        self._journal = (folder / JOURNAL).open("ab")
        self._records: list[tuple[int, int]] = []
        self._unflushed_bytes = 0
        self._last_flush = time.monotonic()
        # Cut off what a killed run wrote after its last journal entry; a kill may also leave half a
        # record.
        records = _read_journal(folder)
        self.num_done = len(records)
        self._journal.truncate(records.nbytes)
        lengths = records["num_samples"]
        num_skipped = np.count_nonzero(lengths < 0)
        lines = (folder / SKIPPED).read_bytes().splitlines(keepends=True)
        self._skipped.truncate(sum(map(len, lines[:num_skipped])))
        expected = HEADER_BYTES + 2 * int(lengths[lengths > 0].sum())
        num_bytes = self._samples.tell()
        if num_bytes == 0:
            self._samples.write(make_header(0))
        elif num_bytes < expected:
            raise PackedError(
                f"{folder}: {num_bytes} bytes of samples, {expected} in the journal; remove it and "
                "pack again"
            )
        else:
            self._samples.truncate(expected)

    def close(self) -> None:
        for file in (self._samples, self._journal, self._skipped):
            file.close()

    def append(self, samples: ndarray, checksum: int) -> None:
        """Add the next utterance, int16 (samples,)."""
        self._samples.write(samples.data)
        self._record(len(samples), checksum, samples.nbytes)

    def skip(self, line: str) -> None:
        """Leave out the next utterance and record why."""
        self._skipped.write((line.replace("\n", " ") + "\n").encode())
        self._record(NOT_HERE, 0, 0)

    def flush(self) -> None:
        """Write samples to disk, and only then the journal records for them."""
        for file in (self._samples, self._skipped):
            _sync(file)
        self._journal.write(np.array(self._records, dtype=RECORD).tobytes())
        _sync(self._journal)
        self._records = []
        self._unflushed_bytes = 0
        self._last_flush = time.monotonic()

    def _record(self, num_samples: int, checksum: int, num_bytes: int) -> None:
        self._records.append((num_samples, checksum))
        self._unflushed_bytes += num_bytes
        self.num_done += 1
        is_late = time.monotonic() - self._last_flush > FLUSH_SECONDS
        if is_late or self._unflushed_bytes >= FLUSH_BYTES:
            self.flush()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest_of(names: StringTable) -> str:
    digest = hashlib.sha256(names.offsets.tobytes())
    digest.update(names.content.tobytes())
    return digest.hexdigest()


def _read_journal(folder: Path) -> ndarray:
    """The complete records."""
    content = (folder / JOURNAL).read_bytes()
    return np.frombuffer(content, dtype=RECORD, count=len(content) // RECORD.itemsize)


def _finish(partial: Path, source: PackInput, sample_rate: int) -> Description:
    """Write header, index and description, and remove the journal."""
    # The order matters. The header makes the samples a valid array, the index names them, and the
    # description, which has the checksum of the index, is written when both are complete. The plan
    # and the journal are removed last, so that after an earlier kill the same command can resume.
    records = _read_journal(partial)
    kept = np.flatnonzero(records["num_samples"] >= 0)
    if not len(kept):
        raise PackedError(
            f"{partial}: none of the {len(records)} utterances could be read; see {SKIPPED} there"
        )
    offsets = np.concatenate([[0], np.cumsum(records["num_samples"][kept])]).astype(np.int64)
    num_samples = int(offsets[-1])
    with (partial / SAMPLES).open("r+b") as file:
        file.write(make_header(num_samples))
        _sync(file)
    names = source.names.take(kept)
    with atomic_write(partial / INDEX, "wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            name_content=names.content,
            name_offsets=names.offsets,
            sample_offsets=offsets,
            checksums=records["checksum"][kept],
        )
    num_skipped = len(records) - len(kept)
    description = Description(
        version=FORMAT_VERSION,
        sample_rate=sample_rate,
        num_utterances=len(kept),
        num_samples=num_samples,
        num_skipped=num_skipped,
        index_sha256=sha256_of(partial / INDEX),
        part_of=source.part_of,
    )
    _write_description(partial, description)
    (partial / PLAN).unlink()
    (partial / JOURNAL).unlink()
    if not num_skipped:
        (partial / SKIPPED).unlink()
    return description


def _write_description(corpus: Path, description: Description) -> None:
    fields = description.model_dump() | {"written_by": f"speakernet {speakernet.__version__}"}
    present = {name: value for name, value in fields.items() if value not in ("", [])}
    with atomic_write(corpus / DESCRIPTION) as file:
        json.dump(present, file, indent=1)


def _check_existing(source: PackInput, corpus: Path, sample_rate: int) -> PackSummary:
    """Refuse anything but a corpus with exactly these names, whose summary it returns."""
    if not is_packed(corpus):
        raise PackedError(f"{corpus}: exists and is not a packed corpus; choose a different name")
    # Only names are compared: decoding the recordings again would take as long as packing them.
    names = read_index(corpus).names
    description = read_description(corpus)
    total = len(names) + description.num_skipped
    has_all_names = total == len(source.names) and (NameIndex(source.names).find(names) >= 0).all()
    if description.sample_rate != sample_rate or not has_all_names:
        raise PackedError(
            f"{corpus}: exists with different utterances or a different rate ({total} utterances "
            f"at {description.sample_rate} Hz; requested {len(source.names)} at {sample_rate} Hz); "
            "remove it or choose a different name"
        )
    logger.info("%s: already packed", corpus)
    return PackSummary.of([description], len(names))


def pack_part(
    source: PackInput,
    corpus: str | Path,
    part: WorkPart,
    *,
    sample_rate: int = SAMPLE_RATE,
    **options: Any,
) -> tuple[PackSummary, list[WorkPart]]:
    """Write (or finish) one shard, and join all shards after the last one.

    Returns:
        The summary of the shard, and the shards that are still missing.
    """
    corpus = Path(corpus)
    # A folder that holds other files is refused, and nothing is written into it.
    is_foreign = corpus.exists() and not is_packed(corpus) and any(corpus.iterdir())
    if is_foreign or (corpus / DESCRIPTION).exists():
        return _check_existing(source, corpus, sample_rate), []
    rows = share(range(len(source.names)), part.number, part.count)
    if not rows:
        raise PackedError(
            f"--part {part}: {source.description} has {len(source.names)} utterances, too few for "
            f"{part.count} parts; use fewer parts"
        )
    plan = plan_of_parts(source, sample_rate, part.count)
    _check_plan(corpus / PLAN_OF_PARTS, plan)
    shard = Shard(source, rows, f"part {part} of {source.description}", digest_of_plan(plan))
    summary = pack(shard, corpus / part.name, sample_rate=sample_rate, **options)
    # If two machines finish at the same time, both write the description; it is the same.
    missing = missing_parts(parts_in(corpus), corpus)
    if not missing:
        join_parts(corpus)
    return summary, missing


def plan_of_parts(source: PackInput, sample_rate: int, count: int) -> dict[str, Any]:
    """What `count` shards must have in common to be one corpus."""
    check_rate(sample_rate)
    return {"names_sha256": _digest_of(source.names), "sample_rate": sample_rate, "parts": count}


def digest_of_plan(plan: Mapping[str, Any]) -> str:
    """What every shard records, so that only shards of one plan are joined."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def join_parts(corpus: str | Path) -> None:
    """Join the shards below a folder into one corpus."""
    corpus = Path(corpus)
    paths = parts_in(corpus)
    if not paths:
        raise PackedError(
            f"{corpus}: no parts to join; make them with speakernet pack … --part 1/N"
        )
    if missing := missing_parts(paths, corpus):
        raise PackedError(
            f"{corpus}: the parts {list_parts(missing)} are missing; run speakernet pack with them "
            "first"
        )
    shards = {part.name: read_description(path) for part, path in paths.items()}
    rates = {shard.sample_rate for shard in shards.values()}
    # Shards of older versions do not record what they are part of.
    origins = {shard.part_of for shard in shards.values()} - {""}
    if len(rates) > 1 or len(origins) > 1:
        raise PackedError(
            f"{corpus}: its parts have different lists or rates; pack them again with one command"
        )
    # A digest of the digests in order, which is equal only for equal copies.
    digests = "".join(shard.index_sha256 for shard in shards.values())
    total = PackSummary.of(shards.values(), 0)
    description = Description(
        version=PARTS_VERSION,
        sample_rate=rates.pop(),
        num_utterances=total.num_utterances,
        num_samples=total.num_samples,
        num_skipped=total.num_skipped,
        index_sha256=hashlib.sha256(digests.encode()).hexdigest(),
        parts=[
            ShardDescription(name=name, index_sha256=shard.index_sha256)
            for name, shard in shards.items()
        ],
    )
    _write_description(corpus, description)
    logger.info("%s: joined %d parts", corpus, len(shards))
