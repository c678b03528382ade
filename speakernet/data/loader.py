"""The training loader: plans of epochs go in, batches on the training device come out.

Worker processes (`workers.py`) are sent whole-batch requests and write into a ring of shared memory that is made once:
what travels between processes is a few hundred bytes. With a GPU the transfer (int16 where possible) and device
augmentation run one batch ahead on a stream of their own.
"""

import functools
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from speakernet.data.audio import AudioError
from speakernet.data.batches import Augmenter, BatchMaker, BatchReport, BatchRequest, to_float
from speakernet.data.lists import StringTable
from speakernet.data.options import LoadingOptions
from speakernet.data.sampling import EpochPlan, rank_share
from speakernet.data.sampling import Sampler as EpochSampler
from speakernet.data.workers import Workers

log = logging.getLogger(__name__)

SHOWN_PROBLEMS = 10


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


class TrainingLoader:
    """Iterate to get `Batch`es of the epoch that `set_epoch` chose, from the position that `load_state_dict` gave.

    Args:
        maker: makes crops of requests.
        sampler: plans the epochs.
        names: paths of the list, for messages.
        num_speakers: classes without speed perturbation.
        device: where the batches go.
        samples_of: crop length in samples of a length in frames.
        augmenter: runs on the device, after the transfer; None when it runs in the workers or not at all.
        options: workers and queues, `auto` decided.
        start_method: of worker processes (`fork`, `spawn`, `forkserver`); None is the platform's own.
        rank: this process among `world_size`.
        world_size: processes that share every batch.
        resident: a maker whose corpus lies on the device; used instead of `maker` where given.
        speakers: names of the classes, by which a resumed run knows them again.
    """

    def __init__(
        self,
        maker: BatchMaker,
        sampler: EpochSampler,
        names: StringTable,
        *,
        num_speakers: int,
        device: torch.device,
        samples_of: Any,
        augmenter: Augmenter | None = None,
        options: LoadingOptions,
        start_method: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        resident: Any = None,
        speakers: StringTable | None = None,
    ) -> None:
        self.maker = maker
        self.sampler = sampler
        self.names = names
        self.device = device
        self.augmenter = augmenter
        self.options = options
        self._start_method = start_method
        self.resident = resident
        self.num_speakers = num_speakers
        self.num_classes = num_speakers * len(maker.speeds)
        self.utterances_per_speaker = sampler.unit
        self._speakers = speakers
        self._samples_of = samples_of
        self._rank, self._world_size = rank, world_size
        self._labels = torch.from_numpy(np.asarray(sampler.labels)).long()
        self._epoch, self._batch = 0, 0
        self._plan: EpochPlan | None = None
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        self._workers: Workers | None = None
        self._read_bytes, self._read_seconds = 0, 0.0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0; the next iteration starts at its first batch."""
        if epoch != self._epoch:
            self._plan = None
        self._epoch, self._batch = epoch, 0
        self._counts.clear()
        self._read_bytes, self._read_seconds = 0, 0.0
        self._problems.clear()

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def plan(self) -> EpochPlan:
        """The batches of the current epoch, over all ranks."""
        if self._plan is None:
            self._plan = self.sampler.epoch(self._epoch)
        return self._plan

    def __iter__(self) -> Iterator[Batch]:
        requests = [self._request(batch) for batch in range(self._batch, len(self.plan))]
        for batch, report in _one_ahead(self._batches(requests), self.device):
            self._check_bad_share(report)
            self._note(report, batch.waveforms.numel())
            self._batch += 1
            yield batch

    @functools.cached_property
    def identity(self) -> dict[str, int]:
        """Checksums of the classes' names and of the list: path and class of every utterance."""
        utterances = zlib.crc32(self._labels.numpy().tobytes(), self.names.checksum)
        return {"training_list": utterances} | ({"speakers": self._speakers.checksum} if self._speakers else {})

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of batches handed out in it, what could not be read in them, and by what the epoch's
        batches are known again.
        """
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "batches": len(self.plan),
            "checksum": self._checksum(),
            "counts": dict(self._counts),
            "problems": list(self._problems),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that many batches of that epoch.

        Raises:
            ValueError: the epoch has other batches now (batch size, sampler, seed or list were changed).
        """
        self.set_epoch(int(state["epoch"]))
        if state.get("checksum", self._checksum()) != self._checksum():
            raise ValueError(
                f"{state['batch']} of {state['batches']} batches were done, and the {len(self.plan)} of now are "
                "others; the batch size, the sampler, the seed or the training list was changed"
            )
        self._batch = int(state["batch"])
        self._counts.update(state.get("counts", {}))
        self._problems += state.get("problems", [])

    def _checksum(self) -> int:
        return self.plan.checksum ^ self.identity["training_list"]

    def file_names(self, indices: torch.Tensor | np.ndarray) -> list[str]:
        """The paths of some rows, as the list has them."""
        return [self.names[int(row)] for row in indices]

    def read_bytes_a_second(self) -> float:
        """Speed at which one reader (a worker, or this process) read 16-bit samples in this epoch; 0 when unknown."""
        return self._read_bytes / self._read_seconds if self._read_seconds else 0.0

    def epoch_report(self) -> dict[str, Any]:
        """Counts of the epoch: utterances replaced, files that changed, cache hits, utterances left out."""
        report: dict[str, Any] = dict(self._counts)
        report["left_out"] = self.plan.num_left_out
        if self._problems:
            log.warning(
                "%d unreadable utterances were replaced by others of the same speakers in epoch %d:\n  %s",
                self._counts["bad_utterances"],
                self._epoch + 1,
                "\n  ".join(self._problems[:SHOWN_PROBLEMS]),
            )
        return report

    def close(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _request(self, batch: int) -> BatchRequest:
        plan = self.plan
        share = rank_share(plan, batch, self.sampler.unit, self._rank, self._world_size)
        num_samples = int(self._samples_of(int(plan.crop_frames[batch])))
        return BatchRequest(self._epoch, plan.rows[share], plan.speeds[share], num_samples)

    def _batches(self, requests: list[BatchRequest]) -> Iterator[tuple[Batch, BatchReport]]:
        for request, crops, report in self._crops(requests):
            if report.error:
                raise AudioError(report.error)
            waveforms = crops if self.resident is not None else self._to_device(crops)
            if self.augmenter is not None:
                waveforms = self.augmenter(waveforms, epoch=request.epoch, rows=request.rows)
            rows = torch.from_numpy(report.rows)
            labels = self._labels[rows] + self.num_speakers * torch.from_numpy(request.speeds).long()
            yield Batch(waveforms, labels.to(self.device, non_blocking=True), rows), report

    def _crops(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """Each request with its crops (memory that is valid until the next one) and report."""
        if self.resident is not None:
            for request in requests:
                yield request, *self.resident.make(request)
        elif self.options.num_workers == 0:
            for request in requests:
                # New memory for each: float32 crops are handed out without a copy.
                out: np.ndarray = np.empty((len(request.rows), request.num_samples), dtype=self.maker.dtype)
                yield request, torch.from_numpy(out), self.maker.make(request, out)
        else:
            if self._workers is None:
                self._workers = Workers(self.maker, self.options, self._start_method)
            yield from self._workers.run(requests)

    def _to_device(self, crops: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            is_own = crops.dtype == torch.float32 and self.options.num_workers == 0
            return crops if is_own else to_float(crops)
        staged = crops.pin_memory() if self.options.pin_memory else crops
        moved = staged.to(self.device, non_blocking=bool(self.options.pin_memory))
        return to_float(moved) if moved.dtype == torch.int16 else moved

    def _note(self, report: BatchReport, num_samples: int) -> None:
        self._counts.update(report.counts)
        self._read_seconds += report.read_seconds
        self._read_bytes += 2 * num_samples
        if report.problems:
            self._counts["bad_utterances"] += len(report.problems)
            self._problems += report.problems[: SHOWN_PROBLEMS - len(self._problems)]

    def _check_bad_share(self, report: BatchReport) -> None:
        """Before a batch is handed out or counted: whether what cannot be read has become too much with it.

        Raises:
            AudioError: it has, over the whole epoch; a reader that knows how many batches there are asks for no more
                after the last, so that one is held back.
        """
        bad, total = self._counts["bad_utterances"] + len(report.problems), len(self.plan.rows)
        allowed = self.options.max_bad_share * total
        # Said early when it is hopeless: not after hours, and not because of one file in the first batch.
        is_time = self._batch + 1 == len(self.plan) or bad > max(10, allowed)
        if is_time and bad > allowed:
            raise AudioError(
                f"{bad} of {total} utterances could not be read, more than data.max_bad_share "
                f"({self.options.max_bad_share}) allows; the first: {[*self._problems, *report.problems][0]}"
            )


def _one_ahead(
    batches: Iterator[tuple[Batch, BatchReport]], device: torch.device
) -> Iterator[tuple[Batch, BatchReport]]:
    """On a GPU: start the next batch's transfer and augmentation on their own stream before handing out this one."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)

    def fetch() -> tuple[tuple[Batch, BatchReport] | None, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
            return batch, stream.record_event()

    made, ready = fetch()
    while made is not None:
        following = fetch()
        current = torch.cuda.current_stream(device)
        current.wait_event(ready)
        for tensor in (made[0].waveforms, made[0].labels):
            # Its memory must not be given away while the training stream still reads it.
            tensor.record_stream(current)
        yield made
        made, ready = following
