"""Every family against golden embeddings of the original code, with weights drawn from the names of its tensors.

The golden file holds, for each original, the names and shapes of its state dictionary and what it gave for two
utterances; the weights are drawn here again by the rule below, so that the importers are tested on checkpoints that
they did not make. Originals: wespeaker dfa7419, 3D-Speaker 09e7806, SpeechBrain 9c826ef, ReDimNet dd9f519, ReDimNet2
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
from speakernet.cli import main
from speakernet.models.importers import PUBLISHED
from speakernet.models.importers.published import fits_of_others, import_network
from speakernet.models.model_file import load_model_file

GOLDEN = json.loads(lzma.decompress((Path(__file__).parent / "golden_families.json.xz").read_bytes()))
WAVEFORMS = json.loads((Path(__file__).parent / "golden_waveforms.json").read_text())
LENGTHS = (208, 123)
# One original of each shape of code; the others differ from them in size only.
QUICK = {
    *("XVEC", "ECAPA_TDNN_c512", "ECAPA_TDNN_GLOB_c512", "ResNet18", "ResNet50", "Gemini_DF_ResNet60"),
    *("Res2Net34_Base", "CAMPPlus", "ERes2Net34_Base", "ERes2Net", "ERes2NetV2", "ECAPA_TDNN"),
    *("ReDimNet", "ReDimNetB0", "ReDimNetB1", "ReDimNet2B0", "ReDimNet2B6"),
}
LARGEST_QUICK = 15_000_000


def draw(name: str, shape: tuple[int, ...], gain: float) -> torch.Tensor:
    """A tensor's value from its name; the rule that the golden embeddings were made with."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    # The legacy generator: its streams are frozen for ever.
    value = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("running_var"):
        value = 1 + 0.2 * np.abs(value)
    elif len(shape) == 1 and name.endswith("weight"):
        value = 1 + 0.1 * value
    elif name.endswith(("bias", "running_mean")):
        value = 0.1 * value
    elif len(shape) != 4 or shape[0] != 1:
        value = value * np.sqrt(gain / np.prod(shape[1:]))
    return torch.from_numpy(np.asarray(value, dtype=np.float32))


def golden_features(frames: int, mels: int) -> torch.Tensor:
    """Noise that wanders, mean removed, (1, frames, mels)."""
    random = np.random.RandomState(frames)
    values = random.standard_normal((frames, mels)) + 0.3 * np.cumsum(random.standard_normal((frames, mels)), axis=0)
    return torch.from_numpy((values - values.mean(0)).astype(np.float32)).unsqueeze(0)


def foreign_state(case) -> dict[str, torch.Tensor]:
    """A state dictionary as the original would have saved it."""
    gain = case.get("gain", 1.0)
    return {name: draw(name, tuple(shape), gain) for name, shape in case["tensors"].items()}


def contents_of(case):
    """What the file holds: the state dictionary, and the configuration beside it where the format has one."""
    state = foreign_state(case)
    return {"model_config": case["config"], "state_dict": state} if "config" in case else state


def identity(case):
    return f"{case['toolkit']}-{case['model']}" + (f"-{case['note']}" if "note" in case else "")


def parameters(cases):
    for case in cases:
        is_quick = case["model"] in QUICK and case["num_parameters"] < LARGEST_QUICK
        yield pytest.param(case, id=identity(case), marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("case", parameters(GOLDEN))
def test_embeddings_are_those_of_the_original_code(case):
    imported = import_network(PUBLISHED[case["toolkit"]], case["model"], contents_of(case), "file.pt")
    assert all("twice" in one for one in imported.not_loaded)
    assert sum(parameter.numel() for parameter in imported.net.parameters()) == case["num_parameters"]
    for frames, expected in zip(LENGTHS, case["embeddings"], strict=True):
        features = golden_features(frames, case["num_mels"])
        with torch.inference_mode():
            found = imported.net.from_features(features.transpose(1, 2))[0]
        wanted = torch.tensor(expected)
        assert (found - wanted).norm() / wanted.norm() < 1e-4


def test_a_golden_embedding_moves_with_its_input():
    for case in GOLDEN:
        first, second = (torch.tensor(values) for values in case["embeddings"])
        assert (first - second).norm() / first.norm() > 0.05, identity(case)


def golden_waveforms() -> list[torch.Tensor]:
    """Two utterances, (1, samples): noise that fades on an offset, and a rumble; a tone on and off in both."""
    found = []
    for index, num_samples in enumerate((33333, 20017)):
        noise = 0.1 * np.random.RandomState(100 + index).standard_normal(num_samples)
        value = noise * np.linspace(1, 0.02, num_samples) + 0.02
        if index:
            value = np.cumsum(value - 0.02) * 0.02
        seconds = np.arange(num_samples) / 16000
        value = value + 0.2 * np.sin(2 * np.pi * 440 * seconds) * (np.sin(2 * np.pi * 3 * seconds) > 0)
        found.append(torch.from_numpy(value.astype(np.float32)).unsqueeze(0))
    return found


@pytest.mark.parametrize("golden", WAVEFORMS, ids=lambda golden: f"{identity(golden)}-{golden['way']}")
def test_embeddings_of_waveforms_are_those_of_the_original_code_behind_its_own_features(golden, tmp_path, capsys):
    contents = contents_of(case_of(golden["toolkit"], golden["model"], golden.get("note")))
    if "config" in golden:
        contents["model_config"] = contents["model_config"] | golden["config"]
    source, out = save(contents, tmp_path), str(tmp_path / "model.pt")
    assert main(["import-weights", source, "--from", golden["toolkit"], "--model", golden["model"], "--out", out]) == 0
    net = load_model_file(out).net
    for waveform, expected in zip(golden_waveforms(), golden["embeddings"], strict=True):
        found, wanted = net.embed(waveform, sample_rate=16000)[0], torch.tensor(expected)
        assert (found - wanted).norm() / wanted.norm() < 1e-4


@pytest.fixture
def reference(shared_data):
    """A real checkpoint with what its own toolkit makes of it."""
    folder = shared_data.parent / "reference"
    if not (folder / "campplus_3dspeaker_192.pt").is_file():
        pytest.skip("the real CAM++ of ../shared/reference is not here")
    return folder


def test_a_real_checkpoint_embeds_as_its_own_toolkit_does(reference, shared_data, tmp_path):
    source, out = str(reference / "campplus_3dspeaker_192.pt"), str(tmp_path / "model.pt")
    assert main(["import-weights", source, "--from", "3dspeaker", "--model", "CAMPPlus", "--out", out]) == 0
    verifier = speakernet.load(out, device="cpu")
    outputs = np.load(reference / "campplus_3dspeaker_outputs.npz")
    for index in range(2):
        wanted = outputs[f"embedding_{index}"].reshape(1, -1)
        of_features = verifier.embed_features(outputs[f"features_{index}"][None])
        assert np.linalg.norm(of_features - wanted) / np.linalg.norm(wanted) < 1e-4
        of_waveform = verifier.embed(shared_data / "speechocean_mini" / str(outputs[f"name_{index}"]))
        assert np.linalg.norm(of_waveform - wanted) / np.linalg.norm(wanted) < 1e-3


def case_of(toolkit, model, note=None):
    return next(
        case
        for case in GOLDEN
        if (case["toolkit"], case["model"]) == (toolkit, model) and note in (None, case.get("note"))
    )


def test_our_own_names_work_too():
    state = foreign_state(case_of("wespeaker", "XVEC"))
    assert import_network(PUBLISHED["wespeaker"], "XVector", state, "file.pt").net.model_name == "XVector"
    for theirs, pooling in (("ECAPA_TDNN_c512", "ASTP"), ("ECAPA_TDNN_GLOB_c512", "GlobalASTP")):
        state = foreign_state(case_of("wespeaker", theirs))
        net = import_network(PUBLISHED["wespeaker"], "ECAPA_TDNN", state, "file.pt").net
        assert net.spec()["model"]["options"]["pooling"] == pooling


def test_sizes_of_ecapa_have_our_names_whoever_made_them():
    for size, note in (("ECAPA_TDNN", "512"), ("ECAPA_TDNN_1024", "1024")):
        state = foreign_state(case_of("speechbrain", "ECAPA_TDNN", note))
        assert import_network(PUBLISHED["speechbrain"], size, state, "file.pt").net.model_name == size


@pytest.mark.parametrize(
    ("asked", "name", "message"),
    [
        ("speechbrain", "ECAPA_TDNN", r"is no ECAPA_TDNN of speechbrain but looks like XVEC \(--from wespeaker\): "),
        (
            "wespeaker",
            "ECAPA_TDNN_1024",
            "is no ECAPA_TDNN_1024 of wespeaker but looks like XVEC: no model of wespeaker",
        ),
        ("wespeaker", "VGGVox", "is no VGGVox of wespeaker but looks like XVEC: no model of wespeaker"),
    ],
)
def test_a_file_of_another_toolkit_or_model_is_told(asked, name, message):
    with pytest.raises(ValueError, match=message):
        import_network(PUBLISHED[asked], name, foreign_state(case_of("wespeaker", "XVEC")), "file.pt")


def test_weights_that_several_toolkits_would_take_are_told():
    """The CAM++ of wespeaker and of 3D-Speaker differ in what they hear alone."""
    state = foreign_state(case_of("wespeaker", "CAMPPlus"))
    assert fits_of_others(state, PUBLISHED["wespeaker"]) == ["CAMPPlus (--from 3dspeaker)"]
    assert fits_of_others(foreign_state(case_of("wespeaker", "XVEC")), PUBLISHED["wespeaker"]) == []


def test_two_tensors_that_would_be_one_are_refused():
    state = foreign_state(case_of("wespeaker", "XVEC"))
    state["trunk.convs.0.weight"] = state["frame_1.conv_1d.weight"]
    with pytest.raises(ValueError, match=r"two tensors are trunk.convs.0.weight here, trunk.convs.0.weight among them"):
        import_network(PUBLISHED["wespeaker"], "XVEC", state, "file.pt")


def test_another_size_is_refused_and_the_right_one_named():
    state = foreign_state(case_of("wespeaker", "ECAPA_TDNN_GLOB_c512"))
    with pytest.raises(ValueError, match=r"is no ECAPA_TDNN_GLOB_c1024 of .* looks like ECAPA_TDNN_GLOB_c512:"):
        import_network(PUBLISHED["wespeaker"], "ECAPA_TDNN_GLOB_c1024", state, "file.pt")


def test_a_missing_tensor_is_named():
    state = foreign_state(case_of("wespeaker", "XVEC"))
    del state["frame_3.conv_1d.weight"]
    with pytest.raises(ValueError, match=r"is no XVEC of wespeaker: .*missing trunk.convs.2.weight"):
        import_network(PUBLISHED["wespeaker"], "XVEC", state, "file.pt")


@pytest.mark.parametrize(
    ("model", "tensor", "value", "message"),
    [
        ("XVEC", "seg_1.weight", torch.zeros(3), r"embedding.0.weight is \(3,\) in the file"),
        ("XVEC", "frame_1.conv_1d.weight", torch.zeros(3), "not enough values to unpack"),
        ("ResNet18", "seg_1.weight", torch.zeros(5), "not laid out as those of this model .IndexError"),
        (
            "ResNet18",
            "layer4.0.shortcut.0.weight",
            torch.zeros(0, 2),
            "not laid out as those of this model .ZeroDivision",
        ),
    ],
)
def test_tensors_of_other_shapes_are_refused_whatever_is_read_from_them(model, tensor, value, message):
    state = foreign_state(case_of("wespeaker", model)) | {tensor: value}
    with pytest.raises(ValueError, match=rf"^file.pt is no {model} of wespeaker: .*{message}"):
        import_network(PUBLISHED["wespeaker"], model, state, "file.pt")


def test_a_tensor_that_no_model_has_is_refused_and_a_training_head_is_named():
    state = foreign_state(case_of("wespeaker", "XVEC"))
    with_head = state | {"projection.weight": torch.zeros(7, 16)}
    imported = import_network(PUBLISHED["wespeaker"], "XVEC", with_head, "file.pt")
    assert imported.not_loaded == ["projection.weight (the training head)"]
    with pytest.raises(ValueError, match=r"unknown frame_level\.weight"):
        import_network(PUBLISHED["wespeaker"], "XVEC", state | {"frame_level.weight": torch.zeros(1)}, "file.pt")


def test_unknown_names_are_told_the_nearest():
    state = foreign_state(case_of("wespeaker", "XVEC"))
    with pytest.raises(ValueError, match="unknown wespeaker model 'ECAPA_TDNN_GLOB_512'; did you mean"):
        import_network(PUBLISHED["wespeaker"], "ECAPA_TDNN_GLOB_512", state, "file.pt")


def test_a_file_of_another_size_or_version_of_redimnet_is_told():
    contents = contents_of(case_of("redimnet", "ReDimNetB1"))
    with pytest.raises(
        ValueError, match=r"is no ReDimNetB0 of redimnet but looks like .*ReDimNetB1.* that of ReDimNetB1"
    ):
        import_network(PUBLISHED["redimnet"], "ReDimNetB0", contents, "b1.pt")
    with pytest.raises(ValueError, match=r"is no ReDimNet2B0 of redimnet .* that of a ReDimNet$"):
        import_network(PUBLISHED["redimnet"], "ReDimNet2B0", contents, "b1.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "full"}, "has causal: full, known here: none"),
        ({"feat_type": "tf_spec"}, "has feat_type: tf_spec, known here: pt"),
        ({"group_divizor": 2}, "has group_divizor, which is not known here; did you mean 'group_divisor'"),
        ({"spec_params": {"spec_norm": "bn"}}, "has spec_norm: bn, known here: mn"),
        ({"spec_params": {"f_mix": 9}}, "has f_mix, which is not known here; did you mean 'f_min' or 'f_max'"),
        ({"stages_setup": [1, 2]}, None),
        ({"F": 10**9}, None),
        ({"spec_params": {"f_min": "low"}}, None),
        ({"spec_params": [1]}, r"has spec_params: \[1\], expected options by name"),
    ],
)
def test_options_of_redimnet_that_are_not_known_here_are_named(options, message):
    contents = contents_of(case_of("redimnet", "ReDimNet2B0"))
    contents["model_config"] = contents["model_config"] | options
    said = f"its model_config {message}" if message else "(?!its model_config)"
    with pytest.raises(ValueError, match=f"^b0.pt is no ReDimNet2B0 of redimnet: {said}"):
        import_network(PUBLISHED["redimnet"], "ReDimNet2B0", contents, "b0.pt")


def test_weights_of_redimnet_without_their_configuration_are_told():
    contents = contents_of(case_of("redimnet", "ReDimNet2B0"))["state_dict"]
    # wespeaker has the same network under the same names.
    with pytest.raises(ValueError, match=r"looks like ReDimNet2B0 \(--from wespeaker\): .* holds no model_config"):
        import_network(PUBLISHED["redimnet"], "ReDimNet2B0", contents, "b0.pt")


def test_files_of_redimnet_are_not_taken_for_wespeakers_which_hear_otherwise():
    contents = contents_of(case_of("redimnet", "ReDimNet2B0"))
    with pytest.raises(
        ValueError, match=r"looks like .*ReDimNet2B0 \(--from redimnet\): the file holds a model_config"
    ):
        import_network(PUBLISHED["wespeaker"], "ReDimNet2B0", contents, "b0.pt")


def test_constants_of_a_front_end_are_no_weights():
    contents = contents_of(case_of("redimnet", "ReDimNet"))
    contents["state_dict"]["spec.torchfbank.2.mel_scale.fb"] = torch.zeros(257, 72)
    left = import_network(PUBLISHED["redimnet"], "ReDimNet", contents, "file.pt").not_loaded
    assert left == ["spec.torchfbank.2.mel_scale.fb (constants of its front end)"]


def save(contents, folder):
    torch.save(contents, folder / "avg_model.pt")
    return str(folder / "avg_model.pt")


@pytest.mark.parametrize(
    ("toolkit", "model", "window", "scale"),
    [("wespeaker", "XVEC", "hamming", 32768.0), ("3dspeaker", "CAMPPlus", "povey", 1.0)],
)
def test_the_command_makes_a_model_file_that_says_where_it_came_from(toolkit, model, window, scale, tmp_path, capsys):
    case = case_of(toolkit, model)
    source, out = save(foreign_state(case), tmp_path), str(tmp_path / "model.pt")
    base = ["import-weights", source, "--from", toolkit, "--model", model, "--out", out]
    assert main([*base, "--licence", "Apache-2.0", "--trained-on", "VoxCeleb2"]) == 0
    loaded = load_model_file(out)
    with torch.inference_mode():
        found = loaded.net.from_features(golden_features(LENGTHS[0], 80).transpose(1, 2))[0]
    torch.testing.assert_close(found, torch.tensor(case["embeddings"][0]), atol=1e-5, rtol=1e-4)
    options = loaded.contents["front_end"]["options"]
    assert (options["window"], options["scale"], options["num_mels"]) == (window, scale, 80)
    capsys.readouterr()
    assert main(["info", out]) == 0
    facts = capsys.readouterr().out
    assert all(one in facts for one in ("Apache-2.0", "VoxCeleb2", toolkit, loaded.net.model_name))


def test_the_command_refuses_what_is_not_for_that_toolkit_and_writes_nothing(tmp_path, capsys):
    source = save(foreign_state(case_of("wespeaker", "XVEC")), tmp_path)
    base = ["import-weights", source, "--from", "wespeaker", "--out", str(tmp_path / "model.pt")]
    assert main([*base, "--model", "XVEC", "--pooling", "TAP"]) == 1
    assert "--pooling: only for voxceleb_trainer" in capsys.readouterr().err
    classic = ["import-weights", source, "--model", "XVEC", "--out", str(tmp_path / "model.pt")]
    assert main(classic) == 1
    message = capsys.readouterr().err
    assert "is no checkpoint of voxceleb_trainer" in message and "looks like XVEC (--from wespeaker)" in message
    assert main([*classic, "--from", "wspeaker"]) == 1
    assert "unknown toolkit 'wspeaker'; did you mean 'wespeaker'" in capsys.readouterr().err
    assert main([*base, "--model", "ResNet34"]) == 1
    assert "is no ResNet34 of wespeaker but looks like XVEC" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


def test_a_model_file_of_our_own_is_told(tmp_path, capsys):
    source, out = save(foreign_state(case_of("wespeaker", "XVEC")), tmp_path), str(tmp_path / "model.pt")
    base = ["import-weights", "--from", "wespeaker", "--model", "XVEC"]
    assert main([*base, source, "--out", out]) == 0
    assert main([*base, source, "--out", source]) == 1
    assert "--out is the checkpoint itself" in capsys.readouterr().err
    assert main([*base, out, "--out", str(tmp_path / "again.pt")]) == 1
    assert "is a model file of speakernet already" in capsys.readouterr().err
    assert not (tmp_path / "again.pt").exists()


def test_a_resnet_of_another_toolkit_is_none_of_voxceleb_trainers(tmp_path, capsys):
    source = save(foreign_state(case_of("wespeaker", "ResNet18")), tmp_path)
    assert main(["import-weights", source, "--model", "ResNetSE34L", "--out", str(tmp_path / "model.pt")]) == 1
    assert "looks like ResNet18 (--from wespeaker)" in capsys.readouterr().err
