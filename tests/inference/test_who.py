"""Who speaks when: speech, clusters, turns, names and files; synthetic voices, results by hand."""

import io
import json

import numpy as np
import pytest
import soundfile

import speakernet
from speakernet.cli import main
from speakernet.data import speech
from speakernet.data.audio import write_audio
from speakernet.inference.recordings import open_recording
from speakernet.inference.who import conversation, live
from speakernet.inference.who.clustering import cluster, cluster_up_to
from speakernet.inference.who.conversation import Turn, sections
from speakernet.inference.who.enrolment import enroll_speaker, speaker_called

VOICES = (0, 9, 5)
ORDER = (0, 1, 2, 0, 2, 1, 0, 1, 2)
TURN_SECONDS = 3.0
PAUSE_SECONDS = 0.8


@pytest.fixture(scope="module")
def meeting(speak, tmp_path_factory):
    """A folder with a recording of three voices in nine turns, and its reference."""
    folder = tmp_path_factory.mktemp("meeting")
    noise = 0.003 * np.random.default_rng(1).standard_normal(round(PAUSE_SECONDS * 16000)).astype(
        np.float32
    )
    parts = [noise]
    lines = []
    at = PAUSE_SECONDS
    for number, speaker in enumerate(ORDER):
        parts += [speak(VOICES[speaker], 10 + number, TURN_SECONDS), noise]
        lines.append(
            f"SPEAKER meeting 1 {at:.3f} {TURN_SECONDS:.3f} <NA> <NA> voice{speaker} <NA> <NA>"
        )
        at += TURN_SECONDS + PAUSE_SECONDS
    write_audio(folder / "meeting.wav", np.concatenate(parts), 16000)
    (folder / "truth.rttm").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def by_energy(monkeypatch):
    """silero-vad does not take synthetic voices for speech, and the tiny network needs windows of
    three seconds.
    """
    monkeypatch.setattr(speech, "default_detector", lambda: speech.ENERGY)
    monkeypatch.setattr(conversation, "WINDOW_SECONDS", 3.0)
    monkeypatch.setattr(conversation, "HOP_SECONDS", 1.5)


@pytest.fixture(scope="module")
def store(voices, calibrated, tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "people.db"
    for speaker in (0, 7, 8, 9):
        recordings = [str(voices / f"s{speaker:02d}" / f"{number}.wav") for number in range(3)]
        assert (
            main(
                [
                    "enroll",
                    f"Voice {speaker}",
                    *recordings,
                    "--model",
                    str(calibrated),
                    "--store",
                    str(path),
                ]
            )
            == 0
        )
    return path


def order_of(found):
    return [turn.speaker for turn in found.turns]


def test_turns_and_names(meeting, calibrated, tmp_path):
    verifier = speakernet.load(calibrated, "cpu")
    found = verifier.who(meeting / "meeting.wav", num_speakers=3)
    assert order_of(found) == [f"speaker {one + 1}" for one in ORDER] and found.detector == "energy"
    starts = np.arange(len(ORDER)) * (TURN_SECONDS + PAUSE_SECONDS) + PAUSE_SECONDS
    assert np.abs([turn.start for turn in found.turns] - starts).max() < 0.3
    people = verifier.people(tmp_path / "people.db")
    for label, name in (("speaker 1", "Ada"), ("speaker 2", "Bo")):
        done = enroll_speaker(verifier, people, found, speaker_called(found, label), name)
        assert (done.name, done.added, done.total) == (name, 1, 1)
    named = verifier.who(meeting / "meeting.wav", people, num_speakers=3)
    assert order_of(named) == [["Ada", "Bo", "speaker 3"][one] for one in ORDER]
    assert [one.posterior is None for one in named.speakers] == [False, False, True]
    assert all(one.posterior > 0.5 for one in named.speakers[:2])
    samples, rate = soundfile.read(meeting / "meeting.wav", dtype="float32")
    assert order_of(verifier.who(samples, sample_rate=rate, num_speakers=3)) == order_of(found)


def test_command(meeting, calibrated, tmp_path, capsys):
    people = tmp_path / "people.db"
    out = tmp_path / "out"
    words = [
        "who",
        str(meeting / "meeting.wav"),
        "--model",
        str(calibrated),
        "--store",
        str(people),
        "--speakers",
        "3",
    ]
    assert (
        main(
            [*words, "--enroll", "speaker 3=Zoë <3", "--enroll", "speaker 1=Ada", "--out", str(out)]
        )
        == 0
    )
    assert main([*words, "--out", str(out)]) == 0
    kept = json.loads((out / "meeting.json").read_text())
    assert [one["name"] for one in kept["speakers"]] == ["Ada", "speaker 2", "Zoë <3"]
    page = (out / "meeting.html").read_text()
    assert (
        "Zoë \\u003c3" in page
        and "data:audio/flac;base64," in page
        and "__" not in page.split("base64")[0]
    )
    rttm = (out / "meeting.rttm").read_text()
    assert rttm.count("\n") == len(ORDER) and "Zoë_<3" in rttm
    capsys.readouterr()
    assert (
        main(["der", str(meeting / "truth.rttm"), str(out / "meeting.rttm"), "--collar", "0.3"])
        == 0
    )
    table = capsys.readouterr().out.splitlines()
    assert float(table[1].split()[1]) < 5 and "in 1 of 1" in table[2]


def test_bad_input(meeting, calibrated, uncalibrated, store, tmp_path, capsys):
    write_audio(tmp_path / "silence.wav", np.zeros(32000, np.float32), 16000)
    (tmp_path / "words.json").write_text('[{"word": "a", "start": 2}]')
    model = ["--model", str(calibrated)]
    audio = str(meeting / "meeting.wav")
    assert main(["who", str(tmp_path / "silence.wav"), *model, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "silence.rttm").read_text() == ""
    capsys.readouterr()
    for words, part in {
        (audio, *model, "--speakers", "99"): "99 speakers",
        (audio, *model, "--speakers", "0"): "--speakers",
        (audio, *model, "--speakers", "3", "--max-speakers", "2"): "--max-speakers 2",
        (audio, *model, "--enroll", "speaker 1", "--store", str(store)): "SPEAKER=NAME",
        (audio, "--model", str(uncalibrated), "--store", str(store)): "speakernet calibrate",
        (audio, *model, "--enroll", "speaker 9=Zoë", "--store", str(store)): "speaker 9",
        (audio, *model, "--enroll", "speaker 1=Zoë"): "--store",
        (
            audio,
            *model,
            "--transcript",
            str(tmp_path / "words.json"),
            "--out",
            str(tmp_path),
        ): "words.json",
        (str(tmp_path / "none.wav"), *model): "none.wav",
    }.items():
        assert main(["who", *words]) == 1, words
        out, err = capsys.readouterr()
        assert out == "" and part in err and "Traceback" not in err, err


def test_clusters():
    random = np.random.default_rng(0)
    truth = random.integers(4, size=400)
    rows = np.eye(24)[truth] + 0.12 * random.standard_normal((400, 24))
    units = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    first = {label: rank for rank, label in enumerate(dict.fromkeys(truth.tolist()))}
    expected = np.array([first[one] for one in truth])
    for how in ({}, {"num_speakers": 4}):
        assert (cluster(units, **how) == expected).all()
    assert cluster(units, max_speakers=2).max() == 1
    assert cluster(units[:10], num_speakers=3).max() == 2
    assert cluster(units[truth == 0]).max() == 0


def test_many_windows(monkeypatch):
    monkeypatch.setattr("speakernet.inference.who.clustering.MAX_POINTS", 60)
    monkeypatch.setattr("speakernet.inference.who.clustering.BLOCK", 100)
    random = np.random.default_rng(0)
    truth = np.repeat([0, 1, 0], 100)
    rows = np.eye(24)[truth] + 0.1 * random.standard_normal((300, 24))
    units = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    assert (cluster(units) == truth).all()


def test_sections():
    windows = np.array([[0.0, 1.5], [0.75, 2.25], [4.0, 5.0]])
    found = sections(np.array([[0.0, 2.25], [4.0, 5.0]]), windows, np.array([0, 1, 1]))
    assert found == [(0.0, 1.125, 0), (1.125, 2.25, 1), (4.0, 5.0, 1)]


def test_overlaps():
    # At 1 kHz: louder around 3 s, silent around 6.2 s.
    level = np.repeat([0.1, 0.2, 0.1, 0.0, 0.1], [2400, 1200, 2400, 400, 3600])
    recording = open_recording(level.astype(np.float32), 1000, 1000)
    turns = [Turn(0.0, 3.0, "a"), Turn(3.0, 6.2, "b"), Turn(6.2, 8.0, "a"), Turn(8.5, 10.0, "b")]
    assert conversation._with_overlaps(recording, turns) == [
        Turn(0.0, 3.2, "a"),
        Turn(2.8, 6.2, "b"),
        *turns[2:],
    ]
    # A short turn is extended, not covered by the turns of another voice around it.
    level = np.repeat([0.1, 0.3, 0.1], [2400, 1700, 2400])
    turns = [Turn(0.0, 3.0, "a"), Turn(3.0, 3.5, "b"), Turn(3.5, 6.5, "a")]
    found = conversation._with_overlaps(open_recording(level.astype(np.float32), 1000, 1000), turns)
    assert found == [Turn(0.0, 3.2, "a"), Turn(2.8, 3.7, "b"), Turn(3.3, 6.5, "a")]


def test_pipe(meeting, calibrated, monkeypatch, capsys):
    class Pipe:
        buffer = io.BytesIO((meeting / "meeting.wav").read_bytes())

    monkeypatch.setattr("sys.stdin", Pipe)
    monkeypatch.setattr(live, "PAUSE_SECONDS", 0.4)
    assert main(["who", "-", "--model", str(calibrated)]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    starts = np.arange(len(ORDER)) * (TURN_SECONDS + PAUSE_SECONDS) + PAUSE_SECONDS
    assert len(rows) >= len(ORDER) and all(
        np.abs(starts - float(row[0])).min() < TURN_SECONDS for row in rows
    )
    assert float(rows[-1][1]) == pytest.approx(starts[-1] + TURN_SECONDS, abs=0.4)


def test_each_name_goes_to_one_voice():
    voices = [
        conversation.Speaker(name, f"speaker {row}", 1.0, 0.9, score, np.zeros(2), "")
        for row, (name, score) in enumerate([("Ada", 0.5), ("speaker 1", 0.1), ("Ada", 0.7)])
    ]
    named = conversation._named_once(voices)
    assert [(one.name, one.posterior) for one in named] == [
        ("speaker 0", None),
        ("speaker 1", 0.9),
        ("Ada", 0.9),
    ]


def test_equal_windows_are_one_speaker():
    units = np.tile(np.eye(4, dtype=np.float32)[:1], (5, 1))
    assert cluster(units).max() == 0 and cluster(units, num_speakers=2).max() == 0


def test_unknown_keywords(meeting, calibrated):
    verifier = speakernet.load(calibrated, "cpu")
    for keyword in ("speakers", "far", "sampel_rate"):
        with pytest.raises(TypeError, match=keyword):
            verifier.who(meeting / "meeting.wav", **{keyword: 5})


def voices_around(count, windows_each):
    """Windows of `count` voices in turn, as unit vectors that hardly vary, (windows, 24)."""
    rows = np.repeat(np.eye(24)[:count], windows_each, axis=0)
    rows = rows + 0.05 * np.random.default_rng(0).standard_normal(rows.shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_more_voices_than_the_bound():
    for count, bound, has_more in (
        (12, 10, True),
        (10, 10, False),
        (11, 10, True),
        (3, 10, False),
        (2, 1, True),
    ):
        labels, more = cluster_up_to(
            voices_around(count, 12), num_speakers=None, max_speakers=bound
        )
        assert (more, labels.max() + 1) == (has_more, min(count, bound)), count
    # A number that was given is no bound.
    labels, more = cluster_up_to(voices_around(12, 12), num_speakers=4, max_speakers=10)
    assert labels.max() == 3 and not more


def test_the_bound_is_named(meeting, calibrated, caplog):
    verifier = speakernet.load(calibrated, "cpu")
    assert len(verifier.who(meeting / "meeting.wav", max_speakers=2).speakers) == 2
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "--max-speakers" in record.getMessage() and "more than 2" in record.getMessage()
    caplog.clear()
    verifier.who(meeting / "meeting.wav", num_speakers=2)
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_enrolment_is_checked(meeting, calibrated, tmp_path, caplog, capsys):
    model = str(calibrated)
    audio = str(meeting / "meeting.wav")
    store = tmp_path / "people.db"
    words = ["who", audio, "--model", model, "--store", str(store), "--speakers", "3"]
    # Two voices under one name, then a known voice under another name.
    assert main([*words, "--enroll", "speaker 1=Ada", "--enroll", "speaker 2=Ada"]) == 0
    (warning,) = [
        one.getMessage()
        for one in caplog.records
        if one.levelname == "WARNING" and "Ada" not in one.msg
    ][-1:]
    assert "speaker 2" in warning and "other recordings" in warning
    verifier = speakernet.load(calibrated, "cpu")
    store.unlink()
    assert main([*words, "--enroll", "speaker 1=Ada"]) == 0
    caplog.clear()
    assert main([*words, "--enroll", "Ada=Bo"]) == 0
    assert any("'Ada'" in one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert [one.name for one in verifier.people(store).people()] == ["Ada", "Bo"]
    # The same voice again is skipped.
    caplog.clear()
    assert main([*words, "--enroll", "speaker 1=Ada"]) == 0
    assert any("already enrolled" in one.getMessage() for one in caplog.records)
    assert [one.recordings for one in verifier.people(store).people()] == [1, 1]


def test_nothing_is_enrolled_without_output(meeting, calibrated, tmp_path, capsys):
    words = ["who", str(meeting / "meeting.wav"), "--model", str(calibrated), "--speakers", "3"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    for number, more in enumerate(
        (["--enroll", "speaker 9=Zoe"], ["--enroll", "speaker 1=Zoe", "--out", str(blocked)])
    ):
        store = tmp_path / f"{number}.db"
        assert main([*words, *more, "--store", str(store)]) == 1
        assert not store.exists() and capsys.readouterr().out == ""
    # The output is there even if the store cannot be written.
    assert main([*words, "--enroll", "speaker 1=Zoe", "--store", str(blocked / "people.db")]) == 1
    assert capsys.readouterr().out.count("SPEAKER") == len(ORDER)
