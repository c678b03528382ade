"""From rows of the list to a batch of crops: what a worker process does, whole batches at a time.

A `BatchMaker` reads the crops of a request into one array and, when augmentation runs on the CPU, disturbs them. It
knows no labels but for finding another utterance of the same speaker, no queue and no device. Every random choice is
keyed by (seed, epoch, row).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch

from speakernet.data.audio import AudioError, resample, to_int16
from speakernet.data.keyed import KeyedRandom
from speakernet.data.sharing import SharedArray
from speakernet.data.sources import INT16_SCALE, RowReader

_START, _REPLACEMENT = 1, 2  # Streams of KeyedRandom; augmentation's begin at 16.
MAX_REPLACEMENTS = 8
RESAMPLER_MARGIN = 32  # samples read beyond a crop whose speed is changed, so that its end is not the filter's


class Augmenter(Protocol):
    """Disturbs a batch; `speakernet.data.augment.augmenter` has the real one."""

    def __call__(self, waveforms: torch.Tensor, *, epoch: int, rows: np.ndarray) -> torch.Tensor:
        """(batch, samples) float32 -> the same shape, every choice keyed by (epoch, row)."""


@dataclass
class BatchRequest:
    """What one batch is to hold.

    Attributes:
        epoch: counted from 0.
        rows: rows of the training list, (batch,).
        speeds: index into the speed factors, (batch,).
        num_samples: length of the crops.
        slot: where the result goes, for the loader's ring.
    """

    epoch: int
    rows: np.ndarray
    speeds: np.ndarray
    num_samples: int
    slot: int = 0


@dataclass
class BatchReport:
    """What came of a request: the rows that were used in the end, and what went wrong."""

    rows: np.ndarray
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    error: str = ""
    slot: int = 0
    read_seconds: float = 0.0


class SpeakerIndex:
    """The rows of each speaker, for finding another utterance of the same one."""

    def __init__(self, labels: np.ndarray, eligible: np.ndarray) -> None:
        order = eligible[np.argsort(labels[eligible], kind="stable")].astype(np.int32)
        counts = np.bincount(labels[eligible], minlength=int(labels.max(initial=0)) + 1)
        self._order = SharedArray(order)
        self._first = SharedArray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        self._labels = SharedArray(labels)

    def another(self, row: int, uniform: float) -> int:
        """Another row of the speaker of `row`, chosen by a number in [0, 1); `row` itself when it is the only one."""
        label = int(self._labels.array[row])
        first, last = int(self._first.array[label]), int(self._first.array[label + 1])
        return int(self._order.array[first + int(uniform * (last - first))]) if last > first else row

    def share(self) -> None:
        """Move into shared memory."""
        for array in (self._order, self._first, self._labels):
            array.share()


def read_or_replace(
    request: BatchRequest,
    report: BatchReport,
    read: Callable[[np.ndarray, np.ndarray], dict[int, str]],
    *,
    seed: int,
    speakers: SpeakerIndex | None,
) -> None:
    """Read a request's rows; one that cannot be read is replaced by another of its speaker, and both are reported.

    Args:
        request: what to read.
        report: its `rows` become those that were read, its `problems` grow.
        read: (rows, their places in the batch) -> place -> what is wrong.
        seed: of the run.
        speakers: where other utterances are found; None makes a row that cannot be read an error.

    Raises:
        AudioError: it is not to be replaced, or no replacement can be read either.
    """
    places = np.arange(len(request.rows))
    attempt = 0
    while problems := read(report.rows[places], places):
        if speakers is None or attempt == MAX_REPLACEMENTS:
            advice = "" if speakers else " (data.on_bad_audio: skip replaces such utterances and counts them)"
            raise AudioError(next(iter(problems.values())) + advice)
        attempt += 1
        report.problems.extend(problems.values())
        places = np.array(sorted(problems))
        uniform = KeyedRandom(seed, request.epoch, request.rows[places]).uniform(_REPLACEMENT, attempt)[:, -1]
        report.rows[places] = [
            speakers.another(int(row), float(u)) for row, u in zip(request.rows[places], uniform, strict=True)
        ]


class BatchMaker:
    """Reads and disturbs one batch at a time.

    Args:
        reader: fills crops from rows.
        lengths: samples of each row, (rows,).
        seed: of the run.
        speakers: for replacing unreadable utterances; None makes them errors.
        speeds: the speed factors that `BatchRequest.speeds` points into.
        augmenter: runs here when not None; else the crops are handed on as they are.
        is_int16: whether the crops are handed on as int16 (half the memory traffic; -1..1 is made of them later).
        is_plain: whether all files are 16-bit PCM at the rate asked for; for advice only.
    """

    def __init__(
        self,
        reader: RowReader,
        lengths: np.ndarray,
        *,
        seed: int,
        speakers: SpeakerIndex | None = None,
        speeds: Sequence[Fraction] = (Fraction(1),),
        augmenter: Augmenter | None = None,
        is_int16: bool = False,
        is_plain: bool = True,
    ) -> None:
        assert not (is_int16 and augmenter), "augmentation works on float32"
        self.reader = reader
        self.seed = seed
        self.speakers = speakers
        self.speeds = tuple(speeds)
        self.augmenter = augmenter
        self.dtype: type = np.int16 if is_int16 else np.float32
        self.is_plain = is_plain
        self._lengths = SharedArray(lengths)

    def share(self) -> None:
        """Move the arrays into shared memory, for workers that are spawned."""
        self._lengths.share()
        for part in (self.reader, self.speakers):
            share = getattr(part, "share", None)
            if share:
                share()

    def make(self, request: BatchRequest, out: np.ndarray) -> BatchReport:
        """Fill `out` (batch, samples) of `dtype`.

        Raises:
            AudioError: an utterance cannot be read and is not to be replaced, or no replacement was found.
        """
        before = Counter(self._counts())
        report = BatchReport(request.rows.copy(), slot=request.slot)
        begin = time.perf_counter()
        read_or_replace(
            request,
            report,
            lambda rows, places: self._read(request, rows, places, out),
            seed=self.seed,
            speakers=self.speakers,
        )
        report.read_seconds = time.perf_counter() - begin
        if self.augmenter is not None:
            made = self.augmenter(torch.from_numpy(out), epoch=request.epoch, rows=request.rows)
            if made.data_ptr() != out.ctypes.data:
                torch.from_numpy(out).copy_(made)
        report.counts = Counter(self._counts()) - before
        return report

    def _counts(self) -> dict[str, int]:
        cache = getattr(self.reader, "cache", None)
        return {**self.reader.counts, **(cache.counts() if cache else {})}

    def _read(self, request: BatchRequest, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> dict[int, str]:
        """Read `rows` into `out[places]`; returns place -> what is wrong."""
        # Keyed by the row that was asked for, so that a replacement is cut where the original would have been.
        uniform = KeyedRandom(self.seed, request.epoch, request.rows[places]).uniform(_START)[:, 0]
        lengths = self._lengths.array[rows]
        speeds = request.speeds[places]
        if not speeds.any() and self.speeds[0] == 1 and len(places) == len(out):
            starts = (uniform * np.maximum(lengths - out.shape[1] + 1, 1)).astype(np.int64)
            return self.reader.fill(rows, starts, out)
        problems: dict[int, str] = {}
        for speed in np.unique(speeds):
            chosen = np.flatnonzero(speeds == speed)
            factor = self.speeds[speed]
            count = out.shape[1] if factor == 1 else -(-out.shape[1] * factor.numerator // factor.denominator)
            count += 0 if factor == 1 else RESAMPLER_MARGIN
            starts = (uniform[chosen] * np.maximum(lengths[chosen] - count + 1, 1)).astype(np.int64)
            crops = np.empty((len(chosen), count), dtype=out.dtype if factor == 1 else np.float32)
            for position, problem in self.reader.fill(rows[chosen], starts, crops).items():
                problems[int(places[chosen[position]])] = problem
            out[places[chosen]] = change_speed(crops, factor, out.shape[1], out.dtype)
        return problems

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def change_speed(crops: np.ndarray, factor: Fraction, num_samples: int, dtype: Any = np.float32) -> np.ndarray:
    """Play (batch, samples) `factor` times as fast (tempo and pitch, as sox's `speed`), cut to `num_samples`."""
    if factor == 1:
        return crops
    made = resample(crops, factor.denominator, factor.numerator)[:, :num_samples]
    return to_int16(made) if dtype == np.int16 else made


def to_float(crops: torch.Tensor) -> torch.Tensor:
    """Int16 samples as float32 in -1..1; float32 ones as they are, in memory of their own."""
    if crops.dtype == torch.int16:
        return crops.to(torch.float32).mul_(float(INT16_SCALE))
    return crops.clone()
