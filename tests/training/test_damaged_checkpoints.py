"""Damage to what a run has written costs at most the last save: the one before, a model, or the beginning take over."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from training_fakes import make_trainer

from speakernet import checkpoint, files
from speakernet.checkpoint import CheckpointError, read_own_checkpoint
from speakernet.training import store as store_module
from speakernet.training.checkpoints import CheckpointStore
from speakernet.training.options import TrainingOptions


def contents(value: float) -> dict:
    return {"weights": {"a": torch.full((50,), value)}}


def value_of(path: Path) -> float:
    return float(read_own_checkpoint(path)["weights"]["a"][0])


def cut(path: Path) -> bytes:
    """Damage a file as a full disk or a broken copy does; returns what is left."""
    left = path.read_bytes()[:200]
    path.unlink()  # it may be the same file under two names
    path.write_bytes(left)
    return left


def trained(folder: Path, epochs: int, **options):
    trainer = make_trainer(folder, max_epochs=epochs, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("compress", [False, True])
def test_the_one_before_is_kept_from_the_second_write_on(tmp_path: Path, compress: bool):
    store = CheckpointStore(tmp_path, TrainingOptions(compress_checkpoints=compress))
    for value in (1.0, 2.0, 3.0):
        store.save_last(contents(value))
        store.close()
        assert value_of(store.last_path) == value
        assert store.previous_path.exists() == (value > 1)
    assert value_of(store.previous_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.previous.pt", "last.pt"]


class Killed(BaseException):
    """Ends a write where a kill would."""


class AtOnce:
    """A thread that has done its work when it was started."""

    def __init__(self, target, name: str) -> None:
        self.start = target

    def join(self) -> None:
        """Nothing to wait for."""


CALLS = [(os, "fsync"), (Path, "hardlink_to"), (Path, "replace"), (Path, "unlink"), (checkpoint.torch, "save")]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool):
    """Every call that touches the disk is one moment; nothing is cleaned up after it, as after a kill."""
    monkeypatch.setattr(files, "atomic_write", _without_cleaning)
    monkeypatch.setattr(checkpoint, "atomic_write", _without_cleaning)
    monkeypatch.setattr(store_module.threading, "Thread", AtOnce)
    moments = 0
    while True:
        folder = tmp_path / str(moments)
        store = CheckpointStore(folder, TrainingOptions())
        store.save_last(contents(1.0))
        store.save_last(contents(2.0))
        left = [moments]
        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                fails = name == "hardlink_to" and not has_links
                patch.setattr(owner, name, _dying(getattr(owner, name), left, fails=fails))
            with contextlib.suppress(Killed):
                store.save_last(contents(3.0))
        assert value_of(store.last_path) in (2.0, 3.0)
        assert value_of(store.previous_path) in (1.0, 2.0)
        if left[0] >= 0:
            break
        moments += 1
    assert moments >= 4 and value_of(store.last_path) == 3.0 and value_of(store.previous_path) == 2.0


def _dying(call, left: list[int], *, fails: bool):
    def instead(*arguments, **options):
        if left[0] == 0:
            left[0] = -1
            raise Killed
        left[0] -= 1
        if fails:
            raise OSError("no links here")
        return call(*arguments, **options)

    return instead


@contextlib.contextmanager
def _without_cleaning(path: Path, mode: str, *, is_flushed: bool = True) -> Iterator[IO]:
    """`atomic_write` as a kill leaves it: no exception handler runs."""
    temporary = path.with_name(f".{path.name}.0-{os.urandom(4).hex()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open(mode) as file:
        yield file
        if is_flushed:
            os.fsync(file.fileno())
    temporary.replace(path)


def test_a_damaged_last_is_set_aside_and_the_one_before_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    straight = trained(tmp_path / "straight", 3)
    trained(tmp_path / "run", 2)
    left = cut(tmp_path / "run" / "last.pt")
    resumed = make_trainer(tmp_path / "run", max_epochs=3, seed=99)
    resumed.train()
    said = [record.message for record in caplog.records if "is damaged" in record.message]
    assert len(said) == 1 and "renamed last.pt.damaged-1; the run goes on from last.previous.pt" in said[0]
    assert (tmp_path / "run" / "last.pt.damaged-1").read_bytes() == left
    assert resumed.state.step == straight.state.step == 3 * 7


def test_a_refused_start_renames_nothing(tmp_path: Path):
    trained(tmp_path, 2)
    cut(tmp_path / "last.pt")
    other = make_trainer(tmp_path, max_epochs=3)
    other.loss.head = torch.nn.Linear(8, 9)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="number of speakers"):
        other.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*before, "run.lock"})


@pytest.mark.parametrize("model", ["epoch", "best"])
def test_without_a_checkpoint_the_newest_model_goes_on(tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture):
    trained(tmp_path, 2, ema_decay=0.5)
    cut(tmp_path / "last.pt")
    cut(tmp_path / "last.previous.pt")
    if model == "best":
        shutil.rmtree(tmp_path / "checkpoints")
        path = tmp_path / "best.pt"
    else:
        path = tmp_path / "checkpoints" / "epoch_0002.pt"
    weights = read_own_checkpoint(path)["weights"]
    epoch = read_own_checkpoint(path)["training_summary"]["epoch"]
    begun = {}

    def note() -> None:
        begun.update({name: value.clone() for name, value in resumed.net.state_dict().items()})
        begun["optimizer"] = dict(resumed.optimizer.state)

    resumed = make_trainer(tmp_path, max_epochs=3, ema_decay=0.5, seed=99, on_start=note)
    resumed.train()
    assert not begun.pop("optimizer")
    assert all(torch.equal(begun[name], weights[name]) for name in weights)
    assert (resumed.state.epoch, resumed.state.step) == (3, 3 * 7)
    said = [record.message for record in caplog.records if "is damaged" in record.message]
    assert len(said) == 1 and f"{path.name} after epoch {epoch}, with a fresh optimizer" in said[0]
    assert {"last.pt.damaged-1", "last.previous.pt.damaged-1"} <= {one.name for one in tmp_path.iterdir()}
    assert read_own_checkpoint(tmp_path / "last.pt")["training"]["state"]["epoch"] == 3


def test_where_nothing_is_readable_the_run_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "last.pt").write_bytes(b"PK\x03\x04 cut off")
    assert trained(tmp_path, 1).state.step == 7
    assert "so it begins anew" in caplog.text
    assert (tmp_path / "last.pt.damaged-1").read_bytes() == b"PK\x03\x04 cut off"
    assert read_own_checkpoint(tmp_path / "last.pt")["training"]["state"]["epoch"] == 1


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path):
    trained(tmp_path, 1)
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        make_trainer(tmp_path, max_epochs=2).train()
    assert (tmp_path / "last.pt").is_dir()


def test_last_removed_by_hand_means_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trained(tmp_path, 2)
    (tmp_path / "last.pt").unlink()
    assert trained(tmp_path, 1).state.step == 7
    assert (tmp_path / "last.previous.pt.before-1").exists() and not (tmp_path / "last.previous.pt").exists()


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_missing_best_is_made_again_from_its_epoch(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture):
    trained(tmp_path, 3, eers=[9.0, 5.0, 7.0])
    best = (tmp_path / "best.pt").read_bytes()
    damage(tmp_path / "best.pt")
    summary = trained(tmp_path, 3, eers=[1.0]).summary()
    assert (tmp_path / "best.pt").read_bytes() == best and "made again from epoch_0002.pt" in caplog.text
    assert (summary["best_epoch"], summary["best_eer_percent"]) == (2, 5.0)


@pytest.mark.parametrize("contents", [{"state_dict": {}}, {"weights": {}, "training_summary": {"epoch": "one"}}])
def test_a_best_of_another_program_is_moved_away_and_made_again(
    tmp_path: Path, contents: dict, caplog: pytest.LogCaptureFixture
):
    trained(tmp_path, 3, eers=[9.0, 5.0, 7.0])
    best = (tmp_path / "best.pt").read_bytes()
    torch.save(contents, tmp_path / "best.pt")
    foreign = (tmp_path / "best.pt").read_bytes()
    assert trained(tmp_path, 3, eers=[1.0]).summary()["best_eer_percent"] == 5.0
    assert (tmp_path / "best.pt").read_bytes() == best and "moved to" in caplog.text
    assert (tmp_path / "best.pt.before-1").read_bytes() == foreign


def test_a_missing_best_without_its_epoch_is_measured_again(tmp_path: Path):
    trained(tmp_path, 3, eers=[9.0, 5.0, 7.0])
    (tmp_path / "best.pt").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    again = trained(tmp_path, 3, eers=[7.0])
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["best_eer_percent"] == 7.0
    assert again.state.step == 3 * 7
    assert read_own_checkpoint(tmp_path / "last.pt")["training"]["state"]["best_eer_percent"] == 7.0


def test_a_missing_best_whose_epoch_is_damaged_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trained(tmp_path, 3, eers=[9.0, 5.0, 7.0])
    (tmp_path / "best.pt").unlink()
    cut(tmp_path / "checkpoints" / "epoch_0002.pt")
    trained(tmp_path, 3, eers=[7.0])
    assert "epoch_0002.pt is truncated or not a checkpoint" in caplog.text
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["best_eer_percent"] == 7.0
