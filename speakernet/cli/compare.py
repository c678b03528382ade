"""Compare systems on a trial list: which is better, and whether the list is long enough to tell.

    speakernet compare exps/a exps/b exps/c
    speakernet compare a/scores.txt b/scores.txt --trials trials.txt

Each system is compared with the first on the same bootstrap draws of speakers; a difference is
significant if its 95 % interval excludes zero. The interval says what other speakers would change,
not what another seed of the training would. Score files of other tools work too: `enrol test score`
per line, in any order. Without --trials, labels come from a folder or the fourth column of a score
file (target or nontarget).
"""

import argparse
from pathlib import Path

from speakernet.data.lists import read_trials
from speakernet.evaluation.figures import (
    ALWAYS_SHOWN_PRIORS,
    MIN_DRAWS,
    compare_scores,
    short_names,
)
from speakernet.evaluation.files import (
    chosen_on_reported,
    common_costs,
    configuration_of,
    find_scores,
    is_other_seed,
    list_in_common,
    read_results,
)
from speakernet.evaluation.options import UNIT_COST, EvaluationOptions
from speakernet.evaluation.results import headline
from speakernet.evaluation.speakers import speakers_of
from speakernet.options import default_of
from speakernet.run_folder import RESULTS

DIGITS = 3


ARGUMENTS = {
    "scores": {
        "type": Path,
        "nargs": "+",
        "help": "score files, or folders of runs or evaluations",
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


def run(arguments: argparse.Namespace) -> list[str]:
    """Read and compare; return a table, and a sentence for each figure."""
    if len(arguments.scores) < 2:
        raise ValueError(
            f"{arguments.scores[0]} is the only system; expected two or more to compare"
        )
    if not all(0 < prior < 1 for prior in arguments.priors):
        raise ValueError(f"--priors {arguments.priors}: expected probabilities between 0 and 1")
    if arguments.draws < MIN_DRAWS:
        raise ValueError(
            f"--draws {arguments.draws}: expected at least {MIN_DRAWS}; fewer give no interval"
        )
    for path in arguments.scores:
        if not path.exists():
            raise ValueError(
                f"{path}: there is no such file or folder; give a score file or the folder of a run"
            )
    if len({path.resolve() for path in arguments.scores}) < len(arguments.scores):
        raise ValueError(
            f"a system was given twice: {', '.join(map(str, arguments.scores))}; name each one once"
        )
    trials = read_trials(arguments.trials) if arguments.trials else list_in_common(arguments.scores)
    paths, systems = zip(*(find_scores(path, trials) for path in arguments.scores), strict=True)
    speakers = speakers_of(trials, arguments.speaker_table)
    costs = common_costs(read_results(path.with_name(RESULTS)) for path in paths)
    result = compare_scores(
        trials,
        systems,
        speakers,
        num_draws=arguments.draws,
        seed=arguments.seed,
        options=EvaluationOptions().model_copy(update=costs),
        priors=arguments.priors,
    )
    first, *further = map(configuration_of, paths)
    result = result.with_one_system([is_other_seed(first, other) for other in further])
    letters = [chr(ord("A") + number) for number in range(len(paths))]
    names = short_names([str(path) for path in paths])
    lines = []
    for letter, name, path in zip(letters, names, paths, strict=True):
        lines.append(f"{letter} = {name} ({path})")
    origin = f"{speakers.count:,} speakers, taken from the {speakers.rule}"
    lines.append(f"{len(trials):,} trials of {trials.source}; {origin}")
    if set(costs.values()) - {UNIT_COST}:
        miss_and_accept = f"{costs['c_miss']:g} of a miss, {costs['c_fa']:g} of a false accept"
        lines.append(f"costs, as in their results: {miss_and_accept}")
    lines += ["", f"{'':<16}" + "".join(f"{letter:>10}" for letter in letters)]
    columns = [headline(system, DIGITS) for system in result.systems]
    for row in zip(*columns, strict=True):
        lines.append(f"{row[0].label:<16}" + "".join(f"{figure.number:>10}" for figure in row))
    lines += ["", *result.sentences(letters)]
    lines.append("Intervals are over speakers: another seed can change the figures as much.")
    for letter, path in zip(letters, paths, strict=True):
        caveat = chosen_on_reported(path)
        if caveat:
            lines.append(f"{letter}: {caveat}")
    return lines
