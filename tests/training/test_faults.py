"""What a run does where its numbers, its disk or its own files fail it: it says so, and loses nothing that it had."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import FakeLoader, make_trainer

from speakernet.checkpoint import CheckpointError, read_own_checkpoint, write_checkpoint
from speakernet.training.progress import NonFiniteError


def test_an_epoch_whose_every_step_was_undone_ends_the_run_and_is_no_best_model(tmp_path: Path) -> None:
    loader = FakeLoader(poisoned=frozenset(range(7, 14)))
    with pytest.raises(NonFiniteError, match=r"epoch 2: every step was undone .*learning_rate"):
        make_trainer(tmp_path, loader=loader, max_bad_steps=100, eers=[9.0, 5.0]).train()
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["epoch"] == 1
    assert read_own_checkpoint(tmp_path / "last.pt")["training"]["state"]["epoch"] == 1


def test_a_first_epoch_that_was_undone_leaves_no_model(tmp_path: Path) -> None:
    loader = FakeLoader(poisoned=frozenset(range(7)))
    with pytest.raises(NonFiniteError, match="epoch 1: every step"):
        make_trainer(tmp_path, loader=loader, max_bad_steps=100).train()
    assert not (tmp_path / "best.pt").exists() and not (tmp_path / "last.pt").exists()


def flip(path: Path, member: bytes) -> None:
    """Turn over one bit in the midst of a member's bytes; a hard link to them keeps the old ones."""
    content = bytearray(path.read_bytes())
    content[content.index(member) + len(member) + 120] ^= 0x40
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("member", [b"/data/0", b"/data/3", b"/data.pkl"])
def test_a_flipped_bit_in_last_is_found_and_the_one_before_goes_on(
    tmp_path: Path, member: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, max_epochs=2).train()
    flip(tmp_path / "last.pt", member)
    resumed = make_trainer(tmp_path, max_epochs=3)
    resumed.train()
    assert "last.pt is damaged" in caplog.text and "the run goes on from last.previous.pt" in caplog.text
    assert resumed.state.step == 3 * 7


def test_a_member_that_is_marked_as_a_folder_is_found(tmp_path: Path) -> None:
    """Torch would leave its memory as it happens to be."""
    write_checkpoint(tmp_path / "a.pt", {"weights": {"a": torch.arange(100.0)}})
    content = bytearray((tmp_path / "a.pt").read_bytes())
    # Attributes lie 8 bytes before the name in the table of contents.
    content[content.rindex(b"archive/data/0") - 8] |= 0x10
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="marked as a folder"):
        read_own_checkpoint(tmp_path / "a.pt")


def test_a_flipped_bit_in_best_is_found_and_it_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, max_epochs=2, eers=[5.0, 9.0]).train()
    best = (tmp_path / "best.pt").read_bytes()
    flip(tmp_path / "best.pt", b"/data/0")
    make_trainer(tmp_path, max_epochs=2, eers=[1.0]).train()
    assert (tmp_path / "best.pt").read_bytes() == best and "made again from epoch_0001.pt" in caplog.text


def test_a_best_that_the_disk_did_not_take_is_made_again_from_its_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, max_epochs=3, eers=[9.0, 5.0, 7.0]).train()
    best, older = (tmp_path / "best.pt").read_bytes(), (tmp_path / "checkpoints" / "epoch_0001.pt").read_bytes()
    (tmp_path / "best.pt").unlink()
    (tmp_path / "best.pt").write_bytes(older)
    make_trainer(tmp_path, max_epochs=4, eers=[6.0]).train()
    assert (tmp_path / "best.pt").read_bytes() == best
    assert "best.pt was older than last.pt: made again from epoch_0002" in caplog.text
    (tmp_path / "best.pt").unlink()
    (tmp_path / "best.pt").write_bytes(older)
    (tmp_path / "checkpoints" / "epoch_0002.pt").unlink()
    resumed = make_trainer(tmp_path, max_epochs=5, eers=[8.0])
    resumed.train()
    assert resumed.state.best_eer_percent == 8.0 and "best.pt is of epoch 1" in caplog.text


def nested(name: str, value: Any) -> Callable[[dict], Any]:
    return lambda training: training[name].update(value)


HOSTILE: dict[str, Callable[[dict], Any]] = {
    "no state": lambda training: training.pop("state"),
    "state of text": lambda training: training.update(state="here"),
    "epoch of text": nested("state", {"epoch": "one"}),
    "step of a list": nested("state", {"step": [1]}),
    "no net": lambda training: training.pop("net"),
    "net of nothing": lambda training: training.update(net=None),
    "optimizer of text": lambda training: training.update(optimizer="sgd"),
    "optimizer of a list": lambda training: training.update(optimizer=[1, 2]),
    "no random state": lambda training: training.pop("random"),
    "random state of text": lambda training: training.update(random="dice"),
    "short random state": nested("random", {"torch": torch.zeros(3, dtype=torch.uint8)}),
    "random state of floats": nested("random", {"torch": torch.zeros(5056)}),
    "precision of text": lambda training: training.update(precision=3),
    "average of text": lambda training: training.update(average="mean"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_odd_content_of_last_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    make_trainer(tmp_path, max_epochs=1, ema_decay=0.5).train()
    contents = read_own_checkpoint(tmp_path / "last.pt")
    HOSTILE[kind](contents["training"])
    write_checkpoint(tmp_path / "last.pt", contents)
    with pytest.raises(CheckpointError, match=r"last\.pt"):
        make_trainer(tmp_path, max_epochs=2, ema_decay=0.5).train()


def test_metrics_that_cannot_be_written_are_dropped_with_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speakernet.files._write_whole", full)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.train()
    assert caplog.text.count("metrics.jsonl cannot be written") == 1 and trainer.state.epoch == 2
    assert read_own_checkpoint(tmp_path / "last.pt")["training"]["state"]["epoch"] == 2


def test_an_epoch_without_a_good_step_has_no_loss(tmp_path: Path) -> None:
    assert math.isnan(make_trainer(tmp_path).state.epoch_means()["loss"])


def test_what_a_kill_left_half_written_is_removed_by_the_next_start(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=1).train()
    (tmp_path / "plots").mkdir()
    left = [tmp_path / "plots" / ".det.png.1-a.tmp", tmp_path / ".results.json.1-b.tmp", tmp_path / ".last.pt.new.tmp"]
    for path in left:
        path.touch()
    make_trainer(tmp_path, max_epochs=1).train()
    assert not any(path.exists() for path in left)
