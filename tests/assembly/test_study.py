"""Studies: runs, stored results, the table; all runs but those of one test are fake."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from speakernet.assembly import study
from speakernet.cli import main
from speakernet.cli import study as cli_study
from speakernet.config import load_config
from speakernet.data.lists import read_training_list, read_trials
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import write_scores
from speakernet.evaluation.study import name_of_files, read_plan
from speakernet.options import PLUGIN_MODULES

HALF = "half, as recorded"
CROPS = "whole and crops"
PLAN = yaml.safe_load(f"""
recipe: small_data.yaml
held_out_speakers: 3
seeds: [1, 2]
reference: base
common: {{training: {{max_epochs: 2}}}}
variants:
  base:
  "{HALF}": {{augment: {{real_share: 0.5}}, optimizer.learning_rate: 0.002}}
  "{CROPS}": {{evaluation: {{embedding: both, eval_frames: 50}}}}
""")
NOISE = {"base": 1.0, HALF: 0.8, CROPS: 1.0}


METRICS = """{"kind": "epoch", "epoch": 1, "step": 20, "step_seconds": 3.0}
{"kind": "evaluation", "step": 20, "evaluation_seconds": 10.0}
{"kind": "epoch", "epoch": 2, "step": 40, "step_seconds": 6.0}
"""


class Runs:
    """Fake runs: record the command and write the files of a run."""

    def __init__(self):
        self.commands = []
        self.failing = ""
        self.eers = {}

    def run(self, command, *, env, **_):
        words = dict(itertools.pairwise(command))
        folder = Path(words["--save_path"])
        seed = int(words["--seed"])
        variant = next(name for name in NOISE if name_of_files(name) == folder.parent.name)
        threads = env.get("OMP_NUM_THREADS")
        self.commands.append({**words, "variant": variant, "threads": threads})
        if variant == self.failing:
            return subprocess.CompletedProcess(command, 1)
        trials = read_trials(words["--data.test_list"])
        noise = np.random.default_rng(seed).standard_normal(len(trials))
        scores = trials.labels + NOISE[variant] * noise
        self.eers[variant, seed] = eer(scores, trials.labels)
        target = folder / "eval" / "trials" if "--eval" in command else folder
        write_scores(target / "scores.txt", trials, scores)
        results = Results(
            len(trials),
            eer_percent=self.eers[variant, seed],
            min_dcf={"0.01": 0.5, "0.05": 0.3},
        )
        (target / "results.json").write_text(json.dumps(results.to_dict()))
        if "--eval" not in command:
            (folder / "metrics.jsonl").write_text(METRICS)
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def runs(monkeypatch):
    fake = Runs()
    monkeypatch.setattr(study.subprocess, "run", fake.run)
    return fake


@pytest.fixture
def carry_out(tiny_corpus, tmp_path, monkeypatch):
    """A function that runs `speakernet study` with the plan and these arguments."""
    monkeypatch.chdir(tmp_path)
    Path("lists").mkdir()
    Path("lists/training.txt").write_text((tiny_corpus / "train_list.txt").read_text())

    def carry_out(*words, **changes):
        Path("plan.yaml").write_text(yaml.safe_dump({**PLAN, **changes}))
        data = ("--train_list", "lists/training.txt", "--train_path", str(tiny_corpus))
        return main(["study", "plan.yaml", *data, "--save_path", "study", *words])

    return carry_out


def records():
    return [json.loads(line) for line in Path("study/results.jsonl").read_text().splitlines()]


def test_variants_and_seeds(tiny_corpus, carry_out, runs, capsys):
    assert carry_out("--rir_path", "rooms", "--processes", "2") == 0
    commands = {(command["variant"], command["--seed"]) for command in runs.commands}
    assert commands == set(itertools.product(NOISE, "12"))
    for command in runs.commands:
        assert command["--data.train_path"] == command["--data.test_path"] == str(tiny_corpus)
        assert command["--rir_path"] == "rooms" and int(command["threads"]) >= 1
        # A variant that only changes scoring is not trained; it scores the reference's model of
        # that seed.
        is_scored = command["variant"] == CROPS
        model = f"study/runs/base/seed_{command['--seed']}/best.pt" if is_scored else None
        assert command.get("--initial_model") == model
    assert len(read_training_list("study/protocol/train_list.txt").speakers) == 5
    written = yaml.safe_load(Path("study/variants/half_as_recorded.yaml").read_text())
    assert written == {"training": {"max_epochs": 2}, **PLAN["variants"][HALF]}
    # 20 steps of 3 s and 20 of 6 s, without the evaluation.
    seconds = {record["variant"]: record["training_seconds"] for record in records()}
    assert seconds == {"base": 180.0, HALF: 180.0, CROPS: None}
    text = Path("study/table.md").read_text()
    assert text in capsys.readouterr().out
    cells = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in text.split("\n")
    }
    assert cells["base"][1] == "1, 2" and cells["base"][-1] == "3.0 |"
    before, after = ([runs.eers[name, seed] for seed in (1, 2)] for name in ("base", HALF))
    difference = np.mean(after) - np.mean(before)
    # Student's t with one degree of freedom is 12.706, and the standard error half the distance of
    # the two differences.
    distance = abs((after[0] - before[0]) - (after[1] - before[1]))
    low, high = difference - 6.3531 * distance, difference + 6.3531 * distance
    assert cells[HALF][3] == f"{difference:+.2f} ({low:+.2f} to {high:+.2f})"
    assert cells[CROPS][5] == "+0 %" and cells[CROPS][-1] == " |"
    latex = Path("study/table.tex").read_text().splitlines()
    assert len([line for line in latex if line.endswith(r"\\")]) == 4
    assert latex[4].startswith(r"base & 1, 2 & ") and r"EER \%" in latex[2]


def test_other_lists_and_plugins(tiny_corpus, carry_out, runs):
    Path("parts.py").write_text("COMPONENTS = {}\n")
    lists = {"test_list": str(tiny_corpus / "trials.txt"), "test_path": str(tiny_corpus)}
    command = ["--plugin", "parts.py", "--only", HALF, "--seeds", "3"]
    for name, value in lists.items():
        command += [f"--data.{name}", value]
    assert carry_out(*command, held_out_speakers=0) == 0
    assert {command["variant"] for command in runs.commands} == {"base", HALF}
    for command in runs.commands:
        assert command["--plugin"] == "parts.py" and command["--seed"] == "3"
        assert command["--data.test_list"] == lists["test_list"]
    del PLUGIN_MODULES["parts"], sys.modules["parts"]


def test_resuming(carry_out, runs, capsys):
    runs.failing = HALF
    assert carry_out() == 1 and len(records()) == 4
    assert f"{HALF}, seed 2" in capsys.readouterr().err
    runs.failing = ""
    before = len(runs.commands)
    assert carry_out() == 0
    assert {command["variant"] for command in runs.commands[before:]} == {HALF}
    assert carry_out("--table") == 0
    assert len(runs.commands) == before + 2 and len(records()) == 6
    assert carry_out(variants={**PLAN["variants"], HALF: {"augment": {"real_share": 0.7}}}) == 1
    assert repr(HALF) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "changes", "named"),
    [
        (["--only", "bases"], {}, HALF),
        (["--seed", "3"], {}, "runtime.seed"),
        (["--lr", "0.1"], {}, "optimizer.learning_rate"),
        ([], {"reference": "nobody"}, "nobody"),
        ([], {"variants": {"base": {"training": {"epochs": 3}}}}, "training.epochs"),
        ([], {"variants": {"base": None, "a b": None, "a_b": None}}, "letters"),
        ([], {"held_out_speakers": 0}, "data.test_list"),
    ],
)
def test_bad_plans(carry_out, runs, capsys, words, changes, named):
    assert carry_out(*words, **changes) == 1
    assert named in capsys.readouterr().err and not runs.commands


def test_plan_is_the_first_word(carry_out, refuse):
    assert "list.txt" in refuse("study --save_path study --train_list list.txt plan.yaml")


def test_documented_plans(repository, tmp_path):
    page = (repository / "docs" / "data.md").read_text(encoding="utf-8")
    in_page = page[page.index("```yaml\nrecipe:") :].split("```")[1].removeprefix("yaml\n")
    in_help = cli_study.__doc__[cli_study.__doc__.index("    recipe:") :].split("\n\n")[0]
    for text in (in_page, in_help):
        (tmp_path / "plan.yaml").write_text(text)
        plan = read_plan(tmp_path / "plan.yaml")
        for variant in plan.variants:
            (tmp_path / "variant.yaml").write_text(yaml.safe_dump(plan.settings(variant)))
            load_config([plan.recipe, str(tmp_path / "variant.yaml")])


@pytest.mark.slow
def test_real_runs(carry_out):
    small = yaml.safe_load("""
    data: {batch_size: 8, crop_frames: 50, num_workers: 0}
    model:
      embedding_dim: 8
      options: {channels: 8, blocks: [1, 1], mel_strides: [1, 2], frame_strides: [2, 2]}
    training: {max_epochs: 1, test_interval: 1}
    evaluation: {bootstrap_samples: 0}
    """)
    crops = {"evaluation": {"embedding": "crops", "eval_frames": 50, "num_crops": 2}}
    variants = {"base": {}, "crops": crops}
    assert carry_out(seeds=[1], common=small, variants=variants) == 0
    seconds = {record["variant"]: record["training_seconds"] for record in records()}
    assert seconds["base"] > 0 and seconds["crops"] is None
    assert "crops | 1 | " in Path("study/table.md").read_text()
