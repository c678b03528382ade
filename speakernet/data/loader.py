"""The training loader: plans of epochs go in, batches on the training device come out.

Worker processes (`workers.py`) are sent whole-batch requests and write into a ring of shared memory that is made once:
what travels between processes is a few hundred bytes. With a GPU the transfer (int16 where possible) and device
augmentation run one batch ahead on a stream of their own.
"""

import functools
import logging
import math
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from speakernet.data.audio import AudioError, crop_samples
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.batches import Batch, BatchReport, BatchRequest, CropMaker, change_speeds
from speakernet.data.lists import TrainingList
from speakernet.data.on_device import send, to_float
from speakernet.data.options import DataOptions
from speakernet.data.sampling import EpochPlan, Sampler, rank_share
from speakernet.parallel import distributed
from speakernet.random import derive_seed
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)


class TrainingLoader:
    """Iterate to get `Batch`es of the epoch that `set_epoch` chose, from the position that `load_state_dict` gave.

    Args:
        maker: makes the crops, here, in workers or on the device.
        sampler: plans the epochs.
        training: the list: labels are the sampler's rows.
        options: of the section `data`, what was `auto` in them decided.
        device: where the batches go.
        augmenter: runs on the device, after the transfer; None when it runs with the reading or not at all.
        rank: this process among `world_size`.
        world_size: processes that share every batch.
    """

    def __init__(
        self,
        maker: CropMaker,
        sampler: Sampler,
        training: TrainingList,
        options: DataOptions,
        *,
        device: torch.device,
        augmenter: Augmenter | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.maker = maker
        self.sampler = sampler
        self.training = training
        self.options = options
        self.device = device
        self.augmenter = augmenter
        self.num_speakers = max(options.num_classes, len(training.speakers))
        self.num_classes = sampler.voices.num_classes(self.num_speakers)
        self.utterances_per_speaker = sampler.unit
        self._rank, self._world_size = rank, world_size
        self._labels = np.asarray(sampler.labels).astype(np.int64)
        self._epoch, self._batch = 0, 0
        self._plan: EpochPlan | None = None
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        self._read_bytes, self._read_seconds = 0, 0.0
        self._copies: deque[torch.cuda.Event] = deque()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0; the next iteration starts at its first batch."""
        if epoch != self._epoch:
            # Else it is kept: the trainer asks for the epoch's length first, and then for its batches.
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
        utterances = zlib.crc32(self._labels.tobytes(), self.training.paths.checksum)
        return {"training_list": utterances, "speakers": self.training.speakers.checksum}

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
        if self._rank == 0:
            # Counted there alone, or each process would count them.
            self._counts.update(state.get("counts", {}))
            self._problems += state.get("problems", [])

    def put_back(self, count: int) -> None:
        """Go back by so many of the batches that were handed out; the next iteration begins with them."""
        self._batch -= count

    def stand_in(self) -> Batch:
        """NaN in place of this process's share of the next batch, which could not be made: the step is undone by it."""
        request = self._request(self._batch)
        self._batch += 1
        waveforms = torch.full((len(request.rows), request.num_samples), math.nan, device=self.device)
        return self._batch_of(request, request.rows, waveforms)

    def _checksum(self) -> int:
        return self.plan.checksum ^ self.identity["training_list"]

    def file_names(self, indices: torch.Tensor | np.ndarray) -> list[str]:
        """The paths of some rows, as the list has them."""
        return [self.training.paths[int(row)] for row in indices]

    def read_bytes_a_second(self) -> float:
        """Speed at which one reader (a worker, or this process) read 16-bit samples in this epoch; 0 when unknown."""
        return self._read_bytes / self._read_seconds if self._read_seconds else 0.0

    def epoch_report(self) -> dict[str, Any]:
        """Counts of the epoch: utterances replaced, files that changed, cache hits, utterances left out."""
        everybody = distributed.gather_objects((dict(self._counts), self._problems))
        counts = sum((Counter(one) for one, _ in everybody), Counter())
        problems = [problem for _, some in everybody for problem in some]
        if problems:
            logger.warning(
                "%d unreadable utterances were replaced by others of the same speakers in epoch %d:\n  %s",
                counts["bad_utterances"],
                self._epoch + 1,
                "\n  ".join(problems[:MAX_NAMED]),
            )
        return {**counts, "left_out": self.plan.num_left_out}

    def close(self) -> None:
        """Stop what makes the crops."""
        self.maker.close()

    def _request(self, batch: int) -> BatchRequest:
        plan = self.plan
        # Whole batches are asked for, not utterances: what goes to a worker and comes back is then a few hundred bytes.
        share = self._share(batch, self._rank)
        num_samples = crop_samples(int(plan.crop_frames[batch]), self.options.sample_rate)
        speeds = self.sampler.voices.speeds_of(plan.voices[share])
        return BatchRequest(self._epoch, plan.rows[share], speeds, num_samples, batch)

    def _share(self, batch: int, rank: int) -> slice:
        """Where in the plan's rows a rank's part of a batch lies."""
        return rank_share(self.plan, batch, self.sampler.unit, rank, self._world_size)

    def _batches(self, requests: list[BatchRequest]) -> Iterator[tuple[Batch, BatchReport]]:
        for request, crops, report in self._made(requests):
            if report.error:
                raise AudioError(report.error)
            waveforms = self._to_device(crops)
            if not self.maker.changes_speed:
                waveforms = change_speeds(waveforms, request.speeds, self.maker.speeds, request.num_samples)
            if self.augmenter is not None:
                waveforms = self.augmenter(waveforms, epoch=request.epoch, rows=request.rows)
            yield self._batch_of(request, report.rows, waveforms), report

    def _batch_of(self, request: BatchRequest, rows: np.ndarray, waveforms: torch.Tensor) -> Batch:
        """What was asked for, with the rows that were read for it."""
        # In another voice a speaker is another class.
        voices, all_voices = self.plan.voices[self._share(request.batch, self._rank)], self.sampler.voices
        classes = all_voices.classes_of(self._labels[rows], voices, self.num_speakers)
        (labels,) = send(self.device, [classes])
        parts = (self._share(request.batch, rank) for rank in range(self._world_size))
        shares = tuple(part.stop - part.start for part in parts)
        key = derive_seed(self.sampler.seed, request.epoch)
        return Batch(waveforms, labels, torch.from_numpy(rows), shares, key, all_voices.warps_of(voices))

    def _made(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """What the maker makes, asked for only when the copy from the place that it writes to next is done."""
        self._wait_for_copies(0)
        made = self.maker.run(requests)
        while (one := next(made, None)) is not None:
            yield one
            # Of the ring's spare places one holds the last batch, still being copied; the other is written anew next.
            self._wait_for_copies(1)

    def _wait_for_copies(self, most_left: int) -> None:
        while len(self._copies) > most_left:
            copied = self._copies.popleft()
            if not copied.query():
                copied.synchronize()

    def _to_device(self, crops: torch.Tensor) -> torch.Tensor:
        if crops.device.type != "cpu":
            # Cut there, from a corpus that lies there.
            return crops
        if self.device.type == "cpu":
            # What workers hand over lies in their ring, which they go on writing into.
            is_own = crops.dtype == torch.float32 and self.options.num_workers == 0
            return crops if is_own else to_float(crops)
        # Only page-locked memory is copied while the GPU computes.
        staged = crops.pin_memory() if self.options.pin_memory else crops
        moved = staged.to(self.device, non_blocking=bool(self.options.pin_memory))
        if self.options.pin_memory and staged.data_ptr() == crops.data_ptr():
            # From the workers' ring itself, which is page-locked.
            self._copies.append(torch.cuda.current_stream(self.device).record_event())
        # As int16 a batch takes half the time over the bus; the GPU scales it for next to nothing.
        return to_float(moved) if moved.dtype == torch.int16 else moved

    def _note(self, report: BatchReport, num_samples: int) -> None:
        self._counts.update(report.counts)
        self._read_seconds += report.read_seconds
        self._read_bytes += 2 * num_samples
        if report.problems:
            self._counts["bad_utterances"] += len(report.problems)
            self._problems += report.problems[: MAX_NAMED - len(self._problems)]

    def _check_bad_share(self, report: BatchReport) -> None:
        """Before a batch is handed out or counted: whether what cannot be read has become too much with it.

        Raises:
            AudioError: it has, over the whole epoch; a reader that knows how many batches there are asks for no more
                after the last, so that one is held back.
        """
        # Of its own part of the epoch, where several processes share it.
        total = max(1, len(self.plan.rows) // self._world_size)
        bad = self._counts["bad_utterances"] + len(report.problems)
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
