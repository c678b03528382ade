"""Sources: rows equal single reads, wrapping, cached lookup tables, files that change or vanish."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.testing import assert_allclose

from speakernet.data import lookup as lookup_module
from speakernet.data.audio import AudioError, audio_info, write_audio
from speakernet.data.lists import StringTable
from speakernet.data.lookup import build_lookup_table
from speakernet.data.opening import open_source
from speakernet.data.sources import AudioCache, FolderSource


@pytest.fixture
def folder(tmp_path, random):
    """Four files: plain WAV, FLAC, stereo at 8 kHz, short."""
    root = tmp_path / "audio"
    write_audio(root / "plain.wav", 0.1 * random.standard_normal(8000))
    write_audio(root / "b.flac", 0.1 * random.standard_normal(8000))
    soundfile.write(root / "stereo.wav", 0.1 * random.standard_normal((4000, 2)), 8000)
    write_audio(root / "short.wav", 0.1 * random.standard_normal(700))
    return root


NAMES = StringTable.from_strings(["plain.wav", "b.flac", "stereo.wav", "short.wav"])


@pytest.mark.parametrize("cache", [None, AudioCache(1 << 20)])
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_rows(folder, dtype, cache):
    source = FolderSource(folder)
    reader = source.rows(NAMES, source.lookup_table(NAMES), cache)
    # The second and the last crop continue at the recording's beginning.
    starts = np.array([0, 7900, 4000, 600])
    scale = 1 if dtype is np.float32 else 32768
    for _ in range(2):
        out = np.empty((4, 2000), dtype=dtype)
        assert reader.fill(np.arange(4), starts, out) == {}
        for row, start in enumerate(starts):
            whole = source.read(NAMES[row]) * scale
            expected = whole[(start + np.arange(2000)) % len(whole)]
            assert_allclose(out[row], expected, atol=1e-6 if scale == 1 else 0.51)
    if cache:
        assert reader.counts["cache_hits"] > 0


def test_cached_lookup(folder, tmp_path, monkeypatch):
    names = StringTable.from_strings([*NAMES, "absent.wav"])
    read = []
    monkeypatch.setattr(
        lookup_module, "audio_info", lambda path: read.append(Path(path).name) or audio_info(path)
    )

    def build():
        read.clear()
        table = build_lookup_table(folder, names, sample_rate=16000, cache_folder=tmp_path / "kept")
        return table.num_samples.tolist(), list(table.problems)

    assert build() == ([8000, 8000, 8000, 700, 0], [4])
    assert build() == ([8000, 8000, 8000, 700, 0], [4])
    assert read == ["absent.wav"], "only failed files are read again"
    write_audio(folder / "plain.wav", np.full(1000, 0.25))
    (folder / "b.flac").unlink()
    assert build() == ([1000, 0, 8000, 700, 0], [1, 4])
    # A damaged table is rebuilt.
    (kept,) = (tmp_path / "kept").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    assert build() == ([1000, 0, 8000, 700, 0], [1, 4]) and len(read) == 5


def test_files_that_change_or_vanish(folder):
    source = FolderSource(folder)
    reader = source.rows(NAMES, source.lookup_table(NAMES))
    write_audio(folder / "plain.wav", np.full(1000, 0.25))
    out = np.empty((1, 2000), dtype=np.float32)
    assert reader.fill(np.array([0]), np.array([5000]), out) == {}
    assert_allclose(out, 0.25, atol=1e-4)
    assert reader.counts["changed_files"] == 1
    (folder / "b.flac").unlink()
    problems = reader.fill(np.arange(4), np.zeros(4, np.int64), np.empty((4, 100), np.float32))
    assert list(problems) == [1] and "b.flac" in problems[1]


def test_missing(folder):
    source = open_source(folder)
    assert source.missing(
        StringTable.from_strings(["plain.wav", "no", "b.flac", "neither"])
    ).tolist() == [1, 3]
    with pytest.raises(AudioError, match="no such file"):
        source.read("no")
    with pytest.raises(AudioError, match="no such folder"):
        open_source(folder / "absent")
    with pytest.raises(AudioError, match=r"speakernet pack CORPUS --source .*plain\.wav"):
        open_source(folder / "plain.wav")


def test_cache_order():
    cache = AudioCache(budget_bytes=12)
    for key in "abc":
        cache.put(key, np.zeros(1, np.float32))
    assert cache.get("a") is not None
    cache.put("d", np.zeros(1, np.float32))
    assert cache.get("b") is None, "b was least recently used"
    assert all(cache.get(key) is not None for key in "acd")
    assert cache.used_bytes == 12
    cache.put("big", np.zeros(4, np.float32))
    assert cache.get("big") is None and cache.used_bytes == 12
