"""docs/voxceleb.md: what it works out is worked out right, and what it says of recipes and steps is theirs."""

import re
from pathlib import Path

import yaml

from speakernet.corpora.catalogue import load_corpus

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "voxceleb.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
UTTERANCES = 1_092_009


def test_what_the_page_works_out() -> None:
    hours = 2442 * UTTERANCES / 1_128_246
    dev, one = round(hours * 0.1152), round(352 * 0.1152)
    seconds = hours * 3600 / UTTERANCES
    facts = [
        f"2,442 x 1,092,009 / 1,128,246 = {hours:,.0f}",
        f"VoxCeleb2 dev as WAV, {hours:,.0f} h | {dev} |",
        f"VoxCeleb1 as WAV, 352 h (published) | {one} |",
        f"{115 + 78 + dev + one} GB of VoxCeleb at the fullest and {dev + one} GB in the end",
        f"it takes {115 + dev + one} GB, and {dev + one} GB in the end",
        f"150 GB instead of {dev}",
        f"115e9 x 8 / 100e6 = {115e9 * 8 / 100e6:,.0f} s, {115e9 * 8 / 100e6 / 3600:.1f} hours; at 1 Gbit/s 15 minutes",
        f"files of {seconds:.2f} s are 1,092,009 x (20 / 16 + 3 x {seconds:.2f} / 4) ms = "
        f"{UTTERANCES * (20 / 16 + 3 * seconds / 4) / 3.6e6:.1f} hours of one core",
        f"1,092,009 / 2,220 s = {UTTERANCES / (37 * 60):.0f} crops a second",
        f"150 such epochs would be {150 * 37 / 60:.1f} hours",
        f"with a price of 1 for an hour and {150 * 37 / 60:.1f} hours that is {150 * 37 / 60:.1f}, plus {dev + one} GB",
    ]
    assert [fact for fact in facts if fact.casefold() not in TEXT.casefold()] == []


def test_hours_follow_from_the_measured_steps() -> None:
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) s \| ([\d.]+) \| ([\d.]+) h \| (\d+) days \|", PAGE, flags=re.MULTILINE)
    assert len(rows) == 3
    for name, step, rate, epoch, days in rows:
        assert f"| `{name}` | {step} s" in models, name
        hours = UTTERANCES / 16 * float(step) / 3600
        worked_out = (f"{16 / float(step):.1f}", f"{hours:.1f}", f"{150 * hours / 24:.0f}")
        assert (rate, epoch, days) == worked_out, name


def test_the_table_of_recipes_is_whole_and_theirs() -> None:
    rows = re.findall(r"^\| `(\w+\.yaml)` \| ([\d +]+) \| (\w+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    folder = ROOT / "configs" / "voxceleb"
    assert sorted(name for name, *_ in rows) == sorted(path.name for path in folder.glob("*.yaml"))
    for name, epochs, trials, published in rows:
        text = (folder / name).read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
        training = recipe["training"]
        stages = [training["max_epochs"], training.get("large_margin_epochs", 0)]
        assert epochs == " + ".join(str(stage) for stage in stages if stage), name
        lists = {"original": "veri_test.txt", "cleaned": "veri_test2.txt"}
        assert recipe["data"]["test_list"].endswith("/" + lists[trials]), name
        for figure in re.findall(r"\d\.\d\d", published):
            assert figure in text.split("data:\n")[0], (name, figure)


def test_it_names_the_published_lists_and_the_recipes_inputs() -> None:
    names = set(re.findall(r"`((?:veri_test|list_test)\w*\.txt)`", PAGE))
    assert names == set(load_corpus("voxceleb_trials").files)
    resnet = (ROOT / "configs" / "voxceleb" / "resnet34.yaml").read_text(encoding="utf-8")
    assert "cohort_size: 300" in resnet and "with the 300 nearest" in TEXT
