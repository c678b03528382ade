"""A segmentation model in `who`: a tiny graph that knows people by their level, checked by hand."""

import json
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from speakernet.data import speech
from speakernet.data.audio import write_audio
from speakernet.files import FileError
from speakernet.inference.recordings import open_recording
from speakernet.inference.who.segmentation import HOP_FRAMES, open_model, segment
from tests.inference.conftest import spoken

REFERENCE = Path(__file__).resolve().parents[4] / "shared" / "reference" / "segmentation-3.0.onnx"
# Level of each class; the classes at 9 never occur.
LEVELS = np.array([0.0, 0.1, 0.2, 9.0, 0.3, 9.0, 9.0])
TIMES = np.array([0.0, 4.0, 9.0, 12.0, 20.0, 22.0])
SPOKEN = np.array([0.0, 0.1, 0.3, 0.2, 0.0])


def graph(path, levels=LEVELS, is_logarithm=True):
    """Write a graph: the mean magnitude of 991 samples every 270, and the class of the nearest
    level.
    """
    # The logit of a class is sharpness * (level * x - level^2 / 2), largest for the nearest level.
    sharpness = 5000.0
    tensors = {
        "mean": np.full((1, 1, 991), 1 / 991),
        "slopes": sharpness * levels[:, None, None],
        "offsets": -sharpness * levels**2 / 2,
    }
    output = "LogSoftmax" if is_logarithm else "Exp"
    model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]>
    levels (float[1, 1, samples] x) => (float[1, num_frames, {len(levels)}] y) {{
        magnitude = Abs(x)
        level = Conv<strides = [270]>(magnitude, mean)
        logits = Conv(level, slopes, offsets)
        frames = Transpose<perm = [0, 2, 1]>(logits)
        y = {output}(frames)
    }}""")
    for name, values in tensors.items():
        weights = numpy_helper.from_array(values.astype(np.float32), name)
        model.graph.initializer.append(weights)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    path = graph(tmp_path_factory.mktemp("segmentation") / "levels.onnx")
    samples = np.repeat(SPOKEN, (16000 * np.diff(TIMES)).astype(int)).astype(np.float32)
    return segment(open_recording(samples, 16000, 16000), path)


def test_frames(segmented):
    # Windows at 0, 5, 10 and 15 s.
    assert segmented.classes.shape == (4, 589)
    assert len(segmented.speech) == 3 * HOP_FRAMES + 589
    middles = (TIMES[1:] + TIMES[:-1]) / 2
    assert segmented.speech_at(middles) == pytest.approx([0, 1, 1, 1, 0], abs=1e-3)
    assert segmented.speech_at(np.array([3.9, 4.1, 19.9, 20.1])) == pytest.approx(
        [0, 1, 1, 0], abs=0.01
    )
    # 3 s of overlap, in frames of 16.875 ms.
    assert (segmented.overlap > 0.5).sum() == pytest.approx(3 / 0.016875, abs=2)


def test_people_of_windows(segmented):
    stretches = np.array([[5.0, 6.5], [10.0, 11.5], [13.0, 14.5], [16.0, 17.5]])
    people = segmented.people_of(stretches).toarray().reshape(4, 3, 4)
    # In the window at 5 s, person 1 speaks in the first stretch and person 2 in the third.
    assert people[1].tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    # Nobody speaks alone in the second.
    assert not people[:, :, 1].any()
    assert people[0, 0].tolist() == [1, 0, 0, 0] and people[3, 1].tolist() == [0, 0, 0, 1]


def test_second_voices(segmented):
    sections = [(4.0, 10.5, 0), (10.5, 20.0, 1), (20.5, 21.0, 2)]
    shares = np.zeros((12, 3))
    for person, voice in ((0, 0), (1, 1)):
        shares[person::3, voice] = 1.0
    # Each voice continues in the turn of the other.
    expected = [(9.0, 10.5, 1), (10.5, 12.0, 0)]
    found = segmented.second_voices(sections, shares)
    assert [voice for *_, voice in found] == [1, 0]
    times = [section[:2] for section in found]
    assert np.array(times) == pytest.approx(
        np.array([section[:2] for section in expected]), abs=0.03
    )
    # The window's person counts, not the nearest turn; without one, the nearest turn does.
    nearest = [(4.0, 11.5, 0), (11.6, 20.0, 2), (20.5, 21.0, 1)]
    assert segmented.second_voices(nearest, shares)[0][2] == 1
    assert segmented.second_voices(nearest, np.zeros((12, 3)))[0][2] == 2
    assert segmented.second_voices([(4.0, 20.0, 0)], shares[:, :1]) == []


def test_bad_models(tmp_path, calibrated, refuse):
    (tmp_path / "text.onnx").write_text("not a graph")
    graph(tmp_path / "six.onnx", LEVELS[:6])
    graph(tmp_path / "scores.onnx", is_logarithm=False)
    for name, value in {"text": "ONNX", "six": "(589, 6)", "scores": "output"}.items():
        path = tmp_path / f"{name}.onnx"
        with pytest.raises(FileError, match=r"589 frames x 7") as caught:
            open_model(path)
        assert str(path) in str(caught.value) and value in str(caught.value)
    write_audio(tmp_path / "a.wav", np.zeros(16000, np.float32))
    for words, value in {
        f"{tmp_path}/a.wav --segmentation {tmp_path}/six.onnx": "six.onnx",
        f"{tmp_path}/a.wav --segmentation {tmp_path}/none.onnx": "none.onnx",
        f"- --segmentation {tmp_path}/six.onnx": "--segmentation",
    }.items():
        assert value in refuse(f"who {words} --model {calibrated}")


@pytest.mark.parametrize("rate", [8000, 16000])
def test_command(rate, tmp_path, calibrated, call, monkeypatch):
    monkeypatch.setattr(speech, "default_detector", lambda: speech.ENERGY)
    assert segment(None, None) is None
    silence = np.zeros(16000, np.float32)
    voice = spoken(0, 1, 3.0)
    voice *= 0.1 / np.abs(voice).mean()
    write_audio(
        tmp_path / "a.wav", np.concatenate([silence, voice, silence])[:: 16000 // rate], rate
    )
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path))
    fetched = tmp_path / "models" / "pyannote" / "segmentation-3.0.onnx"
    fetched.parent.mkdir(parents=True)
    graph(fetched)
    for option, used in {"": " and segmentation-3.0.onnx", "--segmentation none": ""}.items():
        status, out, _ = call(
            f"who {tmp_path}/a.wav --model {calibrated} --out {tmp_path} {option}"
        )
        assert status == 0 and f"found by energy{used}\n" in out
        turns = json.loads((tmp_path / "a.json").read_text())["turns"]
        assert turns[0]["start"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.skipif(not REFERENCE.is_file(), reason="needs the published segmentation model")
def test_published_model():
    found = segment(open_recording(np.zeros(16000, np.float32), 16000, 16000), REFERENCE)
    assert found.classes.shape == (1, 589) and found.speech[:50].max() < 0.1
