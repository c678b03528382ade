"""Compare systems on a trial list: which is better, and whether the difference is significant.

    speakernet compare exps/a exps/b exps/c
    speakernet compare a/scores.txt b/scores.txt --trials trials.txt
    speakernet compare --group base=base/1,base/2,base/3 --group wide=wide/1,wide/2,wide/3

Each system is compared with the first on the same bootstrap draws of speakers; a difference is
significant at 5 %, with Holm's correction for more than two systems. A group is a system of several
runs with other seeds; means over its runs are compared, with intervals over speakers and over
seeds, and a difference is significant only over both. Groups precede the other systems. Score files
of other tools work too: `enrol test score` per line, in any order. Without --trials, labels come
from a folder or the fourth column of a score file (target or nontarget).
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speakernet.data.lists import TrialList, read_trials
from speakernet.evaluation.figures import (
    ALWAYS_SHOWN_PRIORS,
    MIN_DRAWS,
    compare_scores,
    short_names,
)
from speakernet.evaluation.files import read_results
from speakernet.evaluation.options import UNIT_COST, EvaluationOptions
from speakernet.evaluation.results import headline
from speakernet.evaluation.speakers import speakers_of
from speakernet.evaluation.systems import (
    chosen_on_reported,
    common_costs,
    configuration_of,
    find_scores,
    is_other_seed,
    list_in_common,
)
from speakernet.options import default_of
from speakernet.run_folder import RESULTS

DIGITS = 3


ARGUMENTS = {
    "scores": {
        "type": Path,
        "nargs": "*",
        "default": [],
        "help": "score files, or folders of runs or evaluations",
    },
    "--group": {
        "action": "append",
        "default": [],
        "metavar": "NAME=RUN,RUN,…",
        "help": "runs of one configuration with other seeds, compared by their mean (repeatable)",
    },
    "--trials": {
        "type": Path,
        "help": "labelled trial list that all systems scored (default: from their folders)",
    },
    "--speaker_table": {
        "type": Path,
        "help": "CSV with path and speaker, if file names do not show the speaker",
    },
    "--priors": {
        "type": float,
        "nargs": "+",
        "default": list(ALWAYS_SHOWN_PRIORS),
        "help": "target priors of the minDCFs",
    },
    "--draws": {
        "type": int,
        "default": default_of(EvaluationOptions, "bootstrap_samples"),
        "help": "bootstrap draws of speakers",
    },
    "--seed": {"type": int, "default": 0, "help": "seed of the draws"},
}


class Run(NamedTuple):
    """The scores of a run."""

    path: Path
    """The score file."""
    scores: np.ndarray
    """(trials,)."""
    configuration: Mapping[str, Any]
    """Empty if unknown."""

    @property
    def seed(self) -> int | None:
        """The seed of the training; None if unknown."""
        return (self.configuration.get("runtime") or {}).get("seed")


class System(NamedTuple):
    """A system to compare: a run, or a group of runs with other seeds."""

    name: str
    """Of a group; else empty."""
    runs: list[Run]


# A list has many trials but few speakers, and trials of one speaker depend on each other, so
# speakers are drawn. All systems get the same draws, and the interval is that of the difference:
# two separate intervals may overlap although the difference is significant. Seeds are a second
# source of chance, which only groups of runs show.
def run(arguments: argparse.Namespace) -> list[str]:
    """Read and compare; return a table, and a sentence for each figure."""
    groups = _read_groups(arguments.group)
    folders = [*itertools.chain(*groups.values()), *arguments.scores]
    _refuse(arguments, len(groups) + len(arguments.scores), folders)
    # Without --trials the list comes from the folders, which have to agree: scores of different
    # lists cannot be paired.
    trials = read_trials(arguments.trials) if arguments.trials else list_in_common(folders)
    systems = [_read_system(name, paths, trials) for name, paths in groups.items()]
    systems += [_read_system("", [path], trials) for path in arguments.scores]
    speakers = speakers_of(trials, arguments.speaker_table)
    paths = [run.path for system in systems for run in system.runs]
    # Runs may have costs of their own. If all agree, they apply here too; otherwise costs of 1 do.
    costs = common_costs(read_results(path.with_name(RESULTS)) for path in paths)
    scores = []
    for system in systems:
        scores.append(np.array([run.scores for run in system.runs]))
    result = compare_scores(
        trials,
        scores,
        speakers,
        num_draws=arguments.draws,
        seed=arguments.seed,
        options=EvaluationOptions().model_copy(update=costs),
        priors=arguments.priors,
        is_paired=_have_same_seeds(systems),
    )
    letters = [chr(ord("A") + number) for number in range(len(systems))]
    # Runs that differ only in their seed are one system, so such a difference is marked.
    first, *others = (system.runs[0].configuration for system in systems)
    same = [
        letter
        for letter, other in zip(letters[1:], others, strict=True)
        if is_other_seed(first, other)
    ]
    lines = _describe(systems, letters, short_names([str(path) for path in paths]))
    origin = f"{speakers.count:,} speakers, taken from the {speakers.rule}"
    lines.append(f"{len(trials):,} trials of {trials.source}; {origin}")
    if set(costs.values()) - {UNIT_COST}:
        miss_and_accept = f"{costs['c_miss']:g} of a miss, {costs['c_fa']:g} of a false accept"
        lines.append(f"costs, as in their results: {miss_and_accept}")
    lines += ["", f"{'':<16}" + "".join(f"{letter:>10}" for letter in letters)]
    columns = [headline(system, DIGITS) for system in result.systems]
    for row in zip(*columns, strict=True):
        lines.append(f"{row[0].label:<16}" + "".join(f"{figure.number:>10}" for figure in row))
    return [*lines, "", *result.sentences(letters, same), *_cautions(systems, letters)]


def _read_groups(words: Sequence[str]) -> dict[str, list[Path]]:
    """The runs of each group by its name."""
    # A group of one run has no spread over seeds and would look as certain as the others.
    groups: dict[str, list[Path]] = {}
    for word in words:
        name, _, runs = word.partition("=")
        paths = [Path(path) for path in runs.split(",") if path]
        if not name or len(paths) < 2 or name in groups:
            raise ValueError(
                f"--group {word}: expected NAME=RUN,RUN,… with a name of its own and at least two "
                "runs; give a single run without --group"
            )
        groups[name] = paths
    return groups


def _refuse(arguments: argparse.Namespace, num_systems: int, folders: Sequence[Path]) -> None:
    """Refuse too few systems, missing or repeated files, and impossible options."""
    if num_systems < 2:
        raise ValueError(
            f"found {num_systems} systems to compare; expected at least two: folders of runs, "
            "score files or groups (--group NAME=RUN,RUN,…)"
        )
    if not all(0 < prior < 1 for prior in arguments.priors):
        raise ValueError(f"--priors {arguments.priors}: expected probabilities between 0 and 1")
    if arguments.draws < MIN_DRAWS:
        raise ValueError(
            f"--draws {arguments.draws}: expected at least {MIN_DRAWS}; fewer give no interval"
        )
    for path in folders:
        if not path.exists():
            raise ValueError(
                f"{path}: there is no such file or folder; give a score file or the folder of a run"
            )
    # A system differs from itself by zero with an interval of zero, which looks like a result.
    if len({path.resolve() for path in folders}) < len(folders):
        raise ValueError(
            f"a system was given twice: {', '.join(map(str, folders))}; name each one once"
        )


def _read_system(name: str, folders: Sequence[Path], trials: TrialList) -> System:
    """Read a system; the runs of a group are in the order of their seeds, if these are known."""
    runs = []
    for folder in folders:
        path, scores = find_scores(folder, trials)
        runs.append(Run(path, scores, configuration_of(path)))
    if all(run.seed is not None for run in runs):
        # Sorted by seed, so that paired runs share initial weights and order of batches, whose
        # effect cancels in the difference.
        runs.sort(key=lambda run: run.seed or 0)
    return System(name, runs)


def _have_same_seeds(systems: Sequence[System]) -> bool:
    """Whether all systems have the same seeds, so that their runs are paired."""
    seeds_of_systems = []
    for system in systems:
        seeds_of_systems.append([run.seed for run in system.runs])
    first, *others = seeds_of_systems
    # A wrong pairing makes intervals too narrow, no pairing only makes them wider. So every seed
    # has to be known and different.
    is_known = None not in first and len(set(first)) == len(first)
    return is_known and all(seeds == first for seeds in others)


def _describe(systems: Sequence[System], letters: Sequence[str], names: Sequence[str]) -> list[str]:
    """A line for each system; `names` are short names of the score files of all."""
    lines = []
    remaining = iter(names)
    for letter, system in zip(letters, systems, strict=True):
        runs = list(itertools.islice(remaining, len(system.runs)))
        if system.name:
            lines.append(f"{letter} = {system.name} (mean of {len(runs)} runs: {', '.join(runs)})")
        else:
            lines.append(f"{letter} = {runs[0]} ({system.runs[0].path})")
    return lines


def _cautions(systems: Sequence[System], letters: Sequence[str]) -> list[str]:
    """What a reader must know before believing the differences."""
    lines = []
    if any(len(system.runs) < 2 for system in systems):
        lines.append("Intervals are over speakers: another seed can change the figures as much.")
    for letter, system in zip(letters, systems, strict=True):
        first, *others = (run.configuration for run in system.runs)
        if first and not all(is_other_seed(first, other) for other in others):
            lines.append(f"{letter}: the runs of {system.name} differ in more than their seed")
    for number, system in enumerate(systems):
        alike = [letters[number]]
        for letter, other in zip(letters[number + 1 :], systems[number + 1 :], strict=True):
            if is_other_seed(system.runs[0].configuration, other.runs[0].configuration):
                alike.append(letter)
        if len(alike) > 1:
            lines.append(
                f"{' and '.join(alike)} are one configuration with other seeds: compare its mean "
                "with that of another (--group NAME=RUN,RUN,…)"
            )
            break
    # A model that was chosen on the reported list has an advantage.
    for letter, system in zip(letters, systems, strict=True):
        caveats = (chosen_on_reported(run.path) for run in system.runs)
        lines += [f"{letter}: {caveat}" for caveat in dict.fromkeys(filter(None, caveats))]
    return lines
