"""Synthetic voices in files, and a small model that distinguishes them, calibrated and
uncalibrated.
"""

import itertools
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.checkpoint import write_checkpoint
from speakernet.cli import main
from speakernet.data import speech
from speakernet.data.audio import read_audio, write_audio
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import tiny_voice

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


@pytest.fixture(scope="session")
def succeed():
    """Runs a command line that must succeed."""

    def run(line):
        assert main(shlex.split(line)) == 0, line

    return run


@pytest.fixture()
def call(capsys):
    """Runs a command line in this process: exit status, standard output, standard error."""

    def run(line):
        capsys.readouterr()
        try:
            status = main(shlex.split(line))
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def speak():
    """The synthesiser of these voices."""
    return spoken


@pytest.fixture(scope="session")
def set_discriminant():
    """Makes a network distinguish the twelve speakers of a folder."""
    return make_discriminant


@pytest.fixture(scope="session")
def voices(tmp_path_factory):
    """Twelve synthetic speakers with five recordings each; `trials.txt` has all pairs."""
    return write_voices(tmp_path_factory.mktemp("voices"), spoken)


@pytest.fixture(scope="session")
def write_all_voices():
    """Writes a folder of as many voices of another synthesiser."""
    return write_voices


def write_voices(root, synthesise):
    """Five recordings of each of twelve voices, and all their pairs in `trials.txt`."""
    names = [
        f"s{speaker:02d}/{number}.wav"
        for speaker in range(NUM_SPEAKERS)
        for number in range(NUM_UTTERANCES)
    ]
    for name in names:
        write_audio(root / name, synthesise(int(name[1:3]), int(name[4])), 16000)
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
    torch.manual_seed(0)
    sizes = {"channels": 8, "blocks": [1, 1]}
    net = SpeakerNet.named("ResNet", "TSTP", DIM, sizes, front_end_options={"num_mels": 24}).eval()
    make_discriminant(net, voices)
    path = tmp_path_factory.mktemp("model") / "small.pt"
    summary = {"licence": "MIT", "trained_on": "synthetic voices"}
    write_checkpoint(path, model_file_contents(net, loss_normalizes=True, training_summary=summary))
    return path


@pytest.fixture(scope="session")
def calibrated(voices, uncalibrated, succeed, tmp_path_factory):
    """The same model, calibrated by the command."""
    path = tmp_path_factory.mktemp("calibrated") / "new" / "calibrated.pt"
    succeed(f"calibrate --model {uncalibrated} --trials {voices}/trials.txt --out {path}")
    return path


@pytest.fixture(scope="session")
def store(voices, calibrated, succeed, tmp_path_factory):
    """Eight of the twelve voices, enrolled with three recordings each."""
    path = tmp_path_factory.mktemp("store") / "people.db"
    for speaker in range(8):
        files = " ".join(f"{voices}/s{speaker:02d}/{number}.wav" for number in range(3))
        succeed(f"enroll 'Voice {speaker}' {files} --model {calibrated} --store {path}")
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
