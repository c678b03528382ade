"""What models cost: against published counts, and in `speakernet list models`."""

import re
from pathlib import Path

import pytest

from speakernet.cli import main
from speakernet.models import MODELS
from speakernet.models.sizes import size_of


@pytest.mark.parametrize(
    ("name", "parameters_millions", "macs_billions"),
    [
        ("XVector", 4.61, 0.53),
        ("ECAPA_TDNN", 6.19, 1.04),
        ("ECAPA_TDNN_1024", 14.65, 2.65),
        ("ResNet34", 6.63, 4.55),
        ("ReDimNet2B4", 6.6, 4.62),
    ],
)
def test_published_counts(name, parameters_millions, macs_billions):
    size = size_of(name)
    assert size.parameters / 1e6 == pytest.approx(parameters_millions, rel=0.01)
    # Counters differ in whether they add what norms and activations do.
    assert size.macs / 1e9 == pytest.approx(macs_billions, rel=0.02)


def test_every_model_says_who_published_it():
    assert all(trunk.paper for trunk in MODELS.values())


def test_the_list_shows_what_models_cost(capsys, monkeypatch):
    shown = {name: MODELS[name] for name in ("RawNet3", "CAMPPlus")}
    monkeypatch.setattr("speakernet.models.MODELS", shown)
    assert main(["list", "models"]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "CAMPPlus" in line)
    assert row.split() == ["CAMPPlus", "7,176,224", "1.07", "G", "512", "80", "Wang", "et", "al.", "2023"]
    assert "raw" in next(line for line in printed.splitlines() if "RawNet3" in line)


ROWS = re.findall(
    r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([\d.]+) M \| ([\d.]+) G \|",
    (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


def test_the_documentation_has_a_row_for_every_published_size():
    others = {"ResNetSE34L", "ResNetSE34V2", "ResNet", "VGGVox", "RawNet3"}
    assert {name for name, _, _ in ROWS} == set(MODELS) - others


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters", "macs"), ROWS)
def test_the_documented_sizes_are_counted(name, parameters, macs):
    size = size_of(name)
    assert (parameters, macs) == (f"{size.parameters / 1e6:.2f}", f"{size.macs / 1e9:.2f}")
