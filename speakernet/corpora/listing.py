"""From a corpus on disk to lists: scan headers, leave out what cannot be used, split, pair, write."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.corpora.pairing import PairRules, balanced_pairs
from speakernet.corpora.splits import Split
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import Row, Utterances, utterances_from_rows
from speakernet.corpora.walking import name_problem, one_word
from speakernet.data.lists import StringTable, write_training_list, write_trials
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import FolderSource

logger = logging.getLogger(__name__)

DEFAULT_MIN_SECONDS = 0.5


@dataclass(frozen=True)
class ListFiles:
    """The lists that were written; `test` is None where there is no test part."""

    train: Path
    validation: Path | None
    test: Path | None
    num_train: int
    num_speakers: int
    median_seconds: float


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
        if originals.setdefault(speaker, row.speaker) != row.speaker:
            raise ValueError(
                f"{originals[speaker]!r} and {row.speaker!r} would both be listed as {speaker!r}; rename one speaker"
            )
        yield row._replace(speaker=speaker)


def usable_utterances(
    rows: Iterable[Row], root: Path, min_seconds: float, num_jobs: int, summary: StepSummary
) -> tuple[Utterances, LookupTable]:
    """The utterances whose headers are good and that last at least `min_seconds`; the others are counted as broken.

    Returns:
        The utterances, and the lookup table of exactly these rows.
    """
    found = utterances_from_rows(rows)
    if not len(found):
        raise ValueError(f"{root}: no utterances were found; see --help for the layouts that are understood")
    source = FolderSource(root, keep_lookup=False, show_progress=True)
    lookup = source.lookup_table(found.names, num_threads=max(4, num_jobs))
    seconds = lookup.seconds
    for row, problem in sorted(lookup.problems.items()):
        summary.add_broken(found.names[row], problem)
    is_short = seconds < min_seconds
    is_short[list(lookup.problems)] = False
    for row in np.flatnonzero(is_short).tolist():
        summary.add_broken(found.names[row], f"lasts {seconds[row]:.2f} s, shorter than {min_seconds:g} s")
    keep = np.flatnonzero(seconds >= max(min_seconds, 1e-9))
    summary.add_made(len(keep))
    return take(found, keep), take_lookup(lookup, keep)


def take(utterances: Utterances, rows: np.ndarray) -> Utterances:
    """Only these rows; speakers that lost all of theirs are gone too."""
    labels = utterances.labels[rows]
    speakers, new_labels = np.unique(labels, return_inverse=True)
    return Utterances(
        names=utterances.names.take(rows),
        labels=new_labels.astype(np.int32),
        speakers=utterances.speakers.take(speakers) if len(speakers) else StringTable.from_strings([]),
        sessions=utterances.sessions[rows],
        genders=utterances.genders[speakers],
    )


def take_lookup(lookup: LookupTable, rows: np.ndarray) -> LookupTable:
    """Only these rows, none of which has a problem."""
    taken = LookupTable.empty(len(rows), lookup.sample_rate)
    for name, column in lookup.columns.items():
        taken.columns[name].array[:] = column.array[rows]
    return taken


def write_lists(
    folder: Path,
    utterances: Utterances,
    split: Split,
    *,
    seed: int,
    rules: PairRules,
    median_seconds: float,
    targets_per_speaker: int,
) -> ListFiles:
    """Write train_list.txt, and for validation and test a list of utterances and balanced trials over them."""
    train = folder / "train_list.txt"
    write_training_list(train, utterances.pairs(split.train))
    written: list[Path | None] = []
    for name, rows in (("validation", split.validation), ("test", split.test)):
        trials_path = folder / f"{name}_trials.txt"
        if not len(rows):
            written.append(None)
            continue
        write_training_list(folder / f"{name}_list.txt", utterances.pairs(rows))
        pairs = balanced_pairs(utterances, rows, rules, seed, targets_per_speaker)
        num_targets = int(pairs.labels.sum())
        if num_targets in (0, len(pairs)):
            missing = "target" if num_targets == 0 else "non-target"
            raise ValueError(
                f"the {name} part has no {missing} trials: its speakers have too few utterances, or only one session "
                "each; add recordings, or allow trials within a session with --same_session"
            )
        write_trials(trials_path, pairs.rows(utterances))
        logger.info("%s: %d trials, %d of them targets", trials_path, len(pairs), num_targets)
        written.append(trials_path)
    num_speakers = len(np.unique(utterances.labels[split.train]))
    return ListFiles(train, written[0], written[1], len(split.train), num_speakers, median_seconds)
