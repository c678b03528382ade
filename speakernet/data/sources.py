"""Audio by name, wherever it is stored, and the source for a folder of files. All speech is read
through this file.

`read` is for single files; for training, row readers (`RowReader`) fill whole batches from rows of
a list in one call. `opening.open_source` returns the right source for a path.
"""

import contextlib
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from speakernet.data.audio import (
    SAMPLE_RATE,
    AudioError,
    crop_of_file,
    open_audio,
    read_audio,
    to_int16,
)
from speakernet.data.folders import UnicodeNames
from speakernet.data.lists import ByTable, StringTable, TrainingList
from speakernet.data.lookup import LookupTable, build_lookup_table, default_cache_folder
from speakernet.files import is_address
from speakernet.machine.facts import usable_memory_bytes

if TYPE_CHECKING:
    from speakernet.data.sampling import EpochPlan, Sampler

# How one crop is read. Nearly every crop of a training run comes from a plain file (16 bits, one
# channel, at the corpus's rate), and the lookup table already says where its samples begin. So a
# crop costs four system calls: open, fstat, preadv into the batch, close. There is no Python file
# object, no header and no path of type str; each of those would cost as much as the read itself
# (21 us in all, against 117 us through soundfile). The fstat is what makes this safe: a file whose
# size or time differ from the table's has been replaced, and its old offset could lie anywhere in
# the new file. Such a file, and every other one (short, compressed, stereo, at another rate,
# broken), takes the long way through `open_audio`, one crop at a time, where errors get their
# messages. A crop that could be read neither way is reported by its place in the batch, and the
# caller decides whether another utterance replaces it.
#
# An utterance shorter than the crop wraps around to its start, as VoxCeleb practice does. Padding
# with silence would be the other choice; we never measured which trains better.

INT16_SCALE = np.float32(1 / 32768)
# Windows opens files as text by default and has only the first flag; without O_NONBLOCK, opening a
# pipe would block.
OPEN_FLAGS = os.O_RDONLY
for _flag in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"):
    OPEN_FLAGS |= getattr(os, _flag, 0)
CAN_READ_AT = hasattr(os, "preadv")  # not on Windows


@dataclass(eq=False)
class AudioCache:
    """Decoded audio by key within a byte budget; evicts the least recently used first. Thread-safe.

    Each process has its own cache, so the budget is per worker.
    """

    budget_bytes: int
    used_bytes: int = 0
    _entries: OrderedDict[Hashable, ndarray] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=threading.Lock)

    def admits(self, num_samples: int) -> bool:
        """Whether float32 audio of that length may be kept: at most an eighth of the budget."""
        return 0 < 4 * num_samples <= self.budget_bytes // 8

    def get(self, key: Hashable) -> ndarray | None:
        """The array, now the most recently used; None if it is not cached."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, array: ndarray) -> None:
        """Keep an array (read-only from then on) if it fits, and drop the least recently used
        ones.
        """
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
        # A worker starts with an empty cache.
        return AudioCache, (self.budget_bytes,)


class AudioSource(ABC):
    """Mono audio by name, at one rate."""

    def __init__(self, root: str | Path, sample_rate: int = SAMPLE_RATE) -> None:
        self.root = str(root)
        self.sample_rate = sample_rate
        self._tables = ByTable[LookupTable]()
        self._levels = ByTable[ndarray]()
        self.warnings: dict[str, str] = {}
        """Of utterances that were read, by name: what a user should know about them."""

    @property
    def identity(self) -> str:
        """Compared between machines to check that they have the same audio, as far as is known
        without reading it.
        """
        return "files of their own"

    @property
    def place(self) -> str:
        """Where the names are looked up: in two sources of one place, the same name is the same
        recording.
        """
        return self.root if is_address(self.root) else str(Path(self.root).resolve())

    @abstractmethod
    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> ndarray:
        """Read a crop as float32 in -1..1, shape (samples,); shorter at the utterance's end, never
        wrapped.
        """

    def blocks(self, name: str, num_samples: int) -> Iterator[ndarray]:
        """A whole utterance, at most `num_samples` at a time, so that memory does not depend on its
        length.
        """
        for start in itertools.count(0, num_samples):
            # One more sample shows whether there is another block: starting a read at the end is an
            # error.
            block = self.read(name, start, num_samples + 1)
            yield block[:num_samples]
            if len(block) <= num_samples:
                return

    def path_of(self, name: str) -> str:
        """An utterance's file; empty if it does not have its own."""
        return ""

    def missing(self, names: StringTable) -> ndarray:
        """Rows of `names` whose audio is missing, int64 (rows,)."""
        problems = sorted(self.lookup_table(names).problems)
        rows = [row for row in problems if not Path(self.path_of(names[row])).is_file()]
        return np.array(rows, dtype=np.int64)

    def lookup_table(self, names: StringTable, num_threads: int = 8) -> LookupTable:
        """Lengths, rates and channels of the named utterances; unreadable ones are in its
        `problems`.

        The same `names` object gives the same table.
        """
        if names not in self._tables:
            self._tables[names] = self._look_up(names, num_threads)
        return self._tables[names]

    def levels_db(self, names: StringTable) -> ndarray:
        """Mean power of the named utterances in dB relative to full scale, float32 (utterances,),
        which whoever embeds them fills in; NaN until then.

        The same `names` object gives the same array.
        """
        return self._levels.setdefault(names, np.full(len(names), np.nan, dtype=np.float32))

    @abstractmethod
    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable: ...

    def rows(
        self, names: StringTable, table: LookupTable, cache: AudioCache | None = None
    ) -> "RowReader":
        """A reader of batches of rows of `names`; `cache` keeps short utterances that must be
        decoded, by row. Sources that change recordings as a whole have none.
        """
        raise ValueError("training reads crops of whole recordings, not of changed ones")

    def apart(self, training: TrainingList) -> list[TrainingList]:
        """Split a list of this source: one list per corpus, with the corpus's own names."""
        return [training]

    def order(
        self, sampler: "Sampler", training: TrainingList, table: LookupTable, num_streams: int
    ) -> None:
        """Give a sampler the order in which this source must be read; files have none."""
        return

    def summary(self, training: TrainingList, plan: "EpochPlan") -> str:
        """What an epoch draws from each of several corpora, for the log; else empty."""
        return ""


class RowReader(ABC):
    """Fills batches with crops of rows of one list; cheap to send to worker processes."""

    counts: Mapping[str, int] = MappingProxyType({})
    """Counts of a reader of files: changed files, cache hits and misses."""
    is_remote = False
    """Whether audio is read shard by shard from an address (`shards.py`)."""

    @property
    def is_on_disk(self) -> bool:
        """Whether its audio is larger than memory, so that reading ahead pays."""
        return False

    def touch(self, rows: ndarray, starts: ndarray, counts: ndarray) -> None:
        """Read the `counts` samples from `starts` on of some rows and discard them, so that they
        are in the system's page cache; whoever needs them reports problems.
        """
        return

    def ahead(
        self,
        maker: Any,
        num_in_flight: int,
        choose: Callable[[ndarray], ndarray] = np.asarray,
    ) -> Any:
        """Wrap `maker` (a `CropMaker`, which prepares `num_in_flight` batches at once) so that what
        must be fetched is there in time. `choose` finds the rows of this reader among those of a
        request.
        """
        return maker

    @abstractmethod
    def read_row(self, row: int, start: int, out: ndarray) -> int:
        """Write samples from `start` on to `out` (samples,), float32 in -1..1 or int16; returns
        their number.
        """

    def fill(self, rows: ndarray, starts: ndarray, out: ndarray) -> dict[int, str]:
        """Fill `out` (batch, samples) with crops; an utterance that ends early wraps around to its
        start.

        Returns:
            Position in the batch -> problem, for rows that could not be read (their samples are
            undefined).
        """
        problems = {}
        for place, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            if problem := self.fill_one(row, start, out[place]):
                problems[place] = problem
        return problems

    def fill_one(self, row: int, start: int, target: ndarray) -> str:
        """`fill` for one crop; returns the problem, empty if there is none."""
        try:
            count = self.read_row(row, start, target)
            if start and not count:
                # The file has become too short for the start that was drawn.
                start = 0
                count = self.read_row(row, 0, target)
            if not count:
                return f"row {row}: the utterance has no samples"
            if count < len(target):
                # Read again from its start, which is rare.
                whole = np.empty(start + count, dtype=target.dtype)
                self.read_row(row, 0, whole)
                target[count:] = np.resize(whole, len(target) - count)
        except AudioError as error:
            return str(error)
        return ""


def read_plain(path: bytes, target: ndarray, offset: int, num_bytes: int, modified_ns: int) -> bool:
    """Fill int16 `target` from byte `offset` of a file; False if it cannot be read or has changed:
    it no longer has `num_bytes` or was modified later.
    """
    try:
        file = os.open(path, OPEN_FLAGS)
    except OSError:
        return False
    try:
        status = os.fstat(file)
        if status.st_size != num_bytes or status.st_mtime_ns != modified_ns:
            return False
        return os.preadv(file, [target.data], offset) == target.nbytes
    except OSError:
        return False
    finally:
        os.close(file)


class FolderSource(AudioSource):
    """Audio files below a folder."""

    def __init__(
        self,
        root: str | Path,
        sample_rate: int = SAMPLE_RATE,
        *,
        keep_lookup: bool = True,
        show_progress: bool = False,
    ) -> None:
        super().__init__(root, sample_rate)
        self.lookup_cache = default_cache_folder() if keep_lookup else None
        self.show_progress = show_progress
        self._unicode = UnicodeNames(self.root)

    def path_of(self, name: str) -> str:
        """See `AudioSource.path_of`."""
        return os.path.join(self.root, self._unicode.on_disk(name))  # noqa: PTH118

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> ndarray:
        """See `AudioSource.read`."""
        return read_audio(self.path_of(name), start, num_samples, self.sample_rate)

    def _files_of(self, names: StringTable) -> StringTable:
        """The file of each name, relative to the folder."""
        return self._unicode.table(names)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        return build_lookup_table(
            self.root,
            self._files_of(names),
            sample_rate=self.sample_rate,
            num_threads=num_threads,
            cache_folder=self.lookup_cache,
            show_progress=self.show_progress,
        )

    def rows(
        self, names: StringTable, table: LookupTable, cache: AudioCache | None = None
    ) -> "FolderRows":
        """See `AudioSource.rows`."""
        return FolderRows(self.root, self._files_of(names), table, cache)


@dataclass(eq=False)
class FolderRows(RowReader):
    """Rows of a list read from files; with the lookup table, headers of 16-bit mono WAV files are
    not read again.
    """

    root: str
    names: StringTable
    table: LookupTable
    cache: AudioCache | None = None
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_on_disk(self) -> bool:
        """See `RowReader.is_on_disk`."""
        return CAN_READ_AT and int(self.table.file_bytes.sum()) > usable_memory_bytes()

    def touch(self, rows: ndarray, starts: ndarray, counts: ndarray) -> None:
        """See `RowReader.touch`. Of a file that has to be decoded or resampled, all is read."""
        is_plain = self.table.is_plain(rows)
        offsets = np.where(is_plain, self.table.data_offsets[rows] + 2 * starts, 0)
        sizes = np.where(is_plain, 2 * counts, self.table.file_bytes[rows])
        for row, offset, size in zip(rows.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            with contextlib.suppress(OSError):
                file = os.open(os.path.join(self.root, self.names[row]), OPEN_FLAGS)  # noqa: PTH118
                try:
                    os.pread(file, size, offset)
                finally:
                    os.close(file)

    def fill(self, rows: ndarray, starts: ndarray, out: ndarray) -> dict[int, str]:
        """See `RowReader.fill`. Whole crops of plain files (nearly all) are read here in one
        loop.
        """
        table = self.table
        num_samples = out.shape[1]
        is_whole = table.is_plain(rows) & (table.native_samples[rows] - starts >= num_samples)
        offsets = table.data_offsets[rows] + 2 * starts
        facts = np.stack([offsets, table.file_bytes[rows], table.modified_ns[rows]], axis=1)
        is_int16 = out.dtype == np.int16
        scratch = np.empty(num_samples, dtype=np.int16)
        # Paths stay bytes: joining and decoding a million names would cost more than opening the
        # files.
        prefix = os.fsencode(os.path.join(self.root, ""))  # noqa: PTH118
        crops = zip(
            (is_whole & CAN_READ_AT).tolist(), self.names.raws(rows), facts.tolist(), strict=True
        )
        problems: dict[int, str] = {}
        for place, (is_simple, name, places) in enumerate(crops):
            crop = out[place]
            path = name if name[:1] == b"/" else prefix + name
            if is_simple and read_plain(path, crop if is_int16 else scratch, *places):
                if not is_int16:
                    # Casting on assignment and scaling in place is faster than a product that
                    # casts.
                    crop[:] = scratch
                    np.multiply(crop, INT16_SCALE, crop)
            elif problem := self.fill_one(int(rows[place]), int(starts[place]), crop):
                problems[place] = problem
        return problems

    def read_row(self, row: int, start: int, out: ndarray) -> int:
        """See `RowReader.read_row`. Any format, rate and number of channels; short utterances are
        cached.
        """
        cache = self.cache
        whole = cache.get(row) if cache else None
        if cache:
            self.counts["cache_misses" if whole is None else "cache_hits"] += 1
        if whole is None:
            path = os.path.join(self.root, self.names[row])  # noqa: PTH118
            rate = self.table.sample_rate
            known = self.table.info(row)
            with open_audio(path, known) as (file, info):
                if (info.file_bytes, info.modified_ns) != (known.file_bytes, known.modified_ns):
                    self.counts["changed_files"] += 1
                    self.table.put(row, info)
                total = info.num_samples_at(rate)
                if start >= total > 0:
                    return 0
                # Plain samples are read at their offset; decoded audio is cached if it is short.
                if cache and cache.admits(total) and not self.table.is_plain(row):
                    whole = crop_of_file(file, info, path, 0, None, rate)
                    cache.put(row, whole)
                else:
                    whole = crop_of_file(file, info, path, start, len(out), rate)
                    start = 0
        crop = whole[start : start + len(out)]
        out[: len(crop)] = to_int16(crop) if out.dtype == np.int16 else crop
        return len(crop)
