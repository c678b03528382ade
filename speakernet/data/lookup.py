"""Lookup tables: what the headers of a list's files say, built by threads and kept on disk.

A table is a handful of arrays with one entry a row of the list (35 bytes a row), so a million rows cost little to hold
and to share. Only headers are read. The copy on disk is found again by the content of the list, the folder and the
rate; sizes and times of the files are asked for at every start, and headers of files that changed are read again.
"""

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.audio import SAMPLE_BYTES, AudioError, AudioInfo, audio_info
from speakernet.data.lists import StringTable
from speakernet.data.sharing import Shareable
from speakernet.files import FileError, atomic_write, parallel_map, read_arrays, reading

logger = logging.getLogger(__name__)

FORMATS = ("other", *SAMPLE_BYTES)  # Names of the codes in `LookupTable.formats`; "other" has to be decoded.
PCM_S16 = FORMATS.index("pcm_s16")
CACHE_VERSION = 1
ROWS_PER_TASK = 256
FEWEST_FOR_A_BAR = 5000  # fewer are read before a bar could be looked at
COLUMNS = {
    "native_samples": np.int64,
    "sample_rates": np.int32,
    "num_channels": np.int16,
    "formats": np.int8,
    "data_offsets": np.int64,
    "file_bytes": np.int64,
    "modified_ns": np.int64,
}


class LookupTable(Shareable):
    """Facts about every row of a list, as arrays (rows,)."""

    shared_arrays = tuple(COLUMNS)
    native_samples: np.ndarray
    sample_rates: np.ndarray
    num_channels: np.ndarray
    formats: np.ndarray
    data_offsets: np.ndarray
    file_bytes: np.ndarray
    modified_ns: np.ndarray

    def __init__(
        self, sample_rate: int, columns: Mapping[str, np.ndarray], problems: Mapping[int, str] | None = None
    ) -> None:
        self.sample_rate = sample_rate
        self.problems = dict(problems or {})
        num_rows = columns["native_samples"].shape
        for name, dtype in COLUMNS.items():
            column = columns[name].astype(dtype, copy=False)
            if column.ndim != 1 or column.shape != num_rows:
                raise ValueError("columns of different lengths")
            setattr(self, name, column)

    @classmethod
    def empty(cls, num_rows: int, sample_rate: int) -> "LookupTable":
        """A table of `num_rows` rows to be filled by `put`."""
        return cls(sample_rate, {name: np.zeros(num_rows, dtype) for name, dtype in COLUMNS.items()})

    def __len__(self) -> int:
        return len(self.native_samples)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    @property
    def num_samples(self) -> np.ndarray:
        """Length of each utterance at `sample_rate`, int64 (rows,)."""
        if (self.sample_rates == self.sample_rate).all():
            # Nearly always; no second array of a million lengths.
            return self.native_samples
        return -(-self.native_samples * self.sample_rate // np.maximum(self.sample_rates, 1))

    @property
    def seconds(self) -> np.ndarray:
        """Durations, float64 (rows,)."""
        return self.num_samples / self.sample_rate

    @property
    def lengths_checksum(self) -> int:
        """CRC-32 of `num_samples`, which two machines compare to find that they hold the same recordings."""
        return zlib.crc32(self.num_samples.astype("<i8", copy=False).tobytes())

    def is_plain(self, rows: int | np.ndarray | slice = slice(None)) -> np.ndarray:
        """Whether files are 16-bit mono PCM at `sample_rate`, whose samples are taken as they are; bool (rows,)."""
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
        code = FORMATS.index(info.format) if info.is_direct else 0
        facts = [info.num_samples, info.sample_rate, info.num_channels, code]
        facts += [info.data_offset, info.file_bytes, info.modified_ns]
        for column, value in zip(self.columns.values(), facts, strict=True):
            column[row] = value

    def info(self, row: int) -> AudioInfo:
        """One row as the header's facts."""
        samples, rate, channels, code, offset, size, modified = (int(column[row]) for column in self.columns.values())
        return AudioInfo(samples, rate, channels, FORMATS[code], offset, False, size, modified)


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
    """
    path = cache_folder / f"lookup-{lookup_key(root, names, sample_rate)}.npz" if cache_folder else None
    table = _load(path, len(names), sample_rate) if path is not None and path.exists() else None
    rows = list(range(len(names)))
    if table is None:
        table = LookupTable.empty(len(names), sample_rate)
    else:
        # A million headers take minutes, a million sizes and times seconds.
        rows = _changed_rows(table, str(root), names, num_threads)
    _scan(table, str(root), names, rows, num_threads, show_progress, read_info)
    if rows and path is not None:
        try:
            with atomic_write(path, "wb") as file:
                problem_rows = np.array(sorted(table.problems), dtype=np.int64)
                np.savez(file, allow_pickle=False, problem_rows=problem_rows, **table.columns)
        except OSError as error:
            logger.warning("The lookup table is not kept for the next start: cannot write %s (%s)", path, error)
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
) -> None:
    """Read the headers of `rows` into the table."""

    def read_rows(first: int) -> int:
        some = rows[first : first + ROWS_PER_TASK]
        for row in some:
            # Assigning to and dropping from a dictionary is one step for other threads.
            table.problems.pop(row, None)
            try:
                info = read_info(os.path.join(root, names[row]))  # noqa: PTH118  a million times
                table.put(row, info)
                if not info.num_samples:
                    table.problems[row] = "the file holds no samples (header only)"
            except AudioError as error:
                table.problems[row] = str(error)
                for column in table.columns.values():
                    column[row] = 0
        return len(some)

    # Several files a task: handing a task to a thread costs as much as reading a header.
    tasks = range(0, len(rows), ROWS_PER_TASK)
    description = "reading headers" if show_progress and len(rows) >= FEWEST_FOR_A_BAR else ""
    for _ in parallel_map(read_rows, tasks, num_threads, description, total=len(rows), units_of=int):
        pass


def _changed_rows(table: LookupTable, root: str, names: StringTable, num_threads: int) -> list[int]:
    """Rows to read again: unreadable the last time, gone, or of another size or time now."""

    def changed(first: int) -> list[int]:
        some = slice(first, first + ROWS_PER_TASK)
        facts = zip(table.file_bytes[some].tolist(), table.modified_ns[some].tolist(), strict=True)
        found = []
        for row, known in enumerate(facts, start=first):
            try:
                status = os.stat(os.path.join(root, names[row]))  # noqa: PTH116, PTH118  a million times
                is_same = (status.st_size, status.st_mtime_ns) == known
            except (OSError, ValueError):
                is_same = False
            if not is_same or row in table.problems:
                found.append(row)
        return found

    blocks = parallel_map(changed, range(0, len(table), ROWS_PER_TASK), num_threads)
    return [row for block in blocks for row in block]


def _load(path: Path, num_rows: int, sample_rate: int) -> LookupTable | None:
    """The table on disk; None with a warning if it is damaged."""
    try:
        with reading(path, "a lookup table"):
            stored: dict[str, Any] = dict(read_arrays(path, "a lookup table"))
            problem_rows = stored["problem_rows"].astype(np.int64, casting="safe").tolist()
            table = LookupTable(sample_rate, stored, dict.fromkeys(problem_rows, "not read yet"))
            if len(table) != num_rows or not all(0 <= row < num_rows for row in problem_rows):
                raise FileError(f"{path}: another number of rows than {num_rows}")
    except FileError as error:
        logger.warning("The kept lookup table is damaged, the headers are read again: %s", error)
        return None
    return table
