"""VoxCeleb2's m4a files converted in parts, as by several machines: the same files as by one."""

import hashlib
import logging
import shutil
from pathlib import Path

import pytest
from preparation_corpora import to_m4a, write_voices

from speakernet.cli import main

SOURCES = "voxceleb2/dev/aac"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, ffmpeg) -> Path:
    """Eight m4a files where --extract leaves them."""
    root = tmp_path_factory.mktemp("corpus")
    for name in write_voices(root / "plain", 4, 2, "id0000{speaker}/video0/0000{utterance}.wav"):
        to_m4a(ffmpeg, root / "plain" / name, root / SOURCES / name.replace(".wav", ".m4a"))
    shutil.rmtree(root / "plain")
    return root


def convert(folder: Path, *more: str) -> int:
    return main(["prepare", "voxceleb", "--save_path", str(folder), "--subsets", "vox2_dev", "--jobs", "1", *more])


def content(folder: Path) -> dict[str, str]:
    root = folder / "voxceleb2/dev/wav"
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_parts_are_the_whole(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys) -> None:
    caplog.set_level(logging.INFO)
    whole, parts = (shutil.copytree(corpus, tmp_path / name) for name in ("whole", "parts"))
    assert convert(whole, "--convert") == 0
    # As the parts are done their sources go, and every part still has its own.
    assert convert(parts, "--convert", "--part", "2/3", "--remove_originals") == 0
    assert 0 < len(content(parts)) < 8
    assert "the parts 1/3, 3/3 are still to be converted" in caplog.text
    assert convert(parts, "--lists", "--lists_from", str(tmp_path)) == 1
    assert "the parts 1/3, 3/3 are not converted" in capsys.readouterr().err
    for part in ("3/3", "1/3"):
        assert convert(parts, "--convert", "--part", part, "--remove_originals") == 0
    assert "all 3 parts are converted" in caplog.text
    assert content(parts) == content(whole) and len(content(whole)) == 8
    assert not list((parts / SOURCES).rglob("*.m4a"))
    # What a killed part left goes when the lists are made; parts of another format are told.
    (parts / "voxceleb2/dev/wav/.half.wav.1-ab.tmp").touch()
    assert convert(parts, "--lists", "--format", "flac") == 1
    assert "was converted with --format wav --subsets vox2_dev, not flac" in capsys.readouterr().err
    convert(parts, "--lists", "--lists_from", str(tmp_path))
    assert content(parts) == content(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--convert", "--lists", "--part", "1/2"], "it is for --convert alone"),
        (["--convert", "--part", "0/4"], "there is no part 0 of 4"),
    ],
)
def test_what_a_part_cannot_be(options: list[str], message: str, tmp_path: Path, capsys, ffmpeg) -> None:
    assert convert(tmp_path / "data", *options) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
