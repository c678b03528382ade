"""Reading audio: every WAV layout against soundfile, crops against whole files, broken files,
fuzzed headers.
"""

import contextlib
import resource
import struct
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from numpy.testing import assert_allclose, assert_array_equal
from scipy.signal import resample_poly

from speakernet.data.audio import (
    AudioError,
    audio_info,
    crop_of_file,
    open_audio_bytes,
    read_audio,
    write_audio,
)

# SoX, arecord, mpg123, ffmpeg and their neighbours.
PIPE_SIZES = [0x7FFFF000, 0x7FFFFFFF - 36, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF]
SUBTYPES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ALAW", "ULAW"]


def read_bytes(content):
    file, info = open_audio_bytes(content, "a.wav")
    return crop_of_file(file, info, "a.wav", 0, None, 16000)


def wav_bytes(
    samples, chunks_before=b"", chunks_after=b"", data_bytes=None, channels=1, rate=16000
):
    """A 16-bit WAV assembled by hand, of one channel whatever its header says."""
    raw = samples.astype("<i2").tobytes()
    size = len(raw) if data_bytes is None else data_bytes
    facts = struct.pack("<IHHIIHH", 16, 1, channels, rate, 32000, 2 * channels, 16)
    body = b"WAVE" + chunks_before + b"fmt " + facts
    body += b"data" + struct.pack("<I", size & 0xFFFFFFFF) + raw + chunks_after
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("layout", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize("subtype", SUBTYPES)
def test_wav_layouts(tmp_path, random, subtype, layout, channels):
    path = tmp_path / "a.wav"
    soundfile.write(
        path, 0.1 * random.standard_normal((3000, channels)), 16000, subtype=subtype, format=layout
    )
    expected = soundfile.read(path, dtype="float32", always_2d=True)[0].mean(axis=1)
    info = audio_info(path)
    assert (info.num_samples, info.num_channels, info.sample_rate) == (3000, channels, 16000)
    assert (info.data_offset >= 0) == (subtype not in ("ALAW", "ULAW"))
    found = read_audio(path)
    assert_allclose(found, expected, atol=0 if channels == 1 else 1e-6)
    assert found.dtype == np.float32
    assert_allclose(read_audio(path, 1000, 500), expected[1000:1500], atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_resampled_crops(tmp_path, random, rate, suffix):
    path = tmp_path / f"a{suffix}"
    soundfile.write(path, 0.1 * random.standard_normal(rate), rate)
    common = np.gcd(rate, 16000)
    expected = resample_poly(
        soundfile.read(path, dtype="float32")[0], 16000 // common, rate // common
    )
    whole = read_audio(path)
    assert len(whole) == audio_info(path).num_samples_at(16000) == len(expected)
    assert_allclose(whole, expected, atol=1e-6)
    for start, count in [(0, 100), (1, 700), (5000, 4000), (15000, 1000), (15990, 1000)]:
        assert_allclose(read_audio(path, start, count), expected[start : start + count], atol=1e-6)


def test_odd_chunks_and_sizes(tmp_path):
    samples = np.arange(100)
    odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    big = b"junk" + struct.pack("<I", 10000) + bytes(10000)
    for content in [
        wav_bytes(samples, odd),
        wav_bytes(samples, big),
        wav_bytes(samples, odd, odd),
        wav_bytes(samples, data_bytes=0xFFFFFFFF),
        wav_bytes(samples, data_bytes=0),
        wav_bytes(samples, data_bytes=5000),
        *[wav_bytes(samples, data_bytes=size) for size in PIPE_SIZES],
        *[wav_bytes(samples, chunks_after=odd + big, data_bytes=size) for size in (0, *PIPE_SIZES)],
    ]:
        assert_array_equal(read_bytes(content) * 32768, samples)
    for size in (5000, 0x7FF00000):
        (tmp_path / f"cut{size}.wav").write_bytes(wav_bytes(samples, data_bytes=size))
        assert audio_info(tmp_path / f"cut{size}.wav").is_truncated
    for size in PIPE_SIZES:
        (tmp_path / f"{size}.wav").write_bytes(wav_bytes(samples, data_bytes=size))
        assert not audio_info(tmp_path / f"{size}.wav").is_truncated


@pytest.mark.parametrize("kind", [b"LIST", b"_PMX", b"id3 "])
def test_metadata_is_not_sound(kind):
    metadata = kind + struct.pack("<I", 10001) + bytes(range(1, 101)) * 100 + b"\1\0"
    with pytest.raises(AudioError, match="no samples"):
        read_bytes(wav_bytes(np.zeros(0), chunks_after=metadata))
    # A chunk that does not reach the end exactly is sound.
    content = wav_bytes(np.arange(100), chunks_after=metadata + b"12", data_bytes=0)
    assert len(read_bytes(content)) == 100 + (len(metadata) + 2) // 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (wav_bytes(np.zeros(0)), "no samples"),
        (wav_bytes(np.arange(50))[:30], "broken WAV|not a readable"),
        (b"this is not audio at all, but text", "not a readable audio file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer"),
        (b"\n<!DOCTYPE html><p>please log in", "an HTML page"),
        (b"RIFF\0\0\0\0WAVE" + (b"junk" + bytes(4)) * 200_000, "broken WAV"),
        (wav_bytes(np.zeros(30000), channels=30000), "30000 channels"),
        *[(wav_bytes(np.zeros(9), rate=rate), f"{rate} Hz") for rate in (1, 999, 2**32 - 1)],
    ],
)
def test_broken_files(tmp_path, content, message):
    path = tmp_path / "broken.wav"
    path.write_bytes(content)
    with pytest.raises(AudioError, match=message):
        read_audio(path)


def flac_with_length(path, num_samples):
    soundfile.write(path, 0.1 * np.random.default_rng(0).standard_normal(16000), 16000)
    content = bytearray(path.read_bytes())
    content[21:26] = ((content[21] >> 4 << 36) | num_samples).to_bytes(5, "big")
    path.write_bytes(content)
    return path


def test_impossible_length(tmp_path):
    path = flac_with_length(tmp_path / "a.flac", 68_000_000_000)
    message = (
        r"a\.flac: broken FLAC file: claims 68,000,000,000 samples in "
        rf"{path.stat().st_size:,} bytes"
    )
    with pytest.raises(AudioError, match=message):
        audio_info(path)


def test_false_length_takes_no_memory(tmp_path):
    path = flac_with_length(tmp_path / "a.flac", 200_000_000)
    with limited_memory(256 << 20), pytest.raises(AudioError, match="the file is damaged"):
        read_audio(path)


@contextlib.contextmanager
def limited_memory(num_bytes):
    """Limit the address space to the present size plus `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_round_trip(tmp_path, suffix):
    waveform = np.array([0, 0.5, -0.5, 2.0, -2.0, 0.25], dtype=np.float32)
    write_audio(tmp_path / f"a{suffix}", waveform)
    assert_allclose(
        read_audio(tmp_path / f"a{suffix}"), np.clip(waveform, -1, 32767 / 32768), atol=1e-6
    )
    with pytest.raises(AudioError, match=r"a\.mp3.*\.wav or \.flac"):
        write_audio(tmp_path / "a.mp3", waveform)


CODINGS = {
    **dict.fromkeys(
        ("m4a", "aac", "webm", "wma", "mka", "mov", "avi", "ts", "wv", "tta", "ac3"), ()
    ),
    "3gp": ["-c:a", "aac"],
    "flv": ["-ar", "44100"],
    # Ogg with FLAC, which libsndfile cannot read; a WAV coding that it does not know.
    "ogv": ["-c:a", "flac", "-f", "ogg"],
    "wav": ["-c:a", "g726", "-ar", "8000"],
}


@pytest.fixture
def encode(tmp_path, ffmpeg):
    """Writes a tone in the format of a suffix."""

    def run(suffix, seconds=2.0, options=(), inputs=()):
        tone = 0.3 * np.sin(np.arange(int(16000 * seconds)) * 2 * np.pi * 440 / 16000)
        write_audio(tmp_path / "tone.wav", tone)
        path = tmp_path / f"coded.{suffix}"
        command = [ffmpeg, "-nostdin", "-loglevel", "error", *inputs, "-i", tmp_path / "tone.wav"]
        subprocess.run([*command, *CODINGS.get(suffix, []), *options, path], check=True)
        return path

    return run


@pytest.mark.parametrize("suffix", CODINGS)
def test_ffmpeg(tmp_path, encode, suffix):
    path = encode(suffix)
    tone = read_audio(tmp_path / "tone.wav")
    # The format is recognised by the first bytes, not by the name.
    renamed = path.rename(tmp_path / "tone.mp3")
    found = read_audio(renamed)
    info = audio_info(renamed)
    assert (
        len(found) == info.num_samples and abs(len(found) - 32000) < 2500 and info.data_offset < 0
    )
    lag = int(np.argmax([np.dot(found[at : at + 20000], tone[:20000]) for at in range(40)]))
    # G.726 and AMR are coarse.
    assert_allclose(found[lag + 8000 : lag + 20000], tone[8000:20000], atol=0.12)
    assert_array_equal(read_audio(renamed, 5000, 700), found[5000:5700])
    content = renamed.read_bytes()
    assert_array_equal(read_bytes(content), found)
    assert open_audio_bytes(content, "a tone")[1].num_samples == len(found)
    # A server stops decoding once a recording is too long for it.
    cut = open_audio_bytes(content, "a tone", max_seconds=1)[1]
    assert suffix == "wav" or cut.seconds == pytest.approx(1, abs=0.1)


def test_aac_with_an_id3_tag(encode):
    path = encode("aac")
    whole = read_audio(path)
    path.write_bytes(b"ID3\4\0\0\0\0\0\0" + path.read_bytes())
    assert_array_equal(read_audio(path), whole)


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_times_are_those_of_the_video(tmp_path, encode, suffix):
    # Two seconds of sound from the first second on, in a picture of six.
    picture = ["-f", "lavfi", "-i", "color=size=64x64:rate=5:duration=6", "-itsoffset", "1"]
    found = read_audio(encode(suffix, options=["-map", "0:v", "-map", "1:a"], inputs=picture))
    assert len(found) == pytest.approx(48000, abs=2000)
    assert np.abs(found[:15000]).max() < 0.01 and np.abs(found[17000:18000]).max() > 0.2
    assert not audio_info(tmp_path / f"coded.{suffix}").is_truncated
    silent = encode(f"silent.{suffix}", options=["-map", "0:v"], inputs=picture)
    with pytest.raises(AudioError, match=r"silent\.\w+: .*no sound track"):
        read_audio(silent)


def test_a_playlist_is_not_audio(tmp_path):
    write_audio(tmp_path / "secret.wav", 0.1 * np.ones(16000))
    for name, content in {
        "a.m4a": "ffconcat version 1.0\nfile secret.wav\n",
        "b.m4a": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.wav\n#EXT-X-ENDLIST\n",
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(AudioError, match=name):
            read_audio(tmp_path / name)


def cut_in_half(content):
    return content[: len(content) * 11 // 20 + 1]


@pytest.mark.parametrize(
    ("format_name", "subtype"),
    [
        ("AIFF", "PCM_16"),
        ("NIST", "PCM_16"),
        ("WAV", "IMA_ADPCM"),
    ],
)
def test_cut_files_say_so(tmp_path, random, format_name, subtype):
    path = tmp_path / "a.wav"
    soundfile.write(
        path, 0.1 * random.standard_normal(32000), 16000, format=format_name, subtype=subtype
    )
    assert not audio_info(path).is_truncated and len(read_audio(path)) >= 32000
    path.write_bytes(cut_in_half(path.read_bytes()))
    assert audio_info(path).is_truncated and 16000 < len(read_audio(path)) < 18500


@pytest.mark.parametrize(
    "suffix", ["opus", "caf", "wma", "aac", "amr", "mp2", "avi", "m4a", "mp3", "flac"]
)
def test_cut_files_warn_or_are_refused(encode, suffix):
    options = {"amr": ["-ar", "8000", "-c:a", "libopencore_amrnb"], "caf": ["-c:a", "pcm_s16le"]}
    try:
        path = encode(suffix, 20.0, options=options.get(suffix, []))
    except subprocess.CalledProcessError:
        pytest.skip(f"this ffmpeg cannot write {suffix}")
    assert (
        len(read_audio(path)) == pytest.approx(320_000, abs=6000)
        and not audio_info(path).is_truncated
    )
    path.write_bytes(cut_in_half(path.read_bytes()))
    try:
        assert len(read_audio(path)) < 200_000
    except AudioError:
        return
    assert audio_info(path).is_truncated


def test_decoded_files_take_no_memory(tmp_path, encode):
    path = encode("mka", 300.0, options=["-c:a", "pcm_s16le"])
    resident = psutil.Process().memory_info
    read_audio(path, 0, 16000)
    before = resident().rss
    for row in range(4):
        copy = tmp_path / f"{row}.mka"
        copy.write_bytes(path.read_bytes())
        assert len(read_audio(copy, 16000 * 250, 16000)) == 16000
    # Each is 9.6 MB in 16 bits.
    assert resident().rss - before < 8 << 20


@pytest.mark.parametrize("loudest", [1e30, 32767.0, np.nan, np.inf])
@pytest.mark.parametrize("suffix", ["wav", "aiff"])
def test_loud_float_files(tmp_path, loudest, suffix):
    samples = np.zeros((1000, 2), dtype=np.float32)
    # The mean of both channels is zero and would hide it.
    samples[500] = loudest, -loudest
    soundfile.write(tmp_path / f"a.{suffix}", samples, 16000, subtype="FLOAT")
    with pytest.raises(AudioError, match=f"a.{suffix}"):
        read_audio(tmp_path / f"a.{suffix}")


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_crops_of_mp3(tmp_path, random, mode):
    """A crop is what decoding the whole file gives there, although a frame may need bits of earlier
    frames, which a seek skips.
    """
    loudness = np.repeat(random.uniform(0, 0.3, 40), 2000)
    waveform = loudness * random.standard_normal(80000)
    path = tmp_path / "a.mp3"
    soundfile.write(path, waveform, 16000, bitrate_mode=mode, compression_level=0.7)
    whole = read_audio(path)
    for start in random.integers(0, 60000, 30).tolist():
        crop = read_audio(path, start, 8000)
        assert_allclose(crop, whole[start : start + 8000], atol=1e-5)
