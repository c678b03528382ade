"""Lookup tables: what the headers of a list's files say, built by threads and kept on disk.

A table is a handful of arrays with one entry a row of the list (35 bytes a row), so a million rows are nothing to hold
and nothing to share. Only headers are read. The copy on disk is found again by the content of the list, the folder and
the rate; sizes and times of the files are asked for at every start, and headers of files that changed are read again.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speakernet.data.audio import SAMPLE_BYTES, AudioError, AudioInfo, audio_info
from speakernet.data.lists import StringTable
from speakernet.data.sharing import SharedArray
from speakernet.files import FileError, atomic_write, parallel_map, read_arrays, reading

logger = logging.getLogger(__name__)

FORMATS = ("other", *SAMPLE_BYTES)  # Names of the codes in `LookupTable.formats`; "other" goes through soundfile.
PCM_S16 = FORMATS.index("pcm_s16")
CACHE_VERSION = 1
ROWS_PER_TASK = 256
FEWEST_FOR_A_BAR = 5000  # read before a bar could be looked at
COLUMNS = {
    "native_samples": np.int64,
    "sample_rates": np.int32,
    "num_channels": np.int16,
    "formats": np.int8,
    "data_offsets": np.int64,
    "file_bytes": np.int64,
    "modified_ns": np.int64,
}


@dataclass
class LookupTable:
    """Facts about every row of a list.

    Attributes:
        sample_rate: the rate that lengths are counted at, Hz.
        columns: arrays (rows,): see the properties of the same names.
        problems: row -> what is wrong with its file; such rows have 0 samples.
    """

    sample_rate: int
    columns: dict[str, SharedArray]
    problems: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_rows: int, sample_rate: int) -> "LookupTable":
        """A table of `num_rows` rows to be filled by `put`."""
        return cls(sample_rate, {name: SharedArray(np.zeros(num_rows, dtype)) for name, dtype in COLUMNS.items()})

    def __len__(self) -> int:
        return len(self.columns["native_samples"].array)

    @property
    def num_samples(self) -> np.ndarray:
        """Length of each utterance at `sample_rate`, int64 (rows,)."""
        native, rates = self.columns["native_samples"].array, self.columns["sample_rates"].array
        if (rates == self.sample_rate).all():
            # Nearly always; no second array of a million lengths.
            return native
        return -(-native * self.sample_rate // np.maximum(rates, 1))

    @property
    def native_samples(self) -> np.ndarray:
        """Length at the file's own rate, int64 (rows,)."""
        return self.columns["native_samples"].array

    @property
    def sample_rates(self) -> np.ndarray:
        """The files' own rates in Hz, int32 (rows,)."""
        return self.columns["sample_rates"].array

    @property
    def num_channels(self) -> np.ndarray:
        """Channels, int16 (rows,)."""
        return self.columns["num_channels"].array

    @property
    def formats(self) -> np.ndarray:
        """Index into `FORMATS`, int8 (rows,)."""
        return self.columns["formats"].array

    @property
    def data_offsets(self) -> np.ndarray:
        """Byte of the first sample, -1 where soundfile decodes; int64 (rows,)."""
        return self.columns["data_offsets"].array

    @property
    def seconds(self) -> np.ndarray:
        """Durations, float64 (rows,)."""
        return self.num_samples / self.sample_rate

    @property
    def lengths_checksum(self) -> int:
        """CRC-32 of `num_samples`, by which two machines know that they hold the same recordings."""
        return zlib.crc32(self.num_samples.astype("<i8", copy=False).tobytes())

    def is_plain(self, rows: int | np.ndarray | slice = slice(None)) -> np.ndarray:
        """Whether files are 16-bit mono PCM at `sample_rate`, whose samples are taken as they lie; bool (rows,)."""
        return (
            (self.formats[rows] == PCM_S16)
            & (self.num_channels[rows] == 1)
            & (self.sample_rates[rows] == self.sample_rate)
        )

    @property
    def all_plain(self) -> bool:
        """Whether every file that can be read is plain."""
        return bool((self.is_plain() | (self.native_samples == 0)).all())

    def put(self, row: int, info: AudioInfo) -> None:
        """Fill one row from a header."""
        values = (
            info.num_samples,
            info.sample_rate,
            info.num_channels,
            FORMATS.index(info.format) if info.is_direct else 0,
            info.data_offset,
            info.file_bytes,
            info.modified_ns,
        )
        for column, value in zip(self.columns.values(), values, strict=True):
            column.array[row] = value

    def info(self, row: int) -> AudioInfo:
        """One row as the header's facts."""
        samples, rate, channels, code, offset, size, modified = (int(c.array[row]) for c in self.columns.values())
        return AudioInfo(samples, rate, channels, FORMATS[code], offset, False, size, modified)

    def share(self) -> "LookupTable":
        """Move the arrays into shared memory; returns itself."""
        for column in self.columns.values():
            column.share()
        return self

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it as plain arrays, for a file of work in parts."""
        return {**{name: column.array for name, column in self.columns.items()}, "problems": pack_texts(self.problems)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], sample_rate: int) -> "LookupTable":
        """The way back; whatever is wrong with the arrays is some error of `files.reading`'s."""
        columns = {name: SharedArray(arrays[name].astype(dtype, copy=False)) for name, dtype in COLUMNS.items()}
        num_rows = len(arrays["native_samples"])
        if any(column.array.shape != (num_rows,) for column in columns.values()):
            raise ValueError("columns of different lengths")
        return cls(sample_rate, columns, unpack_texts(arrays["problems"]))

    def take(self, rows: np.ndarray) -> "LookupTable":
        """Only these rows, in this order."""
        columns = {name: SharedArray(column.array[rows]) for name, column in self.columns.items()}
        problems = {place: self.problems[row] for place, row in enumerate(rows.tolist()) if row in self.problems}
        return LookupTable(self.sample_rate, columns, problems)

    @classmethod
    def joined(cls, tables: Sequence["LookupTable"]) -> "LookupTable":
        """The rows of several tables of one rate, one table's after another's."""
        columns = {
            name: SharedArray(np.concatenate([table.columns[name].array for table in tables])) for name in COLUMNS
        }
        begins = np.cumsum([0, *map(len, tables)]).tolist()
        problems = {
            row + begin: text
            for table, begin in zip(tables, begins, strict=False)
            for row, text in table.problems.items()
        }
        return cls(tables[0].sample_rate, columns, problems)


def pack_texts(texts: Mapping[int, str]) -> np.ndarray:
    """Sentences about rows as bytes, uint8; file names in them need not be text."""
    return np.frombuffer(json.dumps(list(texts.items())).encode(), dtype=np.uint8)


def unpack_texts(content: np.ndarray) -> dict[int, str]:
    """The way back from `pack_texts`."""
    return {int(row): str(text) for row, text in json.loads(content.tobytes())}


def build_lookup_table(
    root: str | Path,
    names: StringTable,
    *,
    sample_rate: int,
    num_threads: int = 8,
    cache_folder: Path | None = None,
    show_progress: bool = False,
    read_info: Callable[[str], AudioInfo] = audio_info,
) -> LookupTable:
    """Read the header of every `root`/name by `num_threads` threads, or take the table kept from the last time.

    Rows that could not be read the last time are read again, and those whose file has another size or time since.

    Args:
        root: folder that the names are relative to.
        names: the files.
        sample_rate: Hz that lengths are counted at.
        num_threads: header reads in flight; more helps on slow and remote disks.
        cache_folder: where tables are kept; None keeps none.
        show_progress: show a progress bar.
        read_info: reads one header; raises AudioError.
    """
    path = cache_folder / f"lookup-{lookup_key(root, names, sample_rate)}.npz" if cache_folder else None
    table = _load(path, len(names), sample_rate) if path else None
    if table is None:
        table = LookupTable.empty(len(names), sample_rate)
        rows: Iterable[int] = range(len(names))
    else:
        # A million headers take minutes, a million sizes and times seconds.
        rows = _changed_rows(table, str(root), names, num_threads)
    if _scan(table, str(root), names, list(rows), num_threads, show_progress, read_info) and path:
        _save(path, table)
    return table


def default_cache_folder() -> Path:
    """Where lookup tables are kept: `SPEAKERNET_CACHE`, else the user's cache folder."""
    named = os.environ.get("SPEAKERNET_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "speakernet"


def lookup_key(root: str | Path, names: StringTable, sample_rate: int) -> str:
    """Name of a table: a hash of everything that it depends on."""
    digest = hashlib.sha256(f"{CACHE_VERSION}\n{Path(root).resolve()}\n{sample_rate}\n".encode())
    digest.update(names.offsets.data)
    digest.update(names.content.data)
    return digest.hexdigest()[:32]


def _scan(
    table: LookupTable,
    root: str,
    names: StringTable,
    rows: list[int],
    num_threads: int,
    show_progress: bool,
    read_info: Callable[[str], AudioInfo],
) -> int:
    """Read the headers of `rows` into the table; returns how many were read."""

    def read_rows(some: list[int]) -> int:
        for row in some:
            try:
                info = read_info(os.path.join(root, names[row]))  # noqa: PTH118  a million times
                problem = "" if info.num_samples else "the file holds no samples (header only)"
                table.put(row, info)
            except AudioError as error:
                problem = str(error)
                for column in table.columns.values():
                    column.array[row] = 0
            # Assigning to and dropping from a dictionary is one step for other threads.
            if problem:
                table.problems[row] = problem
            else:
                table.problems.pop(row, None)
        return len(some)

    # Several files a task: handing a task to a thread costs as much as reading a header.
    tasks = (rows[first : first + ROWS_PER_TASK] for first in range(0, len(rows), ROWS_PER_TASK))
    description = "reading headers" if show_progress and len(rows) >= FEWEST_FOR_A_BAR else ""
    return sum(parallel_map(read_rows, tasks, num_threads, description, total=len(rows), units_of=int))


def _changed_rows(table: LookupTable, root: str, names: StringTable, num_threads: int) -> list[int]:
    """Rows to read again: unreadable the last time, gone, or of another size or time now."""

    def changed(first: int) -> list[int]:
        some = slice(first, first + ROWS_PER_TASK)
        sizes, times = (table.columns[name].array[some].tolist() for name in ("file_bytes", "modified_ns"))
        found = []
        for row, (size, modified_ns) in enumerate(zip(sizes, times, strict=True), start=first):
            try:
                status = os.stat(os.path.join(root, names[row]))  # noqa: PTH116, PTH118  a million times
                is_same = status.st_size == size and status.st_mtime_ns == modified_ns
            except (OSError, ValueError):
                is_same = False
            if not is_same or row in table.problems:
                found.append(row)
        return found

    blocks = parallel_map(changed, range(0, len(table), ROWS_PER_TASK), num_threads)
    return [row for block in blocks for row in block]


def _save(path: Path, table: LookupTable) -> None:
    arrays = {name: column.array for name, column in table.columns.items()}
    problem_rows = np.array(sorted(table.problems), dtype=np.int64)
    try:
        with atomic_write(path, "wb") as file:
            np.savez(file, allow_pickle=False, problem_rows=problem_rows, **arrays)
    except OSError as error:
        logger.warning("The lookup table is not kept for the next start: cannot write %s (%s)", path, error)


def _load(path: Path, num_rows: int, sample_rate: int) -> LookupTable | None:
    """The table on disk; None when there is none or it is damaged (which is said)."""
    if not path.exists():
        return None
    try:
        with reading(path, "a lookup table"):
            stored = read_arrays(path, "a lookup table")
            columns = {name: SharedArray(stored[name].astype(dtype, copy=False)) for name, dtype in COLUMNS.items()}
            problem_rows = stored["problem_rows"].astype(np.int64, casting="safe").tolist()
            if any(column.array.shape != (num_rows,) for column in columns.values()):
                raise FileError(f"{path}: another number of rows than {num_rows}")
            if not all(0 <= row < num_rows for row in problem_rows):
                raise FileError(f"{path}: problems in rows that there are not")
    except FileError as error:
        logger.warning("The kept lookup table is damaged, the headers are read again: %s", error)
        return None
    problems = dict.fromkeys(problem_rows, "not read yet")
    return LookupTable(sample_rate, columns, problems)
