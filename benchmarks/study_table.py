"""The table of a study: results of each variant, and its difference from the reference over seeds
and speakers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from speakernet.data.lists import TrialList, read_trials
from speakernet.evaluation.figures import (
    LEVEL_PERCENT,
    Difference,
    SpeakerBootstrap,
    mean_differences,
)
from speakernet.evaluation.files import scores_for
from speakernet.evaluation.results import Interval
from speakernet.evaluation.speakers import speakers_of

NUM_DRAWS = 1000
DRAW_SEED = 10
HEAD = (
    "variant",
    "seeds",
    "EER %, mean (lowest to highest)",
    "minus the reference, over seeds (95 % interval)",
    "the same, over speakers",
    "relative",
    "minDCF 0.01 / 0.05",
    "training, minutes",
)
Record = Mapping[str, Any]


def table(
    records: Sequence[Record],
    reference: str,
    names: Sequence[str],
    scores_of: Callable[[Record], Path],
    trials: Path | None,
) -> str:
    """A Markdown table with a row for each variant; differences are over the seeds shared with the
    reference.

    Args:
        records: results of the runs.
        reference: name of the variant that the others are compared with.
        names: the variants, in the order of the rows.
        scores_of: gives the score file of a record.
        trials: the trials that all of them scored; None if nothing was scored yet.
    """
    found = {(one["variant"], one["seed"]): one for one in records}
    by_name = {
        name: {seed: one for (of, seed), one in found.items() if of == name} for name in names
    }
    if trials is None or not by_name.get(reference):
        return "nothing to compare yet: the reference has not been trained\n"
    systems = _Systems(read_trials(trials), scores_of)
    lines = [_row(HEAD), _row(["---"] * len(HEAD))]
    for name in names:
        own = by_name[name]
        if not own:
            continue
        cells = [
            name,
            ", ".join(map(str, sorted(own))),
            _mean_and_range([one["eer_percent"] for one in own.values()]),
        ]
        cells += ["", "", ""] if name == reference else _compared(by_name[reference], own, systems)
        costs = [
            np.mean([one["min_dcf"][prior] for one in own.values()]) for prior in ("0.01", "0.05")
        ]
        minutes = [
            one["training_seconds"] / 60
            for one in own.values()
            if one["training_seconds"] is not None
        ]
        cells += [
            " / ".join(f"{cost:.3f}" for cost in costs),
            f"{np.mean(minutes):.1f}" if minutes else "",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def over_seeds(differences: Sequence[float]) -> tuple[float, Interval]:
    """Mean and 95 % interval (Student's t) of paired differences, one per seed; no interval for a
    single seed.

    >>> mean, interval = over_seeds([-1.0, -2.0, -3.0])
    >>> mean, [round(one, 2) for one in interval]
    (-2.0, [-4.48, 0.48])
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    reach = (
        stats.t.ppf((1 + LEVEL_PERCENT / 100) / 2, len(values) - 1)
        * values.std(ddof=1)
        / np.sqrt(len(values))
    )
    return float(values.mean()), (float(values.mean() - reach), float(values.mean() + reach))


class _Systems:
    """Score files prepared for drawing speakers; each is read only once."""

    def __init__(self, trials: TrialList, scores_of: Callable[[Record], Path]) -> None:
        self._trials = trials
        self._scores_of = scores_of
        speakers = speakers_of(trials)
        self._sides = speakers.ids[trials.enrol], speakers.ids[trials.test]
        self._kept: dict[Path, SpeakerBootstrap] = {}

    def of(self, record: Record) -> SpeakerBootstrap:
        path = self._scores_of(record)
        if path not in self._kept:
            scores = scores_for(self._trials, path)
            assert self._trials.labels is not None, (
                "the records have error rates, so the trials have labels"
            )
            self._kept[path] = SpeakerBootstrap(scores, self._trials.labels, *self._sides, {})
        return self._kept[path]


def _compared(
    reference: Mapping[int, Record], own: Mapping[int, Record], systems: _Systems
) -> list[str]:
    """Three cells: the paired difference over seeds, over speakers, and relative to the
    reference.
    """
    seeds = sorted(set(reference) & set(own))
    if not seeds:
        return ["no seed in common", "", ""]
    mean, interval = over_seeds(
        [own[seed]["eer_percent"] - reference[seed]["eer_percent"] for seed in seeds]
    )
    pooled: Difference = mean_differences(
        [systems.of(reference[seed]) for seed in seeds],
        [systems.of(own[seed]) for seed in seeds],
        NUM_DRAWS,
        DRAW_SEED,
    )[0]
    before = float(np.mean([reference[seed]["eer_percent"] for seed in seeds]))
    relative = f"{100 * mean / before:+.0f} %" if before else ""
    return [_with_interval(mean, interval), _with_interval(pooled.value, pooled.interval), relative]


def _with_interval(value: float, interval: Interval) -> str:
    return f"{value:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")


def _mean_and_range(values: Sequence[float]) -> str:
    text = f"{np.mean(values):.2f}"
    return text if len(values) < 2 else f"{text} ({min(values):.2f} to {max(values):.2f})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
