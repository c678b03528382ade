"""A real run under real signals to its process group, and with a killed worker: nothing is lost."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from speakernet.training import stopping
from speakernet.training.stopping import Interrupted, StopRequest
from tests.tiny_recipe import MANY_STEPS, write_recipe
from tests.training.training_fakes import (
    FakeLoader,
    assert_same_bits,
    make_trainer,
    step_of,
    trained,
)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "killpg"), reason="no process groups on this platform"
)


@pytest.fixture(autouse=True)
def _default_hangup():
    """As started by a terminal, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture()
def recipe(tiny_corpus, tmp_path):
    paths = (tmp_path / "run.yaml", tiny_corpus, tmp_path / "run")
    return write_recipe(
        *paths, MANY_STEPS, {"data": {"num_workers": 2}, "training": {"save_minutes": 0}}
    )


@pytest.fixture()
def running(recipe, repository):
    """A run in its own process group, during its steps."""
    command = [sys.executable, str(repository / "trainSpeakerNet.py"), "--config", str(recipe)]
    process = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, text=True, cwd=repository
    )
    metrics = recipe.parent / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or '"step": 3,' not in metrics.read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hang_up(process):
    os.killpg(process.pid, signal.SIGHUP)


def kill_worker(process):
    psutil.Process(process.pid).children()[1].kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "status", "words"),
    [
        (hang_up, 129, ["stopped by SIGHUP after step"]),
        (kill_worker, 75, ["loader worker 1 of 2", "SIGKILL", "out of memory"]),
    ],
)
def test_disturbed_run(running, tmp_path, disturb, status, words):
    disturb(running)
    shown = running.communicate(timeout=60)[1]
    assert running.returncode == status
    assert "Traceback" not in shown and all(word in shown for word in words)
    assert step_of(tmp_path / "run")["step"] >= 3
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)


def test_failing_loader(tmp_path):
    class Failing(FakeLoader):
        def batch(self, position):
            if self.epoch == 1 and position == 3:
                self.position -= 1
                raise ChildProcessError("a worker was killed")
            return super().batch(position)

    with pytest.raises(ChildProcessError):
        make_trainer(tmp_path / "run", loader=Failing()).train()
    assert (step_of(tmp_path / "run")["epoch"], step_of(tmp_path / "run")["batch"]) == (1, 3)
    assert_same_bits(trained(tmp_path / "straight"), trained(tmp_path / "run", seed=99))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGHUP, signal.SIGHUP], 129),
        ([signal.SIGTERM, signal.SIGHUP], 143),
    ],
)
def test_signal_during_an_evaluation(tmp_path, sent, status):
    def validate():
        for number in sent:
            os.kill(os.getpid(), number)
        return {"eer_percent": 9.0}

    with pytest.raises(Interrupted) as caught:
        make_trainer(tmp_path, max_epochs=2, validate=validate).train()
    assert caught.value.exit_status == status
    assert step_of(tmp_path)["epoch"] == 1 and not step_of(tmp_path)["awaits_evaluation"]


def test_nohup(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = make_trainer(
            tmp_path, max_epochs=1, validate=lambda: os.kill(os.getpid(), signal.SIGHUP) or EER
        )
        assert trainer.train()["epochs"] == 1
    finally:
        signal.signal(signal.SIGHUP, before)


EER = {"eer_percent": 9.0}


def test_signal_during_a_collective(monkeypatch):
    stop = StopRequest()
    monkeypatch.setattr(
        stopping, "signal_of_others", lambda: stop._remember(signal.SIGTERM, None) or 0
    )
    stop.is_requested()
    assert stop.known == signal.SIGTERM and stop.is_requested()
