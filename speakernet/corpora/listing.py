"""From a corpus on disk to lists: scan headers, leave out unusable files, split, pair, write.

Also the options that the subcommands of `speakernet prepare` share. Each subcommand is a module
with `ARGUMENTS` and `run(arguments) -> exit status`, and its docstring is its help.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speakernet.checks.samples import SILENT_RMS, read_facts
from speakernet.corpora.pairs import DEFAULT_TARGETS_PER_SPEAKER, PairRules, Pairs, fair_pairs
from speakernet.corpora.public_archives import DOWNLOAD_ARGUMENTS, DOWNLOAD_FLAG, fetch
from speakernet.corpora.recipes import Inputs, ListFiles, print_next_command, write_recipe
from speakernet.corpora.steps import Arguments, StepSummary, finish, name_problem
from speakernet.corpora.utterances import (
    DEFAULT_SHARE,
    MIN_FOR_SAME_GENDER,
    MIN_HELD_OUT_SPEAKERS,
    UNKNOWN,
    Row,
    Split,
    Utterances,
    split_as_published,
    split_speakers,
)
from speakernet.data.lists import write_training_list, write_trials
from speakernet.data.names import advice_on_name, compose_accents, one_word
from speakernet.data.sources import FolderSource
from speakernet.files import exclusive
from speakernet.machine.facts import usable_cores
from speakernet.terminal import MAX_NAMED, counted

logger = logging.getLogger(__name__)

SEED = 10
SCANNED = ("usable by their headers", "skipped", "left out")
MAX_FOR_EVERYONE = 5_000
"""With more of your own recordings, no trials among all speakers are made."""
MIN_FOR_AN_INTERVAL = 5
"""Minimum number of speakers for an evaluation to give an interval; a test compares it with
`evaluation/figures.py`."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description and adds defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        takes_value = action.nargs != 0
        if takes_value and action.default not in (None, argparse.SUPPRESS, "", False):
            return f"{action.help} (default: %(default)s)"
        return action.help


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected at least 1")
    return number


COMMON_ARGUMENTS: Arguments = {
    "--save_path": {"type": Path, "default": Path("data"), "help": "target folder"},
    "--jobs": {
        "type": positive_int,
        "default": usable_cores(),
        "dest": "num_jobs",
        "help": "number of files to process at once",
    },
}
LIST_ARGUMENTS: Arguments = {
    "--validation_share": {
        "type": float,
        "default": DEFAULT_SHARE,
        "help": "share of speakers for validation if a split is drawn",
    },
    "--test_share": {
        "type": float,
        "default": DEFAULT_SHARE,
        "help": "share of speakers for test if a split is drawn",
    },
    "--targets_per_speaker": {
        "type": positive_int,
        "default": DEFAULT_TARGETS_PER_SPEAKER,
        "help": "maximum number of target trials per speaker",
    },
    "--min_seconds": {"type": float, "default": 0.5, "help": "leave out shorter utterances"},
    "--seed": {"type": int, "default": SEED, "help": "seed of the split and the trials"},
    "--same_gender": {"action": "store_true", "help": "leave out easy trials across genders"},
}
CORPUS_ARGUMENTS: Arguments = {
    **COMMON_ARGUMENTS,
    **LIST_ARGUMENTS,
    "--min_utterances": {
        "type": positive_int,
        "default": 1,
        "help": "do not train on speakers with fewer utterances",
    },
}
PUBLIC_ARGUMENTS = CORPUS_ARGUMENTS | DOWNLOAD_FLAG | DOWNLOAD_ARGUMENTS


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """How lists are made; the fields are the options of `LIST_ARGUMENTS` and a few that only some
    commands have.
    """

    root: Path
    save_path: Path
    num_jobs: int
    validation_share: float
    test_share: float
    targets_per_speaker: int
    min_seconds: float
    seed: int
    same_gender: bool
    min_utterances: int = 1
    same_session: bool = False
    is_own: bool = False
    """The recordings are your own. Their samples are read, because nobody has checked them yet, and
    trials among all speakers are made, because published models do not know them."""
    is_fast: bool = False
    """Read headers only."""

    @classmethod
    def of(cls, arguments: argparse.Namespace, root: Path, save_path: Path) -> "ListOptions":
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in vars(arguments).items() if name in known}
        return cls(**values | {"root": root, "save_path": save_path})


def prepare_public(
    name: str,
    arguments: argparse.Namespace,
    rows_of: Callable[[Path], Iterable[Row]],
    *,
    split_of: Callable[[str], str] | None = None,
    archives: Sequence[str] | None = None,
    further_summaries: Sequence[StepSummary] = (),
) -> int:
    """Fetch a public corpus if requested, then write its lists and configuration; returns the exit
    code.

    `further_summaries` are of steps inside `rows_of`.
    """
    # Only the rows and, for some, the splits differ between corpora, so a new corpus is a function
    # that yields rows. VoxCeleb has steps of its own, because it is converted and merged.
    root = arguments.save_path
    options = ListOptions.of(arguments, root, root / f"{name}_lists")
    with exclusive(root):
        summaries = []
        # Common Voice has no --download, because its archives are handed out on request.
        if "download" in arguments and arguments.download:
            summaries = fetch(name, arguments, archives=archives)
        scan = StepSummary("scan", options.save_path, *SCANNED)
        lists = prepare_lists(listable_rows(rows_of(root), scan), options, scan, split_of)
        # The run folder is named after the file: exps/librispeech, not exps/librispeech_lists.
        config = options.save_path / f"{name}.yaml"
        write_recipe(config, Inputs(root, lists))
        code = finish([*summaries, *further_summaries, scan], options.save_path / "summary.txt")
        logger.info("lists: %s (paths are relative to %s)", options.save_path, root)
        print_next_command(config)
        return code


# The split decides whether an error rate means anything. Speakers of the validation and test lists
# are never trained on, so that the rate is about new voices. Target trials join recordings of
# different sessions where sessions are known, because within one session the room and the
# microphone give the answer away. Every speaker gives about as many trials as any other, or a few
# speakers with thousands of recordings would be all that is measured. None of this helps if one
# person is in two folders; only `speakernet doctor`, which reads the samples, may notice that.
def prepare_lists(
    rows: Iterable[Row],
    options: ListOptions,
    scan: StepSummary,
    split_of: Callable[[str], str] | None = None,
) -> ListFiles:
    """Scan the headers of listable utterances, split them, and write lists and trials.

    `split_of` returns `train`, `validation` or `test` for a path if the corpus has splits; None
    draws a split.
    """
    utterances, seconds = usable_utterances(
        rows, options.root, options.min_seconds, options.num_jobs, scan
    )
    if options.is_own and not options.is_fast:
        usable = _check_samples(utterances, options, scan)
        utterances = utterances.take(usable)
        seconds = seconds[usable]
    scan.add(made=len(utterances))
    if not len(utterances):
        first = scan.first_broken[0]
        problem = f"none of the {scan.broken} files under {options.root} is usable; the first:"
        name = first.partition(": ")[0]
        advice = advice_on_name(name)
        raise ValueError(f"{problem} {first}; {advice}" if advice else f"{problem} {first}")
    # A published split is kept, so that error rates can be compared with those of others.
    split = split_as_published(utterances, split_of) if split_of else None
    if split is None:
        fewest = MIN_FOR_SAME_GENDER if options.same_gender else MIN_HELD_OUT_SPEAKERS
        split = split_speakers(
            utterances, options.seed, options.validation_share, options.test_share, fewest
        )
    # This concerns only training: held-out speakers with few utterances still give trials.
    is_enough = utterances.counts()[utterances.labels[split.train]] >= options.min_utterances
    if not is_enough.all():
        logger.info(
            "left out %d training utterances of speakers with fewer than %d utterances",
            np.count_nonzero(~is_enough),
            options.min_utterances,
        )
    other_session = not options.same_session and can_pair_sessions(utterances, split)
    rules = PairRules(other_session, options.same_gender)
    training = split.train[is_enough]
    train = options.save_path / "train_list.txt"
    write_training_list(train, utterances.pairs(training))
    return ListFiles(
        train,
        _write_trials(options, utterances, "validation", split.validation, rules),
        _write_trials(options, utterances, "test", split.test, rules),
        _write_trials_of_everyone(options, utterances, rules),
        num_train=len(training),
        num_speakers=len(np.unique(utterances.labels[training])),
        median_seconds=float(np.median(seconds)),
        hours=float(seconds[training].sum()) / 3600,
    )


def can_pair_sessions(utterances: Utterances, split: Split) -> bool:
    """Whether target trials can leave out pairs of one session; logs what is known of sessions.

    Within one session, room and microphone give the answer away, so error rates come out too low.
    """
    # Sessions do not matter for training.
    held_out = np.concatenate([split.validation, split.test])
    if (utterances.sessions[held_out] == UNKNOWN).all():
        logger.warning(
            "no sessions are known of the held-out speakers, whose folders have no subfolders. "
            "Target trials may pair recordings of one session, whose common room and microphone "
            "make the error rate optimistic"
        )
        # A pair of unknown sessions is not left out.
        return True
    # Each list by itself, because no error rate can be computed from a list without target trials.
    for rows in filter(len, (split.validation, split.test)):
        labels_and_sessions = np.stack([utterances.labels[rows], utterances.sessions[rows]])
        labels, sessions = np.unique(labels_and_sessions, axis=1)
        speakers, first, counts = np.unique(labels, return_index=True, return_counts=True)
        with_one = speakers[(counts == 1) & (sessions[first] != UNKNOWN)]
        if len(with_one):
            logger.warning(
                "%d of %d held-out speakers have only one session (first: %s) and so no target "
                "trials between sessions; --same_session allows trials within a session, which "
                "make the error rate optimistic",
                len(with_one),
                len(speakers),
                utterances.speakers[int(with_one[0])],
            )
        if len(with_one) == len(speakers):
            return False
    return True


def listable_rows(rows: Iterable[Row], summary: StepSummary) -> Iterator[Row]:
    """Rows that can go into a list, with speakers as one word; the others are counted as broken,
    with the reason.
    """
    originals: dict[str, str] = {}
    for row in rows:
        speaker = one_word(row.speaker)
        problem = name_problem(row.name) if speaker else "no speaker in this name"
        if problem:
            summary.add_broken(row.name, problem)
            continue
        # In a list the speaker ends at white space, so two speakers must not become the same word.
        original = originals.setdefault(compose_accents(speaker), row.speaker)
        if original != row.speaker:
            problem = f"would both be listed as {speaker!r}"
            if compose_accents(original) == compose_accents(row.speaker):
                problem = "differ only in their Unicode form and look the same"
            raise ValueError(f"{original!r} and {row.speaker!r} {problem}; rename one speaker")
        yield row._replace(speaker=speaker)


def usable_utterances(
    rows: Iterable[Row], root: Path, min_seconds: float, num_jobs: int, summary: StepSummary
) -> tuple[Utterances, np.ndarray]:
    """Utterances with valid headers that last at least `min_seconds`, and their durations; the rest
    are broken.
    """
    # Headers are enough to know durations and to find files that are empty or not audio; decoding a
    # large corpus would take far longer.
    utterances = Utterances.from_rows(rows)
    if not len(utterances):
        raise ValueError(f"{root}: no utterances found; see --help for the supported layouts")
    # Reading headers waits for the disk, not for a core: four at once help even on one core.
    source = FolderSource(root, keep_lookup=False, show_progress=True)
    lookup = source.lookup_table(utterances.names, num_threads=max(4, num_jobs))
    seconds = lookup.seconds
    # A file without samples is broken even if min_seconds is 0.
    is_usable = seconds >= max(min_seconds, 1e-9)
    for row in np.flatnonzero(~is_usable).tolist():
        too_short = f"{seconds[row]:.2f} s is shorter than {min_seconds:g} s"
        summary.add_broken(utterances.names[row], lookup.problems.get(row, too_short))
    usable = np.flatnonzero(is_usable)
    return utterances.take(usable), seconds[usable]


def _check_samples(
    utterances: Utterances, options: ListOptions, summary: StepSummary
) -> np.ndarray:
    """Read all samples, and return the usable rows: damaged or silent recordings and those of two
    speakers are broken, and copies of another recording of the speaker are skipped.
    """
    # Nobody has checked these recordings before, so their samples are read as well. With a silent
    # file the network learns silence as a voice; one recording under two speakers is one person in
    # two classes, and we cannot know which of the two is right.
    source = FolderSource(options.root, keep_lookup=False)
    names = utterances.names
    facts = read_facts(source, names, options.num_jobs, "read samples")
    problems = dict(facts.problems)
    copies = []
    rows_by_digest: dict[int, list[int]] = {}
    for row, (rms, digest) in enumerate(zip(facts.rms, facts.hashes.tolist(), strict=True)):
        if row in problems:
            continue
        if rms < SILENT_RMS:
            problems[row] = "silent, so nobody can be recognised"
        else:
            rows_by_digest.setdefault(digest, []).append(row)
    for rows in rows_by_digest.values():
        labels = utterances.labels[rows]
        for row, label in zip(rows, labels.tolist(), strict=True):
            # Of two speakers, only people can say which is right.
            is_other = labels != label
            if is_other.any():
                other = names[rows[int(is_other.argmax())]]
                problems[row] = (
                    f"the same recording as {other} of another speaker: one person in two folders, "
                    "or a wrong folder; merge the folders or remove one file"
                )
            elif row != rows[0]:
                copies.append(row)
    for row in sorted(problems):
        summary.add_broken(names[row], problems[row])
    if copies:
        summary.add(skipped=len(copies))
        logger.warning(
            "%s skipped, with the same samples as another recording of the speaker: %s",
            counted(len(copies), "file"),
            ", ".join(names[row] for row in copies[:MAX_NAMED]),
        )
    return np.setdiff1d(np.arange(len(names)), [*problems, *copies])


def _write_trials(
    options: ListOptions, utterances: Utterances, name: str, rows: np.ndarray, rules: PairRules
) -> Path | None:
    """Write the list of a held-out split and balanced trials among its utterances; None for an
    empty split.
    """
    if not len(rows):
        return None
    write_training_list(options.save_path / f"{name}_list.txt", utterances.pairs(rows))
    pairs = fair_pairs(utterances, rows, rules, options.seed, options.targets_per_speaker)
    num_targets = int(pairs.labels.sum())
    if num_targets in (0, len(pairs)):
        raise ValueError(
            f"the {name} split has {num_targets} target trials out of {len(pairs)}: its speakers "
            "have too few utterances, or only one session each; add recordings, or allow trials "
            "within a session (--same_session)"
        )
    path = options.save_path / f"{name}_trials.txt"
    num_speakers = len(np.unique(utterances.labels[rows]))
    _write_pairs(path, utterances, pairs, num_speakers)
    if num_speakers < MIN_FOR_AN_INTERVAL:
        logger.warning(
            "only %d speakers: an interval of the error rate needs at least %d, a narrow one 20 or "
            "more; record more speakers, or hold out more of them with --%s_share",
            num_speakers,
            MIN_FOR_AN_INTERVAL,
            name,
        )
    return path


def _write_trials_of_everyone(
    options: ListOptions, utterances: Utterances, rules: PairRules
) -> Path | None:
    """Write trials among all speakers, for models that were not trained on them; None if there is
    no need or no target.
    """
    # A published model may have been trained on public corpora, but not on your own speakers, so
    # all of them can calibrate it.
    if not options.is_own:
        return None
    path = options.save_path / "everyone_trials.txt"
    # An earlier run may have had other recordings.
    path.unlink(missing_ok=True)
    if len(utterances) > MAX_FOR_EVERYONE:
        return None
    rows = np.arange(len(utterances))
    pairs = fair_pairs(utterances, rows, rules, options.seed, options.targets_per_speaker)
    if pairs.labels.sum() in (0, len(pairs)):
        return None
    _write_pairs(path, utterances, pairs, len(utterances.speakers))
    return path


def _write_pairs(path: Path, utterances: Utterances, pairs: Pairs, num_speakers: int) -> None:
    write_trials(path, pairs.rows(utterances))
    counts = (
        f"{len(pairs):,} trials over {num_speakers:,} speakers, {int(pairs.labels.sum()):,} of "
        "them targets"
    )
    logger.info("%s: %s", path, counts)
