"""Trial lists: make them from any list, drop trials whose files are missing, rewrite a list for a
different layout.

    speakernet prepare trials make test.txt trials.txt --kind balanced --training train.txt
    speakernet prepare trials make calls.csv trials.txt --across call --same_gender
    speakernet prepare trials make train.txt calibration.txt --calibration data/train
    speakernet prepare trials clean trials.txt --root data/voxceleb1/wav
    speakernet prepare trials rewrite trials.txt kaldi_trials.txt --form kaldi --prefix wav/
    speakernet prepare trials rewrite sre.tsv enrolment.txt --kind enrolment --prefix sre/
    speakernet prepare trials hold_out train_list.txt data/tuning --speakers 30

`make` takes a training list (speaker path) or a table (path,speaker[,session,gender] as .csv or
.tsv). `hold_out` takes some speakers out of a training list and pairs their utterances: judge
experiments by these trials, never by those that you report.
"""

import contextlib
import itertools
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speakernet.corpora.listing import SEED, positive_int
from speakernet.corpora.pairs import (
    DEFAULT_NONTARGETS_PER_TARGET,
    DEFAULT_TARGETS_PER_SPEAKER,
    HeldOut,
    PairRules,
    Pairs,
    all_pairs,
    balanced_pairs,
    calibration_pairs,
    hard_pairs,
    hold_out,
    random_pairs,
)
from speakernet.corpora.steps import Arguments, StepSummary, finish
from speakernet.corpora.utterances import UNKNOWN, Row, Utterances, read_table
from speakernet.data.audio import AudioError
from speakernet.data.lists import (
    ListError,
    ListFile,
    NameIndex,
    StringTable,
    TrainingList,
    TrialList,
    normal_names,
    read_enrolment,
    read_training_list,
    read_trials,
    write_enrolment,
    write_training_list,
    write_trials,
)
from speakernet.data.names import advice_on_name, compose_accents, normal_name, session_of
from speakernet.data.opening import open_source
from speakernet.files import FileError, atomic_write, read_arrays, reading, refuse_overwriting
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

FORMS = ("label_first", "kaldi", "unlabelled")
KINDS = ("all", "random", "balanced", "hard")
HELD_OUT_NAMES = ("train_list.txt", "trials.txt")
TrialRow = tuple[int | None, str, str]
"""Label (None if unlabelled), enrolment and test."""

_LIST = {"list": {"type": Path, "help": "trial or training list"}}
_KIND = {
    "--kind": {
        "choices": ("trials", "training", "enrolment"),
        "help": "what the list is (default: detected); trials and enrolment may be tables of "
        "a NIST SRE",
    }
}
_FORM = {"--form": {"choices": FORMS, "default": "label_first", "help": "form of trial lines"}}
# Of the actions that draw pairs.
_DRAWS: Arguments = {
    "--nontargets_per_target": {
        "type": positive_int,
        "default": DEFAULT_NONTARGETS_PER_TARGET,
        "help": "balanced: non-targets per target",
    },
    "--seed": {"type": int, "default": SEED, "help": "seed of every draw"},
}
#: Action -> what it does, and its options.
ACTIONS: dict[str, tuple[str, Arguments]] = {
    "make": (
        "make trials from a list of utterances",
        {
            "list": {"type": Path, "help": "training list, or table with headings"},
            "output": {"type": Path, "help": "trial list to write"},
            "--kind": {"choices": KINDS, "default": "balanced", "help": "which pairs"},
            "--num_trials": {
                "type": positive_int,
                "default": 10000,
                "help": "random: number of trials",
            },
            "--targets_per_speaker": {
                "type": positive_int,
                "default": DEFAULT_TARGETS_PER_SPEAKER,
                "help": "balanced: maximum number of target trials per speaker",
            },
            "--embeddings": {
                "type": Path,
                "help": "hard: .npz with names and embeddings of the utterances",
            },
            "--nearest": {
                "type": positive_int,
                "default": 5,
                "help": "hard: non-targets per utterance",
            },
            "--same_gender": {
                "action": "store_true",
                "help": "leave out non-targets across genders (needs a table)",
            },
            "--same_session": {
                "action": "store_true",
                "help": "also pair utterances of one session",
            },
            "--across": {
                "metavar": "COLUMN",
                "help": "targets pair utterances that differ in this column of the table (call, "
                "day, phone); for a training list only `folder`: the folders between the speaker's "
                "folder and the file",
            },
            "--calibration": {
                "type": Path,
                "metavar": "AUDIO",
                "help": "balanced trials to calibrate on, from a training list and its audio: a "
                "few utterances of each speaker, from different sessions if possible",
            },
            "--like": {
                "nargs": 2,
                "type": Path,
                "metavar": ("LIST", "AUDIO"),
                "help": "calibration: draw durations like those in this trial or training list",
            },
            "--training": {
                "type": Path,
                "help": "training list with which the trials must not share speakers",
            },
            "--allow_overlap": {
                "action": "store_true",
                "help": "make the trials even if they share speakers",
            },
            **_FORM,
            **_DRAWS,
        },
    ),
    "clean": (
        "drop rows whose files do not exist",
        {
            **_LIST,
            "--root": {
                "type": Path,
                "required": True,
                "help": "folder or packed corpus with the files",
            },
            "--output": {"type": Path, "help": "default: NAME_clean beside the list"},
            "--dropped": {
                "type": Path,
                "help": "where dropped rows go; default: NAME_dropped beside the list",
            },
            **_KIND,
        },
    ),
    "rewrite": (
        "write a list in a different layout or form",
        {
            **_LIST,
            "output": {"type": Path, "help": "list to write"},
            "--strip": {"default": "", "help": "remove this from the start of names"},
            "--prefix": {"default": "", "help": "add this to the start of names"},
            "--suffix": {
                "default": "",
                "help": "replace the suffix of names with this, such as .flac",
            },
            "--replace": {
                "nargs": 2,
                "action": "append",
                "default": [],
                "metavar": ("OLD", "NEW"),
                "help": "replace this part of names",
            },
            **_FORM,
            **_KIND,
        },
    ),
    "hold_out": (
        "take speakers out of a training list and make trials among them",
        {
            "list": {"type": Path, "help": "training list"},
            "folder": {
                "type": Path,
                "help": "where train_list.txt and trials.txt go; paths in them are unchanged",
            },
            "--speakers": {
                "type": positive_int,
                "required": True,
                "help": "how many speakers to hold out",
            },
            **_DRAWS,
        },
    ),
}


def run(arguments: Namespace) -> int:
    """Run one of `ACTIONS`; returns the exit status."""
    actions = {"make": _make, "clean": _clean, "rewrite": _rewrite, "hold_out": _hold_out}
    return actions[arguments.action](arguments)


def _make(arguments: Namespace) -> int:
    path = arguments.list
    inputs = (path, arguments.training, arguments.embeddings)
    refuse_overwriting([arguments.output], filter(None, inputs))
    if arguments.calibration is None and arguments.like is not None:
        raise ValueError("--like needs --calibration AUDIO")
    utterances = _read_utterances(arguments)
    # A repeated file would be paired with itself.
    NameIndex(normal_names(utterances.names)).refuse_repeated(path)
    if arguments.training is not None and not arguments.allow_overlap:
        refuse_overlap(utterances, read_training_list(arguments.training))
    if arguments.same_gender and (utterances.genders == UNKNOWN).any():
        raise ValueError(
            f"{path} lacks the gender of some speakers; give a table with a gender column"
        )
    utterances, pairs = _make_pairs(arguments, utterances)
    if not len(pairs):
        raise ValueError(f"{path} gives no pairs under these rules; relax them")
    write_in_form(arguments.output, pairs.rows(utterances), arguments.form)
    num_targets = int(pairs.labels.sum())
    _log_counts(arguments.output, len(pairs), num_targets)
    # Only a warning, because such a list can still be scored or joined with another.
    if num_targets in (0, len(pairs)):
        logger.warning(
            "all trials are targets, or all are non-targets: no error rate can be computed"
        )
    return 0


def _log_counts(path: Path, num_trials: int, num_targets: int) -> None:
    logger.info("%s: %s", path, f"{num_trials:,} trials, {num_targets:,} targets")


def _read_utterances(arguments: Namespace) -> Utterances:
    """The utterances of a table or a training list, with the sessions defined by `--across`."""
    path = arguments.list
    across = arguments.across or ""
    if across and arguments.same_session:
        raise ValueError("--across and --same_session contradict each other; give only one of them")
    if path.suffix.lower() in (".csv", ".tsv"):
        return Utterances.from_rows(read_table(path, across))
    listed = Utterances.from_list(read_training_list(path))
    if not across and arguments.calibration is None:
        return listed
    if across not in ("", "folder"):
        raise ValueError(
            f"--across {across}: {path} is a training list, which has no columns; "
            "expected --across folder, or a table (.csv, .tsv) with that column"
        )
    # The session is the folders between the speaker's folder and the file. With --across, every
    # path must have one, because a row without might be paired with others of its own session.
    rows = [Row(speaker, name, session_of(speaker, name)) for speaker, name in listed.pairs()]
    unknown = [row.name for row in rows if not row.session]
    if unknown and across:
        raise ValueError(
            f"{path}: {len(unknown)} paths have no folder between the speaker's folder and the "
            f"file (first: {unknown[0]}); give a table with a column for it"
        )
    return Utterances.from_rows(rows)


def _make_pairs(arguments: Namespace, utterances: Utterances) -> tuple[Utterances, Pairs]:
    """The utterances (for calibration, only some of them) and pairs of their rows."""
    # Unknown sessions do not exclude a pair, so this rule also holds for lists without sessions.
    rules = PairRules(other_session=not arguments.same_session, same_gender=arguments.same_gender)
    seed = arguments.seed
    num_nontargets = arguments.nontargets_per_target
    if arguments.calibration is not None:
        seconds = _seconds_of(arguments.calibration, utterances.names)
        seconds_in_use = seconds
        if arguments.like is not None:
            path, audio = arguments.like
            _, in_use = read_rows(path, None)
            seconds_in_use = _seconds_of(audio, _names_in(in_use))
        return calibration_pairs(utterances, seconds, seconds_in_use, rules, seed, num_nontargets)
    rows = np.arange(len(utterances))
    if arguments.kind == "all":
        pairs = all_pairs(utterances, rows, rules)
    elif arguments.kind == "random":
        pairs = random_pairs(utterances, rows, arguments.num_trials, rules, seed)
    elif arguments.kind == "balanced":
        num_targets = arguments.targets_per_speaker
        pairs = balanced_pairs(utterances, rows, rules, seed, num_targets, num_nontargets)
    elif arguments.embeddings is None:
        raise ValueError("hard non-targets are found from embeddings; give --embeddings FILE.npz")
    else:
        embeddings = load_embeddings(arguments.embeddings, utterances.names)
        pairs = hard_pairs(utterances, rows, embeddings, rules, arguments.nearest, seed)
    return utterances, pairs


def _names_in(rows: Iterable[tuple]) -> StringTable:
    """The different names in rows of a list, in order; the first field of a row is not a name."""
    return StringTable.from_strings(dict.fromkeys(name for row in rows for name in row[1:]))


def _seconds_of(audio: Path, names: StringTable) -> np.ndarray:
    """Durations from headers, (utterances,)."""
    table = open_source(audio).lookup_table(names)
    # An error, because a file without a duration cannot take part in the draw.
    if table.problems:
        _, first = min(table.problems.items())
        raise AudioError(f"{len(table.problems)} recordings cannot be used; the first: {first}")
    return table.seconds


def _clean(arguments: Namespace) -> int:
    """Keep the rows whose files exist; the others go unchanged to a separate list."""
    path = arguments.list
    output = arguments.output or path.with_name(f"{path.stem}_clean{path.suffix}")
    dropped = arguments.dropped or path.with_name(f"{path.stem}_dropped{path.suffix}")
    refuse_overwriting([output, dropped], [path])
    source = open_source(arguments.root)
    kind, rows = read_rows(path, arguments.kind)
    names = _names_in(rows)
    # Each name is looked up once, though trials repeat it many times.
    missing = set(names.take(source.missing(names)))
    # Both sides of a trial have to exist.
    is_kept = [missing.isdisjoint(row[1:]) for row in rows]
    if not any(is_kept):
        advice = advice_on_name(rows[0][-1]) or (
            "give the folder or packed corpus that the paths of the list are relative to with "
            "--root"
        )
        raise ValueError(
            f"0 of {len(rows):,} rows of {path} have their files in {arguments.root}, so nothing "
            f"was written; {advice}"
        )
    write = write_trials if kind == "trials" else write_training_list
    write(output, itertools.compress(rows, is_kept))
    write(dropped, itertools.compress(rows, np.logical_not(is_kept)))
    summary = StepSummary("clean", output.parent, made="kept", skipped="dropped")
    num_kept = sum(is_kept)
    summary.add(num_kept, len(rows) - num_kept)
    logger.info("%s: rows that were kept; dropped rows are in %s", output, dropped)
    return finish([summary])


def _rewrite(arguments: Namespace) -> int:
    output = arguments.output
    refuse_overwriting([output], [arguments.list])
    kind, rows = read_rows(arguments.list, arguments.kind)

    def rename(name: str) -> str:
        name = arguments.prefix + name.removeprefix(arguments.strip)
        for old, new in arguments.replace:
            name = name.replace(old, new)
        # Last, so that --replace can still name the old suffix.
        if arguments.suffix:
            stem, dot, _ = name.rpartition(".")
            name = (stem if dot else name) + arguments.suffix
        return name

    if kind == "trials":
        # The enrolment side of a table of NIST is a model, which is not a path.
        first = 1 if nist_table(arguments.list) is None else 2
        renamed = ((*row[:first], *map(rename, row[first:])) for row in rows)
        write_in_form(output, renamed, arguments.form)
    else:
        write = write_enrolment if kind == "enrolment" else write_training_list
        write(output, ((owner, rename(name)) for owner, name in rows))
    logger.info("%s: %s rows", output, f"{len(rows):,}")
    return 0


def _hold_out(arguments: Namespace) -> int:
    path = arguments.list
    refuse_overwriting([arguments.folder / name for name in HELD_OUT_NAMES], [path])
    held_out = hold_out(
        read_training_list(path),
        arguments.speakers,
        arguments.seed,
        arguments.nontargets_per_target,
    )
    write_held_out(held_out, arguments.folder)
    return 0


def write_held_out(held_out: HeldOut, folder: Path) -> tuple[Path, Path]:
    """Write train_list.txt and trials.txt to a folder, with unchanged paths; returns the two
    files.
    """
    training, trials = (folder / name for name in HELD_OUT_NAMES)
    write_training_list(training, Utterances.from_list(held_out.training).pairs())
    write_trials(trials, trial_rows(held_out.trials))
    rest = held_out.training
    logger.info("%s: %s", training, f"{len(rest):,} utterances of {len(rest.speakers):,} speakers")
    assert held_out.trials.labels is not None, "hold_out labels its trials"
    _log_counts(trials, len(held_out.trials), int(held_out.trials.labels.sum()))
    return training, trials


def refuse_overlap(utterances: Utterances, training: TrainingList) -> None:
    """Raise ListError if a speaker or file of the trials is in the training list."""
    kind = "speakers"
    shared = set(map(compose_accents, utterances.speakers)) & set(
        map(compose_accents, training.speakers)
    )
    if not shared:
        # Two lists may name the same speakers differently; then shared files show the overlap.
        kind = "files"
        shared = set(map(normal_name, utterances.names)) & set(map(normal_name, training.paths))
    if shared:
        raise ListError(
            f"{len(shared)} {kind} are also in {training.source} (first: "
            f"{', '.join(sorted(shared)[:MAX_NAMED])}): trials with them say nothing about new "
            "speakers; use other speakers, or give --allow_overlap"
        )


def load_embeddings(path: Path, names: StringTable) -> np.ndarray:
    """The embedding of every name, float32 (names, dim), from an .npz with `names` (strings) and
    `embeddings`.

    Also reads the files that scoring caches in `<save_path>/embeddings`; crops are averaged.
    """
    expected = "an .npz file with the arrays names (strings) and embeddings (utterances, dim)"
    with reading(path, expected):
        stored = read_arrays(path, expected)
        embeddings = stored["embeddings"]
        # Scoring stores names as bytes and offsets, because a million strings load slowly.
        stored_names: Sequence[str] = stored["names"].tolist()
        if "name_offsets" in stored:
            stored_names = StringTable(stored["names"], stored["name_offsets"])
        row_of = {str(name): row for row, name in enumerate(stored_names)}
        is_matrix = embeddings.ndim in (2, 3) and embeddings.dtype.kind == "f"
        if len(row_of) > len(embeddings) or not is_matrix:
            raise FileError(
                f"{path}: {len(row_of)} names and embeddings {embeddings.shape}; expected "
                f"{expected}"
            )
    missing = [name for name in names if name not in row_of]
    if missing:
        raise ValueError(
            f"{path} has no embeddings of {len(missing)} utterances; the first: {missing[0]}"
        )
    if embeddings.ndim == 3:
        embeddings = embeddings.mean(axis=1)  # (utterances, crops, dim) -> (utterances, dim)
    return embeddings[[row_of[name] for name in names]].astype(np.float32)


def write_in_form(path: Path, rows: Iterable[TrialRow], form: str) -> None:
    """Atomically write (label, enrol, test) rows in one of `FORMS`; ListError if Kaldi's form does
    not allow them.
    """
    if form == "unlabelled":
        write_trials(path, ((None, enrol, test) for _, enrol, test in rows))
    elif form == "label_first":
        write_trials(path, rows)
    else:
        with atomic_write(path) as file:
            for label, enrol, test in rows:
                if label is None or len(f"{enrol} {test}".split()) != 2:
                    raise ListError(
                        f"{path}: Kaldi's form needs a label and names without white space, found "
                        f"{enrol!r}, {test!r}"
                    )
                file.write(f"{enrol} {test} {'target' if label else 'nontarget'}\n")


def read_rows(path: Path, kind: str | None) -> tuple[str, list]:
    """The kind of a list and its rows: trials (label, enrol, test), training (speaker, name) or
    enrolment (model, recording). Without a kind it is detected, but never as enrolment.
    """
    table = nist_table(path)
    # Never detected, because its lines of two words look like those of a training list.
    if kind == "enrolment":
        if table is not None:
            return kind, [(row["modelid"], row["segmentid"]) for row in table]
        models, _ = read_enrolment(path)
        rows = []
        for model, recordings in models.items():
            rows += [(model.decode(), recording.decode()) for recording in recordings]
        return kind, rows
    if table is not None:
        trials = []
        for row in table:
            label = int(row["targettype"] == "target") if "targettype" in row else None
            trials.append((label, row["modelid"], row["segmentid"]))
        return "trials", trials
    if kind == "trials":
        return kind, list(trial_rows(read_trials(path)))
    if kind is None:
        with contextlib.suppress(ListError):
            listed = read_trials(path)
            # A training list can also be read as unlabelled pairs.
            if listed.labels is not None:
                return "trials", list(trial_rows(listed))
    return "training", list(Utterances.from_list(read_training_list(path)).pairs())


def nist_table(path: Path) -> list[dict[str, str]] | None:
    """The rows of an enrolment table, trial list or key of a NIST SRE; None for any other list.

    They have the columns modelid, segmentid (segment in 2016) and side; a key has targettype too.
    """
    lines = iter(ListFile(path))
    _, first = next(lines, (0, b""))
    columns = first.decode().split("\t")
    if "segment" in columns:
        columns[columns.index("segment")] = "segmentid"
    if not {"modelid", "segmentid"} <= set(columns):
        return None
    rows = []
    for number, line in lines:
        row = dict(zip(columns, line.decode().split("\t"), strict=False))
        if not row.get("segmentid") or row.get("side", "a") != "a":
            raise ListError(
                f"{path}, line {number}: found {line.decode()!r}; expected {', '.join(columns)}, "
                "and side a (save the other channel as a file of its own)"
            )
        rows.append(row)
    return rows


def trial_rows(trials: TrialList) -> Iterator[TrialRow]:
    """The rows of a trial list, with names."""
    labels = [None] * len(trials) if trials.labels is None else trials.labels.tolist()
    for label, enrol, test in zip(labels, trials.enrol.tolist(), trials.test.tolist(), strict=True):
        yield label, trials.names[enrol], trials.names[test]
