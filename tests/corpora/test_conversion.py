"""Conversion by a real ffmpeg: names, lengths, leftovers of other tools, damaged sources, thousands of files."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from speakernet.corpora.conversion import Conversion, ConversionOptions, convert_all, is_converted, mp4_seconds
from speakernet.corpora.download import DiskFullError
from speakernet.corpora.summary import StepSummary
from speakernet.data.audio import audio_info, read_audio, write_audio
from speakernet.data.ffmpeg import FfmpegError, find_ffmpeg


def make_m4a(ffmpeg: str, path: Path, seconds: float = 1.0, rate: int = 16000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = f"sine=frequency=440:duration={seconds}:sample_rate={rate}"
    command = [ffmpeg, "-nostdin", "-loglevel", "error", "-y", "-f", "lavfi", "-i", tone, "-c:a", "aac"]
    subprocess.run([*command, "-movflags", "+faststart", f"file:{path.absolute()}"], check=True)
    return path


def convert(ffmpeg: str, folder: Path, pairs, **options) -> StepSummary:
    with StepSummary("convert", folder) as summary:
        convert_all([Conversion(*pair) for pair in pairs], ConversionOptions(ffmpeg, **options), 2, summary)
    return summary


@pytest.mark.parametrize("file_format", ["wav", "flac"])
def test_m4a_becomes_mono_16_khz_of_the_same_length_and_sound(tmp_path, ffmpeg, file_format):
    source = make_m4a(ffmpeg, tmp_path / "a.m4a", 1.5, rate=44100)
    target = tmp_path / "out" / f"a.{file_format}"
    assert mp4_seconds(source) == pytest.approx(1.5, abs=0.1)
    assert convert(ffmpeg, tmp_path, [(source, target)], file_format=file_format).made == 1
    info = audio_info(target)
    assert (info.sample_rate, info.num_channels) == (16000, 1)
    assert info.num_samples / 16000 == pytest.approx(1.5, abs=0.1)
    spectrum = np.abs(np.fft.rfft(read_audio(target)[4000:20000]))
    assert spectrum.argmax() * 16000 / 16000 == pytest.approx(440, abs=2)
    assert source.exists()


def test_a_second_run_makes_nothing_and_leftovers_of_other_tools_are_made_again(tmp_path, ffmpeg):
    sources = [make_m4a(ffmpeg, tmp_path / f"{row}.m4a") for row in range(5)]
    pairs = [(source, tmp_path / "out" / f"{source.stem}.wav") for source in sources]
    assert convert(ffmpeg, tmp_path, pairs).made == 5
    whole = [target.read_bytes() for _, target in pairs]
    assert convert(ffmpeg, tmp_path, pairs).skipped == 5
    pairs[0][1].write_bytes(whole[0][:44])
    pairs[1][1].write_bytes(whole[1][: len(whole[1]) // 2])
    pairs[2][1].write_bytes(b"")
    write_audio(pairs[3][1], np.zeros(4000, dtype=np.float32), 16000)
    summary = convert(ffmpeg, tmp_path, pairs)
    assert (summary.made, summary.skipped) == (4, 1)
    assert [target.read_bytes() for _, target in pairs] == whole


def test_a_damaged_source_is_listed_and_the_others_of_its_batch_are_made(tmp_path, ffmpeg):
    sources = [make_m4a(ffmpeg, tmp_path / f"{row}.m4a", 2.0) for row in range(5)]
    content = sources[2].read_bytes()
    sources[1].write_bytes(b"no audio")
    sources[2].write_bytes(content[: len(content) // 2])
    sources[3].write_bytes(b"")
    pairs = [(source, tmp_path / "out" / f"{source.stem}.wav") for source in sources]
    summary = convert(ffmpeg, tmp_path, pairs, keep_sources=False)
    assert (summary.made, summary.broken) == (2, 3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.wav", "4.wav"]
    assert [source.exists() for source in sources] == [False, True, True, True, False]
    listed = summary.broken_path.read_text()
    assert all(f"{row}.m4a" in listed for row in (1, 2, 3))


@pytest.mark.parametrize(
    "name", ["-y.m4a", "a b'c\".m4a", "new\nline.m4a", "é語.m4a", "concat:x|y.m4a", "%03d.m4a", "$(id).m4a"]
)
def test_odd_names_are_safe(tmp_path, ffmpeg, name):
    source = make_m4a(ffmpeg, tmp_path / "plain.m4a").rename(tmp_path / name)
    target = tmp_path / "out" / (source.stem + ".wav")
    assert convert(ffmpeg, tmp_path, [(source, target)]).made == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "out"])


def test_converted_means_there_whole_and_as_long_as_the_source(tmp_path, ffmpeg):
    source = make_m4a(ffmpeg, tmp_path / "a.m4a")
    target = tmp_path / "a.wav"
    assert not is_converted(Conversion(source, target), 16000)
    write_audio(target, np.zeros(16000, dtype=np.float32), 16000)
    assert is_converted(Conversion(source, target), 16000)
    assert not is_converted(Conversion(source, target), 8000)
    source.unlink()
    assert is_converted(Conversion(source, target), 16000)


def test_ffmpeg_of_the_user_is_taken_first_and_a_missing_one_is_explained(tmp_path, monkeypatch):
    own = tmp_path / "ffmpeg"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ffmpeg() == str(own)
    monkeypatch.setenv("SPEAKERNET_FFMPEG", "/nowhere/ffmpeg")
    with pytest.raises(FfmpegError, match="apt install ffmpeg"):
        find_ffmpeg()


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0\x08moov", b"\xff" * 40, b"\0\0\0\x01moov" + b"\xff" * 8, b"\0\0\0\0mdat"]
)
def test_the_mp4_header_reader_survives_anything(tmp_path, content):
    (tmp_path / "a.m4a").write_bytes(content)
    assert mp4_seconds(tmp_path / "a.m4a") is None


def test_a_full_disk_stops_the_conversion_instead_of_listing_every_file(tmp_path, ffmpeg, monkeypatch):
    sources = [make_m4a(ffmpeg, tmp_path / f"{row}.m4a") for row in range(3)]
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    sources[0].write_bytes(b"what fails when nothing can be written")
    pairs = [(source, tmp_path / "out" / f"{source.stem}.wav") for source in sources]
    with pytest.raises(DiskFullError, match="are needed"):
        convert(ffmpeg, tmp_path, pairs)
    assert list((tmp_path / "out").iterdir()) == []
