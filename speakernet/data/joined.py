"""Several training corpora as one list and one source; each corpus is a folder, packed or at an
address.

Utterances and speakers are prefixed with the corpus's name (`vox2/id00012/…`), so that no speaker
is in two corpora. This file decides each corpus's share of a batch; `mixing.mixed` decides the
order.
"""

import functools
import hashlib
import itertools
import json
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from speakernet.data.lists import ListError, NameIndex, StringTable, TrainingList, normal_names
from speakernet.data.lookup import COLUMNS, LONG_ROWS, LookupTable, mapped_list
from speakernet.data.mixing import mixed
from speakernet.data.options import DataOptions
from speakernet.data.sampling import EpochPlan, Sampler
from speakernet.data.sources import AudioCache, AudioSource, RowReader

if TYPE_CHECKING:
    from speakernet.data.batches import CropMaker


def join(
    corpora: Mapping[str, tuple[TrainingList, AudioSource]], options: DataOptions
) -> tuple[TrainingList, "JoinedSource"]:
    """The lists of several corpora joined one after the other, and the source that reads them."""
    _refuse_shared(corpora)
    lists = {name: listed for name, (listed, _) in corpora.items()}
    what = " + ".join(corpora)
    digest = hashlib.sha256(
        json.dumps([(name, one.sha256) for name, one in lists.items()]).encode()
    ).hexdigest()

    def make() -> TrainingList:
        firsts = itertools.accumulate((len(one.speakers) for one in lists.values()), initial=0)
        labels = [
            one.labels + np.int32(first) for first, one in zip(firsts, lists.values(), strict=False)
        ]
        paths, speakers = (
            {name: getattr(one, kind) for name, one in lists.items()}
            for kind in ("paths", "speakers")
        )
        return TrainingList(
            _prefixed(paths), np.concatenate(labels), _prefixed(speakers), what, digest
        )

    sizes = [len(one) for one in lists.values()]
    joined = mapped_list(f"joined {digest}", make) if sum(sizes) >= LONG_ROWS else make()
    source = JoinedSource({name: source for name, (_, source) in corpora.items()}, lists, options)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
    # The corpora's own tables are kept, so that a million names need not be split again.
    source.keep(joined.paths, Split(owners, [one.paths for one in lists.values()]))
    return joined, source


def _refuse_shared(corpora: Mapping[str, tuple[TrainingList, AudioSource]]) -> None:
    """Raise ListError if two corpora list the same recordings: each of their speakers would be two
    classes.
    """
    for (first, (listed, source)), (second, (other, below)) in itertools.combinations(
        corpora.items(), 2
    ):
        # Only recordings of one folder, packed corpus or address can be the same; comparing others
        # takes seconds.
        if source.place != below.place:
            continue
        rows = np.flatnonzero(
            NameIndex(normal_names(listed.paths)).find(normal_names(other.paths)) >= 0
        )
        if len(rows):
            raise ListError(
                f"data.corpora: {first} and {second} share {len(rows):,} recordings of "
                f"{source.root} (first: {other.paths[int(rows[0])]}), so their speakers would be "
                f"two classes each; remove them from {other.source}, or name only one of the "
                "corpora"
            )


def _prefixed(tables: Mapping[str, StringTable]) -> StringTable:
    return StringTable.from_bytes(
        f"{name}/".encode() + raw for name, table in tables.items() for raw in table.raws()
    )


class Split:
    """Each name's corpus, int16 (names,), its place among the corpus's own names, int32 (names,),
    and those names.
    """

    def __init__(self, owners: np.ndarray, own: list[StringTable]) -> None:
        self.owners = owners
        self.own = own
        self.places = np.empty(len(owners), np.int32)
        for number, names in enumerate(own):
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
        self._lists = lists
        self._options = options
        self.is_remote = any(one.is_remote for one in sources.values())
        self._splits: dict[int, Split] = {}
        self._samplers: dict[str, Sampler] = {}

    @property
    def identity(self) -> str:  # type: ignore[override]
        """See `AudioSource.identity`."""
        return "; ".join(f"{name}: {source.identity}" for name, source in self.sources.items())

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """See `AudioSource.read`."""
        corpus, _, own = name.partition("/")
        return self.sources[corpus].read(own, start, num_samples)

    def path_of(self, name: str) -> str:
        """See `AudioSource.path_of`."""
        corpus, _, own = name.partition("/")
        return self.sources[corpus].path_of(own)

    def apart(self, training: TrainingList) -> list[TrainingList]:
        """Split a list of this source: one list per corpus, with the corpus's own names."""
        split = self._split(training.paths)
        found = []
        for number, (own, listed) in enumerate(zip(split.own, self._lists.values(), strict=True)):
            labels, renumbered = np.unique(
                training.labels[split.owners == number], return_inverse=True
            )
            speakers = (training.speakers[label].partition("/")[2] for label in labels.tolist())
            found.append(
                TrainingList(own, renumbered, StringTable.from_strings(speakers), listed.source)
            )
        return found

    def keep(self, names: StringTable, split: Split) -> Split:
        """Remember the split of `names` for as long as they are used."""
        self._splits[id(names)] = split
        weakref.finalize(names, self._splits.pop, id(names), None)
        return split

    def _split(self, names: StringTable) -> Split:
        if id(names) in self._splits:
            return self._splits[id(names)]
        numbers = {name.encode(): number for number, name in enumerate(self.sources)}
        owners = np.fromiter(
            (numbers[raw.partition(b"/")[0]] for raw in names.raws()), np.int16, len(names)
        )
        some = (names.raws(np.flatnonzero(owners == number)) for number in range(len(numbers)))
        own = [StringTable.from_bytes(raw.partition(b"/")[2] for raw in raws) for raws in some]
        return self.keep(names, Split(owners, own))

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        split = self._split(names)
        table = LookupTable.empty(len(names), self.sample_rate)
        for number, (source, own) in enumerate(zip(self.sources.values(), split.own, strict=True)):
            found = source.lookup_table(own, num_threads)
            rows = np.flatnonzero(split.owners == number)
            for column in COLUMNS:
                getattr(table, column)[rows] = getattr(found, column)
            table.problems.update(
                {int(rows[row]): problem for row, problem in found.problems.items()}
            )
        return table

    def rows(
        self, names: StringTable, table: LookupTable, cache: AudioCache | None = None
    ) -> "JoinedRows":
        """See `AudioSource.rows`."""
        split = self._split(names)
        # One per corpus, since a cache is keyed by the corpus's own rows.
        caches = [cache and AudioCache(cache.budget_bytes // len(split.own)) for _ in split.own]
        readers = [
            source.rows(own, source.lookup_table(own), one)
            for source, own, one in zip(self.sources.values(), split.own, caches, strict=True)
        ]
        return JoinedRows(split.owners, split.places, readers)

    def order(
        self, sampler: Sampler, training: TrainingList, table: LookupTable, num_streams: int
    ) -> None:
        """Give every batch of a sampler the same share of each corpus."""
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
            more = {"eligible": sampler.eligible[owners == numbers[name]], "voices": sampler.voices}
            try:
                own = type(sampler)(sampler.labels, options, seed=sampler.seed, **more)
            except ValueError as error:
                raise ValueError(
                    f"data.corpora: {name} gets {part} of the {size} items in a batch, but {error}"
                ) from error
            if source.is_remote:
                # One stream: each process has its share of every batch.
                source.order(own, training, table, 1)  # type: ignore[attr-defined]
            self._samplers[name] = own
        sampler.in_parts = functools.partial(mixed, self._samplers)

    def _parts(self, utterances: np.ndarray, batch_size: int) -> list[int]:
        """How many items of a batch each corpus gets, given its number of usable utterances."""
        given = [one.weight for one in self._options.corpora.values()]
        weights = (
            utterances ** (1 / self._options.corpora_temperature)
            if "auto" in given
            else np.array(given)
        )
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
        """A table of the corpora and of the utterances that an epoch draws from each."""
        speakers = Counter(speaker.partition("/")[0] for speaker in training.speakers)
        rows = [["corpus", "speakers", "utterances", "per batch", "per epoch", "passes"]]
        for name, sampler in self._samplers.items():
            count = len(sampler.eligible)
            drawn = plan.drawn[name]
            numbers = f"{speakers[name]:,}", f"{count:,}", f"{sampler.batch_size:,}", f"{drawn:,}"
            rows.append([name, *numbers, f"{drawn / count:.2f}"])
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        cells = ([name.ljust(first), *map(str.rjust, others, widths)] for name, *others in rows)
        return "\n".join("  ".join(row) for row in cells)


@dataclass(eq=False)
class JoinedRows(RowReader):
    """Rows of a joined list, each read by its corpus's own reader."""

    shared_arrays = ("owners", "places")

    owners: np.ndarray
    places: np.ndarray
    readers: list[RowReader]

    def __post_init__(self) -> None:
        self.is_remote = any(one.is_remote for one in self.readers)

    @property
    def counts(self) -> Counter[str]:  # type: ignore[override]
        """See `RowReader.counts`."""
        return sum((Counter(one.counts) for one in self.readers), Counter())

    def share(self) -> None:
        """See `Shareable.share`."""
        super().share()
        for reader in self.readers:
            reader.share()

    def read_row(self, row: int, start: int, out: np.ndarray) -> int:
        """See `RowReader.read_row`."""
        return self.readers[self.owners[row]].read_row(int(self.places[row]), start, out)

    def fill(self, rows: np.ndarray, starts: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """See `RowReader.fill`."""
        problems = {}
        owners = self.owners[rows]
        for number in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == number)
            crops = np.empty((len(mine), out.shape[1]), dtype=out.dtype)
            found = self.readers[number].fill(self.places[rows[mine]], starts[mine], crops)
            out[mine] = crops
            problems.update({int(mine[place]): problem for place, problem in found.items()})
        return problems

    def ahead(self, maker: "CropMaker", num_asked: int) -> "CropMaker":
        """Wrap `maker` so that the shards of all corpora at addresses are fetched in time."""
        for number, reader in enumerate(self.readers):
            if reader.is_remote:
                own = functools.partial(self._own, number)
                maker = reader.ahead(maker, num_asked, own)  # type: ignore[attr-defined]
        return maker

    def _own(self, number: int, rows: np.ndarray) -> np.ndarray:
        """The rows of a corpus among rows of the joined list."""
        return self.places[rows[self.owners[rows] == number]]
