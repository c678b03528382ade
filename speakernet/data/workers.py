"""The loader's worker processes: the ring of shared memory they write into, and how they live and die.

A signal that asks the run to stop goes to the whole process group, as `scancel`, `timeout` and container stops send it.
The training process answers it by writing a checkpoint, for which it needs its workers alive; so workers ignore such
signals, and end when the training process closes them or is gone, however it went.
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
from speakernet.data.batches import BatchMaker, BatchReport, BatchRequest, CropMaker, crop_places
from speakernet.data.options import DataOptions
from speakernet.data.packed import PackedRows
from speakernet.data.sharing import SharedArray, SharedMemoryError
from speakernet.machine.threads import STOP_SIGNALS

logger = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process


class PageLock:
    """Keeps an array page-locked for CUDA until `release`.

    Where the system refuses (a limit on locked memory, say) the array stays as it is, which is said: batches are then
    copied into page-locked memory one by one.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._address, self._runtime = 0, torch.cuda.cudart()
        if array.size == 0:
            return
        status = int(self._runtime.cudaHostRegister(array.ctypes.data, array.nbytes, PORTABLE))
        if status:
            logger.info("the ring of batches cannot be page-locked (CUDA error %d): each batch is copied once", status)
            return
        self._address = array.ctypes.data

    @property
    def is_held(self) -> bool:
        """Whether the array is page-locked."""
        return bool(self._address)

    def release(self) -> None:
        """Unlock the array; to be called before its memory goes."""
        if self._address:
            self._runtime.cudaHostUnregister(self._address)
            self._address = 0


# Beside those in flight: torch asks for the next batch before it hands one over, which is still being read.
SPARE_SLOTS = 2
PARENT_CHECK_SECONDS = 1.0
WAIT_SECONDS = 5.0
"""While a batch does not come, the workers are looked at so often."""
TIMED_OUT = "DataLoader timed out"
"""How torch's error begins where nothing came in time; the tests hold it to that."""
BEGINNING = "the beginning of an epoch"
LIKELY_REASONS = {
    "SIGKILL": "most likely the system ran out of memory and killed it: lower data.num_workers or "
    "data.prefetch_factor, or switch data.ram_corpus off",
    "SIGBUS": "most likely shared memory is full: in Docker raise --shm-size or use --ipc=host, else lower "
    "data.prefetch_factor or data.num_workers",
    "SIGSEGV": "a library crashed, often on a damaged audio file: data.num_workers 0 shows at which one",
}
"""What usually ends a worker with a signal, and what to do."""


def starts_from_nothing(start_method: str | None = None) -> bool:
    """Whether workers import everything anew and are sent what they need, rather than being copies of this process."""
    return (start_method or ("fork" if sys.platform.startswith("linux") else "spawn")) != "fork"


class WorkerDied(ChildProcessError):
    """A worker process gives no batches any more: killed from outside, crashed, or hung."""

    exit_status = 75
    """Of the command (EX_TEMPFAIL of sysexits.h): nothing is wrong with the input, the same command may go on."""


class WorkerHung(WorkerDied):
    """A worker process gave nothing for longer than anybody should wait."""


class Workers:
    """Worker processes and the ring they write into; both live as long as the loader.

    Args:
        maker: makes the batches, in the workers.
        options: number of processes and of batches ahead, both decided; whether they are kept between epochs; how long
            a batch is waited for.
        start_method: `fork`, `spawn` or `forkserver`; None is the platform's own.
        pins: page-lock the ring, so that a GPU copies batches from where the workers wrote them.
    """

    def __init__(
        self, maker: BatchMaker, options: DataOptions, start_method: str | None = None, *, pins: bool = False
    ) -> None:
        self.maker = maker
        self.reader, self.speeds = maker.reader, maker.speeds
        self.augments, self.changes_speed = maker.augments, maker.changes_speed
        self._num_workers, self._prefetch_factor = int(options.num_workers), int(options.prefetch_factor)
        self._is_persistent, self._start_method = options.persistent_workers, start_method
        self._timeout_seconds = options.worker_timeout_seconds
        self._wait_seconds = min(WAIT_SECONDS, self._timeout_seconds or WAIT_SECONDS)
        # Samples go through a ring made once: fresh shared tensors cost a page fault every 4 KiB of every batch.
        self._num_slots = self._num_workers * self._prefetch_factor + SPARE_SLOTS
        self._requests = _Requests()
        self._loader: DataLoader | None = None
        self._iterator: Any = None
        self._processes: list[Any] = []
        self._hangs = False
        self._at_exit: multiprocessing.util.Finalize | None = None
        self._ring = SharedArray(np.empty(0))
        self._pins = pins
        self._page_lock: PageLock | None = None
        if starts_from_nothing(start_method):
            maker.share()

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """Each request with its crops (memory that is valid until the next one) and report, in their order.

        Raises:
            WorkerDied: naming the worker, the batch, what ended it and the likely reason; `WorkerHung` where it lives
                and gives nothing.
        """
        if not requests:
            return
        size = max(len(request.rows) * self.maker.width(request.num_samples) for request in requests)
        if self._loader is None or not self._is_persistent or self._ring.array.shape[1] < size:
            self._prepare(size)
        for number, request in enumerate(requests):
            request.slot = number % self._num_slots
        self._requests.requests = requests
        self._begin()
        mine = self._iterator
        try:
            for number, request in enumerate(requests):
                report = self._next(mine, number, request)
                yield request, torch.from_numpy(_place(self.maker, self._ring, request)), report
        finally:
            # Also where the reader stops early; but not the workers of the epoch after, if that has begun.
            if not self._is_persistent and self._iterator is mine:
                self.close()

    def _next(self, iterator: Any, number: int, request: BatchRequest) -> BatchReport:
        """The report of the request of that number, which is the next to come.

        Raises:
            WorkerDied: a worker ended, or the batch did not come in time.
        """
        where = f"batch {request.batch + 1} of epoch {request.epoch + 1}"
        for waited in itertools.count(1):
            try:
                return next(iterator)
            except RuntimeError as error:
                self._refuse_the_dead(where, error)
                if not str(error).startswith(TIMED_OUT):
                    raise
                # Waits are counted, not the clock asked: a run that was stopped for a night has not waited one.
                if self._timeout_seconds and waited * self._wait_seconds >= self._timeout_seconds:
                    # torch hands requests out in turn.
                    worker = number % self._num_workers
                    self._hangs = True
                    raise WorkerHung(
                        f"loader worker {worker} of {self._num_workers} (process {self._processes[worker].pid}) hangs: "
                        f"{where} did not come in {waited * self._wait_seconds:g} s (data.worker_timeout_seconds); "
                        "most likely the disk or network that holds the audio does not answer. The same command goes "
                        "on where last.pt was written"
                    ) from error
        raise AssertionError("counting has no end")

    def close(self) -> None:
        """End the processes; those that do not answer are killed."""
        if self._hangs:
            # torch would ask each of them for ten seconds.
            kill(self._processes)
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None
        kill(self._processes)
        self._processes, self._hangs = [], False
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        self._loader = None
        self._unpin()

    def _unpin(self) -> None:
        if self._page_lock is not None:
            # Copies that are under way have to end first.
            torch.cuda.synchronize()
            self._page_lock.release()
            self._page_lock = None

    def _prepare(self, size: int) -> None:
        self.close()
        # The old one first: shared memory may not hold both.
        self._ring = SharedArray(np.empty(0))
        try:
            self._ring = SharedArray.allocate((self._num_slots, size), self.maker.dtype)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                f"{self._num_workers} loader workers with {self._prefetch_factor} batches ahead: {error}; or take "
                "--data.num_workers 0, a smaller --data.prefetch_factor or --data.batch_size"
            ) from error
        if self._pins:
            self._page_lock = PageLock(self._ring.array)
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
        """Hand the requests to the processes, which are started where there are none."""
        assert self._loader is not None
        if self._iterator is not None:
            # torch waits here for a word of each worker, once, and gives up after WAIT_SECONDS.
            self._iterator._get_data = self._word_of_a_worker
            try:
                iter(self._loader)
            except RuntimeError as error:
                self._refuse_the_dead(BEGINNING, error)
                raise
            finally:
                del self._iterator._get_data
            return
        with _stop_signals_held():
            self._iterator = iter(self._loader)
        self._processes = list(self._iterator._workers)
        # torch would raise from a signal handler, in the middle of whatever the training process is doing: half a
        # step, half a checkpoint. Without it the death is found where the next batch is waited for.
        signal_handling._remove_worker_pids(id(self._iterator))
        self._iterator._worker_pids_set = False
        # Before multiprocessing's own end, which asks with the signal that they ignore and waits for ever.
        self._at_exit = multiprocessing.util.Finalize(None, kill, args=(self._processes,), exitpriority=100)

    def _word_of_a_worker(self) -> Any:
        """What the next worker says, waited for as long as for a batch.

        Raises:
            WorkerHung: one says nothing.
        """
        for waited in itertools.count(1):
            is_there, word = self._iterator._try_get_data(self._wait_seconds)
            if is_there:
                return word
            if self._timeout_seconds and waited * self._wait_seconds >= self._timeout_seconds:
                self._hangs = True
                raise WorkerHung(
                    f"one of the {self._num_workers} loader workers hangs: it gave no sign in "
                    f"{waited * self._wait_seconds:g} s (data.worker_timeout_seconds) at {BEGINNING}; most likely it "
                    "was stopped, or the machine has too much to do. The same command goes on where last.pt was written"
                )
        raise AssertionError("counting has no end")

    def _refuse_the_dead(self, where: str, error: RuntimeError) -> None:
        """Raise where a worker has ended, which torch says in words of its own.

        Raises:
            WorkerDied: naming the first that did.
        """
        ended = {
            number: process.exitcode for number, process in enumerate(self._processes) if process.exitcode is not None
        }
        if not ended:
            return
        number, code = next(iter(ended.items()))
        more = f" (and {len(ended) - 1} more)" if len(ended) > 1 else ""
        raise WorkerDied(
            f"loader worker {number} of {self._num_workers} (process {self._processes[number].pid}) {_ending(code)}"
            f"{more}; this was found at {where}. The same command goes on where last.pt was written"
        ) from error


def kill(processes: list[Any]) -> None:
    """End processes that are still there, at once."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _ending(code: int) -> str:
    """How a process ended, and why it probably did."""
    if code >= 0:
        return f"ended by itself with status {code}: what it wrote above says why"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}: {LIKELY_REASONS.get(name, 'something outside this run sent it')}"


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
    """Wait for the end of the training process, then end this one, whatever it is doing.

    Args:
        starter: process that this one was started by: the training process, or a fork server that ends with it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The pipe to the parent tells at once, but not while a younger worker, which inherited its other end, lives.
    while parent.is_alive() and os.getppid() == starter:
        parent.join(PARENT_CHECK_SECONDS)
    os._exit(0)


class _Requests(Sampler):
    """Hands torch's loader the requests of the current iteration."""

    def __init__(self) -> None:
        self.requests: list[BatchRequest] = []

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


class _RingDataset(Dataset):
    """In a worker: makes a request's batch in its slot of the ring."""

    def __init__(self, maker: BatchMaker, ring: SharedArray) -> None:
        self.maker = maker
        self.ring = ring

    def __getitem__(self, request: BatchRequest) -> BatchReport:
        try:
            return self.maker.make(request, _place(self.maker, self.ring, request))
        except AudioError as error:
            # As a value, so that the message arrives without a worker's traceback around it.
            return BatchReport(request.rows, error=str(error), slot=request.slot)


def _place(maker: BatchMaker, ring: SharedArray, request: BatchRequest) -> np.ndarray:
    """Where in the ring a request's crops belong, (batch, width)."""
    shape = (len(request.rows), maker.width(request.num_samples))
    return ring.array[request.slot, : shape[0] * shape[1]].reshape(shape)


def _as_it_is(report: Any) -> Any:
    return report


BATCHES_AHEAD = 4
"""A disk that is slow for a moment holds nobody up; their pages are a few dozen megabytes."""
NUM_THREADS = 16
"""Reads at once, more than cores: they wait for the disk."""
CROPS_PER_TASK = 4


class ReadAhead:
    """A `CropMaker` around another: the same batches, whose crops were read before.

    Args:
        maker: makes the batches.
        planner: knows which crops a request needs; it reads a packed corpus.
        num_asked: requests that `maker` works on before it hands over the first: those of worker processes.
    """

    def __init__(self, maker: CropMaker, planner: BatchMaker, num_asked: int = 0) -> None:
        assert isinstance(planner.reader, PackedRows)
        self.maker, self.planner, self.reader = maker, planner, planner.reader
        self.speeds, self.augments, self.changes_speed = maker.speeds, maker.augments, maker.changes_speed
        self._num_asked = num_asked

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """See `CropMaker.run`."""
        reads: deque[list[Future]] = deque()
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")
        # Those that the maker has by now are read by it.
        begun = 1 + self._num_asked
        try:
            # The pool starts its threads when it is first used: worker processes, copies of this one, are there then.
            for number, made in enumerate(self.maker.run(requests)):
                wanted = number + 1 + self._num_asked + BATCHES_AHEAD
                for request in requests[begun:wanted]:
                    reads.append(self._read(pool, request))
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

    def _read(self, pool: ThreadPoolExecutor, request: BatchRequest) -> list[Future]:
        """Begin to read a request's crops."""
        rows, planner = request.rows, self.planner
        starts, counts = crop_places(request, planner.lengths[rows], planner.speeds, planner.seed)
        firsts = self.reader.starts[rows] + starts
        # A row that is not here has no samples.
        stops = np.minimum(firsts + counts, self.reader.starts[rows] + self.reader.lengths[rows])
        spans = list(zip(firsts.tolist(), stops.tolist(), strict=True))
        return [
            pool.submit(self._touch, spans[place : place + CROPS_PER_TASK])
            for place in range(0, len(spans), CROPS_PER_TASK)
        ]

    def _touch(self, spans: list[tuple[int, int]]) -> None:
        for first, stop in spans:
            # Whoever makes the batch says so, or takes another utterance.
            with contextlib.suppress(AudioError):
                self.reader.samples[first:stop]
