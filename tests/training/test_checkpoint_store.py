"""Checkpoints on disk: whole or not at all, in order, loadable without running code."""

import errno
import io
import pickle
from pathlib import Path

import pytest
import torch

from speakernet import checkpoint, files
from speakernet.checkpoint import CheckpointError, read_own_checkpoint, write_checkpoint
from speakernet.training.checkpoints import CheckpointStore, to_cpu
from speakernet.training.options import TrainingOptions


def contents(value: float) -> dict:
    return {"weights": {"a": torch.full((50,), value)}, "plain": [1, "two", None]}


def test_saved_values_are_those_of_the_moment(tmp_path: Path):
    """The weights move on while the thread writes."""
    store = CheckpointStore(tmp_path, TrainingOptions())
    live = contents(1.0)
    store.save_last(live)
    live["weights"]["a"].fill_(2.0)
    store.close()
    assert read_own_checkpoint(store.last_path)["weights"]["a"][0] == 1.0


def test_full_disk_keeps_the_old_file_and_is_told(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture):
    store = CheckpointStore(tmp_path, TrainingOptions())
    store.save_last(contents(1.0))
    store.wait()

    def full(*_arguments) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    store.save_last(contents(2.0))
    store.wait()
    assert "No space left" in caplog.text
    assert read_own_checkpoint(store.last_path)["weights"]["a"][0] == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    with pytest.raises(OSError, match="No space left"):
        store.close()
    monkeypatch.undo()
    # Tried again, though nothing new came.
    store.close()
    assert read_own_checkpoint(store.last_path)["weights"]["a"][0] == 2.0
    store.save_last(contents(3.0))
    store.close()
    assert read_own_checkpoint(store.last_path)["weights"]["a"][0] == 3.0


def test_what_could_not_be_written_is_written_with_the_next(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    """best.pt above all: a better one may never come. Each file is told of once, and again when it is written."""
    store = CheckpointStore(tmp_path, TrainingOptions(keep_checkpoints=2))

    def full(*_arguments) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    store.save_best(contents(1.0))
    for epoch in range(1, 6):
        store.save_epoch(epoch, contents(epoch))
    store.wait()
    assert [path.name for path in store._owed] == ["best.pt", "epoch_0004.pt", "epoch_0005.pt"]
    said = [line.partition(": ")[0] for line in caplog.messages if line.startswith("could not write")]
    assert said[:3] == [
        f"could not write best.pt{more}" for more in ("", ", epoch_0001.pt", ", epoch_0001.pt, epoch_0002.pt")
    ]
    caplog.clear()
    store.save_best(contents(1.0))
    store.wait()
    assert not caplog.messages
    monkeypatch.undo()
    store.save_last(contents(6.0))
    store.close()
    assert read_own_checkpoint(store.best_path)["weights"]["a"][0] == 1.0
    assert [path.name for path in store.epoch_paths()] == ["epoch_0004.pt", "epoch_0005.pt"]
    assert caplog.messages == ["written now: epoch_0004.pt, epoch_0005.pt, best.pt"]


def test_really_full_device():
    """A device that is always full: the error is an OSError, whatever torch makes of it."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this platform")

    class FullFile(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _data) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises((OSError, RuntimeError)):
        torch.save(contents(1.0), FullFile())


def test_interrupt_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "last.pt"
    write_checkpoint(path, contents(1.0))

    def interrupted(*_arguments) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(path, contents(2.0))
    assert read_own_checkpoint(path)["weights"]["a"][0] == 1.0
    assert [one.name for one in tmp_path.iterdir()] == ["last.pt"]


def test_truncated_at_any_point_is_a_clear_error(tmp_path: Path):
    path = tmp_path / "last.pt"
    # Of some sizes torch's reader fails otherwise than of others.
    write_checkpoint(path, {"weights": torch.zeros(5000)})
    whole = path.read_bytes()
    for size in (0, 1, 30, *range(100, len(whole), len(whole) // 20), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"is truncated or not a checkpoint|is not a checkpoint"):
            read_own_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"weights": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(CheckpointError):
            read_own_checkpoint(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_only_the_newest_models_are_kept(tmp_path: Path):
    store = CheckpointStore(tmp_path, TrainingOptions(keep_checkpoints=2))
    for epoch in (1, 2, 3, 10):
        store.save_epoch(epoch, contents(epoch))
    store.close()
    assert [path.name for path in store.epoch_paths()] == ["epoch_0003.pt", "epoch_0010.pt"]


def test_compressed_files_load_the_same_and_are_smaller(tmp_path: Path):
    write_checkpoint(tmp_path / "a.pt", contents(1.0))
    write_checkpoint(tmp_path / "b.pt", contents(1.0), compress=True)
    assert torch.equal(read_own_checkpoint(tmp_path / "b.pt")["weights"]["a"], contents(1.0)["weights"]["a"])
    assert (tmp_path / "b.pt").stat().st_size < (tmp_path / "a.pt").stat().st_size


def test_leftovers_of_a_killed_write_are_removed(tmp_path: Path):
    leftover = tmp_path / ".last.pt.123-abcd.tmp"
    leftover.write_bytes(b"half")
    other = tmp_path / "results.json"
    other.write_text("{}")
    CheckpointStore(tmp_path, TrainingOptions()).remove_leftovers()
    assert not leftover.exists() and other.exists()


def test_copies_are_cut_loose():
    base = torch.arange(4.0)
    copied = to_cpu({"view": base[1:3], "list": [base], "plain": 3})
    base.zero_()
    assert copied["view"].tolist() == [1.0, 2.0] and copied["list"][0][3] == 3.0 and copied["plain"] == 3
