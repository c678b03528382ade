"""Every recipe trains an epoch on a tiny corpus, and the README's demo keeps its promise (slow)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speakernet.cli import main

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe: str, tiny_corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    is_preset = "preset" in recipe
    options = ["--config", "exp01.yaml"] if is_preset else []
    options += ["--config", recipe, "--data.synthetic_corpus", "", "--save_path", str(run)]
    options += ["--train_list", f"{tiny_corpus}/train_list.txt", "--train_path", str(tiny_corpus)]
    options += ["--test_list", f"{tiny_corpus}/trials.txt", "--test_path", str(tiny_corpus)]
    options += ["--validation_list", "", "--validation_path", "", "--augment.enabled", "false", "--initial_model", ""]
    options += [
        "--data.batch_size",
        "4",
        "--data.crop_frames",
        "80",
        "--data.crop_frames_max",
        "0",
        "--data.num_workers",
        "0",
    ]
    options += [
        "--data.min_seconds",
        "0",
        "--data.max_seconds",
        "0",
        "--training.max_epochs",
        "1",
        "--runtime.compile",
        "off",
    ]
    options += ["--evaluation.eval_frames", "80", "--evaluation.num_crops", "1", "--evaluation.score_norm", "none"]
    options += ["--training.accumulation_steps", "1", "--data.max_utterances_per_speaker", "4"]
    options += ["--training.large_margin_epochs", "0"]
    assert main(["train", *options]) == 0
    assert (run / "best.pt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_of_the_readme(tmp_path: Path) -> None:
    """The README's command as written, in an empty folder, in float32 as on any machine."""
    script = str(ROOT / "trainSpeakerNet.py")
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    command = [sys.executable, script, "--config", "exp01.yaml", "--mixed-precision", "no"]
    trained = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr[-3000:]
    run = tmp_path / "exps" / "exp01"
    results = json.loads((run / "results.json").read_text())
    assert 2 <= results["eer_percent"] <= 10
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["eer_percent"] for line in lines if line["kind"] == "evaluation"]
    assert evaluations[-1] < evaluations[0]
    scored = subprocess.run(
        [*command, "--eval", "--initial_model", str(run / "best.pt")],
        cwd=tmp_path, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert scored.returncode == 0, scored.stderr[-3000:]
    assert list((run / "eval").glob("*/scores.txt"))
