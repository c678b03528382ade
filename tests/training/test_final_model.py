"""What best.pt becomes: the best or the last model, and batch-norm statistics of a moving average."""

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import update_bn
from training_fakes import FakeLoader, FakeNet, assert_same_bits, make_trainer, tensors, trained

from speakernet.checkpoint import read_own_checkpoint
from speakernet.training.options import TrainingOptions
from speakernet.training.trainer import Trainer


@pytest.mark.parametrize(("final_model", "epoch", "eer"), [("best", 2, 10.0), ("last", 3, 20.0)])
def test_the_last_model_is_final_if_no_trials_choose(tmp_path: Path, final_model: str, epoch: int, eer: float) -> None:
    summary = make_trainer(tmp_path, eers=[30.0, 10.0, 20.0], final_model=final_model).train()
    kept = read_own_checkpoint(tmp_path / "best.pt")["training_summary"]
    assert (kept["epoch"], kept["best_eer_percent"]) == (epoch, eer)
    assert (summary["best_epoch"], summary["best_eer_percent"]) == (epoch, eer)


def test_the_average_of_the_last_checkpoints_is_final_too(tmp_path: Path) -> None:
    trained(tmp_path, eers=[30.0, 10.0, 20.0, 40.0], final_model="last", average_checkpoints=2)
    best, average = (read_own_checkpoint(tmp_path / name) for name in ("best.pt", "checkpoints/average.pt"))
    assert best["training_summary"]["best_eer_percent"] == 40.0
    assert all(torch.equal(one, average["weights"][key]) for key, one in best["weights"].items())


def evaluated(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """Train; the weights that each evaluation saw."""
    seen: list[dict[str, torch.Tensor]] = []

    def validate() -> dict[str, float]:
        seen.append(tensors(trainer.net))
        return {"eer_percent": 50.0 - len(seen)}

    trainer.validate = validate
    trainer.train()
    return seen


def test_statistics_of_the_moving_average_are_measured_anew(tmp_path: Path) -> None:
    trainers, seen = [], []
    for how in ("averaged", "measured"):
        trainers.append(make_trainer(tmp_path / how, ema_decay=0.9, ema_statistics=how))
        seen.append(evaluated(trainers[-1]))
    # The weights are those of the average, and training goes on as if nothing had been measured.
    assert_same_bits(*trainers)
    for epoch, (one, other) in enumerate(zip(*seen, strict=True), start=1):
        assert torch.equal(one["first.weight"], other["first.weight"])
        net, loader = FakeNet(), FakeLoader()
        net.load_state_dict(one)
        loader.set_epoch(epoch)
        update_bn([batch.waveforms for batch in loader], net)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(other[f"norm.{name}"], getattr(net.norm, name))
            assert not torch.allclose(one[f"norm.{name}"], other[f"norm.{name}"], rtol=1e-3)
    # What was evaluated is what is kept.
    best = read_own_checkpoint(tmp_path / "measured" / "best.pt")["weights"]
    assert torch.equal(best["norm.running_var"], seen[1][-1]["norm.running_var"])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ema_statistics": "measured"}, "ema_statistics"),
        ({"ema_statistics": "measured", "ema_decay": 0.9, "freeze_norm_statistics": True}, "ema_statistics"),
        ({"final_model": "last", "patience": 2}, "patience"),
    ],
)
def test_options_that_contradict_each_other_are_named(options: dict, name: str) -> None:
    assert [one for one, _ in TrainingOptions(**options).problems()] == [name]
