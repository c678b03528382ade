"""Steps of every variant, in this process: that they run, not how fast."""

import pytest

from benchmarks.steps import BY_HAND, PLAIN, classic_config, make_step, trainer_step
from speakernet.config.schema import config_from_dict, with_changes
from speakernet.training.progress import Progress


def small():
    runtime = {"device": "cpu", "keep_memory": False, "threads": 0}
    return classic_config(config_from_dict({"runtime": runtime}))


@pytest.mark.parametrize("name", [PLAIN, BY_HAND, "none", "default"])
def test_steps_of_variants_run(name, tmp_path):
    step = make_step(small(), name, tmp_path, batch_size=2)
    step()
    step()


def test_step_is_complete(tmp_path, monkeypatch):
    """A step includes the trainer's progress report."""
    recorded = []
    monkeypatch.setattr(Progress, "record", lambda self, kind, *values: recorded.append(kind))
    step = trainer_step(with_changes(small(), training={"log_interval": 2}), tmp_path, 2)
    for _ in range(4):
        step()
    assert recorded == ["step", "step"]
