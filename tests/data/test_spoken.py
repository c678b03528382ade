"""A source of the speech of recordings alone: lengths, crops, recordings without speech."""

import numpy as np
import pytest

from speakernet.data.audio import write_audio
from speakernet.data.lists import StringTable
from speakernet.data.sources import FolderSource
from speakernet.data.speech import cut_to_speech

RATE = 16000
EDGES = np.array([[0.5, 1.5], [2.0, 2.25]])


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Two recordings of 3 s, `speech.wav` with speech between `EDGES` and `noise.wav` without; a
    sample is its number.
    """
    ramp = (np.arange(3 * RATE) / 65536).astype(np.float32)
    write_audio(tmp_path / "speech.wav", ramp, RATE)
    write_audio(tmp_path / "noise.wav", -ramp, RATE)

    def found(pieces, sample_rate):
        is_speech = sum(float(piece.sum()) for piece in pieces) > 0
        return EDGES if is_speech else np.zeros((0, 2))

    monkeypatch.setattr("speakernet.data.speech.find_speech", found)
    return FolderSource(str(tmp_path), RATE)


def numbers(samples):
    return np.round(np.asarray(samples) * 65536).astype(int)


def test_crops_and_lengths(source, caplog):
    cut = cut_to_speech(source)
    expected = np.concatenate([np.arange(8000, 24000), np.arange(32000, 36000)])
    # Files hold 16 bits.
    # Read without the offset, so that only differences are those of the recording.
    assert numbers(cut.read("speech.wav")) == pytest.approx(expected - expected.mean(), abs=2)
    assert np.diff(numbers(cut.read("speech.wav", 15999, 2))) == pytest.approx([8001], abs=2)
    assert len(cut.read("speech.wav", 19999, 50)) == 1
    assert len(cut.read("noise.wav")) == 3 * RATE
    table = cut.lookup_table(StringTable.from_strings(["speech.wav", "noise.wav"]), 1)
    assert np.asarray(table.native_samples).tolist() == [20000, 48000]
    assert "1 of 2 recordings" in caplog.text and "noise.wav" in caplog.text


def test_one_search_for_each_source(source):
    assert cut_to_speech(source) is cut_to_speech(source)


def test_no_training(source):
    with pytest.raises(ValueError, match="whole recordings"):
        cut_to_speech(source).rows(StringTable.from_strings(["speech.wav"]), None)
