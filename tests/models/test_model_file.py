"""The model file: what it holds, what comes back, and every way in which a file can be bad."""

import os
import pickle

import pytest
import torch

from speakernet.checkpoint import CheckpointError, write_checkpoint
from speakernet.losses.classification import AAMSoftmax
from speakernet.losses.options import AAMSoftmaxOptions
from speakernet.models.model_file import (
    load_initial_weights,
    load_model_file,
    model_file_contents,
)
from speakernet.models.speaker_net import SpeakerNet

SMALL = {"channels": 8, "blocks": [1, 1]}
KEYS = {
    "format_version",
    "model",
    "front_end",
    "sample_rate",
    "weights",
    "loss_normalizes",
    "embedding_mean",
    "embedding_mean_of",
    "calibration",
    "thresholds",
    "training_summary",
}


def small_net(**options):
    torch.manual_seed(0)
    return SpeakerNet.named("ResNet", "TSTP", 8, SMALL, front_end_options={"num_mels": 16}, **options)


def contents_of(net=None, **options):
    return model_file_contents(net or small_net(), loss_normalizes=True, **options)


@pytest.fixture()
def model_path(tmp_path):
    path = tmp_path / "best.pt"
    write_checkpoint(path, contents_of(embedding_mean=torch.ones(8), training_summary={"epochs": 3}))
    return path


def test_round_trip_gives_the_same_embeddings(model_path):
    waves = torch.randn(2, 8000, generator=torch.Generator().manual_seed(0))
    loaded = load_model_file(model_path)
    lengths = torch.tensor([8000, 8000])
    found, expected = (net.embed(waves, lengths, sample_rate=16000) for net in (loaded.net, small_net()))
    assert torch.equal(found, expected)
    assert not loaded.net.training
    assert set(loaded.contents) == KEYS
    assert loaded.contents["format_version"] == 1
    assert loaded.contents["training_summary"] == {"epochs": 3}
    assert torch.equal(loaded.contents["embedding_mean"], torch.ones(8))


def test_only_plain_values_and_tensors(model_path):
    contents = torch.load(model_path, weights_only=True)

    def walk(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            return all(walk(one) for one in value.values())
        if isinstance(value, list):
            return all(walk(one) for one in value)
        return value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str)

    assert walk(contents)
    assert not [name for name in contents["weights"] if "_orig_mod" in name or "module." in name]


def test_wrappers_leave_no_trace():
    weights = model_file_contents(small_net(), loss_normalizes=True)["weights"]
    wrapped = torch.nn.DataParallel(small_net()).module
    assert list(model_file_contents(wrapped, loss_normalizes=True)["weights"]) == list(weights)


def test_initial_weights_from_our_file_with_the_head(model_path, tmp_path):
    loss = AAMSoftmax(AAMSoftmaxOptions(), 8, 5)
    contents = contents_of() | {"training": {"loss": dict(loss.state_dict())}}
    write_checkpoint(tmp_path / "last.pt", contents)
    same, other = AAMSoftmax(AAMSoftmaxOptions(), 8, 5), AAMSoftmax(AAMSoftmaxOptions(), 8, 6)
    assert load_initial_weights(small_net(), same, tmp_path / "last.pt").head == "loaded"
    assert torch.equal(same.weight, loss.weight)
    assert load_initial_weights(small_net(), other, tmp_path / "last.pt").head == "new"
    # As many speakers, and others: each row of that head stands for somebody else.
    write_checkpoint(tmp_path / "last.pt", contents | {"training": {"loss": dict(loss.state_dict()), "speakers": 7}})
    assert load_initial_weights(small_net(), same, tmp_path / "last.pt", speakers=7).head == "loaded"
    assert load_initial_weights(small_net(), same, tmp_path / "last.pt", speakers=8).head == "new"
    report = load_initial_weights(small_net(), other, model_path)
    assert report.head == "new" and "the head of the loss starts new" in report.lines()


def test_another_model_is_refused_with_both_names(model_path):
    with pytest.raises(CheckpointError, match="is a ResNet, the configuration asks for ResNetSE34L"):
        load_initial_weights(SpeakerNet.named("ResNetSE34L", embedding_dim=8), None, model_path)


def test_other_options_are_refused_with_both_shapes(model_path, caplog):
    net = SpeakerNet.named("ResNet", "TSTP", 8, SMALL, front_end_options={"num_mels": 24})
    with pytest.raises(CheckpointError, match=r"embedding.weight is \(8, 256\) in the file, \(8, 384\) in the network"):
        load_initial_weights(net, None, model_path)
    assert "front_end" in caplog.text and "24" in caplog.text


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("as_plain_pickle", [False, True])
@pytest.mark.parametrize("read", [load_model_file, lambda path: load_initial_weights(small_net(), None, path)])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path, as_plain_pickle, read):
    path, trace = tmp_path / "model.pt", tmp_path / "it_ran"
    if as_plain_pickle:
        path.write_bytes(pickle.dumps(Evil(trace)))
    else:
        torch.save({"model": Evil(trace)}, path)
    with pytest.raises(CheckpointError, match=r"could run code when read; it was refused and nothing in it was run"):
        read(path)
    assert not trace.exists()


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_said_to_be_one(model_path, keep):
    content = model_path.read_bytes()
    model_path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
    with pytest.raises(CheckpointError, match=r"truncated or not a checkpoint|is not a checkpoint"):
        load_model_file(model_path)


def test_a_text_file_is_refused_without_torchs_advice_to_read_it_unprotected(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {}\n")
    with pytest.raises(CheckpointError, match=r"recipe.yaml is not a checkpoint; give a model file") as caught:
        load_model_file(path)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("start", "what"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("\n<!DOCTYPE html>", "needs a login"),
    ],
)
def test_what_came_in_place_of_the_file_is_told(tmp_path, start, what, suffix):
    (tmp_path / f"model{suffix}").write_text(start)
    with pytest.raises(CheckpointError, match=what):
        load_model_file(tmp_path / f"model{suffix}")


def test_missing_foreign_and_newer_files(tmp_path, model_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_model_file(tmp_path / "absent.pt")
    torch.save({"state": torch.zeros(1)}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"not a speakernet model file.*import-weights"):
        load_model_file(tmp_path / "foreign.pt")
    torch.save(contents_of() | {"format_version": 2}, tmp_path / "newer.pt")
    with pytest.raises(CheckpointError, match="format version 2; this speakernet reads up to 1: upgrade"):
        load_model_file(tmp_path / "newer.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint at all\n")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_model_file(tmp_path / "text.pt")


def test_weights_with_infinity_are_refused(tmp_path):
    net = small_net()
    net.embedding.bias.data[0] = float("inf")
    write_checkpoint(tmp_path / "bad.pt", contents_of(net))
    with pytest.raises(CheckpointError, match=r"NaN or infinite values in 1 of .* embedding.bias"):
        load_model_file(tmp_path / "bad.pt")


def test_a_failed_write_leaves_the_old_file(model_path, monkeypatch):
    before = model_path.read_bytes()
    monkeypatch.setattr(torch, "save", lambda contents, file: (file.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(model_path, contents_of())
    assert model_path.read_bytes() == before
    assert [path.name for path in model_path.parent.iterdir()] == ["best.pt"]
