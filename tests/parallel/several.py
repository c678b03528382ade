"""Runs a function of a test file in several processes that connect as under torchrun, and returns
its results.

They are fresh interpreters, because a fork of a process that has used torch hangs at its first
matrix product. Starting them is slow, so a test does everything in one call.
"""

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

from tests.started import free_port, own_environment

SECONDS = 240


def ranks_environment(rank, count, port):
    """The variables that torchrun sets, for processes on one machine."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks |= {"MASTER_PORT": port, "MASTER_ADDR": "localhost"}
    return own_environment() | {name: str(value) for name, value in ranks.items()}


def in_several(file, name, folder, count=2):
    """The results of the function `name` of `file` in `count` processes of a group, which work in
    `folder`.
    """
    port = free_port()
    answers = [folder / f"answer{rank}.pkl" for rank in range(count)]
    commands = [[sys.executable, __file__, file, name, str(answer)] for answer in answers]
    processes = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=ranks_environment(rank, count, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, (
            f"rank {rank}: status {process.returncode}\n{errors[rank][-3000:]}"
        )
    return [pickle.loads(answer.read_bytes()) for answer in answers]


def _work(file, name, answer):
    import torch

    from speakernet.machine.options import MachineOptions
    from speakernet.parallel.group import join_ranks

    torch.set_num_threads(1)
    specification = importlib.util.spec_from_file_location("asked_for", file)
    assert specification is not None and specification.loader is not None
    sys.modules["asked_for"] = module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with join_ranks(MachineOptions(device="cpu", distributed_timeout_seconds=60.0)):
        answer.write_bytes(pickle.dumps(getattr(module, name)()))


if __name__ == "__main__":
    _work(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
