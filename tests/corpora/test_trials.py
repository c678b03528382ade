"""data_prep/trials.py: make, clean, rewrite, hold out."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from preparation_corpora import run_data_prep

from speakernet.corpora.pairs import PairRules, calibration_pairs, hold_out
from speakernet.corpora.utterances import Row, Utterances
from speakernet.data.lists import ListError, read_training_list, read_trials, write_training_list


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The working directory, with lists."""
    monkeypatch.chdir(tmp_path)
    rows = [f"s{speaker} wav/s{speaker}/{row}.wav" for speaker in range(6) for row in range(4)]
    (tmp_path / "list.txt").write_text("\n".join(rows) + "\n")
    (tmp_path / "train.txt").write_text("t0 wav/t0/1.wav\nt1 wav/t1/1.wav\n")
    return tmp_path


def run(line, *arguments, status=0):
    run_data_prep("trials", line, *arguments, status=status)


def write(name, text):
    Path(name).write_text(text)


def read(name):
    return Path(name).read_text()


def make(folder, *options, source="list.txt", status=0):
    """Make `trials.txt` from a list in the folder; what was made, or nothing."""
    output = folder / "trials.txt"
    run("make", folder / source, output, *options, status=status)
    if status:
        assert not output.exists()
        return None
    return read_trials(output)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--kind all", 276),
        ("--kind random --num_trials 50", 50),
        ("--kind balanced --targets_per_speaker 2", 6 * 2 * 6),
    ],
)
def test_every_kind(listed, options, expected):
    assert len(make(listed, options)) == expected


def test_hard_negatives_from_stored_embeddings(listed):
    names = read_training_list("list.txt").paths
    embeddings = np.random.default_rng(1).standard_normal((24, 2, 8)).astype(np.float32)
    path = listed / "e.npz"

    def make_hard(status=0, **arrays):
        np.savez(path, **arrays)
        return make(listed, f"--kind hard --nearest 1 --embeddings {path}", status=status)

    first = make_hard(names=np.array(list(names)), embeddings=embeddings.mean(axis=1))
    assert 12 <= int((first.labels == 0).sum()) <= 24
    kept = {"names": names.content, "name_offsets": names.offsets, "embeddings": embeddings}
    assert make_hard(**kept).sha256 == first.sha256
    (listed / "trials.txt").unlink()
    make_hard(1, names=np.array(names[1:]), embeddings=embeddings[1:, 0])


def test_calibration_trials(tmp_path, capsys):
    """Speakers s0 to s4 have two sessions of six utterances of 1 to 6 s; s5 has a single
    session.
    """
    rows = []
    for speaker, session, seconds in itertools.product(range(6), "ab", range(1, 7)):
        name = f"s{speaker}/{'a' if speaker == 5 else session}/{session}{seconds}.wav"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / name, np.zeros(16000 * seconds, np.int16), 16000)
        rows.append((f"s{speaker}", name))
    write_training_list(tmp_path / "train.txt", rows)
    (tmp_path / "use.txt").write_text("1 s0/a/a5.wav s1/a/a5.wav\n0 s0/a/a6.wav s1/a/a6.wav\n")
    like = ("--like", tmp_path / "use.txt", tmp_path)
    made = make(tmp_path, f"--calibration {tmp_path}", *like, source="train.txt")
    targets = [
        (made.names[a], made.names[b]) for a, b in zip(made.enrol, made.test, strict=True) if a != b
    ]
    same = [(a, b) for a, b in targets if a[:2] == b[:2]]
    assert {a[:2] for a, _ in same} == {f"s{number}" for number in range(6)}
    assert all(a[:4] != b[:4] or a[:2] == "s5" for a, b in same)
    # Six per speaker, about the longest of twelve; there are at most two of five and two of six
    # seconds.
    assert np.mean([int(name[-5]) for name in made.names]) > 4.2
    (tmp_path / "trials.txt").unlink()
    make(tmp_path, *like, source="train.txt", status=1)
    assert "--calibration" in capsys.readouterr().err
    (tmp_path / rows[0][1]).unlink()
    make(tmp_path, f"--calibration {tmp_path}", source="train.txt", status=1)
    assert rows[0][1] in capsys.readouterr().err


@pytest.mark.parametrize(("count", "expected"), [(900, 900), (1200, 600), (3000, 1000)])
def test_some_speakers_remain_for_a_cohort(count, expected):
    """Of 1,200 speakers half calibrate, of 3,000 a thousand, of 900 all."""
    utterances = Utterances.from_rows(
        Row(f"s{row // 2}", f"s{row // 2}/{row}.wav") for row in range(2 * count)
    )
    seconds = np.ones(2 * count)
    few, _ = calibration_pairs(utterances, seconds, seconds, PairRules(), 1, 1)
    assert len(few.speakers) == expected


@pytest.mark.parametrize(
    ("row", "shared"), [("s3 other/1.wav", "s3"), ("t0 ./wav/s0//1.wav", "1 files")]
)
def test_overlap_with_training(listed, capsys, row, shared):
    write("train.txt", f"{row}\nt1 wav/t1/1.wav\n")
    make(listed, "--training train.txt", status=1)
    assert shared in capsys.readouterr().err
    make(listed, "--training train.txt --allow_overlap")


def test_cross_gender_trials(listed, capsys):
    make(listed, "--same_gender", status=1)
    assert "gender column" in capsys.readouterr().err
    rows = [f"wav/s{s}/{u}.wav,s{s},{'fm'[s % 2]}" for s in range(6) for u in range(3)]
    write("table.csv", "path,speaker,gender\n" + "\n".join(rows))
    trials = make(listed, "--same_gender --kind all", source="table.csv")
    is_odd = np.array([int(name.split("/")[1][1:]) % 2 for name in trials.names])
    assert (is_odd[trials.enrol] == is_odd[trials.test]).all()
    assert len(trials) == 2 * 36


def test_cleaning(listed, capsys):
    clean = "clean list.txt --root ."
    run(clean, status=1)
    assert "0 of 24 rows" in capsys.readouterr().err and not list(listed.glob("list_*"))
    for name in ("wav/s0/0.wav", "wav/s0/1.wav", "wav/s1/0.wav"):
        (listed / name).parent.mkdir(parents=True, exist_ok=True)
        (listed / name).write_bytes(b"x")
    kept = "1 wav/s0/0.wav wav/s0/1.wav\n0 wav/s0/0.wav wav/s1/0.wav\n"
    dropped = "0 wav/s0/0.wav wav/gone.wav\n0\twav/s0/0.wav\twav/two words.wav\n"
    write("trials.txt", kept + dropped)
    run("clean trials.txt --root .")
    assert read("trials_clean.txt") == kept
    names = read_trials("trials_dropped.txt").names
    assert {*names} == {"wav/s0/0.wav", "wav/gone.wav", "wav/two words.wav"}
    run(clean)
    assert len(read_training_list("list_clean.txt")) == 3
    assert len(read("list_dropped.txt").splitlines()) == 21


@pytest.mark.parametrize(
    ("rows", "repeated"),
    [
        ("A dog barks\n" * 50 + "B cats\n", "dog barks"),
        ("A x/1.wav\nA ./x/1.wav\nB y/1.wav\n", "x/1.wav"),
    ],
)
def test_repeated_files_are_refused(listed, capsys, rows, repeated):
    write("list.txt", rows)
    make(listed, status=1)
    assert f"'{repeated}' appears twice" in capsys.readouterr().err


def test_held_out_recordings_are_not_paired_with_themselves(tmp_path):
    rows = [(f"s{speaker}", f"s{speaker}/{row}.wav") for speaker in range(4) for row in range(3)]
    again = [(speaker, f"./{name}") for speaker, name in rows]
    write_training_list(tmp_path / "all.txt", [*rows, *again, *rows])
    held = hold_out(read_training_list(tmp_path / "all.txt"), 2, seed=1)
    assert len(held.trials.names) == 6 and int(held.trials.labels.sum()) == 2 * 3
    assert len(held.training) == 2 * 9, "what is trained on stays as it is listed"


def test_paths_of_windows(listed, capsys):
    write("list.txt", "s0 D:\\wav\\s0\\1.wav\ns1 D:\\wav\\s1\\1.wav\n")
    run("clean list.txt --root .", status=1)
    assert "--replace '\\' /" in capsys.readouterr().err
    run("rewrite list.txt new.txt --strip D:\\ --replace \\ /")
    assert list(read_training_list("new.txt").paths) == ["wav/s0/1.wav", "wav/s1/1.wav"]


def test_rewriting(listed):
    write("trials.txt", "1 wav/a/1.wav wav/a/2.wav\n0 wav/a/1.wav wav/b/1.wav\n")
    run("rewrite trials.txt kaldi.txt --strip wav/ --prefix flac/ --suffix .flac --form kaldi")
    kaldi = "flac/a/1.flac flac/a/2.flac target\nflac/a/1.flac flac/b/1.flac nontarget\n"
    assert read("kaldi.txt") == kaldi
    run("rewrite kaldi.txt back.txt --strip flac/ --prefix wav/ --suffix .wav")
    assert read("back.txt") == read("trials.txt")
    run("rewrite list.txt new.txt --replace wav/ audio/")
    assert read_training_list("new.txt").paths[0] == "audio/s0/0.wav"


def test_nist_tables(listed):
    """Enrolment table and key of a speaker recognition evaluation; the model is no path."""

    def rewritten(text, options, status=0):
        write("table", text)
        run(f"rewrite table new.txt {options}", status=status)
        return read("new.txt")

    table = "modelid\tsegmentid\tside\n1001\taa.sph\ta\n1001\tab.sph\ta\n"
    options = "--kind enrolment --prefix enrollment/"
    enrolment = "1001 enrollment/aa.sph\n1001 enrollment/ab.sph\n"
    assert rewritten(table, options) == enrolment
    other_side = table.replace("ab.sph\ta", "ab.sph\tb")
    assert rewritten(other_side, options, status=1) == enrolment
    key = (
        "modelid\tsegment\tside\ttargettype\n1001\tba.sph\ta\ttarget\n1001\tbb.sph\ta\tnontarget\n"
    )
    assert rewritten(key, "--prefix test/") == "1 1001 test/ba.sph\n0 1001 test/bb.sph\n"
    spk2utt = rewritten("ann a/1 a/2\n", "--kind enrolment --prefix x/")
    assert spk2utt == "ann x/a/1\nann x/a/2\n"


@pytest.mark.parametrize(
    "command",
    [
        "make list.txt link.txt",
        "make list.txt sub/../list.txt",
        "make list.txt train.txt --training train.txt",
        "clean list.txt --root . --dropped list.txt",
        "clean list.txt --root . --output o.txt --dropped o.txt",
        "rewrite list.txt list.txt",
        "hold_out train_list.txt . --speakers 2",
    ],
)
def test_inputs_are_not_overwritten(listed, command):
    (listed / "sub").mkdir()
    (listed / "link.txt").hardlink_to(listed / "list.txt")
    write("train_list.txt", read("list.txt"))
    before = {path.name: path.read_bytes() for path in listed.glob("*.txt")}
    run(command, status=1)
    assert {path.name: path.read_bytes() for path in listed.glob("*.txt")} == before


@pytest.fixture
def training(tmp_path):
    rows = [
        (f"s{speaker:02}", f"s{speaker:02}/{row}.wav") for row in range(6) for speaker in range(12)
    ]
    write_training_list(tmp_path / "all.txt", [*rows, ("t0", "t0/0.wav"), ("t1", "t1/0.wav")])
    return read_training_list(tmp_path / "all.txt")


def speaker_of(name):
    return name.split("/")[0]


def test_held_out_speakers(training):
    held = hold_out(training, 4, seed=3, nontargets_per_target=2)
    speakers = np.array([speaker_of(name) for name in held.trials.names])
    judges = set(speakers)
    assert len(judges) == 4 and not judges & set(held.training.speakers)
    assert judges | set(held.training.speakers) == set(training.speakers)
    for label, path in zip(held.training.labels.tolist(), held.training.paths, strict=True):
        assert held.training.speakers[label] == speaker_of(path)
    assert held.training.labels.max() == 9
    is_target = speakers[held.trials.enrol] == speakers[held.trials.test]
    np.testing.assert_array_equal(held.trials.labels, is_target)
    # All 15 pairs of six utterances for each speaker, and twice as many non-targets.
    assert int(held.trials.labels.sum()) == 60 and len(held.trials) == 180


def test_seed(training):
    first, again, different = (hold_out(training, 4, seed=seed).trials for seed in (3, 3, 4))
    assert first.sha256 == again.sha256 and first.checksum == again.checksum
    assert first.sha256 != different.sha256 and set(first.names) != set(different.names)


@pytest.mark.parametrize("number", [1, 13])
def test_too_few_speakers(training, number):
    with pytest.raises(ListError, match=rf"--speakers {number}: .* 14 .* 12 .*; expected 2 to 12"):
        hold_out(training, number, seed=1)


@pytest.mark.parametrize(("across", "targets"), [("call", 24), ("phone", 16)])
def test_targets_across(listed, across, targets):
    """Six speakers with two calls of two files; call 0 of each and call 1 of two are from
    landlines.
    """
    rows = []
    for speaker, call, file in np.ndindex(6, 2, 2):
        phone = "cell" if call and speaker > 1 else "landline"
        rows.append((f"s{speaker}", f"wav/s{speaker}/c{call}/{file}.wav", f"c{call}", phone))
    write("calls.csv", "speaker,path,call,phone\n" + "\n".join(map(",".join, rows)))
    trials = make(listed, f"--kind all --across {across}", source="calls.csv")
    assert trials.labels.sum() == targets
    if across == "call":
        write_training_list(listed / "list.txt", [row[:2] for row in rows])
        again = make(listed, "--kind all --across folder")
        assert again.sha256 == trials.sha256


def test_sessions_of_a_speaker_with_a_space_in_the_name(tmp_path):
    names = [f"{person}/day {day}/1.wav" for person in ("Ann B", "Bo") for day in range(2)]
    rows = [("Ann_B" if name.startswith("A") else "Bo", name) for name in names]
    write_training_list(tmp_path / "list.txt", rows)
    trials = make(tmp_path, "--kind all --across folder")
    assert trials.labels.sum() == 2 and len(trials) == 6


@pytest.mark.parametrize(
    ("file", "options", "problem"),
    [
        ("list.txt", "--across folder", "24 paths have no folder between"),
        ("list.txt", "--across call", "which has no columns"),
        ("table.csv", "--across cal", "no column 'cal'.* path, speaker, call .*mean 'call'"),
        ("table.csv", "--across call", "line 3: no call"),
        ("table.csv", "--across call --same_session", "contradict"),
    ],
)
def test_across_unknown_columns(listed, capsys, file, options, problem):
    write("table.csv", "path,speaker,call\na.wav,s0,c0\nb.wav,s0,\n")
    make(listed, *options.split(), source=file, status=1)
    assert re.search(problem, capsys.readouterr().err)
