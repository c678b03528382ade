"""`speakernet.load`: embeddings of files, arrays and features, each against the plain way, and what is refused."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import speakernet
from speakernet.checkpoint import write_checkpoint
from speakernet.data.audio import AudioError, read_audio, write_audio
from speakernet.evaluation.backend import whole_cosine
from speakernet.inference.recordings import open_recording
from speakernet.models.model_file import ModelFile, load_model_file, model_file_contents
from speakernet.models.speaker_net import SpeakerNet

SMALL = {"channels": 8, "blocks": [1, 1]}
MELS = 16
# Batch norms are merged into the layers before them.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """A small network with a mean embedding, which must not be subtracted."""
    torch.manual_seed(0)
    net = SpeakerNet.named("ResNet", "TSTP", 8, SMALL, front_end_options={"num_mels": MELS})
    path = tmp_path_factory.mktemp("model") / "best.pt"
    write_checkpoint(path, model_file_contents(net, loss_normalizes=True, embedding_mean=torch.full((8,), 9.0)))
    return path


@pytest.fixture(scope="module")
def verifier(model_path):
    return speakernet.load(model_path, device="cpu")


def voice(num_samples=16000, seed=0):
    return (0.1 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def expected(model_path, waveform):
    tensor = torch.from_numpy(np.ascontiguousarray(waveform)).unsqueeze(0)
    return load_model_file(model_path).net.embed(tensor, sample_rate=16000).numpy()


def test_an_array_gives_what_the_network_gives(verifier, model_path):
    found = verifier.embed(voice(), sample_rate=16000)
    assert isinstance(found, np.ndarray) and found.shape == (1, 8) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected(model_path, voice()), **ROUNDING)
    assert abs(np.linalg.norm(found) - 1) > 1e-3


def test_a_tensor_gives_a_tensor_that_can_be_trained_on(verifier, model_path):
    found = verifier.embed(torch.from_numpy(voice()), sample_rate=16000)
    np.testing.assert_allclose(found.numpy(), expected(model_path, voice()), **ROUNDING)
    head = torch.nn.Linear(8, 2)
    head(found).sum().backward()
    features = torch.randn(1, 50, MELS)
    head(verifier.embed_features(features)).sum().backward()
    assert head.weight.grad is not None and not found.requires_grad


def test_whole_numbers_channels_and_other_rates_are_what_a_file_of_them_is(verifier, tmp_path):
    samples = (20000 * np.sin(np.arange(24000) / 20)).astype(np.int16)
    both = np.stack([samples, samples // 2], axis=1)
    for index, (array, rate) in enumerate([(samples, 16000), (both, 16000), (both, 44100), (samples, 8000)]):
        path = tmp_path / f"{index}.wav"
        write_audio(path, array, rate)
        from_file = verifier.embed(path)
        np.testing.assert_allclose(verifier.embed(array, sample_rate=rate), from_file, atol=1e-6)
        np.testing.assert_allclose(verifier.embed(array / 32768.0, sample_rate=rate), from_file, atol=1e-6)
        np.testing.assert_array_equal(verifier.embed(str(path), sample_rate=rate), from_file)
    row = verifier.embed(torch.from_numpy(samples)[None], sample_rate=16000)
    np.testing.assert_array_equal(row.numpy(), verifier.embed(samples, sample_rate=16000))


def test_features_go_to_the_network_as_they_are(verifier, model_path):
    features = 3 + np.random.default_rng(1).standard_normal((2, 70, MELS))
    found = verifier.embed_features(features)
    net = load_model_file(model_path).net
    with torch.no_grad():
        wanted = net.from_features(torch.from_numpy(features).float().transpose(1, 2)).numpy()
    assert found.shape == (2, 8) and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, **ROUNDING)
    assert verifier.embed_features(torch.from_numpy(features)).shape == (2, 8)


def test_what_it_is_can_be_asked(verifier):
    assert (verifier.embedding_dim, verifier.sample_rate, verifier.num_features) == (8, 16000, MELS)
    assert repr(verifier) == "SpeakerVerifier(ResNet, 8 numbers, 16000 Hz, cpu)"
    assert isinstance(verifier, speakernet.SpeakerVerifier) and "load" in dir(speakernet)


def test_auto_is_a_device_of_this_machine(model_path):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    found = speakernet.load(str(model_path))
    assert found.device.type == kind
    assert found.embed(voice(), sample_rate=16000).shape == (1, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: it.embed(voice()), "an array does not say its rate; give sample_rate, such as 16000"),
        (lambda it: it.embed(voice(100), sample_rate=16000), r"0.006 s of audio is too short: ResNet needs 0.016 s"),
        (lambda it: it.embed(voice(0), sample_rate=16000), r"shape \(0, 1\); expected \(samples,\) or"),
        (lambda it: it.embed(voice((2, 16000)), sample_rate=16000), r"shape \(2, 16000\); expected .samples,. or"),
        (lambda it: it.embed(voice((2, 3, 4)), sample_rate=16000), r"shape \(2, 3, 4\); expected .samples,. or"),
        (lambda it: it.embed(np.zeros(9000, np.int64), sample_rate=16000), "type int64; expected floating point"),
        (lambda it: it.embed(3e4 * voice(), sample_rate=16000), "samples up to .*: divide what was int16 by 32768"),
        (lambda it: it.embed(np.full(9000, np.nan), sample_rate=16000), "NaN or infinite samples"),
        (lambda it: it.embed(voice(), sample_rate=16), "sample_rate 16; expected 1000 to 192000 Hz"),
        (lambda it: it.embed(voice(), sample_rate=16000.5), "sample_rate 16000.5; expected .* a whole number"),
        (lambda it: it.embed([0.1, 0.2], sample_rate=16000), "audio is a float; expected a file or an array"),
        (lambda it: it.embed("absent.wav"), "absent.wav: there is no such file"),
        (
            lambda it: it.embed_features(np.zeros((50, MELS))),
            rf"shape \(50, {MELS}\); expected \(batch, frames, {MELS}",
        ),
        (lambda it: it.embed_features(np.zeros((1, MELS, 50))), "transpose the last two axes"),
        (lambda it: it.embed_features(np.zeros((1, 0, MELS))), rf"shape \(1, 0, {MELS}\)"),
        (lambda it: it.embed_features(np.zeros((1, 9, MELS), int)), "features of type torch.int64; expected floating"),
        (lambda it: it.embed_features(np.full((1, 9, MELS), np.inf)), "features with NaN or infinite values"),
    ],
)
def test_what_cannot_be_embedded_is_refused(verifier, call, message):
    with pytest.raises(ValueError, match=message):
        call(verifier)


def test_a_file_and_another_rate_contradict_each_other(verifier, tmp_path):
    write_audio(tmp_path / "a.wav", voice(), 16000)
    with pytest.raises(ValueError, match=r"a.wav says 16000 Hz, sample_rate says 8000; leave it out for a file"):
        verifier.embed(tmp_path / "a.wav", sample_rate=8000)


def test_features_too_short_for_the_network_are_refused_with_the_number():
    sizes = {"channels": 16, "statistics_channels": 24}
    net = SpeakerNet.named("XVector", None, 8, sizes, front_end_options={"num_mels": 80})
    with pytest.raises(ValueError, match="XVector needs 15 frames or more, found an utterance of 14"):
        speakernet.SpeakerVerifier(ModelFile(net.eval(), {})).embed_features(np.zeros((1, 14, 80)))


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:999", 3.5])
def test_devices_that_are_not_here_are_refused(model_path, device):
    with pytest.raises(ValueError, match=r"device .*auto"):
        speakernet.load(model_path, device=device)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"not a speakernet model file .* `speakernet import-weights`"):
        speakernet.load(tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="no checkpoint at"):
        speakernet.load(tmp_path / "absent.pt")


def test_importing_the_package_imports_no_torch(repository):
    script = "import sys, speakernet; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=repository)
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        speakernet.lode  # noqa: B018


def test_the_example_of_the_documents_runs(repository, model_path, tmp_path, monkeypatch):
    text = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    examples = [
        block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "speakernet.load" in block
    ]
    assert examples
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exps" / "exp01").mkdir(parents=True)
    (tmp_path / "exps" / "exp01" / "best.pt").write_bytes(model_path.read_bytes())
    write_audio(tmp_path / "a.wav", voice(48000), 48000)
    names = {"waveform": voice(), "features": torch.randn(2, 80, MELS)}
    for example in examples:
        exec(compile(example, "docs/models.md", "exec"), names)
    np.testing.assert_array_equal(names["embedding"], names["verifier"].embed("a.wav"))
    assert names["embeddings"].shape == (2, 8)
    assert len(read_audio("a.wav")) == 16000


def test_a_list_gives_a_row_each_as_one_by_one(verifier, tmp_path):
    clips = [voice(24000, 1), voice(9000, 2), voice(24000, 3), voice(50000, 4)]
    write_audio(tmp_path / "a.wav", clips[0], 16000)
    found = verifier.embed([tmp_path / "a.wav", *clips[1:]], sample_rate=16000)
    alone = [verifier.embed(tmp_path / "a.wav"), *(verifier.embed(one, sample_rate=16000) for one in clips[1:])]
    np.testing.assert_allclose(found, np.concatenate(alone), atol=1e-5)
    assert verifier.embed([clips[0]], sample_rate=16000).shape == (1, 8) and verifier.embed([]).shape == (0, 8)


def test_a_long_recording_is_the_mean_of_equal_windows_and_the_same_in_a_file_and_an_array(verifier, tmp_path):
    long = np.tile(voice(16000), 185)
    write_audio(tmp_path / "long.wav", long, 16000)
    expected = np.mean([verifier.embed(part, sample_rate=16000)[0] for part in np.split(long, 4)], axis=0)
    np.testing.assert_allclose(verifier.embed(long, sample_rate=16000)[0], expected, atol=1e-4)
    np.testing.assert_allclose(verifier.embed(tmp_path / "long.wav")[0], expected, atol=1e-4)


def test_a_track_is_embeddings_over_time(verifier, tmp_path):
    clip = voice(16000 * 6 + 8000)
    track = verifier.embed_track(clip, sample_rate=16000, window_seconds=2.0, hop_seconds=1.0)
    # The last window ends with the recording.
    assert track.start_seconds.tolist() == [0, 1, 2, 3, 4, 4.5] and track.stop_seconds[-1] == 6.5
    third = verifier.embed(clip[32000:64000], sample_rate=16000)
    np.testing.assert_allclose(track.embeddings[2], third[0], atol=1e-5)
    short = verifier.embed_track(clip[:9000], sample_rate=16000)
    assert short.embeddings.shape == (1, 8) and short.stop_seconds[0] == 9000 / 16000
    for sizes in ({"window_seconds": 0.001}, {"window_seconds": -1.0}, {"hop_seconds": 0.0}):
        with pytest.raises(ValueError, match=r"expected a window of 0.016 s or more and a hop above 0"):
            verifier.embed_track(clip, sample_rate=16000, **sizes)


def test_threads_get_what_one_alone_gets(verifier):
    from concurrent.futures import ThreadPoolExecutor

    clips = [voice(8000 + 500 * number, number) for number in range(24)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda one: verifier.embed(one, sample_rate=16000), clips))
    for clip, embedding in zip(clips, found, strict=True):
        np.testing.assert_array_equal(embedding, verifier.embed(clip, sample_rate=16000))


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(model_path, tmp_path, monkeypatch):
    path = tmp_path / "m.pt"
    path.write_bytes(model_path.read_bytes())
    first = speakernet.load(path, "cpu")
    assert speakernet.load(path, "cpu").net is first.net
    contents = torch.load(path, weights_only=True)
    contents["weights"]["embedding.bias"] += 1
    write_checkpoint(path, contents)
    second = speakernet.load(path, "cpu")
    assert second.net is not first.net and second.fingerprint != first.fingerprint
    write_checkpoint(path, {**contents, "embedding_mean": torch.ones(8), "thresholds": []})
    assert speakernet.load(path, "cpu").fingerprint == second.fingerprint
    path.unlink()
    with pytest.raises(ValueError, match="no checkpoint at"):
        speakernet.load(path, "cpu")


def test_a_mean_is_subtracted_where_it_is_of_whole_utterances_only(model_path, tmp_path):
    contents = torch.load(model_path, weights_only=True)
    mean = torch.linspace(-2, 2, 8)
    plain = {}
    for way in ("whole", "crops"):
        path = tmp_path / f"{way}.pt"
        write_checkpoint(path, {**contents, "embedding_mean": mean, "embedding_mean_of": {"embedding": way}})
        plain[way] = speakernet.load(path, "cpu")
    one, other = (plain["whole"].embed(voice(16000, seed), sample_rate=16000)[0] for seed in (1, 2))
    centred = [row - mean.numpy() for row in (one, other)]
    for verifier, rows in ((plain["whole"], centred), (plain["crops"], [one, other])):
        expected = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
        assert verifier.compare(one, other[None]) == pytest.approx(expected, abs=1e-5)
    # Whoever calibrated before the mean came is told why that counts no more.
    kept = {**contents, "thresholds": [{"name": "eer", "threshold": 0.5, "backend": whole_cosine(False)}]}
    write_checkpoint(path, {**kept, "embedding_mean": mean, "embedding_mean_of": {"embedding": "whole"}})
    with pytest.raises(ValueError, match="only those fitted without the mean embedding that it has now"):
        speakernet.load(path, "cpu").verify(voice(16000, 1), voice(16000, 2), sample_rate=16000)
    with pytest.raises(ValueError, match="an embedding of 3 numbers; those of this model have 8"):
        plain["whole"].compare(one, np.zeros(3))


def test_a_file_and_an_array_are_verified_with_the_arrays_rate(verifier, tmp_path):
    write_audio(tmp_path / "a.wav", voice(32000), 16000)
    decision = verifier.verify(tmp_path / "a.wav", voice(32000)[::2], sample_rate=8000, threshold=-1)
    assert decision.same_speaker and decision.false_accept_rate is None and decision.log_likelihood_ratio is None
    for how, message in (
        ({}, "holds no calibration for whole utterances and cosine: fit them with `speakernet calibrate --model"),
        ({"false_accept_rate": 0.01, "threshold": 0.5}, "both given"),
        ({"false_accept_rate": 1.5}, "expected a share between 0 and 1"),
        ({"threshold": float("inf")}, "expected a finite score"),
    ):
        with pytest.raises(ValueError, match=message):
            verifier.verify(tmp_path / "a.wav", tmp_path / "a.wav", **how)


def test_an_hour_takes_no_more_memory_than_some_minutes(verifier, tmp_path):
    from speakernet.inference.recordings import Recording, open_recording

    rate, longest = 16000, []
    # A file of an hour that takes no disk: its samples are a hole.
    with (tmp_path / "hour.wav").open("wb") as file:
        size = 2 * rate * 3600
        header = [b"RIFF", (36 + size).to_bytes(4, "little"), b"WAVEfmt ", (16).to_bytes(4, "little")]
        numbers = [(1, 2), (1, 2), (rate, 4), (2 * rate, 4), (2, 2), (16, 2)]
        header += [number.to_bytes(length, "little") for number, length in numbers]
        file.write(b"".join([*header, b"data", size.to_bytes(4, "little")]))
        file.truncate(44 + size)
    plain = Recording.read

    class Watched(Recording):
        def read(self, start=0, num_samples=None):
            longest.append(num_samples)
            return plain(self, start, num_samples)

    hour = Watched(**vars(open_recording(tmp_path / "hour.wav", None, rate)))
    assert hour.seconds == 3600 and sum(len(piece.waveforms[0]) for piece in hour.pieces()) == hour.num_samples
    assert max(longest) <= 60 * rate and len(longest) == 60


def test_a_misspelt_path_is_told_what_is_called_like_it(tmp_path):
    (tmp_path / "ben").mkdir()
    write_audio(tmp_path / "ben" / "second.flac", np.zeros(16000, np.float32))
    for given, meant in (("benn/second.flac", "ben"), ("ben/secnd.flac", "ben/second.flac")):
        with pytest.raises(AudioError) as refused:
            open_recording(tmp_path / given, None, 16000)
        assert str(refused.value).endswith(f"there is no such file; did you mean {tmp_path / meant}?")
    with pytest.raises(AudioError, match=r"there is no such file$"):
        open_recording(tmp_path / "ben" / "x", None, 16000)
