"""Starts and ends the process group, launches processes for `--distributed`, and names a rank that
is lost or hangs.

torchrun (or srun) starts the processes and ends the remaining ones. A thread in each rank writes a
heartbeat to the store at which the ranks met; it is read when a collective fails or a rank has been
silent for too long.
"""

import atexit
import contextlib
import gc
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
from torch import distributed as torch_distributed
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from speakernet import distributed
from speakernet.distributed import CommandEnd, Mail, Place, find_place, is_distributed, work
from speakernet.files import error_line
from speakernet.machine.device import choose_backend, find_device
from speakernet.machine.options import MachineOptions
from speakernet.machine.threads import STOP_SIGNALS

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST = 75
"""Exit status if a rank was lost: EX_TEMPFAIL in sysexits.h; the same command resumes."""
RENDEZVOUS_SECONDS = 300
BEAT_SECONDS = 0.5
SILENT_BEATS = 5
"""A rank that misses this many heartbeats is gone or suspended; a busy machine delays one or
two."""
LOOK_SECONDS = 5.0
STORE_SECONDS = 20.0
MAX_NAMED = 4
FAILED_COLLECTIVE = (
    "gloo",
    "NCCL",
    "nccl",
    "Connection closed by peer",
    "Broken pipe",
    "ProcessGroup",
    "ncclComm",
)
"""Found in the messages of collectives that fail with an error other than `DistError`."""


class ProcessLost(CommandEnd, ChildProcessError):
    """Another rank is gone or hangs, so this one cannot continue."""

    exit_status = LOST


class Beat(NamedTuple):
    """A heartbeat."""

    number: int
    process: int
    host: str
    num_started: int
    """Pieces of work started."""
    work: str
    """Name of the last one."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, last at {self.work}"


# Why heartbeats. If a rank is killed, the others see at best "connection closed by peer", and with
# NCCL nothing at all for half an hour. So each rank has a thread that writes a number to the store
# twice a second, with the piece of work it is at. When a collective fails, whoever notices compares
# the numbers over a few beats: a rank whose number stands still is gone or suspended; if all move,
# the one that has started fewer pieces of work hangs. The thread has a connection of its own,
# because that of the group may be blocked in just this moment.
class Heartbeat(Mail):
    """Writes this rank's heartbeat and reads those of the others."""

    def __init__(self, place: Place, name: str, timeout_seconds: float) -> None:
        self.place = place
        self.timeout_seconds = timeout_seconds
        # A separate connection, because the group's may be blocked at any moment.
        self._store = PrefixStore(name, _connect(place, STORE_SECONDS))
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._is_lost = False
        self._number = 0
        self._beat()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def is_first_to_report(self, message: str) -> bool:
        """Whether no rank has reported this yet, so that only one rank prints an error that all
        have in common.
        """
        key = f"reported/{hashlib.sha256(message.encode()).hexdigest()}"
        return self._query(lambda store: store.add(key, 1) == 1, True)

    def write(self, key: str, value: str) -> None:
        self._query(lambda store: store.set(key, value), None)

    def read(self, key: str) -> str:
        return self._query(lambda store: store.get(key).decode() if store.check([key]) else "", "")

    def missing(self) -> str:
        """A sentence that names the ranks the others are waiting for; takes a few seconds."""
        before = self._beats()
        time.sleep(SILENT_BEATS * BEAT_SECONDS)
        after = self._beats()
        # The store runs in rank 0 or, with torchrun, in its launcher.
        if not before or not after:
            return "rank 0 or the launcher has ended: its store does not respond"
        faults = []
        # A rank that ended with an error has stored it; otherwise we judge by heartbeats.
        for rank in after:
            if reason := self.read(f"end/{rank}"):
                faults.append(f"rank {rank} ended: {reason}")
        if not faults:
            faults = self._silent_or_behind(before, after)
        if not faults:
            return "all ranks send heartbeats, so the network between them failed"
        if len(faults) > MAX_NAMED:
            faults[MAX_NAMED:] = [f"and {len(faults) - MAX_NAMED} more"]
        return "; ".join(faults)

    def _silent_or_behind(self, before: dict[int, Beat], after: dict[int, Beat]) -> list[str]:
        own_beat = after[self.place.rank]
        what = "was killed or suspended: no heartbeat"
        ranks = [rank for rank, beat in after.items() if beat.number == before[rank].number]
        if not ranks:
            what = f"hangs, while rank {self.place.rank} is at {own_beat.work}"
            # Ranks that have started fewer pieces of work, else ranks at a different one.
            ranks = [
                rank for rank, beat in after.items() if beat.num_started < own_beat.num_started
            ]
            ranks = ranks or [rank for rank, beat in after.items() if beat.work != own_beat.work]
        return [f"rank {rank} ({after[rank]}) {what}" for rank in ranks]

    def _beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank."""
        keys = [f"beat/{rank}" for rank in range(self.place.world_size)]
        beats: list[bytes] = self._query(lambda store: store.multi_get(keys), [])
        return {rank: Beat(*json.loads(beat)) for rank, beat in enumerate(beats)}

    def _beat(self) -> None:
        self._number += 1
        beat = Beat(self._number, os.getpid(), socket.gethostname(), work.count, work.name)
        with self._lock:
            self._store.set(f"beat/{self.place.rank}", json.dumps(beat))

    def _query(self, question: Callable[[PrefixStore], T], default: T) -> T:
        """Query the store, one thread at a time; `default` if the process that held the store is
        gone.
        """
        try:
            with self._lock:
                # torch logs every attempt to reach a lost store at length.
                return default if self._is_lost else question(self._store)
        except RuntimeError:
            return default

    def _run(self) -> None:
        looked = time.monotonic()
        seen = dict[int, tuple[int, float]]()
        while not self._is_over.wait(BEAT_SECONDS):
            if self._launcher and os.getppid() != self._launcher:
                # torchrun was killed; the ranks would go on training unnoticed.
                self._is_lost = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._beat()
            except RuntimeError:
                # The store and rank 0 are gone: the current collective fails and reports it.
                self._is_lost = True
                return
            now = time.monotonic()
            if self.place.rank == 0 and now - looked > LOOK_SECONDS:
                looked = now
                self._log_silent(seen, now)

    def _log_silent(self, seen: dict[int, tuple[int, float]], now: float) -> None:
        """Log each rank that has been silent for too long, once; with NCCL nothing else reports
        it.
        """
        for rank, beat in self._beats().items():
            number, since = seen.get(rank, (0, now))
            if beat.number != number:
                seen[rank] = (beat.number, now)
            elif now - since > self.timeout_seconds:
                logger.error("rank %d (%s): no heartbeat for %.0f s", rank, beat, now - since)
                seen[rank] = (number, float("inf"))


@contextlib.contextmanager
def join_ranks(options: MachineOptions) -> Iterator[None]:
    """Join the ranks started by torchrun, SLURM or `--distributed`; does nothing in a single
    process.
    """
    place = find_place(os.environ, options.port)
    if place is None:
        yield
        return
    # Collect the tensors in the group's reference cycles while the interpreter is alive: gloo's
    # threads need the interpreter to free them, and crash the process if it is shutting down.
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
    distributed.here = place
    try:
        heartbeat = _start(options, place)
        distributed.mail = heartbeat
        try:
            yield
        except BaseException as error:
            _report_failure(heartbeat, error)
            raise
        finally:
            heartbeat.close()
    finally:
        distributed.here = None
        distributed.mail = Mail()
        if torch_distributed.is_initialized():
            torch_distributed.destroy_process_group()


def launch(count: int, port: int, arguments: Sequence[str]) -> int:
    """`--distributed`: run `speakernet` with these arguments in `count` processes; returns the exit
    status.
    """
    # A port in use then fails immediately instead of after minutes.
    socket.create_server(("localhost", port)).close()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        rdzv_configs={"timeout": RENDEZVOUS_SECONDS},
        max_restarts=0,
    )
    # Forwarded to the processes, which stop after the same step; older versions of torch read the
    # environment.
    handled = ",".join(["SIGQUIT", *(number.name for number in STOP_SIGNALS)])
    config.signals_to_handle = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = handled
    # As in torchrun: more threads than cores slow every process down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    try:
        elastic_launch(config, sys.executable)("-m", "speakernet", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        ended_by = signal.Signals(-failure.exitcode).name
        logger.error("rank %d (process %d) was ended by %s", rank, failure.pid, ended_by)
        return LOST
    except SignalException as error:
        return 128 + error.sigval
    return 0


def num_gpus(runtime: MachineOptions) -> int:
    """Number of GPUs for which `--distributed` starts a process; logs the reason if it is a single
    process.
    """
    if runtime.device == "cpu":
        count = 0
        reason = "device: cpu"
    else:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        reason = "one GPU" if count else "no GPU that torch can use"
    if count <= 1:
        logger.info(
            "--distributed: %s, so this is one process (torchrun --nproc_per_node=N starts N "
            "processes)",
            reason,
        )
    return count


def _start(options: MachineOptions, place: Place) -> Heartbeat:
    # All ranks would use the same GPU: NCCL refuses that, and with gloo they share its memory.
    if options.gpu_id is not None and place.local_world_size > 1:
        raise ValueError(
            f"runtime.gpu_id is {options.gpu_id}, but there are {place.local_world_size} processes "
            "on this machine, and each uses the GPU with its local rank; leave out gpu_id "
            "(CUDA_VISIBLE_DEVICES selects GPUs)"
        )
    device = find_device(options, place.local_rank)
    backend = choose_backend(options, device)
    seconds = options.distributed_timeout_seconds
    # torchrun hosts the store itself.
    is_master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = _connect(place, seconds, is_master=is_master)
        name = _name_of_start(store, place)
        torch_distributed.init_process_group(
            backend,
            store=PrefixStore(name, store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=seconds),
            device_id=device if backend != "gloo" else None,
        )
        heartbeat = Heartbeat(place, name, seconds)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"rank {place.rank} of {place.world_size} could not join the others at "
            f"{place.address}:{place.port}: {error_line(error)}; check that all ranks were "
            "started, that this machine can reach that address, and that the port is free "
            "(torchrun --master_port N, or --port N)"
        ) from error
    if place.rank == 0:
        ranks = f"{place.world_size} processes ({place.local_world_size} on this machine)"
        logger.info("%s, joined by %s at %s:%d", ranks, backend, place.address, place.port)
    return heartbeat


def _connect(place: Place, seconds: float, *, is_master: bool = False) -> TCPStore:
    """A connection to the store at which the ranks meet."""
    return TCPStore(
        place.address,
        place.port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        multi_tenant=is_master,
    )


def _name_of_start(store: TCPStore, place: Place) -> str:
    """The key prefix of this start: torchrun keeps its store over restarts, with the keys of
    earlier starts.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        # torchrun counts failures separately on each machine, but every rank restarts after any
        # failure.
        return f"speakernet/{store.add(f'starts/{place.rank}', 1)}"
    return f"speakernet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _report_failure(heartbeat: Heartbeat, error: BaseException) -> None:
    """Report to the other ranks why this one ends; if a collective failed, raise ProcessLost with
    the rank at fault.
    """
    # A failed collective is only a consequence, so the message names the rank at fault instead.
    is_collective = isinstance(error, torch_distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in FAILED_COLLECTIVE)
    )
    if is_collective and is_distributed():
        lost = ProcessLost(
            f"{heartbeat.missing()}. This run cannot continue ({error_line(error)}); the same "
            "command resumes from last.pt"
        )
        work.reports = heartbeat.is_first_to_report(str(lost))
        raise lost from error
    heartbeat.write(f"end/{heartbeat.place.rank}", error_line(error) or type(error).__name__)
    work.reports = heartbeat.is_first_to_report(str(error) or type(error).__name__)
