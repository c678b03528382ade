"""Checkpoints on disk and in a mirror: complete or absent after a kill, with a full disk, or with
damage.
"""

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from speakernet import checkpoint, files
from speakernet.checkpoint import CheckpointError, read_own_checkpoint, write_checkpoint
from speakernet.run_folder import (
    BEST,
    CHECKPOINTS,
    LARGE_MARGIN_FOLDER,
    LAST,
    LOG,
    METRICS,
    PREVIOUS,
    RESULTS,
)
from speakernet.training import checkpoints, mirror
from speakernet.training.checkpoints import CheckpointStore, average_weights, to_cpu
from speakernet.training.mirror import RemoteError, fetch_run, keep_mirror
from speakernet.training.options import TrainingOptions
from tests.training.training_fakes import assert_same_bits, step_of, trained


def contents(value):
    return {"weights": {"a": torch.full((50,), value)}, "plain": [1, "two", None]}


def value_of(path):
    return float(read_own_checkpoint(path)["weights"]["a"][0])


def full(*_arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def cut(path):
    """Damage a file like a full disk or a broken copy."""
    left = path.read_bytes()[:200]
    path.unlink()  # it may be hard-linked under two names
    path.write_bytes(left)


def test_saved_values(tmp_path):
    base = torch.arange(4.0)
    copied = to_cpu({"view": base[1:3], "list": [base], "plain": 3})
    base.zero_()
    assert (
        copied["view"].tolist() == [1.0, 2.0]
        and copied["list"][0][3] == 3.0
        and copied["plain"] == 3
    )


@pytest.mark.parametrize("compress", [False, True])
def test_previous_is_kept(tmp_path, compress):
    store = CheckpointStore(tmp_path, TrainingOptions(compress_checkpoints=compress))
    for value in (1.0, 2.0, 3.0):
        store.save(store.last_path, contents(value))
        store.close()
        assert value_of(store.last_path) == value
        assert store.previous_path.exists() == (value > 1)
    assert value_of(store.previous_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.previous.pt", "last.pt"]


def test_full_disk(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, TrainingOptions())
    store.save(store.last_path, contents(1.0))
    store.wait()
    monkeypatch.setattr(files.os, "fsync", full)
    for value in (2.0, 3.0):
        store.save(store.last_path, contents(value))
    with pytest.raises(OSError, match="No space left"):
        store.close()
    assert caplog.text.count("could not write") == 1
    assert value_of(store.last_path) == 1.0 and [path.name for path in tmp_path.iterdir()] == [
        "last.pt"
    ]
    monkeypatch.undo()
    store.save(store.last_path, contents(4.0))
    store.close()
    assert value_of(store.last_path) == 4.0


class Killed(BaseException):
    """Ends a write like a kill."""


class AtOnce:
    """A thread that runs synchronously when started."""

    def __init__(self, target, args, name):
        self._target = target
        self._arguments = args

    def start(self):
        self._target(*self._arguments)

    def join(self):
        """Nothing to do."""


CALLS = [
    (os, "fsync"),
    (Path, "hardlink_to"),
    (Path, "replace"),
    (Path, "unlink"),
    (checkpoint.torch, "save"),
]


@pytest.mark.parametrize("has_links", [True, False])
def test_kill_at_any_moment(tmp_path, monkeypatch, has_links):
    """At every call that touches the disk, without cleaning up, a complete last.pt remains."""
    monkeypatch.setattr(files, "atomic_write", _without_cleaning)
    monkeypatch.setattr(checkpoint, "atomic_write", _without_cleaning)
    monkeypatch.setattr(checkpoints.threading, "Thread", AtOnce)
    moments = 0
    while True:
        store = CheckpointStore(tmp_path / str(moments), TrainingOptions())
        for value in (1.0, 2.0):
            store.save(store.last_path, contents(value))
        left = [moments]
        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                fails = name == "hardlink_to" and not has_links
                patch.setattr(owner, name, _dying(getattr(owner, name), left, fails=fails))
            with contextlib.suppress(Killed):
                store.save(store.last_path, contents(3.0))
        assert value_of(store.last_path) in (2.0, 3.0)
        assert value_of(store.previous_path) in (1.0, 2.0)
        if left[0] >= 0:
            break
        moments += 1
    assert (
        moments >= 4 and value_of(store.last_path) == 3.0 and value_of(store.previous_path) == 2.0
    )


def _dying(call, left, *, fails):
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
def _without_cleaning(path, mode, *, is_flushed=True):
    """`atomic_write` without exception handlers, as with a kill."""
    temporary = path.with_name(f".{path.name}.0-{os.urandom(4).hex()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open(mode) as file:
        yield file
        if is_flushed:
            os.fsync(file.fileno())
    temporary.replace(path)


def test_truncated_at_any_point(tmp_path):
    path = tmp_path / "last.pt"
    # torch's reader fails in different ways for different sizes.
    write_checkpoint(path, {"weights": torch.zeros(5000)})
    whole = path.read_bytes()
    for size in (0, 1, 30, *range(100, len(whole), len(whole) // 20), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"last\.pt"):
            read_own_checkpoint(path)


def test_damaged_last(tmp_path, caplog):
    trained(tmp_path, max_epochs=2)
    cut(tmp_path / "last.pt")
    damaged = (tmp_path / "last.pt").read_bytes()
    assert trained(tmp_path, seed=99).state.step == 3 * 7
    assert (
        "last.previous.pt" in caplog.text
        and (tmp_path / "last.pt.damaged-1").read_bytes() == damaged
    )


def test_both_damaged(tmp_path):
    trained(tmp_path, max_epochs=2)
    for name in ("last.pt", "last.previous.pt"):
        cut(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"last\.previous\.pt"):
        trained(tmp_path, max_epochs=3)


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_missing_best_of_a_finished_run(tmp_path, damage):
    trained(tmp_path, max_epochs=3, eers=[9.0, 5.0, 7.0])
    damage(tmp_path / "best.pt")
    again = trained(tmp_path, max_epochs=3, eers=[7.0])
    assert read_own_checkpoint(tmp_path / "best.pt")["training_summary"]["best_eer_percent"] == 7.0
    assert again.state.step == 3 * 7
    assert step_of(tmp_path)["best_eer_percent"] == 7.0


HOSTILE = {
    "no state": lambda training: training.pop("state"),
    "net of nothing": lambda training: training.update(net=None),
    "short random state": lambda training: training["random"].update(
        torch=torch.zeros(3, dtype=torch.uint8)
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_odd_content_of_last(tmp_path, kind):
    trained(tmp_path, max_epochs=1, ema_decay=0.5)
    saved = read_own_checkpoint(tmp_path / "last.pt")
    HOSTILE[kind](saved["training"])
    write_checkpoint(tmp_path / "last.pt", saved)
    with pytest.raises(CheckpointError, match=r"last\.pt"):
        trained(tmp_path, max_epochs=2, ema_decay=0.5)


def test_mean_of_checkpoints_against_a_loop():
    states = [
        {"w": torch.full((2,), float(value)), "count": torch.tensor(value)} for value in (1, 2, 6)
    ]
    mean = average_weights(iter(states))
    assert (
        mean["w"].tolist() == [3.0, 3.0] and mean["w"].dtype == torch.float32 and mean["count"] == 6
    )
    for bad in ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], []):
        with pytest.raises(ValueError, match="checkpoint"):
            average_weights(bad)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(mirror, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.011)


COPIED = (LAST, BEST, LOG, METRICS, RESULTS, f"{LARGE_MARGIN_FOLDER}/{LAST}")


def fill(folder):
    for name in (*COPIED, "embeddings/a.npz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"one {name}")


def wait_until(is_so):
    """Fails after half a minute."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_fresh_folder(tmp_path, kind):
    address = str(tmp_path / "there") if kind == "folder" else f"memory://{tmp_path.name}/there"
    run = tmp_path / "run"
    fresh = tmp_path / "fresh"
    fill(run)
    with keep_mirror(address, run, with_epochs=False):
        pass
    assert fetch_run(address, fresh)
    found = sorted(
        path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file()
    )
    assert found == sorted(COPIED)
    assert all((fresh / name).read_text() == f"one {name}" for name in COPIED)
    (fresh / LAST).write_text("its own")
    assert not fetch_run("nonsense://not asked", fresh), "a folder with a last.pt resumes from that"
    assert not fetch_run(str(tmp_path / "empty"), tmp_path / "other")


def test_changes_are_copied(tmp_path):
    run = tmp_path / "run"
    there = tmp_path / "there"
    fill(run)
    epoch = run / CHECKPOINTS / "epoch_0001.pt"
    epoch.parent.mkdir()
    epoch.write_text("1")
    with keep_mirror(str(there), run, with_epochs=True):
        wait_until((there / LAST).exists)
        (run / LAST).write_text("two")
        wait_until(lambda: (there / PREVIOUS).exists() and (there / LAST).exists())
        assert (there / LAST).read_text() == "two"
        epoch.unlink()
        wait_until(lambda: not (there / CHECKPOINTS / epoch.name).exists())
    assert (there / PREVIOUS).read_text() == f"one {LAST}"


def test_copy_cut_off_between_two_names(tmp_path):
    there = tmp_path / "there"
    fill(there)
    (there / LAST).rename(there / PREVIOUS)
    (there / ".last.pt.tmp").write_text("half")
    # Version 0.2 wrote checksums.
    (there / f"{LAST}.sha256").write_text("0 0")
    assert fetch_run(str(there), tmp_path / "fresh")
    assert (tmp_path / "fresh" / LAST).read_text() == f"one {LAST}"
    assert not [
        path for path in (tmp_path / "fresh").iterdir() if path.suffix in (".tmp", ".sha256")
    ]


def test_failing_folder(tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    tries = []
    is_failing = [True]
    put = LocalFileSystem.put_file

    def put_or_fail(system, *paths, **options):
        tries.append(paths)
        if is_failing:
            raise OSError("the disk is gone")
        put(system, *paths, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_or_fail)
    fill(run)
    with keep_mirror(str(tmp_path / "there"), run, with_epochs=False):
        wait_until(lambda: len(tries) > 3)
        is_failing.clear()
        wait_until((tmp_path / "there" / RESULTS).exists)
    assert caplog.text.count("OSError: the disk is gone") == 1


def test_hanging_folder(tmp_path, monkeypatch, caplog):
    let_go = threading.Event()
    entered = threading.Event()

    def hang(*_arguments, **_options):
        entered.set()
        let_go.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(LocalFileSystem, "put_file", hang)
    monkeypatch.setattr(mirror, "END_SECONDS", 0.05)
    fill(tmp_path / "run")
    with keep_mirror(str(tmp_path / "there"), tmp_path / "run", with_epochs=False):
        assert entered.wait(30)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "best.pt, last.pt" in caplog.text
    let_go.set()


def test_unreadable_mirror(tmp_path, monkeypatch):
    def fail(*_arguments):
        raise OSError("no route to host")

    monkeypatch.setattr(LocalFileSystem, "exists", fail)
    with pytest.raises(RemoteError, match="no route to host"):
        fetch_run(str(tmp_path / "there"), tmp_path / "fresh")


def test_names_outside_the_run_folder(tmp_path, monkeypatch):
    root = f"/{tmp_path.name}/there"
    monkeypatch.setattr(MemoryFileSystem, "exists", lambda system, path: True)
    monkeypatch.setattr(
        MemoryFileSystem, "find", lambda system, path: [f"{root}/{LAST}", f"{root}/../../evil.txt"]
    )
    with pytest.raises(RemoteError, match="evil"):
        fetch_run(f"memory:/{root}", tmp_path / "a" / "b" / "fresh")
    assert (
        not list(tmp_path.rglob("evil.txt"))
        and not (tmp_path / "a" / "b" / "fresh" / LAST).exists()
    )


def test_resuming_on_another_machine(tmp_path):
    """After two of four epochs, with a final average of the last three: the same bits as an
    uninterrupted run.
    """
    how = {"average_checkpoints": 3, "ema_decay": 0.9}
    straight = trained(tmp_path / "straight", max_epochs=4, **how)
    there = str(tmp_path / "there")
    with keep_mirror(there, tmp_path / "first", with_epochs=True):
        trained(tmp_path / "first", max_epochs=2, scheduled_epochs=4, ema_decay=0.9)
    assert fetch_run(there, tmp_path / "second")
    resumed = trained(tmp_path / "second", max_epochs=4, seed=99, **how)
    assert resumed.state.step == straight.state.step
    assert_same_bits(straight, resumed)


@pytest.mark.parametrize("address", ["{0}/../{1}", "file://{0}", "{0}/", "nonsense://run"])
def test_unusable_addresses(tmp_path, address):
    fill(tmp_path)
    with (
        pytest.raises(RemoteError),
        keep_mirror(address.format(tmp_path, tmp_path.name), tmp_path, with_epochs=False),
    ):
        pass
    assert (tmp_path / METRICS).read_text() == f"one {METRICS}"
