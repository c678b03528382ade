"""Lookup tables: the header facts of a list's files, read by threads and cached on disk.

A table is a handful of arrays with one entry per row of the list (39 bytes a row), so a million
rows cost little to hold and to share. Only headers are read. The cached copy is keyed by the
content of the list, the folder and the rate; every start checks sizes and times of the files and
reads the headers of changed files again.
"""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy import ndarray

from speakernet.data.audio import FFMPEG, SAMPLE_BYTES, AudioError, AudioInfo, audio_info
from speakernet.data.lists import StringTable, TrainingList, read_training_list
from speakernet.data.options import DataOptions
from speakernet.files import FileError, atomic_write, exclusive, parallel_map, read_arrays, reading
from speakernet.terminal import counted

logger = logging.getLogger(__name__)

FORMATS = (
    "other",
    *SAMPLE_BYTES,
    FFMPEG,
)  # Names of the codes in `LookupTable.formats`; "other" must be decoded.
PCM_S16 = FORMATS.index("pcm_s16")
CACHE_VERSION = 2
LIST_VERSION = 2
EMPTY_NPY_BYTES = 128
COMPLETE = "complete"
LONG_ROWS = 1_000_000
LONG_LIST_BYTES = 32 << 20
"""From these sizes on, tables and lists are memory-mapped; smaller ones load in a second and take
little memory."""
ROWS_PER_TASK = 256
COLUMNS = {
    "native_samples": np.int64,
    "sample_rates": np.int32,
    "num_channels": np.int16,
    "formats": np.int8,
    "data_offsets": np.int64,
    "file_bytes": np.int64,
    "modified_ns": np.int64,
}


class LookupTable:
    """Facts about every row of a list, as arrays (rows,)."""

    native_samples: ndarray
    sample_rates: ndarray
    num_channels: ndarray
    formats: ndarray
    data_offsets: ndarray
    file_bytes: ndarray
    modified_ns: ndarray

    def __init__(
        self,
        sample_rate: int,
        columns: Mapping[str, ndarray],
        problems: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.sample_rate = sample_rate
        self.problems = dict(problems)
        for name, dtype in COLUMNS.items():
            setattr(self, name, columns[name].astype(dtype, copy=False))

    @classmethod
    def empty(cls, num_rows: int, sample_rate: int) -> "LookupTable":
        """A table of `num_rows` rows, to be filled by `put`."""
        columns = {name: np.zeros(num_rows, dtype) for name, dtype in COLUMNS.items()}
        return cls(sample_rate, columns)

    def columns(self) -> dict[str, ndarray]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def __len__(self) -> int:
        return len(self.native_samples)

    @property
    def num_samples(self) -> ndarray:
        """Length of each utterance at `sample_rate`, int64 (rows,)."""
        if (self.sample_rates == self.sample_rate).all():
            # The usual case: no second array of a million lengths.
            return self.native_samples
        return -(-self.native_samples * self.sample_rate // np.maximum(self.sample_rates, 1))

    @property
    def seconds(self) -> ndarray:
        """Durations, float64 (rows,)."""
        return self.num_samples / self.sample_rate

    def is_plain(self, rows: int | ndarray | slice = slice(None)) -> ndarray:
        """Whether files are 16-bit mono PCM at `sample_rate`, so that samples are used as they are;
        bool (rows,).
        """
        return (
            (self.formats[rows] == PCM_S16)
            & (self.num_channels[rows] == 1)
            & (self.sample_rates[rows] == self.sample_rate)
        )

    @property
    def all_plain(self) -> bool:
        """Whether every readable file is plain."""
        return bool((self.is_plain() | (self.native_samples == 0)).all())

    def read(self, row: int, file: str) -> None:
        """Fill one row from a file, or note what is wrong with it; several threads may do so."""
        # Assigning to a dictionary and popping from it are atomic for other threads.
        self.problems.pop(row, None)
        info = AudioInfo(0, 0, 0, "", 0, False, 0, 0)
        try:
            info = audio_info(file)
            if not info.num_samples:
                self.problems[row] = (
                    f"{file}: the file has a header but no samples; replace it or leave it out"
                )
        except AudioError as error:
            self.problems[row] = str(error)
        self.put(row, info)

    def put(self, row: int, info: AudioInfo) -> None:
        """Fill one row from a header."""
        self.native_samples[row] = info.num_samples
        self.sample_rates[row] = info.sample_rate
        self.num_channels[row] = info.num_channels
        # 0 is "other": for what has to be decoded, the exact format does not matter here.
        self.formats[row] = FORMATS.index(info.format) if info.format in FORMATS else 0
        self.data_offsets[row] = info.data_offset
        self.file_bytes[row] = info.file_bytes
        self.modified_ns[row] = info.modified_ns

    def info(self, row: int) -> AudioInfo:
        """The header facts of one row."""
        samples, rate, channels, code, offset, size, modified = (
            int(column[row]) for column in self.columns().values()
        )
        return AudioInfo(samples, rate, channels, FORMATS[code], offset, False, size, modified)


def build_lookup_table(
    root: str | Path,
    names: StringTable,
    *,
    sample_rate: int,
    num_threads: int = 8,
    cache_folder: Path | None = None,
    show_progress: bool = False,
) -> LookupTable:
    """Read the header of every `root`/name with `num_threads` threads, or load the cached table.

    Rows that were unreadable before, or whose file has a different size or modification time, are
    read again.
    """
    # What happens at a start. The key is a hash of everything that the table depends on. If a table
    # is cached under it, only the size and time of each file are compared; headers are read of
    # files that have changed, and of those that could not be read before, which may have been
    # repaired. Without a cached table all headers are read. In both cases the threads mostly wait
    # for the disk, so there may be more of them than cores.
    key = hashlib.sha256(f"{CACHE_VERSION}\n{Path(root).resolve()}\n{sample_rate}\n".encode())
    key.update(names.offsets.data)
    key.update(names.content.data)
    path = (cache_folder or Path()) / f"lookup-{key.hexdigest()[:32]}.npz"
    kept = _load(path, len(names), sample_rate) if cache_folder and path.exists() else None
    table = kept or LookupTable.empty(len(names), sample_rate)

    def read_rows(first: int) -> int:
        """Read the headers of a few rows; returns how many had to be read."""
        some = slice(first, first + ROWS_PER_TASK)
        num_read = 0
        facts = zip(table.file_bytes[some].tolist(), table.modified_ns[some].tolist(), strict=True)
        for row, known in enumerate(facts, first):
            file = os.path.join(root, names[row])  # noqa: PTH118  a million times
            if kept and row not in table.problems and _facts_of(file) == known:
                continue
            num_read += 1
            table.read(row, file)
        return num_read

    # Several files per task: handing a task to a thread costs as much as reading a header.
    tasks = range(0, len(names), ROWS_PER_TASK)
    description = "reading headers" if show_progress else ""
    results = parallel_map(
        read_rows, tasks, num_threads, description, total=len(names), units_of=int
    )
    if sum(results) and cache_folder:
        _save(path, table)
    if len(names) < LONG_ROWS:
        return table
    for column in table.columns().values():
        key.update(column.data)
    columns = map_arrays(f"headers {key.hexdigest()}", table.columns)
    return LookupTable(sample_rate, columns, table.problems)


def _facts_of(file: str) -> tuple[int, int] | None:
    """Size and time of a file. Comparing those of a million files takes seconds, reading their
    headers takes minutes.
    """
    try:
        status = os.stat(file)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


# How the processes of a machine share tables. Eight ranks with ten workers each would hold eighty
# copies of everything that is loaded rather than mapped, so what is large is written once to the
# cache folder, under a name that says what it was made of, and mapped by all: the system keeps one
# copy in its page cache. `COMPLETE` is written last, so a half-written table is made again. Nothing
# removes old tables; they are small beside a corpus, and the folder may be deleted at any time.
def map_arrays(key: str, make: Callable[[], Mapping[str, ndarray]]) -> dict[str, ndarray]:
    """Arrays by name, each memory-mapped from the cache folder, so that all processes of a machine
    share one copy.

    The first process makes them while the others wait. The key must contain everything they depend
    on.
    """
    folder = default_cache_folder() / "tables" / hashlib.sha256(key.encode()).hexdigest()[:32]
    with exclusive(folder, waits=True):
        if not (folder / COMPLETE).exists():
            for name, array in make().items():
                with atomic_write(folder / f"{name}.npy", "wb") as file:
                    np.save(file, array, allow_pickle=False)
            (folder / COMPLETE).touch()
    # Copy on write: rows of changed files are private to this process. An empty array cannot be
    # mapped.
    arrays = {}
    for path in folder.glob("*.npy"):
        mode: Any = "c" if path.stat().st_size > EMPTY_NPY_BYTES else None
        arrays[path.stem] = np.load(path, mmap_mode=mode).view(ndarray)
    return arrays


def map_training_list(path: str | Path) -> TrainingList:
    """`read_training_list` for a long list, with memory-mapped columns; it is parsed only if new or
    changed.
    """
    status = Path(path).stat()
    key = f"list {LIST_VERSION} {Path(path).resolve()} {status.st_size} {status.st_mtime_ns}"
    return dataclasses.replace(map_list(key, lambda: read_training_list(path)), source=str(path))


def map_list(key: str, read: Callable[[], TrainingList]) -> TrainingList:
    """A training list with memory-mapped columns; the key must contain everything it depends on."""

    def make() -> dict[str, ndarray]:
        listed = read()
        logger.info(
            "%s is long, so it is cached as a table in %s", listed.source, default_cache_folder()
        )
        facts = StringTable.from_strings([listed.sha256, listed.source])
        columns = {"labels": listed.labels}
        for name, table in {
            "paths": listed.paths,
            "speakers": listed.speakers,
            "facts": facts,
        }.items():
            for part, array in table.columns().items():
                columns[f"{name}_{part}"] = array
        return columns

    columns = map_arrays(key, make)
    paths, speakers, facts = (
        StringTable(columns[f"{name}_content"], columns[f"{name}_offsets"])
        for name in ("paths", "speakers", "facts")
    )
    return TrainingList(paths, columns["labels"], speakers, facts[1], facts[0])


def default_cache_folder() -> Path:
    """Where lookup tables are cached: `SPEAKERNET_CACHE`, else the user's cache folder."""
    if named := os.environ.get("SPEAKERNET_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(base, "speakernet").expanduser()


def _save(path: Path, table: LookupTable) -> None:
    problem_rows = np.array(sorted(table.problems), dtype=np.int64)
    try:
        with atomic_write(path, "wb") as file:
            np.savez(file, allow_pickle=False, problem_rows=problem_rows, **table.columns())
    except OSError as error:
        # If the cache folder is full or read-only, only the next start takes longer.
        logger.warning("The lookup table is not cached: cannot write %s (%s)", path, error)


def _load(path: Path, num_rows: int, sample_rate: int) -> LookupTable | None:
    """Load a cached table; None with a warning if it is damaged."""
    try:
        with reading(path, "a lookup table"):
            stored = read_arrays(path, "a lookup table")
            rows = stored["problem_rows"].astype(np.int64, casting="safe").tolist()
            table = LookupTable(sample_rate, stored, dict.fromkeys(rows, "not read yet"))
            shapes = {column.shape for column in table.columns().values()}
            if shapes != {(num_rows,)} or not set(rows) <= set(range(num_rows)):
                raise FileError(f"{path}: not a table of {num_rows} rows")
            return table
    except FileError as error:
        logger.warning("The cached lookup table is damaged; reading the headers again: %s", error)
        return None


def eligible_rows(data: DataOptions, rows: TrainingList, table: LookupTable) -> ndarray:
    """Check a training list and its files, return the rows to train on, and log how many are left
    out.
    """
    name = rows.source
    num_speakers = len(rows.speakers)
    if 0 < data.num_classes < num_speakers:
        raise ValueError(
            f"data.num_classes is {data.num_classes}, but {name} has {num_speakers} speakers; set "
            "it to 0 to use the number in the list"
        )
    if data.num_classes > num_speakers:
        logger.warning(
            "data.num_classes is %d, but the list has only %d speakers: some outputs never train",
            data.num_classes,
            num_speakers,
        )
    if table.problems:
        _refuse_unreadable(data, table.problems, len(rows))
    is_kept = table.native_samples > 0
    is_short = table.seconds < data.min_seconds
    if count := int((is_kept & is_short).sum()):
        shortest = f"{data.min_seconds:g} s"
        logger.info("%s shorter than %s left out", counted(count, "utterance"), shortest)
    is_kept &= ~is_short
    if not is_kept.any():
        raise ValueError(
            f"{name}: no utterance is long enough for data.min_seconds ({data.min_seconds:g})"
        )
    return np.flatnonzero(is_kept)


def _refuse_unreadable(data: DataOptions, problems: Mapping[int, str], num_rows: int) -> None:
    """Refuse a list with unreadable files, or with too many of them if they are skipped."""
    first = "; ".join(problems[row] for row in sorted(problems)[:3])
    message = f"{len(problems)} of {num_rows} training files cannot be read: {first}"
    if data.on_bad_audio == "error":
        raise AudioError(f"{message}. Fix the list or the files, or set data.on_bad_audio: skip")
    if len(problems) > data.max_bad_share * num_rows:
        raise AudioError(
            f"{message}. That is more than data.max_bad_share ({data.max_bad_share}) allows"
        )
