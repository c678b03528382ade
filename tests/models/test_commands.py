"""`speakernet import-weights` and `speakernet info` on files made here."""

import zlib

import pytest
import torch

from speakernet.cli import main
from speakernet.models.importers import voxceleb_trainer
from speakernet.models.model_file import load_model_file
from speakernet.models.speaker_net import SpeakerNet
from tests.models.test_importers import foreign_names

CASES = [
    ("ResNetSE34L", "ASP", {"num_mels": 40}, {}),
    ("ResNetSE34V2", "SAP", {"num_mels": 40}, {}),
    ("VGGVox", "SAP", {}, {}),
    ("RawNet3", "ASP", {}, {"sinc_stride": 10}),
]


def as_theirs(net: SpeakerNet) -> dict[str, torch.Tensor]:
    """The network's weights under voxceleb_trainer's names."""
    state, model = net.state_dict(), net.model_name
    names = foreign_names(model, net.spec()["model"]["options"]["pooling"])
    theirs = {"__S__." + name: state[voxceleb_trainer.rename(name, voxceleb_trainer.RULES[model])] for name in names}
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


@pytest.mark.parametrize(("model", "pooling", "front_end", "options"), CASES)
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
