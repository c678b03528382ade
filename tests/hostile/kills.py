"""Runs that are killed at random moments and started again until they are finished, beside one that nobody disturbed.

Pass: every start ends killed or finished, never with an error; weights, scores and figures are bit for bit those of the
undisturbed run; report and everything else that a run leaves is there, and nothing half-written.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speakernet.checkpoint import read_own_checkpoint
from speakernet.data.audio import write_audio

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = """data:
  train_list: {root}/train_list.txt
  test_list: {root}/trials.txt
  batch_size: 4
  crop_frames: 40
  num_workers: {workers}
model: {{name: ResNet, embedding_dim: 8, options: {{channels: 8, blocks: [1, 1]}}}}
loss: {{name: aamsoftmax}}
optimizer: {{learning_rate: 0.01}}
training:
  max_epochs: 3
  test_interval: 1
  save_steps: 2
  average_checkpoints: 2
  large_margin_epochs: 1
  save_path: {run}
evaluation: {{eval_frames: 50, num_crops: 2, bootstrap_samples: 20}}
runtime: {{device: cpu, precision: "no", compile: "off"}}
augment: {{enabled: false}}
"""
LEFT = ("best.pt", "last.pt", "config.yaml", "results.json", "scores.txt", "report.html", "metrics.jsonl", "log.txt")
FIGURES = ("eer_percent", "eer_interval_percent", "min_dcf", "num_trials")
MOST_SECONDS = 600.0
"""For one undisturbed start."""


def make_corpus(root: Path, voice: Any) -> None:
    """Four speakers to train with and four to try, three utterances each.

    Args:
        root: where audio and lists go.
        voice: from numbers of speaker and utterance, seconds, to a waveform.
    """
    names = {}
    for speaker in range(8):
        for utterance in range(3):
            name = f"s{speaker}/{utterance}.wav"
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            write_audio(root / name, voice(speaker, utterance, 0.7 + 0.1 * utterance))
            names[name] = speaker
    train = [f"s{speaker} {name}\n" for name, speaker in names.items() if speaker < 4]
    tried = [name for name, speaker in names.items() if speaker >= 4]
    pairs = [(one, other) for one in tried for other in tried if one < other]
    (root / "train_list.txt").write_text("".join(train))
    trials = "".join(f"{int(names[one] == names[other])} {one} {other}\n" for one, other in pairs)
    (root / "trials.txt").write_text(trials)


def start(root: Path, run: Path, workers: int) -> subprocess.Popen:
    """A start of the run in a process group of its own."""
    recipe = root / f"{run.name}.yaml"
    recipe.write_text(RECIPE.format(root=root, run=run, workers=workers))
    command = [sys.executable, str(REPOSITORY / "trainSpeakerNet.py"), "--config", str(recipe)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(root: Path, run: Path, workers: int) -> float:
    """Start and wait; the seconds that it took."""
    begin = time.monotonic()
    process = start(root, run, workers)
    said = process.communicate(timeout=MOST_SECONDS)[1]
    assert process.returncode == 0, said[-3000:]
    return time.monotonic() - begin


def killed_run(root: Path, run: Path, workers: int, seconds: float, draw: random.Random, kills: int) -> int:
    """Start a run again and again, killing it up to `kills` times within the time that it takes; the kills."""
    done = 0
    while done < kills:
        process = start(root, run, workers)
        try:
            said = process.communicate(timeout=draw.uniform(0.2, 1.0) * seconds)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            done += 1
            continue
        assert process.returncode == 0, said[-3000:]
        break
    finish(root, run, workers)
    return done


def differences(run: Path, undisturbed: Path) -> list[str]:
    """What of a run is not as in the other, or should not be there."""
    found = [f"no {name}" for name in LEFT if not (run / name).exists()]
    found += [f"left over: {one.relative_to(run)}" for one in run.rglob("*") if one.name.endswith(".tmp")]
    if found:
        return found
    if (run / "scores.txt").read_bytes() != (undisturbed / "scores.txt").read_bytes():
        found.append("other scores")
    ours, theirs = (json.loads((one / "results.json").read_text()) for one in (run, undisturbed))
    found += [f"another {name}" for name in FIGURES if ours[name] != theirs[name]]
    ours, theirs = (read_own_checkpoint(one / "best.pt")["weights"] for one in (run, undisturbed))
    found += [f"other weights: {name}" for name in theirs if not ours[name].equal(theirs[name])]
    return found
