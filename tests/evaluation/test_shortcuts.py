"""Lists that can be solved without their voices, by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from speakernet.data.lists import StringTable, TrialList
from speakernet.data.lookup import COLUMNS, PCM_S16, LookupTable
from speakernet.evaluation.figures import few_speakers_note, speakers_of_half_the_targets
from speakernet.evaluation.shortcuts import (
    Quantity,
    is_notable,
    quantities_of,
    shortcuts,
    silence_note,
)
from speakernet.evaluation.speakers import Speakers
from tests.evaluation.report_runs import trials_of

PAIRS = [(0, 1), (2, 3), (0, 2), (0, 3), (0, 4), (1, 4), (2, 4), (1, 2)]
LABELS = [1, 1, 1, 1, 0, 0, 0, 0]


def listed(pairs, labels):
    return trials_of([f"{row}.wav" for row in range(1 + np.max(pairs))], pairs, labels)


def alone(quantity, pairs=PAIRS, labels=LABELS, speakers=(0, 0, 0, 0, 1)):
    of_list = Speakers(np.array(speakers), max(speakers) + 1, "by hand")
    trials = listed(pairs, labels)
    return shortcuts(trials, of_list, [quantity], num_draws=100, seed=0)


def test_difference_and_mean():
    """Differences 1 1 3 4 and 9 8 6 2: up to 3, one target is missed and one of the others
    accepted. Means 0.5 3.5 1.5 2 and 4.5 5 6 2: the same up to 2.
    """
    rows = alone(Quantity("duration", np.array([0.0, 1, 3, 4, 9])))
    shown = [(row.label, row.eer_percent, row.note) for row in rows]
    assert shown == [
        ("difference in duration", 25, "smaller for targets"),
        ("duration", 25, "smaller for targets"),
    ]


def test_silence():
    trials = listed(PAIRS, LABELS)
    note = silence_note(trials, np.array([-20, -np.inf, -70, np.nan, -30]))
    # All trials but those of 0 with 3 and 4.
    assert "2 recordings" in note and "(1.wav, 2.wav)" in note and "6 trials" in note
    assert silence_note(trials, np.array([-20.0, -21, -22, np.nan, -30])) == ""


def test_categories():
    """Half of the targets and three quarters of the others differ: on the line from misses of 50 %
    and false accepts of 25 % to 0 and 100 % they cross at 40 %. Sides in category 0: 2 0 1 1 and
    1 1 0 1; from 75 % and 0 to 25 % and 75 % they cross at 45 %.
    """
    codes = np.array([0.0, 0, 1, 1, 1])
    rows = alone(Quantity("format", codes, is_category=True, category="wav files"))
    assert [(row.label, row.note) for row in rows] == [
        ("difference in format", "smaller for targets"),
        ("share of wav files", "larger for targets"),
    ]
    assert [row.eer_percent for row in rows] == pytest.approx([40, 45])
    assert len(alone(Quantity("session", codes, is_category=True))) == 1


def test_unknown_and_constant():
    """Without utterance 4 a single non-target is left, with a difference of 2; without 1 none."""
    values = np.array([0, 1, 3, 4, np.nan])
    assert alone(Quantity("loudness", values))[0].eer_percent == 50
    assert alone(Quantity("loudness", np.full(5, np.nan))) == []
    assert alone(Quantity("sample rate", np.ones(5))) == []


@pytest.mark.parametrize(("num_speakers", "is_found"), [(4, False), (5, True)])
def test_a_quantity_that_decides(num_speakers, is_found):
    """Targets are long and the others short; an interval needs five speakers."""
    rows = np.arange(num_speakers)
    targets = [(int(row), int(row) + num_speakers) for row in rows]
    others = [(2 * num_speakers + i, 2 * num_speakers + j) for i in rows for j in rows if i < j]
    values = np.repeat([10.0, 10.0, 1.0], num_speakers)
    labels = [1] * len(targets) + [0] * len(others)
    (row,) = alone(Quantity("duration", values), targets + others, labels, np.tile(rows, 3))
    assert (row.eer_percent, row.note) == (0, "larger for targets")
    assert is_notable(row) == is_found
    assert row.eer_interval_percent == ((0, 0) if is_found else None)


def test_quantities_of_headers():
    columns = {name: np.ones(3, dtype) for name, dtype in COLUMNS.items()}
    columns["native_samples"] = np.array([8000, 32000, 0])
    columns["sample_rates"] = np.array([8000, 16000, 0])
    columns["formats"] = np.array([0, PCM_S16, 0])
    names = StringTable.from_strings(["a.flac", "b.WAV", "c.flac"])
    trials = TrialList(names, np.zeros(1), np.ones(1), None, "trials.txt")
    table = LookupTable(16000, columns)
    quantities = {item.name: item for item in quantities_of(table, trials, np.zeros(3))}
    assert_allclose(quantities["duration"].values, np.log([1, 2, np.nan]))
    assert_allclose(quantities["sample rate"].values, np.log([8000, 16000, np.nan]))
    assert quantities["format"].category == ".flac files"
    assert_array_equal(quantities["format"].values, [0, 1, np.nan])


def test_few_speakers():
    """Speakers with 5, 3, 2 and 2 of 12 targets: the first two have half of them."""
    pairs = [(0, 0)] * 5 + [(1, 1)] * 3 + [(2, 2)] * 2 + [(3, 3)] * 2 + [(0, 1)]
    of_list = Speakers(np.arange(4), 4, "by hand")
    assert speakers_of_half_the_targets(listed(pairs, [1] * 12 + [0]), of_list) == 2
    assert "12 target trials" in few_speakers_note(9, 12)
    assert few_speakers_note(10, 12) == few_speakers_note(None, 12) == ""
