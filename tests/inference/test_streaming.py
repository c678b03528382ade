"""Streams: what is said after each second is what a recording of so many seconds gives, however it comes in chunks."""

import numpy as np
import pytest
import torch

from speakernet.data.audio import AudioError
from speakernet.inference.streaming import WINDOW_SECONDS
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.models.model_file import ModelFile
from speakernet.models.speaker_net import SpeakerNet

RATE = 16000


@pytest.fixture(scope="module")
def verifier():
    torch.manual_seed(0)
    net = SpeakerNet.named("ResNet", embedding_dim=8, model_options={"channels": 8, "blocks": [1, 1]}).eval()
    return SpeakerVerifier(ModelFile(net, {}))


def sound(seconds, seed=0, rate=RATE):
    generator = np.random.default_rng(seed)
    envelope = 0.5 + 0.5 * np.sin(np.arange(int(seconds * rate)) / rate * 20)
    return (0.1 * envelope * generator.standard_normal(int(seconds * rate))).astype(np.float32)


def heard(stream, samples, chunk):
    return [state for start in range(0, len(samples), chunk) for state in stream.add(samples[start : start + chunk])]


@pytest.mark.parametrize("chunk", [160, 3001, 16000, 50000])
def test_each_second_says_what_a_recording_of_so_many_seconds_says(verifier, chunk):
    enrolled, samples = verifier.embed(sound(3, seed=1), sample_rate=RATE), sound(3.5)
    stream = verifier.stream(RATE, enrolled, threshold=0.5)
    states = heard(stream, samples, chunk)
    assert [state.seconds for state in states] == [1, 2, 3]
    for state in states:
        embedding = verifier.embed(samples[: int(state.seconds * RATE)], sample_rate=RATE)
        np.testing.assert_allclose(state.embedding, embedding, atol=1e-6)
        assert state.score == pytest.approx(verifier.compare(embedding, enrolled), abs=1e-6)
        assert state.decision == verifier.decide(state.score, threshold=0.5)
    last = stream.finish()
    assert last.seconds == 3.5
    np.testing.assert_allclose(last.embedding, verifier.embed(samples, sample_rate=RATE), atol=1e-6)


def test_other_rates_channels_and_whole_numbers(verifier):
    samples = (20000 * sound(2, rate=44100)).astype(np.int16)
    both = np.stack([samples, samples], axis=1)
    (_, second) = verifier.stream(44100).add(both)
    np.testing.assert_allclose(second.embedding, verifier.embed(samples, sample_rate=44100), atol=1e-5)
    assert second.score is None and second.decision is None


def test_long_streams_are_averaged_window_by_window_in_bounded_memory(verifier):
    window = int(WINDOW_SECONDS * RATE)
    samples = sound(2.5 * WINDOW_SECONDS)
    stream = verifier.stream(RATE)
    states = heard(stream, samples, 8000)
    assert len(states) == 25 and stream._held <= window
    assert sum(map(len, stream._chunks)) == window // 2
    parts = [verifier.embed(part, sample_rate=RATE) for part in np.split(samples, [window, 2 * window])]
    wanted = (2 * parts[0] + 2 * parts[1] + parts[2]) / 5
    np.testing.assert_allclose(states[-1].embedding, wanted, atol=1e-5)
    np.testing.assert_allclose(states[9].embedding, parts[0], atol=1e-6)
    # A moment too short for the network ends a long stream without a complaint.
    last = heard(verifier.stream(RATE), sound(WINDOW_SECONDS), 8000)[-1]
    stream = verifier.stream(RATE)
    heard(stream, sound(WINDOW_SECONDS), 8000)
    stream.add(np.zeros(20, dtype=np.float32))
    np.testing.assert_allclose(stream.finish().embedding, last.embedding, atol=1e-6)


def test_without_a_calibration_there_is_a_score_and_no_decision(verifier):
    enrolled = verifier.embed(sound(2, seed=1), sample_rate=RATE)
    (state,) = verifier.stream(RATE, enrolled).add(sound(1))
    assert state.score is not None and state.decision is None


def test_what_cannot_be_heard_is_refused(verifier):
    with pytest.raises(AudioError, match="sample_rate 16; expected 1000"):
        verifier.stream(16)
    with pytest.raises(ValueError, match="an embedding of 3 numbers"):
        verifier.stream(RATE, np.zeros(3))
    with pytest.raises(ValueError, match="threshold nan"):
        verifier.stream(RATE, threshold=float("nan"))
    stream = verifier.stream(RATE)
    with pytest.raises(AudioError, match="held no samples"):
        stream.finish()
    assert stream.add(np.zeros(0)) == []
    with pytest.raises(AudioError, match="NaN"):
        stream.add(np.full(100, np.nan))
    with pytest.raises(AudioError, match="type int64"):
        stream.add(np.zeros(100, dtype=np.int64))
    assert stream.seconds == 0
    stream.add(np.zeros(20, dtype=np.float32))
    with pytest.raises(AudioError, match="too short"):
        stream.finish()
