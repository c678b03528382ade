"""verify, embed, enroll, identify, people and calibrate as users give them, with the mistakes that users make."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.data.audio import write_audio
from speakernet.data.lists import StringTable, TrialList
from speakernet.evaluation.calibrating import fit_scores
from speakernet.inference.people import PeopleStore


@pytest.fixture()
def say(capsys):
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
        assert main(["enroll", f"Voice {speaker}", *files, "--model", str(calibrated), "--store", str(path)]) == 0
    return path


def test_verify_answers_by_its_exit_status(say, voices, calibrated):
    same = say("verify", voices / "s00/3.wav", voices / "s00/4.wav", "--model", calibrated)
    other = say("verify", voices / "s00/3.wav", voices / "s05/4.wav", "--model", calibrated)
    assert (same[0], other[0]) == (0, 1)
    assert same[1].startswith("same speaker: score ") and "(false accepts 1 %)" in same[1]
    assert other[1].startswith("different speakers: score ") and same[1].count("\n") == 1


def test_verify_prints_one_object_that_agrees_with_python(say, voices, calibrated):
    files = [voices / "s01/3.wav", voices / "s02/3.wav"]
    status, out, _ = say("verify", *files, "--model", calibrated, "--far", "0.01", "--json")
    found = json.loads(out)
    verifier = speakernet.load(calibrated, "cpu")
    decision = verifier.verify(*files, false_accept_rate=0.01)
    assert found == vars(decision) and status == int(not decision.same_speaker)
    assert set(found) == {"score", "log_likelihood_ratio", "same_speaker", "threshold", "false_accept_rate"}
    score = verifier.compare(verifier.embed(files[0]), verifier.embed(files[1]))
    fit = verifier.contents["calibration"]["fits"][0]
    assert found["score"] == pytest.approx(score, abs=1e-6)
    assert found["log_likelihood_ratio"] == pytest.approx(fit["offset"] + fit["weights"][0] * score, abs=1e-4)
    assert found["false_accept_rate"] == 0.01


def test_without_calibration_verify_names_the_command_and_takes_a_threshold(say, voices, uncalibrated):
    files = [voices / "s00/3.wav", voices / "s00/4.wav", "--model", uncalibrated]
    status, out, err = say("verify", *files)
    assert (status, out) == (2, "")
    assert f"speakernet calibrate --model {uncalibrated} --trials LIST --audio FOLDER`" in err
    assert say("verify", *files, "--far", "0.01")[0] == 2
    for threshold, expected in (("-1", 0), ("1.5", 1), ("default", 0)):
        status, out, _ = say("verify", *files, "--json", f"--threshold={threshold}")
        assert status == expected and json.loads(out)["log_likelihood_ratio"] is None
    assert json.loads(say("verify", *files, "--json", "--threshold", "default")[1])["threshold"] == 0.4


def test_every_error_of_verify_is_two(say, voices, calibrated, tmp_path):
    good = voices / "s00/3.wav"
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("this is no audio\n" * 100)
    write_audio(tmp_path / "short.wav", np.random.default_rng(0).normal(0, 0.1, 320), 16000)
    write_audio(tmp_path / "silence.wav", np.zeros(32000, np.float32), 16000)
    (tmp_path / "broken.pt").write_bytes(calibrated.read_bytes()[:-700])
    bad = {
        "absent.wav": "absent.wav",
        "empty.wav": "empty",
        "text.wav": "not a readable audio file",
        "short.wav": "too short",
        "silence.wav": "silent",
        ".": "Is a directory",
    }
    for name, message in bad.items():
        status, out, err = say("verify", good, tmp_path / name, "--model", calibrated)
        assert (status, out) == (2, "") and message in err and "Traceback" not in err, (name, err)
    for model in (tmp_path / "broken.pt", tmp_path / "absent.pt", good, tmp_path):
        status, out, err = say("verify", good, good, "--model", model)
        assert (status, out) == (2, "") and str(model) in err, err
    for options in (
        ["--far", "2"],
        ["--far", "0.0001"],
        ["--threshold", "nan"],
        ["--threshold", "often"],
        ["--fat", "1"],
    ):
        assert say("verify", good, good, "--model", calibrated, *options)[0] == 2, options
    status, _, err = say("verify", good, "absent.wav", "--model", calibrated, "--debug")
    assert status == 2 and "Traceback" in err


def test_an_error_of_ours_is_no_answer_either(say, voices, calibrated, monkeypatch):
    monkeypatch.setattr("speakernet.inference.recordings.inspect_recording", lambda *_, **__: 1 / 0)
    status, out, err = say("verify", voices / "s00/3.wav", voices / "s00/4.wav", "--model", calibrated)
    assert (status, out) == (2, "") and "ZeroDivisionError" in err


def test_identify_answers_on_the_first_line(say, voices, calibrated, store):
    for speaker in range(8):
        status, out, _ = say("identify", voices / f"s{speaker:02d}/4.wav", "--model", calibrated, "--store", store)
        assert status == 0
        nearest = out.splitlines()[1].split(maxsplit=2)[2]
        if not out.startswith("unknown score "):
            assert out.startswith(f"{nearest} score "), out
    right = [
        say("identify", voices / f"s{speaker:02d}/4.wav", "--model", calibrated, "--store", store, "--threshold=-1")
        for speaker in range(8)
    ]
    assert sum(one[1].startswith(f"Voice {speaker} score ") for speaker, one in enumerate(right)) >= 7
    status, out, _ = say("identify", voices / "s00/4.wav", "--model", calibrated, "--store", store, "--threshold", "2")
    assert status == 0 and out.startswith("unknown score ") and len(out.splitlines()) == 6
    found = json.loads(
        say("identify", voices / "s03/4.wav", "--model", calibrated, "--store", store, "--top", "2", "--json")[1]
    )
    assert found["num_people"] == 8 and len(found["candidates"]) == 2
    # 0.01 over eight people needs 0.00125 a comparison; the strictest threshold of this list is 0.01.
    assert found["decision"]["false_accept_rate"] == 0.01 and found["stranger_rate"] == pytest.approx(0.08)


def test_mistakes_with_stores_are_said(say, voices, calibrated, uncalibrated, store, tmp_path):
    good = voices / "s00/4.wav"
    (tmp_path / "text.db").write_text("people")
    (tmp_path / "empty.db").touch()
    damaged = bytearray(store.read_bytes())
    damaged[4096:4296] = bytes(range(200))
    (tmp_path / "damaged.db").write_bytes(damaged)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name, message in (
        ("absent.db", "speakernet enroll"),
        ("empty.db", "speakernet enroll"),
        ("text.db", "text.db"),
        ("damaged.db", "it was left as it is"),
    ):
        path = tmp_path / name
        status, out, err = say("identify", good, "--model", calibrated, "--store", path)
        assert (status, out) == (1, "") and message in err and len(err.strip().splitlines()) == 1, err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    status, out, err = say("identify", good, "--model", uncalibrated, "--store", store)
    assert (status, out) == (1, "") and "speakernet calibrate" in err
    other = read_checkpoint(uncalibrated)
    other["weights"]["embedding.bias"] += 1
    write_checkpoint(tmp_path / "other.pt", other)
    status, _, err = say("enroll", "X", good, "--model", tmp_path / "other.pt", "--store", store)
    assert status == 1 and "of another model" in err and "people reembed" in err
    # Nothing is made of an enrolment that fails.
    assert say("enroll", "X", "absent.wav", "--model", calibrated, "--store", tmp_path / "new.db")[0] == 1
    assert not (tmp_path / "new.db").exists()


def test_recordings_that_are_worth_little_are_warned_about_and_refused_when_strict(
    say, voices, calibrated, tmp_path, caplog
):
    names = [voices / "s00/0.wav", voices / "s00/1.wav", voices / "s00/2.wav", voices / "s06/0.wav"]
    words = ["Ada", *names, "--model", calibrated, "--store", tmp_path / "p.db"]
    status, out, err = say("enroll", *words, "--strict")
    assert status == 1 and "nothing was enrolled" in err and "s06/0.wav: does not sound like" in err
    status, out, _ = say("enroll", *words)
    assert status == 0 and out.startswith("Ada: 4 recordings added (")
    assert "does not sound like the person's other 3 recordings (score" in caplog.text
    assert "0 recordings added" in say("enroll", *words)[1] and "enrolled before as 'Ada', left out" in caplog.text
    assert (
        "sounds like 'Ada', who is enrolled already"
        in say("enroll", "Eve", voices / "s00/3.wav", "--model", calibrated, "--store", tmp_path / "p.db", "--strict")[
            2
        ]
    )


def test_embed_takes_files_folders_lists_and_names_and_goes_on(say, voices, uncalibrated, tmp_path, monkeypatch):
    verifier = speakernet.load(uncalibrated, "cpu")
    (voices / "files.txt").write_text("s00/0.wav\nspeaker s01/1.wav\n\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{voices}/s02/0.wav\n"))
    out = tmp_path / "e.npz"
    command = ["embed", voices / "s03", voices / "files.txt", "-", "--model", uncalibrated, "--out", out]
    assert say(*command)[0] == 0
    with np.load(out) as found:
        names, embeddings = found["names"].tolist(), found["embeddings"]
        assert str(found["fingerprint"]) == verifier.fingerprint
    assert [name[-9:] for name in names] == [f"s03/{n}.wav" for n in range(5)] + ["s00/0.wav", "s01/1.wav", "s02/0.wav"]
    np.testing.assert_allclose(embeddings, verifier.embed(names), atol=1e-4)
    # A run that failed half way has kept its whole blocks.
    monkeypatch.setattr("speakernet.inference.embedding_files.BLOCK_UTTERANCES", 2)
    folder = tmp_path / "some"
    shutil.copytree(voices / "s04", folder)
    with monkeypatch.context() as patch:
        patch.setattr("speakernet.inference.embedding_files.atomic_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            say("embed", folder, "--model", uncalibrated, "--out", out)
    shutil.copy(voices / "s05/0.wav", folder / "4.wav")
    assert ", 4 of them by an earlier run" in say("embed", folder, "--model", uncalibrated, "--out", out)[1]
    with np.load(out) as found:
        np.testing.assert_allclose(found["embeddings"][4], verifier.embed(voices / "s05/0.wav")[0], atol=1e-4)
    assert not out.with_name("e.npz.parts").exists()


def test_embed_takes_packed_corpora_and_leaves_out_what_is_broken_only_when_told(say, voices, uncalibrated, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"s{s:02d} s{s:02d}/0.wav\n" for s in range(4)))
    assert main(["pack", str(tmp_path / "packed"), "--list", str(listed), "--source", str(voices)]) == 0
    status, out, err = say("embed", tmp_path / "packed", "--model", uncalibrated, "--out", tmp_path / "p.npz")
    assert status == 0 and "4 embeddings of 11 numbers" in out, err
    (tmp_path / "text.wav").write_text("no audio")
    files = [voices / "s00/0.wav", tmp_path / "text.wav", "absent.wav"]
    status, _, err = say("embed", *files, "--model", uncalibrated, "--out", tmp_path / "x.npz")
    assert status == 1 and "2 of 3 recordings cannot be embedded (--skip-broken" in err
    assert not (tmp_path / "x.npz").exists()
    status, out, _ = say("embed", *files, "--model", uncalibrated, "--out", tmp_path / "x.npz", "--skip-broken")
    assert status == 1 and "1 embeddings of 11 numbers; 2 left out" in out
    for given, message in (([tmp_path / "e.txt"], "expected a file that ends in .npz"), ([tmp_path], "ends in .npz")):
        assert message in say("embed", files[0], "--model", uncalibrated, "--out", *given)[2]
    (tmp_path / "nothing").mkdir()
    assert (
        "no audio in this folder"
        in say("embed", tmp_path / "nothing", "--model", uncalibrated, "--out", tmp_path / "y.npz")[2]
    )


def test_people_are_listed_removed_purged_reembedded_and_exported(say, calibrated, uncalibrated, store, tmp_path):
    path = tmp_path / "p.db"
    shutil.copy(store, path)
    out = say("people", "list", "--store", path)[1]
    assert out.splitlines()[1].split()[:3] == ["Voice", "0", "3"] and "8 people, model" in out
    assert say("people", "remove", "Voice 1", "--store", path)[0] == 0
    assert "nearest: Voice" in say("people", "remove", "Voice 1", "--store", path)[2]
    assert say("people", "export", "--store", path, "--out", tmp_path / "all.npz")[0] == 0
    assert say("people", "export", "--store", path, "--out", tmp_path / "one.json", "--name", "Voice 2")[0] == 0
    with np.load(tmp_path / "all.npz") as exported, PeopleStore(path, fingerprint=None, embedding_dim=None) as people:
        np.testing.assert_array_equal(exported["embeddings"], [one.embedding for one in people.recordings()])
    held = json.loads((tmp_path / "one.json").read_text())
    assert [one["name"] for one in held["recordings"]] == ["Voice 2"] * 3 and held["embedding_dim"] == 11
    other = read_checkpoint(calibrated)
    other["weights"]["embedding.bias"] += 0.5
    write_checkpoint(tmp_path / "new.pt", other)
    assert "a backup lies beside it" in say("people", "reembed", "--model", tmp_path / "new.pt", "--store", path)[1]
    verifier = speakernet.load(tmp_path / "new.pt", "cpu")
    with verifier.people(path) as people:
        kept = people.recordings("Voice 2")
        np.testing.assert_allclose(kept[0].embedding, verifier.embed(kept[0].source)[0], atol=1e-5)
    assert say("people", "purge", "Voice 2", "--store", path)[1].count("p.db") == 2
    assert not any(b"Voice 2" in one.read_bytes() for one in tmp_path.glob("p.db*"))
    assert say("people", "burn", "--store", path)[0] == 2 and say("people")[0] == 2


def test_where_nothing_can_be_written_is_said_before_the_work(say, voices, calibrated, store, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for work in ("calibrating.read_trials", "calibrating._own_trials", "embedding_files._Block.find_or_embed"):
        monkeypatch.setattr(f"speakernet.inference.{work}", lambda *_: pytest.fail("it was begun"))
    for words in (
        ["calibrate", "--model", calibrated, "--trials", voices / "trials.txt", "--out", tmp_path / "file" / "x.pt"],
        ["calibrate", "--model", calibrated, "--store", store, "--out", tmp_path / "file" / "x.pt"],
        ["embed", voices / "s00", "--model", calibrated, "--out", tmp_path / "file" / "x.npz"],
        ["people", "export", "--store", store, "--out", tmp_path / "file" / "x.json"],
    ):
        status, out, err = say(*words)
        assert (status, out) == (1, "") and "cannot be written (" in err and "another place with --out" in err, err
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_keys_come_from_a_file_or_the_environment(say, voices, calibrated, tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    (tmp_path / "key").write_text("secret words\n")
    path, file = tmp_path / "p.db", voices / "s00/0.wav"
    words = ["--model", calibrated, "--store", path]
    assert say("enroll", "Ada", file, *words, "--key-file", tmp_path / "key")[0] == 0
    assert "is encrypted; give its key" in say("identify", file, *words)[2]
    monkeypatch.setenv("SPEAKERNET_STORE_KEY", "secret words")
    assert say("identify", file, *words)[1].startswith("Ada score 1.0")
    monkeypatch.setenv("SPEAKERNET_STORE_KEY", "other")
    assert "key" in say("identify", file, *words)[2]
    assert "encrypted" in say("people", "list", "--store", store_without_key(monkeypatch, path))[1]


def store_without_key(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    monkeypatch.delenv("SPEAKERNET_STORE_KEY")
    return path


def test_calibrating_keeps_the_model_as_it_was_once_and_orphans_no_store(say, voices, uncalibrated, tmp_path):
    path, store = tmp_path / "m.pt", tmp_path / "p.db"
    shutil.copy(uncalibrated, path)
    before = path.read_bytes()
    words = ["--model", path, "--store", store]
    assert say("enroll", "Ada", voices / "s00/0.wav", voices / "s00/1.wav", *words)[0] == 0
    status, out, err = say("calibrate", "--model", path, "--trials", voices / "trials.txt")
    backup = tmp_path / "m.before-calibration.pt"
    assert status == 0 and f"(as it was: {backup})" in out and backup.read_bytes() == before, err
    assert "95 % interval" in out and "threshold 0." in out and "no threshold at a false-accept rate of 0.1 %" in out
    assert "as it was" not in say("calibrate", "--model", path, "--trials", voices / "trials.txt")[1]
    assert backup.read_bytes() == before
    fits, thresholds = (read_checkpoint(path)[name] for name in ("calibration", "thresholds"))
    assert len(fits["fits"]) == 1 and [one["name"] for one in thresholds] == ["eer", "far_5%", "far_1%"]
    assert say("identify", voices / "s00/1.wav", *words)[1].startswith("Ada score ")
    info = say("info", path)[1]
    assert "far_1%" in info and "embedding=whole" in info and "MIT" in info
    assert speakernet.load(path, "cpu").fingerprint == speakernet.load(uncalibrated, "cpu").fingerprint
    assert speakernet.load(path, "cpu").fingerprint in info


def test_swapped_labels_are_not_written_over_a_calibration(say, voices, calibrated, tmp_path):
    path = tmp_path / "m.pt"
    shutil.copy(calibrated, path)
    lines = (voices / "trials.txt").read_text().splitlines()
    swapped = tmp_path / "swapped.txt"
    swapped.write_text("".join(f"{1 - int(line[0])}{line[1:]}\n" for line in lines))
    status, out, err = say("calibrate", "--model", path, "--trials", swapped, "--audio", voices)
    assert status == 1 and "are its labels swapped? Nothing was written" in err and not out
    assert path.read_bytes() == calibrated.read_bytes() and not list(tmp_path.glob("m.before*"))


def test_a_calibration_is_not_replaced_by_one_on_fewer_pairs(say, voices, calibrated, store, tmp_path):
    path = tmp_path / "m.pt"
    shutil.copy(calibrated, path)
    status, out, err = say("calibrate", "--model", path, "--store", store)
    assert status == 1 and "and this one would rest on 24; name another file with --out. Nothing was written" in err
    assert path.read_bytes() == calibrated.read_bytes() and not out


def test_a_calibration_on_few_pairs_says_so_wherever_it_is_used(say, voices, uncalibrated, tmp_path, caplog):
    path, lines = tmp_path / "m.pt", (voices / "trials.txt").read_text().splitlines(keepends=True)
    shutil.copy(uncalibrated, path)
    targets, others = ([line for line in lines if line[0] == label] for label in "10")
    (tmp_path / "few.txt").write_text("".join(targets[:40] + others[:50]))
    status, out, err = say("calibrate", "--model", path, "--trials", tmp_path / "few.txt", "--audio", voices)
    few = "50 pairs of different speakers are few: odds of a calibration on them are far too sure"
    assert status == 0 and few in caplog.text, err
    assert "too few for minDCF(0.01, 0.001): a single false accept costs as much" in out
    caplog.clear()
    out = say("verify", voices / "s00/0.wav", voices / "s00/1.wav", "--model", path)[1]
    assert "times as likely" in out and few not in out and f"its calibration: {few}" in caplog.text
    info = say("info", path)[1]
    assert f"yes, but {few}" in info and "(40 pairs of one speaker, 50 of two)" in info


def test_own_people_are_calibrated_against_strangers(say, voices, calibrated, store, tmp_path):
    out = tmp_path / "own.pt"
    cohort = [voices / f"s{speaker:02d}" for speaker in range(8, 12)]
    words = ["calibrate", "--model", calibrated, "--store", store, "--cohort", *cohort, "--out", out]
    status, text, err = say(*words)
    # 8 people x 3 recordings against themselves without that recording, against 7 others, and 20 strangers against 8.
    assert status == 0 and f"{24 + 24 * 7 + 20 * 8:,} trials, 24 of them targets" in text, err
    assert "no draw of speakers has an error" in text and "people.db" in say("info", out)[1]
    assert "each recording of the cohort counts as a speaker" in text
    assert "24 pairs of one speaker are too few to rely on: 30 or more are wanted" in text
    verifier = speakernet.load(out, "cpu")
    with verifier.people(store) as people:
        kept = people.recordings("Voice 3")
    others = np.stack([one.embedding * one.weight / np.linalg.norm(one.embedding) for one in kept[1:]]).sum(axis=0)
    contents = read_checkpoint(out)
    assert contents["calibration"]["fits"][-1]["list"] == "people.db"
    assert -1 <= verifier.compare(kept[0].embedding, others) <= 1
    for bad, message in (
        (["--trials", voices / "trials.txt", "--store", store], "give --trials LIST, or --store"),
        ([], "give --trials LIST, or --store"),
        (["--trials", voices / "trials.txt", "--cohort", voices], "--cohort is for --store"),
        (["--store", store, "--audio", voices], "--audio is for --trials"),
        (["--store", tmp_path / "absent.db"], "speakernet enroll"),
        (["--trials", voices / "files_absent.txt"], "files_absent.txt"),
        (["--trials", voices / "trials.txt", "--prior", "1"], "--prior 1.0"),
    ):
        status, _, err = say("calibrate", "--model", calibrated, *bad)
        assert status == 1 and message in err, err


def test_evaluation_with_a_calibration_list_leaves_the_model_file_alone(say, voices, uncalibrated, tmp_path):
    path = tmp_path / "m.pt"
    shutil.copy(uncalibrated, path)
    trials = voices / "trials.txt"
    words = ["--initial_model", path, "--test_list", trials, "--evaluation.calibration_list", trials]
    sizes = ["--eval_frames", "100", "--num_eval", "2", "--evaluation.bootstrap_samples", "0"]
    status, _, err = say("train", "--eval", *words, *sizes, "--save_path", tmp_path / "run", "--runtime.device", "cpu")
    assert status == 0, err
    assert path.read_bytes() == uncalibrated.read_bytes()


def test_embedding_in_parts_gives_the_file_of_one_run(say, voices, uncalibrated, tmp_path, monkeypatch):
    monkeypatch.setattr("speakernet.inference.embedding_files.BLOCK_UTTERANCES", 1)
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    assert say("embed", voices / "s03", "--model", uncalibrated, "--out", whole)[0] == 0
    command = ("embed", voices / "s03", "--model", uncalibrated, "--out", parts, "--part")
    assert "part 2/2 is done; the parts 1/2 are missing" in say(*command, "2/2")[1]
    assert not parts.exists()
    assert say(*command, "1/2")[0] == 0
    assert parts.read_bytes() == whole.read_bytes()
    # Whichever comes again finds everything there.
    assert "by an earlier run" in say(*command, "2/2")[1] and parts.read_bytes() == whole.read_bytes()
    assert "there is no part 3 of 2" in say(*command, "3/2")[2]


@pytest.mark.parametrize(("higher", "is_warned"), [(1.0, False), (-1.0, True)])
def test_scores_that_tell_nobody_apart_are_said_where_they_are_fitted(higher, is_warned, caplog):
    labels = np.tile([1, 0], 40).astype(np.int8)
    table = StringTable.from_strings(f"{n}.wav" for n in range(160))
    trials = TrialList(table, np.arange(80), np.arange(80, 160), labels, "trials.txt", "0" * 64)
    scores = higher * labels + np.random.default_rng(0).standard_normal(80)
    fit_scores(trials, scores, 0.5, {"score": "cosine"})
    assert ("tell nobody apart" in caplog.text) is is_warned
    assert "40 pairs of different speakers are few" in caplog.text and "from 200 pairs on" in caplog.text
