"""Every family against golden embeddings of the original code, with weights drawn from the names of
its tensors.

The golden file has one original of each architecture, mostly the smallest; other sizes have the
same code. It has the names and shapes of the original's state dictionary and its embeddings of
two utterances. The weights are drawn again by the rule below, so the importers are tested on
checkpoints that are independent of them.
Originals: wespeaker dfa7419, 3D-Speaker 09e7806, SpeechBrain 9c826ef, ReDimNet dd9f519, ReDimNet2
ffe8f27.
"""

import json
import lzma
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import speakernet
from speakernet.checkpoint import CheckpointError
from speakernet.cli import main
from speakernet.models.importers import PUBLISHED, import_network
from speakernet.models.model_file import load_initial_weights, load_model_file
from tests.small_networks import small_network

GOLDEN = json.loads(
    lzma.decompress((Path(__file__).parent / "golden_families.json.xz").read_bytes())
)
WAVEFORMS = json.loads((Path(__file__).parent / "golden_waveforms.json").read_text())
LENGTHS = (208, 123)
LARGEST_QUICK = 15_000_000


def draw(name, shape, gain):
    """A tensor's value from its name, by the rule of the golden embeddings."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    # The legacy generator, whose streams never change.
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
    elif not name.endswith("alpha") and (len(shape) != 4 or shape[0] != 1):
        value = value * np.sqrt(gain / np.prod(shape[1:]))
    return torch.from_numpy(np.asarray(value, dtype=np.float32))


def golden_features(frames, mels):
    """A random walk without its mean, (1, frames, mels)."""
    random = np.random.RandomState(frames)
    values = random.standard_normal((frames, mels)) + 0.3 * np.cumsum(
        random.standard_normal((frames, mels)), axis=0
    )
    return torch.from_numpy((values - values.mean(0)).astype(np.float32)).unsqueeze(0)


def foreign_state(case):
    """A state dictionary as saved by the original."""
    gain = case.get("gain", 1.0)
    return {name: draw(name, tuple(shape), gain) for name, shape in case["tensors"].items()}


def contents_of(case):
    """The content of the file: the state dictionary and, if the format has one, the
    configuration.
    """
    state = foreign_state(case)
    return {"model_config": case["config"], "state_dict": state} if "config" in case else state


def identity(case):
    return f"{case['toolkit']}-{case['model']}" + (f"-{case['note']}" if "note" in case else "")


def parameters(cases):
    for case in cases:
        marks = [pytest.mark.slow] if case["num_parameters"] > LARGEST_QUICK else []
        yield pytest.param(case, id=identity(case), marks=marks)


@pytest.mark.parametrize("case", parameters(GOLDEN))
def test_golden_embeddings(case):
    net, not_loaded = import_network(
        PUBLISHED[case["toolkit"]], case["model"], contents_of(case), "file.pt"
    )
    assert all("pooling" in name for name in not_loaded)
    assert sum(parameter.numel() for parameter in net.parameters()) == case["num_parameters"]
    first, second = (torch.tensor(values) for values in case["embeddings"])
    assert (first - second).norm() / first.norm() > 0.05, "embeddings move with their input"
    for frames, wanted in zip(LENGTHS, (first, second), strict=True):
        features = golden_features(frames, case["num_mels"])
        with torch.inference_mode():
            found = net.from_features(features.transpose(1, 2))[0]
        assert (found - wanted).norm() / wanted.norm() < 1e-4


def golden_waveforms():
    """Two utterances, (1, samples): fading noise with an offset, and a rumble; both with an
    intermittent tone.
    """
    found = []
    for index, num_samples in enumerate((33333, 20017)):
        noise = 0.1 * np.random.RandomState(100 + index).standard_normal(num_samples)
        value = noise * np.linspace(1, 0.02, num_samples) + 0.02
        if index:
            value = np.cumsum(value - 0.02) * 0.02
        seconds = np.arange(num_samples) / 16000
        value = value + 0.2 * np.sin(2 * np.pi * 440 * seconds) * (
            np.sin(2 * np.pi * 3 * seconds) > 0
        )
        found.append(torch.from_numpy(value.astype(np.float32)).unsqueeze(0))
    return found


@pytest.mark.parametrize(
    "golden", WAVEFORMS, ids=lambda golden: f"{identity(golden)}-{golden['way']}"
)
def test_golden_embeddings_of_waveforms(golden, tmp_path, capsys):
    contents = contents_of(case_of(golden["toolkit"], golden["model"], golden.get("note")))
    if "config" in golden:
        contents["model_config"] = contents["model_config"] | golden["config"]
    source = save(contents, tmp_path)
    out = str(tmp_path / "model.pt")
    words = f"import-weights {source} --from {golden['toolkit']} --model {golden['model']}"
    assert main([*words.split(), "--out", out]) == 0
    net = load_model_file(out).net
    for waveform, expected in zip(golden_waveforms(), golden["embeddings"], strict=True):
        found = net.embed(waveform, sample_rate=16000)[0]
        wanted = torch.tensor(expected)
        assert (found - wanted).norm() / wanted.norm() < 1e-4


def test_real_checkpoint(shared_data, tmp_path, call):
    reference = shared_data.parent / "reference"
    source = str(reference / "campplus_3dspeaker_192.pt")
    out = str(tmp_path / "model.pt")
    if not Path(source).is_file():
        pytest.skip("the real CAM++ of ../shared/reference is not here")
    line = f"import-weights {source} --from 3dspeaker --model CAMPPlus --out {out}"
    # Nothing in the file tells the toolkits apart.
    assert "--from wespeaker --model CAMPPlus" in call(line)[1]
    verifier = speakernet.load(out, "cpu")
    outputs = np.load(reference / "campplus_3dspeaker_outputs.npz")
    for index in range(2):
        wanted = outputs[f"embedding_{index}"].reshape(1, -1)
        of_features = verifier.embed_features(outputs[f"features_{index}"][None])
        assert np.linalg.norm(of_features - wanted) / np.linalg.norm(wanted) < 1e-4
        of_waveform = verifier.embed(
            shared_data / "speechocean_mini" / str(outputs[f"name_{index}"])
        )
        assert np.linalg.norm(of_waveform - wanted) / np.linalg.norm(wanted) < 1e-3


def case_of(toolkit, model, note=None):
    return next(
        case
        for case in GOLDEN
        if (case["toolkit"], case["model"]) == (toolkit, model) and note in (None, case.get("note"))
    )


@pytest.mark.parametrize(
    ("toolkit", "model", "options"),
    [
        (
            "wespeaker",
            "CAMPPlus",
            ["--from wespeaker --model CAMPPlus", "--from 3dspeaker --model CAMPPlus"],
        ),
        ("redimnet", "ReDimNetB1", ["--from redimnet --model ReDimNet"]),
    ],
)
def test_raw_checkpoint_as_initial_model(toolkit, model, options, tmp_path):
    path = tmp_path / "avg_model.pt"
    torch.save(contents_of(case_of(toolkit, model)), path)
    with pytest.raises(CheckpointError) as caught:
        load_initial_weights(small_network("ResNet"), None, path)
    assert all(f"import-weights {path} {command}" in str(caught.value) for command in options)
    assert "damaged" not in str(caught.value) and ("front ends differ" in str(caught.value)) == (
        len(options) > 1
    )


XVEC = ("wespeaker", "XVEC", None)
RESNET = ("wespeaker", "ResNet18", None)


@pytest.mark.parametrize(
    ("case", "model", "tensors", "words"),
    [
        (XVEC, "ECAPA_TDNN_1024", {}, "file.pt is not ECAPA_TDNN_1024 of wespeaker"),
        (XVEC, "XVEC", {"trunk.convs.0.weight": torch.zeros(2)}, "trunk.convs.0.weight"),
        (XVEC, "XVEC", {"seg_1.weight": torch.zeros(3)}, r"embedding.0.weight is \(3,\)"),
        (
            RESNET,
            "ResNet18",
            {"layer4.0.shortcut.0.weight": torch.zeros(0, 2)},
            "sizes of this model",
        ),
        (("wespeaker", "ECAPA_TDNN_GLOB_c512", None), "ECAPA_TDNN_GLOB_c1024", {}, "does not fit"),
    ],
)
def test_wrong_tensors(case, model, tensors, words):
    with pytest.raises(ValueError, match=words):
        import_network(
            PUBLISHED[case[0]], model, foreign_state(case_of(*case)) | tensors, "file.pt"
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": "full"}, "causal: full"),
        ({"group_divizor": 2}, "group_divizor.*'group_divisor'"),
        ({"spec_params": {"f_mix": 9}}, "f_mix.*'f_min'"),
        ({"F": 10**9}, ""),
    ],
)
def test_wrong_options_of_redimnet(options, words):
    contents = contents_of(case_of("redimnet", "ReDimNet2B0"))
    contents["model_config"] = contents["model_config"] | options
    with pytest.raises(CheckpointError, match=f"b0.pt is not ReDimNet2B0 of redimnet: .*{words}"):
        import_network(PUBLISHED["redimnet"], "ReDimNet2B0", contents, "b0.pt")


def test_sizes_and_versions_of_redimnet():
    contents = contents_of(case_of("redimnet", "ReDimNetB1"))
    for name, words in (("ReDimNetB0", "ReDimNetB1"), ("ReDimNet2B0", "ReDimNet")):
        with pytest.raises(CheckpointError, match=f"not {name} of redimnet: .*{words}$"):
            import_network(PUBLISHED["redimnet"], name, contents, "b1.pt")
    contents = contents_of(case_of("redimnet", "ReDimNet2B0"))
    # wespeaker has the same network and names, with a different front end.
    for toolkit, given in (("redimnet", contents["state_dict"]), ("wespeaker", contents)):
        with pytest.raises(CheckpointError, match="model_config"):
            import_network(PUBLISHED[toolkit], "ReDimNet2B0", given, "b0.pt")
    contents = contents_of(case_of("redimnet", "ReDimNet"))
    contents["state_dict"]["spec.torchfbank.2.mel_scale.fb"] = torch.zeros(257, 72)
    _, left = import_network(PUBLISHED["redimnet"], "ReDimNet", contents, "file.pt")
    assert left == ["spec.torchfbank.2.mel_scale.fb (constants of its front end)"]


def save(contents, folder):
    torch.save(contents, folder / "avg_model.pt")
    return str(folder / "avg_model.pt")


def test_command(tmp_path, call, refuse):
    state = foreign_state(case_of(*XVEC)) | {"projection.weight": torch.zeros(7, 16)}
    source = save(state, tmp_path)
    out = str(tmp_path / "model.pt")
    base = f"import-weights {source} --model XVEC"
    (tmp_path / "resnet").mkdir()
    resnet = save(foreign_state(case_of(*RESNET)), tmp_path / "resnet")
    for line, words in (
        (f"{base} --from wespeaker --out {out} --pooling TAP", "--pooling"),
        (f"{base} --out {out} --from wspeaker", "'wespeaker'"),
        (f"{base} --out {source} --from wespeaker", source),
        (
            f"import-weights {resnet} --model ResNetSE34L --out {out}",
            "--from wespeaker --model ResNet18",
        ),
    ):
        assert words in refuse(line)
        assert not (tmp_path / "model.pt").exists()
    facts = "--licence Apache-2.0 --trained-on VoxCeleb2"
    status, printed, _ = call(f"{base} --from wespeaker --out {out} {facts}")
    assert status == 0 and "not loaded: projection.weight" in printed
    assert "also fit" not in printed
    options = load_model_file(out).contents["front_end"]["options"]
    assert (options["window"], options["scale"], options["num_mels"]) == ("hamming", 32768.0, 80)
    shown = call(f"info {out}")[1]
    assert all(fact in shown for fact in ("Apache-2.0", "VoxCeleb2", "wespeaker", "XVector"))
    again = f"import-weights {out} --from wespeaker --model XVEC --out {tmp_path}/again.pt"
    assert refuse(again) and not (tmp_path / "again.pt").exists()
