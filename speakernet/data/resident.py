"""Device-resident mode: the whole corpus as one int16 tensor on the training device, crops gathered there.

The CPU only draws where crops begin. The same code runs on a CPU device, which is how it is tested.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import torch

from speakernet.data.audio import AudioError
from speakernet.data.batches import crop_places
from speakernet.data.on_device import DeviceAudio, copy_to_device, to_float
from speakernet.data.packed.corpus import PackedRows
from speakernet.data.replacing import SpeakerIndex, read_or_replace
from speakernet.data.requests import BatchReport, BatchRequest
from speakernet.data.speeds import change_speeds, most_samples_to_read


class ResidentMaker:
    """Makes batches of crops on a device from a packed or in-memory corpus.

    Args:
        reader: rows over one int16 array; what it holds of a row counts, not what the file's header said.
        lengths: samples of each row by its header, (rows,): crops begin where `BatchMaker` would begin them.
        seed: of the run.
        device: where the corpus goes.
        speakers: for replacing unreadable utterances; None makes them errors.
        speeds: the speed factors that `BatchRequest.speeds` points into.
    """

    # A CPU augments where crops are read: not here.
    augments = False
    changes_speed = True

    def __init__(
        self,
        reader: PackedRows,
        lengths: np.ndarray,
        *,
        seed: int,
        device: torch.device,
        speakers: SpeakerIndex | None = None,
        speeds: Sequence[Fraction] = (Fraction(1),),
    ) -> None:
        self.seed = seed
        self.speakers = speakers
        self.speeds = tuple(speeds)
        self.reader = reader
        self._header_lengths = lengths
        samples = reader.samples
        self.corpus = DeviceAudio(torch.empty(len(samples), dtype=torch.int16, device=device))
        copy_to_device(samples, self.corpus.samples)

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """See `CropMaker.run`."""
        for request in requests:
            yield request, *self.make(request)

    def close(self) -> None:
        """The corpus stays where it is as long as this object."""

    def make(self, request: BatchRequest) -> tuple[torch.Tensor, BatchReport]:
        """The request's crops, float32 (batch, samples), on the device; short utterances are wrapped around.

        Raises:
            AudioError: an utterance could not be read and is not to be replaced, or no replacement was found.
        """
        report = BatchReport(request.rows.copy(), slot=request.slot)
        read_or_replace(request, report, self._problems, seed=self.seed, speakers=self.speakers)
        starts, _ = crop_places(request, self._header_lengths[report.rows], self.speeds, self.seed)
        lengths = self.reader.lengths[report.rows]
        # An utterance that is shorter than its header said may end before the place that was drawn in it.
        starts[starts >= lengths] = 0
        most = most_samples_to_read(self.speeds, request.num_samples)
        crops = self.corpus.crops(self.reader.starts[report.rows], starts, lengths, most)
        return change_speeds(to_float(crops), request.speeds, self.speeds, request.num_samples), report

    def _problems(self, rows: np.ndarray, places: np.ndarray) -> dict[int, str]:
        """Place in the batch -> what is wrong, of rows that the corpus does not hold."""
        problems = {}
        for position in np.flatnonzero(self.reader.lengths[rows] <= 0).tolist():
            try:
                self.reader.span(int(rows[position]))
            except AudioError as error:
                problems[int(places[position])] = str(error)
        return problems
