"""`--distributed`: one process for each GPU of this machine, started and watched by torch's own launcher."""

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.agent.server.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from speakernet.machine.options import MachineOptions
from speakernet.machine.threads import STOP_SIGNALS

logger = logging.getLogger(__name__)

LOST = 75
"""The exit status where a process was killed: the same command goes on."""
RENDEZVOUS_SECONDS = 300


def launch(count: int, port: int, arguments: Sequence[str]) -> int:
    """Run `speakernet` with these arguments in `count` processes; returns the exit status.

    Raises:
        ValueError: the port cannot be used.
    """
    _refuse_used(port)
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
    # Passed on to the processes, each of which answers with the same checkpoint; older versions of torch ask the
    # environment.
    handled = ",".join(["SIGQUIT", *(one.name for one in STOP_SIGNALS)])
    config.signals_to_handle = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = handled
    # torchrun does the same; more threads than cores make every process slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    try:
        elastic_launch(config, sys.executable)("-m", "speakernet", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            logger.error("rank %d (process %d) was ended by %s", rank, failure.pid, name)
            return LOST
        # It has said itself why.
        return failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def num_gpus(runtime: MachineOptions) -> int:
    """GPUs to start a process for; says where there is none, or one.

    Raises:
        ValueError: several, and `gpu_id` names one.
    """
    count = torch.cuda.device_count() if runtime.device != "cpu" and torch.cuda.is_available() else 0
    if count > 1 and runtime.gpu_id is not None:
        raise ValueError(
            f"--distributed starts a process for each of the {count} GPUs, and runtime.gpu_id: {runtime.gpu_id} names "
            "one; leave one of the two out (CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    if count <= 1:
        found = "one GPU" if count else "no GPU that torch can use" if runtime.device != "cpu" else "device: cpu"
        logger.info("--distributed: %s, so this is one process (torchrun --nproc_per_node=N starts N)", found)
    return count


def _refuse_used(port: int) -> None:
    """Refuse a port that somebody listens at.

    Raises:
        ValueError: it is in use, or may not be used.
    """
    if not port:
        return
    with socket.socket() as trial:
        # As torch's own store binds it: one that has just been given up is free.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("localhost", port))
        except OSError as error:
            raise ValueError(
                f"--port {port} cannot be used ({error.strerror}); choose another, or leave it out for a free one"
            ) from error
