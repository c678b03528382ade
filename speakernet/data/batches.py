"""From rows of the list to a batch of crops: the work of a worker process, whole batches at a time.

A `BatchMaker` reads the crops of a request into one array and augments them if that happens on the
CPU; a `ResidentMaker` cuts them from a corpus on the training device. Neither knows about queues or
processes, and labels only serve to find another utterance of the same speaker. Every random choice
is keyed by (seed, epoch, row).
"""

import functools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.nn import functional

from speakernet.data.audio import RESAMPLER_REACH, AudioError, to_int16
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.on_device import DeviceAudio, send, to_float
from speakernet.data.packed import PackedRows
from speakernet.data.sources import RowReader
from speakernet.random import REPLACEMENT_STREAM, START_STREAM, KeyedRandom

# Samples read beyond a crop whose speed is changed, so that its end has no filter transient.
RESAMPLER_MARGIN = 32
KAISER_BETA = 5.0  # of scipy's default window
LARGEST_DENOMINATOR = 20  # of a factor: larger ones would make the resampler's filter long
KEPT_FILTERS = 64
COPY_SAMPLES = 1 << 24  # moved at once, so that no second copy of the corpus is needed
MAX_REPLACEMENTS = 8  # attempts after which a speaker counts as having no readable utterance


@dataclass
class Batch:
    """One batch for the trainer."""

    waveforms: Tensor
    labels: Tensor
    indices: Tensor
    rank_sizes: tuple[int, ...]
    draw_key: int
    draw_rows: ndarray


@dataclass
class BatchRequest:
    """The specification of one batch: a few hundred bytes that travel to worker processes."""

    epoch: int
    rows: ndarray
    """As in `EpochPlan`; they key the random choices of each utterance."""
    speeds: ndarray
    num_samples: int
    batch: int = 0
    slot: int = 0


@dataclass
class BatchReport:
    """The outcome of a request: the rows that were finally read, and what went wrong."""

    rows: ndarray
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # As text: an exception from a worker would arrive with the worker's traceback.
    error: str = ""
    read_seconds: float = 0.0


Made = tuple[BatchRequest, Tensor, BatchReport]


class SpeakerIndex:
    """The rows of each speaker, for finding another utterance of the same speaker."""

    def __init__(self, labels: ndarray, eligible: ndarray) -> None:
        self.labels = labels
        self.order = eligible[np.argsort(labels[eligible], kind="stable")].astype(np.int32)
        counts = np.bincount(labels[eligible], minlength=int(labels.max(initial=0)) + 1)
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def others(self, rows: ndarray, uniform: ndarray) -> ndarray:
        """For each row another row of its speaker, chosen by a number in [0, 1); the row itself if
        its speaker has no eligible one.
        """
        labels = self.labels[rows]
        first = self.first[labels]
        counts = self.first[labels + 1] - first
        places = first + (uniform * counts).astype(np.int64)
        return np.where(counts > 0, self.order[np.minimum(places, len(self.order) - 1)], rows)


@dataclass(eq=False)
class CropMaker(ABC):
    """Makes the crops of batches: in this process, in worker processes, or on the training
    device.
    """

    reader: RowReader
    lengths: ndarray
    seed: int
    speakers: SpeakerIndex | None = None
    speeds: Sequence[Fraction] = (Fraction(1),)
    augmenter: Augmenter | None = None
    """Augments the crops right away; None: they are augmented later or not at all."""
    changes_speed: bool = True
    """Whether the crops already have their speeds; if not, each row has the samples that its speed
    needs."""

    @abstractmethod
    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """Yield each request, in order, with its crops (batch, samples; valid until the next
        request) and report.
        """

    def close(self) -> None:
        """Release the resources held between epochs."""
        return

    def crop_places(
        self, request: BatchRequest, lengths: ndarray, places: ndarray | slice = slice(None)
    ) -> tuple[ndarray, ndarray]:
        """Where each crop begins in its utterance of `lengths`, and how many samples are read for
        it, int64 (crops,).

        Keyed by the requested row, so that a replacement is cut where the original would have been.
        """
        random = KeyedRandom(self.seed, request.epoch, request.rows[places])
        uniform = random.uniform(START_STREAM)[:, 0]
        by_speed = [samples_to_read(factor, request.num_samples) for factor in self.speeds]
        counts = np.array(by_speed)[request.speeds[places]]
        return (uniform * np.maximum(lengths - counts + 1, 1)).astype(np.int64), counts

    def _read(
        self, request: BatchRequest, rows: ndarray, places: ndarray, out: ndarray
    ) -> dict[int, str]:
        """Read `rows` into `out[places]`; returns place -> problem."""
        raise NotImplementedError

    def _read_or_replace(self, request: BatchRequest, report: BatchReport, out: ndarray) -> None:
        """Read the rows of a request; an unreadable row is replaced by another of its speaker and
        reported.
        """
        places = np.arange(len(request.rows))
        attempt = 0
        while problems := self._read(request, report.rows[places], places, out):
            if self.speakers is None or attempt == MAX_REPLACEMENTS:
                first = next(iter(problems.values()))
                if self.speakers is None:
                    first += " (data.on_bad_audio: skip replaces such utterances and counts them)"
                raise AudioError(first)
            # A new draw for each attempt, keyed by the requested row, so that workers and ranks do
            # not matter.
            attempt += 1
            report.problems.extend(problems.values())
            places = np.array(sorted(problems))
            random = KeyedRandom(self.seed, request.epoch, request.rows[places])
            uniform = random.uniform(REPLACEMENT_STREAM, attempt)[:, -1]
            rows = request.rows[places] % len(self.lengths)
            report.rows[places] = self.speakers.others(rows, uniform)


class WrappedMaker(CropMaker):
    """Has another maker make its crops, in other processes or with a head start."""

    def __init__(self, maker: CropMaker) -> None:
        super().__init__(
            maker.reader,
            maker.lengths,
            maker.seed,
            maker.speakers,
            maker.speeds,
            maker.augmenter,
            maker.changes_speed,
        )
        self.maker = maker

    def close(self) -> None:
        """See `CropMaker.close`."""
        self.maker.close()


@dataclass(eq=False)
class BatchMaker(CropMaker):
    """Reads and augments one batch at a time; augmentation works on float32 at its final speed."""

    dtype: type = np.float32
    """Type of the returned samples; int16 is possible only without augmentation."""

    def width(self, num_samples: int) -> int:
        """Samples per returned row for crops of `num_samples`."""
        return num_samples if self.changes_speed else most_samples_to_read(self.speeds, num_samples)

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """Make the batches in this process, one after the other; see `CropMaker.run`."""
        for request in requests:
            # New memory for each batch, because float32 crops are passed on without a copy.
            out: ndarray = np.empty(
                (len(request.rows), self.width(request.num_samples)), dtype=self.dtype
            )
            yield request, torch.from_numpy(out), self.make(request, out)

    def make(self, request: BatchRequest, out: ndarray) -> BatchReport:
        """Fill `out` (batch, `width`) of `dtype`."""
        # The reader counts from its creation, here or in a worker; the report has only this batch's
        # share.
        before = Counter(self.reader.counts)
        report = BatchReport(request.rows % len(self.lengths))
        begin = time.perf_counter()
        if self.changes_speed and any(speed != 1 for speed in self.speeds):
            most = most_samples_to_read(self.speeds, request.num_samples)
            crops = np.empty((len(out), most), dtype=np.float32)
            self._read_or_replace(request, report, crops)
            changed = change_speeds(
                torch.from_numpy(crops), request.speeds, self.speeds, request.num_samples
            ).numpy()
            out[:] = to_int16(changed) if out.dtype == np.int16 else changed
        else:
            self._read_or_replace(request, report, out)
        report.read_seconds = time.perf_counter() - begin
        if self.augmenter is not None:
            made = self.augmenter(torch.from_numpy(out), epoch=request.epoch, rows=request.rows)
            if made.data_ptr() != out.ctypes.data:
                torch.from_numpy(out).copy_(made)
        report.counts = Counter(self.reader.counts) - before
        return report

    def _read(
        self, request: BatchRequest, rows: ndarray, places: ndarray, out: ndarray
    ) -> dict[int, str]:
        starts, counts = self.crop_places(request, self.lengths[rows], places)
        if len(places) == len(out) and (counts == out.shape[1]).all():
            # The usual batch, at one speed and without replacements, is read in place.
            return self.reader.fill(rows, starts, out)
        problems: dict[int, str] = {}
        for count in np.unique(counts).tolist():
            chosen = np.flatnonzero(counts == count)
            crops = np.empty((len(chosen), count), dtype=out.dtype)
            for position, problem in self.reader.fill(rows[chosen], starts[chosen], crops).items():
                problems[int(places[chosen[position]])] = problem
            out[places[chosen], :count] = crops
        return problems


@dataclass(eq=False)
class ResidentMaker(CropMaker):
    """Cuts the crops on a device, from a packed or in-memory corpus stored there as one int16
    tensor.

    The CPU only draws where crops begin, from the lengths in the headers and thus at the same
    places as `BatchMaker`. The same code runs on a CPU device, for tests.
    """

    reader: PackedRows
    device: torch.device = field(kw_only=True)

    def __post_init__(self) -> None:
        samples = self.reader.samples
        self.corpus = DeviceAudio(torch.empty(len(samples), dtype=torch.int16, device=self.device))
        for first in range(0, len(samples), COPY_SAMPLES):
            # Copied: a packed corpus is mapped read-only, and torch warns about tensors over
            # read-only memory.
            part = np.array(samples[first : first + COPY_SAMPLES])
            self.corpus.samples[first : first + len(part)] = torch.from_numpy(part).to(self.device)

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """See `CropMaker.run`."""
        for request in requests:
            yield request, *self.make(request)

    def make(self, request: BatchRequest) -> tuple[Tensor, BatchReport]:
        """The request's crops, float32 (batch, samples), on the device; short utterances are
        wrapped around.
        """
        report = BatchReport(request.rows % len(self.lengths))
        self._read_or_replace(request, report, np.empty(0))
        starts, _ = self.crop_places(request, self.lengths[report.rows])
        lengths = self.reader.lengths[report.rows]
        # An utterance shorter than its header claims may end before the start that was drawn for
        # it.
        starts[starts >= lengths] = 0
        most = most_samples_to_read(self.speeds, request.num_samples)
        crops = self.corpus.crops(self.reader.starts_of(report.rows), starts, lengths, most)
        return change_speeds(
            to_float(crops), request.speeds, self.speeds, request.num_samples
        ), report

    def _read(
        self, request: BatchRequest, rows: ndarray, places: ndarray, out: ndarray
    ) -> dict[int, str]:
        """Report rows that the corpus does not have; nothing is read."""
        problems = {}
        for position in np.flatnonzero(self.reader.lengths[rows] <= 0).tolist():
            try:
                self.reader.span(int(rows[position]))
            except AudioError as error:
                problems[int(places[position])] = str(error)
        return problems


def speed_fractions(factors: Sequence[float]) -> list[Fraction]:
    """The speed factors as fractions, with 1 first if included, so that speakers at speed 1 keep
    their labels.

    >>> speed_fractions([0.9, 1.0, 1.1])
    [Fraction(1, 1), Fraction(9, 10), Fraction(11, 10)]
    """
    fractions = [
        Fraction(factor).limit_denominator(LARGEST_DENOMINATOR) for factor in dict.fromkeys(factors)
    ]
    return sorted(fractions, key=lambda fraction: fraction != 1)


def samples_to_read(factor: Fraction, num_samples: int) -> int:
    """Number of source samples for a crop of `num_samples` at a speed."""
    if factor == 1:
        return num_samples
    return -(-num_samples * factor.numerator // factor.denominator) + RESAMPLER_MARGIN


def most_samples_to_read(factors: Sequence[Fraction], num_samples: int) -> int:
    """Number of source samples for a crop of `num_samples` at the fastest of several speeds."""
    return max(samples_to_read(factor, num_samples) for factor in factors)


def change_speed(crops: Tensor, factor: Fraction, num_samples: int) -> Tensor:
    """Play float32 (batch, samples) `factor` times as fast (tempo and pitch, like sox's `speed`),
    cut to `num_samples`.

    The signal counts as silent before the first sample and after the last.
    """
    if factor == 1:
        return crops[:, :num_samples]
    up = factor.denominator
    down = factor.numerator
    bank, before = _filter_bank(factor, crops.device)
    # Output q * up + p is a sum over the samples around q * down: one window for each q gives `up`
    # outputs.
    num_windows = -(-num_samples // up)
    needed = (num_windows - 1) * down + len(bank)
    padded = functional.pad(crops, (before, max(0, needed - before - crops.shape[1])))
    windows = padded[:, :needed].unfold(1, len(bank), down)
    # A matrix product keeps all bits of float32 (`machine.settings`); TF32 would keep only ten, too
    # few for the stop band. Autocast is off because a caller may have it on (when measuring
    # statistics), and audio must stay float32.
    with torch.autocast(crops.device.type, enabled=False):
        filtered = windows @ bank
    return filtered.reshape(len(crops), num_windows * up)[:, :num_samples]


def change_speeds(
    crops: Tensor, speeds: ndarray, factors: Sequence[Fraction], num_samples: int
) -> Tensor:
    """Play every row of a batch at its own speed.

    Returns:
        Float32 (batch, num_samples).
    """
    if not speeds.any():
        return change_speed(
            crops[:, : samples_to_read(factors[0], num_samples)], factors[0], num_samples
        )
    out = torch.empty(len(crops), num_samples, device=crops.device)
    present = np.unique(speeds).tolist()
    sent = send(crops.device, [np.flatnonzero(speeds == speed) for speed in present])
    for speed, chosen in zip(present, sent, strict=True):
        some = crops[chosen, : samples_to_read(factors[speed], num_samples)]
        out.index_copy_(0, chosen, change_speed(some, factors[speed], num_samples))
    return out


@functools.lru_cache(maxsize=KEPT_FILTERS)
def _filter_bank(factor: Fraction, device: torch.device) -> tuple[Tensor, int]:
    """Float32 (taps, up), one filter for each of the `up` outputs of a window, and the taps before
    its own sample.
    """
    up = factor.denominator
    down = factor.numerator
    slower = max(up, down)
    reach = RESAMPLER_REACH * slower
    places = np.arange(-reach, reach + 1)
    taps = np.sinc(places / slower) * np.kaiser(2 * reach + 1, KAISER_BETA)
    taps *= up / taps.sum()
    before = reach // up
    after = ((up - 1) * down + reach) // up
    # Output p is `p * down` steps of the fine grid after the window's own sample; sample j is at `j
    # * up`.
    distance = np.arange(up) * down - np.arange(-before, after + 1)[:, None] * up
    is_inside = np.abs(distance) <= reach
    bank = np.where(is_inside, taps[np.where(is_inside, distance, 0) + reach], 0.0)
    return torch.from_numpy(bank.astype(np.float32)).to(device), before


class ReadyCrops(WrappedMaker):
    """Replaces a loader's maker and answers every request immediately with the crops of the first.

    The loader then costs only what the device does for a step: the copy, speed changes and
    augmentation.
    """

    def __init__(self, maker: CropMaker) -> None:
        super().__init__(maker)
        self._made: Made | None = None

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """Yield the first request, a copy of its crops and its report once per request."""
        for _ in requests:
            if self._made is None:
                request, crops, report = next(iter(self.maker.run(requests[:1])))
                crops = crops.clone()
                if crops.device.type == "cpu" and torch.cuda.is_available():
                    crops = crops.pin_memory()
                self._made = (request, crops, report)
            request, crops, report = self._made
            # Augmentation on the device changes crops in place; those in pinned memory are copied
            # to a GPU first.
            yield request, crops if crops.is_pinned() else crops.clone(), report
