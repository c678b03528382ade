"""A process's rank from the environment, contradictions, and heartbeats: a silent rank is named."""

import json
import socket
import time

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from speakernet import distributed
from speakernet.distributed import (
    Place,
    find_place,
    is_first,
    is_first_here,
    refuse_differences,
)
from speakernet.machine.options import MachineOptions
from speakernet.parallel import group
from speakernet.parallel.group import join_ranks, launch, num_gpus

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
SLURM |= {
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_variables_of_torchrun_and_slurm():
    assert find_place(SLURM, 0) == Place(5, 7, 1, 3, "gpu07", 24711)
    assert find_place(SLURM, 1234) == Place(5, 7, 1, 3, "gpu07", 1234)
    assert find_place({**SLURM, "MASTER_PORT": "999", "MASTER_ADDR": "here"}, 0) == Place(
        5, 7, 1, 3, "here", 999
    )
    # torchrun, started once per node by srun, takes precedence.
    assert find_place({**SLURM, **TORCHRUN}, 0) == Place(5, 8, 1, 4, "gpu07", 29500)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": ""},
        {"WORLD_SIZE": "1", "RANK": "0"},
        # The batch script of a job with several tasks.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process(environment):
    assert find_place(environment, 0) is None
    assert is_first(environment)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "not set: MASTER_PORT"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8; expected a rank from 0 to 7"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE is 'four'"),
    ],
)
def test_bad_variables(environment, message):
    with pytest.raises(ValueError, match=message):
        find_place(environment, 0)


def test_main_and_first_ranks():
    assert not is_first(TORCHRUN) and not is_first_here(TORCHRUN)
    assert not is_first(SLURM)
    # Before the processes are connected, the first of each machine reports errors.
    assert is_first_here({**TORCHRUN, "LOCAL_RANK": "0"}) and is_first_here({})


def set_environment(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (TORCHRUN, {"gpu_id": 0}, "runtime.gpu_id is 0, but there are 4 processes on this machine"),
        (TORCHRUN, {"backend": "nccl", "device": "cpu"}, "runtime.backend is nccl"),
    ],
)
def test_contradictions(environment, options, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    set_environment(monkeypatch, environment)
    with pytest.raises(ValueError, match=message), join_ranks(MachineOptions(**options)):
        raise AssertionError("it began")


def test_port_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        set_environment(monkeypatch, {**TORCHRUN, **here})
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ValueError, match=f":{port}"), join_ranks(MachineOptions(device="cpu")):
            raise AssertionError("it began")
        with pytest.raises(OSError, match="in use"):
            launch(2, port, [])


@pytest.mark.parametrize(
    ("count", "device", "message"),
    [
        (0, "auto", "no GPU that torch can use, so this is one process"),
        (1, "auto", "one GPU"),
        (4, "cpu", "device: cpu"),
    ],
)
def test_distributed_without_several_gpus(count, device, message, monkeypatch, caplog):
    caplog.set_level("INFO", "speakernet")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert num_gpus(MachineOptions(device=device)) <= 1
    assert message in caplog.text


def test_differences(monkeypatch):
    refuse_differences({"a": 1})
    other = {"loss.margin": 0.3, "data.batch_size": 4}
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value, other])
    with pytest.raises(
        ValueError, match=r"loss.margin is 0.2 on rank 0 and 0.3 on rank 1\. Start all"
    ):
        refuse_differences({"loss.margin": 0.2, "data.batch_size": 4})


def test_silent_ranks(monkeypatch, caplog):
    monkeypatch.setattr(group, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(group, "LOOK_SECONDS", 0.02)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    PrefixStore("speakernet/0", store).set("beat/1", json.dumps([1, 77, "gpu07", 3, "step 3"]))
    heartbeat = group.Heartbeat(Place(0, 2, 0, 2, "localhost", store.port), "speakernet/0", 0.2)
    named = "rank 1 (process 77 on gpu07, last at step 3)"
    deadline = time.monotonic() + 60
    while named not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    # Later checks do not repeat the warning.
    time.sleep(0.3)
    heartbeat.close()
    assert caplog.text.count(named) == 1
