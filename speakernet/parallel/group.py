"""The one place where a process group is started and ended."""

import atexit
import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed as torch_distributed
from torch.distributed import Store, TCPStore

from speakernet.distributed import is_distributed
from speakernet.files import error_line
from speakernet.machine.device import find_device
from speakernet.machine.options import MachineOptions
from speakernet.parallel.environment import Place, find_place
from speakernet.parallel.meeting import name_of_start, part_of_start
from speakernet.parallel.watch import Watch

logger = logging.getLogger(__name__)

FAILED_COLLECTIVE = ("gloo", "NCCL", "nccl", "Connection closed by peer", "Broken pipe", "ProcessGroup", "ncclComm")
"""What errors of collectives that are no `DistError` have in them."""


class ProcessLost(ChildProcessError):
    """Another process of the group is gone or hangs, so that this one cannot go on."""

    def __init__(self, words: str, exit_status: int = 75) -> None:
        super().__init__(words)
        self.exit_status = exit_status
        """Of the command; by default EX_TEMPFAIL of sysexits.h: nothing is wrong with the input, the same goes on."""


class _Joined:
    """What is known of the group while it runs."""

    watch: Watch | None = None


@contextlib.contextmanager
def joined(options: MachineOptions) -> Iterator[None]:
    """Be one of the processes that torchrun, SLURM or `--distributed` started; alone this does nothing.

    Raises:
        ValueError: variables or options that contradict each other, or a port that cannot be used.
        ProcessLost: another process was lost inside the block; the message names it.
    """
    place = find_place(os.environ, options.port)
    if place is None:
        if options.backend == "nccl":
            _choose_backend(options, torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu"))
        yield
        return
    before = {name: os.environ.get(name) for name in place.variables()}
    os.environ.update(place.variables())
    # What still holds the group in circles goes while there is an interpreter: gloo's threads let go of tensors, for
    # which they need one, and end the process where it is being taken down.
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
    try:
        _Joined.watch = watch = _start(options, place)
        try:
            yield
        except BaseException as error:
            _end_badly(watch, error)
            raise
        finally:
            _Joined.watch = None
            watch.close()
    finally:
        if torch_distributed.is_initialized():
            torch_distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def request_everywhere(name: str, value: int) -> None:
    """Let every process find a number where it looks for one (`requested`); does nothing in one process."""
    if _Joined.watch is not None:
        _Joined.watch.request(name, value)


def requested(name: str) -> int:
    """A number that some process has left; 0 where none has, or there is one process. No collective."""
    return _Joined.watch.requested(name) if _Joined.watch is not None else 0


def _start(options: MachineOptions, place: Place) -> Watch:
    """Meet the others, and begin to give signs of life.

    Raises:
        ValueError: options that contradict the place, or the others were not met.
    """
    if options.gpu_id is not None and place.local_world_size > 1:
        raise ValueError(
            f"runtime.gpu_id: {options.gpu_id}, but there are {place.local_world_size} processes on this machine, each "
            "of which takes the GPU of its own number; leave gpu_id out (CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    device = find_device(options, place.local_rank)
    backend = _choose_backend(options, device)
    seconds = options.distributed_timeout_seconds
    try:
        store, name = _store(place, seconds)
        torch_distributed.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=seconds),
            device_id=device if backend != "gloo" else None,
        )
        watch = Watch(place, name, seconds)
    except (RuntimeError, ValueError) as error:
        where = f"{place.address}:{place.port}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ValueError(
                f"port {place.port} is in use on {place.address}, so the processes cannot meet there; choose another "
                "(torchrun --master_port N, or --port N)"
            ) from error
        raise ValueError(
            f"the {place.world_size} processes did not meet at {where}: {error_line(error)}; see whether all of them "
            "were started, and whether that machine can be reached from this one (rank "
            f"{place.rank})"
        ) from error
    if place.rank == 0:
        logger.info(
            "%d processes (%d on this machine), joined by %s at %s:%d",
            *(place.world_size, place.local_world_size, backend, place.address, place.port),
        )
    return watch


def _store(place: Place, seconds: float) -> tuple[Store, str]:
    """Where the processes leave word how to reach them, and the name of this start, which has words of its own there.

    torch's own way (`env://`) has not: after `--max-restarts` a process may read where one that was killed could be
    reached.

    Raises:
        RuntimeError: the store cannot be reached, or some did not come.
    """
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = place.rank == 0 and not is_torchruns
    timeout = timedelta(seconds=seconds)
    store = TCPStore(
        place.address, place.port, is_master=is_master, wait_for_workers=False, timeout=timeout, multi_tenant=True
    )
    # One that rank 0 has made by itself goes with it.
    name = name_of_start(store, place.rank, place.world_size, seconds) if is_torchruns else ""
    return part_of_start(store, name), name


def _choose_backend(options: MachineOptions, device: torch.device) -> str:
    """What carries tensors of the device; objects always go by gloo.

    Raises:
        ValueError: nccl without a GPU.
    """
    if options.backend == "nccl" and device.type != "cuda":
        raise ValueError(
            "runtime.backend: nccl, which joins GPUs, but this run is on the CPU; take gloo, or leave it at auto"
        )
    is_gloo = options.backend == "gloo" or device.type != "cuda"
    return "gloo" if is_gloo else "cpu:gloo,cuda:nccl"


def _end_badly(watch: Watch, error: BaseException) -> None:
    """Say why this process ends early, and find out who has ended where a collective has failed for that.

    Raises:
        ProcessLost: naming whom.
    """
    is_collective = isinstance(error, torch_distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in FAILED_COLLECTIVE)
    )
    if is_collective and is_distributed():
        lost = ProcessLost(
            f"{watch.missing()}. This run cannot go on without it ({error_line(error)}); the same command goes on from "
            "last.pt"
        )
        lost.is_said = not watch.is_first_to_say(str(lost))  # type: ignore[attr-defined]
        raise lost from error
    watch.tell_end(error_line(error) if isinstance(error, Exception) else type(error).__name__)
    # Where all fail for the same reason, one of them tells the user.
    error.is_said = not watch.is_first_to_say(str(error) or type(error).__name__)  # type: ignore[attr-defined]
