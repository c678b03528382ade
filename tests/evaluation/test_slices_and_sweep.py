"""Slices group trials as said and are evaluated as lists of their own; sweep steps degrade by the amount they name."""

import numpy as np
import pytest

from speakernet.data.audio import write_audio
from speakernet.data.augment.banks import RirBank, noise_banks
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.opening import open_source
from speakernet.evaluation.metrics import eer, min_dcf
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.slices import (
    DURATION_EDGES_SECONDS,
    all_slices,
    column_slicings,
    read_metadata,
    slice_results,
    usable_columns,
    value_slicing,
)
from speakernet.evaluation.speakers import read_speaker_table, speakers_of
from speakernet.evaluation.sweep import KINDS, DegradedSource, run_sweep, sweep_steps

RATE = 16000
PLAIN = {"num_threads": 2, "num_draws": 0, "seed": 0}


def some_trials(num_speakers=8, utterances=3):
    names = [f"s{speaker}/{one}.wav" for speaker in range(num_speakers) for one in range(utterances)]
    rows = [(first, second) for first in range(len(names)) for second in range(first + 1, len(names))]
    enrol, test = np.array(rows, dtype=np.int32).T
    labels = (enrol // utterances == test // utterances).astype(np.int8)
    return TrialList(StringTable.from_strings(names), enrol, test, labels, "trials.txt")


def scores_of(trials, random):
    return random.standard_normal(len(trials)) + 1.5 * trials.labels


def test_duration_groups_by_the_shorter_side(random):
    trials = some_trials(2, 2)
    slicing = value_slicing("duration", np.array([1.0, 2.0, 5.0, 30.0]), trials, DURATION_EDGES_SECONDS, " s")
    # trials: 0-1 0-2 0-3 1-2 1-3 2-3; an edge belongs to what is above it
    assert slicing.labels == ["under 2 s", "2 to 4 s", "4 to 6 s"]
    assert slicing.groups.tolist() == [0, 0, 0, 1, 1, 2]


def test_each_slice_is_evaluated_as_a_list_of_its_own(random):
    trials = some_trials()
    scores, seconds = scores_of(trials, random), random.uniform(1, 12, len(trials.names))
    slicing = value_slicing("duration", seconds, trials, DURATION_EDGES_SECONDS, " s")
    result = slice_results(slicing, trials, scores, speakers_of(trials), 20, 0)
    assert sum(row.num_trials for row in result.rows) == len(trials)
    compared = 0
    for group, row in enumerate(result.rows):
        chosen = slicing.groups == group
        assert row.num_targets == trials.labels[chosen].sum()
        if row.eer_percent is None:
            assert row.note in ("no targets", "no non-targets")
            continue
        compared += 1
        assert row.eer_percent == pytest.approx(eer(scores[chosen], trials.labels[chosen]))
        assert row.min_dcf["0.05"] == pytest.approx(min_dcf(scores[chosen], trials.labels[chosen], 0.05))
    assert compared >= 2


def test_what_a_speaker_never_changes_borrows_the_targets_for_the_different_side(random):
    trials = some_trials()
    gender = ["f" if int(name[1]) % 2 else "m" for name in trials.names]
    same, both = column_slicings("gender", gender, trials)
    scores = scores_of(trials, random)
    result = slice_results(same, trials, scores, speakers_of(trials), 10, 0)
    different = (same.groups == 1) | (trials.labels == 1)
    assert not trials.labels[same.groups == 1].any()
    assert result.rows[1].eer_percent == pytest.approx(eer(scores[different], trials.labels[different]))
    assert "all targets" in result.note
    assert both.labels == ["gender f", "gender m"] and (both.groups == -1).sum() == (same.groups == 1).sum()


def test_numbers_are_cut_into_thirds_and_names_are_refused():
    trials = some_trials()
    ages = [str(20 + row) for row in range(len(trials.names))]
    (slicing,) = column_slicings("age", ages, trials)
    assert len(slicing.labels) == 3 and np.bincount(slicing.groups).min() > len(trials) / 5
    words = [f"w{row}" for row in range(len(trials.names))]
    with pytest.raises(ValueError, match="'file' has 24 different values"):
        column_slicings("file", words, trials)
    columns = {"age": ages, "file": words, "all": ["x"] * 24, "room": ["a", "b"] * 12}
    assert usable_columns(columns) == ["age", "room"]


@pytest.mark.parametrize("read", [read_speaker_table, lambda path: read_metadata(path, ["a"])])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"path,speaker\ncaf\xe9,x\n", "not UTF-8"),
        (b"path,speaker\na," + b"x" * 200_000 + b"\n", "field larger|longer than"),
        (b"", "no column"),
        (b"\x00" * 50, "NUL|no column|not text|line contains"),
        (b"path,speaker\na,b\na\n", "line 3: "),
        (b"path,speaker\na,b\na,b,c\n", "line 3: "),
    ],
)
def test_a_damaged_table_is_named(read, content, message, tmp_path):
    (tmp_path / "my.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"my\.csv.*({message})"):
        read(tmp_path / "my.csv")


def test_metadata_that_lacks_utterances_or_the_path_is_told(tmp_path):
    path = tmp_path / "meta.csv"
    path.write_text("path,speaker,gender\na.wav,s,f\n")
    assert read_metadata(path, ["a.wav"]) == {"gender": ["f"]}
    with pytest.raises(ValueError, match=r"lacks 11 utterances of the list: u0, "):
        read_metadata(path, ["a.wav", *(f"u{row}" for row in range(11))])


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    root = tmp_path_factory.mktemp("audio")
    random = np.random.default_rng(5)
    for name, seconds in (("s0/0.wav", 1.5), ("s0/1.wav", 5.0), ("s1/0.wav", 3.0), ("s1/1.wav", 3.0)):
        (root / name).parent.mkdir(exist_ok=True)
        write_audio(root / name, (0.1 * random.standard_normal(round(seconds * RATE))).astype(np.float32), RATE)
    (root / "noise" / "noise").mkdir(parents=True)
    (root / "rooms").mkdir()
    for one in range(3):
        noise = (0.2 * random.standard_normal(2 * RATE)).astype(np.float32)
        write_audio(root / "noise" / "noise" / f"{one}.wav", noise, RATE)
    response = (random.standard_normal(4000) * np.exp(-np.arange(4000) / 800) * 0.2).astype(np.float32)
    response[0] = 0.9
    write_audio(root / "rooms" / "room.wav", response, RATE)
    return root


@pytest.fixture(scope="module")
def steps(audio):
    rooms = RirBank(audio / "rooms", RATE, None, is_aligned=True)
    return sweep_steps(KINDS, noise_banks(audio / "noise", RATE, None), rooms, sample_rate=RATE)


def test_all_slices_reads_what_was_asked_for(audio, random):
    trials = some_trials(2, 2)
    speakers, source = speakers_of(trials), open_source(audio)
    options = EvaluationOptions(slices=["duration", "snr"])
    found = all_slices(trials, scores_of(trials, random), speakers, source, options, **PLAIN)
    assert [one.by.split(" of ")[0] for one in found] == ["duration", "signal-to-noise ratio"]
    assert [row.label for row in found[0].rows] == ["under 2 s", "2 to 4 s"]
    with pytest.raises(ValueError, match="'durations' is none of duration, snr"):
        options = EvaluationOptions(slices=["durations"])
        all_slices(trials, scores_of(trials, random), speakers, source, options, **PLAIN)


def test_noise_has_the_ratio_it_names_and_is_the_same_noise_at_every_amount(steps, random):
    speech = (0.1 * random.standard_normal(RATE)).astype(np.float32)
    before = speech.copy()
    shapes = []
    for step in steps["noise"]:
        added = step.transform(speech, 7) - speech
        assert 10 * np.log10(np.mean(speech**2) / np.mean(added**2)) == pytest.approx(float(step.label), abs=0.01)
        shapes.append(added / np.linalg.norm(added))
    np.testing.assert_allclose(shapes[0], shapes[-1], atol=1e-4)
    np.testing.assert_array_equal(speech, before)


def test_durations_are_cut_from_the_middle_and_the_telephone_keeps_its_band(steps, audio):
    source, names = open_source(audio), StringTable.from_strings(["s0/0.wav", "s0/1.wav"])
    whole = source.read("s0/1.wav")
    for step, seconds in zip(steps["duration"], (4, 3, 2, 1), strict=True):
        middle = DegradedSource(source, names, step)
        begin = (len(whole) - seconds * RATE) // 2
        np.testing.assert_array_equal(middle.read("s0/1.wav"), whole[begin : begin + seconds * RATE])
        np.testing.assert_array_equal(middle.read("s0/1.wav", 100, 50), whole[begin + 100 : begin + 150])
        assert not len(middle.read("s0/1.wav", seconds * RATE, 50))
        assert middle.lookup_table(names).num_samples.tolist() == [len(middle.read(name)) for name in names]
    times = np.arange(RATE) / RATE
    for step in steps["telephone"]:
        inside = step.transform(0.1 * np.sin(2 * np.pi * 1000 * times), 0)
        outside = step.transform(0.1 * np.sin(2 * np.pi * 6000 * times), 0)
        assert np.std(inside) == pytest.approx(0.1 / np.sqrt(2), rel=0.05) and np.std(outside) < 0.002


def test_a_sweep_scores_the_degraded_audio_of_the_right_utterance(audio, steps):
    trials = some_trials(2, 2)
    source = open_source(audio)
    speakers, seen = speakers_of(trials), []

    def score(degraded):
        assert isinstance(degraded, DegradedSource)
        lengths = np.array([len(degraded.read(name)) for name in trials.names])
        seen.append((lengths / RATE).tolist())
        return np.arange(len(trials), dtype=np.float64)

    base = np.where(trials.labels == 1, 1.0, 0.0)
    (result,) = run_sweep({"duration": steps["duration"]}, source, score, trials, base, speakers, num_draws=200, seed=0)
    assert seen == [[1.5, 4, 3, 3], [1.5, 3, 3, 3], [1.5, 2, 2, 2], [1, 1, 1, 1]]
    assert [row.label for row in result.rows] == ["all", "4", "3", "2", "1"]
    assert result.rows[0].eer_percent == 0.0
    assert result.rows[1].eer_percent == pytest.approx(eer(np.arange(6.0), trials.labels))
    assert "too few" in result.rows[0].note


def test_a_sweep_without_its_files_is_refused_before_anything_starts():
    for kind, option in (("noise", "augment.noise_path"), ("reverb", "augment.rir_path")):
        with pytest.raises(ValueError, match=option):
            sweep_steps([kind], {}, None, sample_rate=RATE)


def test_reverberation_grows_and_keeps_the_loudness_at_the_end(steps, random):
    speech = (0.1 * random.standard_normal(RATE)).astype(np.float32)
    changed = [np.linalg.norm(step.transform(speech, 0) - speech) for step in steps["reverb"]]
    assert (np.diff(changed) > 0).all()
    assert np.std(steps["reverb"][-1].transform(speech, 0)) == pytest.approx(np.std(speech), rel=0.02)
