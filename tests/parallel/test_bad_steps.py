"""Steps that are undone in several processes, while rank 0 shows its progress by its own clock."""

from pathlib import Path

import pytest
import torch
from several import in_several

from speakernet.assembly.runs import train_experiment
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config import load_config
from speakernet.parallel import distributed
from speakernet.training import progress
from speakernet.training.step import TrainingStep
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.slow


def every_third_step_is_bad() -> dict[str, int]:
    """Train with a NaN in every third gradient of the last rank."""
    progress.REFRESH_SECONDS = 0.0
    finish = TrainingStep.add
    count = 0

    def add(step: TrainingStep, batch: object, *, is_last: bool = True) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0 and distributed.rank() == distributed.world_size() - 1:
            first = next(step.net.parameters())
            handle = first.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
            finish(step, batch, is_last=is_last)  # type: ignore[arg-type]
            handle.remove()
        else:
            finish(step, batch, is_last=is_last)  # type: ignore[arg-type]

    TrainingStep.add = add  # type: ignore[method-assign]
    summary = train_experiment(load_config(["--config", "run.yaml"])).summary
    return {name: summary[name] for name in ("steps", "bad_steps", "epochs")}


def test_bad_steps_are_counted_together(tiny_corpus: Path, tmp_path: Path) -> None:
    changes = {
        "training": {"max_epochs": 2, "test_interval": 2, "log_interval": 1000},
        "evaluation": {"eval_frames": 40, "num_crops": 1, "bootstrap_samples": 0},
    }
    write_recipe(tmp_path / "run.yaml", tiny_corpus, tmp_path / "run", changes)
    first, second = in_several(__file__, "every_third_step_is_bad", tmp_path)
    assert first == second == {"steps": 16, "bad_steps": 5, "epochs": 2}
    state = read_own_checkpoint(tmp_path / "run" / "last.pt")["training"]["state"]
    assert state["bad_steps"] == 5 and state["step"] == 16
