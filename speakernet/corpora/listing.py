"""From a corpus on disk to lists: scan headers, leave out what cannot be used, split, pair, write."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.corpora.pairing import DEFAULT_TARGETS_PER_SPEAKER, PairRules, balanced_pairs
from speakernet.corpora.splits import (
    DEFAULT_SHARE,
    MIN_FOR_SAME_GENDER,
    MIN_HELD_OUT_SPEAKERS,
    Split,
    split_by_parts,
    split_speakers,
)
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import UNKNOWN, Row, Utterances, take, utterances_from_rows
from speakernet.data.lists import StringTable, one_word, write_training_list, write_trials
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import FolderSource

FEWEST_FOR_AN_INTERVAL = 5
"""Speakers from which on an evaluation gives an interval; tests compare it with `evaluation/bootstrap.py`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListOptions:
    """How lists are made from the utterances of a corpus.

    Attributes:
        root: folder that holds the audio; paths in lists are relative to it.
        save_path: where lists and configuration go.
        num_jobs: files worked on at once.
        seed: of the split and the trials.
        min_seconds: shorter utterances are left out.
        validation_share: of the speakers, where a split is drawn.
        test_share: likewise.
        targets_per_speaker: most target trials of one speaker.
        same_gender: leave out trials across genders.
        same_session: make target trials within one session too.
        min_utterances: speakers with fewer are not trained on.
    """

    root: Path
    save_path: Path
    num_jobs: int = 1
    seed: int = 10
    min_seconds: float = 0.5
    validation_share: float = DEFAULT_SHARE
    test_share: float = DEFAULT_SHARE
    targets_per_speaker: int = DEFAULT_TARGETS_PER_SPEAKER
    same_gender: bool = False
    same_session: bool = False
    min_utterances: int = 1


@dataclass(frozen=True)
class ListFiles:
    """The lists that were written; `test` is None where there is no test part."""

    train: Path
    validation: Path | None
    test: Path | None
    num_train: int
    num_speakers: int
    median_seconds: float
    hours: float


def prepare_corpus(
    rows: Iterable[Row], options: ListOptions, part_of: Callable[[str], str] | None = None
) -> tuple[ListFiles, StepSummary]:
    """`prepare_lists` of a public corpus, and what its scan counted."""
    with StepSummary("scan", options.save_path, made="usable") as scan:
        listed = list(rows)
        lists = prepare_lists(listable_rows(listed, (row.name for row in listed), scan), options, scan, part_of)
    return lists, scan


def prepare_lists(
    rows: Iterable[Row],
    options: ListOptions,
    scan: StepSummary,
    part_of: Callable[[str], str] | None = None,
    lookup: LookupTable | None = None,
) -> ListFiles:
    """Scan the headers, split, and write lists and trials.

    Args:
        rows: utterances that a list can hold, paths relative to `options.root`.
        options: where and how.
        scan: counts what is usable and what is broken.
        part_of: `train`, `validation` or `test` of a path, where the corpus has parts; None draws a split.
        lookup: what the headers of the rows say, where they were read before.

    Raises:
        ValueError: too few speakers or utterances.
    """
    utterances, lookup = usable_utterances(rows, options.root, options.min_seconds, options.num_jobs, scan, lookup)
    if not len(utterances):
        raise ValueError(
            f"none of the {scan.broken} files under {options.root} can be used; the first: {scan.first_broken[0]}"
        )
    split = split_by_parts(utterances, part_of) if part_of else None
    if split is None:
        fewest = MIN_FOR_SAME_GENDER if options.same_gender else MIN_HELD_OUT_SPEAKERS
        split = split_speakers(utterances, options.seed, options.validation_share, options.test_share, fewest)
    split = _with_enough_utterances(utterances, split, options.min_utterances)
    rules = PairRules(
        other_session=not options.same_session and can_join_sessions(utterances, split),
        same_gender=options.same_gender,
    )
    seconds = lookup.seconds
    files = _write_lists(options, utterances, split, rules)
    num_speakers = len(np.unique(utterances.labels[split.train]))
    return ListFiles(*files, len(split.train), num_speakers, float(np.median(seconds)), float(seconds.sum()) / 3600)


def can_join_sessions(utterances: Utterances, split: Split) -> bool:
    """Whether target trials can leave out pairs of one session; what that costs or spares is said.

    Within one session the room and the microphone tell the answer, so error rates come out too low.
    """
    # Training may mix sessions as it likes: only trials are answered by the room.
    held_out = np.concatenate([split.validation, split.test])
    if (utterances.sessions[held_out] == UNKNOWN).all():
        logger.warning(
            "no sessions are known (folders below the speakers' would name them): target trials may pair recordings "
            "of one session, whose room and microphone flatter the error rate"
        )
        return True
    for rows in (split.validation, split.test):
        pairs = np.unique(np.stack([utterances.labels[rows], utterances.sessions[rows]]), axis=1)
        speakers, first, counts = np.unique(pairs[0], return_index=True, return_counts=True)
        alone = speakers[(counts == 1) & (pairs[1][first] != UNKNOWN)]
        if len(rows) and len(alone) == len(speakers):
            logger.warning(
                "every held-out speaker has one session only: target trials are made within it, so the error rate is "
                "flattered by room and microphone"
            )
            return False
        if len(alone):
            logger.warning(
                "%d of %d held-out speakers have one session only (first: %s): they give no target trials; "
                "--same_session makes some within it, which flatters the error rate",
                *(len(alone), len(speakers), utterances.speakers[int(alone[0])]),
            )
    return True


def _with_enough_utterances(utterances: Utterances, split: Split, min_utterances: int) -> Split:
    counts = utterances.counts()
    keep = counts[utterances.labels[split.train]] >= min_utterances
    if not keep.all():
        logger.info("%d training utterances of speakers with fewer than %d are left out", (~keep).sum(), min_utterances)
    return Split(split.train[keep], split.validation, split.test, split.is_speaker_disjoint)


def listable_rows(rows: Iterable[Row | None], names: Iterable[str], summary: StepSummary) -> Iterator[Row]:
    """Rows that a list can hold, speakers as one word; the others are counted as broken with the reason.

    Raises:
        ValueError: two speakers would become one, as 'Anna Maria' and 'Anna_Maria'.
    """
    originals: dict[str, str] = {}
    for name, row in zip(names, rows, strict=True):
        if row is None:
            summary.add_broken(name, "no speaker can be told from this name")
            continue
        problem = name_problem(row.name)
        speaker = one_word(row.speaker)
        if problem is None and not speaker:
            problem = "the speaker's name is empty"
        if problem is not None:
            summary.add_broken(row.name, problem)
            continue
        # A list ends the speaker at white space, so two people must not meet in one word.
        if originals.setdefault(speaker, row.speaker) != row.speaker:
            raise ValueError(
                f"{originals[speaker]!r} and {row.speaker!r} would both be listed as {speaker!r}; rename one speaker"
            )
        yield row._replace(speaker=speaker)


def usable_utterances(
    rows: Iterable[Row],
    root: Path,
    min_seconds: float,
    num_jobs: int,
    summary: StepSummary,
    lookup: LookupTable | None = None,
) -> tuple[Utterances, LookupTable]:
    """The utterances whose headers are good and that last at least `min_seconds`; the others are counted as broken.

    Headers are read unless `lookup` has them, row for row.

    Returns:
        The utterances, and the lookup table of exactly these rows.
    """
    found = utterances_from_rows(rows)
    if not len(found):
        raise ValueError(f"{root}: no utterances were found; see --help for the layouts that are understood")
    lookup = lookup or read_headers(found.names, root, num_jobs)
    seconds = lookup.seconds
    for row, problem in sorted(lookup.problems.items()):
        summary.add_broken(found.names[row], problem)
    is_short = seconds < min_seconds
    is_short[list(lookup.problems)] = False
    for row in np.flatnonzero(is_short).tolist():
        summary.add_broken(found.names[row], f"lasts {seconds[row]:.2f} s, shorter than {min_seconds:g} s")
    # A header without samples is broken whatever the shortest length asked for.
    keep = np.flatnonzero(seconds >= max(min_seconds, 1e-9))
    summary.add_made(len(keep))
    return take(found, keep), lookup.take(keep)


def read_headers(names: StringTable, root: Path, num_jobs: int) -> LookupTable:
    """What the headers of files say; nothing is kept for later."""
    source = FolderSource(root, keep_lookup=False, show_progress=True)
    # Header reads wait for the disk, not for a core: four at once help on one core too.
    return source.lookup_table(names, num_threads=max(4, num_jobs))


def _write_lists(
    options: ListOptions, utterances: Utterances, split: Split, rules: PairRules
) -> tuple[Path, Path | None, Path | None]:
    """Write train_list.txt, and for validation and test a list of utterances and balanced trials over them."""
    folder = options.save_path
    train = folder / "train_list.txt"
    write_training_list(train, utterances.pairs(split.train))
    written: list[Path | None] = []
    for name, rows in (("validation", split.validation), ("test", split.test)):
        trials_path = folder / f"{name}_trials.txt"
        if not len(rows):
            written.append(None)
            continue
        write_training_list(folder / f"{name}_list.txt", utterances.pairs(rows))
        pairs = balanced_pairs(utterances, rows, rules, options.seed, options.targets_per_speaker)
        num_targets = int(pairs.labels.sum())
        if num_targets in (0, len(pairs)):
            missing = "target" if num_targets == 0 else "non-target"
            raise ValueError(
                f"the {name} part has no {missing} trials: its speakers have too few utterances, or only one session "
                "each; add recordings, or allow trials within a session with --same_session"
            )
        write_trials(trials_path, pairs.rows(utterances))
        num_speakers = len(np.unique(utterances.labels[rows]))
        counts = (len(pairs), num_speakers, num_targets)
        logger.info("%s: %d trials over %d speakers, %d of them targets", trials_path, *counts)
        if num_speakers < FEWEST_FOR_AN_INTERVAL:
            logger.warning(
                "%d speakers are too few for an error rate that means something (its interval takes %d, a narrow one "
                "20 and more): bring more people, or take more of them with --%s_share",
                *(num_speakers, FEWEST_FOR_AN_INTERVAL, name),
            )
        written.append(trials_path)
    return train, written[0], written[1]


def name_problem(name: str) -> str | None:
    r"""Why a path cannot stand in a list, or None.

    >>> name_problem("a b/c.wav") is None
    True
    """
    if len(name.splitlines()) != 1 or "\t" in name:
        return "the name holds a line break or a tab, which a list cannot hold; rename it"
    if name != name.strip():
        return "the name begins or ends with white space, which a list cannot hold; rename it"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "the name is not UTF-8 text, which a list cannot hold; rename it"
    return None
