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
from speakernet.data.audio import read_audio, write_audio
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
        (lambda it: it.embed("absent.wav"), "absent.wav: cannot be read"),
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
