"""The table of a study: the mean of each variant over its seeds, and its difference from the
reference over seeds and over speakers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.figures import compare_scores
from speakernet.evaluation.files import scores_for
from speakernet.evaluation.report.page import Table
from speakernet.evaluation.results import Interval
from speakernet.evaluation.speakers import Speakers

NUM_DRAWS = 1000
DRAW_SEED = 10
HEADER = (
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


def study_table(
    records: Sequence[Record],
    names: Sequence[str],
    reference: str,
    scores_of: Callable[[Record], Path],
    trials: TrialList,
    speakers: Speakers,
) -> Table:
    """A row for each variant with results; differences are over the seeds that it shares with the
    reference.

    Args:
        records: the results of each run.
        names: the variants, in the order of the rows.
        reference: the variant that the others are compared with.
        scores_of: gives the score file of a record.
        trials: the labelled trials that all of them scored.
        speakers: the speakers of the trials.
    """
    # A study may still be running, or some of its seeds may have failed, so the table shows what is
    # there. If a variant has two results of one seed, the later one counts.
    by_variant: dict[str, dict[int, Record]] = {name: {} for name in (*names, reference)}
    for record in records:
        if record["variant"] in by_variant:
            by_variant[record["variant"]][record["seed"]] = record
    scores: dict[str, dict[int, np.ndarray]] = {}
    for name, runs in by_variant.items():
        scores[name] = {seed: scores_for(trials, scores_of(run)) for seed, run in runs.items()}
    rows = []
    for name in filter(by_variant.get, names):
        runs = by_variant[name]
        # The reference has no difference from itself.
        differences = ["", "", ""]
        if name != reference:
            differences = _differences(scores[reference], scores[name], trials, speakers)
        eers = [run["eer_percent"] for run in runs.values()]
        eer = f"{np.mean(eers):.2f}"
        if len(eers) > 1:
            eer += f" ({min(eers):.2f} to {max(eers):.2f})"
        costs = []
        for prior in ("0.01", "0.05"):
            costs.append(f"{np.mean([run['min_dcf'][prior] for run in runs.values()]):.3f}")
        # Variants that are only scored have no training time.
        seconds = [run["training_seconds"] for run in runs.values() if run["training_seconds"]]
        rows.append(
            [
                name,
                ", ".join(map(str, sorted(runs))),
                eer,
                *differences,
                " / ".join(costs),
                f"{np.mean(seconds) / 60:.1f}" if seconds else "",
            ]
        )
    return Table(HEADER, rows)


def markdown(table: Table) -> str:
    r"""A table in Markdown.

    >>> markdown(Table(("variant", "EER"), [["base", "5.2"]]))
    '| variant | EER |\n| --- | --- |\n| base | 5.2 |\n'
    """
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _differences(
    reference: Mapping[int, np.ndarray],
    variant: Mapping[int, np.ndarray],
    trials: TrialList,
    speakers: Speakers,
) -> list[str]:
    """Three cells: the difference with its interval over seeds, over speakers, and relative to the
    reference.
    """
    # Paired by seed, because what a seed changes in both variants (such as the order of the data)
    # cancels in the difference.
    seeds = sorted(set(reference) & set(variant))
    if not seeds:
        return ["no seed in common", "", ""]
    systems = [np.array([scores[seed] for seed in seeds]) for scores in (reference, variant)]
    compared = compare_scores(
        trials,
        systems,
        speakers,
        num_draws=NUM_DRAWS,
        seed=DRAW_SEED,
        # The table shows differences of the EER alone, so minDCFs need not be drawn.
        priors=(),
        is_paired=True,
    )
    difference = compared.differences[0][0]
    before = compared.systems[0].eer_percent
    return [
        _with_interval(difference.value, difference.seeds_interval),
        _with_interval(difference.value, difference.interval),
        # Relative to an EER of 0 there is no difference.
        f"{100 * difference.value / before:+.0f} %" if before else "",
    ]


def _with_interval(value: float, interval: Interval) -> str:
    return f"{value:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")
