"""voxceleb_trainer's own recipes, unmodified, from the folder layout it expects (slow): an epoch, to the report."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.data.audio import write_audio

RAWNET3_AAM = """model: RawNet3
encoder_type: ECA
nOut: 256
sinc_stride: 10
max_frames: 300
batch_size: 32
eval_frames: 400
trainfunc: aamsoftmax
augment: True
save_path: exps/RawNet3_AAM
"""
LIGHT_AP = """model: ResNetSE34L
log_input: True
encoder_type: SAP
trainfunc: angleproto
save_path: exps/ResNetSE34L_AP
nPerSpeaker: 2
batch_size: 200
"""


def write_noise(path: Path, seconds: float) -> None:
    random = np.random.default_rng(zlib.crc32(path.name.encode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_audio(path, (0.1 * random.standard_normal(int(16000 * seconds))).astype(np.float32), 16000)


def lay_out(speakers: int, utterances: int) -> None:
    """Files where voxceleb_trainer's defaults look for them, in the working directory."""
    data, lines = Path("data"), []
    for speaker in range(speakers):
        for utterance in range(utterances):
            name = f"id{speaker:05d}/video/{utterance:05d}.wav"
            write_noise(data / "voxceleb2/dev/wav" / name, 0.5)
            lines.append(f"id{speaker:05d} {name}\n")
    (data / "train_list.txt").write_text("".join(lines))
    for name in ("id1/a/1.wav", "id1/a/2.wav", "id2/a/1.wav"):
        write_noise(data / "voxceleb1/test/wav" / name, 5)
    (data / "veri_test.txt").write_text("1 id1/a/1.wav id1/a/2.wav\n0 id1/a/1.wav id2/a/1.wav\n")
    for kind in ("noise", "speech", "music"):
        for number in range(8):
            write_noise(data / f"musan_split/{kind}/a/b/{number}.wav", 3)
    write_noise(data / "RIRS_NOISES/simulated_rirs/smallroom/Room001/0.wav", 0.2)


# Shorter crops and longer hops than the recipe's own, whose epoch takes minutes.
FASTER = ["--sinc_stride", "100", "--eval_frames", "60", "--max_frames", "60", "--batch_size", "8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "speakers", "utterances", "options"),
    [(LIGHT_AP, 200, 2, ["--eval_frames", "60", "--max_frames", "60"]), (RAWNET3_AAM, 8, 1, FASTER)],
    ids=["ResNetSE34L_AP", "RawNet3_AAM"],
)
def test_recipe_trains(recipe, speakers, utterances, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_out(speakers, utterances)
    Path("theirs.yaml").write_text(recipe)
    assert main(["train", "--config", "theirs.yaml", "--max_epoch", "1", *options]) == 0
    run = Path(recipe.split("save_path: ")[1].split()[0])
    assert (run / "best.pt").is_file() and json.loads((run / "results.json").read_text())["num_trials"] == 2
    assert main(["train", "--config", "theirs.yaml", "--eval", "--initial_model", str(run / "best.pt"), *options]) == 0
    assert (run / "eval/veri_test/scores.txt").is_file()
