"""What models cost: the figures of the options classes are counted again, compared with published ones, and listed."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from speakernet.cli import main
from speakernet.models.options import FAMILIES, MODELS
from speakernet.models.speaker_net import SpeakerNet

FRAMES = 200
SAMPLES = 32000


def counted(name: str) -> tuple[int, int]:
    """Parameters, and multiplications with an addition from the features of 2 seconds to the embedding."""
    trunk = MODELS[name].options
    is_raw = trunk.published_mels == 0
    # What the front end computes is not counted, so any that gives as many bands will do.
    front_end, options = ("raw", {}) if is_raw else ("fbank", {"num_mels": trunk.published_mels})
    with torch.device("meta"):
        net = SpeakerNet.named(
            name, embedding_dim=trunk.published_dim, front_end=front_end, front_end_options=options
        ).eval()
        features = torch.empty(1, 1, SAMPLES) if is_raw else torch.empty(1, trunk.published_mels, FRAMES)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            net.from_features(features)
    return sum(parameter.numel() for parameter in net.parameters()), counter.get_total_flops() // 2


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
    parameters, macs = counted(name)
    assert parameters / 1e6 == pytest.approx(parameters_millions, rel=0.01)
    # Counters differ in whether they add what norms and activations do.
    assert macs / 1e9 == pytest.approx(macs_billions, rel=0.02)


# One of each trunk in the default suite; the other sizes take half a minute.
QUICK = {"ResNetSE34L", "RawNet3", "XVector", "ECAPA_TDNN", "ResNet18", "CAMPPlus", "ERes2NetBase", "ReDimNet2B0"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MODELS])
def test_the_figures_of_the_options_class_are_counted(name):
    trunk = MODELS[name].options
    assert (trunk.parameters, trunk.macs) == counted(name)


def test_every_model_says_who_published_it_and_no_two_sizes_cost_the_same():
    assert all(part.options.paper for part in MODELS.values())
    for sizes in FAMILIES.values():
        assert len({(part.options.parameters, part.options.macs) for part in sizes.values()}) == len(sizes)


def test_the_list_shows_what_models_cost_and_the_options_of_a_family_once(capsys):
    assert main(["list", "models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("  CAMPPlus"))
    assert row.split() == ["CAMPPlus", "7,176,224", "1.07", "G", "512", "80", "Wang", "et", "al.", "2023"]
    assert "raw" in next(line for line in lines if "RawNet3" in line)
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= set(MODELS)
    widths = [line for line in lines if "model.options.channels = 512 or 1024: Channels of the blocks" in line]
    assert len(widths) == 1


ROWS = re.findall(
    r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([\d.]+) M \| ([\d.]+) G \|",
    (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


def test_the_documentation_has_a_row_for_every_published_size():
    others = {"ResNetSE34L", "ResNetSE34V2", "ResNet", "VGGVox", "RawNet3"}
    assert {name for name, _, _ in ROWS} == set(MODELS) - others


@pytest.mark.parametrize(("name", "parameters", "macs"), ROWS)
def test_the_documented_sizes_are_those_of_the_options_class(name, parameters, macs):
    trunk = MODELS[name].options
    assert (parameters, macs) == (f"{trunk.parameters / 1e6:.2f}", f"{trunk.macs / 1e9:.2f}")
