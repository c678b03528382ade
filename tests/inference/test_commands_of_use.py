"""verify, embed, enroll, identify, people and calibrate as users run them, and common mistakes."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.data.audio import write_audio
from speakernet.data.ffmpeg import FfmpegError, find_ffmpeg
from speakernet.inference.people import PeopleStore
from speakernet.models.model_file import SYNTHETIC_ONLY, model_file_contents
from tests.small_networks import small_network


@pytest.fixture()
def call(capsys):
    """Run a command in this process: exit status, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(scope="module")
def store(voices: Path, calibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight of the twelve voices, enrolled with three recordings each."""
    path = tmp_path_factory.mktemp("store") / "people.db"
    for speaker in range(8):
        files = [str(voices / f"s{speaker:02d}" / f"{number}.wav") for number in range(3)]
        assert (
            main(
                [
                    "enroll",
                    f"Voice {speaker}",
                    *files,
                    "--model",
                    str(calibrated),
                    "--store",
                    str(path),
                ]
            )
            == 0
        )
    return path


def with_other_bias(model: Path, path: Path) -> Path:
    """A copy of a model file with different weights."""
    contents = read_checkpoint(model)
    contents["weights"]["embedding.bias"] += 0.5
    write_checkpoint(path, contents)
    return path


def test_a_model_of_synthetic_voices_says_so(call, voices, calibrated, tmp_path, caplog):
    contents = read_checkpoint(calibrated)
    model = tmp_path / "demo.pt"
    store = tmp_path / "people.db"
    contents["training_summary"]["corpus"] = {"is_synthetic": True, "speakers": 12}
    write_checkpoint(model, contents)
    files = [voices / "s00/3.wav", voices / "s00/4.wav"]
    for words in (
        ("verify", *files),
        ("enroll", "Ada", *files, "--store", store),
        ("identify", files[0], "--store", store),
    ):
        caplog.clear()
        assert call(*words, "--model", model)[0] == 0
        assert caplog.text.count(SYNTHETIC_ONLY) == 1, words
    assert SYNTHETIC_ONLY in call("info", model)[1]
    caplog.clear()
    call("verify", *files, "--model", calibrated)
    assert SYNTHETIC_ONLY not in caplog.text + call("info", calibrated)[1]


def test_verify(call, voices, calibrated):
    verifier = speakernet.load(calibrated, "cpu")
    fit = read_checkpoint(calibrated)["calibration"]["fits"][0]
    one = voices / "s00/3.wav"
    same = voices / "s00/4.wav"
    other = voices / "s05/4.wav"
    for second, expected, words in (
        (same, 0, "same speaker: score "),
        (other, 1, "different speakers: score "),
    ):
        status, out, _ = call("verify", one, second, "--model", calibrated)
        assert (
            status == expected
            and out.startswith(words)
            and "(false accepts 1 %)" in out
            and out.count("\n") == 1
        )
        found = json.loads(
            call("verify", one, second, "--model", calibrated, "--far", "0.01", "--json")[1]
        )
        assert found == vars(verifier.verify(one, second, false_accept_rate=0.01))
        score = verifier.compare(*verifier.embed([one, second], speech=True))
        assert found["score"] == pytest.approx(score, abs=1e-6)
        # Odds do not exceed what the number of pairs supports.
        ratio = np.clip(fit["offset"] + fit["weights"][0] * score, *verifier.rule.bounds)
        assert found["log_likelihood_ratio"] == pytest.approx(ratio, abs=1e-4)


def test_verify_without_calibration(call, voices, uncalibrated):
    files = [voices / "s00/3.wav", voices / "s00/4.wav", "--model", uncalibrated]
    status, out, err = call("verify", *files)
    assert (status, out) == (2, "") and f"speakernet calibrate --model {uncalibrated}" in err
    assert call("verify", *files, "--far", "0.01")[0] == 2
    for threshold, expected in (("-1", 0), ("1.5", 1), ("default", 0)):
        status, out, _ = call("verify", *files, "--json", f"--threshold={threshold}")
        assert status == expected and json.loads(out)["log_likelihood_ratio"] is None
    assert json.loads(out)["threshold"] == 0.4


def test_verify_errors(call, voices, calibrated, tmp_path, monkeypatch):
    good = voices / "s00/3.wav"
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("this is no audio\n" * 100)
    write_audio(tmp_path / "short.wav", np.random.default_rng(0).normal(0, 0.1, 320), 16000)
    write_audio(tmp_path / "silence.wav", np.zeros(32000, np.float32), 16000)
    (tmp_path / "broken.pt").write_bytes(calibrated.read_bytes()[:-700])
    for name in ("absent.wav", "empty.wav", "text.wav", "short.wav", "silence.wav", ""):
        status, out, err = call("verify", good, tmp_path / name, "--model", calibrated)
        assert (
            (status, out) == (2, "") and str(tmp_path / name) in err and "Traceback" not in err
        ), (name, err)
    for model in (tmp_path / "broken.pt", tmp_path / "absent.pt", good, tmp_path):
        status, out, err = call("verify", good, good, "--model", model)
        assert (status, out) == (2, "") and str(model) in err, err
    options = ("--far=2", "--far=0.0001", "--threshold=nan", "--threshold=often", "--fat=1")
    assert [call("verify", good, good, "--model", calibrated, one)[0] for one in options] == [2] * 5
    assert "--modl" in call("verify", good, good, "--modl", calibrated)[2].splitlines()[-1]
    assert "first" in call("verify", good, "-", "--model", calibrated)[2]
    status, _, err = call("verify", good, "absent.wav", "--model", calibrated, "--debug")
    assert status == 2 and "Traceback" in err
    # A bug in the program must not look like an answer either.
    monkeypatch.setattr("speakernet.inference.verifier.inspect_recording", lambda *_, **__: 1 / 0)
    status, out, err = call("verify", good, good, "--model", calibrated)
    assert (status, out) == (2, "") and "ZeroDivisionError" in err


def test_verify_non_finite_scores(call, voices, calibrated, tmp_path):
    contents = read_checkpoint(calibrated)
    name = next(one for one in contents["weights"] if one.endswith("running_var"))
    contents["weights"][name].fill_(-1.0)
    write_checkpoint(tmp_path / "m.pt", contents)
    good = voices / "s00/3.wav"
    for words in (
        ["verify", good, good],
        ["enroll", "Ada", good, "--store", tmp_path / "p.db"],
        ["embed", good, "--out", tmp_path / "e.npz"],
        ["embed", good, "--out", tmp_path / "e.npz", "--skip-broken"],
    ):
        status, out, err = call(*words, "--model", tmp_path / "m.pt")
        assert status == (2 if words[0] == "verify" else 1) and not out and "NaN" in err
    assert not (tmp_path / "e.npz").exists()


def test_verify_unwritable_answer(voices, calibrated, monkeypatch):
    file = str(voices / "s00/3.wav")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["verify", file, file, "--model", str(calibrated)]) == 2


def test_identify(call, voices, calibrated, store):
    words = ["--model", calibrated, "--store", store]
    right = 0
    for speaker in range(8):
        file = voices / f"s{speaker:02d}/4.wav"
        status, out, _ = call("identify", file, *words)
        nearest = out.splitlines()[1].split(maxsplit=2)[2]
        assert status == 0 and out.startswith((f"{nearest} score ", "unknown score ")), out
        assert "threshold" in out and "log-likelihood-ratio" in out
        right += call("identify", file, *words, "--threshold=-1")[1].startswith(
            f"Voice {speaker} score "
        )
    assert right >= 7
    status, out, _ = call("identify", voices / "s00/4.wav", *words, "--threshold", "2")
    assert status == 0 and out.startswith("unknown score ") and len(out.splitlines()) == 6
    # At most 1 % per comparison, eight times, against the share asked for.
    for share, is_missed in (("0.02", True), ("0.08", False)):
        last = call("identify", voices / "s00/4.wav", *words, "--far", share)[1].splitlines()[-1]
        assert "up to 8 % of strangers" in last and ("than the 2 %" in last) == is_missed
    found = json.loads(call("identify", voices / "s03/4.wav", *words, "--top", "2", "--json")[1])
    # 0.01 over eight people needs 0.00125 per comparison, so the strictest threshold of the file is
    # used.
    strictest = max(one["threshold"] for one in read_checkpoint(calibrated)["thresholds"])
    assert (found["num_people"], len(found["candidates"]), found["decision"]["threshold"]) == (
        8,
        2,
        strictest,
    )


def test_mistakes_with_stores(call, voices, calibrated, uncalibrated, store, tmp_path):
    good = voices / "s00/4.wav"
    (tmp_path / "text.db").write_text("people")
    for name in ("absent.db", "text.db"):
        status, out, err = call("identify", good, "--model", calibrated, "--store", tmp_path / name)
        assert (status, out) == (1, "") and name in err and len(err.strip().splitlines()) == 1, err
    status, out, err = call("identify", good, "--model", uncalibrated, "--store", store)
    assert (status, out) == (1, "") and "speakernet calibrate" in err
    other = with_other_bias(uncalibrated, tmp_path / "other.pt")
    status, _, err = call("enroll", "X", good, "--model", other, "--store", store)
    assert status == 1 and "people reembed" in err
    # A failed enrolment does not create a store.
    write_audio(silent := tmp_path / "silent.wav", np.zeros(16000), 16000)
    write_audio(
        noise := tmp_path / "noise.wav", np.random.default_rng(0).normal(0, 0.1, 48000), 16000
    )
    assert (
        "noise.wav: no speech: none was found in 3.00 s"
        in call("enroll", "X", noise, "--model", calibrated, "--store", store)[2]
    )
    for name, file, expected in (
        ("X", "absent.wav", 1),
        ("X", silent, 2),
        ("X", noise, 2),
        (".", good, 1),
    ):
        new = tmp_path / "new.db"
        assert call("enroll", name, file, "--model", calibrated, "--store", new)[0] == expected
        assert not (tmp_path / "new.db").exists()


def test_enroll_many(call, voices, calibrated, tmp_path, caplog):
    folder = tmp_path / "my_voices"
    words = ["--model", calibrated, "--store", tmp_path / "p.db"]
    for name, speaker in (("Ada", 0), ("Bo", 5), ("Cy", 6)):
        (folder / name / "monday").mkdir(parents=True)
        for number in range(2):
            shutil.copy(voices / f"s0{speaker}/{number}.wav", folder / name / "monday")
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").write_text("not a person")
    write_audio(folder / "Bo" / "silent.wav", np.zeros(16000), 16000)
    (folder / "Abe").mkdir()
    status, out, _ = call("enroll", "--folder", folder, *words)
    assert status == 1 and "2 people of 4 enrolled" in out and "Bo" not in out
    assert (
        "Bo is left out" in caplog.text
        and "silent.wav" in caplog.text
        and "Abe is left out" in caplog.text
    )
    (folder / "Abe").rmdir()
    (folder / "Bo" / "silent.wav").unlink()
    status, out, _ = call("enroll", "--folder", folder, *words)
    assert status == 0 and "3 people of 3 enrolled" in out and "Bo: 2 recordings added" in out
    assert "Ada: 0 recordings added, 2 in all" in out
    assert call("identify", voices / "s05/3.wav", *words, "--threshold=-1")[1].startswith(
        "Bo score "
    )
    for wrong in (
        [],
        ["Ada"],
        ["Ada", voices / "s00/0.wav", "--folder", folder],
        [voices / "s00/0.wav", voices / "s00/1.wav"],
        ["--folder", folder / "Ada" / "monday"],
    ):
        assert call("enroll", *wrong, *words)[0] == 1
    (folder / "unknown").mkdir()
    shutil.copy(voices / "s07/0.wav", folder / "unknown")
    assert "unknown" in call("enroll", "--folder", folder, *words[:3], tmp_path / "new.db")[2]
    assert not (tmp_path / "new.db").exists(), "names are checked first"


def test_enroll_strict(call, voices, calibrated, tmp_path, caplog):
    names = [voices / "s00/0.wav", voices / "s00/1.wav", voices / "s00/2.wav", voices / "s06/0.wav"]
    words = ["--model", calibrated, "--store", tmp_path / "p.db"]
    status, out, err = call("enroll", "Ada", *names, *words, "--strict")
    assert (
        status == 1
        and not out
        and "s06/0.wav: does not sound like" in err
        and not (tmp_path / "p.db").exists()
    )
    assert (
        "Ada: 4 recordings added (" in call("enroll", "Ada", *names, *words)[1]
        and "does not sound" in caplog.text
    )
    # One file of the batch again, by itself.
    assert (
        "0 recordings added" in call("enroll", "Ada", names[1], *words)[1]
        and "s00/1.wav is already" in caplog.text
    )
    assert "sounds like 'Ada'" in call("enroll", "Eve", voices / "s00/3.wav", *words, "--strict")[2]
    for is_copy in (False, True):
        caplog.clear()
        assert call("enroll", "Eve", voices / "s00/3.wav", *words)[0] == 0
        assert ("sounds like" in caplog.text) != is_copy, "a copy adds nothing to doubt"


def test_embed_inputs(call, voices, uncalibrated, tmp_path, monkeypatch):
    verifier = speakernet.load(uncalibrated, "cpu")
    (voices / "files.txt").write_text("s00/0.wav\nspeaker s01/1.wav\n\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{voices}/s02/0.wav\n"))
    out = tmp_path / "e.npz"
    command = [
        "embed",
        voices / "s03",
        voices / "files.txt",
        "-",
        "--model",
        uncalibrated,
        "--out",
        out,
    ]
    assert call(*command)[0] == 0
    with np.load(out) as found:
        names = found["names"].tolist()
        embeddings = found["embeddings"]
        assert str(found["fingerprint"]) == verifier.fingerprint
    assert [name[-9:] for name in names] == [f"s03/{n}.wav" for n in range(5)] + [
        "s00/0.wav",
        "s01/1.wav",
        "s02/0.wav",
    ]
    np.testing.assert_allclose(embeddings, verifier.embed(names), atol=1e-4)


def test_embed_resumes(call, voices, uncalibrated, tmp_path, monkeypatch):
    monkeypatch.setattr("speakernet.inference.bulk.BLOCK_UTTERANCES", 2)
    folder = tmp_path / "some"
    out = tmp_path / "e.npz"
    shutil.copytree(voices / "s04", folder)
    command = ("embed", folder, "--model", uncalibrated, "--out", out)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("speakernet.inference.bulk.atomic_write", lambda *_: 1 / 0)
        call(*command)
    shutil.copy(voices / "s05/0.wav", folder / "4.wav")
    assert ", 4 of them" in call(*command)[1]
    with np.load(out) as found:
        wanted = speakernet.load(uncalibrated, "cpu").embed(voices / "s05/0.wav")[0]
        np.testing.assert_allclose(found["embeddings"][4], wanted, atol=1e-4)
    assert not out.with_name("e.npz.parts").exists()


def test_embed_skipped_files(call, voices, uncalibrated, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"s{s:02d} s{s:02d}/0.wav\n" for s in range(4)))
    assert (
        main(["pack", str(tmp_path / "packed"), "--list", str(listed), "--source", str(voices)])
        == 0
    )
    status, out, err = call(
        "embed", tmp_path / "packed", "--model", uncalibrated, "--out", tmp_path / "p.npz"
    )
    assert status == 0 and "4 embeddings with 11 dimensions" in out, err
    (tmp_path / "text.wav").write_text("no audio")
    words = [
        "embed",
        voices / "s00/0.wav",
        tmp_path / "text.wav",
        "absent.wav",
        "--model",
        uncalibrated,
    ]
    status, _, err = call(*words, "--out", tmp_path / "x.npz")
    assert status == 1 and "2 of 3 recordings" in err and not (tmp_path / "x.npz").exists()
    status, out, _ = call(*words, "--out", tmp_path / "x.npz", "--skip-broken")
    assert status == 1 and "1 embedding with 11 dimensions; 2 left out" in out
    listed.write_text("spk nope.wav\n")
    err = call("embed", listed, "--model", uncalibrated, "--out", tmp_path / "y.npz")[2]
    assert "line 1" in err and "'nope.wav'" in err
    (tmp_path / "nothing").mkdir()
    err = call("embed", tmp_path / "nothing", "--model", uncalibrated, "--out", tmp_path / "y.npz")[
        2
    ]
    assert (suffixes := re.findall(r"\.\w+", err.partition("ending in")[2])) == sorted(
        suffixes
    ) and ".wav" in suffixes
    for given, target in (
        (voices / "s00", "e.txt"),
        (voices / "s00", "."),
        (tmp_path / "nothing", "y.npz"),
    ):
        status, out, err = call("embed", given, "--model", uncalibrated, "--out", tmp_path / target)
        assert status == 1 and not out and str(tmp_path) in err


def test_folders_with_m4a(call, voices, calibrated, tmp_path):
    try:
        command = [find_ffmpeg(), "-nostdin", "-loglevel", "error"]
    except FfmpegError:
        pytest.skip("needs ffmpeg")
    # Lossless, because AAC of another ffmpeg could look like another speaker to so small a network.
    subprocess.run(
        [*command, "-i", voices / "s00/3.wav", "-c:a", "alac", tmp_path / "3.m4a"], check=True
    )
    assert call("verify", voices / "s00/4.wav", tmp_path / "3.m4a", "--model", calibrated)[0] == 0
    assert (
        "1 embedding "
        in call("embed", tmp_path, "--model", calibrated, "--out", tmp_path / "e.npz")[1]
    )


def test_embed_in_parts(call, voices, uncalibrated, tmp_path, monkeypatch):
    monkeypatch.setattr("speakernet.inference.bulk.BLOCK_UTTERANCES", 1)
    whole = tmp_path / "whole.npz"
    parts = tmp_path / "parts.npz"
    assert call("embed", voices / "s03", "--model", uncalibrated, "--out", whole)[0] == 0
    command = ("embed", voices / "s03", "--model", uncalibrated, "--out", parts, "--part")
    assert "1/2" in call(*command, "2/2")[1] and not parts.exists()
    assert call(*command, "1/2")[0] == 0 and parts.read_bytes() == whole.read_bytes()
    # Repeating a part finds everything done.
    assert "an earlier run" in call(*command, "2/2")[1] and parts.read_bytes() == whole.read_bytes()
    assert call(*command, "3/2")[0] == 1


def test_people(call, calibrated, store, tmp_path):
    path = shutil.copy(store, tmp_path / "p.db")
    out = call("people", "list", "--store", path)[1]
    assert out.splitlines()[1].split()[:3] == ["Voice", "0", "3"] and "8 people, model" in out
    # `purge` would have nothing to do without a backup.
    assert "purge" not in call("people", "remove", "Voice 1", "--store", path)[1]
    assert call("people", "remove", "Voice 1", "--store", path)[0] == 1
    assert call("people", "export", "--store", path, "--out", tmp_path / "all.npz")[0] == 0
    assert (
        call(
            "people", "export", "--store", path, "--out", tmp_path / "one.json", "--name", "Voice 2"
        )[0]
        == 0
    )
    everybody = PeopleStore(path, fingerprint=None, embedding_dim=None).recordings()
    with np.load(tmp_path / "all.npz") as exported:
        np.testing.assert_array_equal(exported["embeddings"], [one.embedding for one in everybody])
    kept = json.loads((tmp_path / "one.json").read_text())
    assert [one["name"] for one in kept["recordings"]] == ["Voice 2"] * 3 and kept[
        "embedding_dim"
    ] == 11
    verifier = speakernet.load(with_other_bias(calibrated, tmp_path / "new.pt"), "cpu")
    assert "p.db.backup-" in call("people", "reembed", "--model", verifier.name, "--store", path)[1]
    assert "purge 'Voice 3'" in call("people", "remove", "Voice 3", "--store", path)[1]
    for action, needed in (("remove", "name"), ("reembed", "--model"), ("export", "--out")):
        assert needed in call("people", action, "--store", path)[2]
    first = verifier.people(path).recordings("Voice 2")[0]
    np.testing.assert_allclose(
        first.embedding, verifier.embed(first.source, speech=True)[0], atol=1e-5
    )
    assert call("people", "purge", "Voice 2", "--store", path)[1].count("p.db") == 2
    assert not any(b"Voice 2" in one.read_bytes() for one in tmp_path.glob("p.db*"))
    assert call("people", "burn", "--store", path)[0] == 2 and call("people")[0] == 2


def test_keys(call, voices, calibrated, tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    (tmp_path / "key").write_text("secret words\n")
    file = voices / "s00/0.wav"
    words = ["--model", calibrated, "--store", tmp_path / "p.db"]
    assert call("enroll", "Ada", file, *words, "--key-file", tmp_path / "key")[0] == 0
    assert "--key-file" in call("identify", file, *words)[2]
    for key, status in (("secret words", 0), ("other", 1)):
        monkeypatch.setenv("SPEAKERNET_STORE_KEY", key)
        assert call("identify", file, *words)[0] == status
    monkeypatch.delenv("SPEAKERNET_STORE_KEY")
    assert "encrypted" in call("people", "list", "--store", tmp_path / "p.db")[1]


def test_calibrate(call, voices, uncalibrated, tmp_path):
    path = tmp_path / "m.pt"
    store = tmp_path / "p.db"
    shutil.copy(uncalibrated, path)
    before = path.read_bytes()
    words = ["--model", path, "--store", store]
    assert call("enroll", "Ada", voices / "s00/0.wav", voices / "s00/1.wav", *words)[0] == 0
    status, out, err = call("calibrate", "--model", path, "--trials", voices / "trials.txt")
    backup = tmp_path / "m.before-calibration.pt"
    assert status == 0 and str(backup) in out and backup.read_bytes() == before, err
    assert "95 % interval" in out and "threshold 0." in out
    assert (
        str(backup) not in call("calibrate", "--model", path, "--trials", voices / "trials.txt")[1]
    )
    assert backup.read_bytes() == before
    fits, thresholds = (read_checkpoint(path)[name] for name in ("calibration", "thresholds"))
    assert len(fits["fits"]) == 1 and [one["name"] for one in thresholds] == [
        "eer",
        "far_5%",
        "far_1%",
    ]
    # A store knows its model by its weights.
    assert call("identify", voices / "s00/1.wav", *words)[1].startswith("Ada score ")
    info = call("info", path)[1]
    fingerprint = speakernet.load(path, "cpu").fingerprint
    assert all(word in info for word in ("far_1%", "embedding=whole", "MIT", fingerprint))
    assert fingerprint == speakernet.load(uncalibrated, "cpu").fingerprint


def test_good_calibration_is_kept(call, voices, calibrated, store, tmp_path):
    path = tmp_path / "m.pt"
    swapped = tmp_path / "swapped.txt"
    shutil.copy(calibrated, path)
    lines = (voices / "trials.txt").read_text().splitlines()
    swapped.write_text("".join(f"{1 - int(line[0])}{line[1:]}\n" for line in lines))
    for words in (["--trials", swapped, "--audio", voices], ["--store", store]):
        status, out, err = call("calibrate", "--model", path, *words)
        assert status == 1 and not out and ("swapped" if "--audio" in words else "--out") in err
    # Worse than chance: each person has the recordings of two voices.
    for name, speaker in (("Ada", 0), ("Ada", 5), ("Bo", 6), ("Bo", 7)):
        words = ["--model", path, "--store", tmp_path / "p.db"]
        assert call("enroll", name, voices / f"s0{speaker}/0.wav", *words)[0] == 0
    status, out, err = call("calibrate", *words, "--out", tmp_path / "new.pt")
    assert (
        status == 1 and not out and "who is enrolled" in err and not (tmp_path / "new.pt").exists()
    )
    assert path.read_bytes() == calibrated.read_bytes() and not list(tmp_path.glob("m.before*"))


def test_calibrate_few_pairs(call, voices, uncalibrated, tmp_path, caplog):
    path = tmp_path / "m.pt"
    lines = (voices / "trials.txt").read_text().splitlines(keepends=True)
    shutil.copy(uncalibrated, path)
    targets, others = ([line for line in lines if line[0] == label] for label in "10")
    (tmp_path / "few.txt").write_text("".join(targets[:40] + others[:50]))
    assert (
        call("calibrate", "--model", path, "--trials", tmp_path / "few.txt", "--audio", voices)[0]
        == 0
    )
    assert "only 50 " in caplog.text
    caplog.clear()
    assert call("verify", voices / "s00/0.wav", voices / "s00/1.wav", "--model", path)[0] == 0
    assert "only 50 " in caplog.text and "50 non-target" in call("info", path)[1]


def test_calibrate_on_own_people(call, voices, calibrated, store, tmp_path):
    out = tmp_path / "own.pt"
    cohort = [voices / f"s{speaker:02d}" for speaker in range(8, 12)]
    status, text, err = call(
        "calibrate", "--model", calibrated, "--store", store, "--cohort", *cohort, "--out", out
    )
    # 24 recordings against the rest of their person and against 7 others; 20 strangers against 8
    # people.
    assert status == 0 and f"{24 + 24 * 7 + 20 * 8:,} trials, 24 of them targets" in text, err
    assert (
        "24 same-speaker pairs" in text
        and read_checkpoint(out)["calibration"]["fits"][-1]["list"] == "people.db"
    )
    for bad, found in (
        (["--trials", voices / "trials.txt", "--store", store], "--store"),
        ([], "--store"),
        (["--trials", voices / "trials.txt", "--cohort", voices], "--cohort"),
        (["--store", store, "--audio", voices], "--audio"),
        (["--store", tmp_path / "absent.db"], "absent.db"),
        (["--trials", voices / "files_absent.txt"], "files_absent.txt"),
        (["--trials", voices / "trials.txt", "--prior", "1"], "--prior 1.0"),
    ):
        status, _, err = call("calibrate", "--model", calibrated, *bad)
        assert status == 1 and found in err, err


@pytest.mark.needs("transformers", "peft")
def test_pretrained_backbone(call, voices, tmp_path):
    model, store, adapted = (tmp_path / name for name in ("model.pt", "people.db", "adapted.pt"))
    write_checkpoint(model, model_file_contents(small_network("Pretrained"), loss_normalizes=True))
    files = [voices / "s00/0.wav", voices / "s01/0.wav"]
    assert call("embed", *files, "--model", model, "--out", tmp_path / "e.npz")[0] == 0
    with np.load(tmp_path / "e.npz") as found:
        np.testing.assert_allclose(
            found["embeddings"], speakernet.load(model, "cpu").embed(files), atol=1e-4
        )
    for name, file in zip("AB", files, strict=True):
        assert call("enroll", name, file, "--model", model, "--store", store)[0] == 0
    status, out, _ = call(
        "identify", files[1], "--model", model, "--store", store, "--threshold", "0.9"
    )
    assert status == 0 and out.startswith("B score 1.0")
    folders = [voices / f"s0{speaker}" for speaker in range(4)]
    words = ["--recordings", *folders, "--method", "whitening", "--out", adapted]
    assert call("adapt", "--model", model, *words)[0] == 0
    assert speakernet.load(adapted, "cpu").embed(files).shape == (2, 32)
