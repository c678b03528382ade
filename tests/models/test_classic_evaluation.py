"""voxceleb_trainer's evaluation command with its own kind of checkpoint, as flags without a configuration."""

import math
from pathlib import Path

import pytest
import torch

from speakernet.cli import main
from speakernet.data.audio import read_audio
from speakernet.models.speaker_net import SpeakerNet
from tests.models.test_commands import as_theirs

FRAMES = 60
SAMPLES = FRAMES * 160 + 240


def distance_by_loop(net, first, second, normalize):
    """Minus the mean of the hundred distances between ten crops each, in plain Python."""
    crops = []
    for waveform in (first, second):
        room = len(waveform) - SAMPLES
        starts = [int(room * index / 9) for index in range(10)]
        cut = [torch.from_numpy(waveform[start : start + SAMPLES])[None] for start in starts]
        embedded = [net.embed(crop, sample_rate=16000)[0] for crop in cut]
        if normalize:
            embedded = [embedding / embedding.norm() for embedding in embedded]
        crops.append([embedding.double().tolist() for embedding in embedded])
    distances = [math.dist(left, right) for left in crops[0] for right in crops[1]]
    return -sum(distances) / len(distances)


@pytest.mark.parametrize(("loss", "normalize"), [("angleproto", True), ("proto", False)])
def test_evaluation_by_flags_with_their_checkpoint(loss, normalize, tiny_corpus, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    net = SpeakerNet.named("ResNetSE34L", "SAP", 16, front_end_options={"num_mels": 40, "log_input": True})
    state = as_theirs(net)
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}, "epoch": 1}, "their.model")
    trials = (tiny_corpus / "trials.txt").read_text().splitlines()[:8]
    Path("list.txt").write_text("\n".join(trials) + "\n")
    flags = ["--eval", "--model", "ResNetSE34L", "--log_input", "--trainfunc", loss, "--eval_frames", str(FRAMES)]
    flags += ["--initial_model", "their.model", "--test_list", "list.txt", "--test_path", str(tiny_corpus)]
    assert main(["train", *flags, "--nOut", "16", "--save_path", "check"]) == 0
    assert "voxceleb_trainer" in caplog.text
    lines = [line.split() for line in Path("check/eval/list/scores.txt").read_text().splitlines()]
    assert [line[:2] for line in lines] == [trial.split()[1:] for trial in trials]
    for enrol, test, score in lines[:3]:
        first, second = read_audio(tiny_corpus / enrol), read_audio(tiny_corpus / test)
        expected = distance_by_loop(net, first, second, normalize)
        assert float(score) == pytest.approx(expected, abs=1e-4)
