"""The loader's worker processes, with the ring of shared memory they write into, and threads that read ahead.

A signal that asks the run to stop goes to the whole process group, as `scancel`, `timeout` and container stops send it.
The training process answers it by writing a checkpoint, for which it needs its workers alive; so workers ignore such
signals, and end when the training process closes them or is gone, however it ended.
"""

import contextlib
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from speakernet.data.audio import AudioError
from speakernet.data.batches import BatchMaker, BatchReport, BatchRequest, CropMaker, Made
from speakernet.data.options import DataOptions
from speakernet.data.packed import PackedRows
from speakernet.data.sharing import SharedMemoryError, shared_zeros
from speakernet.machine.threads import STOP_SIGNALS

logger = logging.getLogger(__name__)

# Beside those in flight: torch asks for the next batch before it hands one over, which is still being read.
SPARE_SLOTS = 2
PARENT_CHECK_SECONDS = 1.0
WAIT_SECONDS = 5.0
"""Between two looks at the workers while a batch does not come."""
TIMED_OUT = "DataLoader timed out"
"""The beginning of torch's error if nothing came in time; a test checks it."""
LIKELY_REASONS = {
    "SIGKILL": "most likely the system ran out of memory: lower data.num_workers or data.prefetch_factor, or switch "
    "data.ram_corpus off",
    "SIGBUS": "most likely shared memory is full: in Docker raise --shm-size or use --ipc=host, else lower "
    "data.prefetch_factor or data.num_workers",
    "SIGSEGV": "a library crashed, often on a damaged audio file: data.num_workers 0 shows at which one",
}
RESUME = "The same command resumes if last.pt was written"
PAGE_LOCK_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process
BATCHES_AHEAD = 4
"""That threads read: a slow moment of a disk delays nobody; their pages are a few dozen megabytes."""
NUM_THREADS = 16
"""Reads at once, more than cores: they wait for the disk."""
CROPS_PER_TASK = 4


def starts_from_nothing(start_method: str | None = None) -> bool:
    """Whether workers import everything again and are sent what they need, instead of being copies of this process."""
    return (start_method or ("fork" if sys.platform.startswith("linux") else "spawn")) != "fork"


class WorkerDied(ChildProcessError):
    """A worker process gives no more batches: killed from outside, crashed, or hung."""

    exit_status = 75
    """Of the command (EX_TEMPFAIL of sysexits.h): nothing is wrong with the input, the same command may succeed."""


class WorkerHung(WorkerDied):
    """A worker process lives and gave nothing for longer than `data.worker_timeout_seconds`."""


class Workers(CropMaker):
    """Worker processes and the ring they write into; both live as long as the loader."""

    def __init__(
        self, maker: BatchMaker, options: DataOptions, start_method: str | None = None, *, pins: bool = False
    ) -> None:
        super().__init__(maker.reader, maker.lengths, seed=maker.seed, speakers=maker.speakers, speeds=maker.speeds)
        self.maker = maker
        self.augments, self.changes_speed = maker.augments, maker.changes_speed
        self._num_workers, self._prefetch_factor = int(options.num_workers), int(options.prefetch_factor)
        self._is_persistent, self._start_method = options.persistent_workers, start_method
        self._timeout_seconds = options.worker_timeout_seconds
        self._wait_seconds = min(WAIT_SECONDS, self._timeout_seconds or WAIT_SECONDS)
        # Samples go through a ring made once: fresh shared tensors cost a page fault every 4 KiB of every batch.
        self._num_slots = self._num_workers * self._prefetch_factor + SPARE_SLOTS
        self._ring = torch.empty(0, 0)
        self._requests = _Requests()
        self._loader: DataLoader | None = None
        self._iterator: Any = None
        self._processes: list[Any] = []
        self._hangs = False
        self._at_exit: multiprocessing.util.Finalize | None = None
        self._pins, self._is_pinned = pins, False
        if starts_from_nothing(start_method):
            maker.share()

    def run(self, requests: list[BatchRequest]) -> Iterator[Made]:
        """Each request with its crops (memory that is valid until the next one) and report, in their order."""
        if not requests:
            return
        size = max(len(request.rows) * self.maker.width(request.num_samples) for request in requests)
        if self._loader is None or not self._is_persistent or self._ring.shape[1] < size:
            self._prepare(size)
        for number, request in enumerate(requests):
            request.slot = number % self._num_slots
        self._requests.requests = requests
        self._begin()
        mine = self._iterator
        try:
            for number, request in enumerate(requests):
                report = self._next(mine, number, request)
                yield request, torch.from_numpy(_slot_of(self.maker, self._ring, request)), report
        finally:
            # Also if the reader stops early; but not the workers of the epoch after, if that has begun.
            if not self._is_persistent and self._iterator is mine:
                self.close()

    def close(self) -> None:
        """End the processes; those that do not answer are killed."""
        if self._hangs:
            # torch would ask each of them for ten seconds.
            kill(self._processes)
        if self._iterator is not None:
            self._iterator._shutdown_workers()
        kill(self._processes)
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._loader = self._iterator = self._at_exit = None
        self._processes, self._hangs = [], False
        if self._is_pinned:
            # Copies that are under way have to end first.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())
            self._is_pinned = False

    def _prepare(self, size: int) -> None:
        self.close()
        # The old one first: shared memory may not hold both.
        self._ring = torch.empty(0, 0)
        try:
            self._ring = shared_zeros((self._num_slots, size), self.maker.dtype)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                f"{self._num_workers} loader workers with {self._prefetch_factor} batches ahead: {error}; or use "
                "--data.num_workers 0, a smaller --data.prefetch_factor or --data.batch_size"
            ) from error
        if self._pins:
            num_bytes = self._ring.numel() * self._ring.element_size()
            status = int(torch.cuda.cudart().cudaHostRegister(self._ring.data_ptr(), num_bytes, PAGE_LOCK_PORTABLE))
            self._is_pinned = status == 0
            if status:
                # A limit on locked memory, say.
                logger.info(
                    "the ring of batches cannot be page-locked (CUDA error %d): batches are copied once", status
                )
        self._loader = DataLoader(
            _RingDataset(self.maker, self._ring),
            batch_size=None,
            sampler=self._requests,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            persistent_workers=self._is_persistent,
            collate_fn=_as_it_is,
            worker_init_fn=_settle,
            timeout=self._wait_seconds,
            multiprocessing_context=self._start_method,
            # Its own: torch draws a seed for its workers, which draw nothing, at every start of an iteration. From the
            # global generator, dropout's, a run with workers or resumed would draw more than one without.
            generator=torch.Generator(),
        )

    def _begin(self) -> None:
        """Send the requests to the processes, which are started if there are none."""
        assert self._loader is not None
        if self._iterator is not None:
            # torch waits here for an answer of each worker, once, and gives up after WAIT_SECONDS.
            self._iterator._get_data = self._first_answer
            try:
                iter(self._loader)
            except RuntimeError as error:
                self._refuse_the_dead("the beginning of an epoch", error)
                raise
            finally:
                del self._iterator._get_data
            return
        with _stop_signals_held():
            self._iterator = iter(self._loader)
        self._processes = list(self._iterator._workers)
        # torch would raise from a signal handler, in the middle of a step or a checkpoint. Without it the death is
        # found when the next batch is waited for.
        signal_handling._remove_worker_pids(id(self._iterator))
        self._iterator._worker_pids_set = False
        # Before multiprocessing's own end, which asks with the signal that they ignore and waits for ever.
        self._at_exit = multiprocessing.util.Finalize(None, kill, args=(self._processes,), exitpriority=100)

    def _first_answer(self) -> Any:
        """What the next worker answers at the beginning of an epoch."""
        for waited in itertools.count(1):
            is_there, answer = self._iterator._try_get_data(self._wait_seconds)
            if is_there:
                return answer
            self._refuse_long_wait(
                waited, f"one of the {self._num_workers} loader workers", "the beginning of an epoch"
            )
        raise AssertionError("counting has no end")

    def _next(self, iterator: Any, number: int, request: BatchRequest) -> BatchReport:
        """The report of the request of that number, which is the next to come."""
        where = f"batch {request.batch + 1} of epoch {request.epoch + 1}"
        for waited in itertools.count(1):
            try:
                return next(iterator)
            except RuntimeError as error:
                self._refuse_the_dead(where, error)
                if not str(error).startswith(TIMED_OUT):
                    raise
                # torch hands requests out in turn.
                worker = number % self._num_workers
                who = f"loader worker {worker} of {self._num_workers} (process {self._processes[worker].pid})"
                self._refuse_long_wait(waited, who, where)
        raise AssertionError("counting has no end")

    def _refuse_long_wait(self, waited: int, who: str, where: str) -> None:
        """Raise WorkerHung after so many waits in vain: a clock would count the night of a run that was stopped."""
        seconds = waited * self._wait_seconds
        if self._timeout_seconds and seconds >= self._timeout_seconds:
            self._hangs = True
            raise WorkerHung(
                f"{who} hangs: {where} did not come in {seconds:g} s (data.worker_timeout_seconds); most likely the "
                f"disk or network that holds the audio does not answer, or the process was stopped. {RESUME}"
            )

    def _refuse_the_dead(self, where: str, error: RuntimeError) -> None:
        """Raise WorkerDied for the first worker that has ended, if any has."""
        ended = [number for number, process in enumerate(self._processes) if process.exitcode is not None]
        if not ended:
            return
        process, code = self._processes[ended[0]], self._processes[ended[0]].exitcode
        how = f"ended with status {code}: what it wrote above says why"
        if code < 0:
            known = {int(one): one.name for one in signal.Signals}
            name = known.get(-code, f"signal {-code}")
            how = f"was ended by {name}: {LIKELY_REASONS.get(name, 'something outside this run sent it')}"
        more = f" (and {len(ended) - 1} more)" if len(ended) > 1 else ""
        raise WorkerDied(
            f"loader worker {ended[0]} of {self._num_workers} (process {process.pid}) {how}{more}; this was found at "
            f"{where}. {RESUME}"
        ) from error


def kill(processes: list[Any]) -> None:
    """End processes that are still there, at once."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def _stop_signals_held() -> Iterator[None]:
    """Signals that ask to stop wait until the block is over; processes that are started in it hold them too."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle(_number: int) -> None:
    """In a new worker: leave requests to stop to the training process, and end when that is gone."""
    # `scancel`, `timeout` and Ctrl-C signal the whole process group; the checkpoint that follows needs the workers.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _end_with_parent(starter: int) -> None:
    """Wait for the end of the training process, or of the fork server `starter`, and end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The pipe to the parent shows it at once, but not while a younger worker, which inherited its other end, lives.
    while parent.is_alive() and os.getppid() == starter:
        parent.join(PARENT_CHECK_SECONDS)
    os._exit(0)


class _Requests(Sampler):
    """Hands torch's loader the requests of the current iteration."""

    requests: list[BatchRequest]

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


class _RingDataset(Dataset):
    """In a worker: makes a request's batch in its slot of the ring."""

    def __init__(self, maker: BatchMaker, ring: torch.Tensor) -> None:
        self.maker = maker
        self.ring = ring

    def __getitem__(self, request: BatchRequest) -> BatchReport:
        try:
            return self.maker.make(request, _slot_of(self.maker, self.ring, request))
        except AudioError as error:
            # As a value, so that the message arrives without a worker's traceback around it.
            return BatchReport(request.rows, error=str(error))


def _slot_of(maker: BatchMaker, ring: torch.Tensor, request: BatchRequest) -> np.ndarray:
    """The memory of a request's crops, (batch, width)."""
    shape = (len(request.rows), maker.width(request.num_samples))
    return ring.numpy()[request.slot, : shape[0] * shape[1]].reshape(shape)


def _as_it_is(report: Any) -> Any:
    return report


class ReadAhead(CropMaker):
    """A `CropMaker` around another, for a packed corpus that memory does not hold.

    A crop that is not in memory is waited for, one after another, while the network waits too. Threads read the crops
    of the next batches, several at once, and throw them away: they then are in the system's page cache when their batch
    is made, here or in worker processes.
    """

    def __init__(self, maker: CropMaker, planner: CropMaker, num_asked: int = 0) -> None:
        assert isinstance(planner.reader, PackedRows)
        super().__init__(maker.reader, maker.lengths, seed=maker.seed, speakers=maker.speakers, speeds=maker.speeds)
        self.maker, self._rows, self._num_asked = maker, planner.reader, num_asked
        self.augments, self.changes_speed = maker.augments, maker.changes_speed

    def run(self, requests: list[BatchRequest]) -> Iterator[Made]:
        """See `CropMaker.run`."""
        reads: deque[list[Future]] = deque()
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        # The maker has the first by now and reads them itself.
        begun = 1 + self._num_asked
        try:
            # The pool starts its threads when it is first used: worker processes, copies of this one, are there then.
            for number, made in enumerate(self.maker.run(requests)):
                wanted = number + 1 + self._num_asked + BATCHES_AHEAD
                for request in requests[begun:wanted]:
                    spans = self._spans(request)
                    tasks = (spans[place : place + CROPS_PER_TASK] for place in range(0, len(spans), CROPS_PER_TASK))
                    reads.append([pool.submit(self._touch, task) for task in tasks])
                begun = max(begun, wanted)
                yield made
                if reads:
                    # The maker would read it crop by crop.
                    wait(reads.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """See `CropMaker.close`."""
        self.maker.close()

    def _spans(self, request: BatchRequest) -> list[tuple[int, int]]:
        """First sample and end of each crop of a request."""
        starts, counts = self.crop_places(request, self.lengths[request.rows])
        begins = self._rows.starts[request.rows]
        # A row that is not here has no samples.
        stops = np.minimum(begins + starts + counts, begins + self._rows.lengths[request.rows])
        return list(zip((begins + starts).tolist(), stops.tolist(), strict=True))

    def _touch(self, spans: list[tuple[int, int]]) -> None:
        for first, stop in spans:
            # The maker of the batch reports it, or takes another utterance.
            with contextlib.suppress(AudioError):
                self._rows.samples[first:stop]
