"""Loader workers under real signals: they survive requests to stop, end with their parent, and a
kill is reported.
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config import Config
from speakernet.config.schema import with_changes
from speakernet.data.batches import BatchMaker
from speakernet.data.sharing import SharedMemoryError
from speakernet.data.workers import WorkerDied, Workers

OWNER = """
import sys
import threading
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_workers import worker_loader
made = worker_loader(Path(sys.argv[1]))
batches = iter(made)
next(batches)
print("ready", flush=True)
sys.stdin.readline()
"""


def worker_loader(corpus, num_workers=2, **data):
    data |= {"train_list": str(corpus / "train_list.txt"), "num_workers": num_workers}
    config = with_changes(
        Config(), data={"crop_frames": 50, "batch_size": 4, **data}, augment={"enabled": False}
    )
    return build_training_loader(config, Inputs(config, torch.device("cpu")))


def started_epoch(made):
    """An epoch after its first batch, and its worker processes."""
    before = set(psutil.Process().children())
    batches = iter(made)
    next(batches)
    return batches, sorted(
        set(psutil.Process().children()) - before, key=lambda process: process.pid
    )


def test_requests_to_stop(tiny_corpus):
    before = torch.get_rng_state()
    made = worker_loader(tiny_corpus)
    batches, workers = started_epoch(made)
    assert len(workers) == 2
    for name in ("TERM", "INT"):
        # From a process other than their parent, as when a process group is stopped.
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    assert len(list(batches)) == len(made) - 1
    made.set_epoch(1)
    assert len(list(made)) == len(made)
    assert all(worker.is_running() for worker in workers)
    made.close()
    assert not any(worker.is_running() for worker in workers)
    assert torch.equal(torch.get_rng_state(), before), (
        "an epoch draws nothing from the global generator"
    )


class FakeRuntime:
    """A fake of CUDA's page-locking: records calls and returns `status`."""

    def __init__(self, status):
        self.status = status
        self.steps = []

    def cudaHostRegister(self, address, num_bytes, _flags):
        self.steps.append(("locked", num_bytes))
        return self.status

    def run_kernel(self, size, device):
        self.steps.append(("kernel", size))
        raise RuntimeError(f"CUDA error {self.status}")

    def cudaHostUnregister(self, address):
        self.steps.append(("released", 0))
        return 0


@pytest.mark.parametrize("status", [0, 712])
def test_pinned_ring(tiny_corpus, status, monkeypatch, caplog):
    """The ring is unlocked after a run's first stage, however long the second takes."""
    caplog.set_level("INFO")
    runtime = FakeRuntime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.steps.append(("copied", 0)))
    monkeypatch.setattr(torch, "ones", runtime.run_kernel)
    made = worker_loader(tiny_corpus, 1, prefetch_factor=1)
    made.maker = Workers(made.maker.maker, made.options, pins=True)
    assert len(list(made)) == len(made)
    # Two slots of a worker and a spare one, of four crops each.
    locked = ("locked", 3 * 4 * (50 * 160 + 240) * made.maker.maker.dtype().itemsize)
    # A failed attempt is followed by a small kernel that clears the error, so the network's kernels
    # do not report it.
    steps = [locked, *([("kernel", 1)] if status else [])]
    assert runtime.steps == steps
    made.close()
    made.close()
    assert runtime.steps == [*steps, *([] if status else [("copied", 0), ("released", 0)])]
    assert ("CUDA error 712" in caplog.text) is bool(status)


def test_killed_worker(tiny_corpus, monkeypatch):
    monkeypatch.setattr("speakernet.data.workers.WAIT_SECONDS", 0.2)
    made = worker_loader(tiny_corpus, num_workers=1)
    batches, (worker,) = started_epoch(made)
    worker.kill()
    with pytest.raises(
        WorkerDied, match=rf"worker 0 of 1 \(process {worker.pid}\) was ended by SIGKILL.*memory"
    ):
        list(batches)
    made.close()
    # The loader can be started again.
    made.set_epoch(1)
    assert len(list(made)) == len(made)
    made.close()


def test_too_little_shared_memory(tiny_corpus, monkeypatch):
    made = worker_loader(tiny_corpus, prefetch_factor=4)
    monkeypatch.setattr("speakernet.data.sharing.free_shared_memory", lambda: 1 << 10)
    with pytest.raises(
        SharedMemoryError,
        match=r"2 loader workers with 4 batches ahead: .* needed, 1\.0 KiB "
        r"free.*--shm-size.*num_workers 0",
    ):
        list(made)
    monkeypatch.undo()
    assert len(list(made)) == len(made)
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "exits"])
def test_end_of_the_parent(tiny_corpus, end):
    command = [sys.executable, "-c", OWNER, str(tiny_corpus), str(Path(__file__).parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        assert owner.stdout.readline() == "ready\n"
        workers = psutil.Process(owner.pid).children()
        if end == "killed":
            owner.kill()
        else:
            # The loader is not closed; its workers must not delay the exit.
            owner.stdin.write("\n")
            owner.stdin.flush()
        try:
            assert owner.wait(30) == (-signal.SIGKILL if end == "killed" else 0)
        finally:
            owner.kill()
    deadline = time.monotonic() + 20
    while any(
        worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers
    ):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)


@pytest.mark.parametrize(("idle_share", "expected"), [(0.5, 4), (0.0, 1)])
def test_workers_grow_if_training_waits(tiny_corpus, monkeypatch, idle_share, expected):
    alone = worker_loader(tiny_corpus, num_workers=0, batch_size=2)
    batches = [batch.waveforms.clone() for batch in alone]
    make = BatchMaker.make

    def make_slowly(maker, request, out):
        time.sleep(0.03)
        return make(maker, request, out)

    monkeypatch.setattr(BatchMaker, "make", make_slowly)
    monkeypatch.setattr("speakernet.data.workers.JUDGED_BATCHES", 2)
    # Workers that compute for 0 % of the time are never idle enough.
    monkeypatch.setattr("speakernet.data.workers.IDLE_SHARE", idle_share)
    monkeypatch.setattr("speakernet.assembly.data.usable_cores", lambda: 2)
    made = worker_loader(tiny_corpus, num_workers="auto", batch_size=2)
    assert made.options.num_workers == 1 and made.options.prefetch_factor == 4
    before = len(psutil.Process().children())
    crops = [batch.waveforms.clone() for batch in made]
    # Two after the second judgement, four after the third; the ring has no slots for eight.
    assert len(psutil.Process().children()) - before == expected
    made.close()
    assert len(crops) == len(batches) >= 10
    assert all(map(torch.equal, crops, batches))


def test_slow_and_hanging_workers(tiny_corpus, monkeypatch):
    monkeypatch.setattr("speakernet.data.workers.WAIT_SECONDS", 0.1)
    made = worker_loader(tiny_corpus, num_workers=1, worker_timeout_seconds=0.8)
    batches, (worker,) = started_epoch(made)
    assert len(list(batches)) == len(made) - 1
    worker.suspend()
    threading.Timer(0.3, worker.resume).start()
    made.set_epoch(1)
    assert len(list(made)) == len(made)
    worker.suspend()
    made.set_epoch(2)
    with pytest.raises(WorkerDied, match=r"worker 0 of 1 .* hangs: batch 1 of epoch 3") as caught:
        next(iter(made))
    assert caught.value.exit_status == 75
    made.close()
    assert not worker.is_running()
