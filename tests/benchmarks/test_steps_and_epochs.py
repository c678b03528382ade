"""One step of every variant and one epoch of each pipeline, in this process: that they run and learn, not how fast."""

from pathlib import Path

import pytest

from benchmarks.epoch import original_epoch, our_epoch
from benchmarks.steps import BY_HAND, PLAIN, classic_config, make_step, trainer_step
from speakernet.assembly.inputs import with_default_paths
from speakernet.config.schema import Config, config_from_dict, replaced
from speakernet.training.progress import Progress


def small(name: str) -> Config:
    runtime = {"device": "cpu", "keep_memory": False, "threads": 0}
    return classic_config(config_from_dict({"runtime": runtime}), name)


@pytest.mark.parametrize("name", [PLAIN, BY_HAND, "none", "default + checkpointing"])
def test_steps_of_variants_run(name: str, tmp_path: Path) -> None:
    step = make_step(small("ResNetSE34L"), name, tmp_path, batch_size=2)
    step()
    step()


def test_a_step_is_all_that_the_trainer_does_between_two_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its report, which other measures of a step leave out."""
    recorded: list[str] = []
    monkeypatch.setattr(Progress, "record", lambda self, kind, *values: recorded.append(kind))
    step = trainer_step(replaced(small("ResNetSE34L"), training={"log_interval": 2}), tmp_path, 2)
    for _ in range(4):
        step()
    assert recorded == ["step", "step"]


@pytest.fixture(scope="module")
def epoch_config(tiny_corpus: Path) -> Config:
    data = {
        "train_list": str(tiny_corpus / "train_list.txt"),
        "train_path": str(tiny_corpus),
        "test_list": str(tiny_corpus / "trials.txt"),
        "batch_size": 16,
        "crop_frames": 50,
        "num_workers": 0,
    }
    evaluation = {"eval_frames": 50, "num_crops": 2}
    return with_default_paths(
        replaced(small("ResNetSE34L"), data=data, evaluation=evaluation, augment={"enabled": False})
    )


@pytest.mark.parametrize("epoch", [original_epoch, our_epoch])
def test_an_epoch_of_each_pipeline_runs_twice(epoch, epoch_config: Config, tmp_path: Path) -> None:
    train, evaluate = epoch(epoch_config, tmp_path)
    counts = [train(), train()]
    evaluate()
    assert counts[0] == counts[1] > 0
