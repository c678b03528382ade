"""Audio by name, wherever it lies, and the source that is a folder of files. Everything that reads speech reads here.

For single files there is `read`; for training there are row readers (`RowReader`), which fill whole batches from rows
of a list in one call. `opening.open_source` looks at a path and answers with the right source.
"""

import contextlib
import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from speakernet.data.audio import (
    SAMPLE_RATE,
    AudioError,
    crop_of_file,
    open_audio,
    read_audio,
    to_int16,
)
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable, build_lookup_table, default_cache_folder
from speakernet.data.sharing import Shareable

INT16_SCALE = np.float32(1 / 32768)
# Windows opens files as text by default and has no other flag; without O_NONBLOCK opening a pipe would wait.
OPEN_FLAGS = os.O_RDONLY
for _flag in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"):
    OPEN_FLAGS |= getattr(os, _flag, 0)
CAN_READ_AT = hasattr(os, "preadv")  # not on Windows


@dataclass(eq=False)
class AudioCache:
    """Decoded audio by key within a byte budget; the least recently used goes first. Safe with threads.

    Each process has a cache of its own, so the budget is that of one worker.
    """

    budget_bytes: int
    used_bytes: int = 0
    _entries: OrderedDict[Hashable, np.ndarray] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=threading.Lock)

    def admits(self, num_samples: int) -> bool:
        """Whether float32 audio of that length is worth keeping: an eighth of the budget at most."""
        return 0 < 4 * num_samples <= self.budget_bytes // 8

    def get(self, key: Hashable) -> np.ndarray | None:
        """The array, now the most recently used; None if it is not here."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, array: np.ndarray) -> None:
        """Keep an array (read-only from now on) if it fits, and drop the least recently used ones."""
        if array.nbytes > self.budget_bytes:
            return
        array.flags.writeable = False
        with self._lock:
            if (old := self._entries.pop(key, None)) is not None:
                self.used_bytes -= old.nbytes
            while self.used_bytes + array.nbytes > self.budget_bytes:
                self.used_bytes -= self._entries.popitem(last=False)[1].nbytes
            self._entries[key] = array
            self.used_bytes += array.nbytes

    def __reduce__(self) -> Any:
        # A worker starts with an empty one.
        return AudioCache, (self.budget_bytes,)


class AudioSource(ABC):
    """Audio by name at one rate, mono."""

    identity = "files of their own"
    """What two machines compare to find that they hold the same audio, as far as it is known without reading."""
    is_remote = False
    """Whether it is read shard by shard from an address (`shards.py`)."""

    def __init__(self, root: str | Path, sample_rate: int = SAMPLE_RATE) -> None:
        self.root = str(root)
        self.sample_rate = sample_rate
        self._tables: dict[int, LookupTable] = {}

    @abstractmethod
    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """A crop as float32 in -1..1, shape (samples,); shorter at the utterance's end, never wrapped."""

    def blocks(self, name: str, num_samples: int) -> Iterator[np.ndarray]:
        """A whole utterance, at most `num_samples` at a time, so that its length does not matter to memory."""
        for start in itertools.count(0, num_samples):
            # One sample more shows whether there is another block: reading from the end on is an error.
            block = self.read(name, start, num_samples + 1)
            yield block[:num_samples]
            if len(block) <= num_samples:
                return

    def path_of(self, name: str) -> str:
        """An utterance's file; empty if it has none of its own."""
        return ""

    def missing(self, names: StringTable) -> np.ndarray:
        """Rows of `names` that are not here, int64 (rows,)."""
        found = [
            row for row in sorted(self.lookup_table(names).problems) if not Path(self.path_of(names[row])).is_file()
        ]
        return np.array(found, dtype=np.int64)

    def lookup_table(self, names: StringTable, num_threads: int = 8) -> LookupTable:
        """Lengths, rates and channels of the named utterances; those that cannot be read are in its `problems`.

        Asking again with the same object gives the same table.
        """
        key = id(names)
        if key not in self._tables:
            self._tables[key] = self._look_up(names, num_threads)
            # An id is given to another object once its own is gone.
            weakref.finalize(names, self._tables.pop, key, None)
        return self._tables[key]

    @abstractmethod
    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable: ...

    @abstractmethod
    def rows(self, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> "RowReader":
        """A reader of batches of rows of `names`; `cache` keeps short utterances that have to be decoded, by row."""


class RowReader(Shareable, ABC):
    """Fills batches with crops of rows of one list; cheap to send to worker processes."""

    counts: Mapping[str, int] = MappingProxyType({})
    """What a reader of files counts: those that changed, and finds in its cache."""
    is_remote = False

    @abstractmethod
    def read_row(self, row: int, start: int, out: np.ndarray) -> int:
        """Write samples from `start` on into `out` (samples,), float32 in -1..1 or int16; returns their number."""

    def fill(self, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """Fill `out` (batch, samples) with crops; an utterance that ends early is wrapped around from its own start.

        Returns:
            Position in the batch -> what is wrong, for rows that could not be read (their samples are undefined).
        """
        problems = {}
        for place, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            if problem := self.fill_one(row, start, out[place]):
                problems[place] = problem
        return problems

    def fill_one(self, row: int, start: int, target: np.ndarray) -> str:
        """`fill` for one crop; returns what is wrong, empty if nothing is."""
        try:
            have = self.read_row(row, start, target)
            if start and not have:
                # The file became shorter than the place that was drawn in it.
                start, have = 0, self.read_row(row, 0, target)
            if not have:
                return f"row {row}: the utterance holds no samples"
            if have < len(target):
                whole = target[:have].copy()
                if start:
                    # From the utterance's own start, which lies before the crop: read again, for it is rare.
                    whole = np.empty(start + have, dtype=target.dtype)
                    self.read_row(row, 0, whole)
                target[have:] = np.resize(whole, len(target) - have)
        except AudioError as error:
            return str(error)
        return ""


class FolderSource(AudioSource):
    """Files under a folder, as they are."""

    def __init__(
        self,
        root: str | Path,
        sample_rate: int = SAMPLE_RATE,
        *,
        lookup_cache: Path | None = None,
        keep_lookup: bool = True,
        show_progress: bool = False,
    ) -> None:
        super().__init__(root, sample_rate)
        self.lookup_cache = (lookup_cache or default_cache_folder()) if keep_lookup else None
        self.show_progress = show_progress

    def path_of(self, name: str) -> str:
        """See `AudioSource.path_of`."""
        return os.path.join(self.root, name)  # noqa: PTH118

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """See `AudioSource.read`."""
        return read_audio(self.path_of(name), start, num_samples, self.sample_rate)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        return build_lookup_table(
            self.root,
            names,
            sample_rate=self.sample_rate,
            num_threads=num_threads,
            cache_folder=self.lookup_cache,
            show_progress=self.show_progress,
        )

    def rows(self, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> "FolderRows":
        """See `AudioSource.rows`."""
        return FolderRows(self.root, names, table, cache)


@dataclass(eq=False)
class FolderRows(RowReader):
    """Rows of a list read from files; the lookup table spares the header of 16-bit mono WAV files."""

    root: str
    names: StringTable
    table: LookupTable
    cache: AudioCache | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def share(self) -> None:
        """See `Shareable.share`."""
        self.names.share()
        self.table.share()

    def fill(self, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """See `RowReader.fill`. Whole crops of plain files, nearly all, are read here in one loop."""
        # Bytes all the way: joining and decoding a million names costs more than opening the files.
        table, wanted, prefix = self.table, out.shape[1], os.fsencode(os.path.join(self.root, ""))  # noqa: PTH118
        is_whole = table.is_plain(rows) & (table.native_samples[rows] - starts >= wanted) & CAN_READ_AT
        facts = zip(
            is_whole.tolist(),
            self.names.raws(rows),
            (table.data_offsets[rows] + 2 * starts).tolist(),
            table.file_bytes[rows].tolist(),
            table.modified_ns[rows].tolist(),
            strict=True,
        )
        is_float = out.dtype != np.int16
        scratch = np.empty(wanted if is_float else 0, dtype=np.int16)
        problems: dict[int, str] = {}
        for place, (is_simple, name, offset, size, modified_ns) in enumerate(facts):
            crop = out[place]
            if is_simple:
                target = scratch if is_float else crop
                is_simple = False
                # A file that cannot be opened is read again below, where the error gets its message.
                with contextlib.suppress(OSError):
                    # By the system's own calls, without a Python file around them: this is done for every crop.
                    file = os.open(name if name[:1] == b"/" else prefix + name, OPEN_FLAGS)
                    try:
                        status = os.fstat(file)
                        # An offset into another file would read as noise.
                        is_simple = (
                            status.st_size == size
                            and status.st_mtime_ns == modified_ns
                            and os.preadv(file, [target.data], offset) == target.nbytes
                        )
                    finally:
                        os.close(file)
            if not is_simple:
                # Short, compressed, changed or broken.
                if problem := self.fill_one(int(rows[place]), int(starts[place]), crop):
                    problems[place] = problem
            elif is_float:
                # Casting on assignment and scaling in place is faster than one product that casts.
                crop[:] = scratch
                np.multiply(crop, INT16_SCALE, crop)
        return problems

    def read_row(self, row: int, start: int, out: np.ndarray) -> int:
        """See `RowReader.read_row`. Any format, rate and number of channels; short utterances are kept in the cache."""
        path = os.path.join(self.root, self.names[row])  # noqa: PTH118
        rate = self.table.sample_rate
        crop = self.cache.get(row) if self.cache is not None else None
        if self.cache is not None:
            self.counts["cache_misses" if crop is None else "cache_hits"] += 1
        if crop is None:
            known = self.table.info(row)
            with open_audio(path, known) as (file, info):
                if (info.file_bytes, info.modified_ns) != (known.file_bytes, known.modified_ns):
                    self.counts["changed_files"] += 1
                    self.table.put(row, info)
                total = info.num_samples_at(rate)
                if total and start >= total:
                    return 0
                # Plain samples are read at a place; what has to be decoded is kept if it is short.
                if self.cache is not None and not self.table.is_plain(row) and self.cache.admits(total):
                    crop = crop_of_file(file, info, path, 0, None, rate)
                    self.cache.put(row, crop)
                else:
                    crop, start = crop_of_file(file, info, path, start, len(out), rate), 0
        crop = crop[start : start + len(out)]
        out[: len(crop)] = to_int16(crop) if out.dtype == np.int16 else crop
        return len(crop)
