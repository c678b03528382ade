"""verify, embed, enroll, identify, people and calibrate as users run them, and common mistakes."""

import io
import json
import shutil
import subprocess

import numpy as np
import pytest
from numpy.testing import assert_allclose

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.data.audio import write_audio
from speakernet.inference.people import PeopleStore
from speakernet.models.model_file import SYNTHETIC_ONLY
from tests.commands import run_command


def with_other_bias(model, path):
    """A copy of a model file with different weights."""
    contents = read_checkpoint(model)
    contents["weights"]["embedding.bias"] += 0.5
    write_checkpoint(path, contents)
    return path


def test_a_model_of_synthetic_voices_says_so(call, voices, calibrated, tmp_path, caplog):
    contents = read_checkpoint(calibrated)
    model = tmp_path / "demo.pt"
    contents["training_summary"]["corpus"] = {"is_synthetic": True, "speakers": 12}
    write_checkpoint(model, contents)
    files = f"{voices}/s00/3.wav {voices}/s00/4.wav"
    for command in (f"verify {files}", f"enroll Ada {files} --store {tmp_path}/people.db"):
        caplog.clear()
        run_command(f"{command} --model {model}")
        assert caplog.text.count(SYNTHETIC_ONLY) == 1, command
    assert SYNTHETIC_ONLY in call(f"info {model}")[1]
    caplog.clear()
    call(f"verify {files} --model {calibrated}")
    assert SYNTHETIC_ONLY not in caplog.text + call(f"info {calibrated}")[1]


def test_verify(call, voices, calibrated, verifier):
    fit = read_checkpoint(calibrated)["calibration"]["fits"][0]
    first = voices / "s00/3.wav"
    for second, expected, answer in (
        (voices / "s00/4.wav", 0, "same speaker: score "),
        (voices / "s05/4.wav", 1, "different speakers: score "),
    ):
        command = f"verify {first} {second} --model {calibrated}"
        status, out, _ = call(command)
        assert status == expected and out.startswith(answer)
        assert "(false accepts 1 %)" in out and out.count("\n") == 1
        decision = json.loads(call(f"{command} --far 0.01 --json")[1])
        assert decision == vars(verifier.verify(first, second, false_accept_rate=0.01))
        # Odds do not exceed what the number of pairs supports.
        ratio = fit["offset"] + fit["weights"][0] * decision["score"]
        ratio = np.clip(ratio, *verifier.rule.bounds)
        assert decision["log_likelihood_ratio"] == pytest.approx(ratio, abs=1e-4)


def test_verify_without_calibration(call, refuse, voices, uncalibrated):
    command = f"verify {voices}/s00/3.wav {voices}/s00/4.wav --model {uncalibrated}"
    assert f"speakernet calibrate --model {uncalibrated}" in refuse(command, status=2)
    assert call(f"{command} --far 0.01")[0] == 2
    for threshold, expected in (("-1", 0), ("1.5", 1), ("default", 0)):
        status, out, _ = call(f"{command} --json --threshold={threshold}")
        assert status == expected and json.loads(out)["log_likelihood_ratio"] is None
    assert json.loads(out)["threshold"] == 0.4


def test_verify_errors(call, refuse, voices, calibrated, tmp_path, monkeypatch):
    good = voices / "s00/3.wav"
    (tmp_path / "text.wav").write_text("this is no audio\n" * 100)
    write_audio(tmp_path / "short.wav", np.random.default_rng(0).normal(0, 0.1, 320))
    (tmp_path / "broken.pt").write_bytes(calibrated.read_bytes()[:-700])
    command = f"verify {good}"
    for name in ("absent.wav", "text.wav", "short.wav", ""):
        path = tmp_path / name
        assert str(path) in refuse(f"{command} {path} --model {calibrated}", status=2)
    for model in (tmp_path / "broken.pt", good):
        assert str(model) in refuse(f"{command} {good} --model {model}", status=2)
    command = f"{command} {good} --model {calibrated}"
    for option in ("--far=2", "--far=0.0001", "--threshold=nan", "--fat=1"):
        assert call(f"{command} {option}")[0] == 2, option
    assert "first" in call(f"verify {good} - --model {calibrated}")[2]
    status, _, err = call(f"verify {good} absent.wav --model {calibrated} --debug")
    assert status == 2 and "Traceback" in err
    # A bug in the program must not look like an answer either.
    monkeypatch.setattr("speakernet.inference.verifier.inspect_recording", lambda *_, **__: 1 / 0)
    status, out, err = call(command)
    assert (status, out) == (2, "") and "ZeroDivisionError" in err


def test_non_finite_scores(call, voices, calibrated, tmp_path):
    contents = read_checkpoint(calibrated)
    name = next(name for name in contents["weights"] if name.endswith("running_var"))
    contents["weights"][name].fill_(-1.0)
    write_checkpoint(tmp_path / "m.pt", contents)
    good = voices / "s00/3.wav"
    embed = f"embed {good} --out {tmp_path}/e.npz"
    for command, expected in ((f"verify {good} {good}", 2), (f"{embed} --skip-broken", 1)):
        status, out, err = call(f"{command} --model {tmp_path}/m.pt")
        assert status == expected and not out and "NaN" in err
    assert not (tmp_path / "e.npz").exists()


def test_identify(call, voices, calibrated, store):
    known = f"--model {calibrated} --store {store}"
    right = 0
    for speaker in range(8):
        command = f"identify {voices}/s{speaker:02d}/4.wav {known}"
        status, out, _ = call(command)
        nearest = out.splitlines()[1].split(maxsplit=2)[2]
        assert status == 0 and out.startswith((f"{nearest} score ", "unknown score ")), out
        assert "threshold" in out and "log-likelihood-ratio" in out
        right += call(f"{command} --threshold=-1")[1].startswith(f"Voice {speaker} score ")
    assert right >= 7
    status, out, _ = call(f"identify {voices}/s00/4.wav {known} --threshold 2")
    assert status == 0 and out.startswith("unknown score ") and len(out.splitlines()) == 6
    # At most 1 % per comparison, eight times, against the share asked for.
    for share, is_missed in (("0.02", True), ("0.08", False)):
        out = call(f"identify {voices}/s00/4.wav {known} --far {share}")[1]
        last = out.splitlines()[-1]
        assert "up to 8 % of strangers" in last and ("than the 2 %" in last) == is_missed
    answer = json.loads(call(f"identify {voices}/s03/4.wav {known} --top 2 --json")[1])
    assert (answer["num_people"], len(answer["candidates"])) == (8, 2)


def test_mistakes_with_stores(call, refuse, voices, calibrated, uncalibrated, store, tmp_path):
    good = voices / "s00/4.wav"
    (tmp_path / "text.db").write_text("people")
    for name in ("absent.db", "text.db"):
        err = refuse(f"identify {good} --model {calibrated} --store {tmp_path}/{name}")
        assert name in err and len(err.strip().splitlines()) == 1
    assert "speakernet calibrate" in refuse(
        f"identify {good} --model {uncalibrated} --store {store}"
    )
    other = with_other_bias(uncalibrated, tmp_path / "other.pt")
    assert "people reembed" in refuse(f"enroll X {good} --model {other} --store {store}")
    # A failed enrolment does not create a store.
    new = tmp_path / "new.db"
    assert call(f"enroll X absent.wav --model {calibrated} --store {new}")[0] == 1
    assert not new.exists()


def test_enroll_many(call, voices, calibrated, tmp_path, caplog):
    folder = tmp_path / "my_voices"
    known = f"--model {calibrated} --store {tmp_path}/p.db"
    for name, speaker in (("Ada", 0), ("Bo", 5), ("Cy", 6)):
        (folder / name / "monday").mkdir(parents=True)
        for number in range(2):
            shutil.copy(voices / f"s0{speaker}/{number}.wav", folder / name / "monday")
    write_audio(folder / "Bo" / "silent.wav", np.zeros(16000))
    (folder / "Abe").mkdir()
    status, out, _ = call(f"enroll --folder {folder} {known}")
    assert status == 1 and "2 people of 4 enrolled" in out and "Bo" not in out
    for words in ("Bo is left out", "silent.wav", "Abe is left out"):
        assert words in caplog.text
    (folder / "Abe").rmdir()
    (folder / "Bo" / "silent.wav").unlink()
    status, out, _ = call(f"enroll --folder {folder} {known}")
    assert status == 0 and "3 people of 3 enrolled" in out and "Bo: 2 recordings added" in out
    assert "Ada: 0 recordings added, 2 in all" in out
    out = call(f"identify {voices}/s05/3.wav {known} --threshold=-1")[1]
    assert out.startswith("Bo score ")
    file = voices / "s00/0.wav"
    for wrong in ("", f"Ada {file} --folder {folder}", f"--folder {folder}/Ada/monday"):
        assert call(f"enroll {wrong} {known}")[0] == 1
    (folder / "unknown").mkdir()
    shutil.copy(voices / "s07/0.wav", folder / "unknown")
    new = tmp_path / "new.db"
    assert "unknown" in call(f"enroll --folder {folder} --model {calibrated} --store {new}")[2]
    assert not new.exists(), "names are checked first"


def test_enroll_strict(call, refuse, voices, calibrated, tmp_path, caplog):
    names = " ".join(f"{voices}/{name}.wav" for name in ("s00/0", "s00/1", "s00/2", "s06/0"))
    known = f"--model {calibrated} --store {tmp_path}/p.db"
    assert "s06/0.wav: does not sound like" in refuse(f"enroll Ada {names} {known} --strict")
    assert not (tmp_path / "p.db").exists()
    assert "Ada: 4 recordings added (" in call(f"enroll Ada {names} {known}")[1]
    assert "does not sound" in caplog.text
    # One file of the batch again, by itself.
    assert "0 recordings added" in call(f"enroll Ada {voices}/s00/1.wav {known}")[1]
    assert "s00/1.wav is already" in caplog.text
    known = f"--model {calibrated} --store {tmp_path}/q.db"
    call(f"enroll Ada {voices}/s00/0.wav {voices}/s00/1.wav {voices}/s00/2.wav {known}")
    eve = f"enroll Eve {voices}/s00/3.wav {known}"
    assert "sounds like 'Ada'" in call(f"{eve} --strict")[2]
    for is_copy in (False, True):
        caplog.clear()
        run_command(eve)
        assert ("sounds like" in caplog.text) != is_copy, "a copy adds nothing to doubt"


def test_embed_inputs(call, voices, uncalibrated, tmp_path, monkeypatch):
    """A folder, a list, standard input and a packed corpus."""
    verifier = speakernet.load(uncalibrated, "cpu")
    (voices / "files.txt").write_text("s00/0.wav\nspeaker s01/1.wav\n\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{voices}/s02/0.wav\n"))
    out = tmp_path / "e.npz"
    inputs = f"{voices}/s03 {voices}/files.txt -"
    run_command(f"embed {inputs} --model {uncalibrated} --out {out}")
    with np.load(out) as arrays:
        names = arrays["names"].tolist()
        embeddings = arrays["embeddings"]
        assert str(arrays["fingerprint"]) == verifier.fingerprint
    expected = [f"s03/{number}.wav" for number in range(5)]
    assert [name[-9:] for name in names] == [*expected, "s00/0.wav", "s01/1.wav", "s02/0.wav"]
    assert_allclose(embeddings, verifier.embed(names), atol=1e-4)
    (tmp_path / "list.txt").write_text("".join(f"s{s:02d} s{s:02d}/0.wav\n" for s in range(4)))
    run_command(f"pack {tmp_path}/packed --list {tmp_path}/list.txt --source {voices}")
    out = call(f"embed {tmp_path}/packed --model {uncalibrated} --out {tmp_path}/p.npz")[1]
    assert "4 embeddings with 11 dimensions" in out


def test_embed_resumes(call, voices, uncalibrated, tmp_path, monkeypatch):
    monkeypatch.setattr("speakernet.inference.bulk.BLOCK_UTTERANCES", 2)
    folder = tmp_path / "some"
    out = tmp_path / "e.npz"
    shutil.copytree(voices / "s04", folder)
    command = f"embed {folder} --model {uncalibrated} --out {out}"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("speakernet.inference.bulk.atomic_write", lambda *_: 1 / 0)
        call(command)
    shutil.copy(voices / "s05/0.wav", folder / "4.wav")
    assert ", 4 of them" in call(command)[1]
    with np.load(out) as arrays:
        expected = speakernet.load(uncalibrated, "cpu").embed(voices / "s05/0.wav")[0]
        assert_allclose(arrays["embeddings"][4], expected, atol=1e-4)
    assert not out.with_name("e.npz.parts").exists()


def test_embed_skipped_files(call, refuse, voices, uncalibrated, tmp_path):
    model = f"--model {uncalibrated}"
    (tmp_path / "text.wav").write_text("no audio")
    target = tmp_path / "x.npz"
    command = f"embed {voices}/s00/0.wav {tmp_path}/text.wav absent.wav {model} --out {target}"
    assert "2 of 3 recordings" in refuse(command)
    assert not target.exists()
    status, out, _ = call(f"{command} --skip-broken")
    assert status == 1 and "1 embedding with 11 dimensions; 2 left out" in out
    (tmp_path / "list.txt").write_text("spk nope.wav\n")
    err = call(f"embed {tmp_path}/list.txt {model} --out {tmp_path}/y.npz")[2]
    assert "line 1" in err and "'nope.wav'" in err
    (tmp_path / "nothing").mkdir()
    for name, target in ((voices / "s00", "e.txt"), (tmp_path / "nothing", "y.npz")):
        assert str(tmp_path) in refuse(f"embed {name} {model} --out {tmp_path}/{target}")


def test_folders_with_m4a(call, voices, calibrated, tmp_path, ffmpeg):
    # Lossless, because AAC of another ffmpeg could look like another speaker to so small a network.
    line = f"{ffmpeg} -nostdin -loglevel error -i {voices}/s00/3.wav -c:a alac {tmp_path}/3.m4a"
    subprocess.run(line.split(), check=True)
    run_command(f"verify {voices}/s00/4.wav {tmp_path}/3.m4a --model {calibrated}")
    out = call(f"embed {tmp_path} --model {calibrated} --out {tmp_path}/e.npz")[1]
    assert "1 embedding " in out


def test_embed_in_parts(call, voices, uncalibrated, tmp_path, monkeypatch):
    monkeypatch.setattr("speakernet.inference.bulk.BLOCK_UTTERANCES", 1)
    whole = tmp_path / "whole.npz"
    parts = tmp_path / "parts.npz"
    run_command(f"embed {voices}/s03 --model {uncalibrated} --out {whole}")
    command = f"embed {voices}/s03 --model {uncalibrated} --out {parts} --part"
    assert "1/2" in call(f"{command} 2/2")[1] and not parts.exists()
    assert call(f"{command} 1/2")[0] == 0 and parts.read_bytes() == whole.read_bytes()
    # Repeating a part finds everything done.
    assert "an earlier run" in call(f"{command} 2/2")[1]
    assert parts.read_bytes() == whole.read_bytes()
    assert call(f"{command} 3/2")[0] == 1


def test_people(call, calibrated, store, tmp_path):
    path = shutil.copy(store, tmp_path / "p.db")

    def people(words):
        return call(f"people {words} --store {path}")

    out = people("list")[1]
    assert out.splitlines()[1].split()[:3] == ["Voice", "0", "3"] and "8 people, model" in out
    assert people("remove 'Voice 1'")[1].count("p.db") == 1
    assert people("remove 'Voice 1'")[0] == 1
    assert people(f"export --out {tmp_path}/two.json --name 'Voice 2'")[0] == 0
    embeddings = [recording.embedding for recording in PeopleStore(path).recordings("Voice 2")]
    exported = json.loads((tmp_path / "two.json").read_text())
    assert [recording["name"] for recording in exported["recordings"]] == ["Voice 2"] * 3
    exported = [recording["embedding"] for recording in exported["recordings"]]
    assert_allclose(exported, embeddings, rtol=1e-6)
    verifier = speakernet.load(with_other_bias(calibrated, tmp_path / "new.pt"), "cpu")
    assert "p.db.backup-" in people(f"reembed --model {verifier.name}")[1]
    for action, needed in (("remove", "name"), ("reembed", "--model"), ("export", "--out")):
        assert needed in people(action)[2]
    recording = verifier.people(path).recordings("Voice 2")[0]
    expected = verifier.embed(recording.source, speech=True)[0]
    assert_allclose(recording.embedding, expected, atol=1e-5)
    # The store and its backup. The served page removes in the same way.
    assert people("remove 'Voice 2'")[1].count("p.db") == 2
    assert not any(b"Voice 2" in file.read_bytes() for file in tmp_path.glob("p.db*"))


def test_keys(call, voices, calibrated, tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    (tmp_path / "key").write_text("secret words\n")
    file = voices / "s00/0.wav"
    known = f"--model {calibrated} --store {tmp_path}/p.db"
    run_command(f"enroll Ada {file} {known} --key-file {tmp_path}/key")
    assert "--key-file" in call(f"identify {file} {known}")[2]
    for key, status in (("secret words", 0), ("other", 1)):
        monkeypatch.setenv("SPEAKERNET_STORE_KEY", key)
        assert call(f"identify {file} {known}")[0] == status
    monkeypatch.delenv("SPEAKERNET_STORE_KEY")
    assert "encrypted" in call(f"people list --store {tmp_path}/p.db")[1]


def test_calibrate(call, voices, uncalibrated, tmp_path):
    path = shutil.copy(uncalibrated, tmp_path / "m.pt")
    before = path.read_bytes()
    known = f"--model {path} --store {tmp_path}/p.db"
    run_command(f"enroll Ada {voices}/s00/0.wav {voices}/s00/1.wav {known}")
    calibrate = f"calibrate --model {path} --trials {voices}/trials.txt"
    status, out, err = call(calibrate)
    backup = tmp_path / "m.before-calibration.pt"
    assert status == 0 and str(backup) in out and backup.read_bytes() == before, err
    assert "95 % interval" in out and "threshold 0." in out
    assert str(backup) not in call(calibrate)[1]
    assert backup.read_bytes() == before
    contents = read_checkpoint(path)
    assert len(contents["calibration"]["fits"]) == 1
    names = [threshold["name"] for threshold in contents["thresholds"]]
    assert names == ["eer", "far_5%", "far_1%"]
    # A store knows its model by its weights.
    assert call(f"identify {voices}/s00/1.wav {known}")[1].startswith("Ada score ")
    info = call(f"info {path}")[1]
    fingerprint = speakernet.load(uncalibrated, "cpu").fingerprint
    assert all(word in info for word in ("far_1%", "embedding=whole", "MIT", fingerprint))


def test_good_calibration_is_kept(refuse, voices, calibrated, store, tmp_path):
    path = shutil.copy(calibrated, tmp_path / "m.pt")
    swapped = tmp_path / "swapped.txt"
    lines = (voices / "trials.txt").read_text().splitlines()
    swapped.write_text("".join(f"{1 - int(line[0])}{line[1:]}\n" for line in lines))
    for words, reason in (
        (f"--trials {swapped} --audio {voices}", "EER"),
        (f"--store {store}", "--out"),
    ):
        assert reason in refuse(f"calibrate --model {path} {words}")
    # Worse than chance: each person has the recordings of two voices.
    known = f"--model {path} --store {tmp_path}/p.db"
    for name, speaker in (("Ada", 0), ("Ada", 5), ("Bo", 6), ("Bo", 7)):
        run_command(f"enroll {name} {voices}/s0{speaker}/0.wav {known}")
    assert "EER" in refuse(f"calibrate {known} --out {tmp_path}/new.pt")
    assert not (tmp_path / "new.pt").exists()
    assert path.read_bytes() == calibrated.read_bytes() and not list(tmp_path.glob("m.before*"))


def test_calibrate_few_pairs(call, voices, uncalibrated, tmp_path, caplog):
    path = shutil.copy(uncalibrated, tmp_path / "m.pt")
    lines = (voices / "trials.txt").read_text().splitlines(keepends=True)
    targets, others = ([line for line in lines if line[0] == label] for label in "10")
    few = tmp_path / "few.txt"
    few.write_text("".join(targets[:40] + others[:50]))
    assert "--audio" in call(f"calibrate --model {path} --trials {few}")[2]
    run_command(f"calibrate --model {path} --trials {few} --audio {voices}")
    assert "only 50 " in caplog.text
    caplog.clear()
    run_command(f"verify {voices}/s00/0.wav {voices}/s00/1.wav --model {path}")
    assert "only 50 " in caplog.text and "50 non-target" in call(f"info {path}")[1]


def test_calibrate_on_own_people(call, refuse, voices, calibrated, store, tmp_path):
    out = tmp_path / "own.pt"
    command = f"calibrate --model {calibrated}"
    cohort = " ".join(f"{voices}/s{speaker:02d}" for speaker in range(8, 12))
    status, text, err = call(f"{command} --store {store} --cohort {cohort} --out {out}")
    # 24 recordings against the rest of their person and against 7 others; 20 strangers against 8
    # people.
    assert status == 0 and f"{24 + 24 * 7 + 20 * 8:,} trials, 24 of them targets" in text, err
    assert "24 same-speaker pairs" in text
    assert read_checkpoint(out)["calibration"]["fits"][-1]["list"] == "people.db"
    trials = f"--trials {voices}/trials.txt"
    for bad, word in (
        (f"{trials} --store {store}", "--store"),
        ("", "--store"),
        (f"{trials} --cohort {voices}", "--cohort"),
        (f"--store {store} --audio {voices}", "--audio"),
        (f"{trials} --prior 1", "--prior 1.0"),
    ):
        assert word in refuse(f"{command} {bad}")
