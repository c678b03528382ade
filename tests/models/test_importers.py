"""Checkpoints of voxceleb_trainer: every architecture and pooling against golden outputs of its own code (f51bab8).

The golden file has the names and shapes of its parameters and what its definitions gave with weights drawn from those
names, so that the importer is tested on checkpoints that it did not make.
"""

import itertools
import json
import lzma
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.cli import main
from speakernet.data.audio import read_audio
from speakernet.data.opening import open_source
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import mean_distance_scores
from speakernet.losses.options import LOSSES
from speakernet.models.importers import translate
from speakernet.models.importers.voxceleb_trainer import RULES, recognize, rename
from speakernet.models.model_file import load_initial_weights, load_model_file
from speakernet.models.speaker_net import SpeakerNet
from speakernet.options import create
from tests.models.test_published_models import draw

HERE = Path(__file__).parent
GOLDEN = json.loads(lzma.decompress((HERE / "golden_voxceleb_trainer.json.xz").read_bytes()))


def golden_waves() -> torch.Tensor:
    """Two utterances of 1.5 s: fading noise, and the same rumbling."""
    waves = 0.1 * np.random.RandomState(1).standard_normal((2, 24000)) * np.linspace(1, 0.2, 24000)
    waves[1] = np.cumsum(waves[1]) * 0.05
    return torch.from_numpy(waves.astype(np.float32))


def embed(net: SpeakerNet) -> torch.Tensor:
    """Embeddings of the golden utterances."""
    return net.embed(golden_waves(), torch.tensor([24000, 24000]), sample_rate=16000)


def network_for(case) -> SpeakerNet:
    options = dict(case["options"])
    model_options = {"sinc_stride": options.pop("sinc_stride")} if "sinc_stride" in options else {}
    front_end = {"num_mels" if name == "n_mels" else name: value for name, value in options.items()}
    return SpeakerNet.named(case["model"], case["pooling"], 16, model_options, front_end_options=front_end)


def foreign_state(case, prefix="__S__.") -> dict[str, torch.Tensor]:
    """A state dictionary as its code would have saved it, constants left out."""
    return {prefix + name: draw(name, tuple(shape), gain=2) for name, shape in case["tensors"].items()}


def case_of(model, pooling):
    return next(case for case in GOLDEN if (case["model"], case["pooling"]) == (model, pooling))


LIGHT = case_of("ResNetSE34L", "SAP")


def loss_of(name, num_classes=5):
    return create(LOSSES[name], LOSSES[name].options(), embedding_dim=16, num_classes=num_classes)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['model']}-{case['pooling']}")
def test_golden_embeddings(case, tmp_path):
    state = foreign_state(case)
    assert recognize(foreign_state(case, prefix="")) == case["model"]
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


IMPORTED = [
    ("ResNetSE34V2", "SAP", {"num_mels": 40}, {}),
    ("RawNet3", "ASP", {}, {"sinc_stride": 10}),
]


def as_theirs(net: SpeakerNet) -> dict[str, torch.Tensor]:
    """The network's weights under voxceleb_trainer's names."""
    state, model = net.state_dict(), net.model_name
    names = case_of(model, net.spec()["model"]["options"]["pooling"])["tensors"]
    theirs = {"__S__." + name: state[rename(name, RULES[model])] for name in names}
    assert len(theirs) == len(state)
    return theirs


def checkpoint(path, net, head=None, with_filterbank=True):
    state = as_theirs(net)
    if with_filterbank and hasattr(net.front_end, "mel_bank"):
        prefix = "__S__.torchfb." if net.model_name != "ResNetSE34V2" else "__S__.torchfb.1."
        state[prefix + "mel_scale.fb"] = net.front_end.mel_bank
        state[prefix + "spectrogram.window"] = net.front_end.window
    state |= {f"__L__.{name}": value for name, value in (head or {}).items()}
    torch.save({"model_state_dict": state, "optimizer_state_dict": {"state": {}}, "epoch": 9}, path)
    return str(path)


@pytest.mark.parametrize(("model", "pooling", "front_end", "options"), IMPORTED)
def test_import_weights(model, pooling, front_end, options, tmp_path, capsys):
    torch.manual_seed(zlib.crc32(model.encode()))
    net = SpeakerNet.named(model, pooling, 24, options, front_end_options=front_end)
    source = checkpoint(tmp_path / "their.model", net, {"weight": torch.rand(5994, 24)})
    out = tmp_path / "model.pt"
    assert main(["import-weights", source, "--from", "voxceleb_trainer", "--model", model, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "not loaded: weight (weights of the loss)" in printed
    assert "not loaded: optimizer_state_dict (only weights are taken)" in printed
    loaded = load_model_file(out)
    waves = 0.1 * torch.randn(2, 16000, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([16000, 16000])
    assert torch.equal(*(one.embed(waves, lengths, sample_rate=16000) for one in (loaded.net, net)))
    assert loaded.contents["loss_normalizes"] is True
    assert main(["info", str(out)]) == 0
    facts = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in net.parameters())
    assert f"{count:,}" in facts and model in facts and f"pooling={pooling}" in facts


def test_options(tmp_path, capsys):
    net = SpeakerNet.named("ResNetSE34L", "SAP", 24, front_end_options={"num_mels": 40, "log_input": False})
    source = checkpoint(tmp_path / "their.model", net, with_filterbank=False)
    out = tmp_path / "model.pt"
    base = ["import-weights", source, "--model", "ResNetSE34L", "--out", str(out)]
    assert main(base) == 1
    assert "--num-mels" in capsys.readouterr().err
    for name in ("ResNetSE34V2", "ResNetSE34"):
        assert main([*base, "--model", name]) == 1 and "ResNetSE34L" in capsys.readouterr().err
    assert not out.exists()
    assert main([*base, "--num-mels", "40", "--no-log-input", "--loss", "proto"]) == 0
    loaded = load_model_file(out)
    assert loaded.contents["front_end"]["options"].items() >= {"num_mels": 40, "log_input": False}.items()
    assert loaded.contents["loss_normalizes"] is False
    source = checkpoint(tmp_path / "max.model", SpeakerNet.named("VGGVox", "MAX", 24))
    base = ["import-weights", source, "--model", "VGGVox", "--out", str(out)]
    assert main(base) == 1 and "--pooling" in capsys.readouterr().err
    assert main([*base, "--pooling", "MAX"]) == 0


SCORES = json.loads((HERE / "golden_classic_scores.json").read_text())
TOLERANCE = 1e-4


@pytest.mark.parametrize("normalize", [True, False])
def test_golden_scores(shared_data, normalize):
    """Ten pairs of real utterances, ten crops each, as its own code scored them."""
    net = network_for(LIGHT)
    net.load_state_dict(translate(foreign_state(LIGHT), net, "drawn").weights)
    options = EvaluationOptions(eval_frames=SCORES["eval_frames"], num_crops=SCORES["num_crops"], num_workers=1)
    embeddings = embed_utterances(net, open_source(shared_data / "speechocean_mini"), SCORES["names"], options)
    pairs = np.array(list(itertools.combinations(range(len(SCORES["names"])), 2)), dtype=np.int32)
    found = mean_distance_scores(embeddings, pairs[:, 0].copy(), pairs[:, 1].copy(), normalize=normalize)
    expected = np.array(SCORES["scores"]["ResNetSE34L-SAP" + ("" if normalize else "-raw")])
    # Raw embeddings are about two hundred times as long as normalised ones.
    assert np.abs(found - expected).max() < TOLERANCE * (1 if normalize else np.abs(expected).max())


FRAMES = 60
SAMPLES = FRAMES * 160 + 240


def distance_by_loop(net, first, second, normalize):
    """Minus the mean of the hundred distances between ten crops each, in plain Python."""
    crops = []
    for waveform in (first, second):
        room = len(waveform) - SAMPLES
        starts = [int(room * index / 9) for index in range(10)]
        cut = [torch.from_numpy(waveform[start : start + SAMPLES])[None] for start in starts]
        embedded = [net.embed(crop, sample_rate=16000)[0] for crop in cut]
        if normalize:
            embedded = [embedding / embedding.norm() for embedding in embedded]
        crops.append([embedding.double().tolist() for embedding in embedded])
    distances = [math.dist(left, right) for left in crops[0] for right in crops[1]]
    return -sum(distances) / len(distances)


@pytest.mark.parametrize(("loss", "normalize"), [("angleproto", True), ("proto", False)])
def test_evaluation_by_flags_with_their_checkpoint(loss, normalize, tiny_corpus, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    net = SpeakerNet.named("ResNetSE34L", "SAP", 16, front_end_options={"num_mels": 40, "log_input": True})
    state = as_theirs(net)
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}, "epoch": 1}, "their.model")
    trials = (tiny_corpus / "trials.txt").read_text().splitlines()[:8]
    Path("list.txt").write_text("\n".join(trials) + "\n")
    flags = ["--eval", "--model", "ResNetSE34L", "--log_input", "--trainfunc", loss, "--eval_frames", str(FRAMES)]
    flags += ["--initial_model", "their.model", "--test_list", "list.txt", "--test_path", str(tiny_corpus)]
    assert main(["train", *flags, "--nOut", "16", "--save_path", "check"]) == 0
    assert "voxceleb_trainer" in caplog.text
    lines = [line.split() for line in Path("check/eval/list/scores.txt").read_text().splitlines()]
    assert [line[:2] for line in lines] == [trial.split()[1:] for trial in trials]
    for enrol, test, score in lines[:3]:
        first, second = read_audio(tiny_corpus / enrol), read_audio(tiny_corpus / test)
        expected = distance_by_loop(net, first, second, normalize)
        assert float(score) == pytest.approx(expected, abs=1e-4)
