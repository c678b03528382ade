"""Studies: runs, stored results, the table; all runs but one are fake."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import study
from speakernet.checkpoint import write_checkpoint
from speakernet.cli import run_command
from speakernet.data.lists import read_training_list, read_trials
from speakernet.evaluation.files import write_scores

HALF = "half, as recorded"
CROPS = "whole and crops"
PLAN: dict[str, Any] = {
    "recipe": "small_data.yaml",
    "held_out_speakers": 3,
    "seeds": [1, 2],
    "reference": "base",
    "common": {"training": {"max_epochs": 2}},
    "variants": {
        "base": None,
        HALF: {"augment": {"real_share": 0.5}},
        CROPS: {"evaluation": {"embedding": "both", "eval_frames": 50}},
    },
}
EERS = {"base": {"1": 8.0, "2": 10.0}, HALF: {"1": 6.0, "2": 9.0}, CROPS: {"1": 8.0, "2": 9.5}}


class Runs:
    """Fake runs: record the command and write the files of a run."""

    def __init__(self):
        self.commands: list[dict[str, str]] = []
        self.failing = ""

    def run(self, command, *, env, **_):
        assert env["OMP_NUM_THREADS"] == "1"
        words = dict(itertools.pairwise(command))
        folder = Path(words["--save_path"])
        is_scored = "--eval" in command
        variant = next(name for name in EERS if study._as_name(name) == folder.parent.name)
        self.commands.append({**words, "variant": variant})
        if variant == self.failing:
            return subprocess.CompletedProcess(command, 1)
        trials = read_trials(words["--data.test_list"])
        eer = EERS[variant][words["--seed"]]
        found = folder / "eval" / "trials" if is_scored else folder
        found.mkdir(parents=True, exist_ok=True)
        results = {
            "eer_percent": eer,
            "eer_interval_percent": [1.0, 20.0],
            "min_dcf": {"0.01": 0.5, "0.05": 0.3},
        }
        (found / "results.json").write_text(
            json.dumps({**results, "precision": "float32", "date": "today"})
        )
        write_scores(
            found / "scores.txt", trials, np.random.default_rng(3).standard_normal(len(trials))
        )
        if not is_scored:
            write_checkpoint(folder / "last.pt", {"training": {"state": {"seconds": 130.0}}})
            line = {
                "kind": "evaluation",
                "step": 20,
                "eer_percent": eer,
                "evaluation_seconds": 10.0,
            }
            (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture()
def runs(monkeypatch):
    fake = Runs()
    monkeypatch.setattr(study.subprocess, "run", fake.run)
    return fake


@pytest.fixture()
def carry_out(tiny_corpus, tmp_path, monkeypatch):
    """A function that runs `python -m benchmarks.study` with the plan and these arguments."""
    monkeypatch.chdir(tmp_path)

    def carry_out(*words, **changes):
        Path("plan.yaml").write_text(yaml.safe_dump({**PLAN, **changes}))
        lists = ("--train_list", str(tiny_corpus / "train_list.txt"), "--save_path", "study")
        return run_command("benchmarks.study", "study", ["plan.yaml", *lists, *words])

    return carry_out


def records():
    return [json.loads(line) for line in Path("study/results.jsonl").read_text().splitlines()]


def test_variants_and_seeds(tiny_corpus, carry_out, runs):
    assert carry_out("--rir_path", "rooms") == 0
    assert {(one["variant"], one["--seed"]) for one in runs.commands} == set(
        itertools.product(EERS, "12")
    )
    for one in runs.commands:
        assert one["--data.train_path"] == one["--data.test_path"] == str(tiny_corpus)
        # A variant that only changes scoring is not trained; it scores the reference's model of
        # that seed.
        model = f"study/runs/base/seed_{one['--seed']}/best.pt" if one["variant"] == CROPS else None
        assert one["--augment.rir_path"] == "rooms" and one.get("--initial_model") == model
    training = read_training_list("study/protocol/train_list.txt")
    judges = {name.split("/")[0] for name in read_trials("study/protocol/trials.txt").names}
    assert len(judges) == 3 and len(training.speakers) == 5 and not judges & set(training.speakers)
    written = yaml.safe_load(Path("study/variants/half_as_recorded.yaml").read_text())
    assert written == {"training": {"max_epochs": 2}, "augment": {"real_share": 0.5}}
    assert [one["training_seconds"] for one in records() if one["variant"] == "base"] == [
        120.0,
        120.0,
    ]
    lines = Path("study/table.md").read_text().splitlines()[2:]
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines}
    assert cells["base"][1:3] == ["1, 2", "9.00 (8.00 to 10.00)"] and cells[CROPS][-1] == " |"
    # By hand: differences of -2 and -1; Student's t with one degree of freedom is 12.706.
    assert (
        cells[HALF][2:4] == ["7.50 (6.00 to 9.00)", "-1.50 (-7.85 to +4.85)"]
        and cells[HALF][5] == "-17 %"
    )


def test_plugins_reach_the_runs(carry_out, runs):
    Path("parts.py").write_text("COMPONENTS = {}\n")
    assert carry_out("--plugin", "parts.py") == 0
    assert runs.commands and all(command["--plugin"] == "parts.py" for command in runs.commands)


def test_resuming(carry_out, runs, capsys):
    runs.failing = HALF
    assert carry_out("--processes", "1") == 1 and len(records()) == 4
    runs.failing, before = "", len(runs.commands)
    assert carry_out() == 0 and {one["variant"] for one in runs.commands[before:]} == {HALF}
    assert carry_out("--table") == 0
    assert len(runs.commands) == before + 2 and len(records()) == 6
    assert carry_out(variants={**PLAN["variants"], HALF: {"augment": {"real_share": 0.7}}}) == 1
    assert repr(HALF) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "changes", "named"),
    [
        (["--only", "bases"], {}, HALF),
        ([], {"reference": "nobody"}, "nobody"),
        ([], {"variants": {"base": {"training": {"epochs": 3}}}}, "training.epochs"),
        ([], {"held_out_speakers": 7}, "2 to 6"),
    ],
)
def test_bad_plans(carry_out, runs, capsys, words, changes, named):
    assert carry_out(*words, **changes) == 1
    assert named in capsys.readouterr().err and not runs.commands


@pytest.mark.slow
def test_real_runs(carry_out):
    net = {"channels": 8, "blocks": [1, 1], "mel_strides": [1, 2], "frame_strides": [2, 2]}
    small = {
        "data": {"batch_size": 8, "crop_frames": 50, "num_workers": 0},
        "model": {"embedding_dim": 8, "options": net},
        "training": {"max_epochs": 1, "test_interval": 1},
        "evaluation": {"bootstrap_samples": 0},
    }
    variants = {
        "base": {},
        "crops": {"evaluation": {"embedding": "crops", "eval_frames": 50, "num_crops": 2}},
    }
    assert carry_out(seeds=[1], common=small, variants=variants) == 0
    found = {one["variant"]: one for one in records()}
    assert found["base"]["training_seconds"] > 0 and found["base"]["precision"] == "float32"
    assert (
        found["crops"]["training_seconds"] is None
        and "crops | 1 | " in Path("study/table.md").read_text()
    )
