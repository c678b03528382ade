"""The model file: round trip, and damaged, hostile and foreign files."""

import contextlib
import functools
import math
import operator
import os
import pickle
import zipfile

import pytest
import torch

from speakernet.checkpoint import (
    CheckpointError,
    read_checkpoint,
    read_own_checkpoint,
    write_checkpoint,
)
from speakernet.evaluation.scoring import plda_of
from speakernet.losses.classification import AAMSoftmax
from speakernet.losses.options import AAMSoftmaxOptions
from speakernet.models.model_file import (
    SYNTHETIC_ONLY,
    Undrawn,
    load_initial_weights,
    load_model_file,
    model_file_contents,
    voices_caution,
)
from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet
from tests.small_networks import SMALLEST, scoring, tiny_resnet, write_model

BACKEND = {"score": "cosine"}
GONE = object()
KEYS = (
    "format_version model front_end sample_rate weights loss_normalizes embedding_mean "
    "embedding_mean_of calibration thresholds training_summary"
)


def small_net():
    return tiny_resnet(pooling="TSTP", num_mels=16)


def whole():
    contents = model_file_contents(small_net(), loss_normalizes=True, training_summary={"epoch": 3})
    entries = scoring(2.0, 0.5, BACKEND, eer=math.inf)
    return contents | {"embedding_mean": torch.ones(8)} | entries


@pytest.fixture
def model_path(tmp_path):
    write_checkpoint(tmp_path / "best.pt", whole())
    return tmp_path / "best.pt"


def test_round_trip(model_path):
    waves = torch.randn(2, 8000, generator=torch.Generator().manual_seed(0))
    loaded = load_model_file(model_path)
    lengths = torch.tensor([8000, 8000])
    found, expected = (
        net.embed(waves, lengths, sample_rate=16000) for net in (loaded.net, small_net())
    )
    assert torch.equal(found, expected) and not loaded.net.training
    assert set(loaded.contents) == {*KEYS.split()} and loaded.contents["format_version"] == 1
    for name in ("calibration", "thresholds", "training_summary"):
        assert loaded.contents[name] == whole()[name]
    assert torch.equal(loaded.contents["embedding_mean"], torch.ones(8))


def test_weights_without_counters(tmp_path):
    """Old versions of torch have no num_batches_tracked, and conversions that keep only floats drop
    it.
    """
    contents = whole()
    expected = contents["weights"]
    contents["weights"] = {
        name: value for name, value in expected.items() if "num_batches" not in name
    }
    assert len(contents["weights"]) < len(expected)
    write_checkpoint(tmp_path / "less.pt", contents)
    loaded = load_model_file(tmp_path / "less.pt").net
    load_initial_weights(net := small_net(), None, tmp_path / "less.pt")
    for weights in (loaded.weights(), net.weights()):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    del contents["weights"][next(name for name in expected if name.endswith("running_mean"))]
    write_checkpoint(tmp_path / "less.pt", contents)
    with pytest.raises(CheckpointError, match=r"missing .*running_mean"):
        load_model_file(tmp_path / "less.pt")


SYNTHETIC = {"corpus": {"is_synthetic": True}}
RECORDED = {"corpus": {"is_synthetic": False}}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (SYNTHETIC, SYNTHETIC_ONLY),
        (RECORDED, ""),
        # Version 0.3.0, and foreign weights.
        (None, ""),
        ({"imported_from": "wespeaker"}, ""),
        # Fine-tuned on synthetic voices: the network still knows the people of its initial model.
        ({**SYNTHETIC, "initial_model": {"imported_from": "wespeaker"}}, ""),
        ({**SYNTHETIC, "initial_model": {**SYNTHETIC, "initial_model": SYNTHETIC}}, SYNTHETIC_ONLY),
    ],
)
def test_voices_that_a_model_knows(summary, expected):
    assert voices_caution({"training_summary": summary}) == expected


def test_initial_weights_and_head(model_path, tmp_path):
    loss, same, other = (AAMSoftmax(AAMSoftmaxOptions(), 8, speakers) for speakers in (5, 5, 6))
    path = tmp_path / "last.pt"
    contents = whole()
    write_checkpoint(path, contents | {"training": {"loss": dict(loss.state_dict())}})
    assert load_initial_weights(small_net(), same, path).head == "loaded"
    assert torch.equal(same.weight, loss.weight)
    assert load_initial_weights(small_net(), other, path).head == "new"
    # As many speakers, but different ones.
    write_checkpoint(
        path, contents | {"training": {"loss": dict(loss.state_dict()), "speakers": 7}}
    )
    assert load_initial_weights(small_net(), same, path, speakers=7).head == "loaded"
    assert load_initial_weights(small_net(), same, path, speakers=8).head == "new"
    assert load_initial_weights(small_net(), other, model_path).head == "new"


def test_another_network(model_path, caplog):
    with pytest.raises(CheckpointError, match=r"ResNet, .* ResNetSE34L"):
        load_initial_weights(SpeakerNet.named("ResNetSE34L", embedding_dim=8), None, model_path)
    net = tiny_resnet(pooling="TSTP", num_mels=24)
    with pytest.raises(CheckpointError, match=r"embedding.weight is \(8, 256\) .*\(8, 384\)"):
        load_initial_weights(net, None, model_path)
    assert "front_end" in caplog.text and "24" in caplog.text


@pytest.mark.parametrize(
    "read",
    [
        load_model_file,
        read_own_checkpoint,
        lambda path: load_initial_weights(small_net(), None, path),
    ],
)
def test_pickles(tmp_path, read):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it_ran"),)

    path = tmp_path / "model.pt"
    for content in (pickle.dumps(Evil()), None):
        if content is None:
            torch.save({"model": Evil()}, path)
        else:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.pt"):
            read(path)
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("data: {}\n", ""),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("\n<!DOCTYPE html>", "needs a login"),
        ({"state": torch.zeros(1)}, "import-weights"),
        (None, ""),
    ],
)
def test_other_files(tmp_path, content, words):
    for path in (tmp_path / "model.pt", tmp_path / "model.safetensors"):
        if isinstance(content, str):
            path.write_text(content)
        elif content is not None:
            path = tmp_path / "model.pt"
            torch.save(content, path)
        with pytest.raises(CheckpointError, match=rf"model\.(pt|safetensors).*{words}"):
            load_model_file(path)


def nested(levels, width):
    """A value that is small in the file but takes forever to traverse."""
    value = "x"
    for _ in range(levels):
        value = [value] * width
    return value


FIT = ("calibration", "fits", 0)
BIAS = ("weights", "embedding.bias")
FORGED = [
    (("model", "options", "channels"), 4096, "tensors"),
    (("model", "options", "embedding_dim"), 10**9, "1000000000"),
    (("model", "options", "colour"), 1, "colour"),
    (("model", "options", "blocks"), nested(40, 10), "model is"),
    (("model", "name"), "ResNot", "ResNot"),
    (("front_end",), GONE, "front_end is"),
    (("sample_rate",), 0, "sample_rate is"),
    (("weights",), {}, "missing"),
    (("weights",), {"a": torch.zeros(1).expand(10**6, 10**6)}, r"\(1000000, 1000000\)"),
    (BIAS, GONE, "missing embedding.bias"),
    (BIAS, torch.full((8,), torch.inf), "embedding.bias"),
    (BIAS, torch.ones(8, dtype=torch.int32), "embedding.bias is int32"),
    (("embedding_mean",), torch.ones(9), "embedding_mean is not 8"),
    ((*FIT, "offset"), torch.nan, "calibration is"),
    (("thresholds", 0, "threshold"), torch.nan, "thresholds is"),
    (
        ("thresholds",),
        [{"name": "eer", "threshold": limit, "backend": BACKEND} for limit in (0.1, 0.9)],
        "eer",
    ),
    (("training_summary",), {"corpus": {"is_synthetic": "yes"}}, "training_summary is"),
    (("format_version",), 2, "version 2"),
]


@pytest.mark.parametrize(("place", "value", "message"), FORGED)
def test_hostile_content(place, value, message, tmp_path):
    contents = whole()
    *within, last = place
    entry = functools.reduce(operator.getitem, within, contents)
    if value is GONE:
        del entry[last]
    else:
        entry[last] = value
    write_checkpoint(tmp_path / "my.pt", contents)
    with pytest.raises(CheckpointError, match=rf"my\.pt.*{message}"):
        load_model_file(tmp_path / "my.pt")
    # As an initial model, its scoring is not read, and its network may be refused.
    with contextlib.suppress(CheckpointError):
        load_initial_weights(small_net(), None, tmp_path / "my.pt")


def test_plda(tmp_path):
    """Weights scale a length and divide by it; a variance may be zero, and in bfloat16."""
    net = small_net()
    net.adapt({"name": "p", "maps": [[8, 8]], "score": "plda"})
    path = tmp_path / "my.pt"
    for name, value in (("weights", 0.0), ("weights", -1.0), ("between", -0.1)):
        tensor = getattr(net.adaptation, name)
        tensor[3] = value
        with pytest.raises(CheckpointError, match=r"my\.pt.*PLDA"):
            load_model_file(write_model(path, net))
        tensor[3] = 1.0
    net.adaptation.between = torch.tensor([3.0] * 7 + [0.0], dtype=torch.bfloat16)
    plda = plda_of(load_model_file(write_model(path, net)).contents)
    assert plda.between.tolist() == [3.0] * 7 + [0.0]


@pytest.mark.parametrize(
    "name",
    [
        name if name in SMALLEST else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if name != "Pretrained"
    ],
)
def test_every_network_loads_its_weights(name):
    with torch.device("meta"):
        expected = SpeakerNet.named(name).state_dict()
    with Undrawn(expected, "my.pt"):
        found = SpeakerNet.named(name).state_dict()
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in expected.items()
    }


def test_deflated_archive_and_pipe(tmp_path):
    """Version 0.3.0 could compress; `torch.load` would also open the archive with a lost end."""
    write_checkpoint(tmp_path / "plain.pt", whole())
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "my.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    assert read_checkpoint(tmp_path / "my.pt").keys() == whole().keys()
    with (tmp_path / "my.pt").open("ab") as file:
        file.write(b"PK" + b"x" * 70_000)
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("my.pt", "pipe.pt"):
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(tmp_path / name)
