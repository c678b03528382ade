"""Who speaks when: speech, clusters, turns, names and files; synthetic voices, results by hand."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile

from speakernet.data import speech
from speakernet.data.audio import write_audio
from speakernet.evaluation.calibration import AffineCalibration
from speakernet.inference.decision import DecisionRule
from speakernet.inference.identification import Namer
from speakernet.inference.people import Person
from speakernet.inference.recordings import open_recording
from speakernet.inference.who import conversation, live
from speakernet.inference.who.clustering import cluster
from speakernet.inference.who.conversation import Turn, enroll_speaker, speaker_called
from tests.commands import run_command
from tests.inference.conftest import spoken

VOICES = (0, 9, 5)
ORDER = (0, 1, 2, 0, 2, 1, 0, 1, 2)
TURN_SECONDS = 3.0
PAUSE_SECONDS = 0.8
STARTS = PAUSE_SECONDS + np.arange(len(ORDER)) * (TURN_SECONDS + PAUSE_SECONDS)


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    """A folder with a recording of three voices in nine turns, and its reference."""
    folder = tmp_path_factory.mktemp("meeting")
    num_noise = round(PAUSE_SECONDS * 16000)
    noise = 0.003 * np.random.default_rng(1).standard_normal(num_noise).astype(np.float32)
    parts = [noise]
    lines = []
    for number, (start, speaker) in enumerate(zip(STARTS, ORDER, strict=True)):
        parts += [spoken(VOICES[speaker], 10 + number, TURN_SECONDS), noise]
        lines.append(f"SPEAKER meeting 1 {start} {TURN_SECONDS} <NA> <NA> voice{speaker} <NA> <NA>")
    write_audio(folder / "meeting.wav", np.concatenate(parts))
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


def order_of(conversation_found):
    return [turn.speaker for turn in conversation_found.turns]


def test_turns_and_names(meeting, verifier, tmp_path):
    unnamed = verifier.who(meeting / "meeting.wav", num_speakers=3)
    assert order_of(unnamed) == [f"speaker {voice + 1}" for voice in ORDER]
    assert unnamed.detector == "energy"
    assert np.abs([turn.start for turn in unnamed.turns] - STARTS).max() < 0.3
    people = verifier.people(tmp_path / "people.db")
    for label, name in (("speaker 1", "Ada"), ("speaker 2", "Bo")):
        done = enroll_speaker(verifier, people, unnamed, speaker_called(unnamed, label), name)
        assert (done.name, done.added, done.total) == (name, 1, 1)
    named = verifier.who(meeting / "meeting.wav", people, num_speakers=3)
    assert order_of(named) == [["Ada", "Bo", "speaker 3"][voice] for voice in ORDER]
    with pytest.raises(ValueError, match=r"'Ada', 'Bo', 'speaker 3'$"):
        speaker_called(named, "speaker 4")
    posteriors = [speaker.posterior for speaker in named.speakers]
    assert min(posteriors[:2]) > 0.5 and posteriors[2] is None
    samples, rate = soundfile.read(meeting / "meeting.wav", dtype="float32")
    as_array = verifier.who(samples, sample_rate=rate, num_speakers=3)
    assert order_of(as_array) == order_of(unnamed)
    with pytest.raises(TypeError, match="sampel_rate"):
        verifier.who(samples, sampel_rate=rate)


def test_command(meeting, calibrated, tmp_path, call):
    out = tmp_path / "out"
    command = (
        f"who {meeting}/meeting.wav --model {calibrated} --store {tmp_path}/people.db "
        f"--speakers 3 --out {out}"
    )
    run_command(f"{command} --enroll 'speaker 3=Zoë <3' --enroll 'speaker 1=Ada'")
    run_command(command)
    written = json.loads((out / "meeting.json").read_text())
    assert [speaker["name"] for speaker in written["speakers"]] == ["Ada", "speaker 2", "Zoë <3"]
    page = (out / "meeting.html").read_text()
    assert "Zoë \\u003c3" in page and "data:audio/flac;base64," in page
    assert "__" not in page.split("base64")[0]
    rttm = (out / "meeting.rttm").read_text()
    assert rttm.count("\n") == len(ORDER) and "Zoë_<3" in rttm
    table = call(f"der {meeting}/truth.rttm {out}/meeting.rttm --collar 0.3")[1].splitlines()
    assert float(table[1].split()[1]) < 5 and "in 1 of 1" in table[2]


def test_bad_input(meeting, calibrated, uncalibrated, store, tmp_path, refuse):
    write_audio(tmp_path / "silence.wav", np.zeros(32000, np.float32))
    (tmp_path / "words.json").write_text('[{"word": "a", "start": 2}]')
    model = f"--model {calibrated}"
    audio = meeting / "meeting.wav"
    run_command(f"who {tmp_path}/silence.wav {model} --out {tmp_path}/out")
    assert (tmp_path / "out" / "silence.rttm").read_text() == ""
    for words, value in {
        f"{audio} {model} --speakers 99": "99 speakers",
        f"{audio} {model} --speakers 0": "--speakers",
        f"{audio} {model} --speakers 3 --max-speakers 2": "--max-speakers 2",
        f"{audio} {model} --enroll 'speaker 1' --store {store}": "SPEAKER=NAME",
        f"{audio} --model {uncalibrated} --store {store}": "speakernet calibrate",
        f"{audio} {model} --enroll 'speaker 9=Zoë' --store {store}": "speaker 9",
        f"{audio} {model} --enroll 'speaker 1=Zoë'": "--store",
        f"{audio} {model} --transcript {tmp_path}/words.json --out {tmp_path}": "words.json",
        f"{tmp_path}/none.wav {model}": "none.wav",
    }.items():
        assert value in refuse(f"who {words}")


def near(directions, spread):
    """Unit vectors (windows, 24) near the axes of these numbers."""
    rows = np.eye(24)[directions]
    rows = rows + spread * np.random.default_rng(0).standard_normal(rows.shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_clusters():
    truth = np.random.default_rng(1).integers(4, size=400)
    units = near(truth, 0.12)
    first = {label: rank for rank, label in enumerate(dict.fromkeys(truth.tolist()))}
    expected = np.array([first[label] for label in truth])
    for how in ({}, {"num_speakers": 4}):
        assert (cluster(units, **how)[0] == expected).all()
    assert cluster(units, max_speakers=2)[0].max() == 1
    assert cluster(units[:10], num_speakers=3)[0].max() == 2
    assert cluster(units[truth == 0])[0].max() == 0
    # Equal windows are one speaker.
    assert cluster(near(np.zeros(5, int), 0.0), num_speakers=2)[0].max() == 0


def test_many_windows(monkeypatch):
    monkeypatch.setattr("speakernet.inference.who.clustering.MAX_POINTS", 60)
    monkeypatch.setattr("speakernet.inference.who.clustering.BLOCK", 100)
    truth = np.repeat([0, 1, 0], 100)
    assert (cluster(near(truth, 0.1))[0] == truth).all()


def test_overlaps():
    # At 1 kHz: louder around 3 s, silent around 6.2 s.
    level = np.repeat([0.1, 0.2, 0.1, 0.0, 0.1], [2400, 1200, 2400, 400, 3600])
    recording = open_recording(level.astype(np.float32), 1000, 1000)
    turns = [Turn(0.0, 3.0, "a"), Turn(3.0, 6.2, "b"), Turn(6.2, 8.0, "a"), Turn(8.5, 10.0, "b")]
    overlapping = [Turn(0.0, 3.2, "a"), Turn(2.8, 6.2, "b"), *turns[2:]]
    assert conversation._add_overlaps(recording, turns) == overlapping
    # A short turn is extended, not covered by the turns of another voice around it.
    level = np.repeat([0.1, 0.3, 0.1], [2400, 1700, 2400])
    turns = [Turn(0.0, 3.0, "a"), Turn(3.0, 3.5, "b"), Turn(3.5, 6.5, "a")]
    found = conversation._add_overlaps(open_recording(level.astype(np.float32), 1000, 1000), turns)
    assert found == [Turn(0.0, 3.2, "a"), Turn(2.8, 3.7, "b"), Turn(3.3, 6.5, "a")]


def test_pipe(meeting, calibrated, monkeypatch, call):
    class Pipe:
        buffer = io.BytesIO((meeting / "meeting.wav").read_bytes())

    monkeypatch.setattr("sys.stdin", Pipe)
    monkeypatch.setattr(live, "PAUSE_SECONDS", 0.4)
    status, out, _ = call(f"who - --model {calibrated}")
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert status == 0 and len(rows) >= len(ORDER)
    begun = np.array([float(row[0]) for row in rows])
    assert np.abs(STARTS - begun[:, None]).min(axis=1).max() < TURN_SECONDS
    assert float(rows[-1][1]) == pytest.approx(STARTS[-1] + TURN_SECONDS, abs=0.4)


def test_each_name_goes_to_one_voice():
    voices = [
        conversation.Speaker(name, f"speaker {row}", 1.0, 0.9, score, np.zeros(2))
        for row, (name, score) in enumerate([("Ada", 0.5), ("speaker 1", 0.1), ("Ada", 0.7)])
    ]
    named = conversation._name_once(voices)
    assert [speaker.name for speaker in named] == ["speaker 0", "speaker 1", "Ada"]
    assert [speaker.posterior for speaker in named] == [None, 0.9, 0.9]


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_bound_is_named(meeting, verifier, caplog):
    assert len(verifier.who(meeting / "meeting.wav", max_speakers=2).speakers) == 2
    (warning,) = warnings_in(caplog)
    assert "--max-speakers" in warning and "more than 2" in warning
    caplog.clear()
    for bound in ({"num_speakers": 2}, {"max_speakers": 3}):
        verifier.who(meeting / "meeting.wav", **bound)
    assert not warnings_in(caplog)


def test_enrolment_is_checked(meeting, calibrated, verifier, tmp_path, caplog):
    store = tmp_path / "people.db"
    command = f"who {meeting}/meeting.wav --model {calibrated} --store {store} --speakers 3"
    # Two voices under one name, then a known voice under another name.
    run_command(f"{command} --enroll 'speaker 1=Ada' --enroll 'speaker_2=Ada'")
    assert "speaker 2" in warnings_in(caplog)[-1] and "other recordings" in warnings_in(caplog)[-1]
    store.unlink()
    run_command(f"{command} --enroll 'speaker 1=Ada'")
    caplog.clear()
    run_command(f"{command} --enroll Ada=Bo")
    assert "'Ada'" in " ".join(warnings_in(caplog))
    # The same voice again is skipped.
    caplog.clear()
    run_command(f"{command} --enroll 'speaker 1=Ada'")
    assert "already enrolled" in " ".join(warnings_in(caplog))
    everybody = verifier.people(store).people()
    assert [(person.name, person.recordings) for person in everybody] == [("Ada", 1), ("Bo", 1)]


def test_nothing_is_enrolled_without_output(meeting, calibrated, tmp_path, call):
    command = f"who {meeting}/meeting.wav --model {calibrated} --speakers 3"
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = tmp_path / "new.db"
    for words in ("--enroll 'speaker 9=Zoe'", f"--enroll 'speaker 1=Zoe' --out {blocked}"):
        status, out, _ = call(f"{command} {words} --store {store}")
        assert (status, out) == (1, "") and not store.exists()
    # The output is there even if the store cannot be written.
    status, out, _ = call(f"{command} --enroll 'speaker 1=Zoe' --store {blocked}/people.db")
    assert status == 1 and "SPEAKER" in out


def test_little_speech_needs_a_higher_score():
    class Store(list):
        def people(self):
            return self

        def identify(self, embedding, top):
            return [("Ada", 0.7)]

    # The ratio is 10 * score + ln(seconds), so that 10 needs 0.89 with 3 s and 0.63 with 40 s.
    calibration = AffineCalibration(np.array([10.0, 1.0]), 0.0, ("score", "duration"), 0.5)
    of_scores = replace(calibration, weights=np.array([10.0]), inputs=("score",))
    limits, of_ratios = (
        [{"name": "far_5%", "false_accept_rate": 0.05, "threshold": threshold}]
        for threshold in (0.5, 10.0)
    )
    rule = DecisionRule(of_scores, limits, "", quality=(calibration, of_ratios))
    store = Store([Person("Ada", 1, 60.0, "", "")])
    namer = Namer(rule, store, {"false_accept_rate": 0.05})
    # ln(20) is a little below 3.
    for seconds, name in ((3.0, None), (20.0, None), (40.0, "Ada")):
        assert namer.identify(np.ones(2), speech_seconds=seconds).name == name
    # Without a calibration of seconds, only the score counts, as in `identify`.
    plain = replace(namer, rule=replace(rule, quality=None))
    assert plain.identify(np.ones(2), speech_seconds=3.0).name == "Ada"
