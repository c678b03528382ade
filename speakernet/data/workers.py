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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from typing import Any

import numpy as np
import torch

from speakernet.data.audio import AudioError
from speakernet.data.batches import BatchMaker, BatchReport, BatchRequest, CropMaker, Made
from speakernet.data.options import DataOptions
from speakernet.data.packed import PackedRows
from speakernet.data.sharing import SharedMemoryError, shared_zeros
from speakernet.machine.threads import STOP_SIGNALS

logger = logging.getLogger(__name__)

# Beside those in flight: the batch that was handed over, and the one before it, which may still be copied.
SPARE_SLOTS = 2
DEFAULT_START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"
PARENT_CHECK_SECONDS = 1.0
WAIT_SECONDS = 5.0
"""Between two looks at the workers while a batch does not come."""
LIKELY_REASONS = {
    "SIGKILL": "most likely the system ran out of memory: lower data.num_workers or data.prefetch_factor, or switch "
    "data.ram_corpus off",
    "SIGBUS": "most likely shared memory is full: in Docker raise --shm-size or use --ipc=host, else lower "
    "data.prefetch_factor or data.num_workers",
    "SIGSEGV": "a library crashed, often on a damaged audio file: data.num_workers: 0 shows which one",
}
RESUME = "The same command resumes if last.pt was written"
PAGE_LOCK_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process
BATCHES_AHEAD = 4
"""That threads read: a slow moment of a disk delays nobody; their pages are a few dozen megabytes."""
NUM_THREADS = 16
"""Reads at once, more than cores: they wait for the disk."""
CROPS_PER_TASK = 4


class WorkerDied(ChildProcessError):
    """A worker process gives no more batches: killed from outside, crashed, or hung."""

    exit_status = 75
    """Of the command (EX_TEMPFAIL of sysexits.h): nothing is wrong with the input, the same command may succeed."""


class Workers(CropMaker):
    """Worker processes and the ring they write into; both live as long as the loader."""

    def __init__(
        self, maker: BatchMaker, options: DataOptions, start_method: str | None = None, *, pins: bool = False
    ) -> None:
        more = (maker.speakers, maker.speeds, maker.augmenter, maker.changes_speed)
        super().__init__(maker.reader, maker.lengths, maker.seed, *more)
        self.maker, self._options, self._pins, self._is_pinned = maker, options, pins, False
        self._ahead = int(options.num_workers) * int(options.prefetch_factor)
        self._context: Any = multiprocessing.get_context(start_method or DEFAULT_START_METHOD)
        # Samples go through a ring made once: fresh shared tensors cost a page fault every 4 KiB of every batch.
        self._ring = torch.empty(0, 0)
        self._processes: list[Any] = []
        self._requests: list[Any] = []
        self._reports: list[Any] = []
        # Workers in the order of the requests that they have not answered.
        self._owing: deque[int] = deque()
        # They import everything again, and are sent what they need.
        if self._context.get_start_method() != "fork":
            maker.share()

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """Each request with its crops (memory that is valid until the next one) and report, in their order."""
        if not requests:
            return
        size = max(len(request.rows) * self.maker.width(request.num_samples) for request in requests)
        if not self._processes or not self._options.persistent_workers or self._ring.shape[1] < size:
            self._start(size)
        mine = self._processes
        # What an iteration left that ended in the middle.
        while self._owing:
            self._answer("the beginning of an epoch")
        turns, coming = itertools.cycle(range(len(mine))), enumerate(requests)
        try:
            self._send(coming, turns, self._ahead)
            for number, request in enumerate(requests):
                request.slot = number % len(self._ring)
                report = self._answer(f"batch {request.batch + 1} of epoch {request.epoch + 1}")
                self._send(coming, turns, 1)
                yield request, torch.from_numpy(_slot_of(self.maker, self._ring, request)), report
        finally:
            # Also if the reader stops early; but not the workers of the epoch after, if that has begun.
            if not self._options.persistent_workers and self._processes is mine:
                self.close()

    def close(self) -> None:
        """End the processes, at once: they hold nothing that is not in the ring."""
        kill(self._processes)
        for connection in (*self._requests, *self._reports):
            connection.close()
        self._processes, self._requests, self._reports = [], [], []
        self._owing.clear()
        if self._is_pinned:
            # Copies that are under way have to end first.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())
            self._is_pinned = False

    def _start(self, size: int) -> None:
        """Make a ring for batches of `size` samples, and the processes."""
        self.close()
        # The old one first: shared memory may not hold both.
        self._ring = torch.empty(0, 0)
        try:
            self._ring = shared_zeros((self._ahead + SPARE_SLOTS, size), self.maker.dtype)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                f"{self._options.num_workers} loader workers with {self._options.prefetch_factor} batches ahead: "
                f"{error}; or use --data.num_workers 0, a smaller --data.prefetch_factor or --data.batch_size"
            ) from error
        if self._pins:
            num_bytes = self._ring.numel() * self._ring.element_size()
            status = int(torch.cuda.cudart().cudaHostRegister(self._ring.data_ptr(), num_bytes, PAGE_LOCK_PORTABLE))
            self._is_pinned = status == 0
            if status:
                # The error would be reported by the next kernel, which has nothing to do with it: one that takes it.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device="cuda")
                # A limit on locked memory, say.
                logger.info(
                    "the ring of batches cannot be page-locked (CUDA error %d): batches are copied once", status
                )
        with _stop_signals_held():
            for number in range(int(self._options.num_workers)):
                requests, (reports, answers) = self._context.Queue(), self._context.Pipe(duplex=False)
                # Requests that a process has not read yet must not hold up the end of this one.
                requests.cancel_join_thread()
                arguments = (self.maker, self._ring, requests, answers)
                process = self._context.Process(target=_work, args=arguments, name=f"loader {number}", daemon=True)
                process.start()
                # Here it would stay open when the worker is gone.
                answers.close()
                self._processes.append(process)
                self._requests.append(requests)
                self._reports.append(reports)
        # Before multiprocessing's own end, which asks with the signal that they ignore and waits for ever.
        multiprocessing.util.Finalize(self, kill, args=(self._processes,), exitpriority=100)

    def _send(self, coming: Iterator[tuple[int, BatchRequest]], turns: Iterator[int], count: int) -> None:
        """Send the next `count` requests, if there are as many, to the workers in turn."""
        for number, request in itertools.islice(coming, count):
            request.slot = number % len(self._ring)
            self._owing.append(next(turns))
            self._requests[self._owing[-1]].put(request)

    def _answer(self, where: str) -> BatchReport:
        """The report on the oldest request that is not answered."""
        worker = self._owing[0]
        process, reports = self._processes[worker], self._reports[worker]
        who = f"loader worker {worker} of {len(self._processes)} (process {process.pid})"
        wait_seconds = min(WAIT_SECONDS, self._options.worker_timeout_seconds or WAIT_SECONDS)
        # Waits are counted: a clock would count the night of a run that was stopped.
        for waited in itertools.count(1):
            ready = wait_for([reports, process.sentinel], wait_seconds)
            if reports in ready:
                with contextlib.suppress(EOFError, OSError):
                    report = reports.recv()
                    self._owing.popleft()
                    return report
            if ready:
                process.join()
                how = f"ended with status {process.exitcode}: its output above says why"
                if process.exitcode < 0:
                    names = {int(one): one.name for one in signal.Signals}
                    name = names.get(-process.exitcode, f"signal {-process.exitcode}")
                    how = (
                        f"was ended by {name}: {LIKELY_REASONS.get(name, 'something outside this run sent the signal')}"
                    )
                raise WorkerDied(f"{who} {how}; this was found at {where}. {RESUME}")
            if 0 < self._options.worker_timeout_seconds <= waited * wait_seconds:
                raise WorkerDied(
                    f"{who} hangs: {where} did not come in {waited * wait_seconds:g} s (data.worker_timeout_seconds); "
                    "most likely the disk or network that holds the audio does not answer, or the process was stopped. "
                    f"{RESUME}"
                )
        raise AssertionError("counting has no end")


def kill(processes: list[Any]) -> None:
    """End processes that are still there, at once."""
    for process in processes:
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


def _work(maker: BatchMaker, ring: torch.Tensor, requests: Any, answers: Any) -> None:
    """In a worker: make the batches of requests in their slots of the ring, for as long as the training process is."""
    # `scancel`, `timeout` and Ctrl-C signal the whole process group; the checkpoint that follows needs the workers.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="parent-watch", daemon=True).start()
    torch.set_num_threads(1)
    while True:
        request = requests.get()
        try:
            report = maker.make(request, _slot_of(maker, ring, request))
        except AudioError as error:
            # As a value, so that the message arrives without a traceback around it.
            report = BatchReport(request.rows, error=str(error))
        answers.send(report)


def _end_with_parent(starter: int) -> None:
    """Wait for the end of the training process, or of the fork server `starter`, and end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The pipe to the parent shows it at once, but not while a younger worker, which inherited its other end, lives.
    while parent.is_alive() and os.getppid() == starter:
        parent.join(PARENT_CHECK_SECONDS)
    os._exit(0)


def _slot_of(maker: BatchMaker, ring: torch.Tensor, request: BatchRequest) -> np.ndarray:
    """The memory of a request's crops, (batch, width)."""
    shape = (len(request.rows), maker.width(request.num_samples))
    return ring.numpy()[request.slot, : shape[0] * shape[1]].reshape(shape)


class ReadAhead(CropMaker):
    """A `CropMaker` around another, for a packed corpus that memory does not hold.

    A crop that is not in memory is waited for, one after another, while the network waits too. Threads read the crops
    of the next batches, several at once, and throw them away: they then are in the system's page cache when their batch
    is made, here or in worker processes.
    """

    def __init__(self, maker: CropMaker, planner: CropMaker, num_asked: int = 0) -> None:
        assert isinstance(planner.reader, PackedRows)
        more = (maker.speakers, maker.speeds, maker.augmenter, maker.changes_speed)
        super().__init__(maker.reader, maker.lengths, maker.seed, *more)
        self.maker, self._rows, self._num_asked = maker, planner.reader, num_asked

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
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
        begins = self._rows.starts_of(request.rows)
        # A row that is not here has no samples.
        stops = np.minimum(begins + starts + counts, begins + self._rows.lengths[request.rows])
        return list(zip((begins + starts).tolist(), stops.tolist(), strict=True))

    def _touch(self, spans: list[tuple[int, int]]) -> None:
        for first, stop in spans:
            # The maker of the batch reports it, or takes another utterance.
            with contextlib.suppress(AudioError):
                self._rows.samples[first:stop]
