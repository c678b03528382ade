"""Prepared corpora train: every recipe finds its inputs, and printed commands and written
configurations run.
"""

import json
from pathlib import Path

import pytest
import yaml
from preparation_corpora import run_data_prep, write_catalogue, write_voices
from preparation_server import fake_source

from speakernet.checks.lists import quick_check
from speakernet.config import load_config
from speakernet.data.lists import read_training_list, read_trials
from speakernet.data.opening import open_source
from tests.commands import run_command
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "configs"


def inputs_of(recipe):
    """Section.key -> path of every input named by a recipe."""
    inputs = {}
    for section, keys in yaml.safe_load((CONFIGS / recipe).read_text(encoding="utf-8")).items():
        for key, value in dict(keys).items():
            if key.endswith(("_list", "_path")) and value:
                inputs[f"{section}.{key}"] = value
    return inputs


# Presets, sizes and recipes for own lists name no corpus.
RECIPES = [
    name
    for name in sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
    if any(key.startswith("data.") for key in inputs_of(name))
    # test_corpora.py makes the inputs of this one.
    and name != "preset_cnceleb.yaml"
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, published):
    """A folder with `data/` as prepared by the scripts of data_prep from tiny archives."""
    root = tmp_path_factory.mktemp("prepared")
    with fake_source(published.files) as source, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        table = write_catalogue(root / "table.yaml", source.address, published.corpora)
        options = f"--subsets vox2_dev vox1_test --catalogue {table} --jobs 2"
        run_data_prep("voxceleb", "--all --augment --pack", options)
        run_data_prep("voxceleb", "--convert --format flac", options)
        small = (
            "--save_path data/synthetic --speakers 2 --utterances 2 --trial_speakers 2 "
            "--trial_utterances 3 --noises 3 --rooms 3"
        )
        run_data_prep("synthetic", small)
    names = (root / "data/lists/vox2_dev_list.txt").read_text()
    (root / "data/lists/flac_list.txt").write_text(names.replace(".wav", ".flac"))
    return root


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_of_recipes(prepared, monkeypatch, recipe):
    inputs = inputs_of(recipe)
    monkeypatch.chdir(prepared)
    data = load_config(["--config", recipe]).config.data
    findings = quick_check(
        train_list=read_training_list(data.train_list),
        train_source=open_source(data.train_path),
        trials=[(read_trials(data.test_list), open_source(data.test_path))],
        **{"min_utterances": 1, "max_bad_share": 0.0, "min_seconds": 0.0},
    )
    assert [str(finding) for finding in findings if finding.level == "error"] == []
    for name, path in inputs.items():
        is_there = Path(path).is_file() or any(Path(path).rglob("*.wav"))
        assert name.startswith("data.") or is_there, f"{name}: {path}"


QUICK = "--runtime.device cpu --data.num_workers 0 --runtime.precision no --training.max_epochs 1"
TINY = (
    "--model ResNet --model.options.channels 8 --model.options.blocks [1] "
    "--model.options.stem_stride 4"
)


def train(folder, line):
    words = f"train {QUICK} {line} --training.save_path {folder}"
    run_command(words)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    ("list_name", "below", "trials"),
    [
        ("flac_list.txt", "voxceleb2/dev/flac", "voxceleb1/wav"),
        ("vox2_dev_packed_list.txt", "packed/vox2_dev", "packed/vox1"),
    ],
)
def test_prepared_corpora_train(prepared, tmp_path, monkeypatch, list_name, below, trials):
    monkeypatch.chdir(tmp_path)
    data = prepared / "data"
    lines = (
        f"{TINY} --data.train_list {data}/lists/{list_name} --data.train_path {data}/{below}",
        f"--data.test_list {data}/lists/veri_test2.txt --data.test_path {data}/{trials}",
        "--data.batch_size 8 --data.crop_frames 60 --evaluation.eval_frames 60",
    )
    assert train(tmp_path / "run", " ".join(lines))["num_trials"] == 3


def test_written_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_voices(tmp_path / "voices", 10, 4, "spk{speaker}/{utterance}.wav", 0.8)
    run_data_prep("folder", tmp_path / "voices", f"--save_path {tmp_path}/out --jobs 2")
    line = f"--config small_data.yaml --config {tmp_path}/out/out.yaml --model.options.channels 8"
    assert 0 <= train(tmp_path / "run", line)["eer_percent"] <= 100
