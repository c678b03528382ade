"""Trial lists: make them from any list, clean a list against the files that exist, rewrite it to another layout.

    python data_prep/trials.py make test_list.txt trials.txt --kind balanced --training train_list.txt
    python data_prep/trials.py clean trials.txt --root data/voxceleb1/wav
    python data_prep/trials.py rewrite trials.txt kaldi_trials.txt --form kaldi --prefix wav/

`make` takes a training list (speaker path) or a table (path,speaker[,session,gender] as .csv or .tsv).
"""

import argparse
import logging
import sys
from pathlib import Path

import numpy as np

from speakernet.corpora.pairing import (
    DEFAULT_NONTARGETS_PER_TARGET,
    DEFAULT_TARGETS_PER_SPEAKER,
    PairRules,
    Pairs,
    all_pairs,
    balanced_pairs,
    hard_pairs,
    random_pairs,
)
from speakernet.corpora.scripts import DEFAULT_SEED, new_parser, positive_int, run_script
from speakernet.corpora.summary import StepSummary, finish
from speakernet.corpora.trial_lists import (
    FORMS,
    clean_list,
    genders_known,
    load_embeddings,
    load_utterances,
    looks_like_trials,
    refuse_overlap,
    renamer,
    rewrite,
    write_pairs,
)
from speakernet.corpora.utterances import Utterances
from speakernet.data.lists import read_training_list

logger = logging.getLogger("trials")

KINDS = ("all", "random", "balanced", "hard")


def build_parser() -> argparse.ArgumentParser:
    """All options of the script."""
    parser = new_parser(__doc__ or "")
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser("make", help="make trials from a list of utterances")
    make.add_argument("list", type=Path, help="training list, or table with headings")
    make.add_argument("output", type=Path, help="trial list to write")
    make.add_argument("--kind", choices=KINDS, default="balanced", help="which pairs (default: balanced)")
    make.add_argument("--num_trials", type=positive_int, default=10000, help="random: how many (default: 10000)")
    targets, nontargets = DEFAULT_TARGETS_PER_SPEAKER, DEFAULT_NONTARGETS_PER_TARGET
    help_text = f"balanced: most target trials a speaker (default: {targets})"
    make.add_argument("--targets_per_speaker", type=positive_int, default=targets, help=help_text)
    help_text = f"balanced: non-targets for each target (default: {nontargets})"
    make.add_argument("--nontargets_per_target", type=positive_int, default=nontargets, help=help_text)
    make.add_argument("--embeddings", type=Path, help="hard: .npz with names and embeddings of the utterances")
    make.add_argument("--nearest", type=positive_int, default=5, help="hard: negatives for each utterance (default: 5)")
    make.add_argument("--same_gender", action="store_true", help="leave out non-targets across genders (needs a table)")
    make.add_argument("--same_session", action="store_true", help="also pair utterances of one session")
    make.add_argument("--training", type=Path, help="training list that the trials must not share speakers with")
    make.add_argument("--allow_overlap", action="store_true", help="make them all the same")
    make.add_argument("--form", choices=FORMS, default="label_first", help="how to write them (default: label_first)")
    make.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of every draw (default: 10)")
    clean = actions.add_parser("clean", help="drop the rows whose files are not there")
    clean.add_argument("list", type=Path, help="trial or training list")
    clean.add_argument("--root", type=Path, required=True, help="folder or packed corpus of the files")
    clean.add_argument("--output", type=Path, help="default: NAME_clean beside the list")
    clean.add_argument("--dropped", type=Path, help="where dropped rows go; default: NAME_dropped beside the list")
    change = actions.add_parser("rewrite", help="write a list in another layout or form")
    change.add_argument("list", type=Path, help="trial or training list")
    change.add_argument("output", type=Path, help="list to write")
    change.add_argument("--form", choices=FORMS, default="label_first", help="of trials (default: label_first)")
    change.add_argument("--strip", default="", help="take this off the front of names")
    change.add_argument("--prefix", default="", help="put this before names")
    change.add_argument("--suffix", default="", help="put this in place of the names' suffix, as .flac")
    help_text = "replace this part of names"
    change.add_argument("--replace", nargs=2, action="append", default=[], metavar=("OLD", "NEW"), help=help_text)
    for one in (clean, change):
        one.add_argument("--kind", choices=("trials", "training"), help="what the list is (default: found out)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make, clean or rewrite."""
    actions = {"make": _make, "clean": _clean, "rewrite": _rewrite}
    return actions[arguments.action](arguments)


def _make(arguments: argparse.Namespace) -> int:
    utterances = load_utterances(arguments.list)
    if arguments.training is not None and not arguments.allow_overlap:
        refuse_overlap(utterances, read_training_list(arguments.training))
    if arguments.same_gender and not genders_known(utterances):
        raise ValueError(f"{arguments.list} does not say every speaker's gender; give a table with a column gender")
    pairs = _pairs(arguments, utterances)
    if not len(pairs):
        raise ValueError(f"{arguments.list} gives no pairs under these rules; loosen them")
    write_pairs(arguments.output, utterances, pairs, arguments.form)
    num_targets = int(pairs.labels.sum())
    logger.info("%s: %d trials, %d targets", arguments.output, len(pairs), num_targets)
    if num_targets in (0, len(pairs)):
        logger.warning("all trials are of one kind: no error rate can be computed from them")
    return 0


def _pairs(arguments: argparse.Namespace, utterances: Utterances) -> Pairs:
    rules = PairRules(other_session=not arguments.same_session, same_gender=arguments.same_gender)
    rows = np.arange(len(utterances))
    if arguments.kind == "all":
        return all_pairs(utterances, rows, rules)
    if arguments.kind == "random":
        return random_pairs(utterances, rows, arguments.num_trials, rules, arguments.seed)
    if arguments.kind == "balanced":
        return balanced_pairs(
            utterances, rows, rules, arguments.seed, arguments.targets_per_speaker, arguments.nontargets_per_target
        )
    if arguments.embeddings is None:
        raise ValueError("hard negatives are found by embeddings; give --embeddings FILE.npz")
    embeddings = load_embeddings(arguments.embeddings, utterances.names)
    return hard_pairs(utterances, rows, embeddings, rules, arguments.nearest, arguments.seed)


def _clean(arguments: argparse.Namespace) -> int:
    path = arguments.list
    output = arguments.output or path.with_name(f"{path.stem}_clean{path.suffix}")
    dropped = arguments.dropped or path.with_name(f"{path.stem}_dropped{path.suffix}")
    with StepSummary("clean", output.parent) as summary:
        clean_list(path, arguments.root, output, dropped, _is_trials(arguments), summary)
    return finish([summary])


def _rewrite(arguments: argparse.Namespace) -> int:
    rename = renamer(arguments.strip, arguments.prefix, arguments.suffix, arguments.replace)
    is_trials = _is_trials(arguments)
    num_rows = rewrite(arguments.list, arguments.output, arguments.form, rename=rename, is_trials=is_trials)
    logger.info("%s: %d rows", arguments.output, num_rows)
    return 0


def _is_trials(arguments: argparse.Namespace) -> bool:
    if arguments.kind is not None:
        return bool(arguments.kind == "trials")
    return looks_like_trials(arguments.list)


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), run))
