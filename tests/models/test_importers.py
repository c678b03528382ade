"""Checkpoints of voxceleb_trainer: every architecture and pooling against golden outputs of its
code (f51bab8).

The golden file has the names and shapes of its parameters, and its outputs with weights drawn from
those names, so the importer is tested on checkpoints that are independent of it.
"""

import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from speakernet.losses.options import LOSSES
from speakernet.models.importers.voxceleb_trainer import recognize
from speakernet.models.model_file import load_initial_weights, load_model_file
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create
from tests.commands import run_command
from tests.models.test_published_models import draw

HERE = Path(__file__).parent
GOLDEN = json.loads(lzma.decompress((HERE / "golden_voxceleb_trainer.json.xz").read_bytes()))


def golden_waves():
    """Two utterances of 1.5 s: fading noise, and the same with a rumble."""
    waves = 0.1 * np.random.RandomState(1).standard_normal((2, 24000)) * np.linspace(1, 0.2, 24000)
    waves[1] = np.cumsum(waves[1]) * 0.05
    return torch.from_numpy(waves.astype(np.float32))


def embed(net):
    return net.embed(golden_waves(), torch.tensor([24000, 24000]), sample_rate=16000)


def network_for(case):
    options = dict(case["options"])
    model_options = {"sinc_stride": options.pop("sinc_stride")} if "sinc_stride" in options else {}
    front_end = {"num_mels" if name == "n_mels" else name: value for name, value in options.items()}
    return SpeakerNet.named(
        case["model"], case["pooling"], 16, model_options, front_end_options=front_end
    )


def foreign_state(case, prefix="__S__."):
    """A state dictionary as its code saves it, without constants."""
    return {
        prefix + name: draw(name, tuple(shape), gain=2) for name, shape in case["tensors"].items()
    }


def case_of(model, pooling):
    return next(case for case in GOLDEN if (case["model"], case["pooling"]) == (model, pooling))


LIGHT = case_of("ResNetSE34L", "SAP")


def loss_of(name, num_classes=5):
    return create(LOSSES[name], LOSSES[name].options(), embedding_dim=16, num_classes=num_classes)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['model']}-{case['pooling']}")
def test_golden_embeddings(case, tmp_path):
    state = foreign_state(case)
    assert recognize(foreign_state(case, prefix="")) == case["model"]
    torch.save(
        {"model_state_dict": state, "optimizer_state_dict": {}, "epoch": 3},
        tmp_path / "model.model",
    )
    net = network_for(case)
    assert sum(parameter.numel() for parameter in net.parameters()) == case["num_parameters"]
    report = load_initial_weights(net, None, tmp_path / "model.model")
    assert report.num_loaded == len(state) and report.source == "voxceleb_trainer"
    # Normalised, as for scoring: float32 rounding grows with the drawn weights.
    expected = torch.nn.functional.normalize(torch.tensor(case["embeddings"]))
    found = torch.nn.functional.normalize(embed(net))
    assert_close(found, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {
            "model": {name.removeprefix("__S__."): value for name, value in state.items()}
        },
        lambda state: {
            name.replace("__S__.", "__S__._orig_mod."): value for name, value in state.items()
        },
    ],
)
def test_every_shape_of_file(wrap, tmp_path):
    state = foreign_state(LIGHT)
    torch.save(wrap(state), tmp_path / "file.model")
    net = network_for(LIGHT)
    assert load_initial_weights(net, None, tmp_path / "file.model").num_loaded == len(state)
    assert_close(embed(net), torch.tensor(LIGHT["embeddings"]), atol=1e-4, rtol=1e-5)


SCALE = {"w": torch.tensor(12.0), "b": torch.tensor(-3.0)}
LINEAR = {"fc.weight": torch.rand(5, 16), "fc.bias": torch.rand(5)}
HEADS = [
    (loss_of("amsoftmax"), {"W": torch.rand(16, 5)}),
    (loss_of("aamsoftmax"), {"weight": torch.rand(5, 16)}),
    (loss_of("softmax"), LINEAR),
    (loss_of("angleproto"), SCALE),
    (
        loss_of("softmaxproto"),
        {f"softmax.{name}": value for name, value in LINEAR.items()}
        | {f"angleproto.{name}": value for name, value in SCALE.items()},
    ),
]


@pytest.mark.parametrize(("loss", "head"), HEADS, ids=lambda part: type(part).__name__)
def test_heads(loss, head, tmp_path):
    state = foreign_state(LIGHT) | {f"__L__.{name}": value for name, value in head.items()}
    report = load_initial_weights(network_for(LIGHT), loss, save(state, tmp_path))
    assert report.head == "loaded" and report.not_loaded == []
    loaded = sorted(parameter.sum().item() for parameter in loss.parameters())
    assert loaded == pytest.approx(sorted(value.sum().item() for value in head.values()), rel=1e-5)


def test_other_speakers_and_unknown_parameters(tmp_path, caplog):
    state = foreign_state(LIGHT) | {
        "__L__.weight": torch.rand(5994, 16),
        "__S__.speed.weight": torch.zeros(3),
    }
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}}, tmp_path / "file.model")
    loss = loss_of("aamsoftmax", 7)
    before = loss.weight.clone()
    with caplog.at_level("INFO"):
        report = load_initial_weights(network_for(LIGHT), loss, tmp_path / "file.model")
    assert report.head == "new" and torch.equal(loss.weight, before)
    for words in (
        "(5994, 16)",
        "(7, 16)",
        "optimizer_state_dict",
        "speed.weight (3,) (no such parameter",
    ):
        assert words in caplog.text


def save(state, tmp_path):
    torch.save({"model_state_dict": state}, tmp_path / "file.model")
    return tmp_path / "file.model"


RAWNET = case_of("RawNet3", "ECA")


def test_constants(tmp_path):
    net = network_for(LIGHT)
    before = net.front_end.mel_bank.clone()
    window = "__S__.torchfb.spectrogram.window"
    bank = "__S__.torchfb.mel_scale.fb"
    state = foreign_state(LIGHT) | {window: net.front_end.window.clone(), bank: before + 1e-6}
    load_initial_weights(net, None, save(state, tmp_path))
    assert torch.equal(net.front_end.mel_bank, before)
    for change, words in (
        ({window: torch.hann_window(400)}, "torchfb.spectrogram.window"),
        ({bank: torch.zeros(257, 64)}, r"\(257, 64\).*\(257, 40\)"),
    ):
        with pytest.raises(ValueError, match=words):
            load_initial_weights(net, None, save(state | change, tmp_path))


@pytest.mark.parametrize("found", [RAWNET, case_of("VGGVox", "SAP")])
def test_wrong_architecture(found, tmp_path):
    path = save(foreign_state(found), tmp_path)
    with pytest.raises(ValueError, match=f"{found['model']}.*ResNetSE34L"):
        load_initial_weights(network_for(LIGHT), None, path)


def test_no_partial_loading(tmp_path):
    state = foreign_state(LIGHT) | {"__S__.fc.weight": torch.zeros(512, 128)}
    del state["__S__.layer1.0.conv2.weight"]
    net = network_for(LIGHT)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_initial_weights(net, None, save(state, tmp_path))
    assert "missing trunk.stages.0.blocks.0.conv2.weight" in str(caught.value)
    assert "embedding.weight is (512, 128) in the file, (16, 128) in the network" in str(
        caught.value
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def foreign_file(case, path, **more):
    """Write a checkpoint of the case; returns the command that imports it."""
    torch.save(
        {"model_state_dict": foreign_state(case) | more, "optimizer_state_dict": {"state": {}}},
        path,
    )
    out = path.with_name("model.pt")
    return f"import-weights {path} --model {case['model']} --out {out}"


def test_import_weights(tmp_path, call):
    case = case_of("ResNetSE34V2", "SAP")
    front_end = network_for(case).front_end
    constants = {
        "__S__.torchfb.1.mel_scale.fb": front_end.mel_bank,
        "__S__.torchfb.1.spectrogram.window": front_end.window,
        "__L__.weight": torch.rand(5994, 16),
    }
    command = foreign_file(case, tmp_path / "their.model", **constants)
    status, printed, _ = call(f"{command} --from voxceleb_trainer")
    assert status == 0
    assert "not loaded: weight (weights of the loss)" in printed
    assert "not loaded: optimizer_state_dict (only weights are taken)" in printed
    loaded = load_model_file(tmp_path / "model.pt")
    expected = torch.nn.functional.normalize(torch.tensor(case["embeddings"]))
    assert_close(torch.nn.functional.normalize(embed(loaded.net)), expected, atol=3e-5, rtol=0)
    assert loaded.contents["loss_normalizes"] is True


def test_options(tmp_path, refuse):
    base = foreign_file(LIGHT, tmp_path / "their.model")
    out = tmp_path / "model.pt"
    assert "--num-mels" in refuse(base)
    for name in ("ResNetSE34V2", "ResNetSE34"):
        assert "ResNetSE34L" in refuse(f"{base} --model {name}")
    assert not out.exists()
    run_command(f"{base} --num-mels 40 --no-log-input --loss proto")
    loaded = load_model_file(out)
    assert (
        loaded.contents["front_end"]["options"].items()
        >= {"num_mels": 40, "log_input": False}.items()
    )
    assert loaded.contents["loss_normalizes"] is False
    base = foreign_file(case_of("VGGVox", "MAX"), tmp_path / "max.model")
    assert "--pooling" in refuse(f"{base} --num-mels 40")
    run_command(f"{base} --num-mels 40 --pooling MAX")


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("loss", "name"), [("angleproto", "ResNetSE34L-SAP"), ("proto", "ResNetSE34L-SAP-raw")]
)
def test_golden_scores(loss, name, shared_data, tmp_path, monkeypatch, caplog):
    """Ten pairs of real utterances, scored with its command's flags, against the scores of its
    code.
    """
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    golden = json.loads((HERE / "golden_classic_scores.json").read_text())
    torch.save(
        {"model_state_dict": foreign_state(LIGHT), "optimizer_state_dict": {}, "epoch": 1},
        "their.model",
    )
    pairs = [" ".join(pair) for pair in itertools.combinations(golden["names"], 2)]
    Path("list.txt").write_text(
        "".join(f"{int(row == 0)} {pair}\n" for row, pair in enumerate(pairs))
    )
    words = f"train --eval --model ResNetSE34L --log_input --trainfunc {loss} --eval_frames 300"
    words += " --initial_model their.model --test_list list.txt --nOut 16 --save_path check"
    run_command(f"{words} --test_path {shared_data}/speechocean_mini")
    assert "voxceleb_trainer" in caplog.text
    lines = [
        line.rsplit(maxsplit=1)
        for line in Path("check/eval/list/scores.txt").read_text().splitlines()
    ]
    assert [line[0] for line in lines] == pairs
    # Raw embeddings have about 200 times the length of normalised ones.
    assert [float(line[1]) for line in lines] == pytest.approx(
        golden["scores"][name], abs=1e-4, rel=1e-4
    )
