"""Recipes equal their sources, are built at full size and train on a tiny corpus; the README's
demo.
"""

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from speakernet.assembly.training import (
    build_loss,
    build_model,
    refuse_impossible,
    schedules_of_stages,
)
from speakernet.checkpoint import read_own_checkpoint
from speakernet.cli import main
from speakernet.config import load_config
from speakernet.config.schema import stages_of
from speakernet.models.model_file import SYNTHETIC_ONLY
from speakernet.run_folder import later_stages
from speakernet.training.schedules import scheduled_epochs
from tests.commands import run_command
from tests.outcomes import records_of, results_of
from tests.recipe_sources import (
    LATER_STAGES,
    LATER_VALUES,
    PARAMETERS,
    SCHEDULES,
    SECOND_STAGE_VALUES,
    SECOND_STAGES,
    VALUES,
)

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(
    path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")
)
VOXCELEB = [recipe for recipe in RECIPES if recipe.startswith("voxceleb/")]
VOXCELEB2_SPEAKERS = 5994
SHORT = """
--data.batch_size 4 --data.crop_frames 80 --data.crop_frames_max 0 --data.num_workers 0
--data.min_seconds 0 --training.max_epochs 1 --training.accumulation_steps 1
--runtime.compile off --evaluation.eval_frames 80 --evaluation.num_crops 1
--evaluation.score_norm none --evaluation.bootstrap_samples 0 --evaluation.quality_measures []
--training.stages [] --training.freeze_epochs 0 --training.freeze_norm_statistics false
--training.initial_weight 0
"""
UNSET = """
data.synthetic_corpus augment.noise_path augment.rir_path validation_list validation_path
data.enrolment_list initial_model evaluation.calibration_list evaluation.calibration_path
"""


def recipe_config(recipe):
    base = ["--config", "exp01.yaml"] if recipe.startswith(("preset", "test")) else []
    return load_config([*base, "--config", recipe]).config


def at(rows, stage):
    """Finished epochs -> learning rate and margin, from the rows of one stage."""
    found = {}
    for row in rows:
        if row.stage == stage:
            first, last = row.margins or (None, None)
            found[row.epoch - 1] = (row.learning_rates[0], first)
            found.setdefault(row.epoch, (row.learning_rates[1], last))
    return found


def assert_follows(found, source):
    """The table shows the source's values, including those of its first and last moments."""
    expected = [moment for moment in source if moment[0] in found]
    assert {min(found), max(epoch for epoch, _, _ in source)} <= {epoch for epoch, _, _ in expected}
    assert len(expected) >= min(3, len(source))
    for epoch, rate, margin in expected:
        # Ours is divided by 0.999 to end at the full margin.
        margin = margin if margin is None else pytest.approx(margin, rel=1.1e-3)
        assert found[int(epoch)] == (pytest.approx(rate, rel=1e-6), margin), epoch


def assert_has(config, values):
    for key, value in values.items():
        found = functools.reduce(getattr, key.split("."), config)
        # Lists of a configuration are tuples in memory.
        if isinstance(value, list):
            found = list(found)
        assert found == value or (
            isinstance(value, dict) and vars(found) == {**vars(found), **value}
        ), key


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedules(recipe):
    text = (ROOT / "configs" / recipe).read_text(encoding="utf-8")
    assert text.startswith("# "), "the first line describes the recipe"
    config = recipe_config(recipe)
    first, *later = stages_of(config)
    rows = scheduled_epochs(schedules_of_stages(config))
    if recipe in SCHEDULES:
        assert_follows(at(rows, first), SCHEDULES[recipe])
    expected = LATER_STAGES.get(recipe, {})
    values = LATER_VALUES.get(recipe, {})
    if recipe in SECOND_STAGES:
        expected = {"large_margin": SECOND_STAGES[recipe]}
        values = {"large_margin": SECOND_STAGE_VALUES[recipe]}
    assert later == list(expected)
    for name, moments in expected.items():
        assert_follows(at(rows, name), moments)
        assert_has(stages_of(config)[name], values[name])


@pytest.mark.parametrize("recipe", VOXCELEB)
def test_values(recipe):
    config = recipe_config(recipe)
    assert_has(next(iter(stages_of(config).values())), VALUES[recipe])
    # Only the authors of the w2v-BERT recipe synchronise it.
    synchronised = "on" if recipe == "voxceleb/w2v_bert.yaml" else "off"
    assert config.runtime.sync_batch_norm == synchronised
    first_line, _ = (ROOT / "configs" / recipe).read_text(encoding="utf-8").split("\n", 1)
    is_best = "best epoch on the reported list" in first_line
    assert is_best or config.training.final_model == "last"


@pytest.mark.parametrize("recipe", [name for name in VOXCELEB if name not in LATER_STAGES])
def test_full_size(recipe):
    config = recipe_config(recipe)
    net = build_model(config)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    assert parameters / 1e6 == pytest.approx(PARAMETERS[recipe], rel=0.01)
    classes = VOXCELEB2_SPEAKERS * len(config.augment.speed_factors)
    loss = build_loss(config, classes)
    heads = [tuple(weights.shape) for weights in loss.parameters() if weights.ndim == 2]
    head = classes, config.model.embedding_dim
    assert heads == ([] if config.loss.name == "angleproto" else [head])
    refuse_impossible(config, net, torch.device("cpu"))


def test_schedule_as_a_table(capsys):
    run_command("show-config --config voxceleb/resnet34.yaml --schedule")
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert rows["epoch"] == ["learning rate", "margin"]
    assert rows["150 of the base stage"] == ["0.00021 to 0.0002", "0.2"]
    assert rows["5 of the large_margin stage"] == ["6.6e-05 to 5e-05", "0.5"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in LATER_STAGES])
def test_every_recipe_trains(recipe, tiny_corpus, tmp_path):
    """Two steps of 4 utterances (or speakers, if in pairs) with the recipe's network, short crops,
    an evaluation.
    """
    run = tmp_path / "run"
    config = recipe_config(recipe)
    base = "--config exp01.yaml" if "preset" in recipe else ""
    lists = small_lists(tiny_corpus, tmp_path, config.data.utterances_per_speaker)
    options = f"{base} --config {recipe} --save_path {run} {lists} {SHORT}".split()
    # Recipes that start from a model file are tested in tests/assembly/test_initial_model.py.
    for name in UNSET.split():
        options += [f"--{name}", ""]
    assert main(["train", *options]) == 0
    assert (run / "best.pt").is_file()
    assert records_of(run)[-1]["step"] == 2


@pytest.mark.slow
@pytest.mark.needs("transformers", "peft")
@pytest.mark.parametrize("recipe", LATER_STAGES)
def test_every_stage_of_a_recipe_trains(recipe, tiny_corpus, tmp_path):
    """Two steps of each stage behind a tiny backbone of the recipe's kind."""
    from tests.models.test_pretrained import make

    run = tmp_path / "run"
    values = yaml.safe_load((ROOT / "configs" / recipe).read_text())
    kinds = {"microsoft/wavlm-base-plus": "wavlm", "microsoft/wavlm-large": "wavlm large"}
    options = values["model"]["options"]
    kind = kinds.get(options["backbone"], "w2v-bert")
    options["backbone"] = str(make(tmp_path / "backbone", kind))
    for stage in values["training"]["stages"]:
        stage["epochs"] = 1
        stage["data"] = {"batch_size": 4, "crop_frames": 50}
        stage.setdefault("training", {})["average_checkpoints"] = 0
        stage.get("schedule", {}).update({"warmup_epochs": 0, "margin": "constant"})
    for name in ("noise_path", "rir_path"):
        del values["augment"][name]
    del values["data"], values["evaluation"]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    short = "--data.num_workers 0 --evaluation.eval_frames 80 --evaluation.bootstrap_samples 0"
    lists = small_lists(tiny_corpus, tmp_path, 1)
    line = f"train --config {tmp_path}/small.yaml --save_path {run} {lists} {short}"
    run_command(line)
    assert len(later_stages(run)) == 2
    for folder in ("", *(stage.name for stage in later_stages(run).values())):
        saved = read_own_checkpoint(run / folder / "last.pt")
        assert saved["training"]["state"]["epoch"] == 1


def small_lists(corpus, folder, utterances_per_speaker):
    """Options with four speakers that have enough utterances for two batches of four, and the
    trials of one utterance.
    """
    rows = [line for line in (corpus / "train_list.txt").read_text().splitlines() if line < "spk04"]
    kept = []
    for _, lines in itertools.groupby(rows, lambda line: line.split()[0]):
        kept += itertools.islice(lines, 2 * utterances_per_speaker)
    (folder / "train.txt").write_text("\n".join(kept) + "\n")
    trials = (corpus / "trials.txt").read_text().splitlines()
    (folder / "trials.txt").write_text("\n".join(trials[:4]) + "\n")
    paths = f"--train_path {corpus} --test_path {corpus}"
    return f"--train_list {folder}/train.txt --test_list {folder}/trials.txt {paths}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_of_the_readme(tmp_path):
    """The README's command as written, in an empty folder, in float32 so that any machine gives the
    same.
    """
    run = tmp_path / "exps" / "exp01"

    def demo(more=""):
        line = f"{ROOT}/trainSpeakerNet.py --config exp01.yaml --mixed-precision no {more}"
        command = [sys.executable, *line.split()]
        ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    printed = demo()
    results = results_of(run)
    assert 2 <= results["eer_percent"] <= 10
    assert " WARNING " not in (run / "log.txt").read_text() and "warnings:" not in printed
    assert printed.rstrip().endswith(SYNTHETIC_ONLY)
    assert "trained on synthetic voices only" in (run / "report.html").read_text()
    first, *_, last = records_of(run, "evaluation")
    assert last["eer_percent"] < first["eer_percent"]
    demo(f"--eval --initial_model {run}/best.pt")
    assert list((run / "eval").glob("*/scores.txt"))
