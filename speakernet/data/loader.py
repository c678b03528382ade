"""The training loader: plans of epochs go in, batches on the training device come out.

Worker processes (`workers.py`) receive requests for whole batches and write into a ring of shared
memory that is made once, so that only a few hundred bytes travel between processes. With a GPU, the
transfer (int16 if possible) and device augmentation run on their own stream, in parallel with the
previous step.
"""

import dataclasses
import functools
import logging
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speakernet import distributed
from speakernet.data.audio import AudioError, crop_samples
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.batches import Batch, BatchReport, BatchRequest, CropMaker, change_speeds
from speakernet.data.lists import TrainingList
from speakernet.data.on_device import to_float
from speakernet.data.options import DataOptions
from speakernet.data.sampling import EpochPlan, Sampler, rank_share
from speakernet.random import derive_seed
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

Batches = Iterator[tuple[Batch, BatchReport]]

FEW_PROBLEMS = 10
"""Up to this many unreadable utterances never stop a run before the end of an epoch."""


@dataclasses.dataclass(eq=False)
class TrainingLoader:
    """Iterates over the `Batch`es of the epoch set by `set_epoch`, from the position set by
    `load_state_dict`.
    """

    maker: CropMaker
    sampler: Sampler
    training: TrainingList
    options: DataOptions
    device: torch.device
    augmenter: Augmenter | None
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        # `num_classes` may leave space in the head for speakers that the list does not have.
        self.num_speakers = max(self.options.num_classes, len(self.training.speakers))
        self.num_classes = self.num_speakers * len(self.sampler.voices)
        self.utterances_per_speaker = self.sampler.unit
        self._labels = np.asarray(self.sampler.labels)
        self._copy_events: deque[torch.cuda.Event] = deque()
        self._plan: EpochPlan | None = None
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        self.epoch = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0; the next iteration starts at its first batch."""
        if epoch != self.epoch:
            # The same epoch keeps its plan: the trainer asks for the length of the epoch first,
            # then for its batches.
            self._plan = None
        self.epoch = epoch
        self.batch = 0
        self._read_bytes = 0
        self._read_seconds = 0.0
        self._counts.clear()
        self._problems.clear()

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def plan(self) -> EpochPlan:
        """The batches of the current epoch, over all ranks."""
        if self._plan is None:
            self._plan = self.sampler.epoch(self.epoch)
        return self._plan

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches(Requests(self, self.plan, range(self.batch, len(self.plan))))
        if self.device.type == "cuda":
            batches = _on_second_stream(batches, self.device)
        for batch, report in batches:
            self._count_problems(report.problems)
            self._counts.update(report.counts)
            self._read_seconds += report.read_seconds
            # Two bytes for each 16-bit sample.
            self._read_bytes += 2 * batch.waveforms.numel()
            self.batch += 1
            yield batch

    def _count_problems(self, problems: Sequence[str]) -> None:
        """Count the unreadable utterances of a batch; AudioError if there are too many."""
        bad = self._counts["bad_utterances"] + len(problems)
        first_problems = [*self._problems, *problems][:MAX_NAMED]
        # This rank's share of the epoch.
        total = max(1, len(self.plan.rows) // self.world_size)
        is_last_batch = self.batch + 1 == len(self.plan)
        # Stop early, before hours are lost, but not because of one file in the first batch.
        if bad > self.options.max_bad_share * total and (is_last_batch or bad > FEW_PROBLEMS):
            raise AudioError(
                f"{bad} of {total} utterances could not be read, more than data.max_bad_share "
                f"({self.options.max_bad_share}) allows; the first: {first_problems[0]}"
            )
        if problems:
            # Only now: a batch that stopped the run is counted when the run resumes with it.
            self._counts["bad_utterances"] = bad
            self._problems = first_problems

    @functools.cached_property
    def identity(self) -> dict[str, int]:
        """Checksums of the speakers' names and of the list (path and class of every utterance)."""
        utterances = zlib.crc32(self._labels.astype(np.int64).data, self.training.paths.checksum)
        return {"training_list": utterances, "speakers": self.training.speakers.checksum}

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches yielded so far, what could not be read, and a
        checksum of the plan.
        """
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "batches": len(self.plan),
            "processes": self.world_size,
            "checksum": self.plan.checksum ^ self.identity["training_list"],
            "counts": dict(self._counts),
            "problems": list(self._problems),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume in the saved epoch after the saved number of batches."""
        self.set_epoch(int(state["epoch"]))
        if state["checksum"] != self.plan.checksum ^ self.identity["training_list"]:
            processes = state.get("processes", self.world_size)
            reason = "the batch size, the sampler, the seed"
            if processes != self.world_size:
                reason = (
                    f"the number of processes (from {processes} to {self.world_size}; "
                    "streamed corpora depend on it)"
                )
            raise ValueError(
                f"{state['batch']} of {state['batches']} batches were done, but the epoch now "
                f"consists of {len(self)} different batches: {reason} or the training list has "
                "changed"
            )
        self.batch = int(state["batch"])
        if self.rank == 0:
            # Only on rank 0; otherwise every rank would count them.
            self._counts.update(state["counts"])
            self._problems += state["problems"]

    def file_names(self, indices: Tensor | np.ndarray) -> list[str]:
        """The paths of some rows, as in the list."""
        return [self.training.paths[int(row)] for row in indices]

    def read_bytes_a_second(self) -> float:
        """Speed at which one reader (a worker, or this process) read 16-bit samples in this epoch;
        0 if unknown.
        """
        return self._read_bytes / self._read_seconds if self._read_seconds else 0.0

    def epoch_report(self) -> dict[str, Any]:
        """Counts of the epoch: utterances replaced, files that changed, cache hits, utterances left
        out.
        """
        gathered = distributed.gather_objects((dict(self._counts), self._problems))
        counts: Counter[str] = Counter()
        problems: list[str] = []
        for counts_of_rank, problems_of_rank in gathered:
            counts.update(counts_of_rank)
            problems += problems_of_rank
        if problems:
            logger.warning(
                "%d unreadable utterances were replaced with others of the same speakers in epoch "
                "%d:\n  %s",
                counts["bad_utterances"],
                self.epoch + 1,
                "\n  ".join(problems[:MAX_NAMED]),
            )
        report: dict[str, Any] = dict(counts)
        if self.plan.drawn:
            report["drawn"] = dict(self.plan.drawn)
        report["left_out"] = self.plan.num_left_out
        return report

    def close(self) -> None:
        """Stop the crop maker."""
        self.maker.close()

    def _batches(self, requests: Sequence[BatchRequest]) -> Batches:
        """Batches on the training device; the maker's memory is reused only after the copy from it
        is done.
        """
        plan = self.plan
        sampler = self.sampler
        while self._copy_events:
            self._copy_events.popleft().synchronize()
        for request, crops, report in self.maker.run(requests):
            if report.error:
                raise AudioError(report.error)
            waveforms = self._to_device(crops)
            if not self.maker.changes_speed:
                waveforms = change_speeds(
                    waveforms, request.speeds, self.maker.speeds, request.num_samples
                )
            if self.augmenter is not None:
                waveforms = self.augmenter(waveforms, epoch=request.epoch, rows=request.rows)
            shares = [
                rank_share(plan, request.batch, sampler.unit, rank, self.world_size)
                for rank in range(self.world_size)
            ]
            voices = plan.voices[shares[self.rank]]
            # Labels of the rows that were actually read; a speaker in a different voice is a
            # different class.
            labels = torch.from_numpy(
                sampler.voices.classes_of(self._labels[report.rows], voices, self.num_speakers)
            )
            if self.device.type == "cuda":
                labels = labels.pin_memory().to(self.device, non_blocking=True)
            batch = Batch(
                waveforms,
                labels,
                indices=torch.from_numpy(report.rows),
                rank_sizes=tuple(share.stop - share.start for share in shares),
                # Masks and dither are keyed like crops: by the requested row, which differs between
                # repeats of an utterance.
                draw_key=derive_seed(sampler.seed, request.epoch),
                draw_rows=request.rows,
            )
            yield batch, report
            # The next request overwrites the slot of the batch before this one (`SPARE_SLOTS`), so
            # only this one may still be copied.
            while len(self._copy_events) > 1:
                self._copy_events.popleft().synchronize()

    def _to_device(self, crops: Tensor) -> Tensor:
        """Crops on the training device, float32, in memory that nothing else writes to."""
        if crops.device.type != "cpu":
            # Cut on the device, from a resident corpus.
            return crops
        if self.device.type == "cpu":
            # Crops of workers are in the ring, which the workers keep writing to.
            if crops.dtype == torch.float32 and self.options.num_workers == 0:
                return crops
            return to_float(crops)
        # Only page-locked memory can be copied while the GPU computes.
        staged = crops.pin_memory() if self.options.pin_memory else crops
        moved = staged.to(self.device, non_blocking=bool(self.options.pin_memory))
        if self.options.pin_memory and staged.data_ptr() == crops.data_ptr():
            # Copied directly from the workers' ring, which is page-locked.
            self._copy_events.append(torch.cuda.current_stream(self.device).record_event())
        # As int16, a batch takes half the time over the bus; the GPU scales it at almost no cost.
        return to_float(moved) if moved.dtype == torch.int16 else moved


@dataclasses.dataclass(frozen=True, eq=False)
class Requests(Sequence[BatchRequest]):
    """The remaining requests of an epoch for one rank, each made on access: an epoch may have a
    million.

    Each is for a whole batch, not an utterance, so that only a few hundred bytes travel to a worker
    and back.
    """

    loader: TrainingLoader
    plan: EpochPlan
    numbers: range
    """Numbers of the batches within the epoch."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        loader = self.loader
        number = self.numbers[place]
        plan = self.plan
        share = rank_share(plan, number, loader.sampler.unit, loader.rank, loader.world_size)
        num_samples = crop_samples(int(plan.crop_frames[number]), loader.options.sample_rate)
        return BatchRequest(
            loader.epoch,
            plan.rows[share].astype(np.int64),
            plan.voices[share],
            num_samples,
            batch=number,
        )


# Two streams on one GPU. While the training stream works through the kernels of a step, a second
# one copies and augments the next batch; the host only queues both. An event tells the training
# stream when the batch is there, and `record_stream` tells the allocator that the memory is still
# in use by the other stream, without which it could be given to the batch after next too early.
def _on_second_stream(batches: Batches, device: torch.device) -> Batches:
    """Transfer and augment each batch on a second stream, in parallel with the previous step; each
    is yielded before the next one is fetched.
    """
    stream = torch.cuda.Stream(device)
    while True:
        with torch.cuda.stream(stream):
            fetched = next(batches, None)
            ready = stream.record_event()
        if fetched is None:
            return
        batch, report = fetched
        training_stream = torch.cuda.current_stream(device)
        training_stream.wait_event(ready)
        for tensor in (batch.waveforms, batch.labels):
            # Its memory must not be reused while the training stream still reads it.
            tensor.record_stream(training_stream)
        yield batch, report
