"""Synthetic voices in files, and a small model that distinguishes them, calibrated and
uncalibrated.
"""

import itertools

import numpy as np
import pytest
import torch

import speakernet
from speakernet.corpora.synthetic.speech import draw_phones, draw_voice, lay_out, synthesise
from speakernet.data import speech
from speakernet.data.audio import read_audio, write_audio
from tests.commands import run_command
from tests.conftest import tiny_voice
from tests.small_networks import tiny_resnet, write_model

NUM_SPEAKERS = 12
NUM_UTTERANCES = 5
SECONDS = 3.5
DIM = NUM_SPEAKERS - 1


def spoken(speaker, utterance, seconds=SECONDS):
    """A synthetic voice with pauses and noise that differ in each recording; (samples,) at 16
    kHz.
    """
    voice = tiny_voice(speaker, utterance, seconds)
    random = np.random.default_rng([7, speaker, utterance])
    is_pause = (np.arange(len(voice)) // 4000) % 5 == 4
    noise = random.uniform(0.002, 0.006) * random.standard_normal(len(voice))
    return (np.where(is_pause, 0.01, 1.0) * voice + noise).astype(np.float32)


def sentence(speaker, number, syllables=10):
    """A sentence of a voice of the synthetic corpus with a little noise, which silero-vad takes for
    speech; (samples,) float32.
    """
    generator = np.random.default_rng([speaker, number])
    voice = draw_voice(np.random.default_rng(speaker))
    waveform = synthesise(voice, lay_out(draw_phones(generator, syllables), generator), generator)
    noise = 1e-3 * generator.standard_normal(len(waveform))
    return (0.3 * waveform / np.abs(waveform).max() + noise).astype(np.float32)


@pytest.fixture(scope="session")
def voices(tmp_path_factory):
    """Twelve synthetic speakers with five recordings each; `trials.txt` has all pairs."""
    return write_voices(tmp_path_factory.mktemp("voices"), spoken)


def write_voices(root, synthesise):
    """Five recordings of each of twelve voices, and all their pairs in `trials.txt`."""
    names = [
        f"s{speaker:02d}/{number}.wav"
        for speaker in range(NUM_SPEAKERS)
        for number in range(NUM_UTTERANCES)
    ]
    for name in names:
        write_audio(root / name, synthesise(int(name[1:3]), int(name[4])))
    lines = [
        f"{int(enrol[:3] == test[:3])} {enrol} {test}\n"
        for enrol, test in itertools.combinations(names, 2)
    ]
    (root / "trials.txt").write_text("".join(lines))
    return root


@pytest.fixture(scope="session")
def uncalibrated(voices, tmp_path_factory):
    """A small network whose last layer is a linear discriminant of three recordings of each voice;
    uncalibrated.
    """
    net = tiny_resnet(DIM, "TSTP", num_mels=24)
    make_discriminant(net, voices)
    path = tmp_path_factory.mktemp("model") / "small.pt"
    summary = {"licence": "MIT", "trained_on": "synthetic voices"}
    return write_model(path, net, training_summary=summary)


@pytest.fixture(scope="session")
def calibrated(voices, uncalibrated, tmp_path_factory):
    """The same model, calibrated by the command."""
    path = tmp_path_factory.mktemp("calibrated") / "new" / "calibrated.pt"
    run_command(f"calibrate --model {uncalibrated} --trials {voices}/trials.txt --out {path}")
    return path


@pytest.fixture(scope="session")
def verifier(calibrated):
    """The calibrated model in use."""
    return speakernet.load(calibrated, "cpu")


@pytest.fixture(scope="session")
def store(voices, calibrated, tmp_path_factory):
    """Eight of the twelve voices, enrolled with three recordings each."""
    path = tmp_path_factory.mktemp("store") / "people.db"
    for speaker in range(8):
        files = " ".join(f"{voices}/s{speaker:02d}/{number}.wav" for number in range(3))
        run_command(f"enroll 'Voice {speaker}' {files} --model {calibrated} --store {path}")
    return path


def make_discriminant(net, voices):
    """Set the last layer so that recordings of one voice coincide and the mean of the voices is
    zero.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    labels = np.repeat(np.arange(NUM_SPEAKERS), 3)
    layer = net.embedding
    pooled = []
    hook = layer.register_forward_hook(lambda module, inputs, output: pooled.append(inputs[0]))
    for row, speaker in enumerate(labels):
        waveform = read_audio(voices / f"s{speaker:02d}/{row % 3}.wav")
        net.embed(torch.from_numpy(waveform)[None], sample_rate=16000)
    hook.remove()
    rows = torch.cat(pooled).numpy().astype(np.float64)
    analysis = LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.1).fit(rows, labels)
    weight = analysis.scalings_[:, :DIM].T
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(torch.from_numpy(-weight @ rows.mean(axis=0)))


@pytest.fixture(autouse=True, scope="session")
def crude_voices_are_speech():
    """silero-vad does not take the pulse trains of `tiny_voice` for speech; the detector by energy
    does. tests/data/test_speech.py and tests with real speech name silero-vad.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech, "default_detector", lambda: speech.ENERGY)
        yield
