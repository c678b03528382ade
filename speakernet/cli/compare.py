"""Compare systems on one trial list: which is better, and whether the list is long enough to say so.

    speakernet compare exps/a exps/b exps/c
    speakernet compare a/scores.txt b/scores.txt --trials trials.txt

Each is compared with the first under the same draws of speakers; a difference is significant if its 95 % interval does
not include zero. Score files of other tools can be compared too: `enrol test score` a line, in any order. Without
--trials the labels are those that a folder keeps, or the fourth column of a score file (target or nontarget).
"""

import argparse
import sys
from pathlib import Path

from speakernet.data.lists import read_trials
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, compare_scores, short_names
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import headline
from speakernet.evaluation.run_data import chosen_on_reported, list_in_common
from speakernet.evaluation.score_files import find_scores
from speakernet.evaluation.speakers import read_speaker_table, speakers_of
from speakernet.options import default_of

DIGITS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The systems, their list, and how to draw."""
    draws, priors = default_of(EvaluationOptions, "bootstrap_samples"), list(ALWAYS_SHOWN_PRIORS)
    parser.add_argument("scores", type=Path, nargs="+", help="score files, or folders of runs or evaluations")
    parser.add_argument("--trials", type=Path, help="labelled trial list of all systems; default: the one they keep")
    parser.add_argument("--speaker_table", type=Path, help="CSV with path and speaker, if names do not show speakers")
    parser.add_argument("--priors", type=float, nargs="+", default=priors, help="target priors of the minDCFs")
    parser.add_argument("--draws", type=int, default=draws, help="draws of speakers")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")


def run(arguments: argparse.Namespace) -> int:
    """Read, compare, and print a table and a sentence for each figure."""
    if len(arguments.scores) < 2:
        raise ValueError(f"{arguments.scores[0]}: one system; expected two or more to compare")
    if not all(0 < prior < 1 for prior in arguments.priors):
        raise ValueError(f"--priors {arguments.priors}: expected probabilities between 0 and 1")
    if arguments.draws < 1:
        raise ValueError(f"--draws {arguments.draws}: expected at least 1")
    trials = read_trials(arguments.trials) if arguments.trials else list_in_common(arguments.scores)
    paths, systems = zip(*(find_scores(path, trials) for path in arguments.scores), strict=True)
    speakers = speakers_of(trials, read_speaker_table(arguments.speaker_table) if arguments.speaker_table else None)
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
    lines += ["", *result.sentences(letters)]
    lines += [
        f"{letter}: {found}" for letter, path in zip(letters, paths, strict=True) if (found := chosen_on_reported(path))
    ]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0
