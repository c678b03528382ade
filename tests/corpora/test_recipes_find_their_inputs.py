"""From the outputs of the preparation to the inputs of every recipe: one set of names on both sides."""

from pathlib import Path

import pytest
import yaml
from preparation_corpora import (
    catalogue_entry,
    parts_of,
    run_data_prep,
    tar_tree,
    to_m4a,
    write_catalogue,
    write_voices,
    zip_tree,
)
from preparation_server import played_source

from speakernet.checks.lists import quick_check
from speakernet.config import load_config
from speakernet.corpora.voxceleb import RECIPE, RECIPE_INPUTS
from speakernet.data.lists import ListError, read_training_list, read_trials
from speakernet.data.opening import open_source

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TRIALS = (
    b"1 id10040/video0/00000.wav id10040/video0/00001.wav\n0 id10040/video0/00000.wav id10041/video0/00000.wav\n"
    b"1 id10041/video0/00000.wav id10041/video0/00001.wav\n"
)


def inputs_of(recipe: str) -> dict[str, str]:
    """Section.key -> path of every input that a recipe names itself."""
    sections = yaml.safe_load((CONFIGS / recipe).read_text(encoding="utf-8"))
    found = {f"{section}.{key}": value for section, keys in sections.items() for key, value in dict(keys).items()}
    return {name: value for name, value in found.items() if name.endswith(("_list", "_path")) and value}


# Presets, sizes and recipes for lists of one's own name no corpus.
RECIPES = [
    name
    for name in sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
    if any(one.startswith("data.") for one in inputs_of(name))
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, ffmpeg) -> Path:
    """A folder with `data/` as the scripts of data_prep leave it, made from tiny archives."""
    root = tmp_path_factory.mktemp("prepared")
    write_voices(root / "vox1_test", 2, 2, "wav/id1004{speaker}/video0/0000{utterance}.wav", 1.2)
    for name in write_voices(root / "plain", 3, 2, "id0000{speaker}/video0/0000{utterance}.wav", 1.2):
        to_m4a(ffmpeg, root / "plain" / name, root / "vox2_dev/dev/aac" / name.replace(".wav", ".m4a"))
    write_voices(root / "made", 1, 1, "musan/noise/free{speaker}/{utterance}.wav", 6.0)
    write_voices(root / "rooms", 1, 1, "RIRS_NOISES/simulated_rirs/smallroom/Room00{speaker}/{utterance}.wav", 0.2)
    write_voices(root / "rooms", 1, 1, "RIRS_NOISES/real_rirs_isotropic_noises/RWCP_rir_{speaker}_{utterance}.wav", 0.2)
    whole = zip_tree(root / "vox2_dev")
    parts = parts_of(whole, "vox2_dev_aac_part", 8)
    files = parts | {"vox1_test_wav.zip": zip_tree(root / "vox1_test")}
    lists = {"veri_test.txt": TRIALS, "veri_test2.txt": TRIALS}
    musan, rirs = {"musan.tar.gz": tar_tree(root / "made")}, {"rirs_noises.zip": zip_tree(root / "rooms")}
    corpora = {
        "voxceleb": catalogue_entry(files, {"vox2_dev_aac.zip": (list(parts), whole)}),
        "voxceleb_trials": catalogue_entry(lists),
        "musan": catalogue_entry(musan),
        "rirs": catalogue_entry(rirs),
    }
    with played_source(files | lists | musan | rirs) as source, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        table = write_catalogue(root / "table.yaml", source.address, corpora)
        steps = ("--all", "--augment", "--subsets", "vox2_dev", "vox1_test")
        assert run_data_prep("voxceleb", *steps, "--catalogue", table, "--jobs", 2) == 0
        small = ("--speakers", 2, "--utterances", 2, "--trial_speakers", 2, "--trial_utterances", 3)
        synthetic = ("--save_path", "data/synthetic", *small, "--noises", 3, "--rooms", 3)
        assert run_data_prep("synthetic", *synthetic) == 0
    return root


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_finds_what_the_preparation_makes(prepared, monkeypatch, recipe):
    inputs = inputs_of(recipe)
    monkeypatch.chdir(prepared)
    data = load_config(["--config", recipe]).config.data
    findings = quick_check(
        train_list=read_training_list(data.train_list),
        train_source=open_source(data.train_path),
        trials=[(read_trials(data.test_list), open_source(data.test_path))],
        min_utterances=1,
        max_bad_share=0.0,
        min_seconds=0.0,
    )
    assert [str(one) for one in findings if one.level == "error"] == []
    for name, path in inputs.items():
        assert name.startswith("data.") or any(Path(path).rglob("*.wav")), f"{name}: {path}"


def test_a_list_that_is_not_there_names_the_preparation(tmp_path):
    with pytest.raises(ListError, match=r"data_prep/voxceleb\.py"):
        read_training_list(tmp_path / "vox2_dev_list.txt")


def test_the_command_that_the_preparation_prints_trains_the_recipe(prepared, monkeypatch, capsys):
    assert {name: path for name, path in inputs_of(RECIPE).items() if name in RECIPE_INPUTS} == RECIPE_INPUTS
    monkeypatch.chdir(prepared)
    entry = catalogue_entry({})
    (prepared / "none.yaml").write_text(yaml.safe_dump({"voxceleb": entry, "voxceleb_trials": entry}))
    options = ("--lists", "--subsets", "vox2_dev", "--catalogue", "none.yaml")
    assert run_data_prep("voxceleb", *options) == 0
    assert capsys.readouterr().out.endswith(f"trainSpeakerNet.py --config {RECIPE}\n")
    assert run_data_prep("voxceleb", *options, "--save_path", prepared / "data") == 0
    command = capsys.readouterr().out.split(f"--config {RECIPE} ")[1].split()
    config = load_config(["--config", RECIPE, *command]).config
    assert config.data.train_list == str(prepared / "data/lists/vox2_dev_list.txt")
    assert config.augment.rir_path == str(prepared / "data/RIRS_NOISES/simulated_rirs")
