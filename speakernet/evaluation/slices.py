"""Results by kind of trial: duration, signal-to-noise ratio, same or different in any column of a CSV.

A slicing gives every trial a group; each group is evaluated as if it were a list of its own, with an interval over
speakers. `all_slices` is the whole way, from what the configuration names to results.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.bootstrap import SpeakerBootstrap, measure
from speakernet.evaluation.calibration import smaller_side
from speakernet.evaluation.csv_tables import read_csv
from speakernet.evaluation.embedding import checked_lengths
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, operating_points
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.quality import signal_to_noise_ratios
from speakernet.evaluation.results import GroupResult, SliceResult
from speakernet.evaluation.speakers import Speakers
from speakernet.options import suggestion
from speakernet.terminal import MAX_NAMED

DURATION_EDGES_SECONDS = (2.0, 4.0, 6.0, 10.0)
SNR_EDGES_DB = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
MAX_VALUES = 12
"""A column of text with more different values is a name, not a group."""
MIN_NUMBERS = 6
"""A column with at least so many different numbers is a quantity and is cut into thirds."""
MIN_TARGETS = 10
NOT_COLUMNS = ("path", "speaker")


@dataclass(frozen=True)
class Slicing:
    """One way of grouping trials.

    Attributes:
        by: what the groups are told apart by.
        labels: name of each group.
        groups: group of each trial, -1 for none, int64 (trials,).
        note: what a reader has to know.
        shares_targets: groups without targets borrow all targets of the list (`same_or_different` of what a speaker
            never changes).
    """

    by: str
    labels: list[str]
    groups: np.ndarray
    note: str = ""
    shares_targets: bool = False


def all_slices(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    source: AudioSource,
    options: EvaluationOptions,
    *,
    num_threads: int,
    num_draws: int,
    seed: int,
) -> list[SliceResult]:
    """Results of a labelled list by everything that was asked for.

    Args:
        trials: labelled.
        scores: (trials,).
        speakers: of the list's utterances.
        source: the audio, for durations (from headers) and signal-to-noise ratios (every file is read).
        options: what to slice by.
        num_threads: that read audio.
        num_draws: draws of speakers for the intervals.
        seed: of the draws.

    Raises:
        ValueError: a name that is no column, a column that cannot be sliced by, utterances that the CSV lacks.
    """
    columns = read_metadata(options.metadata, list(trials.names)) if options.metadata else {}
    names = options.slices or ["duration", *usable_columns(columns)]
    slicings: list[Slicing] = []
    for name in dict.fromkeys(names):
        if name in columns:
            slicings += column_slicings(name, columns[name], trials)
        elif name == "duration":
            seconds = checked_lengths(source, trials.names, num_threads) / source.sample_rate
            slicings.append(duration_slicing(seconds, trials))
        elif name == "snr":
            slicings.append(snr_slicing(signal_to_noise_ratios(source, trials.names, num_threads), trials))
        else:
            known = ["duration", "snr", *columns]
            raise ValueError(f"slices: {name!r} is none of {', '.join(known)}; {suggestion(name, known)}")
    return [slice_results(slicing, trials, scores, speakers, num_draws, seed) for slicing in slicings]


def value_slicing(
    by: str, values: np.ndarray, trials: TrialList, edges: Sequence[float], unit: str, note: str = ""
) -> Slicing:
    """Groups by the smaller value of the two sides, between edges; groups without trials are left out.

    Args:
        by: name of the value.
        values: of each utterance, (utterances,).
        trials: the list.
        edges: ascending; a value equal to an edge belongs above it.
        unit: behind the numbers.
        note: for the reader.
    """
    # A trial is as hard as its worse side.
    found = np.searchsorted(np.asarray(edges), smaller_side(values, trials.enrol, trials.test), side="right")
    names = [f"under {edges[0]:g}{unit}"]
    names += [f"{low:g} to {high:g}{unit}" for low, high in itertools.pairwise(edges)]
    names.append(f"{edges[-1]:g}{unit} and more")
    present, groups = np.unique(found, return_inverse=True)
    return Slicing(by, [names[one] for one in present], groups, note)


def duration_slicing(seconds: np.ndarray, trials: TrialList) -> Slicing:
    """By the duration of the shorter side."""
    return value_slicing("duration of the shorter side", seconds, trials, DURATION_EDGES_SECONDS, " s")


def snr_slicing(snr_db: np.ndarray, trials: TrialList) -> Slicing:
    """By the estimated signal-to-noise ratio of the noisier side."""
    note = "The ratio is estimated from each utterance's loud and quiet frames."
    return value_slicing("signal-to-noise ratio of the noisier side", snr_db, trials, SNR_EDGES_DB, " dB", note)


def column_slicings(column: str, values: Sequence[str], trials: TrialList) -> list[Slicing]:
    """Slicings by a column of utterance metadata.

    Words: same or different on the two sides, and each value where both sides have it. Numbers with many values: thirds
    of the smaller side.

    Args:
        column: its name.
        values: of each utterance, empty where unknown.
        trials: the list.

    Raises:
        ValueError: words with too many different values, or one value only.
    """
    different = sorted(set(values) - {""})
    numbers = _as_numbers(values)
    if numbers is not None and len(different) >= MIN_NUMBERS:
        # Thirds of the trials, not of the utterances; equal edges fall together where many values are the same.
        edges = np.unique(np.quantile(smaller_side(numbers, trials.enrol, trials.test), [1 / 3, 2 / 3]))
        return [value_slicing(f"{column}, smaller of the two sides", numbers, trials, edges.tolist(), "")]
    if not 2 <= len(different) <= MAX_VALUES:
        raise ValueError(
            f"column {column!r} has {len(different)} different values in this list; slicing takes 2 to {MAX_VALUES} "
            f"words, or at least {MIN_NUMBERS} different numbers"
        )
    codes = np.array([different.index(value) if value else -1 for value in values], dtype=np.int64)
    enrol, test = codes[trials.enrol], codes[trials.test]
    # An empty cell is unknown, not a value of its own: such trials are in no group.
    is_known = (enrol >= 0) & (test >= 0)
    same = np.where(is_known, (enrol != test).astype(np.int64), -1)
    both = np.where(is_known & (enrol == test), enrol, -1)
    return [
        Slicing(f"same or different {column}", [f"same {column}", f"different {column}"], same, shares_targets=True),
        Slicing(f"{column} of both sides", [f"{column} {value}" for value in different], both),
    ]


def usable_columns(metadata: Mapping[str, Sequence[str]]) -> list[str]:
    """Columns that can be sliced by: words with 2 to 12 values, or numbers."""
    usable = []
    for column, values in metadata.items():
        count = len(set(values) - {""})
        is_quantity = count >= MIN_NUMBERS and _as_numbers(values) is not None
        if 2 <= count <= MAX_VALUES or is_quantity:
            usable.append(column)
    return usable


def read_metadata(path: str | Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Column -> value of each named utterance, of a CSV with a column `path`; `speaker` is left out.

    Raises:
        ValueError: no column `path`, or utterances that it lacks (the first ten, and how many).
    """
    columns, found = read_csv(path, ("path",))
    rows = {row["path"]: row for row in found}
    unknown = [name for name in names if name not in rows]
    if unknown:
        shown = ", ".join(unknown[:MAX_NAMED])
        raise ValueError(f"{path}: lacks {len(unknown)} of the list's {len(names)} utterances: {shown}")
    kept = [column for column in columns if column not in NOT_COLUMNS]
    return {column: [rows[name][column].strip() for name in names] for column in kept}


def slice_results(
    slicing: Slicing, trials: TrialList, scores: np.ndarray, speakers: Speakers, num_draws: int, seed: int
) -> SliceResult:
    """Evaluate every group as a list of its own.

    Args:
        slicing: of these trials.
        trials: labelled.
        scores: (trials,).
        speakers: of the list's utterances.
        num_draws: draws of speakers for the intervals.
        seed: of the draws.
    """
    assert trials.labels is not None
    is_target = trials.labels == 1
    rows, notes = [], [slicing.note] if slicing.note else []
    for group, label in enumerate(slicing.labels):
        chosen = slicing.groups == group
        # Two sides of one speaker never differ in gender: without borrowed targets there would be no error rate.
        if slicing.shares_targets and not (chosen & is_target).any() and (chosen & ~is_target).any():
            chosen = chosen | is_target
            notes.append(f"{label}: no targets of its own (a speaker never changes it), so all targets are taken.")
        rows.append(_evaluated(label, chosen, trials, scores, speakers, num_draws, seed))
    return SliceResult(slicing.by, " ".join(notes), rows)


def _evaluated(
    label: str,
    chosen: np.ndarray,
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    num_draws: int,
    seed: int,
) -> GroupResult:
    assert trials.labels is not None
    is_target = trials.labels[chosen] == 1
    num_trials, num_targets = len(is_target), int(np.count_nonzero(is_target))
    if num_targets in (0, num_trials):
        note = "no targets" if num_targets == 0 else "no non-targets"
        return GroupResult(label, note=note, num_trials=num_trials, num_targets=num_targets)
    enrol, test = speakers.ids[trials.enrol[chosen]], speakers.ids[trials.test[chosen]]
    points = operating_points(ALWAYS_SHOWN_PRIORS)
    prepared = SpeakerBootstrap(scores[chosen], is_target, enrol, test, list(points.values()))
    found = measure(prepared, num_draws, seed)
    few = f"only {num_targets} targets" if num_targets < MIN_TARGETS else ""
    return GroupResult(
        label,
        found.eer_percent,
        found.eer_interval,
        note="; ".join(part for part in (few, found.note) if part),
        num_trials=num_trials,
        num_targets=num_targets,
        min_dcf=dict(zip(points, found.min_dcf, strict=True)),
    )


def _as_numbers(values: Sequence[str]) -> np.ndarray | None:
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None
