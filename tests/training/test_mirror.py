"""Copies of a run elsewhere: what is copied, a folder that fails or hangs, and a fresh machine that goes on."""

import logging
import threading
import time
from pathlib import Path

import pytest
from training_fakes import assert_same_bits, make_trainer

from speakernet.remote import LocalFolder, RemoteError
from speakernet.run_folder import BEST, CHECKPOINTS, LAST, LOG, METRICS, RESULTS, SECOND_STAGE, epoch_path
from speakernet.training.mirror import Mirror, fetch_run, mirrored

SOON = {"look_seconds": 0.01, "retry_seconds": 0.01, "silent_seconds": 5.0}


def fill(folder: Path, word: str = "one") -> None:
    for name in (LAST, BEST, LOG, METRICS, RESULTS, f"{SECOND_STAGE}/{LAST}", "embeddings/a.npz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{word} {name}")


def wait_until(is_so) -> None:  # type: ignore[no-untyped-def]
    """Within half a minute, or the test fails."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_fresh_folder_gets_what_the_run_left(tmp_path: Path, kind: str) -> None:
    if kind == "memory":
        pytest.importorskip("fsspec", reason="the extra [remote] is not installed")
    address = str(tmp_path / "there") if kind == "folder" else f"memory://{tmp_path.name}/there"
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    fill(run)
    with mirrored(address, run, with_epochs=False):
        pass
    assert fetch_run(address, fresh)
    found = sorted(path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file())
    assert found == sorted([LAST, BEST, LOG, METRICS, RESULTS, f"{SECOND_STAGE}/{LAST}"])
    assert all((fresh / name).read_text() == f"one {name}" for name in found)
    (fresh / LAST).write_text("its own")
    assert not fetch_run("nonsense://not asked", fresh), "a folder with a last.pt goes on from that"
    assert (fresh / LAST).read_text() == "its own"


def test_changes_are_copied_while_the_run_goes_on(tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "there"
    fill(run)
    with Mirror(run, LocalFolder(str(there)), **SOON):
        wait_until((there / LAST).exists)
        (run / LAST).write_text("two")
        wait_until(lambda: (there / "last.previous.pt").exists() and (there / LAST).exists())
        assert (there / LAST).read_text() == "two"
    assert (there / "last.previous.pt").read_text() == f"one {LAST}"


def test_models_of_epochs_go_along_where_they_will_be_averaged(tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "there"
    fill(run)
    for epoch in (1, 2):
        epoch_path(run, epoch).parent.mkdir(exist_ok=True)
        epoch_path(run, epoch).write_text(str(epoch))
    with Mirror(run, LocalFolder(str(there)), with_epochs=True, **SOON):
        wait_until((there / LAST).exists)
        epoch_path(run, 1).unlink()
        wait_until(lambda: not (there / CHECKPOINTS / "epoch_0001.pt").exists())
    assert fetch_run(str(there), tmp_path / "fresh")
    assert [path.name for path in (tmp_path / "fresh" / CHECKPOINTS).iterdir()] == ["epoch_0002.pt"]


class Failing(LocalFolder):
    """A folder that cannot be written, until it can."""

    is_failing = True
    tries = 0

    def writing(self, name: str):  # type: ignore[no-untyped-def]
        self.tries += 1
        if self.is_failing:
            raise OSError("the disk is gone")
        return super().writing(name)


def test_a_failing_folder_is_told_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run, remote = tmp_path / "run", Failing(str(tmp_path / "there"))
    fill(run)
    with Mirror(run, remote, **SOON):
        wait_until(lambda: remote.tries > 3)
        remote.is_failing = False
        wait_until((tmp_path / "there" / RESULTS).exists)
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cannot be written (OSError: the disk is gone)" in warnings[0]
    assert any("is written again" in one.getMessage() for one in caplog.records)


class Hanging(LocalFolder):
    """A folder that does not answer until it is let go."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.let_go, self.entered = threading.Event(), 0

    def writing(self, name: str):  # type: ignore[no-untyped-def]
        self.entered += 1
        self.let_go.wait(60)
        return super().writing(name)


def test_a_hanging_folder_ends_nothing_and_its_late_copy_replaces_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, remote = tmp_path / "run", Hanging(str(tmp_path / "there"))
    fill(run)
    with Mirror(run, remote, **{**SOON, "silent_seconds": 0.05}):
        wait_until(lambda: remote.entered > 1)
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "nothing was copied for 0.05 seconds" in warnings[0]
    assert "lacks the last of best.pt, last.pt" in warnings[-1] and len(warnings) == 2
    remote.let_go.set()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "mirror-copy"])
    assert remote.names() == []


class Unreadable(LocalFolder):
    """A folder that answers with an error, or not at all."""

    def walk(self) -> list[str]:
        if self.address == "silent":
            threading.Event().wait(1.0)
        raise OSError("no route to host")


@pytest.mark.parametrize(("address", "problem"), [("failing", "no route to host"), ("silent", "no answer for 0.05 s")])
def test_a_mirror_that_cannot_be_read_is_no_reason_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, problem: str
) -> None:
    monkeypatch.setattr("speakernet.training.mirror.open_remote", Unreadable)
    with pytest.raises(RemoteError, match=f"cannot be read .*{problem}"):
        fetch_run(address, tmp_path / "fresh", silent_seconds=0.05 if address == "silent" else 5.0)


def test_a_mirror_without_a_whole_checkpoint_is_told(tmp_path: Path) -> None:
    there = tmp_path / "there"
    fill(tmp_path / "run")
    with mirrored(str(there), tmp_path / "run", with_epochs=False):
        pass
    (there / LAST).write_text("damaged")
    with pytest.raises(RemoteError, match="neither it nor the one before is whole"):
        fetch_run(str(there), tmp_path / "fresh")
    assert not (tmp_path / "fresh" / LAST).exists()
    assert not fetch_run(str(tmp_path / "empty"), tmp_path / "other")


def test_a_run_whose_machine_is_gone_goes_on_from_its_mirror_on_another(tmp_path: Path) -> None:
    """After two of four epochs, with an average of the last three in the end: as one that was never stopped."""
    how = {"average_checkpoints": 3, "ema_decay": 0.9}
    straight = make_trainer(tmp_path / "straight", max_epochs=4, **how)
    straight.train()
    there = str(tmp_path / "there")
    with mirrored(there, tmp_path / "first", with_epochs=True):
        make_trainer(tmp_path / "first", max_epochs=2, scheduled_epochs=4, **{**how, "average_checkpoints": 0}).train()
    # What is not averaged is kept all the same, and copied.
    assert fetch_run(there, tmp_path / "second")
    resumed = make_trainer(tmp_path / "second", max_epochs=4, seed=99, **how)
    resumed.train()
    assert resumed.state.step == straight.state.step
    assert_same_bits(straight, resumed)


def test_the_run_folder_is_no_mirror_of_itself(tmp_path: Path) -> None:
    with (
        pytest.raises(RemoteError, match="is the run folder itself"),
        mirrored(f"{tmp_path}/../{tmp_path.name}", tmp_path, with_epochs=False),
    ):
        pass


def test_no_mirror_does_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with mirrored("", tmp_path, with_epochs=False):
        assert threading.active_count() == before
