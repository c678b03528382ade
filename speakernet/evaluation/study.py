"""A study's plan, the records of its runs, and its table: the mean of each variant over its seeds,
and its difference from the reference over seeds and over speakers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import MinLen

from speakernet.data.lists import TrialList
from speakernet.evaluation.figures import compare_scores
from speakernet.evaluation.files import metrics_of_stages, read_results, seconds_of_steps
from speakernet.evaluation.report.page import Table
from speakernet.evaluation.results import Interval
from speakernet.evaluation.score_files import scores_for
from speakernet.evaluation.speakers import Speakers
from speakernet.evaluation.systems import find_scores
from speakernet.files import read_yaml_file
from speakernet.options import CountOrZero, OptionError, Options
from speakernet.run_folder import RESULTS

RECORDS = "results.jsonl"
RUNS = "runs"
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


class Plan(Options):
    """The variants to compare, as a YAML file."""

    recipe: Annotated[str, MinLen(1)]
    """Configuration file or packaged recipe of all variants."""
    seeds: Annotated[list[CountOrZero], MinLen(1)]
    """Seeds of every variant."""
    reference: str
    """The variant that the others are compared with."""
    variants: dict[str, dict[str, Any] | None]
    """Name -> section -> option -> value, besides `common`."""
    common: dict[str, Any] | None = None
    """Section -> option -> value, for all runs."""
    held_out_speakers: CountOrZero = 0
    """Speakers of the training list who are not trained on; the trials are among them; 0: the
    trials are data.test_list."""

    def changes(self, variant: str) -> dict[str, Any]:
        """The options of a variant without the common ones."""
        return self.variants[variant] or {}

    def settings(self, variant: str) -> dict[str, Any]:
        """All options of a variant."""
        settings = dict(self.common or {})
        for name, value in self.changes(variant).items():
            if isinstance(value, Mapping):
                value = {**(settings.get(name) or {}), **value}
            settings[name] = value
        return settings

    def is_only_scored(self, variant: str) -> bool:
        """Whether a variant scores the reference's models instead of training."""
        names = {name.partition(".")[0] for name in self.changes(variant)}
        return variant != self.reference and names == {"evaluation"}


def read_plan(path: Path) -> Plan:
    """The plan in a file; ValueError if there is no such file or it is not a plan."""
    values = read_yaml_file(path, "the plan of a study")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected the keys {', '.join(Plan.model_fields)}")
    try:
        plan = Plan(**values)
    except OptionError as error:
        raise ValueError(f"{path}: {error.field} {error.found}") from error
    if plan.reference not in plan.variants:
        raise ValueError(
            f"{path}: reference: {plan.reference}; expected one of {', '.join(plan.variants)}"
        )
    if len(set(map(name_of_files, plan.variants))) < len(plan.variants):
        raise ValueError(f"{path}: the names of variants must differ in letters or digits")
    return plan


class Run(NamedTuple):
    """A variant with a seed."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder, relative to the study's."""
        return Path(RUNS, name_of_files(self.variant), f"seed_{self.seed}")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The results in the folder of a study, in the order in which the runs ended."""
    path = folder / RECORDS
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def record_of(plan: Plan, run: Run, folder: Path, trials: TrialList) -> dict[str, Any]:
    """The results of a run that has ended, in the folder of its study."""
    # Found by their trials, because a run with several lists has several score files.
    scores = find_scores(folder / run.folder, trials)[0]
    results = read_results(scores.with_name(RESULTS))
    seconds = None
    if not plan.is_only_scored(run.variant):
        # Steps alone: evaluations and interruptions are not part of the cost of a variant.
        seconds = round(seconds_of_steps(metrics_of_stages(folder / run.folder)), 1)
    return {
        "variant": run.variant,
        "seed": run.seed,
        "recipe": plan.recipe,
        "settings": plan.settings(run.variant),
        "eer_percent": results.eer_percent,
        "min_dcf": results.min_dcf,
        "training_seconds": seconds,
        "scores": scores.relative_to(folder).as_posix(),
        "date": results.date,
    }


def study_table(
    folder: Path,
    names: Sequence[str],
    reference: str,
    trials: TrialList,
    speakers: Speakers,
) -> Table:
    """A row for each variant with results; differences are over the seeds that it shares with the
    reference.

    Args:
        folder: the folder of the study.
        names: the variants, in the order of the rows.
        reference: the variant that the others are compared with.
        trials: the labelled trials that all of them scored.
        speakers: the speakers of the trials.
    """
    # A study may still be running, or some of its seeds may have failed, so the table shows what is
    # there. If a variant has two results of one seed, the later one counts.
    by_variant: dict[str, dict[int, Record]] = {name: {} for name in (*names, reference)}
    for record in read_records(folder):
        if record["variant"] in by_variant:
            by_variant[record["variant"]][record["seed"]] = record
    scores: dict[str, dict[int, np.ndarray]] = {}
    for name, runs in by_variant.items():
        scores[name] = {
            seed: scores_for(trials, folder / run["scores"]) for seed, run in runs.items()
        }
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
    systems = []
    for scores in (reference, variant):
        systems.append(np.array([scores[seed] for seed in seeds]))
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


def name_of_files(variant: str) -> str:
    """A variant's name in file names.

    >>> name_of_files("speeds 3, half real")
    'speeds_3_half_real'
    """
    letters = (letter if letter.isalnum() or letter in "-." else " " for letter in variant)
    return "_".join("".join(letters).split())
