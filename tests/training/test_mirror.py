"""Copies of a run elsewhere: what is copied, a folder that fails or hangs, and a fresh machine that resumes."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from speakernet.run_folder import BEST, CHECKPOINTS, LAST, LOG, METRICS, PREVIOUS, RESULTS, SECOND_STAGE
from speakernet.training import mirror
from speakernet.training.mirror import RemoteError, fetch_run, mirrored
from tests.training.training_fakes import assert_same_bits, trained


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.011)


def fill(folder: Path, word: str = "one") -> None:
    for name in (LAST, BEST, LOG, METRICS, RESULTS, f"{SECOND_STAGE}/{LAST}", "embeddings/a.npz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{word} {name}")


def wait_until(is_so: Any) -> None:
    """Within half a minute, or the test fails."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_fresh_folder(tmp_path: Path, kind: str) -> None:
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
    assert not fetch_run("nonsense://not asked", fresh), "a folder with a last.pt resumes from that"
    assert not fetch_run(str(tmp_path / "empty"), tmp_path / "other")


def test_changes_are_copied(tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "there"
    fill(run)
    epoch = run / CHECKPOINTS / "epoch_0001.pt"
    epoch.parent.mkdir()
    epoch.write_text("1")
    with mirrored(str(there), run, with_epochs=True):
        wait_until((there / LAST).exists)
        (run / LAST).write_text("two")
        wait_until(lambda: (there / PREVIOUS).exists() and (there / LAST).exists())
        assert (there / LAST).read_text() == "two"
        epoch.unlink()
        wait_until(lambda: not (there / CHECKPOINTS / epoch.name).exists())
    assert (there / PREVIOUS).read_text() == f"one {LAST}"


def test_copy_cut_off_between_two_names(tmp_path: Path) -> None:
    there = tmp_path / "there"
    fill(there)
    (there / LAST).rename(there / PREVIOUS)
    (there / ".last.pt.tmp").write_text("half")
    # Version 0.2 kept checksums.
    (there / f"{LAST}.sha256").write_text("0 0")
    assert fetch_run(str(there), tmp_path / "fresh")
    assert (tmp_path / "fresh" / LAST).read_text() == f"one {LAST}"
    assert not [path for path in (tmp_path / "fresh").iterdir() if path.suffix in (".tmp", ".sha256")]


def test_failing_folder_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, tries, is_failing, put = tmp_path / "run", [], [True], LocalFileSystem.put_file

    def put_or_fail(system: Any, *paths: Any, **options: Any) -> None:
        tries.append(paths)
        if is_failing:
            raise OSError("the disk is gone")
        put(system, *paths, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_or_fail)
    fill(run)
    with mirrored(str(tmp_path / "there"), run, with_epochs=False):
        wait_until(lambda: len(tries) > 3)
        is_failing.clear()
        wait_until((tmp_path / "there" / RESULTS).exists)
    assert caplog.text.count("OSError: the disk is gone") == 1


def test_hanging_folder_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_go, entered = threading.Event(), threading.Event()

    def hang(*_arguments: Any, **_options: Any) -> None:
        entered.set()
        let_go.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(LocalFileSystem, "put_file", hang)
    monkeypatch.setattr(mirror, "END_SECONDS", 0.05)
    fill(tmp_path / "run")
    with mirrored(str(tmp_path / "there"), tmp_path / "run", with_epochs=False):
        assert entered.wait(30)
    assert [one.levelno for one in caplog.records] == [logging.WARNING] and "best.pt, last.pt" in caplog.text
    let_go.set()


def test_unreadable_mirror_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(LocalFileSystem, "exists", fail)
    with pytest.raises(RemoteError, match="no route to host"):
        fetch_run(str(tmp_path / "there"), tmp_path / "fresh")


def test_names_outside_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"/{tmp_path.name}/there"
    monkeypatch.setattr(MemoryFileSystem, "exists", lambda system, path: True)
    monkeypatch.setattr(MemoryFileSystem, "find", lambda system, path: [f"{root}/{LAST}", f"{root}/../../evil.txt"])
    with pytest.raises(RemoteError, match="evil"):
        fetch_run(f"memory:/{root}", tmp_path / "a" / "b" / "fresh")
    assert not list(tmp_path.rglob("evil.txt")) and not (tmp_path / "a" / "b" / "fresh" / LAST).exists()


def test_other_machine_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """After two of four epochs, with an average of the last three in the end: as one that was never stopped."""
    how = {"average_checkpoints": 3, "ema_decay": 0.9}
    straight = trained(tmp_path / "straight", max_epochs=4, **how)
    there = str(tmp_path / "there")
    with mirrored(there, tmp_path / "first", with_epochs=True):
        trained(tmp_path / "first", max_epochs=2, scheduled_epochs=4, ema_decay=0.9)
    assert fetch_run(there, tmp_path / "second")
    resumed = trained(tmp_path / "second", max_epochs=4, seed=99, **how)
    assert resumed.state.step == straight.state.step
    assert_same_bits(straight, resumed)


@pytest.mark.parametrize("address", ["{0}/../{1}", "file://{0}", "{0}/", "nonsense://run"])
def test_unusable_addresses(tmp_path: Path, address: str) -> None:
    fill(tmp_path)
    with pytest.raises(RemoteError), mirrored(address.format(tmp_path, tmp_path.name), tmp_path, with_epochs=False):
        pass
    assert (tmp_path / METRICS).read_text() == f"one {METRICS}"
