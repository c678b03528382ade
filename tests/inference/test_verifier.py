"""`speakernet.load`: embeddings of files, arrays, features and streams against a plain reference;
bad input.
"""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.data.audio import AudioError, write_audio
from speakernet.evaluation.scoring import WHOLE, verifying_backend
from speakernet.inference.streams import WINDOW_SECONDS
from speakernet.models.model_file import load_model_file
from tests.small_networks import tiny_resnet, write_model

MELS = 16
# Batch norms are merged into the preceding layers.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A small network with a mean embedding, which must not be subtracted."""
    net = tiny_resnet(pooling="TSTP", num_mels=MELS)
    path = tmp_path_factory.mktemp("model") / "best.pt"
    return write_model(path, net, embedding_mean=torch.full((8,), 9.0))


@pytest.fixture(scope="module")
def verifier(model_path):
    return speakernet.load(model_path, "cpu")


@pytest.fixture
def embed(verifier):
    """Embeds audio at 16 kHz."""
    return partial(verifier.embed, sample_rate=16000)


def voice(num_samples=16000, seed=0):
    return (0.1 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def expected(model_path, waveform):
    tensor = torch.from_numpy(np.ascontiguousarray(waveform)).unsqueeze(0)
    return load_model_file(model_path).net.embed(tensor, sample_rate=16000).numpy()


def test_arrays_and_tensors(embed, model_path):
    found = embed(voice())
    assert isinstance(found, np.ndarray) and found.shape == (1, 8) and found.dtype == np.float32
    assert_allclose(found, expected(model_path, voice()), **ROUNDING)
    assert abs(np.linalg.norm(found) - 1) > 1e-3
    tensor = embed(torch.from_numpy(voice()))
    assert_array_equal(tensor.numpy(), found)
    # Embeddings of tensors can be trained on.
    assert not tensor.is_inference() and not tensor.requires_grad


def test_coarse_tensors(embed, verifier):
    """A tensor in bfloat16 is the float32 tensor that it was rounded to."""
    coarse = torch.from_numpy(voice()).to(torch.bfloat16)
    embedding = embed(coarse)
    assert_array_equal(embedding, embed(coarse.float()))
    coarse = embedding.to(torch.bfloat16)
    assert verifier.compare(coarse, coarse) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_used", [False, True])
def test_forked_process(model_path, is_used):
    """Two threads of torch in the parent; the child has none of them, and would wait for them
    forever.
    """
    code = f"""
        import os, sys, numpy as np, torch, speakernet
        torch.set_num_threads(2)
        verifier = speakernet.load({str(model_path)!r}, "cpu")
        clip = (0.1 * np.random.default_rng(0).standard_normal(48000)).astype(np.float32)
        expected = verifier.embed(clip, sample_rate=16000) if {is_used} else None
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        child = os.fork()
        if not child:
            found = verifier.embed(clip, sample_rate=16000)
            is_right = torch.get_num_threads() == 1 and np.isfinite(found).all()
            if expected is not None:
                is_right &= np.allclose(found, expected, atol=1e-5)
            os._exit(0 if is_right else 3)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or torch.get_num_threads() != 2)
    """
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.pop(name, None)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 0


def test_integers_channels_and_rates(embed, verifier, tmp_path):
    samples = (20000 * np.sin(np.arange(24000) / 20)).astype(np.int16)
    both = np.stack([samples, samples // 2], axis=1)
    path = tmp_path / "a.wav"
    for array, rate in ((samples, 16000), (both, 44100), (samples, 8000)):
        write_audio(path, array, rate)
        expected = verifier.embed(path)
        for values in (array, array / 32768.0):
            embedding = verifier.embed(values, sample_rate=rate)
            assert_allclose(embedding, expected, atol=1e-6)
        assert_array_equal(verifier.embed(str(path), sample_rate=rate), expected)
    row = embed(torch.from_numpy(samples)[None])
    assert_array_equal(row.numpy(), embed(samples))


def test_features(verifier, model_path):
    features = 3 + np.random.default_rng(1).standard_normal((2, 70, MELS))
    embeddings = verifier.embed_features(features)
    net = load_model_file(model_path).net
    with torch.no_grad():
        expected = net.from_features(torch.from_numpy(features).float().transpose(1, 2)).numpy()
    assert embeddings.dtype == np.float32
    assert_allclose(embeddings, expected, **ROUNDING)
    assert verifier.embed_features(torch.from_numpy(features)).shape == (2, 8)
    assert (verifier.embedding_dim, verifier.sample_rate, verifier.num_features) == (8, 16000, MELS)
    assert "load" in dir(speakernet)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert speakernet.load(str(model_path)).device.type == kind


@pytest.mark.parametrize(
    ("audio", "rate", "message"),
    [
        (voice(), None, "give sample_rate, such as 16000"),
        (voice(100), 16000, "0.006 s .* 0.016 s"),
        (voice((2, 16000)), 16000, r"\(2, 16000\)"),
        (np.zeros(9000, np.int64), 16000, "int64"),
        (3e4 * voice(), 16000, "32768"),
        (np.full(9000, np.nan), 16000, "NaN"),
        (voice(), 16, "sample_rate 16;"),
        ("absent.wav", None, "absent.wav"),
    ],
)
def test_bad_audio(verifier, audio, rate, message):
    with pytest.raises(AudioError, match=message):
        verifier.embed(audio, sample_rate=rate)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((1, MELS, 50)), rf"\(1, {MELS}, 50\)"),
        (np.full((1, 9, MELS), np.inf), "finite"),
    ],
)
def test_bad_features(verifier, features, message):
    with pytest.raises(ValueError, match=message):
        verifier.embed_features(features)


def test_other_files_and_devices(model_path, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at"):
        speakernet.load(tmp_path / "absent.pt")
    message = r"no checkpoint at wespeaker/resnet34; .*`speakernet fetch"
    with pytest.raises(ValueError, match=message):
        read_checkpoint("wespeaker/resnet34")
    for device in ("gpu", "cuda:999", 3.5):
        with pytest.raises(ValueError, match=r"device .*cpu"):
            speakernet.load(model_path, device=device)


def test_lists(embed, tmp_path):
    clips = [voice(24000, 1), voice(9000, 2), voice(24000, 3), voice(50000, 4)]
    write_audio(tmp_path / "a.wav", clips[0])
    embeddings = embed([tmp_path / "a.wav", *clips[1:]])
    alone = [embed(clip) for clip in clips]
    assert_allclose(embeddings, np.concatenate(alone), atol=1e-4)
    assert embed(clips[:1]).shape == (1, 8) and embed([]).shape == (0, 8)


def test_long_recordings(embed, tmp_path):
    long = np.tile(voice(16000), 185)
    write_audio(tmp_path / "long.wav", long)
    expected = np.mean([embed(part) for part in np.split(long, 4)], axis=0)
    for audio in (long, tmp_path / "long.wav"):
        assert_allclose(embed(audio), expected, atol=1e-4)


def test_tracks(embed, verifier):
    clip = voice(16000 * 6 + 8000)
    embed_track = partial(verifier.embed_track, sample_rate=16000)
    track = embed_track(clip, window_seconds=2.0, hop_seconds=1.0)
    # The last window ends at the end of the recording.
    assert track.start_seconds.tolist() == [0, 1, 2, 3, 4, 4.5] and track.stop_seconds[-1] == 6.5
    assert_allclose(track.embeddings[2], embed(clip[32000:64000])[0], atol=1e-5)
    short = embed_track(clip[:9000])
    assert short.embeddings.shape == (1, 8) and short.stop_seconds[0] == 9000 / 16000
    for sizes in ({"window_seconds": 0.001}, {"window_seconds": -1.0}, {"hop_seconds": 0.0}):
        with pytest.raises(ValueError, match=r"0.016 s"):
            embed_track(clip, **sizes)


def test_threads(embed):
    clips = [voice(8000 + 500 * number, number) for number in range(24)]
    with ThreadPoolExecutor(6) as pool:
        for clip, embedding in zip(clips, pool.map(embed, clips), strict=True):
            assert_array_equal(embedding, embed(clip))


def test_mean(model_path, tmp_path):
    contents = torch.load(model_path, weights_only=True)
    mean = torch.linspace(-2, 2, 8)

    def with_mean(way, **more):
        path = tmp_path / f"{way}.pt"
        about = {"embedding_mean": mean, "embedding_mean_of": {"embedding": way}}
        write_checkpoint(path, {**contents, **about, **more})
        return speakernet.load(path, "cpu")

    whole = with_mean("whole")
    crops = with_mean("crops")
    first, second = (whole.embed(voice(16000, seed), sample_rate=16000)[0] for seed in (1, 2))
    for verifier, centre in ((whole, mean.numpy()), (crops, 0.0)):
        a, b = first - centre, second - centre
        expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert verifier.compare(first, second[None]) == pytest.approx(expected, abs=1e-5)
    # Without clipping, one of these has a cosine of 1.0000001 with itself.
    rows = np.random.default_rng(0).normal(size=(50, 8))
    assert max(crops.compare(row, row) for row in rows) <= 1.0
    with pytest.raises(ValueError, match="NaN"):
        whole.compare(np.full(8, np.nan), first)
    # A calibration from before the mean was stored does not hold.
    threshold = {"name": "eer", "threshold": 0.5, "backend": verifying_backend({}).describe(WHOLE)}
    old = with_mean("whole", thresholds=[threshold])
    with pytest.raises(ValueError, match="no calibration"):
        old.verify(voice(16000, 1), voice(16000, 2), sample_rate=16000)


def test_verify(verifier, tmp_path):
    path = tmp_path / "a.wav"
    write_audio(path, sound(2))
    decision = verifier.verify(path, sound(2)[::2], sample_rate=8000, threshold=-1)
    assert decision.same_speaker
    assert decision.false_accept_rate is decision.log_likelihood_ratio is None
    with pytest.raises(ValueError, match="both given"):
        verifier.verify(path, path, false_accept_rate=0.01, threshold=0.5)


def sound(seconds, seed=0, rate=16000):
    envelope = 0.5 + 0.5 * np.sin(np.arange(int(seconds * rate)) / rate * 20)
    return (envelope * voice(int(seconds * rate), seed)).astype(np.float32)


def feed(stream, samples, chunk):
    states = []
    for start in range(0, len(samples), chunk):
        states += stream.add(samples[start : start + chunk])
    return states


@pytest.mark.parametrize("chunk", [3001, 50000])
def test_streams(embed, verifier, chunk):
    enrolled = embed(sound(3, seed=1))
    samples = sound(3.5)
    stream = verifier.stream(16000, enrolled, threshold=0.5)
    states = feed(stream, samples, chunk)
    assert [state.seconds for state in states] == [1, 2, 3]
    for state in states:
        embedding = embed(samples[: int(state.seconds * 16000)], speech=True)
        assert_allclose(state.embedding, embedding, atol=1e-6)
        assert state.score == pytest.approx(verifier.compare(embedding, enrolled), abs=1e-6)
        expected = verifier.decide(state.score, threshold=0.5, speech_seconds=state.speech_seconds)
        assert state.decision == expected
    last = stream.finish()
    assert last.seconds == 3.5
    assert_allclose(last.embedding, embed(samples, speech=True), atol=1e-6)


def test_streams_of_other_rates(verifier):
    samples = (20000 * sound(2, rate=44100)).astype(np.int16)
    (_, second) = verifier.stream(44100).add(np.stack([samples, samples], axis=1))
    expected = verifier.embed(samples, sample_rate=44100, speech=True)
    assert_allclose(second.embedding, expected, atol=1e-5)
    assert second.score is None and second.decision is None


def test_long_streams(embed, verifier):
    window = int(WINDOW_SECONDS * 16000)
    samples = sound(2.5 * WINDOW_SECONDS)
    stream = verifier.stream(16000)
    states = feed(stream, samples, 8000)
    assert len(states) == 25 and stream._num_samples <= window
    assert sum(map(len, stream._chunks)) == window // 2
    parts = [embed(part, speech=True) for part in np.split(samples, [window, 2 * window])]
    expected = (2 * parts[0] + 2 * parts[1] + parts[2]) / 5
    assert_allclose(states[-1].embedding, expected, atol=1e-5)
    assert_allclose(states[9].embedding, parts[0], atol=1e-6)
    # A remainder too short for the network ends a long stream without an error.
    stream = verifier.stream(16000)
    last = feed(stream, sound(WINDOW_SECONDS), 8000)[-1]
    stream.add(np.zeros(20, dtype=np.float32))
    assert_allclose(stream.finish().embedding, last.embedding, atol=1e-6)


def test_bad_streams(verifier):
    for rate, how, found in (
        (16, {}, "sample_rate 16;"),
        (16000, {"enrolled": np.zeros(3)}, "3"),
        (16000, {"threshold": float("nan")}, "threshold nan"),
    ):
        with pytest.raises(ValueError, match=found):
            verifier.stream(rate, **how)
    stream = verifier.stream(16000)
    assert stream.add(np.zeros(0)) == []
    with pytest.raises(AudioError, match="no samples"):
        stream.finish()
    for chunk, found in ((np.full(100, np.nan), "NaN"), (np.zeros(100, np.int64), "type int64")):
        with pytest.raises(AudioError, match=found):
            stream.add(chunk)
    assert stream.seconds == 0
    stream.add(np.zeros(20, dtype=np.float32))
    with pytest.raises(AudioError, match="no speech was found"):
        stream.finish()
