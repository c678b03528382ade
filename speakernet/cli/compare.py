"""Compare two score files of one trial list: which system is better, and whether the list is large enough to say so.

    speakernet compare exps/a/scores.txt exps/b/scores.txt --trials trials.txt

Both are evaluated under the same draws of speakers; a difference is significant when its 95 % interval leaves out
zero. Score files of other tools may be compared too: `enrol test score` a line, in the order of the list.
"""

import argparse
import sys
from pathlib import Path

from speakernet.data.lists import read_trials
from speakernet.evaluation.comparison import NUM_DRAWS, PRIORS, compare_scores, short_names
from speakernet.evaluation.score_files import read_scores, scores_for
from speakernet.evaluation.speakers import read_speaker_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two score files, their list, and how to draw."""
    parser.add_argument("scores", type=Path, nargs=2, help="score files, or folders that hold a scores.txt")
    parser.add_argument("--trials", type=Path, required=True, help="labelled trial list of both")
    parser.add_argument("--speaker_table", type=Path, help="CSV with path and speaker, where names do not tell")
    parser.add_argument("--priors", type=float, nargs="+", default=list(PRIORS), help="target priors of the minDCFs")
    parser.add_argument("--draws", type=int, default=NUM_DRAWS, help="draws of speakers")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")


def run(arguments: argparse.Namespace) -> int:
    """Read, compare, and print a table and a sentence for each figure."""
    if not all(0 < prior < 1 for prior in arguments.priors):
        raise ValueError(f"--priors {arguments.priors}: expected probabilities between 0 and 1")
    if arguments.draws < 1:
        raise ValueError(f"--draws {arguments.draws}: expected at least 1")
    paths = [path / "scores.txt" if path.is_dir() else path for path in arguments.scores]
    trials = read_trials(arguments.trials)
    first, second = (scores_for(trials, read_scores(path)) for path in paths)
    table = read_speaker_table(arguments.speaker_table) if arguments.speaker_table else None
    result = compare_scores(
        trials,
        first,
        second,
        speaker_table=table,
        priors=arguments.priors,
        num_draws=arguments.draws,
        seed=arguments.seed,
    )
    names = short_names([str(path) for path in paths])
    lines = [f"A = {names[0]} ({paths[0]})", f"B = {names[1]} ({paths[1]})"]
    lines += [f"{len(trials):,} trials of {arguments.trials}; speakers: {result.speaker_rule}", ""]
    lines.append(f"{'':<16}{'A':>10}{'B':>10}")
    for figure, one, other in zip(result.figures, result.first, result.second, strict=True):
        lines.append(f"{figure:<16}{one:>10.3f}{other:>10.3f}")
    sys.stdout.write("\n".join([*lines, "", *result.sentences("A", "B"), ""]))
    return 0
