"""Your own recordings, ready for training: lists, a speaker-disjoint split, trials, configurations,
the next command.

One folder per speaker, with sessions in folders below it if you have them:

    my_voices/anna/monday/1.wav    my_voices/bert/2.flac

or the same below folders named train, dev or test, whose speakers then stay in these splits
(--layout pooled splits them again), or a table with the headings path,speaker[,session,gender]
(--csv), or a regular expression over the paths with the groups speaker and, optionally, session and
gender (--pattern '(?P<speaker>[^_]+)_(?P<session>[^_]+)_'). WAV, FLAC, OGG and MP3 are used in
place; m4a, aac, webm and similar files are converted first (needs ffmpeg).

    speakernet prepare folder my_voices
"""

import dataclasses
import logging
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from speakernet.corpora.listing import (
    COMMON_ARGUMENTS,
    LIST_ARGUMENTS,
    ListOptions,
    listable_rows,
    prepare_lists,
)
from speakernet.corpora.recipes import (
    FINE_TUNING,
    LITTLE_DATA,
    LITTLE_DATA_UTTERANCES,
    Inputs,
    print_next_command,
    write_fine_tuning_lists,
    write_little_data_lists,
    write_recipe,
)
from speakernet.corpora.steps import FFMPEG_ARGUMENT, Conversion, StepSummary, convert_all, finish
from speakernet.corpora.utterances import (
    Row,
    distinct_rows,
    read_table,
    row_by_folder,
    rows_by_pattern,
)
from speakernet.data.audio import AUDIO_SUFFIXES, CONVERTIBLE_SUFFIXES, WRITABLE
from speakernet.data.ffmpeg import FFMPEG_VARIABLE
from speakernet.data.folders import UnicodeNames, is_hidden, walk_recordings
from speakernet.data.names import CONVERTED, folders_of, normal_name
from speakernet.files import exclusive, own_command
from speakernet.terminal import MAX_NAMED, counted

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "speakers", "parts", "pooled")
#: Folders with these names are splits of a corpus, not speakers.
SPLIT_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "development", "val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
#: Folders with these names are neither; they contain the speakers or the splits.
CONTAINERS = frozenset({"wav", "wavs", "flac", "audio", "data", "speech"})


class Layout(NamedTuple):
    """Where the speakers' folders are."""

    depth: int
    """How many folders are above them."""
    split_depth: int | None = None
    """How many folders are above those named after the splits; None: no splits."""


ARGUMENTS = {
    "root": {
        "metavar": "folder",
        "type": Path,
        "help": "the folder with the recordings; paths in lists are relative to it",
    },
    "--save_path": {
        "type": Path,
        "help": "where lists and configuration go (default: data/NAME OF THE FOLDER)",
    },
    "--csv": {
        "type": Path,
        "dest": "table",
        "help": "table with the headings path,speaker[,session,gender]",
    },
    "--pattern": {"help": "regular expression over relative paths with a group named speaker"},
    "--layout": {
        "choices": LAYOUTS,
        "default": "auto",
        "help": "speakers: the top folders are speakers; parts: they are train, dev and test, kept "
        "apart; pooled: like parts, but the speakers are split again; auto: depends on the names",
    },
    "--speaker_depth": {
        "type": int,
        "help": "folders above the speakers' folders (default: detected)",
    },
    **LIST_ARGUMENTS,
    "--same_session": {
        "action": "store_true",
        "help": "also make target trials within one session",
    },
    "--fast": {
        "action": "store_true",
        "dest": "is_fast",
        "help": "read headers only, no samples: silent recordings and copies stay in",
    },
    "--noise_path": {"type": Path, "help": "noise folder (MUSAN's layout) for augmentation"},
    "--rir_path": {"type": Path, "help": "room impulse responses for augmentation"},
    **FFMPEG_ARGUMENT,
    "--jobs": COMMON_ARGUMENTS["--jobs"],
}


def run(arguments: Namespace) -> int:
    """Prepare the folder and print what to do next: train from scratch, or fine-tune a model."""
    root = arguments.root
    # Checked first, so that nothing is made for a mistyped folder.
    if arguments.table is None and not root.is_dir():
        problem = "is a file, not a folder" if root.is_file() else "does not exist"
        raise ValueError(f"{root} {problem}; give the folder that contains the speakers' folders")
    # Through the environment, because whatever reads a recording may need ffmpeg.
    if arguments.ffmpeg:
        os.environ[FFMPEG_VARIABLE] = arguments.ffmpeg
    save_path = arguments.save_path or Path("data") / root.resolve().name
    with exclusive(save_path):
        return _prepare(arguments, save_path)


def _log_advice(arguments: Namespace, everyone: Path | None) -> None:
    """Log what can be done besides the commands that are printed."""
    # Not fetched automatically, because they take 12 GB.
    if arguments.noise_path is None or arguments.rir_path is None:
        logger.info(
            "augmentation helps most with few recordings: fetch noise and RIRs with %s and %s, "
            "then give --noise_path data/musan_split and --rir_path "
            "data/RIRS_NOISES/simulated_rirs here",
            own_command("prepare musan"),
            own_command("prepare rirs"),
        )
    logger.info(
        "the first command trains from scratch, the second fine-tunes MODEL.pt (models: "
        "docs/published.md)"
    )
    if everyone is not None:
        logger.info(
            "a published model needs neither: speakernet calibrate --model MODEL.pt --trials %s "
            "--audio %s",
            shlex.quote(str(everyone)),
            shlex.quote(str(arguments.root)),
        )


def _prepare(arguments: Namespace, save_path: Path) -> int:
    """Make lists, split, trials and configurations under `save_path`; returns the exit code."""
    root = arguments.root
    # Copies are dropped before conversion, which may take hours. What ffmpeg has to decode is
    # converted before the lists are made, so that only readable files are listed.
    scan = StepSummary("scan", save_path, "usable", "skipped", "left out")
    # In it, converted files are in the same folders as the originals; lists name them by absolute
    # paths.
    converted = (save_path / CONVERTED).resolve()
    listed, split_of = _list_recordings(arguments, scan)
    rows, conversions = _readable_rows(without_copies(listed, scan), root, converted)
    summaries = [scan]
    if conversions:
        conversion = StepSummary("convert", save_path)
        convert_all(conversions, "wav", arguments.num_jobs, conversion)
        summaries = [conversion, scan]
        # A failed conversion is counted as broken, and a list must not name a missing file.
        failed = {str(target) for _, target in conversions if not target.exists()}
        rows = [row for row in rows if row.name not in failed]
    options = dataclasses.replace(ListOptions.of(arguments, root, save_path), is_own=True)
    lists = prepare_lists(rows, options, scan, split_of)
    inputs = Inputs(root, lists, arguments.noise_path, arguments.rir_path)
    config = save_path / f"{save_path.resolve().name}.yaml"
    configs: list[Path | str] = [config]
    if lists.num_train <= LITTLE_DATA_UTTERANCES:
        configs = [LITTLE_DATA, config]
        write_little_data_lists(config, inputs)
    else:
        write_recipe(config, inputs)
    fine_tuning = config.with_name(f"{config.stem}_finetune.yaml")
    write_fine_tuning_lists(fine_tuning, inputs)
    logger.info(
        "%s of %s for training, %.2f hours",
        counted(lists.num_train, "utterance"),
        counted(lists.num_speakers, "speaker"),
        lists.hours,
    )
    code = finish(summaries, save_path / "summary.txt")
    _log_advice(arguments, lists.everyone)
    print_next_command(*configs)
    print_next_command(FINE_TUNING, fine_tuning, options="--initial_model MODEL.pt")
    return code


def _readable_rows(
    rows: Iterable[Row], root: Path, converted: Path
) -> tuple[list[Row], list[Conversion]]:
    """The rows as they can be read, and the (source, target) of what has to be converted first.
    Rows that only ffmpeg reads come last, with the names of their converted files.
    """
    # A table may have names in another Unicode form than the disk, and ffmpeg needs the disk's.
    on_disk = UnicodeNames(root).on_disk
    readable = []
    to_convert = []
    conversions = []
    for row in rows:
        path = Path(row.name)
        if path.suffix.lower() not in CONVERTIBLE_SUFFIXES:
            readable.append(row)
            continue
        # In the same folders, but never outside `converted`.
        folders = [part for part in path.parts[:-1] if part not in (path.anchor, "..")]
        # With the old suffix kept, so that a.m4a and a.aac differ.
        target = converted.joinpath(*folders, path.name + ".wav")
        to_convert.append(row._replace(name=str(target)))
        conversions.append((root / on_disk(row.name), target))
    return readable + to_convert, conversions


def without_copies(rows: Iterable[Row], scan: StepSummary) -> list[Row]:
    """One row for every recording: `0.m4a` beside `0.wav` or `0.m4a.wav` is the same recording in
    another format.

    A trial between the two would be trivial, so only the one that is easiest to read stays.
    """
    chosen: dict[tuple[str, str], Row] = {}
    copies = []
    for row in rows:
        key = (row.speaker, _without_suffixes(normal_name(row.name)))
        if key not in chosen:
            chosen[key] = row
            continue
        better, copy = sorted((chosen[key], row), key=_difficulty)
        chosen[key] = better
        copies.append(f"{copy.name} (beside {better.name})")
    if copies:
        scan.add(skipped=len(copies))
        logger.warning(
            "%s skipped as the same recording in another format: %s; rename them if they differ",
            counted(len(copies), "file"),
            ", ".join(copies[:MAX_NAMED]),
        )
    return list(chosen.values())


def _without_suffixes(name: str) -> str:
    """A name without its suffixes of audio: `a/0` for `a/0.m4a.wav`."""
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  called for every file
    return _without_suffixes(stem) if suffix.lower() in AUDIO_SUFFIXES else name


def _difficulty(row: Row) -> tuple[bool, bool, str]:
    """Orders copies: WAV and FLAC first, then what needs no ffmpeg."""
    suffix = Path(row.name).suffix.lower()
    # The name decides between equals, so that the order of files on the disk does not.
    return suffix not in WRITABLE, suffix in CONVERTIBLE_SUFFIXES, row.name


# Only its name tells what a folder holds. Folders called wav or audio are passed through; if those
# below are called train, dev or test, they are splits; everything else is a speaker. A mixture is
# refused rather than guessed at: a split taken for a speaker would make one class of hundreds of
# voices, and no error rate would show why.
def find_layout(root: Path, layout: str) -> Layout:
    """Where the speakers' folders are below `root`, judged by the names of the folders."""
    if layout == "speakers":
        return Layout(0)
    folder, depth = _below_containers(root, 0)
    names = _folders(folder)
    splits = [name for name in names if name.lower() in SPLIT_FOLDERS]
    if not splits and layout == "auto":
        return Layout(depth)
    if not splits or len(splits) < len(names):
        raise ValueError(
            f"{folder} contains {', '.join(names[:MAX_NAMED])}; expected only folders with "
            "names such as train, dev and test. If each is a speaker, give --layout speakers; "
            "otherwise give the folder that contains either parts or speakers"
        )
    # With train/wav/anna beside dev/bert, a common depth would take `wav` for a speaker.
    depths = {_below_containers(folder / name, depth + 1)[1] for name in splits}
    if len(depths) > 1:
        raise ValueError(
            f"the speakers' folders are at different depths in {', '.join(splits)}; give "
            "--speaker_depth"
        )
    return Layout(depths.pop(), None if layout == "pooled" else depth)


def _below_containers(folder: Path, depth: int) -> tuple[Path, int]:
    """The first folder, from this one on, that does not hold containers only, and its depth."""
    names = _folders(folder)
    # Containers side by side are taken to have their speakers at the same depth.
    if names and all(name.lower() in CONTAINERS for name in names):
        return _below_containers(folder / names[0], depth + 1)
    return folder, depth


def _folders(folder: Path) -> list[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name)
    )


def _list_recordings(
    arguments: Namespace, scan: StepSummary
) -> tuple[Iterator[Row], Callable[[str], str] | None]:
    """Rows of the table, or of the folder by pattern or layout; and the function that gives the
    split of a path, if the folder has splits.
    """
    ways = {
        "--csv": arguments.table is not None,
        "--pattern": arguments.pattern is not None,
        "--layout": arguments.layout != "auto",
        "--speaker_depth": arguments.speaker_depth is not None,
    }
    chosen = [option for option, is_chosen in ways.items() if is_chosen]
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} are different ways to name the speakers; give only one of them"
        )
    if arguments.table is not None:
        return listable_rows(_rows_of_table(arguments.table, scan), scan), None
    names = walk_recordings(arguments.root)
    if arguments.pattern is not None:
        return listable_rows(rows_by_pattern(names, arguments.pattern), scan), None
    if names and not any("/" in name for name in names):
        raise ValueError(
            f"{arguments.root} contains {len(names):,} recordings but no speakers' folders. If "
            "they are all of one speaker, give the folder above it, which has the other speakers' "
            "folders; if their names contain the speakers, give --pattern or --csv"
        )
    layout = _choose_layout(arguments, names)
    _warn_of_empty_folders(arguments.root, names, layout.depth)
    rows = listable_rows((row_by_folder(name, layout.depth) for name in names), scan)
    split_depth = layout.split_depth
    if split_depth is None:
        return rows, None

    def split_of(name: str) -> str:
        return SPLIT_FOLDERS[folders_of(name)[split_depth].lower()]

    return rows, split_of


def _choose_layout(arguments: Namespace, names: Sequence[str]) -> Layout:
    # With --speaker_depth, the user has decided which folders are the speakers.
    if arguments.speaker_depth is not None:
        return Layout(arguments.speaker_depth)
    layout = find_layout(arguments.root, arguments.layout)
    if layout.depth:
        logger.info(
            "the speakers' folders are at depth %d below %s; speakers %s",
            layout.depth,
            arguments.root,
            "are split again" if layout.split_depth is None else "keep their splits",
        )
    _refuse_one_level_too_high(arguments.root, names, layout.depth)
    return layout


def _refuse_one_level_too_high(root: Path, names: Sequence[str], depth: int) -> None:
    """Raise ValueError if all recordings are in one speaker's folder, but in several folders below
    it: these are more likely the speakers, and would count as sessions of a single one.
    """
    # The deepest folder that all names have in common.
    common = names[0].split("/")[:-1] if names else []
    for name in names:
        while common != name.split("/")[: len(common)]:
            common.pop()
    inner = {name.split("/")[len(common)] for name in names if name.count("/") > len(common)}
    if len(common) > depth and len(inner) > 1:
        folder = root.joinpath(*common)
        raise ValueError(
            f"{root} holds one folder with {len(inner)} folders; if these are the speakers, give "
            f"{folder}. If they are sessions of one speaker, add a second speaker beside it"
        )


def _rows_of_table(path: Path, scan: StepSummary) -> list[Row]:
    rows = list(read_table(path))
    distinct = distinct_rows(rows, path)
    num_repeated = len(rows) - len(distinct)
    if num_repeated:
        scan.add(skipped=num_repeated)
        logger.warning("%s: %d rows repeat a path and are skipped", path, num_repeated)
    return distinct


def _warn_of_empty_folders(root: Path, names: Sequence[str], depth: int) -> None:
    """Warn about speakers' folders without recordings, because these speakers are missing from the
    lists.
    """
    filled = {tuple(name.split("/")[: depth + 1]) for name in names}
    # `*` also finds hidden folders, which are left out below.
    paths = root.glob("/".join("*" * (depth + 1)))
    folders = [path.relative_to(root) for path in paths if path.is_dir()]
    empty = [
        folder.as_posix()
        for folder in sorted(folders)
        if folder.parts not in filled and not any(map(is_hidden, folder.parts))
    ]
    if empty:
        logger.warning(
            "%d of %d speakers' folders contain no readable recording: %s",
            len(empty),
            len(empty) + len(filled),
            ", ".join(empty[:MAX_NAMED]),
        )
