"""Every recipe trains an epoch on a tiny corpus, and the README's demo keeps its promise (slow)."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speakernet.assembly.large_margin import large_margin_config
from speakernet.assembly.schedule_table import ScheduledEpoch, scheduled_epochs
from speakernet.cli import main
from speakernet.config import Config, load_config

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml"))


def recipe_config(recipe: str) -> Config:
    """Presets and sizes only make sense on top of an experiment."""
    base = ["--config", "exp01.yaml"] if recipe.startswith(("preset", "test")) else []
    return load_config([*base, "--config", recipe]).config


def wespeaker_rate(epoch: float, first: float, last: float, num_epochs: int, warmup: int, batch_size: int) -> float:
    """ExponentialDecrease of wespeaker/utils/schedulers.py with warm_from_zero, after `epoch` epochs."""
    scale = batch_size / 64
    coefficient = scale * epoch / warmup if epoch < warmup else scale
    return coefficient * first * math.exp(epoch / num_epochs * math.log(last / first))


def wespeaker_margin(epoch: float, final: float = 0.2, start: int = 20, fix: int = 40) -> float:
    """MarginScheduler of the same file: its epochs are counted from 1."""
    if epoch >= fix - 1:
        return final
    share = (epoch - (start - 1)) / (fix - start)
    return final * (1 - math.exp(share * math.log(1e-3 / (1 + 1e-6)))) if share >= 0 else 0.0


def half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def ramp(epoch: float, begin: float, end: float, full: float = 0.2) -> float:
    return full * min(1.0, max(0.0, (epoch - begin) / (end - begin)))


# Recipe -> (epoch, learning rate, margin) at the beginning of the first epoch, around the ramp, at the end of the last.
# An epoch counts what is finished. The very first rate is a thousandth of the top where the source warms up from 0.
_EXP01 = [(0, 2e-6, 0.0), *((e, half_cosine(2e-3, 1e-5, (e - 1) / 15), ramp(e, 2, 7)) for e in (2, 4, 7, 16))]
PUBLISHED: dict[str, list[tuple[float, float, float | None]]] = {
    "voxceleb/resnet34.yaml": [
        (0, 4e-4, 0.0),
        *(
            (epoch, wespeaker_rate(epoch, 0.1, 5e-5, 150, 6, 256), wespeaker_margin(epoch))
            for epoch in (1, 5, 6, 19, 20, 28, 38, 39, 149, 150)
        ),
    ],
    "voxceleb/rawnet3_aam.yaml": [(e, 1e-3 * 0.75 ** (e // 10), 0.1) for e in (0, 1, 499)],
    "voxceleb/resnet_se34l_ap.yaml": [(e, 1e-3 * 0.95 ** (e // 10), None) for e in (0, 1, 499)],
    "voxceleb/resnet_se34v2_ap.yaml": [(e, 1e-3 * 0.95 ** (e // 10), None) for e in (0, 1, 499)],
    "production.yaml": [
        (0, 1e-4, 0.0),
        *((e, 0.1 * (5e-4) ** ((e - 6) / 144), ramp(e, 20, 40)) for e in (6, 20, 21, 30, 40, 149, 150)),
    ],
    "speechocean.yaml": [(0, 1e-6, 0.2), *((e, half_cosine(1e-3, 1e-6, (e - 1) / 39), 0.2) for e in (1, 39, 40))],
    "speechocean_fast.yaml": [
        (0, 2e-6, 0.0),
        *((e, half_cosine(2e-3, 1e-5, (e - 2) / 43), ramp(e, 5, 20)) for e in (2, 5, 12, 20, 45)),
    ],
    "finetune.yaml": [(e, half_cosine(1e-3, 1e-5, e / 10), 0.2) for e in (0, 1, 5, 9, 10)],
    "exp01.yaml": _EXP01,
    "preset_balanced.yaml": _EXP01,
    "preset_fast.yaml": _EXP01,
    "preset_reproducible.yaml": _EXP01,
    "test.yaml": [(0, 2e-6, 0.0), (1, 2e-3, 0.0), (2, 1e-5, 0.0)],
}


def at(rows: list[ScheduledEpoch], stage: str) -> dict[int, tuple[float, float | None]]:
    """Finished epochs -> learning rate and margin, from the rows of one stage."""
    found: dict[int, tuple[float, float | None]] = {}
    for row in rows:
        if row.stage == stage:
            first, last = row.margins or (None, None)
            found[row.epoch - 1] = (row.learning_rates[0], first)
            found.setdefault(row.epoch, (row.learning_rates[1], last))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedules_are_those_of_the_sources(recipe: str) -> None:
    found = at(scheduled_epochs(recipe_config(recipe)), "")
    expected = [one for one in PUBLISHED[recipe] if one[0] in found]
    # First, ramp and last epoch are in the table; the published values are worked out for no fewer.
    assert {min(found), max(e for e, _, _ in PUBLISHED[recipe])} <= {epoch for epoch, _, _ in expected}
    assert len(expected) >= min(3, len(PUBLISHED[recipe]))
    for epoch, rate, margin in expected:
        assert found[int(epoch)][0] == pytest.approx(rate, rel=1e-6), epoch
        # Ours is divided by 0.999, so that it ends at the full margin
        assert found[int(epoch)][1] == (None if margin is None else pytest.approx(margin, rel=1.1e-3)), epoch


def test_the_large_margin_stage_of_resnet34_is_the_sources() -> None:
    config = recipe_config("voxceleb/resnet34.yaml")
    found = at(scheduled_epochs(config), "large-margin stage")
    assert found[0] == (pytest.approx(2e-7), 0.5)
    for epoch in (1, 4, 5):
        assert found[epoch] == (pytest.approx(wespeaker_rate(epoch, 1e-4, 2.5e-5, 5, 1, 128)), 0.5)
    stage = large_margin_config(config)
    assert (stage.training.max_epochs, stage.data.batch_size, stage.data.crop_frames) == (5, 128, 600)
    assert stage.augment.speed_factors == [1.0] and stage.augment.probability == 0.6


# What the sources say, beside the schedules: wespeaker's resnet.yaml and run.sh; voxceleb_trainer's configs/, defaults
# and the command lines of its README.
_TRAINER = {
    "optimizer.name": "adam",
    "optimizer.learning_rate": 1e-3,
    "training.max_epochs": 500,
    "training.test_interval": 10,
    "training.max_grad_norm": 0,
    "data.max_utterances_per_speaker": 500,
    "data.sampler": "balanced",
    "evaluation.eval_frames": 400,
    "evaluation.num_crops": 10,
    "evaluation.score": "mean_distance",
}
_PAIRS = {
    **_TRAINER,
    "frontend.log_input": True,
    "data.batch_size": 200,
    "data.utterances_per_speaker": 2,
    "data.crop_frames": 200,
}
_PAIRS |= {"optimizer.weight_decay": 0.0, "model.embedding_dim": 512}
_ROOMS = "data/RIRS_NOISES/simulated_rirs"
SOURCES = {
    "voxceleb/resnet34.yaml": {
        "data.batch_size": 256,
        "data.crop_frames": 200,
        "data.min_seconds": 1.0,
        "augment.probability": 0.6,
        "augment.rir_path": _ROOMS,
        "augment.speed_factors": [0.9, 1.0, 1.1],
        "augment.noise_snr_db": [0, 15],
        "augment.music_snr_db": [5, 15],
        "augment.babble_snr_db": [10, 30],
        "augment.babble_speakers": [1, 1],
        "frontend.name": "fbank",
        "frontend.num_mels": 80,
        "frontend.dither": 1.0,
        "frontend.window": "hamming",
        "frontend.normalize": "mean",
        "frontend.scale": 32768,
        "frontend.spec_augment": False,
        "model.pooling": "TSTP",
        "model.embedding_dim": 256,
        "loss.name": "aamsoftmax",
        "loss.scale": 32,
        "loss.easy_margin": False,
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.9,
        "optimizer.nesterov": True,
        "optimizer.weight_decay": 1e-4,
        "optimizer.decay_norms_and_biases": True,
        "training.max_grad_norm": 0,
        "training.average_checkpoints": 10,
        "training.accumulation_steps": 1,
        "evaluation.score": "cosine",
        "evaluation.eval_frames": 0,
        "evaluation.subtract_mean": True,
        "evaluation.score_norm": "as",
        "evaluation.cohort_size": 300,
        "evaluation.cohort_utterances": 0,
    },
    "voxceleb/rawnet3_aam.yaml": {
        **_TRAINER,
        "data.batch_size": 32,
        "data.utterances_per_speaker": 1,
        "data.crop_frames": 300,
        "augment.enabled": True,
        "augment.style": "classic",
        "augment.rir_path": _ROOMS,
        "model.pooling": "ECA",
        "model.embedding_dim": 256,
        "model.options": {"sinc_stride": 10},
        "loss.name": "aamsoftmax",
        "loss.margin": 0.1,
        "loss.scale": 30,
        "optimizer.weight_decay": 5e-5,
        "optimizer.decay_norms_and_biases": True,
    },
    "voxceleb/resnet_se34l_ap.yaml": {
        **_PAIRS,
        "augment.enabled": False,
        "frontend.num_mels": 40,
        "model.pooling": "SAP",
        "loss.name": "angleproto",
    },
    "voxceleb/resnet_se34v2_ap.yaml": {
        **_PAIRS,
        "augment.enabled": True,
        "augment.style": "classic",
        "augment.rir_path": _ROOMS,
        "frontend.num_mels": 64,
        "model.pooling": "ASP",
        "loss.name": "softmaxproto",
    },
}


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.startswith("voxceleb/")])
def test_values_are_those_of_the_sources(recipe: str) -> None:
    config = recipe_config(recipe)
    for key, value in SOURCES[recipe].items():
        found = functools.reduce(getattr, key.split("."), config)
        assert found == value or (isinstance(value, dict) and vars(found) == {**vars(found), **value}), key


def test_a_schedule_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "--config", "voxceleb/resnet34.yaml", "--schedule"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert rows["epoch"] == ["learning rate", "margin"]
    assert rows["150"] == ["0.00021 to 0.0002", "0.2"]
    assert rows["5 of the large-margin stage"] == ["6.6e-05 to 5e-05", "0.5"]


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
    # No model is given here; what starts from one is tried in tests/assembly/test_initial_model.py.
    options += ["--training.freeze_epochs", "0", "--training.freeze_norm_statistics", "false"]
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
