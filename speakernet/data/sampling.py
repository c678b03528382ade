"""Which rows make up which batch: plans of whole epochs, from labels alone.

A plan depends only on (labels, seed, epoch). No audio is read, there is no Python object per row,
and utterances that do not fill a batch are counted.
"""

import functools
import logging
import sys
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from speakernet.data.lists import places_in_runs
from speakernet.data.options import DataOptions
from speakernet.random import REAL_STREAM, VOICE_STREAM, KeyedRandom, numpy_generator
from speakernet.terminal import counted

logger = logging.getLogger(__name__)

ORDER, LENGTH, SHARDS, BLOCK, CORPUS = range(5)  # keys of the samplers' random streams
EXACT_WORK = 4_000_000  # batches x speakers up to which the balanced sampler deals exactly
MAX_ROUNDS = 30


@dataclass(frozen=True)
class Voices:
    """The voices of every speaker: one for each speed. Each except the recorded voice, which is
    voice 0 if included, makes new speakers, so the classes of a head are numbered and drawn here.

    >>> voices = Voices(speeds=(Fraction(1), Fraction(9, 10), Fraction(11, 10)))
    >>> len(voices), voices.classes_of(np.array([7, 7, 7]), np.array([0, 1, 2]), 150)
    (3, array([  7, 157, 307]))
    """

    speeds: tuple[Fraction, ...] = (Fraction(1),)
    real_share: float | None = None
    real_from: int | None = None

    def __len__(self) -> int:
        return len(self.speeds)

    @property
    def share_at_other_speeds(self) -> float:
        """The average share of utterances that are played faster or slower."""
        changed = sum(speed != 1 for speed in self.speeds)
        if self.real_share is None or len(self) == 1:
            return changed / len(self)
        return (1 - self.real_share) * changed / (len(self) - 1)

    def classes_of(self, labels: ndarray, voices: ndarray, num_speakers: int) -> ndarray:
        """Classes of speakers (labels) in voices, int64 (utterances,); those of voice n follow
        those of voice n - 1.
        """
        # In 64 bits, whatever the type of the arrays: 128 speakers in voice 1 do not fit into a
        # byte.
        return labels.astype(np.int64) + num_speakers * voices.astype(np.int64)

    def draw(self, seed: int, epoch: int, rows: ndarray, bounds: ndarray) -> ndarray:
        """Draw the voice of each utterance (or of each unit of utterances) of an epoch, int64
        (utterances,).

        The draw for a row depends only on seed, epoch and row; with `real_share` it also depends on
        the batch, in which the rows with the lowest draws stay as recorded.
        """
        if len(self) == 1 or (self.real_from is not None and epoch >= self.real_from):
            return np.zeros(len(rows), dtype=np.int64)
        choice, order = KeyedRandom(seed, epoch, rows).uniforms((VOICE_STREAM, REAL_STREAM))[..., 0]
        if self.real_share is None:
            return (choice * len(self)).astype(np.int64)
        changed = 1 + (choice * (len(self) - 1)).astype(np.int64)
        # Rounded over the whole epoch, not per batch: a tenth of batches of 4 is one in every
        # second or third batch.
        num_real = np.diff(np.floor(self.real_share * bounds + 0.5)).astype(np.int64)
        batches = np.repeat(np.arange(len(num_real)), np.diff(bounds))
        places = np.empty(len(rows), dtype=np.int64)
        places[np.lexsort((order, batches))] = np.arange(len(rows)) - bounds[batches]
        return np.where(places < num_real[batches], 0, changed)


@dataclass(frozen=True)
class Parts:
    """The ordered units of several parts, each (units, utterances per unit), and each part's share
    of a batch.

    >>> units = [np.arange(6)[:, None], np.arange(10, 13)[:, None]]
    >>> parts = Parts(units, np.array([2 / 3, 1.0]), names=("a", "b"))
    >>> sizes = np.array([3, 3, 3, 3])
    >>> parts.num_batches(sizes), parts.take(sizes[:3])[:, 0], parts.count_drawn(sizes[:3])
    (3, array([ 0, 10,  1,  2, 11,  3,  4, 12,  5]), {'a': 6, 'b': 3})
    """

    units: Sequence[ndarray]
    ends: ndarray
    """Where each part of a batch ends, as a share of the batch; the last one is 1."""
    names: Sequence[str] = ()
    """Names of corpora, which are spread over a batch; if empty, parts follow each other in the
    order of the ranks."""

    def __len__(self) -> int:
        return sum(map(len, self.units))

    def counts(self, sizes: ndarray) -> ndarray:
        """Units of each part in batches of the given sizes, int64 (batches, parts)."""
        # Rounded as in `rank_share`.
        return np.diff(
            np.floor(sizes[:, None] * self.ends + 1e-9).astype(np.int64), axis=1, prepend=0
        )

    def num_batches(self, sizes: ndarray) -> int:
        """How many batches of the given sizes every part can fill its share of."""
        needed = np.cumsum(self.counts(sizes), axis=0)
        return min(
            int(np.searchsorted(needed[:, part], len(units), side="right"))
            for part, units in enumerate(self.units)
        )

    def take(self, sizes: ndarray) -> ndarray:
        """The units of batches of the given sizes, (units, utterances per unit)."""
        counts = self.counts(sizes).ravel()
        owners = np.repeat(np.tile(np.arange(len(self.units)), len(sizes)), counts)
        if self.names:
            # Spread evenly over the batch, so that every process gets its share of every corpus.
            order = (places_in_runs(counts) + 0.5) / np.repeat(counts, counts)
            owners = owners[np.lexsort((order, np.repeat(np.arange(len(sizes)), sizes)))]
        taken = np.empty((len(owners), self.units[0].shape[1]), dtype=np.result_type(*self.units))
        for part, units in enumerate(self.units):
            places = np.flatnonzero(owners == part)
            taken[places] = units[: len(places)]
        return taken

    def count_drawn(self, sizes: ndarray, unit: int = 1) -> dict[str, int]:
        """Utterances of each corpus in batches of the given sizes, with `unit` utterances per
        unit.
        """
        return dict(zip(self.names, (unit * self.counts(sizes).sum(axis=0)).tolist(), strict=False))


@dataclass
class EpochPlan:
    """The batches of one epoch."""

    rows: ndarray
    """Rows of the list; the n-th repeat of a corpus (`joined.plan_mixture`) adds n times the length
    of the list."""
    bounds: ndarray
    crop_frames: ndarray
    voices: ndarray
    num_left_out: int
    drawn: Mapping[str, int] = field(default_factory=dict)
    """Utterances of each corpus, if there are several."""

    def __len__(self) -> int:
        return len(self.crop_frames)

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the rows and of the bounds of the batches."""
        return zlib.crc32(
            self.bounds.tobytes(), zlib.crc32(self.rows.astype(np.int64, copy=False).data)
        )


# The story of an epoch. All its batches are planned before the first one is read, as one array of
# rows and the bounds of the batches in it: 8 bytes an utterance, a tenth of a second for a million.
# A plan that is known from the start makes the rest simple. Each rank takes its share of every
# batch of the same plan (`rank_share`), so a batch does not depend on the number of processes;
# workers need row numbers only; and a run resumes by planning the epoch again and skipping the
# batches that are done, whose number is all that a checkpoint has to hold (with a checksum of the
# plan, which shows when the list or an option has changed).
#
# Samplers order units: one utterance, or K utterances of one speaker for losses that compare them.
# A batch of P speakers x K utterances is P units, and neither the border between two ranks nor a
# change of voice ever cuts a unit. Keeping the P speakers of a batch distinct is the only hard part
# (`BalancedSampler._deal`); everything else is a permutation.
class Sampler(ABC):
    """Plans epochs; subclasses define the order of the utterances."""

    def __init__(
        self,
        labels: ndarray,
        options: DataOptions,
        *,
        seed: int,
        eligible: ndarray | None = None,
        voices: Voices | None = None,
    ) -> None:
        self.labels = labels
        self.options = options
        self.seed = seed
        self.voices = voices or Voices()
        self.eligible = np.arange(len(labels)) if eligible is None else np.asarray(eligible)
        if len(labels) <= np.iinfo(np.int32).max:
            # Half the memory, both for this array, which lives as long as the run, and for the rows
            # of an epoch.
            self.eligible = self.eligible.astype(np.int32)
        self.batch_size = options.batch_size
        most = options.max_utterances_per_speaker
        self.max_utterances = self.auto_max_utterances if most == "auto" else most
        self.shortest_frames = options.crop_frames
        self.longest_frames = max(options.crop_frames, options.crop_frames_max)
        # Longer crops come in smaller batches, but never in empty ones.
        self.smallest_batch = max(1, self.batch_size * self.shortest_frames // self.longest_frames)
        self._check()

    auto_max_utterances = sys.maxsize
    """What `max_utterances_per_speaker: auto` means for this sampler."""

    unit = 1
    """Utterances of one speaker that stay together."""

    needs_many_speakers = False
    """Whether a batch needs many speakers to choose from; if so, all processes share one stream
    with large blocks."""

    in_parts: Callable[..., Parts] | None = None
    """Makes the parts of an epoch; None: one part with everything shuffled."""

    def divide(self, in_parts: Callable[..., Parts]) -> None:
        """Take epochs in the parts that a function makes of an epoch's number, because the corpus
        is streamed or there are several.
        """
        self.in_parts = in_parts

    def epoch(self, epoch: int) -> EpochPlan:
        """The batches of an epoch, counted from 0."""
        if self.in_parts is not None:
            parts = self.in_parts(epoch)
        else:
            units = self.units_of(numpy_generator(self.seed, ORDER, epoch), self.eligible)
            parts = Parts([units], np.ones(1))
        has_drawn_lengths = self.longest_frames > self.shortest_frames
        most = len(parts) if has_drawn_lengths else len(parts) // self.batch_size
        # Longer crops in smaller batches, so that the memory and time of a step stay the same.
        frames = numpy_generator(self.seed, LENGTH, epoch).integers(
            self.shortest_frames, self.longest_frames + 1, most
        )
        sizes = np.maximum(1, self.batch_size * self.shortest_frames // frames)
        if has_drawn_lengths:
            counts = parts.counts(sizes).T
            fitted = [self.fit_sizes(*part) for part in zip(parts.units, counts, strict=True)]
            parts = replace(parts, units=fitted)
        num_batches = parts.num_batches(sizes)
        if not num_batches:
            raise ValueError(
                f"data.batch_size is {self.batch_size}, but epoch {epoch + 1} does not have enough "
                "utterances to fill a single batch; lower it, or raise data.shuffle_buffer if the "
                "corpus is streamed"
            )
        sizes = sizes[:num_batches]
        units = parts.take(sizes)  # (units, utterances per unit)
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        # One voice for all utterances of a unit: in a different voice they would be a different
        # speaker.
        voices = self.voices.draw(self.seed, epoch, units[:, 0], bounds)
        rows = units.reshape(-1)
        is_used = np.zeros(len(self.labels), dtype=bool)
        is_used[rows % len(self.labels)] = True
        return EpochPlan(
            rows,
            bounds * self.unit,
            frames[:num_batches],
            np.repeat(voices, self.unit),
            len(self.eligible) - int(is_used.sum()),
            parts.count_drawn(sizes, self.unit),
        )

    def limit_speakers(self, rows: ndarray) -> ndarray:
        """The first `max_utterances` of each speaker among some rows, in their order."""
        if self.max_utterances >= len(rows):
            return rows
        by_speaker, place, _ = by_speaker_of(self.labels[rows])
        is_kept = np.empty(len(rows), dtype=bool)
        is_kept[by_speaker] = place < self.max_utterances
        return rows[is_kept]

    @abstractmethod
    def _check(self) -> None:
        """Raise if the utterances cannot fill one batch."""

    @abstractmethod
    def units_of(self, random: Generator, rows: ndarray) -> ndarray:
        """Rows in the order in which they are used, (units, utterances per unit)."""

    def fit_sizes(self, units: ndarray, sizes: ndarray) -> ndarray:
        """Units, ordered for batches of `batch_size`, in an order for batches of these sizes."""
        return units


class ShuffledSampler(Sampler):
    """All utterances in random order, at most `max_utterances_per_speaker` of each speaker if that
    is a number.
    """

    def _check(self) -> None:
        counts = np.bincount(self.labels[self.eligible], minlength=1)
        usable = int(np.minimum(counts, self.max_utterances).sum())
        if usable < self.batch_size:
            raise ValueError(
                f"the training list has {usable} usable utterances per epoch, fewer than "
                f"data.batch_size ({self.batch_size}); lower the batch size"
            )

    def units_of(self, random: Generator, rows: ndarray) -> ndarray:
        """See `Sampler.units_of`."""
        return self.limit_speakers(random.permutation(rows))[:, None]


class BalancedSampler(Sampler):
    """P speakers x K utterances with no speaker twice in a batch; row = speaker * K + utterance.

    Each speaker's utterances are shuffled and cut into groups of K (at most
    `max_utterances_per_speaker` per epoch).
    """

    auto_max_utterances = 500  # as in voxceleb_trainer, whose sampler this is
    needs_many_speakers = True

    def __init__(self, labels: ndarray, options: DataOptions, **more: Any) -> None:
        self.unit = options.utterances_per_speaker
        super().__init__(labels, options, **more)

    def _check(self) -> None:
        counts = np.bincount(self.labels[self.eligible])
        usable = int((counts >= self.unit).sum())
        short = int((counts > 0).sum()) - usable
        if short:
            logger.warning(
                "%s with fewer than %d utterances left out", counted(short, "speaker"), self.unit
            )
        if self.max_utterances < self.unit:
            raise ValueError(
                f"max_utterances_per_speaker is {self.max_utterances}; a batch needs at least "
                f"{self.unit}"
            )
        if usable < self.batch_size:
            raise ValueError(
                f"a batch needs {self.batch_size} speakers with {counted(self.unit, 'utterance')} "
                f"each, but only {usable} have that many; lower data.batch_size or "
                "data.utterances_per_speaker"
            )

    def units_of(self, random: Generator, rows: ndarray) -> ndarray:
        """See `Sampler.units_of`."""
        shuffled = random.permutation(rows)
        by_speaker, place, counts = by_speaker_of(self.labels[shuffled])
        groups = np.minimum(counts, self.max_utterances) // self.unit
        # Utterance j of a speaker is used if j < groups * K; the kept rows come in runs of K per
        # speaker.
        kept = shuffled[by_speaker][place < np.repeat(groups * self.unit, counts)].reshape(
            -1, self.unit
        )
        return kept[self._deal(np.repeat(np.arange(len(counts)), groups), groups, random)]

    def fit_sizes(self, units: ndarray, sizes: ndarray) -> ndarray:
        """See `Sampler.fit_sizes`: a unit waits for the next batch if this one already contains its
        speaker.
        """
        speakers = self.labels[units[:, 0] % len(self.labels)].tolist()
        left = deque(range(len(units)))
        order = list[int]()
        for size in sizes.tolist():
            batch = dict[int, int]()
            waiting = []
            while left and len(batch) < size:
                place = left.popleft()
                if batch.setdefault(speakers[place], place) != place:
                    waiting.append(place)
            if len(batch) < size:
                break
            order += batch.values()
            left.extendleft(reversed(waiting))
        return units[order]

    # Dealing speakers. A random order nearly always has a speaker twice in some batch, and drawing
    # again until it has none would never end. For a small list the exact method below deals batch
    # by batch, which takes batches x speakers steps. For a large one a random order is repaired:
    # each group that repeats a speaker is swapped with a random one, which makes few new conflicts
    # as long as a batch is small beside the number of speakers; a few rounds settle it. If they do
    # not, the exact method deals after all.
    def _deal(self, speakers: ndarray, groups: ndarray, random: Generator) -> ndarray:
        """Order the groups, given speaker by speaker, so that no batch contains a speaker twice."""
        size = self.batch_size
        if len(speakers) // size * len(groups) <= EXACT_WORK:
            return _deal_exactly(groups, size, random)
        order = random.permutation(len(speakers))
        batch_of = (np.arange(len(order)) // size) * len(groups)
        for _ in range(MAX_ROUNDS):
            key = batch_of + speakers[order]
            by_key = np.argsort(key, kind="stable")
            repeated = by_key[1:][key[by_key[1:]] == key[by_key[:-1]]]
            if not len(repeated):
                # Only full batches: together with the next block or pass, the rest could repeat a
                # speaker.
                return order[: len(order) // size * size]
            # Swap each repeated group with a random one.
            for place, other in zip(
                repeated, random.integers(0, len(order), len(repeated)), strict=True
            ):
                order[place], order[other] = order[other], order[place]
        return _deal_exactly(groups, size, random)


def by_speaker_of(labels: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Rows ordered by speaker, (rows,); each row's place among its speaker's rows, (rows,); rows
    per speaker.
    """
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    return order, places_in_runs(counts), counts


def _deal_exactly(groups: ndarray, size: int, random: Generator) -> ndarray:
    """As many full batches as possible, drawn at random.

    With b batches to come, no speaker can be used more than b times. Once every speaker is cut to
    that, and the total to b x size, a valid order always exists: a speaker with b groups left must
    be in the next batch, the others are drawn in proportion to the groups they have left.
    """
    num_batches = int(groups.sum()) // size
    while num_batches and np.minimum(groups, num_batches).sum() < num_batches * size:
        num_batches -= 1
    left = np.minimum(groups, num_batches)
    surplus = int(left.sum()) - num_batches * size
    if surplus:
        taken = random.permutation(np.repeat(np.arange(len(left)), left))[:surplus]
        left = left - np.bincount(taken, minlength=len(left))
    next_group = np.concatenate([[0], np.cumsum(groups)[:-1]])
    order = np.empty((num_batches, size), dtype=np.int64)
    for batch in range(num_batches):
        to_come = num_batches - batch
        # Efraimidis and Spirakis (2006): the largest of u^(1/weight) are a draw in proportion to
        # the weights.
        with np.errstate(divide="ignore"):
            rank = np.where(
                left > 0, np.log(random.random(len(left))) / np.maximum(left, 1), -np.inf
            )
        # Above any logarithm of a number below one: a speaker with a group for every batch to come
        # must be dealt now.
        rank[left >= to_come] = 1.0
        chosen = random.permutation(np.argpartition(-rank, size - 1)[:size])
        order[batch] = next_group[chosen]
        next_group[chosen] += 1
        left[chosen] -= 1
    return order.reshape(-1)


def rank_share(plan: EpochPlan, batch: int, unit: int, rank: int, world_size: int) -> slice:
    """The slice of `plan.rows` that is this rank's share of a batch, as even as whole units
    allow.
    """
    first = int(plan.bounds[batch])
    last = int(plan.bounds[batch + 1])
    units = (last - first) // unit
    return slice(
        first + units * rank // world_size * unit, first + units * (rank + 1) // world_size * unit
    )
