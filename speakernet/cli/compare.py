"""Compare two score files of one trial list: which system is better, and whether the list is large enough to say so.

    speakernet compare exps/a/scores.txt exps/b/scores.txt --trials trials.txt

Both are evaluated under the same draws of speakers; a difference is significant when its 95 % interval leaves out
zero. Score files of other tools may be compared too: `enrol test score` a line, in any order.
"""

import argparse
import sys
from pathlib import Path

from speakernet.data.lists import read_trials
from speakernet.evaluation.comparison import compare_scores, short_names
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS
from speakernet.evaluation.headline import headline
from speakernet.evaluation.options import MeasuringOptions
from speakernet.evaluation.score_files import find_scores
from speakernet.evaluation.speakers import read_speaker_table, speakers_of
from speakernet.options import default_of

DIGITS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two score files, their list, and how to draw."""
    draws, priors = default_of(MeasuringOptions, "bootstrap_samples"), list(ALWAYS_SHOWN_PRIORS)
    parser.add_argument("scores", type=Path, nargs=2, help="score files, or folders of runs or evaluations")
    parser.add_argument("--trials", type=Path, required=True, help="labelled trial list of both")
    parser.add_argument("--speaker_table", type=Path, help="CSV with path and speaker, where names do not tell")
    parser.add_argument("--priors", type=float, nargs="+", default=priors, help="target priors of the minDCFs")
    parser.add_argument("--draws", type=int, default=draws, help="draws of speakers")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")


def run(arguments: argparse.Namespace) -> int:
    """Read, compare, and print a table and a sentence for each figure."""
    if not all(0 < prior < 1 for prior in arguments.priors):
        raise ValueError(f"--priors {arguments.priors}: expected probabilities between 0 and 1")
    if arguments.draws < 1:
        raise ValueError(f"--draws {arguments.draws}: expected at least 1")
    trials = read_trials(arguments.trials)
    # A run that was only scored with --eval keeps its scores under eval/.
    paths, (first, second) = zip(*(find_scores(path, trials) for path in arguments.scores), strict=True)
    speakers = speakers_of(trials, read_speaker_table(arguments.speaker_table) if arguments.speaker_table else None)
    result = compare_scores(
        trials, first, second, speakers, num_draws=arguments.draws, seed=arguments.seed, priors=arguments.priors
    )
    names = short_names([str(path) for path in paths])
    lines = [f"A = {names[0]} ({paths[0]})", f"B = {names[1]} ({paths[1]})"]
    lines += [f"{len(trials):,} trials of {arguments.trials}; speakers: {speakers.rule}", ""]
    lines.append(f"{'':<16}{'A':>10}{'B':>10}")
    for one, other in zip(headline(result.first, DIGITS), headline(result.second, DIGITS), strict=True):
        lines.append(f"{one.label:<16}{one.number:>10}{other.number:>10}")
    sys.stdout.write("\n".join([*lines, "", *result.sentences("A", "B"), ""]))
    return 0
