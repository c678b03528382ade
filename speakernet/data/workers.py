"""The loader's worker processes, with the ring of shared memory they write into, and threads that
read ahead.

A stop signal from `scancel`, `timeout` or a container goes to the whole process group. The training
process then writes a checkpoint, for which its workers must be alive; so workers ignore stop
signals, and end when the training process closes them or is gone, however it ended.
"""

import contextlib
import itertools
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from speakernet.data.audio import AudioError
from speakernet.data.batches import (
    BatchMaker,
    BatchReport,
    BatchRequest,
    CropMaker,
    Made,
    WrappedMaker,
)
from speakernet.data.choices import ADVISED_SHARE
from speakernet.data.options import DataOptions
from speakernet.data.sharing import SharedMemoryError, shared_zeros
from speakernet.distributed import CommandEnd
from speakernet.machine.threads import STOP_SIGNALS

logger = logging.getLogger(__name__)

# Besides those in flight: the batch that was yielded last, and the previous one, which may still be
# copied.
SPARE_SLOTS = 2
START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"
PARENT_CHECK_SECONDS = 1.0
WAIT_SECONDS = 5.0
"""Between checks of the workers while waiting for a batch."""
JUDGED_BATCHES = 50
"""Batches after which waiting is judged."""
IDLE_SHARE = 0.5
"""Workers that compute for less than this share of the time wait for a disk or a network."""
LIKELY_REASONS = {
    "SIGKILL": "most likely the system ran out of memory: lower data.num_workers or "
    "data.prefetch_factor, or switch data.ram_corpus off",
    "SIGBUS": "most likely shared memory is full: in Docker raise --shm-size or use --ipc=host, "
    "otherwise lower data.prefetch_factor or data.num_workers",
    "SIGSEGV": "a library crashed, often on a damaged audio file: data.num_workers: 0 shows which "
    "one",
}
RESUME = "The same command resumes if last.pt was written"
PAGE_LOCK_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process
BATCHES_AHEAD = 4
"""Batches that threads read ahead, so that a slow moment of the disk delays nothing; they take tens
of megabytes."""
NUM_THREADS = 16
"""Simultaneous reads, more than there are cores, because they wait for the disk."""
CROPS_PER_TASK = 4


class WorkerDied(CommandEnd, ChildProcessError):
    """A worker process no longer delivers batches: it was killed from outside, crashed or hangs."""

    exit_status = 75
    """The command's status (EX_TEMPFAIL in sysexits.h): the input is fine, so the same command may
    succeed later."""


# The ring. Workers write crops into shared memory that is made once, before they start: a ring of
# slots, each as large as the largest batch. A new shared tensor for each batch would cost a page
# fault for every 4 KiB of it, and sending the samples through a pipe two copies. So only requests
# (rows, speeds) and reports (which rows were read) travel between processes, a few hundred bytes.
#
# Request n is written to slot n modulo the number of slots, by the workers in turn, and `run` takes
# the answers in the same order, so that batches come in order however fast each worker is. Nothing
# is locked: a slot is written again only when its next request has been sent, which happens after
# its last batch was given back. That is why the ring has `SPARE_SLOTS` more slots than requests in
# flight: the consumer still holds the batch that was yielded last, and a GPU may still be copying
# the one before.


class Worker(NamedTuple):
    """A worker process, its requests, and our end of the pipe with its reports."""

    process: Any
    requests: Any
    reports: Any


class _Moment(NamedTuple):
    """A moment from which waiting is judged."""

    time: float
    waited: float
    """Seconds for which the training process has waited."""
    busy: float
    """Seconds for which the workers have computed."""


class Workers(WrappedMaker):
    """Worker processes and the ring they write into; both live as long as the loader.

    With `may_grow`, more processes start while training waits for workers that hardly compute.
    Batches do not depend on who makes them.
    """

    maker: BatchMaker

    def __init__(
        self,
        maker: BatchMaker,
        options: DataOptions,
        *,
        pins: bool = False,
        may_grow: bool = False,
    ) -> None:
        super().__init__(maker)
        self._options = options
        self._may_grow = may_grow
        self._waited_seconds = 0.0
        self._pins = pins
        self._is_pinned = False
        self._ahead = int(options.num_workers) * int(options.prefetch_factor)
        self._context: Any = multiprocessing.get_context(START_METHOD)
        self._ring = torch.empty(0, 0)  # (slots, samples)
        self._workers: list[Worker] = []
        # The number of the worker of each unanswered request, in order.
        self._unanswered: deque[int] = deque()

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """Yield each request, in order, with its crops (valid until the next request) and
        report.
        """
        if not requests:
            return
        size = max(
            len(request.rows) * self.maker.width(request.num_samples) for request in requests
        )
        is_running = bool(self._workers) and bool(self._options.persistent_workers)
        if not is_running or self._ring.shape[1] < size:
            self._start(size)
        workers = self._workers
        # Discard answers left over from an iteration that stopped early.
        while self._unanswered:
            self._answer("the beginning of an epoch")
        coming = enumerate(requests)
        since: _Moment | None = None
        try:
            self._send(coming, self._ahead)
            for number, request in enumerate(requests):
                # As in `_send`: `requests` makes another object on each access.
                request.slot = number % len(self._ring)
                report = self._answer(f"batch {request.batch + 1} of epoch {request.epoch + 1}")
                self._send(coming, 1)
                if self._may_grow and (number + 1) % JUDGED_BATCHES == 0:
                    since = self._grow_if_waiting(since)
                yield request, torch.from_numpy(_slot_of(self.maker, self._ring, request)), report
        finally:
            # Also if the consumer stops early, but not the workers of the next epoch if that has
            # started.
            if not self._options.persistent_workers and self._workers is workers:
                self.close()

    def close(self) -> None:
        """End the processes immediately; everything they have made is in the ring."""
        kill(self._workers)
        self._workers = []
        self._unanswered.clear()
        if self._is_pinned:
            # Copies in progress must end first.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())
            self._is_pinned = False

    def _start(self, size: int) -> None:
        """Make a ring for batches of `size` samples, and start the processes."""
        self.close()
        # Free the old ring first: shared memory may not hold both.
        self._ring = torch.empty(0, 0)
        try:
            self._ring = shared_zeros((self._ahead + SPARE_SLOTS, size), self.maker.dtype)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                f"{self._options.num_workers} loader workers with {self._options.prefetch_factor} "
                f"batches ahead: {error}; otherwise use --data.num_workers 0, or a lower "
                "--data.prefetch_factor or --data.batch_size"
            ) from error
        if self._pins:
            self._pin_ring()
        with _stop_signals_held():
            for number in range(int(self._options.num_workers)):
                self._workers.append(self._start_worker(number))
        # Runs before multiprocessing's own clean-up, which sends a signal that workers ignore and
        # then waits forever.
        multiprocessing.util.Finalize(self, kill, args=(self._workers,), exitpriority=100)

    def _pin_ring(self) -> None:
        """Page-lock the ring, so that a GPU copies from it while it computes."""
        num_bytes = self._ring.numel() * self._ring.element_size()
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(self._ring.data_ptr(), num_bytes, PAGE_LOCK_PORTABLE))
        self._is_pinned = status == 0
        if status:
            # The next kernel would report the error, so run one here that may fail.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            # Perhaps because of a limit on locked memory.
            logger.info(
                "the ring of batches cannot be page-locked (CUDA error %d): batches are copied "
                "twice",
                status,
            )

    def _start_worker(self, number: int) -> Worker:
        requests = self._context.Queue()
        # Requests that a worker has not read yet must not delay the end of this process.
        requests.cancel_join_thread()
        reports, answers = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work,
            args=(self.maker, self._ring, requests, answers),
            name=f"loader {number}",
            daemon=True,
        )
        process.start()
        # Otherwise this end would stay open here after the worker is gone.
        answers.close()
        return Worker(process, requests, reports)

    def _grow_if_waiting(self, since: "_Moment | None") -> "_Moment":
        """Double the workers if training has waited although they hardly computed; return the
        moment from which the next judgement counts.
        """
        now = _Moment(time.monotonic(), self._waited_seconds, _busy_seconds(self._workers))
        # The first batches wait for the workers' start and for files that nobody has read yet.
        if since is None:
            return now
        seconds = now.time - since.time
        waited = (now.waited - since.waited) / seconds
        busy = (now.busy - since.busy) / (seconds * len(self._workers))
        # At most one worker for each batch in flight; any other would have nothing to do.
        more = min(len(self._workers), self._ahead - len(self._workers))
        if waited <= ADVISED_SHARE or busy >= IDLE_SHARE or more <= 0:
            return now
        logger.info(
            "%d more loader workers: training waited %.0f %% of the time for %d that wait for "
            "their disk",
            more,
            100 * waited,
            len(self._workers),
        )
        with _stop_signals_held():
            for _ in range(more):
                self._workers.append(self._start_worker(len(self._workers)))
        return now._replace(busy=_busy_seconds(self._workers))

    def _send(self, coming: Iterator[tuple[int, BatchRequest]], count: int) -> None:
        """Send up to `count` more requests to the workers in turn."""
        for number, request in itertools.islice(coming, count):
            request.slot = number % len(self._ring)
            worker = number % len(self._workers)
            self._unanswered.append(worker)
            self._workers[worker].requests.put(request)

    def _answer(self, where: str) -> BatchReport:
        """Wait for the report on the oldest unanswered request."""
        number = self._unanswered[0]
        process, _, reports = self._workers[number]
        who = f"loader worker {number} of {len(self._workers)} (process {process.pid})"
        timeout = self._options.worker_timeout_seconds
        # 0 is no limit.
        wait_seconds = min(WAIT_SECONDS, timeout or WAIT_SECONDS)
        silent_seconds = 0.0
        while True:
            begin = time.monotonic()
            ready = wait_for([reports, process.sentinel], wait_seconds)
            self._waited_seconds += time.monotonic() - begin
            if reports in ready:
                # A pipe without a report is that of a dead worker.
                with contextlib.suppress(EOFError, OSError):
                    report = reports.recv()
                    self._unanswered.popleft()
                    return report
            if ready:
                process.join()
                end = describe_end(process.exitcode)
                raise WorkerDied(f"{who} {end}; noticed at {where}. {RESUME}")
            # Counts waits instead of using a clock, which would include the time for which a run is
            # suspended.
            silent_seconds += wait_seconds
            if 0 < timeout <= silent_seconds:
                raise WorkerDied(
                    f"{who} hangs: {where} took more than {silent_seconds:g} s "
                    "(data.worker_timeout_seconds); most likely the disk or network with the audio "
                    f"does not respond, or the process was suspended. {RESUME}"
                )


def _busy_seconds(workers: Sequence[Worker]) -> float:
    """Processor time of the workers and of the ffmpegs they have run, in seconds."""
    total = 0.0
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(worker.process.pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def describe_end(exit_code: int) -> str:
    """How a process ended, and the likely reason."""
    if exit_code >= 0:
        return f"ended with status {exit_code}: see its output above"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    reason = LIKELY_REASONS.get(name, "something outside this run sent the signal")
    return f"was ended by {name}: {reason}"


def kill(workers: list[Worker]) -> None:
    """End the processes that are still running, and the connections to them."""
    for process, requests, reports in workers:
        process.kill()
        process.join()
        requests.close()
        reports.close()


@contextlib.contextmanager
def _stop_signals_held() -> Iterator[None]:
    """Hold back stop signals until the block ends; processes started in it hold them back too."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(maker: BatchMaker, ring: torch.Tensor, requests: Any, answers: Any) -> None:
    """In a worker: make the requested batches in their slots of the ring, for as long as the
    training process lives.
    """
    # `scancel`, `timeout` and Ctrl-C signal the whole process group; the checkpoint that follows
    # needs the workers.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(
        target=_end_with_parent, args=(os.getppid(),), name="parent-watch", daemon=True
    ).start()
    torch.set_num_threads(1)
    while True:
        request = requests.get()
        try:
            report = maker.make(request, _slot_of(maker, ring, request))
        except AudioError as error:
            # As a value, so that the message arrives without a traceback.
            report = BatchReport(request.rows, error=str(error))
        answers.send(report)


def _end_with_parent(starter: int) -> None:
    """Wait until the training process, or the fork server `starter`, ends, then end this
    process.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The pipe to the parent shows this immediately, unless a younger worker, which inherited its
    # other end, is alive.
    while parent.is_alive() and os.getppid() == starter:
        parent.join(PARENT_CHECK_SECONDS)
    os._exit(0)


def _slot_of(maker: BatchMaker, ring: torch.Tensor, request: BatchRequest) -> np.ndarray:
    """The memory of a request's crops, (batch, width)."""
    shape = (len(request.rows), maker.width(request.num_samples))
    return ring.numpy()[request.slot, : shape[0] * shape[1]].reshape(shape)


class ReadAhead(WrappedMaker):
    """Wraps a `CropMaker` for a corpus larger than memory.

    Crops that are not in memory would be read one after another while the network waits. Threads
    read the crops of the next batches, several at once, and discard them, so that they are in the
    system's page cache when their batch is made, here or in worker processes.
    """

    def __init__(self, maker: CropMaker, num_in_flight: int = 0) -> None:
        """`num_in_flight`: batches that `maker` prepares at once."""
        super().__init__(maker)
        self._num_in_flight = num_in_flight

    def run(self, requests: Sequence[BatchRequest]) -> Iterator[Made]:
        """See `CropMaker.run`."""
        reads: deque[list[Future]] = deque()
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        # When reading ahead begins, the maker already has the first requests and reads them itself.
        next_read = 1 + self._num_in_flight
        try:
            # The pool starts its threads on first use, after the worker processes were forked from
            # this one.
            for number, made in enumerate(self.maker.run(requests)):
                stop = number + 1 + self._num_in_flight + BATCHES_AHEAD
                reads.extend(self._touch(pool, request) for request in requests[next_read:stop])
                next_read = max(next_read, stop)
                yield made
                if reads:
                    # The reads of the request that the maker takes up next; without waiting for
                    # them, it would read that batch crop by crop.
                    wait(reads.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _touch(self, pool: ThreadPoolExecutor, request: BatchRequest) -> list[Future]:
        """Let threads read the crops of a request."""
        rows = request.rows
        starts, counts = self.crop_places(request, self.lengths[rows])
        tasks = []
        for place in range(0, len(rows), CROPS_PER_TASK):
            part = slice(place, place + CROPS_PER_TASK)
            tasks.append(pool.submit(self.reader.touch, rows[part], starts[part], counts[part]))
        return tasks
