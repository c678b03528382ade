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

from speakernet.data.audio import to_int16
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.replacing import SpeakerIndex, read_or_replace
from speakernet.data.requests import BatchReport, BatchRequest
from speakernet.data.sharing import SharedArray
from speakernet.data.sources import RowReader
from speakernet.data.speeds import change_speed, most_samples_to_read, samples_to_read
from speakernet.random import START_STREAM, KeyedRandom


@dataclass
class Batch:
    """One batch for the trainer.

    Attributes:
        waveforms: float32 in -1..1 on the training device, (batch, samples).
        labels: class of each utterance, int64 (batch,), on the device.
        indices: rows of the training list, int64 (batch,), on the CPU. With K a speaker, place = speaker * K + k.
        shares: utterances that each process has of the whole batch, in the order of the processes.
        draw_key: of the random draws that the network itself makes in this epoch.
        warps: index into `voices.Voices.warps` of each utterance, which the front end hears it with, int64 (batch,).
    """

    waveforms: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    shares: tuple[int, ...]
    draw_key: int
    warps: np.ndarray


def crop_places(
    request: BatchRequest,
    lengths: np.ndarray,
    speeds: Sequence[Fraction],
    seed: int,
    places: np.ndarray | slice = slice(None),
) -> tuple[np.ndarray, np.ndarray]:
    """Where in its utterance each crop begins, and the samples that are read for it, both int64 (crops,).

    Keyed by the row that was asked for, so that a replacement is cut where the original would have been.

    Args:
        request: of the crops.
        lengths: samples of the utterances that are read, (crops,).
        speeds: the speed factors that `request.speeds` points into.
        seed: of the run.
        places: of the crops in the request; all of them.
    """
    uniform = KeyedRandom(seed, request.epoch, request.rows[places]).uniform(START_STREAM)[:, 0]
    counts = np.array([samples_to_read(factor, request.num_samples) for factor in speeds])[request.speeds[places]]
    return (uniform * np.maximum(lengths - counts + 1, 1)).astype(np.int64), counts


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
        changes_speed: whether the speed is changed here; else each row holds the samples that its speed needs.
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
        changes_speed: bool = True,
    ) -> None:
        assert not (augmenter and (is_int16 or not changes_speed)), "augmentation works on float32 at its final speed"
        self.reader = reader
        self.seed = seed
        self.speakers = speakers
        self.speeds = tuple(speeds)
        self.augmenter = augmenter
        self.changes_speed = changes_speed
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

    def width(self, num_samples: int) -> int:
        """Samples in a row of what is handed on for crops of `num_samples`."""
        return num_samples if self.changes_speed else most_samples_to_read(self.speeds, num_samples)

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
            out: np.ndarray = np.empty((len(request.rows), self.width(request.num_samples)), dtype=self.dtype)
            yield request, torch.from_numpy(out), self.make(request, out)

    def close(self) -> None:
        """Nothing is held."""

    def make(self, request: BatchRequest, out: np.ndarray) -> BatchReport:
        """Fill `out` (batch, `width`) of `dtype`.

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
        starts, counts = crop_places(request, self.lengths[rows], self.speeds, self.seed, places)
        speeds, num_samples = request.speeds[places], request.num_samples
        if not speeds.any() and self.speeds[0] == 1 and out.shape == (len(places), num_samples):
            # The usual batch, at one speed and without replacements, is read where it belongs.
            return self.reader.fill(rows, starts, out)
        problems: dict[int, str] = {}
        for speed in np.unique(speeds):
            chosen = np.flatnonzero(speeds == speed)
            factor = self.speeds[speed]
            is_changed = factor != 1 and self.changes_speed
            crops = np.empty((len(chosen), counts[chosen[0]]), dtype=np.float32 if is_changed else out.dtype)
            for position, problem in self.reader.fill(rows[chosen], starts[chosen], crops).items():
                problems[int(places[chosen[position]])] = problem
            if is_changed:
                crops = change_speed(torch.from_numpy(crops), factor, num_samples).numpy()
                crops = to_int16(crops) if out.dtype == np.int16 else crops
            out[places[chosen], : crops.shape[1]] = crops
        return problems
