"""What is no voice is refused alike by every command, function and request, and nothing is changed."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from serve_helpers import RATE, sentence, wav

import speakernet
from speakernet.cli import main
from speakernet.inference.enrolment import enroll, identify

ODD_NAME = "Zoë's clip %s (2).wav"


def floats(samples):
    """A WAV of floating-point samples."""
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def with_nan():
    samples = sentence(0, 0)
    samples[5000] = np.nan
    return floats(samples)


BAD = {
    "absent": (None, "such file"),
    "a folder": (None, "Is a directory"),
    "empty": (b"", "empty"),
    "text": (b"this is no audio\n" * 100, "not a readable audio file"),
    "a header alone": (wav(np.zeros(0, np.float32)), "no samples"),
    "cut off in its header": (wav(sentence(0, 0))[:40], ""),
    "one sample": (wav(np.full(1, 0.5, np.float32)), "too short"),
    "20 ms": (wav(sentence(0, 0)[4000:4320]), "too short"),
    "silence": (wav(np.zeros(2 * RATE, np.float32)), "silent"),
    "NaN": (with_nan(), "NaN"),
}
CAN_BE_EMBEDDED = ("20 ms", "silence")
"""A network gives some vector for these; whoever asks for vectors gets it, whoever asks for an answer does not."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.wav"
    path.write_bytes(wav(sentence(1, 0)))
    return path


@pytest.fixture(scope="module")
def store(models, good, tmp_path_factory):
    path = tmp_path_factory.mktemp("people") / "people.db"
    assert main(["enroll", "Ada", str(good), "--model", str(models[0]), "--store", str(path)]) == 0
    return path


@pytest.fixture()
def bad(request, tmp_path):
    """The case's name, its file under an odd name, and what has to be said of it."""
    content, words = BAD[request.param]
    path = tmp_path / ODD_NAME
    if request.param == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    return request.param, path, words


every_case = pytest.mark.parametrize("bad", BAD, indirect=True)


@every_case
def test_commands_refuse_and_leave_the_store(bad, models, good, store, tmp_path, capsys):
    case, path, words = bad
    before, model = store.read_bytes(), ["--model", str(models[0])]
    kept = [*model, "--store", str(store)]
    commands = {
        2: [["verify", str(path), str(good), *model], ["verify", str(good), str(path), *model]],
        1: [["enroll", "Bo", str(good), str(path), *kept], ["identify", str(path), *kept]],
    }
    if case not in CAN_BE_EMBEDDED and case != "a folder":
        commands[1].append(["embed", str(path), *model, "--out", str(tmp_path / "e.npz")])
    for expected, several in commands.items():
        for command in several:
            capsys.readouterr()
            status = main(command)
            out, err = capsys.readouterr()
            if case == "a folder" and command[0] == "enroll":
                # Folders are walked: there is no recording in it.
                assert status == 1 and ODD_NAME in err
                continue
            assert (status, out) == (expected, ""), (command, err)
            assert ODD_NAME in err and words in err and "Traceback" not in err, err
    assert store.read_bytes() == before and not (tmp_path / "e.npz").exists()


@every_case
def test_python_refuses(bad, models, good, store):
    case, path, words = bad
    verifier = speakernet.load(models[0], device="cpu")
    with verifier.people(store) as people:
        calls = [
            lambda: verifier.verify(path, good),
            lambda: verifier.verify(good, path, threshold=-1.0),
            lambda: enroll(verifier, people, "Bo", [good, path]),
            lambda: identify(verifier, people, path),
        ]
        if case not in CAN_BE_EMBEDDED:
            calls += [lambda: verifier.embed(path), lambda: verifier.embed_track(path)]
        for call in calls:
            with pytest.raises(ValueError) as refusal:
                call()
            assert ODD_NAME in str(refusal.value) and words in str(refusal.value)
        assert [one.name for one in people.people()] == ["Ada"]
    if case in CAN_BE_EMBEDDED:
        assert np.isfinite(verifier.embed(path)).all()


@every_case
def test_requests_are_refused(bad, server, good):
    _, path, words = bad
    if not path.is_file():
        return
    clip, fine = (ODD_NAME, path.read_bytes()), ("good.wav", good.read_bytes())
    requests = {
        "/verify": ({"first": clip, "second": fine}, {}),
        "/verify?": ({"first": fine, "second": clip}, {}),
        "/embed": ({"audio": clip}, {}),
        "/people": ([("audio", fine), ("audio", clip)], {"name": "Bo"}),
        "/identify": ({"audio": clip}, {}),
        "/streams": ({"reference": clip}, {"sample_rate": "16000"}),
    }
    for address, (files, data) in requests.items():
        answer = server.post(address, files=files, data=data)
        error = answer.json()["error"]
        assert answer.status_code == 422 and error["code"] in ("bad_audio", "silent"), (address, error)
        assert words in error["message"] and "clip" in error["message"]
    assert "Bo" not in [one["name"] for one in server.get("/people").json()["people"]]


def test_names_of_people_are_kept_or_refused_alike(models, good, server, tmp_path, capsys):
    kept = ["--model", str(models[0]), "--store", str(tmp_path / "people.db")]
    clip = ("good.wav", good.read_bytes())
    for name in ("Zoë O'Brien", "José; DROP TABLE people;--", "名前", "a/b\\c?d=e&f#g", '"<b>" 🙂', "%s %d \\n", ".."):
        assert main(["enroll", name, str(good), *kept]) == 0 and name in capsys.readouterr().out
        assert server.post("/people", files={"audio": clip}, data={"name": name}).json()["name"] == name
        address = "/people/" + "".join(f"%{byte:02X}" for byte in name.encode())
        assert server.delete(address).json()["name"] == name
        assert main(["people", "purge", name, "--store", kept[-1]]) == 0
    for name in ("", "   ", "two\nlines", "Unknown", "x" * 201):
        assert main(["enroll", name, str(good), *kept]) == 1
        assert server.post("/people", files={"audio": clip}, data={"name": name}).status_code == 422
    assert server.get("/people").json() == {"people": []}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_what_is_no_file_on_a_disk_is_refused_at_once(models, good, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.wav")
    for path in ("/dev/zero", str(tmp_path / "pipe.wav")):
        assert main(["verify", path, str(good), "--model", str(models[0])]) == 2
        assert "not a regular file" in capsys.readouterr().err
