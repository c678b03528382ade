"""Lengths that a header only guesses: MP3 from a pipe, joined MP3, FLAC of unknown length, chained
Ogg.
"""

import io

import numpy as np
import pytest
import soundfile
from numpy.testing import assert_allclose, assert_array_equal

from speakernet.data import lengths
from speakernet.data.audio import AudioError, audio_info, read_audio
from speakernet.data.lists import StringTable
from speakernet.data.sources import FolderSource
from tests.data.test_audio import read_bytes

FRAME_SAMPLES, DELAY = 576, 529  # of MP3 at 16 kHz
WITHOUT_TAG = b"\xff\xf3\x88\xc4"  # 64 kbit/s, 16 kHz, mono, no checksum


def tone(seconds=2.0, hz=440):
    return 0.3 * np.sin(np.arange(round(seconds * 16000)) * 2 * np.pi * hz / 16000)


def encode(samples, format_name, rate=16000, subtype=None, **options):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format_name, subtype=subtype, **options)
    return buffer.getvalue()


def mp3(samples, mode="CONSTANT"):
    """An MP3 whose first frame says nothing about its length, as an encoder leaves it that writes
    to a pipe.
    """
    content = encode(samples, "MP3", bitrate_mode=mode, compression_level=0.5)
    header = lengths.mpeg_header(content[:4])
    assert content[4 + header.side_bytes :][:4] in (b"Xing", b"Info")
    return content, content[header.frame_bytes :]


def test_mpeg_header():
    header = lengths.mpeg_header(WITHOUT_TAG)
    # 72 * 64,000 / 16,000 bytes.
    assert (header.layer, header.sample_rate, header.is_mono) == (3, 16000, True)
    assert (header.frame_bytes, header.frame_samples, header.side_bytes) == (288, 576, 9)
    # MPEG 1, 128 kbit/s, 44.1 kHz, stereo: 144 * 128,000 / 44,100 = 417.96, and 1 byte of padding.
    padded = lengths.mpeg_header(b"\xff\xfb\x92\x00")
    assert (padded.frame_bytes, padded.frame_samples, padded.side_bytes) == (418, 1152, 32)
    for raw in (
        b"ID3\4",
        b"\xff\xff\xff\xff",
        b"\xff\xf3\x08\xc4",
        b"\xff\xf1\x50\x80",
        b"\xff\xf3",
    ):
        assert lengths.mpeg_header(raw) is None


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize(
    "tags", [(b"", b""), (b"ID3\4\0\0\0\0\2\0" + bytes(256), b"TAG" + bytes(125))]
)
def test_mp3_without_a_length(tmp_path, random, mode, tags):
    # Half of it is quiet, so that variable frames differ in size.
    samples = np.concatenate(
        [0.001 * random.standard_normal(16000), tone(3.0) + 0.1 * random.standard_normal(48000)]
    )
    whole, content = mp3(samples, mode)
    before, after = tags
    path = tmp_path / "a.mp3"
    path.write_bytes(before + content + after)
    expected, is_cut = lengths.mpeg_frames(io.BytesIO(before + content + after))
    assert audio_info(path).num_samples == expected and not is_cut
    assert 64000 <= expected <= 64000 + 3 * FRAME_SAMPLES
    assert (expected + DELAY) % FRAME_SAMPLES == 0
    found = read_audio(path)
    assert len(found) == expected
    reference = read_bytes(whole)
    assert len(reference) == 64000
    lag = int(np.argmax(np.correlate(found, reference[20000:28000], "valid"))) - 20000
    assert_allclose(found[lag + 20000 : lag + 60000], reference[20000:60000], atol=1e-3)
    # After a seek, the first few milliseconds may lack bits of earlier frames.
    assert_allclose(read_audio(path, 40000, 5000)[200:], found[40200:45000], atol=1e-3)
    assert_array_equal(read_bytes(path.read_bytes()), found)


def test_a_learned_length_is_kept(tmp_path, monkeypatch):
    (tmp_path / "a.mp3").write_bytes(mp3(tone())[1])
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path / "cache"))
    names = StringTable.from_strings(["a.mp3"])
    table = FolderSource(tmp_path).lookup_table(names)
    expected = read_audio(tmp_path / "a.mp3")
    assert table.num_samples.tolist() == [len(expected)]
    monkeypatch.setattr(lengths, "mpeg_frames", lambda _: pytest.fail("counted again"))
    source = FolderSource(tmp_path)
    crop = np.zeros((1, 8000), dtype=np.float32)
    rows = source.rows(names, source.lookup_table(names))
    assert rows.fill(np.zeros(1, np.int64), np.full(1, 20000), crop) == {}
    assert_allclose(crop[0, 200:], expected[20200:28000], atol=1e-3)


def test_joined_mp3():
    (first, second), (other, plain) = mp3(tone(2.0)), mp3(tone(3.0, hz=1000))
    for content in (
        first + other,
        second + plain,
        first + b"TAG" + bytes(125) + b"ID3\4\0\0\0\0\0\0" + other,
    ):
        found = read_bytes(content)
        assert len(found) == pytest.approx(5 * 16000, abs=6 * FRAME_SAMPLES)
        spectrum = np.abs(np.fft.rfft(found[-32000:-16000]))
        assert np.argmax(spectrum) == 1000
    # With its length, an MP3 is as long as what was encoded.
    assert len(read_bytes(first)) == 32000
    assert len(read_bytes(first + b"APETAGEX" + bytes(40_000))) == 32000


def test_cut_mp3_without_a_length(tmp_path):
    _, content = mp3(tone())
    (tmp_path / "a.mp3").write_bytes(content[: len(content) // 2 + 7])
    assert audio_info(tmp_path / "a.mp3").is_truncated
    assert 14000 < len(read_audio(tmp_path / "a.mp3")) < 18000


@pytest.mark.parametrize(
    ("rate", "channels", "subtype"), [(16000, 1, "PCM_16"), (44100, 2, "PCM_24")]
)
def test_flac_of_unknown_length(tmp_path, random, rate, channels, subtype):
    known = encode(0.1 * random.standard_normal((2 * rate + 17, channels)), "FLAC", rate, subtype)
    content = bytearray(known)
    content[21:26] = (content[21] >> 4 << 36).to_bytes(5, "big")
    path = tmp_path / "a.flac"
    path.write_bytes(content)
    assert audio_info(path).num_samples == 2 * rate + 17
    expected = read_bytes(known)
    assert_array_equal(read_audio(path), expected)
    assert_array_equal(read_audio(path, 30000, 500), expected[30000:30500])
    assert_array_equal(read_bytes(bytes(content)), expected)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_chained_ogg(tmp_path, monkeypatch, ffmpeg, subtype):
    first, second = (encode(tone(hz=hz), "OGG", subtype=subtype) for hz in (440, 1000))
    half = first[: len(first) // 2]
    found = [lengths.ogg_pages(io.BytesIO(content)) for content in (first, first + second, half)]
    assert found == [(False, False), (True, False), (False, True)]
    path = tmp_path / "a.ogg"
    path.write_bytes(first + second)
    monkeypatch.setenv("SPEAKERNET_FFMPEG", "/no/such/ffmpeg")
    with pytest.raises(AudioError, match=r"a\.ogg: .*/no/such/ffmpeg"):
        read_audio(path)
    monkeypatch.setenv("SPEAKERNET_FFMPEG", str(ffmpeg))
    found = read_audio(path)
    assert len(found) == pytest.approx(64000, abs=400) == audio_info(path).num_samples
    assert np.argmax(np.abs(np.fft.rfft(found[40000:56000]))) == 1000
