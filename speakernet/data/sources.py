"""Audio by name, wherever it lies, and the source that is a folder of files. Everything that reads speech reads here.

For single files there is `read`; for training there are row readers (`RowReader`), which fill whole batches from rows
of a list in one call. `opening.open_source` looks at a path and answers with the right source.
"""

import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.audio import (
    SAMPLE_RATE,
    AudioError,
    audio_info,
    cannot_open,
    crop_of_file,
    open_audio,
    read_audio,
    to_int16,
)
from speakernet.data.lists import StringTable
from speakernet.data.lookup import (
    FEWEST_FOR_A_BAR,
    ROWS_PER_TASK,
    LookupTable,
    build_lookup_table,
    default_cache_folder,
)
from speakernet.files import parallel_map
from speakernet.terminal import MAX_NAMED


class AudioCache:
    """Arrays by key within a byte budget, with hits and misses counted; safe with threads."""

    def __init__(self, budget_bytes: int) -> None:
        """A cache of at most `budget_bytes` of samples."""
        self.budget_bytes = int(budget_bytes)
        self._entries: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        # An empty cache is a cache all the same: `if cache` asks whether there is one.
        return True

    def admits(self, num_samples: int) -> bool:
        """Whether float32 audio of that length is worth keeping: longer than an eighth of the budget it is not."""
        return 0 < 4 * num_samples <= self.budget_bytes // 8

    def get(self, key: Hashable) -> np.ndarray | None:
        """The array, now the most recently used; None when it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return entry

    def put(self, key: Hashable, array: np.ndarray) -> None:
        """Keep an array (read-only from now on), dropping the least recently used ones to make room."""
        if array.nbytes > self.budget_bytes:
            # It would push out everything and then be pushed out itself.
            return
        array.flags.writeable = False
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.used_bytes -= old.nbytes
            while self.used_bytes + array.nbytes > self.budget_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.used_bytes -= dropped.nbytes
            self._entries[key] = array
            self.used_bytes += array.nbytes

    def counts(self) -> dict[str, int]:
        """Hits and misses so far."""
        return {"cache_hits": self.hits, "cache_misses": self.misses}

    def __getstate__(self) -> dict[str, Any]:
        # A worker starts with an empty cache of its own.
        return {"budget_bytes": self.budget_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["budget_bytes"])  # type: ignore[misc]


INT16_SCALE = np.float32(1 / 32768)
# Windows reads text unless told otherwise and knows no other flag; without O_NONBLOCK opening a pipe would wait.
OPEN_FLAGS = os.O_RDONLY
for _flag in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"):
    OPEN_FLAGS |= getattr(os, _flag, 0)


class AudioSource(ABC):
    """Audio by name at one rate, mono."""

    def __init__(self, root: str | Path, sample_rate: int = SAMPLE_RATE) -> None:
        self.root = str(root)
        self.sample_rate = sample_rate
        self._tables: dict[int, LookupTable] = {}

    @property
    def identity(self) -> str:
        """By what two machines know that they hold the same audio, in words, as far as it is known without reading."""
        return "files of their own"

    @abstractmethod
    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """A crop as float32 in -1..1, shape (samples,); shorter at the utterance's end, never wrapped.

        Raises:
            AudioError: no such utterance, or it cannot be read.
        """

    def blocks(self, name: str, num_samples: int) -> Iterator[np.ndarray]:
        """A whole utterance of any length, so many samples at a time; what it is read for need not fit into memory.

        Raises:
            AudioError: no such utterance, or it cannot be read.
        """
        for start in itertools.count(0, num_samples):
            # One sample more tells whether there is another block: nothing can be read from the end on.
            block = self.read(name, start, num_samples + 1)
            yield block[:num_samples]
            if len(block) <= num_samples:
                return

    def is_cut_off(self, name: str) -> bool:
        """Whether an utterance's header promises more than there is; where there is no header, never."""
        return False

    def lookup_table(self, names: StringTable, num_threads: int = 8) -> LookupTable:
        """Lengths, rates and channels of the named utterances; those that cannot be read are in its `problems`.

        Whoever asks again for the same names (the same object) gets the same table.
        """
        key = id(names)
        if key not in self._tables:
            self._tables[key] = self._look_up(names, num_threads)
            # An id is given to another object once its own is gone.
            weakref.finalize(names, self._tables.pop, key, None)
        return self._tables[key]

    @abstractmethod
    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        """The table, made anew."""

    @abstractmethod
    def missing(self, names: StringTable) -> np.ndarray:
        """Rows of `names` that are not here, int64 (rows,)."""

    @abstractmethod
    def rows(self, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> "RowReader":
        """A reader of batches of rows of `names`, to be handed to workers.

        Args:
            names: the utterances.
            table: their lookup table.
            cache: keeps short utterances that have to be decoded, by row; None keeps nothing.
        """


class RowReader(ABC):
    """Fills batches with crops of rows of one list; cheap to hand to worker processes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def share(self) -> None:
        """Move what is known of the rows into shared memory, for workers that start from nothing."""

    @abstractmethod
    def read_row(self, row: int, start: int, out: np.ndarray) -> int:
        """Write samples `start:start + len(out)` of a row into `out` (samples,), float32 in -1..1 or int16.

        Returns:
            Samples written: fewer than asked at the utterance's end.

        Raises:
            AudioError: the utterance cannot be read.
        """

    def fill(self, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """Fill `out` (batch, samples) with crops; an utterance that ends early is wrapped around from its own start.

        Returns:
            Position in the batch -> what is wrong, for rows that could not be read (their samples are undefined).
        """
        problems: dict[int, str] = {}
        wanted = out.shape[1]
        for position, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            try:
                target = out[position]
                have = self.read_row(row, start, target)
                if have < wanted:
                    self._wrap(row, start, target, have)
            except AudioError as error:
                problems[position] = str(error)
        return problems

    def _wrap(self, row: int, start: int, target: np.ndarray, have: int) -> None:
        """Fill up a crop that ended early by repeating its utterance from the start."""
        if start and not have:
            # The file became shorter than the place that was drawn in it.
            start, have = 0, self.read_row(row, 0, target)
        if not have:
            raise AudioError(f"row {row}: the utterance holds no samples")
        if not start:
            target[have:] = np.resize(target[:have].copy(), len(target) - have)
            return
        # From the utterance's own start, which lies before the crop: read again, for it is rare.
        whole = np.empty(start + have, dtype=target.dtype)
        self.read_row(row, 0, whole)
        target[have:] = np.resize(whole, len(target) - have)


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
        """A source over the files under `root`.

        Args:
            root: the folder; names are relative to it (absolute names stand for themselves).
            sample_rate: Hz of everything read.
            lookup_cache: where lookup tables are kept; None means the user's cache folder.
            keep_lookup: whether lookup tables are kept on disk at all.
            show_progress: progress bars for header scans.
        """
        super().__init__(root, sample_rate)
        self.lookup_cache = (lookup_cache or default_cache_folder()) if keep_lookup else None
        self.show_progress = show_progress

    def path_of(self, name: str) -> str:
        """Where an utterance's file is."""
        return os.path.join(self.root, name)  # noqa: PTH118

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """See `AudioSource.read`."""
        return read_audio(self.path_of(name), start, num_samples, self.sample_rate)

    def is_cut_off(self, name: str) -> bool:
        """See `AudioSource.is_cut_off`."""
        return audio_info(self.path_of(name)).is_truncated

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        return build_lookup_table(
            self.root,
            names,
            sample_rate=self.sample_rate,
            num_threads=num_threads,
            cache_folder=self.lookup_cache,
            show_progress=self.show_progress,
        )

    def missing(self, names: StringTable, num_threads: int = 8) -> np.ndarray:
        """See `AudioSource.missing`."""

        def absent(first: int) -> list[int]:
            rows = range(first, min(first + ROWS_PER_TASK, len(names)))
            return [row for row in rows if not os.path.isfile(self.path_of(names[row]))]  # noqa: PTH113  a million times

        first_rows = range(0, len(names), ROWS_PER_TASK)
        description = "looking for files" if self.show_progress and len(names) >= FEWEST_FOR_A_BAR else ""
        found = parallel_map(absent, first_rows, num_threads, description, total=len(first_rows), unit="block")
        return np.array([row for rows in found for row in rows], dtype=np.int64)

    def rows(self, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> "FolderRows":
        """See `AudioSource.rows`."""
        return FolderRows(self.root, names, table, cache)


class FolderRows(RowReader):
    """Rows of a list read from files; the lookup table spares the header of 16-bit mono WAV files."""

    def __init__(self, root: str, names: StringTable, table: LookupTable, cache: AudioCache | None = None) -> None:
        super().__init__()
        # Bytes all the way: joining and decoding a million names costs more than opening the files.
        self._prefix = os.fsencode(os.path.join(root, ""))  # noqa: PTH118
        self._names = names
        self._table = table
        self.cache = cache
        self._scratch = np.empty(0, dtype=np.int16)

    def share(self) -> None:
        """See `RowReader.share`."""
        self._names.share()
        self._table.share()

    @property
    def needs_decoding(self) -> bool:
        """Whether reading a crop of some file is more than copying samples."""
        return not self._table.all_plain

    def path_of(self, row: int) -> str:
        """The file of a row."""
        return os.fsdecode(os.path.join(self._prefix, self._names.raw(row)))  # noqa: PTH118

    def read_row(self, row: int, start: int, out: np.ndarray) -> int:
        """See `RowReader.read_row`."""
        table = self._table
        if not table.is_plain(row):
            return self._read_other(row, start, out)
        raw = self._names.raw(row)
        try:
            file = os.open(raw if raw[:1] == b"/" else self._prefix + raw, OPEN_FLAGS)
        except OSError as error:
            raise cannot_open(self.path_of(row), error) from error
        try:
            status = os.fstat(file)
            if status.st_size != table.columns["file_bytes"].array[row] or (
                status.st_mtime_ns != table.columns["modified_ns"].array[row]
            ):
                return self._read_changed(row, start, out)
            count = max(0, min(len(out), int(table.native_samples[row]) - start))
            offset = int(table.data_offsets[row]) + 2 * start
            return self._read_plain(file, offset, count, out, row)
        finally:
            os.close(file)

    def fill(self, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """See `RowReader.fill`. The batch's part of the lookup table is taken out at once, not row by row."""
        table, wanted = self._table, out.shape[1]
        is_whole = table.is_plain(rows) & (table.native_samples[rows] - starts >= wanted)
        offsets = (table.data_offsets[rows] + 2 * starts).tolist()
        sizes = table.columns["file_bytes"].array[rows].tolist()
        times = table.columns["modified_ns"].array[rows].tolist()
        is_float = out.dtype != np.int16
        if is_float and len(self._scratch) < wanted:
            self._scratch = np.empty(wanted, dtype=np.int16)
        problems: dict[int, str] = {}
        names = self._names.raws(rows)
        scratch = self._scratch[:wanted]
        for place, whole in enumerate(is_whole.tolist()):
            target = scratch if is_float else out[place]
            if not whole or not self._read_whole(names[place], sizes[place], times[place], offsets[place], target):
                # Short, compressed, changed or broken: the way that looks closer.
                some = slice(place, place + 1)
                for problem in super().fill(rows[some], starts[some], out[some]).values():
                    problems[place] = problem
            elif is_float:
                # Casting on assignment and scaling in place is faster than one product that casts.
                crop = out[place]
                crop[:] = target
                np.multiply(crop, INT16_SCALE, crop)
        return problems

    def _read_whole(self, raw: bytes, size: int, modified_ns: int, offset: int, target: np.ndarray) -> bool:
        """Read a whole crop of a plain file that is still the one that was scanned; False when it is not so simple."""
        try:
            # By the system's own calls, without a Python file around them: this is done for every crop.
            file = os.open(raw if raw[:1] == b"/" else self._prefix + raw, OPEN_FLAGS)
        except OSError:
            return False
        try:
            status = os.fstat(file)
            # The lookup table may be weeks old, and an offset into another file would read as noise.
            if status.st_size != size or status.st_mtime_ns != modified_ns:
                return False
            return read_at(file, target, offset) == target.nbytes
        finally:
            os.close(file)

    def _read_plain(self, file: int, offset: int, count: int, out: np.ndarray, row: int) -> int:
        if out.dtype == np.int16:
            samples = out[:count]
        else:
            if len(self._scratch) < count:
                self._scratch = np.empty(count, dtype=np.int16)
            samples = self._scratch[:count]
        if read_at(file, samples, offset) != 2 * count:
            raise AudioError(f"{self.path_of(row)}: the file became shorter while it was being read")
        if out.dtype != np.int16:
            np.multiply(samples, INT16_SCALE, out=out[:count])
        return count

    def _read_changed(self, row: int, start: int, out: np.ndarray) -> int:
        """The file is not the one whose header was scanned: read its header again."""
        self.counts["changed_files"] += 1
        self._table.put(row, audio_info(self.path_of(row)))
        return self._read_other(row, start, out)

    def _read_other(self, row: int, start: int, out: np.ndarray) -> int:
        """Any format, rate and number of channels; whole short utterances are kept in the cache."""
        path = self.path_of(row)
        rate = self._table.sample_rate
        cached = self.cache.get(row) if self.cache else None
        if cached is None:
            with open_audio(path, self._table.info(row)) as (file, info):
                total = info.num_samples_at(rate)
                if self.cache and self.cache.admits(total):
                    cached = crop_of_file(file, info, path, 0, None, rate)
                    self.cache.put(row, cached)
                else:
                    if total and start >= total:
                        return 0
                    crop = crop_of_file(file, info, path, start, len(out), rate)
        if cached is not None:
            crop = cached[start : start + len(out)]
        out[: len(crop)] = to_int16(crop) if out.dtype == np.int16 else crop
        return len(crop)


def read_at(file: int, samples: np.ndarray, offset: int) -> int:
    """Bytes read into `samples` from `offset` of an open file."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [samples.data], offset) if len(samples) else 0
    os.lseek(file, offset, os.SEEK_SET)
    content = os.read(file, samples.nbytes)
    samples[: len(content) // 2] = np.frombuffer(content[: len(content) // 2 * 2], dtype="<i2")
    return len(content)


def list_names(names: Sequence[str], rows: np.ndarray, limit: int = MAX_NAMED) -> str:
    """The first few names of `rows` for a message, and how many more there are."""
    shown = ", ".join(names[int(row)] for row in rows[:limit])
    return shown if len(rows) <= limit else f"{shown} and {len(rows) - limit} more"
