"""Trial lists: make them from any list, clean a list against the files that exist, rewrite it to another layout.

    speakernet prepare trials make test_list.txt trials.txt --kind balanced --training train_list.txt
    speakernet prepare trials clean trials.txt --root data/voxceleb1/wav
    speakernet prepare trials rewrite trials.txt kaldi_trials.txt --form kaldi --prefix wav/
    speakernet prepare trials hold_out train_list.txt data/tuning --speakers 30

`make` takes a training list (speaker path) or a table (path,speaker[,session,gender] as .csv or .tsv). `hold_out` takes
some speakers out of a training list and pairs their utterances: what is tried out is judged by them, never by the
trials that are reported.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speakernet.corpora.commands import positive_int
from speakernet.corpora.held_out import HeldOut, hold_out
from speakernet.corpora.listing import ListOptions
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
from speakernet.corpora.summary import StepSummary, finish
from speakernet.corpora.utterances import (
    NUM_EXAMPLES,
    UNKNOWN,
    Utterances,
    read_table,
    utterances_from_list,
    utterances_from_rows,
)
from speakernet.data.lists import (
    ListError,
    StringTable,
    TrainingList,
    TrialList,
    read_training_list,
    read_trials,
    write_training_list,
    write_trials,
)
from speakernet.data.opening import open_source
from speakernet.files import FileError, atomic_write, read_arrays, reading, refuse_overwriting

logger = logging.getLogger(__name__)

FORMS = ("label_first", "kaldi", "unlabelled")
KINDS = ("all", "random", "balanced", "hard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four actions and their options."""
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
    make.add_argument("--seed", type=int, default=ListOptions.seed, help="of every draw (default: 10)")
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
    hold = actions.add_parser("hold_out", help="take speakers out of a training list, with trials among them")
    hold.add_argument("list", type=Path, help="training list")
    hold.add_argument("folder", type=Path, help="where train_list.txt and trials.txt go; their paths stay as they are")
    hold.add_argument("--speakers", type=positive_int, required=True, help="how many are held out")
    help_text = f"non-targets for each target (default: {nontargets})"
    hold.add_argument("--nontargets_per_target", type=positive_int, default=nontargets, help=help_text)
    hold.add_argument("--seed", type=int, default=ListOptions.seed, help="of every draw (default: 10)")
    for one in (clean, change):
        one.add_argument("--kind", choices=("trials", "training"), help="what the list is (default: found out)")


def run(arguments: argparse.Namespace) -> int:
    """Make, clean, rewrite or hold out."""
    actions = {"make": _make, "clean": _clean, "rewrite": _rewrite, "hold_out": _hold_out}
    return actions[arguments.action](arguments)


def _make(arguments: argparse.Namespace) -> int:
    inputs = (arguments.list, arguments.training, arguments.embeddings)
    refuse_overwriting([arguments.output], filter(None, inputs))
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
    refuse_overwriting([output, dropped], [path])
    with StepSummary("clean", output.parent, made="kept", skipped="dropped") as summary:
        clean_list(path, arguments.root, output, dropped, _is_trials(arguments), summary)
    return finish([summary])


def _rewrite(arguments: argparse.Namespace) -> int:
    refuse_overwriting([arguments.output], [arguments.list])
    rename = renamer(arguments.strip, arguments.prefix, arguments.suffix, arguments.replace)
    is_trials = _is_trials(arguments)
    num_rows = rewrite(arguments.list, arguments.output, arguments.form, rename=rename, is_trials=is_trials)
    logger.info("%s: %d rows", arguments.output, num_rows)
    return 0


def _hold_out(arguments: argparse.Namespace) -> int:
    outputs = [arguments.folder / name for name in ("train_list.txt", "trials.txt")]
    refuse_overwriting(outputs, [arguments.list])
    found = hold_out(
        read_training_list(arguments.list), arguments.speakers, arguments.seed, arguments.nontargets_per_target
    )
    write_held_out(found, arguments.folder)
    return 0


def write_held_out(found: HeldOut, folder: Path) -> tuple[Path, Path]:
    """Write train_list.txt and trials.txt into a folder, their paths as they were; returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    training, trials = folder / "train_list.txt", folder / "trials.txt"
    write_training_list(training, _training_rows(found.training, np.arange(len(found.training))))
    write_trials(trials, _trial_rows(found.trials, np.arange(len(found.trials))))
    logger.info("%s: %d utterances of %d speakers", training, len(found.training), len(found.training.speakers))
    assert found.trials.labels is not None, "made from utterances whose speakers are known"
    logger.info("%s: %d trials, %d targets", trials, len(found.trials), int(found.trials.labels.sum()))
    return training, trials


def _is_trials(arguments: argparse.Namespace) -> bool:
    if arguments.kind is not None:
        return bool(arguments.kind == "trials")
    return looks_like_trials(arguments.list)


def load_utterances(path: Path) -> Utterances:
    """Utterances of a training list, or of a table (.csv, .tsv) that may know sessions and genders.

    Raises:
        ListError: the file is malformed.
    """
    if path.suffix.lower() in (".csv", ".tsv"):
        return utterances_from_rows(read_table(path))
    return utterances_from_list(path)


def refuse_overlap(utterances: Utterances, training: TrainingList) -> None:
    """Stop where a speaker or file of the trials is in the training list.

    Raises:
        ListError: the first few are named.
    """
    speakers = sorted(set(utterances.speakers) & set(training.speakers))
    # Two lists may call the same people differently: then shared files give them away.
    files = [] if speakers else sorted(set(utterances.names) & set(training.paths))
    if speakers or files:
        kind, shared = ("speakers", speakers) if speakers else ("files", files)
        raise ListError(
            f"{len(shared)} {kind} are also in {training.source} (first: {', '.join(shared[:NUM_EXAMPLES])}): trials "
            "over them measure nothing about new speakers; take others, or say --allow_overlap"
        )


def load_embeddings(path: Path, names: StringTable) -> np.ndarray:
    """The embedding of every name, float32 (names, dim), from an .npz with `names` (strings) and `embeddings`.

    The files that scoring keeps in `<save_path>/embeddings` are understood too; crops are averaged.

    Raises:
        ValueError: the file has another form, or lacks some of the names.
    """
    expected = "an .npz file with the arrays names (strings) and embeddings (utterances, dim)"
    with reading(path, expected):
        stored = read_arrays(path, expected)
        known, embeddings = stored["names"], stored["embeddings"]
        kept = StringTable(known, stored["name_offsets"]) if "name_offsets" in stored else known.tolist()
        row_of = {str(name): row for row, name in enumerate(kept)}
        if len(row_of) > len(embeddings) or embeddings.ndim not in (2, 3) or embeddings.dtype.kind != "f":
            raise FileError(f"{path}: {len(row_of)} names and embeddings {embeddings.shape}; expected {expected}")
    missing = [name for name in names if name not in row_of]
    if missing:
        raise ValueError(f"{path} has no embedding of {len(missing)} utterances, the first: {missing[0]}")
    if embeddings.ndim == 3:
        # Crops of one utterance point to the same voice: their mean is its embedding.
        embeddings = embeddings.mean(axis=1)  # (utterances, crops, dim) -> (utterances, dim)
    return embeddings[[row_of[name] for name in names]].astype(np.float32)


def write_pairs(path: Path, utterances: Utterances, pairs: Pairs, form: str = "label_first") -> None:
    """Write trials in one of `FORMS`."""
    _write_in_form(path, pairs.rows(utterances), form)


def _write_in_form(path: Path, rows: Iterator[tuple[int | None, str, str]], form: str) -> None:
    """Write (label, enrol, test) rows in one of `FORMS`, atomically.

    Raises:
        ListError: Kaldi's form of unlabelled pairs, or of names with white space.
    """
    if form == "label_first":
        write_trials(path, rows)
        return
    if form == "unlabelled":
        write_trials(path, ((None, enrol, test) for _, enrol, test in rows))
        return
    with atomic_write(path) as file:
        for label, enrol, test in rows:
            if label is None:
                raise ListError(f"{path}: Kaldi's form needs labels, and these pairs have none")
            if enrol.split() != [enrol] or test.split() != [test]:
                raise ListError(f"{path}: Kaldi's form cannot hold names with white space: {enrol!r}, {test!r}")
            file.write(f"{enrol} {test} {'target' if label else 'nontarget'}\n")


def clean_list(path: Path, root: Path, output: Path, dropped: Path, is_trials: bool, summary: StepSummary) -> None:
    """Keep the rows whose files exist; the others go to `dropped`, one a line as they were."""
    source = open_source(root)
    if is_trials:
        trials = read_trials(path)
        is_missing = np.zeros(len(trials.names), dtype=bool)
        is_missing[source.missing(trials.names)] = True
        keep = ~(is_missing[trials.enrol] | is_missing[trials.test])
        write_trials(output, _trial_rows(trials, np.flatnonzero(keep)))
        _write_dropped(dropped, _trial_rows(trials, np.flatnonzero(~keep)), lambda row: " ".join(map(str, row)))
    else:
        training = read_training_list(path)
        keep = np.ones(len(training), dtype=bool)
        keep[source.missing(training.paths)] = False
        write_training_list(output, _training_rows(training, np.flatnonzero(keep)))
        _write_dropped(dropped, _training_rows(training, np.flatnonzero(~keep)), " ".join)
    num_dropped = int(np.count_nonzero(~keep))
    summary.add_made(int(np.count_nonzero(keep)))
    summary.add_skipped(num_dropped)
    logger.info("%s: %d of %d rows kept; dropped rows are in %s", output, keep.sum(), len(keep), dropped)


def rewrite(path: Path, output: Path, form: str, *, rename: Callable[[str], str], is_trials: bool) -> int:
    """Rewrite a list to another layout (names through `rename`) and, for trials, form; the number of rows."""
    if is_trials:
        trials = read_trials(path)
        _write_in_form(
            output,
            (
                (label, rename(enrol), rename(test))
                for label, enrol, test in _trial_rows(trials, np.arange(len(trials)))
            ),
            form,
        )
        return len(trials)
    training = read_training_list(path)
    rows = _training_rows(training, np.arange(len(training)))
    write_training_list(output, ((speaker, rename(name)) for speaker, name in rows))
    return len(training)


def renamer(
    strip: str = "", prefix: str = "", suffix: str = "", replace: Sequence[tuple[str, str]] = ()
) -> Callable[[str], str]:
    """How names change: take a prefix off, put one on, change the suffix, replace parts.

    >>> renamer(strip="wav/", prefix="data/", suffix=".flac")("wav/id1/1.wav")
    'data/id1/1.flac'
    """

    def rename(name: str) -> str:
        name = prefix + name.removeprefix(strip)
        for old, new in replace:
            name = name.replace(old, new)
        if suffix:
            stem, dot, _ = name.rpartition(".")
            name = (stem if dot else name) + suffix
        return name

    return rename


def looks_like_trials(path: Path) -> bool:
    """Whether a file reads as trials rather than as a training list (a training list reads as unlabelled pairs too)."""
    try:
        return read_trials(path).labels is not None
    except ListError:
        return False


def genders_known(utterances: Utterances) -> bool:
    """Whether every speaker's gender is known."""
    return bool((utterances.genders != UNKNOWN).all())


def _trial_rows(trials: TrialList, rows: np.ndarray) -> Iterator[tuple[int | None, str, str]]:
    for row in rows.tolist():
        label = None if trials.labels is None else int(trials.labels[row])
        yield label, trials.names[int(trials.enrol[row])], trials.names[int(trials.test[row])]


def _training_rows(training: TrainingList, rows: np.ndarray) -> Iterator[tuple[str, str]]:
    for row in rows.tolist():
        yield training.speakers[int(training.labels[row])], training.paths[row]


def _write_dropped(path: Path, rows: Iterator, as_text: Callable) -> None:
    with atomic_write(path) as file:
        file.writelines(as_text(row) + "\n" for row in rows)
