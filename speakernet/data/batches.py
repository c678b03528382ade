"""From rows of the list to a batch of crops: what a worker process does, whole batches at a time.

A `BatchMaker` reads the crops of a request into one array and, when augmentation runs on the CPU, disturbs them. It
knows no labels but for finding another utterance of the same speaker, no queue and no device. Every random choice is
keyed by (seed, epoch, row).
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.keyed import START_STREAM, KeyedRandom
from speakernet.data.replacing import SpeakerIndex, read_or_replace
from speakernet.data.requests import BatchReport, BatchRequest
from speakernet.data.sharing import SharedArray
from speakernet.data.sources import INT16_SCALE, RowReader
from speakernet.data.speeds import change_speed, samples_to_read


@dataclass
class Batch:
    """One batch for the trainer.

    Attributes:
        waveforms: float32 in -1..1 on the training device, (batch, samples).
        labels: class of each utterance, int64 (batch,), on the device.
        indices: rows of the training list, int64 (batch,), on the CPU. With K a speaker, place = speaker * K + k.
    """

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor


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
    ) -> None:
        assert not (is_int16 and augmenter), "augmentation works on float32"
        self.reader = reader
        self.seed = seed
        self.speakers = speakers
        self.speeds = tuple(speeds)
        self.augmenter = augmenter
        # Half the memory to write, to hand over and to move to a GPU, where nothing disturbs the samples before.
        self.dtype: type = np.int16 if is_int16 else np.float32
        self._lengths = SharedArray(lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Samples of each row, int64 (rows,)."""
        return self._lengths.array

    @property
    def augments(self) -> bool:
        """See `CropMaker.augments`."""
        return self.augmenter is not None

    def share(self) -> None:
        """Move the arrays into shared memory, for workers that start from nothing."""
        self._lengths.share()
        self.reader.share()
        if self.speakers is not None:
            self.speakers.share()

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """Make the batches here, one after the other; see `CropMaker.run`."""
        for request in requests:
            # New memory for each: float32 crops are handed out without a copy.
            out: np.ndarray = np.empty((len(request.rows), request.num_samples), dtype=self.dtype)
            yield request, torch.from_numpy(out), self.make(request, out)

    def close(self) -> None:
        """Nothing is held."""

    def make(self, request: BatchRequest, out: np.ndarray) -> BatchReport:
        """Fill `out` (batch, samples) of `dtype`.

        Raises:
            AudioError: an utterance cannot be read and is not to be replaced, or no replacement was found.
        """
        # Counts are the reader's since it was made, here or in a worker: the report has those of this batch.
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
        uniform = KeyedRandom(self.seed, request.epoch, request.rows[places]).uniform(START_STREAM)[:, 0]
        lengths = self.lengths[rows]
        speeds = request.speeds[places]
        if not speeds.any() and self.speeds[0] == 1 and len(places) == len(out):
            # The usual batch, at one speed and without replacements, is read where it belongs.
            starts = (uniform * np.maximum(lengths - out.shape[1] + 1, 1)).astype(np.int64)
            return self.reader.fill(rows, starts, out)
        problems: dict[int, str] = {}
        for speed in np.unique(speeds):
            chosen = np.flatnonzero(speeds == speed)
            factor = self.speeds[speed]
            count = samples_to_read(factor, out.shape[1])
            starts = (uniform[chosen] * np.maximum(lengths[chosen] - count + 1, 1)).astype(np.int64)
            crops = np.empty((len(chosen), count), dtype=out.dtype if factor == 1 else np.float32)
            for position, problem in self.reader.fill(rows[chosen], starts, crops).items():
                problems[int(places[chosen[position]])] = problem
            out[places[chosen]] = change_speed(crops, factor, out.shape[1], out.dtype)
        return problems


def to_float(crops: torch.Tensor) -> torch.Tensor:
    """Int16 samples as float32 in -1..1; float32 ones as they are, in memory of their own."""
    if crops.dtype == torch.int16:
        return crops.to(torch.float32).mul_(float(INT16_SCALE))
    return crops.clone()
