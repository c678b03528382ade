"""Compare systems on one trial list: which is better, and whether the list is long enough to say so.

    speakernet compare exps/a exps/b exps/c
    speakernet compare a/scores.txt b/scores.txt --trials trials.txt

Each is compared with the first under the same draws of speakers; a difference is significant if its 95 % interval does
not include zero. Score files of other tools can be compared too: `enrol test score` a line, in any order. Without
--trials the labels are those that a folder keeps, or the fourth column of a score file (target or nontarget).
"""

import argparse
from pathlib import Path

from speakernet.data.lists import read_trials
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, compare_scores, short_names
from speakernet.evaluation.files import chosen_on_reported, find_scores, list_in_common
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import headline
from speakernet.evaluation.speakers import speakers_of
from speakernet.options import default_of

DIGITS = 3


ARGUMENTS = {
    "scores": {"type": Path, "nargs": "+", "help": "score files, or folders of runs or evaluations"},
    "--trials": {"type": Path, "help": "labelled trial list of all systems; default: the one they keep"},
    "--speaker_table": {"type": Path, "help": "CSV with path and speaker, if names do not show speakers"},
    "--priors": {
        "type": float,
        "nargs": "+",
        "default": list(ALWAYS_SHOWN_PRIORS),
        "help": "target priors of the minDCFs",
    },
    "--draws": {
        "type": int,
        "default": default_of(EvaluationOptions, "bootstrap_samples"),
        "help": "draws of speakers",
    },
    "--seed": {"type": int, "default": 0, "help": "of the draws"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Read and compare: a table, and a sentence for each figure."""
    if len(arguments.scores) < 2:
        raise ValueError(f"{arguments.scores[0]}: one system; expected two or more to compare")
    if not all(0 < prior < 1 for prior in arguments.priors):
        raise ValueError(f"--priors {arguments.priors}: expected probabilities between 0 and 1")
    if arguments.draws < 1:
        raise ValueError(f"--draws {arguments.draws}: expected at least 1")
    trials = read_trials(arguments.trials) if arguments.trials else list_in_common(arguments.scores)
    paths, systems = zip(*(find_scores(path, trials) for path in arguments.scores), strict=True)
    speakers = speakers_of(trials, arguments.speaker_table)
    result = compare_scores(
        trials, systems, speakers, num_draws=arguments.draws, seed=arguments.seed, priors=arguments.priors
    )
    letters = [chr(ord("A") + number) for number in range(len(paths))]
    names = short_names([str(path) for path in paths])
    lines = [f"{letter} = {name} ({path})" for letter, name, path in zip(letters, names, paths, strict=True)]
    lines += [f"{len(trials):,} trials of {trials.source}; speakers: {speakers.rule}", ""]
    lines.append(f"{'':<16}" + "".join(f"{letter:>10}" for letter in letters))
    for row in zip(*(headline(one, DIGITS) for one in result.systems), strict=True):
        lines.append(f"{row[0].label:<16}" + "".join(f"{figure.number:>10}" for figure in row))
    chosen = [(letter, chosen_on_reported(path)) for letter, path in zip(letters, paths, strict=True)]
    return [*lines, "", *result.sentences(letters), *(f"{letter}: {found}" for letter, found in chosen if found)]
