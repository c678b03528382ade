"""A packed corpus at an address (`s3://…`, `gs://…`, `https://…`, `file://…`), read through a
bounded cache of shards.

The description and indices (`corpus.json`, each shard's `index.npz`) are copied once and read as
for a corpus on disk. Samples are fetched one shard at a time: when a row of it is read, and ahead
of that by threads that know the epoch's order. When the cache is full, the least recently used
shards are removed. All processes of a machine share the cache; while one of them fetches a shard,
the others wait for it. Rows, batches and resuming are as in `packed.py`.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy import ndarray

from speakernet import distributed
from speakernet.data.audio import SAMPLE_RATE
from speakernet.data.batches import BatchRequest, CropMaker, Made, WrappedMaker
from speakernet.data.lists import StringTable, TrainingList
from speakernet.data.lookup import LookupTable, default_cache_folder
from speakernet.data.options import DataOptions
from speakernet.data.packed import (
    DESCRIPTION,
    INDEX,
    SAMPLES,
    JoinedSamples,
    PackedError,
    PackedIndex,
    PackedRows,
    PackedSource,
    find_damage,
    open_index,
    read_description,
    read_index,
    read_samples,
)
from speakernet.data.packing import HEADER_BYTES
from speakernet.data.sampling import BLOCK, SHARDS, Parts, Sampler
from speakernet.data.sources import OPEN_FLAGS, AudioCache
from speakernet.data.stores import PARTIAL, ShardError, Store
from speakernet.files import exclusive, hold_lock, human_bytes, parallel_map, sha256_of
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

NUM_THREADS = 8
HELD = "samples"
SPACE_LOCK = "space.lock"
FIRST_BLOCK = 1024
"""Utterances in the first block of an epoch: training starts once the first shards have arrived,
not the whole buffer."""


# One cache for all processes of a machine, without a server: the files themselves are the state.
# A shard that is complete has its name; its time stamp is when it was last used. Whoever needs a
# missing one takes the lock of that shard and fetches it while the others wait for the lock, then
# find it there. Space is made under a lock of its own, before the fetch, by an empty partial file
# that counts as the whole shard, so that two fetches cannot both take the last free gigabyte. A
# file that somebody has open stays readable after it was removed, so readers need no lock at all.
@dataclass(frozen=True)
class ShardCache:
    """The samples of a corpus's shards on this disk, by shard number, at most `budget_bytes` in
    total.
    """

    address: str
    folder: Path
    """Holds the corpus's description and indices, and the cached samples."""
    names: tuple[str, ...]
    num_samples: ndarray
    budget_bytes: int

    def bytes_of(self, shard: int) -> int:
        """Size of a shard's file of samples."""
        return HEADER_BYTES + 2 * int(self.num_samples[shard])

    def path(self, shard: int) -> Path:
        """Where a shard's samples are if they are cached."""
        return self.folder / HELD / f"{shard}.npy"

    def touch(self, shard: int) -> bool:
        """Mark a shard as used; False if it is not cached, or only a part of it."""
        path = self.path(shard)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == self.bytes_of(shard):
                os.utime(path)
                return True
            # Damaged on this disk: it is fetched again.
            logger.warning(
                "%s: %d bytes, expected %d", path, path.stat().st_size, self.bytes_of(shard)
            )
        return False

    def hold(self, shard: int) -> None:
        """Fetch a shard if it is not cached; one process or thread does so while the others
        wait.
        """
        if self.touch(shard):
            return
        path = self.path(shard)
        with hold_lock(path.with_suffix(".lock"), "", waits=True):
            if self.touch(shard):
                return
            self._make_space(shard)
            name = f"{self.names[shard]}/{SAMPLES}".removeprefix("/")
            Store(self.address).fetch(name, path, lambda partial: self._problem(shard, partial))

    def open(self, shard: int) -> int:
        """Open the file of a shard's samples; the caller closes it."""
        while True:
            # Another process may remove the file at any moment, but an open file stays readable.
            with contextlib.suppress(FileNotFoundError):
                file = os.open(self.path(shard), OPEN_FLAGS)
                if os.fstat(file).st_size == self.bytes_of(shard):
                    return file
                os.close(file)
            self.hold(shard)

    def _make_space(self, shard: int) -> None:
        """Remove the least recently used shards until a shard fits, and reserve its space."""
        folder = self.folder / HELD
        with hold_lock(self.folder / SPACE_LOCK, "", waits=True):
            for partial in folder.glob(f"*{PARTIAL}"):
                # A partial file without a lock was left by a killed process.
                with (
                    contextlib.suppress(ValueError),
                    hold_lock(partial.with_suffix("").with_suffix(".lock"), ""),
                ):
                    partial.unlink(missing_ok=True)
            self.path(shard).with_name(f"{shard}.npy{PARTIAL}").touch()
            files = []
            for path in folder.glob("*.npy*"):
                size = self.bytes_of(int(path.name.partition(".")[0]))
                # Another process may rename or remove a file in the meantime.
                with contextlib.suppress(FileNotFoundError):
                    files.append((path.stat().st_mtime_ns, path, size))
            total = sum(size for _, _, size in files)
            for _, path, size in sorted(files):
                if total <= self.budget_bytes:
                    return
                if path.suffix != PARTIAL:
                    path.unlink(missing_ok=True)
                    total -= size

    def _problem(self, shard: int, partial: Path) -> str:
        """What is wrong with a file fetched as a shard's samples; empty if nothing."""
        size = partial.stat().st_size
        if size != self.bytes_of(shard):
            return f"{size} bytes arrived, expected {self.bytes_of(shard)}"
        index = read_index(self.folder / self.names[shard])
        samples = np.memmap(partial, np.int16, "r", HEADER_BYTES)
        problems = find_damage(index, samples.view(ndarray), range(len(index.names)))
        return f"altered since it was packed: {problems[0]}" if problems else ""


@dataclass(frozen=True)
class CachedShard:
    """A shard's int16 samples (samples,), sliced like an array; every slice is a copy, from the
    cache.
    """

    cache: ShardCache
    shard: int

    def __len__(self) -> int:
        return int(self.cache.num_samples[self.shard])

    def __getitem__(self, some: slice) -> ndarray:
        """A copy of the samples; ShardError if the shard cannot be fetched."""
        first, stop, _ = some.indices(len(self))
        # Opened for each read: a shard may have been removed since the last one.
        file = self.cache.open(self.shard)
        try:
            return read_samples(
                file, self.cache.path(self.shard), HEADER_BYTES + 2 * first, stop - first
            )
        finally:
            os.close(file)


class RemoteSource(PackedSource):
    """The utterances of a packed corpus at an address."""

    samples: JoinedSamples

    def __init__(
        self, root: str, sample_rate: int = SAMPLE_RATE, cache_gigabytes: float | None = None
    ) -> None:
        """Copy and check the description and indices at an address; no samples are fetched.

        Args:
            root: the address.
            sample_rate: Hz.
            cache_gigabytes: disk space for samples, shared by all processes; None: the option's
                default.
        """
        if cache_gigabytes is None:
            cache_gigabytes = DataOptions().shard_cache_gigabytes
        self._folder = (
            default_cache_folder() / "shards" / hashlib.sha256(root.encode()).hexdigest()[:24]
        )
        self._budget_bytes = int(cache_gigabytes * (1 << 30))
        super().__init__(root, sample_rate)
        self.is_mapped = False

    def _read_index(self) -> PackedIndex:
        """Copy the description and the shards' indices if this disk does not have the current
        ones.
        """
        folder = self._folder
        store = Store(self.root)
        with exclusive(folder, waits=True):
            newest = folder / "newest"
            # Fetched at every start, because the corpus may have been packed again; it is small.
            store.fetch(DESCRIPTION, newest)
            kept = folder / DESCRIPTION
            if not kept.is_file() or kept.read_bytes() != newest.read_bytes():
                # The rest belongs to a corpus that was packed to this address before.
                for path in folder.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                (folder / INDEX).unlink(missing_ok=True)
            newest.replace(kept)
            description = read_description(folder)
            digests = description.shards or {"": description.index_sha256}

            def copy(name: str) -> None:
                _copy_index(store, name, folder / name, digests[name])

            list(parallel_map(copy, digests, NUM_THREADS))
            (folder / HELD).mkdir(exist_ok=True)
        return open_index(folder)

    def _open_samples(self) -> JoinedSamples:
        names = tuple(read_description(self._folder).shards) or ("",)
        sizes = [read_description(self._folder / name).num_samples for name in names]
        self.shards = ShardCache(
            self.root, self._folder, names, np.array(sizes), self._budget_bytes
        )
        return JoinedSamples([CachedShard(self.shards, shard) for shard in range(len(names))])

    def shards_of(self, table: LookupTable) -> ndarray:
        """The shard of each row of a table of this source, int32 (rows,)."""
        ends = np.cumsum(self.shards.num_samples)
        return np.searchsorted(ends, table.data_offsets // 2, side="right").astype(np.int32)

    def order(
        self, sampler: Sampler, training: TrainingList, table: LookupTable, num_streams: int
    ) -> None:
        """See `AudioSource.order`: shard by shard. Refuses blocks of more shards than the cache can
        hold.
        """
        shards = self.shards_of(table)
        buffer = sampler.options.shuffle_buffer
        # One stream for balanced batches: if each process dealt its own, a batch could contain a
        # speaker twice.
        num_streams = 1 if sampler.needs_many_speakers else num_streams
        sampler.divide(functools.partial(plan_streams, sampler, shards, num_streams))
        sizes = [self.shards.bytes_of(shard) for shard in range(len(self.shards.names))]
        # A block begins and ends within a shard; each stream of this machine has its own block.
        most = math.ceil(buffer / num_streams * len(sizes) / len(sampler.eligible)) + 1
        num_blocks = min(num_streams, distributed.local_world_size())
        needed = min(most * num_blocks * max(sizes), sum(sizes))
        if needed > self._budget_bytes:
            raise ValueError(
                f"data.shuffle_buffer: {buffer} utterances of {self.root} need shards of "
                f"{human_bytes(needed)}, but data.shard_cache_gigabytes allows "
                f"{human_bytes(self._budget_bytes)}, so shards would be fetched repeatedly; lower "
                "the buffer or raise the cache"
            )
        logger.info(
            "%s: %d shards, shuffled in blocks of %d utterances", self.root, len(sizes), buffer
        )

    def rows(
        self, names: StringTable, table: LookupTable, cache: AudioCache | None = None
    ) -> "RemoteRows":
        """See `AudioSource.rows`."""
        offsets, lengths = table.data_offsets, table.native_samples
        return RemoteRows(self.root, self.samples, offsets, lengths, False, cache=self.shards)


# Why the order is shuffled in blocks. To read one crop at an address, its whole shard has to be
# fetched, about a gigabyte, so neighbours in the order must come from few shards. The shards are in
# random order, and only rows near each other in it are shuffled together: with 4,096 utterances to
# a shard, the 65,536 of the default buffer are sixteen shards. We do not know whether that mixes
# every corpus well enough; packing deals a list out over the shards (`stores.pack_to_address`), so
# that each has many speakers.
def plan_streams(sampler: Sampler, shards: ndarray, num_streams: int, *turn: int) -> Parts:
    """An epoch of a corpus that is read shard by shard, with one stream per process.

    The shards come in random order, and each stream gets a run of them (a shard at the border is in
    two). Each stream is cut into blocks that hold `data.shuffle_buffer` utterances over all
    streams, and each block is shuffled, or dealt into groups, like a whole corpus.

    Args:
        sampler: orders a block.
        shards: the shard of each row of the list, int32 (rows,).
        num_streams: 1, or the number of processes.
        turn: the epoch; for one of several corpora, also the number of the pass over it in this
            epoch. Both are counted from 0.
    """
    seed = sampler.seed
    eligible = sampler.eligible
    buffer = sampler.options.shuffle_buffer
    place_of_shard = numpy_generator(seed, SHARDS, *turn).permutation(int(shards.max()) + 1)
    places = place_of_shard[shards[eligible]]
    # Stable, because the order of equal places could otherwise differ between versions of NumPy.
    rows = eligible[np.argsort(places, kind="stable")]
    rows = sampler.limit_speakers(rows)
    first_block = buffer if sampler.needs_many_speakers else min(FIRST_BLOCK, buffer)
    streams = []
    for stream in range(num_streams):
        start = len(rows) * stream // num_streams
        stop = len(rows) * (stream + 1) // num_streams
        size = max(1, first_block // num_streams)
        blocks: list[ndarray] = []
        # A stream without rows has one empty block.
        while start < stop or not blocks:
            random = numpy_generator(seed, BLOCK, *turn, stream, len(blocks))
            blocks.append(sampler.units_of(random, rows[start : min(start + size, stop)]))
            start += size
            # Blocks double in size, so that training starts after a few shards and soon mixes a
            # whole buffer.
            size = min(2 * size, max(1, buffer // num_streams))
        streams.append(np.concatenate(blocks))
    ends = np.arange(1, num_streams + 1) / num_streams  # every stream has the same share of a batch
    return Parts(streams, ends)


def _copy_index(store: Store, name: str, folder: Path, digest: str) -> None:
    """Copy a shard's description and index, unless they are in `folder` undamaged."""
    with contextlib.suppress(OSError, PackedError):
        if sha256_of(folder / INDEX) == digest and read_description(folder):
            return
    folder.mkdir(exist_ok=True)
    prefix = f"{name}/" if name else ""
    if name:
        store.fetch(prefix + DESCRIPTION, folder / DESCRIPTION)

    def problem_of(path: Path) -> str:
        if sha256_of(path) == digest:
            return ""
        return f"altered since it was packed: not the SHA-256 in {DESCRIPTION}"

    store.fetch(prefix + INDEX, folder / INDEX, problem_of)


@dataclass(eq=False)
class RemoteRows(PackedRows):
    """Rows of a list read from a packed corpus at an address."""

    is_remote = True
    samples: JoinedSamples
    cache: ShardCache = field(kw_only=True)

    def shards_of(self, rows: ndarray) -> list[int]:
        """The shards of some rows, each once."""
        starts = self.starts_of(rows[self.lengths[rows] > 0])
        shards = np.searchsorted(self.samples.begins, starts, side="right") - 1
        return np.unique(shards).tolist()

    def fill(self, rows: ndarray, starts: ndarray, out: ndarray) -> dict[int, str]:
        """See `RowReader.fill`. A shard that cannot be fetched is an error, not a broken
        utterance.
        """
        for shard in self.shards_of(rows):
            self.cache.hold(shard)
        return super().fill(rows, starts, out)

    def ahead(
        self,
        maker: CropMaker,
        num_in_flight: int,
        choose: Callable[[ndarray], ndarray] = np.asarray,
    ) -> "ShardsAhead":
        """See `RowReader.ahead`: threads fetch the shards."""
        return ShardsAhead(maker, self, num_in_flight, choose)


class ShardsAhead(WrappedMaker):
    """Wraps a `CropMaker`: threads fetch the shards of the next batches, as many as fit into the
    cache.
    """

    def __init__(
        self,
        maker: CropMaker,
        rows: RemoteRows,
        num_in_flight: int,
        choose: Callable[[ndarray], ndarray],
    ) -> None:
        super().__init__(maker)
        self._rows = rows
        self._num_in_flight = num_in_flight
        self._choose = choose

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """See `CropMaker.run`."""
        # A shard is in use from the first batch with one of its rows to the last. Shards in use are
        # touched at every batch, so that the cache removes others first. This looks ahead in the
        # requests for as long as their shards fit into this process's part of the cache, and
        # threads fetch those that are missing. Nothing here waits: a batch whose shard has not
        # arrived waits for it when its samples are read.
        cache = self._rows.cache
        budget = cache.budget_bytes // distributed.local_world_size()
        last_use: dict[int, int] = {}
        asked = 0
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shards")
        try:
            for number, made in enumerate(self.maker.run(requests)):
                last_use = {shard: last for shard, last in last_use.items() if last >= number}
                for shard in last_use:
                    cache.touch(shard)
                while asked < len(requests):
                    rows = self._choose(requests[asked].rows % len(self.lengths))
                    shards = self._rows.shards_of(rows)
                    num_bytes = sum(map(cache.bytes_of, last_use.keys() | shards))
                    # Shards that are being read now are fetched immediately, whether they fit or
                    # not.
                    if num_bytes > budget and asked > number + self._num_in_flight:
                        break
                    for shard in shards:
                        if shard not in last_use:
                            pool.submit(self._hold, shard)
                        last_use[shard] = asked
                    asked += 1
                yield made
        finally:
            pool.shutdown(cancel_futures=True)

    def _hold(self, shard: int) -> None:
        # The reader of the shard tries again and reports the error.
        with contextlib.suppress(ShardError):
            self._rows.cache.hold(shard)
