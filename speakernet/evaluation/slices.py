"""Results by kind of trial: by duration, speech, signal-to-noise ratio, or any column of a CSV.

A slicing assigns each trial to a group, and each group is evaluated like a separate list, with an
interval over speakers.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.levels import signal_to_noise_ratios
from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.data.speech import cut_to_speech
from speakernet.evaluation.embedding import checked_lengths, reader_threads
from speakernet.evaluation.figures import (
    ALWAYS_SHOWN_PRIORS,
    OperatingPoint,
    SpeakerBootstrap,
    group_draws,
    group_result,
    operating_points,
)
from speakernet.evaluation.metrics import missing_kind
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import GroupResult, SliceResult
from speakernet.evaluation.speakers import Speakers, read_rows
from speakernet.options import suggestion

DURATION_EDGES_SECONDS = (2.0, 4.0, 6.0, 10.0)
SPEECH_EDGES_SECONDS = (1.0, 2.0, 3.0, 5.0, 10.0)
SNR_EDGES_DB = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
MODEL_SIZES = {1: "1", 2: "2", 3: "3 to 4", 5: "5 to 9", 10: "10 and more"}
"""Smallest number of recordings of a model in each group -> its label."""
MAX_VALUES = 12
"""A text column with more distinct values holds names, not groups."""
MIN_NUMBERS = 6
"""A column with at least this many distinct numbers holds a quantity, which is cut into thirds."""
NOT_COLUMNS = ("path", "speaker")


@dataclass(frozen=True)
class Slicing:
    """One way of grouping trials."""

    by: str
    """The property in which the groups differ."""
    labels: list[str]
    groups: np.ndarray
    """The group of each trial, -1 for none, int64 (trials,)."""
    note: str = ""
    shares_targets: bool = False
    """Groups without targets use all targets of the list (for attributes that never change within a
    speaker)."""


def all_slices(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    source: AudioSource,
    options: EvaluationOptions,
    seed: int,
) -> list[SliceResult]:
    """Results of a labelled list for every slicing in the options."""
    # Speech and noise take another pass over all audio, so they are sliced by only on request.
    columns = _columns_of(trials, options.metadata)
    names = options.slices or ["duration", *columns]
    num_threads = reader_threads(options)
    slicings: list[Slicing] = []
    if trials.models:
        slicings.append(model_slicing(trials.models.counts[trials.enrol]))
    for name in dict.fromkeys(names):
        if name in columns:
            of_column = column_slicings(name, columns[name], trials)
            if not of_column and options.slices:
                raise ValueError(
                    f"column {name!r} cannot be sliced by; expected 2 to {MAX_VALUES} different "
                    f"words in this list, or at least {MIN_NUMBERS} different numbers"
                )
            slicings += of_column
        elif name == "speech" or (name == "duration" and options.speech == "detected"):
            table = cut_to_speech(source).lookup_table(trials.recordings, num_threads)
            by = "seconds of speech in the side with less"
            seconds = trials.mean(table.seconds)
            slicings.append(value_slicing(by, seconds, trials, SPEECH_EDGES_SECONDS, " s"))
        elif name == "duration":
            lengths = checked_lengths(source, trials.recordings, num_threads)
            seconds = trials.mean(lengths / source.sample_rate)
            by = "duration of the shorter side"
            slicings.append(value_slicing(by, seconds, trials, DURATION_EDGES_SECONDS, " s"))
        elif name == "snr":
            by = "signal-to-noise ratio of the noisier side"
            note = "The ratio is estimated from each utterance's loud and quiet frames."
            ratios = trials.mean(signal_to_noise_ratios(source, trials.recordings, num_threads))
            slicings.append(value_slicing(by, ratios, trials, SNR_EDGES_DB, " dB", note))
        else:
            known = ["duration", "snr", "speech", *columns]
            raise ValueError(
                f"slices: {name!r} is not one of {', '.join(known)}; {suggestion(name, known)}"
            )
    points = operating_points(ALWAYS_SHOWN_PRIORS, options)
    draws = group_draws(options)
    return [
        slice_results(slicing, trials, scores, speakers, points, draws, seed)
        for slicing in slicings
    ]


def worse_side(values: np.ndarray, trials: TrialList) -> np.ndarray:
    """Turn a measure of utterances, (utterances,), into one of trials, (trials,): the smaller of
    the two sides.
    """
    # A trial is about as hard as its worse recording.
    return np.minimum(values[trials.enrol], values[trials.test])


def value_slicing(
    by: str,
    values: np.ndarray,
    trials: TrialList,
    edges: Sequence[float],
    unit: str,
    note: str = "",
) -> Slicing:
    """Group trials by the smaller of the two sides, between ascending edges; groups without trials
    are omitted.
    """
    # A value equal to an edge belongs to the range above it.
    ranges = np.searchsorted(np.asarray(edges), worse_side(values, trials), side="right")
    names = [f"under {edges[0]:g}{unit}"]
    names += [f"{low:g} to {high:g}{unit}" for low, high in itertools.pairwise(edges)]
    names.append(f"{edges[-1]:g}{unit} and more")
    present, groups = np.unique(ranges, return_inverse=True)
    return Slicing(by, [names[number] for number in present], groups, note)


def model_slicing(counts: np.ndarray) -> Slicing:
    """Group trials by the number of recordings of their model, (trials,).

    >>> model_slicing(np.array([1, 4, 3])).groups.tolist()
    [0, 1, 1]
    """
    ranges = np.searchsorted(list(MODEL_SIZES), counts, side="right") - 1
    present, groups = np.unique(ranges, return_inverse=True)
    labels = list(MODEL_SIZES.values())
    return Slicing("recordings of the model", [labels[number] for number in present], groups)


def column_slicings(column: str, values: Sequence[str], trials: TrialList) -> list[Slicing]:
    """Slicings by a column of utterance metadata (empty values are unknown).

    Words give two slicings: the same or different words on the two sides, and each word that both
    sides share. At least six distinct numbers give one, by thirds of the smaller side. A column of
    names, or with a single value, gives none.
    """
    # Numbers may be measurements (age) or names (microphone 3), so a few different ones are treated
    # as words.
    different = sorted(set(values) - {""})
    numbers = _as_numbers(values) if len(different) >= MIN_NUMBERS else None
    if numbers is not None:
        # Thirds of the trials, not of the utterances; edges coincide if many values are equal.
        edges = np.unique(np.quantile(worse_side(numbers, trials), [1 / 3, 2 / 3])).tolist()
        by = f"{column}, smaller of the two sides"
        return [value_slicing(by, numbers, trials, edges, "")]
    if not 2 <= len(different) <= MAX_VALUES:
        return []
    # Two slicings show whether it is harder if the sides differ (two devices), and for which word
    # it is hardest (one device).
    codes = np.array([different.index(value) if value else -1 for value in values], dtype=np.int64)
    enrol = codes[trials.enrol]
    test = codes[trials.test]
    # Trials with an unknown value are in no group.
    is_known = (enrol >= 0) & (test >= 0)
    same = np.where(is_known, enrol != test, -1)
    shared = np.where(is_known & (enrol == test), enrol, -1)
    sides = [f"same {column}", f"different {column}"]
    words = [f"{column} {value}" for value in different]
    return [
        Slicing(f"same or different {column}", sides, same, shares_targets=True),
        Slicing(f"{column} of both sides", words, shared),
    ]


def read_metadata(path: str | Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Column -> value of each named utterance, from a CSV with column `path`; ValueError if
    utterances are missing.
    """
    columns, rows = read_rows(path, (), names)
    metadata = {}
    for column in columns:
        if column not in NOT_COLUMNS:
            metadata[column] = [row[column].strip() for row in rows]
    return metadata


def _columns_of(trials: TrialList, metadata: str) -> dict[str, list[str]]:
    """Column -> value of each name; a model has a value if all its recordings have it."""
    columns = read_metadata(metadata, list(trials.recordings)) if metadata else {}
    if trials.models is None:
        return columns
    of_names = np.split(trials.models.rows, trials.models.starts[1:])
    for column, values in columns.items():
        # A model recorded with two devices belongs to neither group.
        shared = []
        for rows in of_names:
            different = {values[row] for row in rows}
            shared.append(different.pop() if len(different) == 1 else "")
        columns[column] = shared
    return columns


def slice_results(
    slicing: Slicing,
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    points: Mapping[str, OperatingPoint],
    num_draws: int,
    seed: int,
) -> SliceResult:
    """Evaluate every group of labelled trials like a separate list."""
    assert trials.labels is not None, "only labelled trials are sliced"
    is_target = trials.labels == 1
    rows = []
    notes = [slicing.note] if slicing.note else []
    for group, label in enumerate(slicing.labels):
        chosen = slicing.groups == group
        # Both sides of a target have the same gender, so "different gender" has no targets and no
        # error rate by itself.
        if slicing.shares_targets and chosen.any() and not (chosen & is_target).any():
            chosen = chosen | is_target
            notes.append(
                f"{label}: no target is in this group, so it uses all targets of the list."
            )
        labels = is_target[chosen]
        num_trials = len(labels)
        num_targets = int(np.count_nonzero(labels))
        # A group without an error rate keeps its row, to show that the list lacks such trials.
        if missing := missing_kind(labels):
            note = f"no {missing}s"
            row = GroupResult(label, note=note, num_trials=num_trials, num_targets=num_targets)
        else:
            sides = speakers.ids[trials.enrol[chosen]], speakers.ids[trials.test[chosen]]
            prepared = SpeakerBootstrap(scores[chosen], labels, *sides, points)
            row = group_result(label, prepared, num_targets, num_draws, seed)
        rows.append(row)
    return SliceResult(slicing.by, " ".join(notes), rows)


def _as_numbers(values: Sequence[str]) -> np.ndarray | None:
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None
