"""A real run under real signals to its process group, and with a killed worker: nothing is lost."""

import os
import signal
import sys

import psutil
import pytest

from speakernet import distributed
from speakernet.training.stopping import Interrupted, StopRequest
from tests.started import Started, saved_step, steps_of
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


@pytest.fixture
def recipe(tiny_corpus, tmp_path):
    paths = (tmp_path / "run.yaml", tiny_corpus, tmp_path / "run")
    return write_recipe(
        *paths, MANY_STEPS, {"data": {"num_workers": 2}, "training": {"save_minutes": 0}}
    )


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
def test_disturbed_run(recipe, tmp_path, disturb, status, words):
    run = tmp_path / "run"
    command = [sys.executable, "trainSpeakerNet.py", "--config", str(recipe)]
    with Started(command, tmp_path / "output.txt") as started:
        started.until(lambda: steps_of(run) >= 3, "third step")
        disturb(started.process)
        assert started.end(60) == status
    shown = started.output
    assert "Traceback" not in shown and all(word in shown for word in words)
    assert saved_step(run) >= 3


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
        distributed.mail, "read", lambda key: stop._remember(signal.SIGTERM, None) or ""
    )
    stop.is_requested()
    assert stop.known == signal.SIGTERM and stop.is_requested()
