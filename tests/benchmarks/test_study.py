"""Studies: what is run, what is kept, what the table says; runs are played, but for one that is real."""

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

PLAN: dict[str, Any] = {
    "recipe": "small_data.yaml",
    "held_out_speakers": 3,
    "seeds": [1, 2],
    "reference": "base",
    "common": {"training": {"max_epochs": 2}},
    "variants": {
        "base": None,
        "half, as recorded": {"augment": {"real_share": 0.5}},
        "whole and crops": {"evaluation": {"embedding": "both", "eval_frames": 50}},
    },
}
EERS = {"base": {1: 8.0, 2: 10.0}, "half, as recorded": {1: 6.0, 2: 9.0}, "whole and crops": {1: 8.0, 2: 9.5}}


class Runs:
    """Stands for the processes: writes what a run leaves, and remembers the commands."""

    def __init__(self) -> None:
        self.commands: list[dict[str, str]] = []
        self.failing: set[str] = set()

    def run(self, command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess:
        words = dict(itertools.pairwise(command))
        folder = Path(words["--save_path"])
        variant = next(name for name in EERS if study._as_name(name) == folder.parent.name)
        self.commands.append({**words, "eval": str("--eval" in command), "variant": variant})
        assert env["OMP_NUM_THREADS"] == "1"
        if variant in self.failing:
            return subprocess.CompletedProcess(command, 1)
        trials = read_trials(words["--data.test_list"])
        eer, seed = EERS[variant][int(words["--seed"])], int(words["--seed"])
        found = folder / "eval" / "trials" if "--eval" in command else folder
        results = {"eer_percent": eer, "eer_interval_percent": [1.0, 20.0], "min_dcf": {"0.01": 0.5, "0.05": 0.3}}
        found.mkdir(parents=True, exist_ok=True)
        (found / "results.json").write_text(json.dumps({**results, "precision": "float32", "date": "today"}))
        noise = np.random.default_rng(seed).standard_normal(len(trials))
        write_scores(found / "scores.txt", trials, noise + (4.0 if variant == "base" else 6.0) * trials.labels)
        if "--eval" not in command:
            write_checkpoint(folder / "last.pt", {"training": {"state": {"seconds": 130.0}}})
            lines = [{"kind": "step"}]
            for step, error in ((0, 50.0), (5, 2 * eer), (20, eer)):
                lines.append({"kind": "evaluation", "step": step, "eer_percent": error, "evaluation_seconds": 10 / 3})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture()
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    played = Runs()
    monkeypatch.setattr(study.subprocess, "run", played.run)
    return played


def carry_out(corpus: Path, folder: Path, *words: str, **changes: Any) -> int:
    """As `python -m benchmarks.study` does it."""
    (folder / "plan.yaml").write_text(yaml.safe_dump({**PLAN, **changes}))
    lists = ("--train_list", str(corpus / "train_list.txt"), "--save_path", str(folder / "study"))
    return run_command("benchmarks.study", "study", [str(folder / "plan.yaml"), *lists, *words])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "study" / "results.jsonl").read_text().splitlines()]


def test_every_variant_is_run_with_every_seed_on_held_out_speakers(
    tiny_corpus: Path, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carry_out(tiny_corpus, tmp_path, "--rir_path", "rooms") == 0
    assert {(one["variant"], one["--seed"]) for one in runs.commands} == {
        (name, seed) for name in EERS for seed in "12"
    }
    for one in runs.commands:
        assert one["--data.train_path"] == one["--data.test_path"] == str(tiny_corpus)
        assert one["--augment.rir_path"] == "rooms"
        # Only what changes nothing but the scoring is scored, with the reference's model of that seed.
        assert (one["eval"] == "True") == (one["variant"] == "whole and crops")
        if one["eval"] == "True":
            assert one["--initial_model"] == str(tmp_path / f"study/runs/base/seed_{one['--seed']}/best.pt")
    training = read_training_list(tmp_path / "study/protocol/train_list.txt")
    judges = {name.split("/")[0] for name in read_trials(tmp_path / "study/protocol/trials.txt").names}
    assert len(judges) == 3 and len(training.speakers) == 5 and not judges & set(training.speakers)
    written = yaml.safe_load((tmp_path / "study/variants/half_as_recorded.yaml").read_text())
    assert written == {"training": {"max_epochs": 2}, "augment": {"real_share": 0.5}}
    assert [one["training_seconds"] for one in records(tmp_path) if one["variant"] == "base"] == [120.0, 120.0]
    lines = capsys.readouterr().out.splitlines()
    assert lines == (tmp_path / "study" / "table.md").read_text().splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines[2:]}
    assert cells["base"][1:3] == ["1, 2", "9.00 (8.00 to 10.00)"] and cells["base"][-1] == "2.0 |"
    half = cells["half, as recorded"]
    # By hand: differences of -2 and -1, Student's t of one degree of freedom 12.706.
    assert half[2:4] == ["7.50 (6.00 to 9.00)", "-1.50 (-7.85 to +4.85)"] and half[5] == "-17 %"
    assert half[4].startswith("-") and cells["whole and crops"][-1] == " |"


def test_a_study_resumes_and_refuses_a_changed_variant(
    tiny_corpus: Path, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing = {"half, as recorded"}
    assert carry_out(tiny_corpus, tmp_path, "--processes", "1") == 1
    assert len(records(tmp_path)) == 4
    runs.failing = set()
    before = len(runs.commands)
    assert carry_out(tiny_corpus, tmp_path) == 0
    assert {one["variant"] for one in runs.commands[before:]} == {"half, as recorded"}
    assert carry_out(tiny_corpus, tmp_path, "--table") == 0
    assert len(runs.commands) == before + 2 and len(records(tmp_path)) == 6
    variants = {**PLAN["variants"], "half, as recorded": {"augment": {"real_share": 0.7}}}
    assert carry_out(tiny_corpus, tmp_path, variants=variants) == 1
    assert "'half, as recorded' was run with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["--only", "bases"], {}, "the plan has base, half, as recorded"),
        ([], {"reference": "nobody"}, "reference: nobody; expected one of base"),
        ([], {"variants": {"base": {"training": {"epochs": 3}}}}, "training.epochs"),
        ([], {"held_out_speakers": 7}, "expected 2 to 6"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(
    tiny_corpus: Path, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str], words, changes, said
) -> None:
    assert carry_out(tiny_corpus, tmp_path, *words, **changes) == 1
    assert said in capsys.readouterr().err and not runs.commands


@pytest.mark.parametrize("file", ["small_data.yaml", "small_data_report.yaml"])
def test_every_variant_of_the_plans_here_is_a_configuration(repository: Path, tmp_path: Path, file: str) -> None:
    plan = study.read_plan(repository / "benchmarks" / "studies" / file)
    for number, name in enumerate(plan.variants):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(plan.settings(name)))
        study.load_config(["--config", plan.recipe_of(name), "--config", str(path)])


@pytest.mark.slow
def test_real_runs_of_a_tiny_study(tiny_corpus: Path, tmp_path: Path) -> None:
    net = {"channels": 8, "blocks": [1, 1], "mel_strides": [1, 2], "frame_strides": [2, 2]}
    small = {
        "data": {"batch_size": 8, "crop_frames": 50, "num_workers": 0},
        "model": {"embedding_dim": 8, "options": net},
        "training": {"max_epochs": 1, "test_interval": 1},
        "evaluation": {"bootstrap_samples": 0},
    }
    variants = {"base": {}, "crops": {"evaluation": {"embedding": "crops", "eval_frames": 50, "num_crops": 2}}}
    assert carry_out(tiny_corpus, tmp_path, seeds=[1], common=small, variants=variants) == 0
    found = {one["variant"]: one for one in records(tmp_path)}
    assert found["base"]["training_seconds"] > 0 and found["base"]["precision"] == "float32"
    assert found["crops"]["training_seconds"] is None
    assert "crops | 1 | " in (tmp_path / "study" / "table.md").read_text()
