"""Checkpoints of voxceleb_trainer: every architecture and pooling against golden outputs of its own code (f51bab8).

The golden embeddings come from its definitions with weights drawn from their parameter names by the rule below. The
names are written down here once more, so that the importer is tested on checkpoints that it did not make.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.losses.options import LOSSES
from speakernet.models.importers.voxceleb_trainer import RULES, recognize, rename
from speakernet.models.model_file import load_initial_weights
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create

GOLDEN = json.loads((Path(__file__).parent / "golden_voxceleb_trainer.json").read_text())
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
LAYER = ("weight", "bias")


def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter's value from its name; the rule that the golden outputs were made with."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    # The legacy generator: its streams are frozen for ever.
    value = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("low_hz_"):
        value = 30 + 1500 * np.abs(value)
    elif name.endswith("band_hz_"):
        value = 50 + 300 * np.abs(value)
    elif name.endswith("running_var"):
        value = 1 + 0.2 * np.abs(value)
    elif len(shape) == 1 and name.endswith("weight"):
        value = 1 + 0.1 * value
    elif name.endswith(("bias", "running_mean")):
        value = 0.1 * value
    elif not name.endswith("alpha"):
        value = value * np.sqrt(2 / np.prod(shape[1:]))
    return torch.from_numpy(np.asarray(value, dtype=np.float32))


def golden_waves() -> torch.Tensor:
    """Two utterances of 1.5 s: fading noise, and the same rumbling."""
    waves = 0.1 * np.random.RandomState(1).standard_normal((2, 24000)) * np.linspace(1, 0.2, 24000)
    waves[1] = np.cumsum(waves[1]) * 0.05
    return torch.from_numpy(waves.astype(np.float32))


def embed(net: SpeakerNet) -> torch.Tensor:
    """Embeddings of the golden utterances."""
    return net.embed(golden_waves(), torch.tensor([24000, 24000]), sample_rate=16000)


def dotted(prefix, endings):
    return [f"{prefix}.{ending}" for ending in endings]


def foreign_names(model: str, pooling: str) -> list[str]:
    """The parameter names of voxceleb_trainer's definition."""
    if model == "VGGVox":
        names = [name for place in (0, 4, 8, 11, 14, 18) for name in dotted(f"netcnn.{place}", LAYER)]
        names += [name for place in (1, 5, 9, 12, 15, 19) for name in dotted(f"netcnn.{place}", NORM)]
        if pooling == "SAP":
            names += [*dotted("sap_linear", LAYER), "attention"]
        return [*names, *dotted("fc", LAYER)]
    channel_attention = [*dotted("attention.0", LAYER), *dotted("attention.2", NORM), *dotted("attention.3", LAYER)]
    if model == "RawNet3":
        names = [*dotted("preprocess.1", LAYER), *dotted("conv1.filterbank", ("low_hz_", "band_hz_"))]
        names += [*dotted("bn1", NORM), *dotted("bn5", NORM), *dotted("bn6", NORM)]
        names += [*dotted("layer4", LAYER), *dotted("fc6", LAYER), *channel_attention, "layer1.residual.0.weight"]
        for block in ("layer1", "layer2", "layer3"):
            names += [*dotted(f"{block}.conv1", LAYER), *dotted(f"{block}.conv3", LAYER), f"{block}.afms.alpha"]
            names += [*dotted(f"{block}.bn1", NORM), *dotted(f"{block}.bn3", NORM), *dotted(f"{block}.afms.fc", LAYER)]
            for group in range(7):
                names += [*dotted(f"{block}.convs.{group}", LAYER), *dotted(f"{block}.bns.{group}", NORM)]
        return names
    names = ["conv1.weight", *dotted("bn1", NORM), *dotted("fc", LAYER)]
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            inside = f"layer{stage}.{block}"
            names += [f"{inside}.conv1.weight", f"{inside}.conv2.weight"]
            names += [*dotted(f"{inside}.bn1", NORM), *dotted(f"{inside}.bn2", NORM)]
            names += [*dotted(f"{inside}.se.fc.0", LAYER), *dotted(f"{inside}.se.fc.2", LAYER)]
        if stage > 1:
            names += [f"layer{stage}.0.downsample.0.weight", *dotted(f"layer{stage}.0.downsample.1", NORM)]
    if model == "ResNetSE34V2":
        return [*names, "conv1.bias", *channel_attention]
    return [*names, *dotted("sap_linear", LAYER), "attention"]


def network_for(case) -> SpeakerNet:
    options = dict(case["options"])
    model_options = {"sinc_stride": options.pop("sinc_stride")} if "sinc_stride" in options else {}
    front_end = {"num_mels" if name == "n_mels" else name: value for name, value in options.items()}
    return SpeakerNet.named(case["model"], case["pooling"], 16, model_options, front_end_options=front_end)


def foreign_state(case, prefix="__S__.") -> dict[str, torch.Tensor]:
    """A state dictionary as its code would have saved it, constants left out."""
    shapes = {name: tuple(value.shape) for name, value in network_for(case).state_dict().items()}
    names = foreign_names(case["model"], case["pooling"])
    return {prefix + name: draw(name, shapes[rename(name, RULES[case["model"]])]) for name in names}


def case_of(model, pooling):
    return next(case for case in GOLDEN if (case["model"], case["pooling"]) == (model, pooling))


LIGHT = case_of("ResNetSE34L", "SAP")


def loss_of(name, num_classes=5):
    return create(LOSSES[name], LOSSES[name].options(), embedding_dim=16, num_classes=num_classes)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['model']}-{case['pooling']}")
def test_golden_embeddings(case, tmp_path):
    state = foreign_state(case)
    assert len(state) == case["num_names"] and recognize(foreign_state(case, prefix="")) == case["model"]
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}, "epoch": 3}, tmp_path / "model.model")
    net = network_for(case)
    assert sum(parameter.numel() for parameter in net.parameters()) == case["num_parameters"]
    report = load_initial_weights(net, None, tmp_path / "model.model")
    assert report.num_loaded == len(state) and report.source == "voxceleb_trainer"
    # Of unit length, as they are scored: rounding in float32 grows with the weights that were drawn.
    expected = torch.nn.functional.normalize(torch.tensor(case["embeddings"]))
    found = torch.nn.functional.normalize(embed(net))
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model_state_dict": state, "optimizer_state_dict": {}, "scheduler_state_dict": {}, "epoch": 1},
        lambda state: state,
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {"model_state_dict": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {"model": {name.removeprefix("__S__."): value for name, value in state.items()}},
        lambda state: {name.replace("__S__.", "__S__._orig_mod."): value for name, value in state.items()},
    ],
)
def test_every_shape_of_file(wrap, tmp_path):
    state = foreign_state(LIGHT)
    torch.save(wrap(state), tmp_path / "file.model")
    net = network_for(LIGHT)
    assert load_initial_weights(net, None, tmp_path / "file.model").num_loaded == len(state)
    torch.testing.assert_close(embed(net), torch.tensor(LIGHT["embeddings"]), atol=1e-4, rtol=1e-5)


SCALE = {"w": torch.tensor(12.0), "b": torch.tensor(-3.0)}
LINEAR = {"fc.weight": torch.rand(5, 16), "fc.bias": torch.rand(5)}
HEADS = [
    (loss_of("amsoftmax"), {"W": torch.rand(16, 5)}),
    (loss_of("aamsoftmax"), {"weight": torch.rand(5, 16)}),
    (loss_of("softmax"), LINEAR),
    (loss_of("angleproto"), SCALE),
    (
        loss_of("softmaxproto"),
        {f"softmax.{name}": one for name, one in LINEAR.items()}
        | {f"angleproto.{name}": one for name, one in SCALE.items()},
    ),
]


@pytest.mark.parametrize(("loss", "head"), HEADS, ids=lambda part: type(part).__name__)
def test_heads_of_the_same_speakers(loss, head, tmp_path):
    state = foreign_state(LIGHT) | {f"__L__.{name}": value for name, value in head.items()}
    torch.save({"model_state_dict": state}, tmp_path / "file.model")
    report = load_initial_weights(network_for(LIGHT), loss, tmp_path / "file.model")
    assert report.head == "loaded" and report.not_loaded == []
    loaded = sorted(parameter.sum().item() for parameter in loss.parameters())
    assert loaded == pytest.approx(sorted(value.sum().item() for value in head.values()), rel=1e-5)


def test_other_speakers_and_unknown_parameters(tmp_path, caplog):
    state = foreign_state(LIGHT) | {"__L__.weight": torch.rand(5994, 16), "__S__.speed.weight": torch.zeros(3)}
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}}, tmp_path / "file.model")
    loss = loss_of("aamsoftmax", 7)
    before = loss.weight.clone()
    with caplog.at_level("INFO"):
        report = load_initial_weights(network_for(LIGHT), loss, tmp_path / "file.model")
    assert report.head == "new" and torch.equal(loss.weight, before)
    for words in ("(5994, 16)", "(7, 16)", "optimizer_state_dict", "speed.weight (3,) (no such parameter"):
        assert words in caplog.text


def save(state, tmp_path):
    torch.save({"model_state_dict": state}, tmp_path / "file.model")
    return tmp_path / "file.model"


EMPHASIS = "preprocess.0.flipped_filter"
RAWNET = case_of("RawNet3", "ECA")


def test_constants(tmp_path):
    net = network_for(LIGHT)
    before = net.front_end.mel_bank.clone()
    window, bank = "__S__.torchfb.spectrogram.window", "__S__.torchfb.mel_scale.fb"
    state = foreign_state(LIGHT) | {window: net.front_end.window.clone(), bank: before + 1e-6}
    load_initial_weights(net, None, save(state, tmp_path))
    assert torch.equal(net.front_end.mel_bank, before)
    for change, words in (
        ({window: torch.hann_window(400)}, "torchfb.spectrogram.window"),
        ({bank: torch.zeros(257, 64)}, r"\(257, 64\).*\(257, 40\)"),
    ):
        with pytest.raises(ValueError, match=words):
            load_initial_weights(net, None, save(state | change, tmp_path))
    net = network_for(RAWNET)
    state = foreign_state(RAWNET) | {f"__S__.{EMPHASIS}": torch.tensor([[[-0.97, 1.0]]])}
    load_initial_weights(net, None, save(state, tmp_path))
    with pytest.raises(ValueError, match=EMPHASIS):
        load_initial_weights(net, None, save(state | {f"__S__.{EMPHASIS}": torch.zeros(1, 1, 2)}, tmp_path))


@pytest.mark.parametrize("found", [RAWNET, case_of("VGGVox", "SAP")])
def test_another_architecture(found, tmp_path):
    path = save(foreign_state(found), tmp_path)
    with pytest.raises(ValueError, match=f"{found['model']}.*ResNetSE34L"):
        load_initial_weights(network_for(LIGHT), None, path)


def test_nothing_is_half_loaded(tmp_path):
    state = foreign_state(LIGHT) | {"__S__.fc.weight": torch.zeros(512, 128)}
    del state["__S__.layer1.0.conv2.weight"]
    net = network_for(LIGHT)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_initial_weights(net, None, save(state, tmp_path))
    assert "missing trunk.stages.0.blocks.0.conv2.weight" in str(caught.value)
    assert "embedding.weight is (512, 128) in the file, (16, 128) in the network" in str(caught.value)
    state = foreign_state(LIGHT)
    state["__S__.bn1.running_var"][0] = float("nan")
    with pytest.raises(ValueError, match=r"trunk\.norm1\.running_var"):
        load_initial_weights(net, None, save(state, tmp_path))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
