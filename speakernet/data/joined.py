"""Several training corpora as one list and one source; each corpus is a folder, packed or at an
address.

Utterances and speakers are prefixed with the corpus's name (`vox2/id00012/…`), so that no speaker
is in two corpora. This file decides each corpus's share of a batch and the order of an epoch.
"""

import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

from speakernet.data.lists import (
    ByTable,
    ListError,
    NameIndex,
    StringTable,
    TrainingList,
    normal_names,
)
from speakernet.data.lookup import COLUMNS, LONG_ROWS, LookupTable, map_list
from speakernet.data.options import DataOptions
from speakernet.data.sampling import CORPUS, EpochPlan, Parts, Sampler
from speakernet.data.sources import AudioCache, AudioSource, RowReader
from speakernet.random import numpy_generator

if TYPE_CHECKING:
    from speakernet.data.batches import CropMaker


# Several corpora look like one: one list, one source, one numbering of speakers, so that nothing
# after this file knows how many there are. What differs is who reads a row and how many rows of a
# batch each corpus gives. Names carry the corpus in front, which keeps equal names of two corpora
# apart in classes, in messages and in the checksum that a resumed run compares.
def join(
    corpora: Mapping[str, tuple[TrainingList, AudioSource]], options: DataOptions
) -> tuple[TrainingList, "JoinedSource"]:
    """The lists of several corpora joined one after the other, and the source that reads them."""
    _refuse_shared(corpora)
    lists = {name: listed for name, (listed, _) in corpora.items()}
    sources = {name: source for name, (_, source) in corpora.items()}
    digests = json.dumps([(name, listed.sha256) for name, listed in lists.items()])
    digest = hashlib.sha256(digests.encode()).hexdigest()

    def make() -> TrainingList:
        labels = []
        first = 0
        for listed in lists.values():
            labels.append(listed.labels + np.int32(first))
            first += len(listed.speakers)
        paths = _add_prefixes({name: listed.paths for name, listed in lists.items()})
        speakers = _add_prefixes({name: listed.speakers for name, listed in lists.items()})
        return TrainingList(paths, np.concatenate(labels), speakers, " + ".join(lists), digest)

    sizes = [len(listed) for listed in lists.values()]
    joined = map_list(f"joined {digest}", make) if sum(sizes) >= LONG_ROWS else make()
    source = JoinedSource(sources, lists, options)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
    # The corpora's own tables are kept, so that a million names need not be split again.
    tables = [listed.paths for listed in lists.values()]
    source.splits[joined.paths] = Split(owners, tables)
    return joined, source


def _refuse_shared(corpora: Mapping[str, tuple[TrainingList, AudioSource]]) -> None:
    """Raise ListError if two corpora list the same recordings: each of their speakers would be two
    classes.
    """
    for first, second in itertools.combinations(corpora, 2):
        listed, source = corpora[first]
        other, other_source = corpora[second]
        # Only recordings of one folder, packed corpus or address can be the same; comparing others
        # takes seconds.
        if source.place != other_source.place:
            continue
        places = NameIndex(normal_names(listed.paths)).find(normal_names(other.paths))
        rows = np.flatnonzero(places >= 0)
        if len(rows):
            raise ListError(
                f"data.corpora: {first} and {second} share {len(rows):,} recordings of "
                f"{source.root} (first: {other.paths[int(rows[0])]}), so their speakers would be "
                f"two classes each; remove them from {other.source}, or name only one of the "
                "corpora"
            )


def _add_prefixes(tables: Mapping[str, StringTable]) -> StringTable:
    return StringTable.from_bytes(
        f"{name}/".encode() + raw for name, table in tables.items() for raw in table.raws()
    )


class Split:
    """Each name's corpus, int16 (names,), its place among that corpus's names, int32 (names,), and
    the names of each corpus.
    """

    def __init__(self, owners: ndarray, tables: list[StringTable]) -> None:
        self.owners = owners
        self.tables = tables
        self.places = np.empty(len(owners), np.int32)
        for number, names in enumerate(tables):
            self.places[owners == number] = np.arange(len(names))


class JoinedSource(AudioSource):
    """The audio of several corpora, by utterance names prefixed with the corpus's name."""

    def __init__(
        self,
        sources: Mapping[str, AudioSource],
        lists: Mapping[str, TrainingList],
        options: DataOptions,
    ) -> None:
        super().__init__(" + ".join(sources), options.sample_rate)
        self.sources = dict(sources)
        self.splits = ByTable[Split]()
        self._lists = lists
        self._options = options
        self._samplers: dict[str, Sampler] = {}

    @property
    def identity(self) -> str:
        """See `AudioSource.identity`."""
        return "; ".join(f"{name}: {source.identity}" for name, source in self.sources.items())

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> ndarray:
        """See `AudioSource.read`."""
        corpus, _, utterance = name.partition("/")
        return self.sources[corpus].read(utterance, start, num_samples)

    def path_of(self, name: str) -> str:
        """See `AudioSource.path_of`."""
        corpus, _, utterance = name.partition("/")
        return self.sources[corpus].path_of(utterance)

    def apart(self, training: TrainingList) -> list[TrainingList]:
        """See `AudioSource.apart`."""
        split = self._split(training.paths)
        lists = []
        for number, listed in enumerate(self._lists.values()):
            labels = training.labels[split.owners == number]
            present, renumbered = np.unique(labels, return_inverse=True)
            speakers = (training.speakers[label].partition("/")[2] for label in present.tolist())
            table = StringTable.from_strings(speakers)
            lists.append(TrainingList(split.tables[number], renumbered, table, listed.source))
        return lists

    def _split(self, names: StringTable) -> Split:
        if names in self.splits:
            return self.splits[names]
        # Only lists such as a training list without its held-out speakers come here; the split of
        # the whole list was stored when the corpora were joined.
        numbers = {name.encode(): number for number, name in enumerate(self.sources)}
        pairs = [raw.partition(b"/")[::2] for raw in names.raws()]
        owners = np.array([numbers[corpus] for corpus, _ in pairs], np.int16)
        tables = []
        for number in numbers.values():
            rows = np.flatnonzero(owners == number)
            tables.append(StringTable.from_bytes(pairs[row][1] for row in rows))
        self.splits[names] = Split(owners, tables)
        return self.splits[names]

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        split = self._split(names)
        table = LookupTable.empty(len(names), self.sample_rate)
        for number, source in enumerate(self.sources.values()):
            part = source.lookup_table(split.tables[number], num_threads)
            rows = np.flatnonzero(split.owners == number)
            for column in COLUMNS:
                getattr(table, column)[rows] = getattr(part, column)
            for row, problem in part.problems.items():
                table.problems[int(rows[row])] = problem
        return table

    def rows(
        self, names: StringTable, table: LookupTable, cache: AudioCache | None = None
    ) -> "JoinedRows":
        """See `AudioSource.rows`."""
        split = self._split(names)
        readers = []
        for number, source in enumerate(self.sources.values()):
            names = split.tables[number]
            # One cache per corpus, since a cache is keyed by the corpus's own rows.
            part = cache and AudioCache(cache.budget_bytes // len(self.sources))
            readers.append(source.rows(names, source.lookup_table(names), part))
        return JoinedRows(split.owners, split.places, readers)

    def order(
        self, sampler: Sampler, training: TrainingList, table: LookupTable, num_streams: int
    ) -> None:
        """See `AudioSource.order`: every batch gets the same share of each corpus."""
        size = sampler.batch_size
        numbers = {name: number for number, name in enumerate(self.sources)}
        of_speaker = np.array(
            [numbers[speaker.partition("/")[0]] for speaker in training.speakers], dtype=np.int16
        )
        owners = of_speaker[sampler.labels[sampler.eligible]]
        parts = self._parts(np.bincount(owners, minlength=len(numbers)), size)
        self._samplers = {}
        for (name, source), part in zip(self.sources.items(), parts, strict=True):
            options = sampler.options.model_copy(update={"batch_size": part})
            try:
                part_sampler = type(sampler)(
                    sampler.labels,
                    options,
                    seed=sampler.seed,
                    eligible=sampler.eligible[owners == numbers[name]],
                    voices=sampler.voices,
                )
            except ValueError as error:
                raise ValueError(
                    f"data.corpora: {name} gets {part} of the {size} items in a batch, but {error}"
                ) from error
            # One stream: each process has its share of every batch.
            source.order(part_sampler, training, table, 1)
            self._samplers[name] = part_sampler
        sampler.divide(functools.partial(plan_mixture, self._samplers))

    def _parts(self, utterances: ndarray, batch_size: int) -> list[int]:
        """How many items of a batch each corpus gets, given its number of usable utterances."""
        weights = np.array([corpus.weight for corpus in self._options.corpora.values()])
        if "auto" in weights.tolist():
            weights = utterances ** (1 / self._options.corpora_temperature)
        # The method of largest remainders: every batch has the same whole numbers of items, which
        # add up to its size and differ from the exact shares by less than one.
        exact = weights / weights.sum() * batch_size
        parts = np.floor(exact).astype(np.int64)
        parts[np.argsort(parts - exact, kind="stable")[: batch_size - parts.sum()]] += 1
        for name, part, count in zip(self.sources, parts, utterances, strict=True):
            if not part or not count:
                raise ValueError(
                    f"data.corpora: {name} gets {part} of the {batch_size} items in a batch (it "
                    f"has {count} usable utterances); raise its weight, corpora_temperature or "
                    "batch_size, or leave it out"
                )
        return parts.tolist()

    def summary(self, training: TrainingList, plan: EpochPlan) -> str:
        """See `AudioSource.summary`: a line per corpus."""
        speakers = Counter(speaker.partition("/")[0] for speaker in training.speakers)
        lines = []
        for name, sampler in self._samplers.items():
            count = len(sampler.eligible)
            drawn = plan.drawn[name]
            lines.append(
                f"{name}: {speakers[name]:,} speakers, {count:,} utterances, "
                f"{sampler.batch_size:,} per batch, {drawn:,} per epoch "
                f"({drawn / count:.2f} passes)"
            )
        return "\n".join(lines)


# An epoch does not end when the first corpus runs out, because a small corpus with a large weight
# would end it after a few batches. Each pass has row numbers of its own: everything random is keyed
# by the row, so with the same numbers each pass would be the same crop with the same noise.
def plan_mixture(samplers: Mapping[str, Sampler], epoch: int) -> Parts:
    """An epoch of several corpora; the batch size of a corpus's sampler is its share of a batch.

    The epoch has as many utterances as all corpora together. A corpus that runs out is repeated in
    a different order, with a multiple of the list's length added to its rows, so that they are
    cropped and augmented differently.

    Args:
        samplers: one per corpus, by name, all over the same list.
        epoch: counted from 0.
    """
    sizes = np.array([sampler.batch_size for sampler in samplers.values()])
    orders = [
        _units_of_pass(sampler, epoch, corpus, 0)
        for corpus, sampler in enumerate(samplers.values())
    ]
    total = sum(map(len, orders))
    for corpus, sampler in enumerate(samplers.values()):
        passes = [orders[corpus]]
        count = len(orders[corpus])
        # Rounded up, so that no corpus lacks the last unit of the last batch.
        needed = -(-total * int(sizes[corpus]) // int(sizes.sum()))
        # A corpus that gives no units, however often it is repeated, is left empty.
        while 0 < count < needed:
            units = _units_of_pass(sampler, epoch, corpus, len(passes))
            passes.append(units.astype(np.int64) + len(passes) * len(sampler.labels))
            count += len(units)
        orders[corpus] = np.concatenate(passes)[:needed]
    return Parts(orders, np.cumsum(sizes) / sizes.sum(), tuple(samplers))


def _units_of_pass(sampler: Sampler, epoch: int, corpus: int, number: int) -> ndarray:
    """The units of a corpus in the order of its pass `number` of an epoch."""
    if sampler.in_parts is not None:
        # Streamed, as one part.
        (units,) = sampler.in_parts(epoch, number).units
        return units
    return sampler.units_of(
        numpy_generator(sampler.seed, CORPUS, epoch, corpus, number), sampler.eligible
    )


@dataclass(eq=False)
class JoinedRows(RowReader):
    """Rows of a joined list, each read by its corpus's own reader."""

    owners: ndarray
    places: ndarray
    readers: list[RowReader]

    def __post_init__(self) -> None:
        self.is_remote = any(reader.is_remote for reader in self.readers)

    @property
    def counts(self) -> Counter[str]:  # type: ignore[override]
        """See `RowReader.counts`."""
        return sum((Counter(reader.counts) for reader in self.readers), Counter())

    def read_row(self, row: int, start: int, out: ndarray) -> int:
        """See `RowReader.read_row`."""
        return self.readers[self.owners[row]].read_row(int(self.places[row]), start, out)

    def fill(self, rows: ndarray, starts: ndarray, out: ndarray) -> dict[int, str]:
        """See `RowReader.fill`."""
        problems = {}
        owners = self.owners[rows]
        for number in np.unique(owners).tolist():
            batch_rows = np.flatnonzero(owners == number)
            # Read into an array of its own and copied, because readers fill neighbouring rows, but
            # those of one corpus are spread over the batch.
            crops = np.empty((len(batch_rows), out.shape[1]), dtype=out.dtype)
            places = self.places[rows[batch_rows]]
            for place, problem in (
                self.readers[number].fill(places, starts[batch_rows], crops).items()
            ):
                problems[int(batch_rows[place])] = problem
            out[batch_rows] = crops
        return problems

    def ahead(
        self,
        maker: "CropMaker",
        num_in_flight: int,
        choose: Callable[[ndarray], ndarray] = np.asarray,
    ) -> "CropMaker":
        """See `RowReader.ahead`: the shards of all corpora at addresses are fetched in time."""
        for number, reader in enumerate(self.readers):
            maker = reader.ahead(maker, num_in_flight, functools.partial(self._rows_of, number))
        return maker

    def _rows_of(self, number: int, rows: ndarray) -> ndarray:
        """The rows of a corpus among rows of the joined list."""
        return self.places[rows[self.owners[rows] == number]]
