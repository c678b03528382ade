"""The packed corpus: one memory-mapped int16 array and an index, so that a crop is one copy and opens no file.

A corpus is a folder of three files: in NumPy's own formats `samples.npy` (every utterance, end to end) and `index.npz`
(names, where each starts, its checksum), and `corpus.json`, which tells the version and the checksum of the index. One
that several machines packed is a folder of such folders, one a part, and a `corpus.json` that names them; it is read as
if it were one. This file reads; `writer.py` makes them, from what `speakernet.corpora.pack_inputs` finds, and several
`in_parts.py`.
"""

import bisect
import contextlib
import hashlib
import json
import math
import os
import shlex
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from speakernet.data.audio import SAMPLE_RATE, AudioError
from speakernet.data.lists import NameIndex, StringTable
from speakernet.data.lookup import PCM_S16, LookupTable
from speakernet.data.sharing import SharedArray
from speakernet.data.sources import INT16_SCALE, OPEN_FLAGS, AudioCache, AudioSource, RowReader, read_at
from speakernet.files import (
    PART_NAME,
    list_parts,
    missing_parts,
    open_text,
    parallel_map,
    parts_in,
    read_arrays,
    reading,
    sha256_of,
)
from speakernet.machine.facts import usable_memory_bytes


@dataclass(frozen=True)
class PackedIndex:
    """What lies where in a packed corpus.

    Attributes:
        sample_rate: Hz.
        names: every utterance, in the order of its samples.
        sample_offsets: first sample of each utterance and the end of the last, int64 (utterances + 1,).
        checksums: CRC-32 of each utterance's bytes, uint32 (utterances,).
        digest: SHA-256 of the file that all this is in.
    """

    sample_rate: int
    names: StringTable
    sample_offsets: np.ndarray
    checksums: np.ndarray
    digest: str

    @property
    def num_samples(self) -> int:
        """Samples of all utterances together."""
        return int(self.sample_offsets[-1])

    @property
    def content_digest(self) -> str:
        """SHA-256 of rate, names, lengths and the checksums of the samples: the same for the same content."""
        found = hashlib.sha256(str(self.sample_rate).encode())
        for column in (self.names.offsets, self.names.content, self.sample_offsets, self.checksums):
            found.update(column.tobytes())
        return found.hexdigest()


class FileSamples:
    """Int16 (samples,) in a file, sliced like the array that they are; every slice is a copy.

    Threads may slice at once.

    Args:
        path: the file.
        begin: byte at which the samples begin.
        num_samples: how many there are.
    """

    def __init__(self, path: Path, begin: int, num_samples: int) -> None:
        self._path, self._begin, self._num_samples = path, begin, num_samples
        self._file = os.open(path, OPEN_FLAGS)
        weakref.finalize(self, os.close, self._file)
        # Where nothing reads at a place, going there and reading are two steps.
        self._turn = contextlib.nullcontext() if hasattr(os, "preadv") else threading.Lock()

    def __len__(self) -> int:
        return self._num_samples

    @property
    def nbytes(self) -> int:
        """Of all samples."""
        return 2 * len(self)

    def __getitem__(self, some: slice) -> np.ndarray:
        """Raises AudioError where the disk does not give them."""
        first, stop, step = some.indices(len(self))
        assert step == 1, "samples are taken in their order"
        samples = np.empty(max(0, stop - first), dtype=np.int16)
        done = 0
        while done < len(samples):
            try:
                with self._turn:
                    num_bytes = read_at(self._file, samples[done:], self._begin + 2 * (first + done))
            except OSError as error:
                raise AudioError(f"{self._path}: cannot be read ({error.strerror or error})") from error
            if num_bytes < 2:
                raise AudioError(f"{self._path}: became shorter while it was being read; copy it again")
            # Half a sample is read again.
            done += num_bytes // 2
        return samples


class JoinedSamples:
    """The samples of the parts one after the other, int16 (samples,); sliced like the array that they would be.

    What lies within a part, as every utterance does, is a view where the part is memory; nothing is held.

    >>> joined = JoinedSamples([np.arange(3, dtype=np.int16), np.arange(3, 8, dtype=np.int16)])
    >>> len(joined), joined[3:5], joined[2:4]
    (8, array([3, 4], dtype=int16), array([2, 3], dtype=int16))
    """

    def __init__(self, parts: Sequence[np.ndarray | FileSamples]) -> None:
        self.parts = list(parts)
        self._begins = np.cumsum([0, *map(len, self.parts)]).tolist()

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def nbytes(self) -> int:
        """Of all samples."""
        return 2 * len(self)

    def __getitem__(self, some: slice) -> np.ndarray:
        first, stop, step = some.indices(len(self))
        assert step == 1, "samples are taken in their order"
        part = bisect.bisect_right(self._begins, first) - 1
        if part < len(self.parts) and stop <= self._begins[part + 1]:
            return self.parts[part][first - self._begins[part] : stop - self._begins[part]]
        pieces = [
            samples[max(first - begin, 0) : max(stop - begin, 0)]
            for samples, begin in zip(self.parts, self._begins, strict=False)
            if begin < stop
        ]
        return np.concatenate(pieces) if pieces else self.parts[0][:0]


Samples: TypeAlias = np.ndarray | JoinedSamples | FileSamples
"""Of a packed corpus, int16 (samples,), one after the other; sliced without a step."""


def join_tables(tables: Sequence[StringTable]) -> StringTable:
    """The strings of all tables, one table's after another's."""
    begins = np.cumsum([0, *(len(table.content) for table in tables)])
    offsets = [table.offsets[:-1] + begin for table, begin in zip(tables, begins, strict=False)]
    return StringTable(np.concatenate([table.content for table in tables]), np.concatenate([*offsets, begins[-1:]]))


FORMAT_NAME = "speakernet packed corpus"
FORMAT_VERSION = 1
PARTS_VERSION = 2
"""Of a corpus of several parts, each of which is of version 1."""
SAMPLES, INDEX, DESCRIPTION = "samples.npy", "index.npz", "corpus.json"
PLAN_OF_PARTS = "parts.json"
"""Beside parts: what they are parts of."""
PARTIAL_SUFFIX = ".partial"  # A corpus that is being written lies beside its name, under its name and this.
NOT_HERE = -1
INDEX_COLUMNS = {
    "name_content": np.uint8,
    "name_offsets": np.int64,
    "sample_offsets": np.int64,
    "checksums": np.uint32,
}


class PackedError(AudioError):
    """A packed corpus that cannot be used; the message says what is wrong with it and what to do."""


def is_packed(root: str | Path) -> bool:
    """Whether `root` is a packed corpus, whole, damaged or half written, and so not a folder of audio files."""
    root = Path(root)
    return (
        any((root / name).is_file() for name in (DESCRIPTION, PLAN_OF_PARTS, SAMPLES, INDEX))
        or (root.name.endswith(PARTIAL_SUFFIX) and root.is_dir())
        or bool(parts_in(root))
    )


def partial_of(corpus: str | Path) -> Path:
    """Where a corpus lies until it is whole."""
    return Path(corpus).with_name(Path(corpus).name + PARTIAL_SUFFIX)


def read_index(root: str | Path) -> PackedIndex:
    """Open a corpus's index and check that the files fit it and one another.

    Raises:
        PackedError: not a packed corpus, half written, damaged, or of a newer version.
    """
    root = Path(root)
    half = partial_of(root)
    if not root.exists() and half.exists():
        raise PackedError(f"{root}: packing was not finished (found {half.name}); run the same `speakernet pack` again")
    if root.name.endswith(PARTIAL_SUFFIX):
        raise PackedError(f"{root}: this corpus is half written; run the same `speakernet pack` again to finish it")
    description = read_description(root)
    if description["parts"]:
        return _joined_index(root, description)
    # At every start; the samples' own sums only by `--verify`: 39 GB would take a minute.
    if sha256_of(root / INDEX) != description["index_sha256"]:
        raise PackedError(f"{root / INDEX}: the checksum is not the one in {DESCRIPTION}; {_advice(root)}")
    columns = _read_columns(root)
    names = StringTable(columns["name_content"], columns["name_offsets"])
    index = PackedIndex(
        description["sample_rate"],
        names,
        columns["sample_offsets"],
        columns["checksums"],
        description["index_sha256"],
    )
    if not len(index.sample_offsets) - 1 == len(names) == len(index.checksums) == description["num_utterances"]:
        raise PackedError(f"{root / INDEX}: its parts differ in length; {_advice(root)}")
    for name, end in (("name_offsets", len(columns["name_content"])), ("sample_offsets", description["num_samples"])):
        offsets = columns[name]
        if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
            raise PackedError(f"{root / INDEX}: {name} do not rise from 0 to {end}; {_advice(root)}")
    return index


def _joined_index(root: Path, description: dict[str, Any]) -> PackedIndex:
    """The index of a corpus of several parts, numbered through."""
    parts = [read_index(root / name) for name in description["parts"]]
    for name, part in zip(description["parts"], parts, strict=True):
        if part.sample_rate != description["sample_rate"] or part.digest != description["parts"][name]:
            raise PackedError(f"{root / name}: is not the part that {DESCRIPTION} of {root} names; {_advice(root)}")
    begins = np.cumsum([0, *(part.num_samples for part in parts)])
    offsets = [part.sample_offsets[:-1] + begin for part, begin in zip(parts, begins, strict=False)]
    names = join_tables([part.names for part in parts])
    if len(names) != description["num_utterances"] or begins[-1] != description["num_samples"]:
        raise PackedError(f"{root}: its parts hold {len(names)} utterances, not those that {DESCRIPTION} names; "
                          + _advice(root))  # fmt: skip
    return PackedIndex(
        description["sample_rate"],
        names,
        np.concatenate([*offsets, begins[-1:]]),
        np.concatenate([part.checksums for part in parts]),
        description["index_sha256"],
    )


def _read_columns(root: Path) -> dict[str, np.ndarray]:
    path, advice = root / INDEX, f"the index of a packed corpus; {_advice(root)}"
    with reading(path, advice, PackedError):
        stored = read_arrays(path, advice, PackedError)
        columns = {name: stored[name].astype(dtype, copy=False) for name, dtype in INDEX_COLUMNS.items()}
    for name, column in columns.items():
        if column.ndim != 1:
            raise PackedError(f"{path}: {name} has {column.ndim} dimensions, expected 1; {_advice(root)}")
    return columns


def open_samples(root: str | Path, num_samples: int, *, is_mapped: bool = True) -> Samples:
    """The corpus's samples as a read-only memory map, int16 (samples,); of several parts one that acts like it.

    Args:
        root: the corpus.
        num_samples: by its index.
        is_mapped: else they are read from the file (`FileSamples`).

    Raises:
        PackedError: not the array that the index describes.
    """
    parts = read_description(Path(root))["parts"]
    if parts:
        counts = [read_description(Path(root, name))["num_samples"] for name in parts]
        return JoinedSamples(
            [_open_part(Path(root, name), count, is_mapped) for name, count in zip(parts, counts, strict=True)]
        )
    return _open_part(Path(root), num_samples, is_mapped)


def _open_part(root: Path, num_samples: int, is_mapped: bool) -> np.ndarray | FileSamples:
    path = root / SAMPLES
    with reading(path, f"{num_samples} samples of 2 bytes and a header; {_advice(root)}", PackedError):
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if mapped.dtype != np.dtype("<i2") or mapped.shape != (num_samples,):
        found = f"{mapped.dtype} of shape {mapped.shape}"
        raise PackedError(f"{path}: found {found}, expected int16 of shape ({num_samples},); {_advice(root)}")
    # A plain view: slicing NumPy's memmap class costs as much as copying a crop.
    return mapped.view(np.ndarray) if is_mapped else FileSamples(path, mapped.offset, num_samples)


class PackedSource(AudioSource):
    """The utterances of a packed corpus, by name: the same interface as a folder of files."""

    def __init__(self, root: str | Path, sample_rate: int = SAMPLE_RATE) -> None:
        """Open and check a corpus.

        Raises:
            PackedError: damaged, half written, or packed at another rate.
        """
        super().__init__(root, sample_rate)
        self.index = read_index(root)
        if self.index.sample_rate != sample_rate:
            raise PackedError(
                f"{root}: packed at {self.index.sample_rate} Hz, but {sample_rate} Hz were asked for; "
                f"pack it again with --sample-rate {sample_rate}"
            )
        # Mapped where the system's page cache holds all of it.
        self.is_mapped = 2 * self.index.num_samples <= usable_memory_bytes()
        self.samples = open_samples(root, self.index.num_samples, is_mapped=self.is_mapped)
        self._name_index = NameIndex(self.index.names)

    def __len__(self) -> int:
        return len(self.index.names)

    @property
    def identity(self) -> str:
        """See `AudioSource.identity`; the same however many parts it was packed in."""
        return f"{len(self)} utterances packed, {self.index.num_samples} samples, SHA-256 {self.index.content_digest}"

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """See `AudioSource.read`."""
        row = int(self.find(StringTable.from_strings([name]))[0])
        if row == NOT_HERE:
            raise AudioError(f"{self.root}: holds no utterance {name!r}; pack the list that names it")
        first, last = (int(offset) for offset in self.index.sample_offsets[row : row + 2])
        total = last - first
        stop = total if num_samples is None else min(total, start + num_samples)
        if start < 0 or stop <= start:
            raise AudioError(f"{self.root}: {name}: asked for samples {start} to {stop}, but it holds {total}")
        return self.samples[first + start : first + stop] * INT16_SCALE

    def find(self, names: StringTable) -> np.ndarray:
        """The row of each name in the corpus, -1 where it is not here; int64 (names,)."""
        return self._name_index.find(names)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        # Nothing is opened, so threads are not needed. An offset is that in the samples, in bytes.
        packed_rows = self.find(names)
        is_here = packed_rows != NOT_HERE
        starts = self.index.sample_offsets[packed_rows]
        lengths = self.index.sample_offsets[packed_rows + 1] - starts
        table = LookupTable.empty(len(names), self.sample_rate)
        table.columns["native_samples"].array[:] = np.where(is_here, lengths, 0)
        table.columns["sample_rates"].array[:] = self.sample_rate
        table.columns["num_channels"].array[:] = 1
        table.columns["formats"].array[:] = PCM_S16
        table.columns["data_offsets"].array[:] = np.where(is_here, starts * 2, NOT_HERE)
        # By its checksum an utterance that was packed again is recognised as another one.
        table.columns["modified_ns"].array[is_here] = self.index.checksums[packed_rows[is_here]]
        for row in np.flatnonzero(~is_here).tolist():
            table.problems[row] = f"{self.root}: holds no utterance {names[row]!r}; pack the list that names it"
        return table

    def missing(self, names: StringTable) -> np.ndarray:
        """See `AudioSource.missing`."""
        return np.flatnonzero(self.lookup_table(names).data_offsets == NOT_HERE)

    def rows(self, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> "PackedRows":
        """See `AudioSource.rows`; nothing is decoded, so nothing is kept."""
        starts = np.maximum(table.data_offsets, 0) // 2
        return PackedRows(self.root, self.samples, starts, table.native_samples, is_mapped=self.is_mapped)


class PackedRows(RowReader):
    """Rows of a list read from a packed corpus: one copy a crop."""

    def __init__(
        self, root: str, samples: Samples, starts: np.ndarray, lengths: np.ndarray, *, is_mapped: bool = True
    ) -> None:
        """A reader of rows.

        Args:
            root: the corpus, for messages and for opening it again in another process.
            samples: int16 (samples,).
            starts: first sample of each row in `samples`, int64 (rows,).
            lengths: samples of each row, 0 where the corpus does not hold it; int64 (rows,).
            is_mapped: whether `samples` are memory; else every slice of them is read from a disk.
        """
        super().__init__()
        self.root = root
        self.samples = samples
        self.is_mapped = is_mapped
        self._starts = SharedArray(starts)
        self._lengths = SharedArray(lengths)

    def share(self) -> None:
        """See `RowReader.share`."""
        self._starts.share()
        self._lengths.share()

    @property
    def starts(self) -> np.ndarray:
        """First sample of each row in `samples`, int64 (rows,)."""
        return self._starts.array

    @property
    def lengths(self) -> np.ndarray:
        """Samples of each row, 0 where it is not here; int64 (rows,)."""
        return self._lengths.array

    def span(self, row: int) -> tuple[int, int]:
        """First sample of a row in `samples`, and how many it has.

        Raises:
            AudioError: the corpus does not hold this row.
        """
        length = int(self._lengths.array[row])
        if length <= 0:
            raise AudioError(f"{self.root}: holds no utterance for row {row} of the list; pack the list again")
        return int(self._starts.array[row]), length

    def read_row(self, row: int, start: int, out: np.ndarray) -> int:
        """See `RowReader.read_row`."""
        first, length = self.span(row)
        count = max(0, min(len(out), length - start))
        # From the memory map: `pread` into the batch is 5.5 us against 4.1 where the pages were touched before.
        crop = self.samples[first + start : first + start + count]
        if out.dtype == np.int16:
            out[:count] = crop
        else:
            np.multiply(crop, INT16_SCALE, out=out[:count])
        return count

    def whole_crops(self, rows: np.ndarray, starts: np.ndarray, num_samples: int) -> np.ndarray:
        """Where in `samples` crops begin that lie wholly in their rows, -1 for the others; int64 (crops,)."""
        is_whole = (starts >= 0) & (starts + num_samples <= self._lengths.array[rows])
        return np.where(is_whole, self._starts.array[rows] + starts, -1)

    def fill(self, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """See `RowReader.fill`. Rows that hold the whole crop, nearly all, are copied without a further look."""
        if not self.is_mapped:
            # One that the disk does not give is one problem, not the batch's end.
            return super().fill(rows, starts, out)
        wanted = out.shape[1]
        firsts = self.whole_crops(rows, starts, wanted)
        samples = self.samples
        is_int16 = out.dtype == np.int16
        problems = {}
        for position, first in enumerate(firsts.tolist()):
            if first < 0:
                some = slice(position, position + 1)
                for problem in super().fill(rows[some], starts[some], out[some]).values():
                    problems[position] = problem
            elif is_int16:
                out[position] = samples[first : first + wanted]
            else:
                # Casting on assignment and scaling in place is faster than one product that casts.
                out[position] = samples[first : first + wanted]
                out[position] *= INT16_SCALE
        return problems

    def __getstate__(self) -> dict[str, Any]:
        # The map is opened again by the other process: pickling it would copy the corpus.
        return {**self.__dict__, "samples": len(self.samples)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.samples = open_samples(self.root, state["samples"], is_mapped=self.is_mapped)


def describe_samples(num_samples: int) -> bytes:
    """The header of a .npy file of `num_samples` int16, always 128 bytes, so that it can be written last."""
    text = f"{{'descr': '<i2', 'fortran_order': False, 'shape': ({num_samples},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode("ascii") + b"\n"


def read_description(root: Path) -> dict[str, Any]:
    """What `corpus.json` says: numbers, `index_sha256`, and of a corpus of several parts name and digest of each.

    Raises:
        PackedError: it is missing, damaged or of a newer version, or the files that it describes are not there.
    """
    path = root / DESCRIPTION
    if not path.is_file():
        if found := parts_in(root):
            missing = missing_parts(list(found), root)
            what = f"the parts {list_parts(missing)} are missing" if missing else "its parts are not joined"
            merge = f"run `speakernet pack {shlex.quote(str(root))} --merge`"
            advice = "run speakernet pack with --part for those" if missing else merge
            raise PackedError(f"{root}: packing was not finished: {what}; {advice}")
        if is_packed(root):
            raise PackedError(f"{root}: {DESCRIPTION} is missing, so the corpus is not whole; {_advice(root)}")
        raise PackedError(f"{root}: not a packed corpus (it holds no {DESCRIPTION}); make one with `speakernet pack`")
    with reading(path, f"the description of a packed corpus; {_advice(root)}", PackedError), open_text(path) as file:
        description = json.load(file)
        is_ours = description["format"] == FORMAT_NAME
        version, wanted = int(description["version"]), ("num_utterances", "num_samples", "sample_rate")
        numbers = {key: int(description[key]) for key in wanted}
        index_sha256 = str(description["index_sha256"])
        parts = {str(part["name"]): str(part["index_sha256"]) for part in description.get("parts", [])}
    if not is_ours:
        raise PackedError(f"{path}: describes {description['format']!r}, expected {FORMAT_NAME!r}")
    newest = PARTS_VERSION if parts else FORMAT_VERSION
    if version != newest:
        advice = "update speakernet" if version > newest else _advice(root)
        raise PackedError(f"{path}: format version {version}, this speakernet reads {newest}; {advice}")
    if min(numbers.values()) < 1:
        raise PackedError(f"{path}: describes {numbers}, expected numbers above 0; {_advice(root)}")
    # Names are data from outside: none may lead elsewhere.
    if strange := [name for name in parts if not PART_NAME.fullmatch(name)]:
        raise PackedError(f"{path}: names the part {strange[0]!r}, expected such as part-0001-of-0004; {_advice(root)}")
    if absent := [name for name in parts if not (root / name).is_dir()]:
        raise PackedError(f"{root}: {', '.join(absent)} is missing, so the corpus is not whole; {_advice(root)}")
    if not parts:
        _check_files(root, numbers["num_samples"])
    return {**numbers, "index_sha256": index_sha256, "parts": parts}


def _check_files(root: Path, num_samples: int) -> None:
    for name in (SAMPLES, INDEX):
        if not (root / name).is_file():
            raise PackedError(f"{root}: {name} is missing, so the corpus is not whole; {_advice(root)}")
    wanted_bytes = len(describe_samples(0)) + 2 * num_samples
    found_bytes = os.stat(root / SAMPLES).st_size  # noqa: PTH116  beside the other stat
    if found_bytes != wanted_bytes:
        raise PackedError(
            f"{root / SAMPLES}: {found_bytes} bytes, expected {wanted_bytes}; the copy is incomplete or damaged; "
            + _advice(root)
        )


def _advice(root: str | Path) -> str:
    return f"copy it again, or remove {root} and pack it again"


def verify(root: str | Path, num_threads: int = 2, show_progress: bool = False) -> list[str]:
    """Read a whole corpus and compare every checksum.

    Returns:
        One sentence for each damaged utterance; empty when the corpus is as it was written.

    Raises:
        PackedError: the corpus cannot even be opened.
    """
    index = read_index(root)
    samples = open_samples(root, index.num_samples)
    rows_per_task = max(1, math.ceil(len(index.names) / 4096))

    def check(first_row: int) -> list[str]:
        problems = []
        for row in range(first_row, min(first_row + rows_per_task, len(index.names))):
            first, last = index.sample_offsets[row : row + 2]
            # CRC-32 runs at the speed of the disk, and one for each utterance says which is damaged.
            if zlib.crc32(samples[first:last].data) != index.checksums[row]:
                problems.append(f"{index.names[row]}: samples {first} to {last} do not match their checksum")
        return problems

    first_rows = range(0, len(index.names), rows_per_task)
    description = f"verify {Path(root).name}" if show_progress else ""
    found = parallel_map(check, first_rows, num_threads, description, total=len(first_rows), unit="block")
    return [problem for some in found for problem in some]


ROWS_PER_TASK = 64


class RamRows(PackedRows):
    """Rows in memory; handed to a worker by handle."""

    def __init__(self, samples: SharedArray, starts: np.ndarray, lengths: np.ndarray, problems: dict[int, str]) -> None:
        super().__init__("the RAM corpus", samples.array, starts, lengths)
        self._shared = samples
        self._problems = problems

    def span(self, row: int) -> tuple[int, int]:
        """See `PackedRows.span`; a file that could not be decoded says why."""
        if row in self._problems:
            raise AudioError(self._problems[row])
        return super().span(row)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "samples": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.samples = self._shared.array


def load_into_ram(
    source: AudioSource, names: StringTable, table: LookupTable, *, num_threads: int = 4, show_progress: bool = False
) -> RamRows:
    """Decode all of `names` into shared int16 memory, at the source's rate."""
    lengths = table.num_samples.copy()
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else np.zeros(0, np.int64)
    # Crops of FLAC come at 87,929 a second from here and at 1,548 from disk (one core, benchmarks/measurements.md).
    samples = SharedArray.allocate((int(lengths.sum()),), np.int16)
    # Several threads write to it, each to rows of its own; assigning is one step for the others.
    problems = dict(table.problems)

    def decode(first_row: int) -> int:
        # A reader holds a scratch buffer: one for each task, not one for all threads.
        reader = source.rows(names, table)
        rows = range(first_row, min(first_row + ROWS_PER_TASK, len(lengths)))
        for row in rows:
            if row in problems:
                continue
            try:
                place = samples.array[starts[row] : starts[row] + lengths[row]]
                have = reader.read_row(row, 0, place)
                if have < lengths[row]:
                    lengths[row] = have
            except AudioError as error:
                problems[row] = str(error)
                lengths[row] = 0
        return len(rows)

    first_rows = range(0, len(lengths), ROWS_PER_TASK)
    description = "decoding into memory" if show_progress else ""
    for _ in parallel_map(decode, first_rows, num_threads, description, total=len(lengths), units_of=int):
        pass
    return RamRows(samples, starts, lengths, problems)
