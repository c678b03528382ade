"""Conversion by a real ffmpeg: names, lengths, damaged sources, thousands of files, parts
of the work.
"""

import hashlib
import shutil
import subprocess

import numpy as np
import pytest
from preparation_corpora import run_data_prep, to_m4a, write_voices

from speakernet.corpora.steps import DiskFullError, StepSummary, convert_all
from speakernet.data.audio import audio_info, read_audio, write_audio
from tests.conftest import tiny_voice as voice


def make_m4a(ffmpeg, path, seconds=1.0, rate=16000):
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = f"sine=frequency=440:duration={seconds}:sample_rate={rate}"
    options = f"-nostdin -loglevel error -y -f lavfi -i {tone} -c:a aac -movflags +faststart"
    subprocess.run([ffmpeg, *options.split(), f"file:{path.absolute()}"], check=True)
    return path


def convert(folder, pairs, file_format="wav", **options):
    summary = StepSummary("convert", folder)
    convert_all(pairs, file_format, 2, summary, **options)
    return summary


@pytest.mark.parametrize("file_format", ["wav", "flac"])
def test_m4a(tmp_path, ffmpeg, file_format):
    source = make_m4a(ffmpeg, tmp_path / "a.m4a", 1.5, rate=44100)
    target = tmp_path / "out" / f"a.{file_format}"
    assert convert(tmp_path, [(source, target)], file_format).made == 1
    info = audio_info(target)
    assert (info.sample_rate, info.num_channels) == (16000, 1)
    assert info.seconds == pytest.approx(1.5, abs=0.1)
    assert np.abs(np.fft.rfft(read_audio(target)[4000:20000])).argmax() == pytest.approx(440, abs=2)
    assert source.exists()


def make_wav_start(folder):
    write_audio(folder / "whole.wav", voice(1, 1, 1.0))
    return (folder / "whole.wav").read_bytes()[:10_000]


def test_damaged_sources_are_listed(tmp_path, ffmpeg):
    sources = [make_m4a(ffmpeg, tmp_path / f"{row}.m4a", 2.0) for row in range(5)]
    content = sources[2].read_bytes()
    sources[1].write_bytes(b"no audio")
    sources[2].write_bytes(content[: len(content) // 2])
    sources[3].write_bytes(b"")
    pairs = [(source, tmp_path / "out" / f"{source.stem}.wav") for source in sources]
    # An incomplete file from a different tool is made again.
    (tmp_path / "out").mkdir()
    pairs[0][1].write_bytes(make_wav_start(tmp_path))
    summary = convert(tmp_path, pairs, keep_sources=False)
    assert (summary.made, summary.broken) == (2, 3) and audio_info(pairs[0][1]).seconds > 1.9
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.wav", "4.wav"]
    assert [source.exists() for source in sources] == [False, True, True, True, False]
    listed = summary.broken_path.read_text()
    assert all(f"{row}.m4a" in listed for row in (1, 2, 3))


@pytest.mark.parametrize(
    "name",
    [
        "-y.m4a",
        "a b'c\".m4a",
        "new\nline.m4a",
        "é語.m4a",
        "concat:x|y.m4a",
        "%03d.m4a",
        "$(id).m4a",
    ],
)
def test_odd_names(tmp_path, ffmpeg, name):
    source = make_m4a(ffmpeg, tmp_path / "plain.m4a").rename(tmp_path / name)
    target = tmp_path / "out" / (source.stem + ".wav")
    assert convert(tmp_path, [(source, target)]).made == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "out"])


def test_a_full_disk_stops_the_conversion(tmp_path, ffmpeg, monkeypatch):
    sources = [make_m4a(ffmpeg, tmp_path / f"{row}.m4a") for row in range(3)]
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    sources[0].write_bytes(b"what fails when nothing can be written")
    with pytest.raises(DiskFullError):
        convert(tmp_path, [(source, tmp_path / "out" / f"{source.stem}.wav") for source in sources])
    assert list((tmp_path / "out").iterdir()) == []


SOURCES = "voxceleb2/dev/aac"
TARGETS = "voxceleb2/dev/wav"


def convert_voxceleb(folder, steps, status=0):
    common = f"--save_path {folder} --subsets vox2_dev --jobs 1"
    run_data_prep("voxceleb", common, steps, status=status)


def digests(root):
    files = [path for path in root.rglob("*") if path.is_file()]
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_parts(tmp_path, ffmpeg, capsys):
    whole = tmp_path / "whole"
    shares = tmp_path / "shares"
    for name in write_voices(
        tmp_path / "plain", 4, 2, "id0000{speaker}/video0/0000{utterance}.wav"
    ):
        to_m4a(ffmpeg, tmp_path / "plain" / name, whole / SOURCES / name.replace(".wav", ".m4a"))
    shutil.copytree(whole, shares)
    convert_voxceleb(whole, "--convert")
    # Finished parts remove their sources; the other parts still have theirs.
    convert_voxceleb(shares, "--convert --part 2/3 --remove_originals")
    assert 0 < len(digests(shares / TARGETS)) < 8
    convert_voxceleb(shares, f"--lists --lists_from {tmp_path}", status=1)
    assert "1/3, 3/3" in capsys.readouterr().err
    for part in ("3/3", "1/3"):
        convert_voxceleb(shares, f"--convert --part {part} --remove_originals")
    convert_voxceleb(shares, "--convert --part 0/4", status=1)
    assert "--part" in capsys.readouterr().err
    expected = digests(whole / TARGETS)
    assert digests(shares / TARGETS) == expected and len(expected) == 8
    assert not list((shares / SOURCES).rglob("*.m4a"))
    # Leftovers of a killed part are removed when the lists are made.
    (shares / TARGETS / ".half.wav.1-ab.tmp").touch()
    convert_voxceleb(shares, f"--lists --lists_from {tmp_path}", status=1)
    assert digests(shares / TARGETS) == expected
