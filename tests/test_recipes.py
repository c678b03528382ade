"""Recipes equal their sources, are built at full size and train on a tiny corpus; the README's
demo.
"""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from speakernet.assembly.fine_tuning import scheduled_epochs
from speakernet.assembly.training import build_loss, build_model, refuse_impossible
from speakernet.checkpoint import read_own_checkpoint
from speakernet.cli import main
from speakernet.config import load_config
from speakernet.config.schema import stages_of
from speakernet.models.model_file import SYNTHETIC_ONLY
from speakernet.run_folder import later_stages
from speakernet.training.optimizers import create_optimizer
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
--data.min_seconds 0 --data.max_seconds 0 --training.max_epochs 1 --training.accumulation_steps 1
--runtime.compile off --evaluation.eval_frames 80 --evaluation.num_crops 1
--evaluation.score_norm none --evaluation.bootstrap_samples 0 --evaluation.quality_measures []
--training.stages [] --training.freeze_epochs 0 --training.freeze_norm_statistics false
--training.initial_weight 0
"""


def recipe_config(recipe):
    base = ["--config", "exp01.yaml"] if recipe.startswith(("preset", "test")) else []
    return load_config([*base, "--config", recipe]).config


def at(rows, stage):
    """Finished epochs -> learning rate and margin, from the rows of one stage."""
    found: dict[int, tuple[float, float | None]] = {}
    for row in rows:
        if row.stage == stage:
            first, last = row.margins or (None, None)
            found[row.epoch - 1] = (row.learning_rates[0], first)
            found.setdefault(row.epoch, (row.learning_rates[1], last))
    return found


def assert_follows(found, source):
    """The table shows the source's values, including those of its first and last moments."""
    expected = [one for one in source if one[0] in found]
    assert {min(found), max(epoch for epoch, _, _ in source)} <= {epoch for epoch, _, _ in expected}
    assert len(expected) >= min(3, len(source))
    for epoch, rate, margin in expected:
        assert found[int(epoch)][0] == pytest.approx(rate, rel=1e-6), epoch
        # Ours is divided by 0.999 to end at the full margin.
        assert found[int(epoch)][1] == (
            None if margin is None else pytest.approx(margin, rel=1.1e-3)
        ), epoch


def assert_has(config, values):
    for key, value in values.items():
        found = functools.reduce(getattr, key.split("."), config)
        assert found == value or (
            isinstance(value, dict) and vars(found) == {**vars(found), **value}
        ), key


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedules(recipe):
    text = (ROOT / "configs" / recipe).read_text(encoding="utf-8")
    assert text.startswith("# "), "the first line describes the recipe"
    config = recipe_config(recipe)
    first, *later = stages_of(config)
    assert_follows(at(scheduled_epochs(config), first), SCHEDULES[recipe])
    expected = LATER_STAGES.get(recipe, {})
    values = LATER_VALUES.get(recipe, {})
    if recipe in SECOND_STAGES:
        expected = {"large_margin": SECOND_STAGES[recipe]}
        values = {"large_margin": SECOND_STAGE_VALUES[recipe]}
    assert later == list(expected)
    for name, moments in expected.items():
        assert_follows(at(scheduled_epochs(config), name), moments)
        assert_has(stages_of(config)[name], values[name])


@pytest.mark.parametrize("recipe", VOXCELEB)
def test_values(recipe):
    config = recipe_config(recipe)
    assert_has(next(iter(stages_of(config).values())), VALUES[recipe])
    text = (ROOT / "configs" / recipe).read_text(encoding="utf-8")
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "Published EER on VoxCeleb1-O" in head and "not reproduced by this project" in head
    assert "Source: " in head and any(
        name in head for name in ("wespeaker", "3D-Speaker", "voxceleb_trainer")
    )
    # Only the authors of the w2v-BERT recipe synchronise it.
    synchronised = "on" if recipe == "voxceleb/w2v_bert.yaml" else "off"
    assert config.runtime.sync_batch_norm == synchronised
    assert (
        config.training.final_model == "last"
        or "best epoch on the reported list" in text.splitlines()[0]
    )


@pytest.mark.parametrize("recipe", [one for one in VOXCELEB if one not in LATER_STAGES])
def test_full_size(recipe):
    config = recipe_config(recipe)
    net = build_model(config)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    assert parameters / 1e6 == pytest.approx(PARAMETERS[recipe], rel=0.01)
    classes = VOXCELEB2_SPEAKERS * len(config.augment.speed_factors)
    loss = build_loss(config, classes)
    heads = [tuple(one.shape) for one in loss.parameters() if one.ndim == 2]
    assert heads == (
        [] if config.loss.name == "angleproto" else [(classes, config.model.embedding_dim)]
    )
    refuse_impossible(config, net, torch.device("cpu"))
    optimizer = create_optimizer(config.optimizer, [net, loss], torch.device("cpu"))
    held = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    trained = [one for part in (net, loss) for one in part.parameters() if one.requires_grad]
    assert held == sum(one.numel() for one in trained)


def test_schedule_as_a_table(capsys):
    assert main(["show-config", "--config", "voxceleb/resnet34.yaml", "--schedule"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert rows["epoch"] == ["learning rate", "margin"]
    assert rows["150 of the base stage"] == ["0.00021 to 0.0002", "0.2"]
    assert rows["5 of the large_margin stage"] == ["6.6e-05 to 5e-05", "0.5"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [one for one in RECIPES if one not in LATER_STAGES])
def test_every_recipe_trains(recipe, tiny_corpus, tmp_path):
    """Two steps of 4 utterances (or speakers, if in pairs) with the recipe's network, short crops,
    an evaluation.
    """
    run = tmp_path / "run"
    config = recipe_config(recipe)
    options = ["--config", "exp01.yaml"] if "preset" in recipe else []
    options += ["--config", recipe, "--data.synthetic_corpus", "", "--save_path", str(run)]
    train_list, trials = small_lists(tiny_corpus, tmp_path, config.data.utterances_per_speaker)
    options += f"--train_list {train_list} --test_list {trials}".split()
    options += f"--train_path {tiny_corpus} --test_path {tiny_corpus}".split()
    unset = (
        "augment.noise_path",
        "augment.rir_path",
        "validation_list",
        "validation_path",
        "data.enrolment_list",
        "initial_model",
    )
    unset += ("evaluation.calibration_list", "evaluation.calibration_path")
    options += [word for name in unset for word in (f"--{name}", "")]
    # Recipes that start from a model file are tested in tests/assembly/test_initial_model.py.
    options += SHORT.split()
    assert main(["train", *options]) == 0
    assert (run / "best.pt").is_file()
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("step", 0) for line in epochs) == 2


@pytest.mark.slow
@pytest.mark.needs("transformers", "peft")
@pytest.mark.parametrize("recipe", LATER_STAGES)
def test_every_stage_of_a_recipe_trains(recipe, tiny_corpus, tmp_path):
    """Two steps of each stage behind a tiny backbone of the recipe's kind."""
    from tests.models.test_pretrained import make

    train_list, trials = small_lists(tiny_corpus, tmp_path, 1)
    values = yaml.safe_load((ROOT / "configs" / recipe).read_text())
    kinds = {"microsoft/wavlm-base-plus": "wavlm", "microsoft/wavlm-large": "wavlm large"}
    options = values["model"]["options"]
    options["backbone"] = str(
        make(tmp_path / "backbone", kinds.get(options["backbone"], "w2v-bert"))
    )
    for stage in values["training"]["stages"]:
        stage["epochs"] = 1
        stage["data"] = {"batch_size": 4, "crop_frames": 50}
        stage.setdefault("training", {})["average_checkpoints"] = 0
        stage.get("schedule", {}).update({"warmup_epochs": 0, "margin": "constant"})
    del (
        values["data"],
        values["augment"]["noise_path"],
        values["augment"]["rir_path"],
        values["evaluation"],
    )
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    lists = f"--train_list {train_list} --test_list {trials}".split()
    paths = (
        f"--train_path {tiny_corpus} --test_path {tiny_corpus} --save_path {tmp_path}/run"
    ).split()
    short = [
        "--data.num_workers",
        "0",
        "--evaluation.eval_frames",
        "80",
        "--evaluation.bootstrap_samples",
        "0",
    ]
    assert main(["train", "--config", str(tmp_path / "small.yaml"), *lists, *paths, *short]) == 0
    for folder in ("", *(one.name for one in later_stages(tmp_path / "run").values())):
        assert (
            read_own_checkpoint(tmp_path / "run" / folder / "last.pt")["training"]["state"]["epoch"]
            == 1
        )
    assert len(later_stages(tmp_path / "run")) == 2


def small_lists(corpus, folder, utterances_per_speaker):
    """Four speakers with enough utterances for two batches of four, and the trials of one
    utterance.
    """
    rows = [line for line in (corpus / "train_list.txt").read_text().splitlines() if line < "spk04"]
    by_speaker = itertools.groupby(rows, lambda line: line.split()[0])
    kept = [
        line
        for _, lines in by_speaker
        for line in itertools.islice(lines, 2 * utterances_per_speaker)
    ]
    (folder / "train.txt").write_text("\n".join(kept) + "\n")
    trials = (corpus / "trials.txt").read_text().splitlines()
    (folder / "trials.txt").write_text("\n".join(trials[:4]) + "\n")
    return folder / "train.txt", folder / "trials.txt"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_of_the_readme(tmp_path):
    """The README's command as written, in an empty folder, in float32 so that any machine gives the
    same.
    """
    script = str(ROOT / "trainSpeakerNet.py")
    command = f"{sys.executable} {script} --config exp01.yaml --mixed-precision no".split()
    trained = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr[-3000:]
    run = tmp_path / "exps" / "exp01"
    results = json.loads((run / "results.json").read_text())
    assert 2 <= results["eer_percent"] <= 10
    assert " WARNING " not in (run / "log.txt").read_text() and "warnings:" not in trained.stdout
    assert (
        trained.stdout.rstrip().endswith(SYNTHETIC_ONLY)
        and "trained on synthetic voices only" in (run / "report.html").read_text()
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["eer_percent"] for line in lines if line["kind"] == "evaluation"]
    assert evaluations[-1] < evaluations[0]
    scored = subprocess.run(
        [*command, "--eval", "--initial_model", str(run / "best.pt")],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert scored.returncode == 0, scored.stderr[-3000:]
    assert list((run / "eval").glob("*/scores.txt"))
