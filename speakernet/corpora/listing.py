"""From a corpus on disk to lists and a configuration: scan headers, leave out unusable files,
split, pair, write.

Also the parts shared by the subcommands of `speakernet prepare`: options, and the download of a
public corpus. Each subcommand is a module with `ARGUMENTS` and `run(arguments) -> exit status`, and
its docstring is its help.
"""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from speakernet.corpora.archives import extract, join_pieces
from speakernet.corpora.download import Corpus, DownloadOptions, download_all, has_md5, load_corpus
from speakernet.corpora.steps import StepSummary, finish, name_problem
from speakernet.corpora.utterances import (
    DEFAULT_SHARE,
    DEFAULT_TARGETS_PER_SPEAKER,
    MIN_FOR_SAME_GENDER,
    MIN_HELD_OUT_SPEAKERS,
    UNKNOWN,
    PairRules,
    Row,
    Split,
    Utterances,
    balanced_pairs,
    split_as_published,
    split_speakers,
)
from speakernet.data.lists import one_word, write_training_list, write_trials
from speakernet.data.names import advice_on_name, composed
from speakernet.data.sources import FolderSource
from speakernet.files import atomic_write, exclusive, own_command
from speakernet.machine.facts import usable_cores

logger = logging.getLogger(__name__)


SEED = 10
#: Steps for the augmentation sets; all of them if none is given.
STEPS = ("download", "extract", "prepare")
SCANNED = ("usable by their headers", "skipped", "left out")
MIN_FOR_AN_INTERVAL = 5
"""Minimum number of speakers for an evaluation to give an interval; a test compares it with
`evaluation/figures.py`."""

#: Utterances seen in a whole run on a small corpus: a few minutes on a GPU, a quarter of an hour on
# two CPU cores.
WANTED_UTTERANCES = 50_000
MIN_EPOCHS = 20
MAX_EPOCHS = 60
LARGEST_BATCH = 64
LARGEST_SMALL_BATCH = 32
#: Up to this many utterances, the compact network below is large enough and can be trained on a
# CPU.
SMALL_CORPUS_UTTERANCES = 20_000
#: The network and optimizer of configs/speechocean_fast.yaml, which were tuned on 150 speakers of
# real speech.
SMALL_CORPUS_SECTIONS: dict[str, dict[str, Any]] = {
    "frontend": {"num_mels": 56, "spec_augment": True, "mel_mask_width": 6, "frame_mask_width": 20},
    "model": {
        "name": "ResNet",
        "embedding_dim": 192,
        "options": {"channels": 16, "blocks": [2, 2, 2, 2], "stem_stride": 2},
    },
    "loss": {"name": "aamsoftmax", "margin": 0.2, "scale": 30},
    "optimizer": {"name": "adamw", "learning_rate": 2.0e-3, "weight_decay": 0.02},
}
#: Up to this many training utterances, a folder's lists are for the small-data recipe.
LITTLE_DATA_UTTERANCES = 5_000
LITTLE_DATA = "small_data.yaml"
FINE_TUNING = "finetune.yaml"
MIN_STEPS = 8  # per epoch
FRAMES_PER_SECOND = 100
SHORTEST_CROP = 50
LONGEST_CROP = 200
LITTLE_DATA_CROP = 150
LITTLE_DATA_EPOCHS = 200
LITTLE_DATA_RAMP = (12, 58)
"""From configs/small_data.yaml: frames per crop, epochs of the run, first and last epoch of the
margin's ramp."""
LITTLE_DATA_TUNED_UTTERANCES = 1_200
"""Utterances for which these epochs were tuned; with more there are fewer epochs, so that a run
takes no longer."""


@dataclass(frozen=True)
class ListFiles:
    """The lists written; `test` is None if there is no test split."""

    train: Path
    validation: Path | None
    test: Path | None
    num_train: int
    num_speakers: int
    median_seconds: float
    hours: float


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description and adds defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.dest != "help" and action.nargs != 0
        if is_plain and action.default not in (None, argparse.SUPPRESS, "", False):
            return f"{action.help} (default: %(default)s)"
        return action.help


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected at least 1")
    return number


COMMON_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--save_path": {"type": Path, "default": Path("data"), "help": "target folder"},
    "--jobs": {
        "type": positive_int,
        "default": usable_cores(),
        "dest": "num_jobs",
        "help": "number of files to process at once",
    },
}
LIST_ARGUMENTS: dict[str, dict[str, Any]] = {
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
CORPUS_ARGUMENTS: dict[str, dict[str, Any]] = {
    **COMMON_ARGUMENTS,
    **LIST_ARGUMENTS,
    "--min_utterances": {
        "type": positive_int,
        "default": 1,
        "help": "do not train on speakers with fewer utterances",
    },
}
DOWNLOAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    **{
        f"--{name}": {
            "default": "",
            "help": f"{what}, never logged; better set SPEAKERNET_{name.upper()} in the "
            "environment, because other users can see command lines",
        }
        for name, what in {"key": "access key", "user": "user name", "password": "password"}.items()
    },
    "--base_url": {"help": "a mirror to fetch from instead; {name} is replaced by the file's name"},
    "--catalogue": {
        "type": Path,
        "help": "a table of sources instead of the shipped catalogue.yaml",
    },
    "--retries": {
        "type": int,
        "default": DownloadOptions.num_retries,
        "help": "consecutive attempts without a single byte before giving up",
    },
    "--timeout": {
        "type": float,
        "default": DownloadOptions.timeout_seconds,
        "help": "seconds without data before retrying",
    },
}
STEP_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--download": {
        "action": "store_true",
        "help": "fetch the archive unless it exists (default: all steps)",
    },
    "--extract": {"action": "store_true", "help": "unpack it"},
}


def steps_of(arguments: argparse.Namespace) -> Sequence[str]:
    """The requested steps, in order; all of them if none is given."""
    return [step for step in STEPS if getattr(arguments, step)] or STEPS


def corpus_of(name: str, arguments: argparse.Namespace) -> Corpus:
    """The files of a corpus, from the requested table and mirror."""
    key = arguments.key or os.environ.get("SPEAKERNET_KEY", "")
    return load_corpus(
        name, key=key, base_url=arguments.base_url, catalogue_path=arguments.catalogue
    )


def download_options(arguments: argparse.Namespace) -> DownloadOptions:
    """Retries, timeout and credentials of downloads."""
    user = arguments.user or os.environ.get("SPEAKERNET_USER", "")
    password = arguments.password or os.environ.get("SPEAKERNET_PASSWORD", "")
    return DownloadOptions(
        arguments.retries, timeout_seconds=arguments.timeout, user=user, password=password
    )


def fetch(
    name: str,
    arguments: argparse.Namespace,
    steps: Sequence[str] = ("download", "extract"),
    files: Sequence[str] | None = None,
) -> list[StepSummary]:
    """Download a corpus's files into the target folder, join those published in pieces, and unpack
    them there.
    """
    root = arguments.save_path
    corpus = corpus_of(name, arguments)
    pieces = {piece for some in corpus.joined.values() for piece in some}
    archives = [one for one in (files or corpus.files) if one not in pieces] + list(corpus.joined)
    summaries = []
    if "download" in steps:
        summary = StepSummary(f"download_{name}", root, made="fetched")
        # A verified whole archive needs no pieces, which were removed after joining.
        missing = [
            one
            for one in archives
            if one not in corpus.joined or not has_md5(root / one, corpus.sums[one])
        ]
        wanted = [corpus.files[piece] for one in missing for piece in corpus.pieces(one)]
        download_all(wanted, root, arguments.num_jobs, download_options(arguments), summary)
        if summary.broken == summary.found > 0:
            # The next steps would have nothing to unpack.
            raise ValueError("nothing could be fetched: " + "; ".join(summary.first_broken))
        summaries.append(summary)
    if "extract" in steps:
        summary = StepSummary(f"extract_{name}", root)
        for one, some in corpus.joined.items():
            join_pieces([root / piece for piece in some], root / one, corpus.sums[one], summary)
        for archive in archives:
            unpack(root / archive, corpus.sums[archive], root, summary, arguments.num_jobs)
        summaries.append(summary)
    return summaries


def unpack(
    archive: Path, md5: str | None, folder: Path, summary: StepSummary, num_jobs: int
) -> None:
    """Extract an archive if it exists and verifies; otherwise count it as broken."""
    if not archive.is_file():
        summary.add_broken(
            archive.name, f"does not exist; run with --download, or put it into {archive.parent}"
        )
    elif not has_md5(archive, md5):
        summary.add_broken(archive.name, "its MD5 sum is wrong; remove it and run with --download")
    else:
        extract(archive, folder, summary, num_jobs)


def prepare_public(
    name: str,
    arguments: argparse.Namespace,
    rows_of: Callable[[Path], Iterable[Row]],
    *,
    split_of: Callable[[str], str] | None = None,
    files: Sequence[str] | None = None,
    more: Sequence[StepSummary] = (),
) -> int:
    """Fetch a public corpus if requested, then write its lists and configuration; returns the exit
    code.

    `more` are the summaries of steps inside `rows_of`.
    """
    root = arguments.save_path
    options = argparse.Namespace(
        **vars(arguments) | {"root": root, "save_path": root / f"{name}_lists"}
    )
    with exclusive(root):
        summaries = (
            fetch(name, arguments, files=files) if getattr(arguments, "download", False) else []
        )
        scan = StepSummary("scan", options.save_path, *SCANNED)
        listed = list(rows_of(root))
        lists = prepare_lists(
            listable_rows(listed, (row.name for row in listed), scan), options, scan, split_of
        )
        # The run folder is named after the file: exps/librispeech, not exps/librispeech_lists.
        config = options.save_path / f"{name}.yaml"
        write_recipe(config, root, lists)
        code = finish([*summaries, *more, scan], options.save_path / "summary.txt")
        logger.info("lists: %s (paths are relative to %s)", options.save_path, root)
        print_next_command(config)
        return code


def print_next_command(*configs: Path, options: str = "") -> None:
    """Print the shell command that trains on the configurations; `options` are added unquoted."""
    named = [f"--config {shlex.quote(str(config))}" for config in configs]
    sys.stdout.write(" ".join([own_command("train"), *named, options]).rstrip() + "\n")


def prepare_lists(
    rows: Iterable[Row],
    options: argparse.Namespace,
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
    if not len(utterances):
        first = scan.first_broken[0]
        advice = advice_on_name(first.partition(": ")[0])
        raise ValueError(
            f"none of the {scan.broken} files under {options.root} is usable; the first: {first}"
            + (f"; {advice}" if advice else "")
        )
    split = split_as_published(utterances, split_of) if split_of else None
    if split is None:
        fewest = MIN_FOR_SAME_GENDER if options.same_gender else MIN_HELD_OUT_SPEAKERS
        split = split_speakers(
            utterances, options.seed, options.validation_share, options.test_share, fewest
        )
    fewest = vars(options).get("min_utterances", 1)
    is_enough = utterances.counts()[utterances.labels[split.train]] >= fewest
    if not is_enough.all():
        message = "left out %d training utterances of speakers with fewer than %d utterances"
        logger.info(message, (~is_enough).sum(), fewest)
    may_join = vars(options).get("same_session") or not can_tell_sessions(utterances, split)
    rules = PairRules(not may_join, options.same_gender)
    train = options.save_path / "train_list.txt"
    training = split.train[is_enough]
    write_training_list(train, utterances.pairs(training))
    validation = _write_trials(options, utterances, "validation", split.validation, rules)
    test = _write_trials(options, utterances, "test", split.test, rules)
    num_speakers = len(np.unique(utterances.labels[training]))
    hours = float(seconds.sum()) / 3600
    return ListFiles(
        train, validation, test, len(training), num_speakers, float(np.median(seconds)), hours
    )


def can_tell_sessions(utterances: Utterances, split: Split) -> bool:
    """Whether target trials can leave out pairs of one session.

    Within one session, room and microphone give the answer away, so error rates come out too low.
    """
    # Sessions do not matter for training.
    held_out = np.concatenate([split.validation, split.test])
    if (utterances.sessions[held_out] == UNKNOWN).all():
        logger.warning(
            "no sessions are known, because the speakers' folders have no folders in them. Target "
            "trials may pair recordings of one session, whose common room and microphone make the "
            "error rate optimistic"
        )
        return True
    for rows in filter(len, (split.validation, split.test)):
        pairs = np.unique(np.stack([utterances.labels[rows], utterances.sessions[rows]]), axis=1)
        speakers, first, counts = np.unique(pairs[0], return_index=True, return_counts=True)
        alone = speakers[(counts == 1) & (pairs[1][first] != UNKNOWN)]
        if len(alone):
            logger.warning(
                "%d of %d held-out speakers have only one session (first: %s) and so no target "
                "trials between sessions; trials within a session (--same_session) make the error "
                "rate optimistic",
                len(alone),
                len(speakers),
                utterances.speakers[int(alone[0])],
            )
        if len(alone) == len(speakers):
            return False
    return True


def listable_rows(
    rows: Iterable[Row | None], names: Iterable[str], summary: StepSummary
) -> Iterator[Row]:
    """Rows that can go into a list, with speakers as one word; the others are counted as broken,
    with the reason.
    """
    originals: dict[str, str] = {}
    for name, row in zip(names, rows, strict=True):
        speaker = one_word(row.speaker) if row else ""
        problem = name_problem(row.name) if row else "no speaker in this name"
        if row is None or problem or not speaker:
            summary.add_broken(name, problem or "the speaker's name is empty")
        # In a list the speaker ends at white space, so two speakers must not become the same word.
        elif (other := originals.setdefault(composed(speaker), row.speaker)) != row.speaker:
            problem = f"would both be listed as {speaker!r}"
            if composed(other) == composed(row.speaker):
                problem = "differ only in their Unicode form and look the same"
            raise ValueError(f"{other!r} and {row.speaker!r} {problem}; rename one speaker")
        else:
            yield row._replace(speaker=speaker)


def usable_utterances(
    rows: Iterable[Row], root: Path, min_seconds: float, num_jobs: int, summary: StepSummary
) -> tuple[Utterances, np.ndarray]:
    """Utterances with valid headers that last at least `min_seconds`, and their durations; the rest
    are broken.
    """
    found = Utterances.from_rows(rows)
    if not len(found):
        raise ValueError(f"{root}: no utterances found; see --help for the supported layouts")
    # Reading headers waits for the disk, not for a core: four at once help even on one core.
    source = FolderSource(root, keep_lookup=False, show_progress=True)
    lookup = source.lookup_table(found.names, num_threads=max(4, num_jobs))
    seconds = lookup.seconds
    short = {
        row: f"{seconds[row]:.2f} s is shorter than {min_seconds:g} s"
        for row in np.flatnonzero(seconds < min_seconds).tolist()
    }
    for row, problem in sorted((short | lookup.problems).items()):
        summary.add_broken(found.names[row], problem)
    # A file without samples is broken even if min_seconds is 0.
    keep = np.flatnonzero(seconds >= max(min_seconds, 1e-9))
    summary.add(made=len(keep))
    return found.take(keep), seconds[keep]


def _write_trials(
    options: argparse.Namespace,
    utterances: Utterances,
    name: str,
    rows: np.ndarray,
    rules: PairRules,
) -> Path | None:
    """Write the list of a held-out split and balanced trials among its utterances; None for an
    empty split.
    """
    if not len(rows):
        return None
    write_training_list(options.save_path / f"{name}_list.txt", utterances.pairs(rows))
    pairs = balanced_pairs(utterances, rows, rules, options.seed, options.targets_per_speaker)
    num_targets = int(pairs.labels.sum())
    if num_targets in (0, len(pairs)):
        raise ValueError(
            f"the {name} split has {num_targets} target trials out of {len(pairs)}: its speakers "
            "have too few utterances, or only one session each; add recordings, or allow trials "
            "within a session (--same_session)"
        )
    path = options.save_path / f"{name}_trials.txt"
    write_trials(path, pairs.rows(utterances))
    num_speakers = len(np.unique(utterances.labels[rows]))
    logger.info(
        "%s: %s trials over %s speakers, %s of them targets",
        path,
        f"{len(pairs):,}",
        f"{num_speakers:,}",
        f"{num_targets:,}",
    )
    if num_speakers < MIN_FOR_AN_INTERVAL:
        logger.warning(
            "only %d speakers: an interval of the error rate needs at least %d, a narrow one 20 or "
            "more; record more speakers, or hold out more of them with --%s_share",
            num_speakers,
            MIN_FOR_AN_INTERVAL,
            name,
        )
    return path


def write_recipe(path: Path, root: Path, lists: ListFiles, **sets: Path | None) -> None:
    """Write a complete configuration that trains on the lists, sized to the amount of data.

    `sets` may give `noise_path` and `rir_path`. All paths are absolute, so it works from any
    folder.
    """
    epochs = max(MIN_EPOCHS, min(MAX_EPOCHS, WANTED_UTTERANCES // max(1, lists.num_train)))
    sections = _inputs(root, lists, sets) | {"training": {"max_epochs": epochs}}
    if lists.num_train <= SMALL_CORPUS_UTTERANCES:
        # As in speechocean_fast.yaml, the margin grows once the speakers are roughly separated.
        ramp = {
            "margin": "linear",
            "margin_begin_epoch": epochs // 8,
            "margin_end_epoch": epochs // 2,
        }
        schedule = {"name": "cosine", "warmup_epochs": 2, "final_learning_rate": 1.0e-5, **ramp}
        sections |= SMALL_CORPUS_SECTIONS | {"schedule": schedule}
    _write(path, root, lists, "--config THIS", sections)


def write_little_data_lists(path: Path, root: Path, lists: ListFiles, **sets: Path | None) -> None:
    """Write a configuration with only the lists and the run folder, for use with the small-data
    recipe.

    It overrides the batch or the crop if the utterances are too few or too short for the recipe's,
    and the epochs if there are more utterances than they were tuned for.
    """
    sections = _inputs(root, lists, sets) | {"training": {"save_path": f"exps/{path.stem}"}}
    for name, usual in (("batch_size", LARGEST_SMALL_BATCH), ("crop_frames", LITTLE_DATA_CROP)):
        if sections["data"][name] >= usual:
            del sections["data"][name]
    # Speed perturbation needs no files, so augmentation stays on without them.
    del sections["augment"]["enabled"]
    if lists.num_train > LITTLE_DATA_TUNED_UTTERANCES:
        share = LITTLE_DATA_TUNED_UTTERANCES / lists.num_train
        begin, end, epochs = (round(share * one) for one in (*LITTLE_DATA_RAMP, LITTLE_DATA_EPOCHS))
        sections["schedule"] = {"margin_begin_epoch": begin, "margin_end_epoch": end}
        sections["training"] |= {"max_epochs": epochs, "test_interval": epochs}
    _write(path, root, lists, f"--config {LITTLE_DATA} --config THIS", sections)


def write_fine_tuning_lists(path: Path, root: Path, lists: ListFiles, **sets: Path | None) -> None:
    """Write a configuration with only the lists and a run folder, for use with the fine-tuning
    recipe.
    """
    sections = _inputs(root, lists, sets) | {"training": {"save_path": f"exps/{path.stem}"}}
    _write(
        path,
        root,
        lists,
        f"--config {FINE_TUNING} --config THIS --initial_model MODEL.pt",
        sections,
    )


def _inputs(root: Path, lists: ListFiles, sets: dict[str, Path | None]) -> dict[str, Any]:
    """The sections data and augment."""
    largest = LARGEST_SMALL_BATCH if lists.num_train <= SMALL_CORPUS_UTTERANCES else LARGEST_BATCH
    given = {name: str(path.resolve()) for name, path in sets.items() if path is not None}
    data: dict[str, Any] = {
        "train_list": str(lists.train.resolve()),
        "train_path": str(root.resolve()),
        # With batches of 64, 8 epochs of 1,440 utterances taught next to nothing; 32 and a ramped
        # margin worked.
        "batch_size": max(2, min(largest, lists.num_train // MIN_STEPS)),
        # Most utterances are at least this long; shorter ones are repeated.
        "crop_frames": int(
            min(LONGEST_CROP, max(SHORTEST_CROP, lists.median_seconds * FRAMES_PER_SECOND * 0.8))
        ),
    }
    for name, trials in (
        ("validation", lists.validation),
        ("test", lists.test or lists.validation),
    ):
        if trials is not None:
            data |= {f"{name}_list": str(trials.resolve()), f"{name}_path": str(root.resolve())}
    return {"data": data, "augment": {"enabled": bool(given), **given}}


def _write(path: Path, root: Path, lists: ListFiles, use: str, sections: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(
            f"# {lists.num_train} utterances of {lists.num_speakers} speakers from {root.name}, "
            f"for `{use}`.\n# Options that are not set here keep their defaults; `speakernet "
            "show-config --config FILE` shows all.\n"
        )
        yaml.safe_dump(
            {name: one for name, one in sections.items() if one},
            file,
            sort_keys=False,
            allow_unicode=True,
        )
