"""A folder elsewhere: copies are whole or not there, what was before is kept, impossible addresses are told."""

import builtins
import importlib.util
from pathlib import Path

import pytest

from speakernet.remote import FsspecFolder, LocalFolder, RemoteError, RemoteFolder, open_remote

HAS_FSSPEC = importlib.util.find_spec("fsspec") is not None
needs_fsspec = pytest.mark.skipif(not HAS_FSSPEC, reason="fsspec, the extra [remote], is not installed")


@pytest.fixture(params=["folder", pytest.param("memory", marks=needs_fsspec)])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteFolder:
    """An empty folder elsewhere, of each kind."""
    address = str(tmp_path / "elsewhere") if request.param == "folder" else f"memory://{tmp_path.name}/run"
    return open_remote(address)


def content_of(remote: RemoteFolder, name: str) -> bytes:
    with remote.reading(name) as file:
        return file.read()


def test_a_file_goes_there_and_back(remote: RemoteFolder, tmp_path: Path) -> None:
    source, target = tmp_path / "a.bin", tmp_path / "back" / "a.bin"
    assert remote.names() == [] and remote.get("large_margin/last.pt", target) is None
    for content in (b"first" * 300_000, b"", b"third"):
        source.write_bytes(content)
        remote.put(source, "large_margin/last.pt")
        assert remote.get("large_margin/last.pt", target) == "large_margin/last.pt"
        assert target.read_bytes() == content
    assert remote.names() == ["large_margin/last.pt"]
    assert content_of(remote, "large_margin/last.previous.pt") == b""
    assert not [one for one in remote.walk() if one.endswith(".tmp")]
    remote.drop("large_margin/last.pt")
    assert remote.walk() == []


class Killed(BaseException):
    """What ends a copy like a kill: nothing is cleaned up afterwards."""


@pytest.mark.parametrize("step", range(8))
def test_whatever_moment_a_copy_is_killed_at_a_whole_file_is_fetched(
    remote: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Each kill is before the n-th change of the folder; the kill comes twice, before a copy that goes through."""
    source, target = tmp_path / "last.pt", tmp_path / "fetched.pt"
    source.write_bytes(b"old")
    remote.put(source, "last.pt")
    done = 0
    real = {name: getattr(remote, name) for name in ("writing", "move")}

    def killing(name: str):  # type: ignore[no-untyped-def]
        def call(*arguments: object) -> object:
            nonlocal done
            done += 1
            if done > step:
                raise Killed
            return real[name](*arguments)

        return call

    for content in (b"newer", b"newest"):
        source.write_bytes(content)
        done = 0
        with monkeypatch.context() as patched:
            for name in real:
                patched.setattr(remote, name, killing(name))
            patched.setattr(remote, "remove", lambda name: None)
            try:
                remote.put(source, "last.pt")
            except Killed:
                assert step < 5
            else:
                # Two files are written, three take other names; after a kill at the last there is none to be kept.
                assert step >= 4
        assert remote.get("last.pt", target) is not None
        assert target.read_bytes() in (b"old", b"newer", content)
    remote.put(source, "last.pt")
    assert remote.get("last.pt", target) == "last.pt"
    assert target.read_bytes() == b"newest"
    remote.remove_leftovers()
    assert not [one for one in remote.walk() if one.endswith(".tmp")]


def test_a_damaged_copy_is_not_taken(remote: RemoteFolder, tmp_path: Path) -> None:
    source, target = tmp_path / "best.pt", tmp_path / "fetched.pt"
    for content in (b"one", b"two"):
        source.write_bytes(content)
        remote.put(source, "best.pt")
    with remote.writing("best.pt") as file:
        file.write(b"tw")
    assert remote.get("best.pt", target) == "best.previous.pt"
    assert target.read_bytes() == b"one"
    with remote.writing("best.previous.pt") as file:
        file.write(b"on")
    target.unlink()
    assert remote.get("best.pt", target) is None
    assert not target.exists()


def test_a_copy_that_arrives_short_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    remote = LocalFolder(str(tmp_path / "there"))
    monkeypatch.setattr(remote, "size", lambda name: 2)
    with pytest.raises(RemoteError, match="2 of 3 bytes arrived"):
        remote.put(tmp_path / "a", "last.pt")


def test_an_address_without_fsspec_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object, **more: object) -> object:
        if name.split(".")[0] == "fsspec":
            raise ImportError("No module named 'fsspec'")
        return real(name, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RemoteError, match=r"pip install 'speakernet\[remote\]'"):
        open_remote("s3://bucket/run")
    assert isinstance(open_remote("/somewhere"), LocalFolder)


@needs_fsspec
def test_addresses_that_nothing_knows_are_refused() -> None:
    with pytest.raises(RemoteError, match=r"nonsense://run: .*nonsense"):
        open_remote("nonsense://run")
    assert isinstance(open_remote("memory://run"), FsspecFolder)
