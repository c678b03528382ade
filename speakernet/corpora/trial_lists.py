"""Make, clean and rewrite trial lists: what data_prep/trials.py does, without its options."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speakernet.corpora.pairing import Pairs
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import (
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
from speakernet.files import atomic_write

logger = logging.getLogger(__name__)

FORMS = ("label_first", "kaldi", "unlabelled")
NUM_EXAMPLES = 5


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
    try:
        with np.load(path, allow_pickle=False) as stored:
            known, embeddings = stored["names"], stored["embeddings"]
            kept = StringTable(known, stored["name_offsets"]) if "name_offsets" in stored else known.tolist()
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: expected an .npz file with the arrays names (strings) and embeddings (utterances, dim): {error}"
        ) from error
    row_of = {str(name): row for row, name in enumerate(kept)}
    missing = [name for name in names if name not in row_of]
    if missing:
        raise ValueError(f"{path} has no embedding of {len(missing)} utterances, the first: {missing[0]}")
    if embeddings.ndim == 3:
        embeddings = embeddings.mean(axis=1)  # (utterances, crops, dim) -> (utterances, dim)
    return embeddings[[row_of[name] for name in names]].astype(np.float32)


def write_pairs(path: Path, utterances: Utterances, pairs: Pairs, form: str = "label_first") -> None:
    """Write trials in one of `FORMS`."""
    write_in_form(path, pairs.rows(utterances), form)


def write_in_form(path: Path, rows: Iterator[tuple[int | None, str, str]], form: str) -> None:
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
    summary.found += num_dropped
    summary.skipped += num_dropped
    logger.info("%s: %d of %d rows kept; dropped rows are in %s", output, keep.sum(), len(keep), dropped)


def rewrite(path: Path, output: Path, form: str, *, rename: Callable[[str], str], is_trials: bool) -> int:
    """Rewrite a list to another layout (names through `rename`) and, for trials, form; the number of rows."""
    if is_trials:
        trials = read_trials(path)
        write_in_form(
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
