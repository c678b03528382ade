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

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from speakernet.corpora.listing import (
    COMMON_ARGUMENTS,
    FINE_TUNING,
    LIST_ARGUMENTS,
    LITTLE_DATA,
    LITTLE_DATA_UTTERANCES,
    SCANNED,
    listable_rows,
    prepare_lists,
    print_next_command,
    write_fine_tuning_lists,
    write_little_data_lists,
    write_recipe,
)
from speakernet.corpora.steps import StepSummary, convert_all, finish
from speakernet.corpora.utterances import (
    NUM_EXAMPLES,
    Row,
    distinct_rows,
    pattern_rule,
    read_table,
    row_by_folder,
    row_by_pattern,
)
from speakernet.data.audio import AUDIO_SUFFIXES, CONVERTIBLE_SUFFIXES, SAMPLE_RATE, WRITABLE
from speakernet.data.ffmpeg import FFMPEG_VARIABLE
from speakernet.data.folders import LeftOut, UnicodeNames, is_hidden, walk_files
from speakernet.data.names import normal_name
from speakernet.files import exclusive, own_command
from speakernet.terminal import counted

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
    """How many folders are above the speakers' folders, and which of them names the split (None: no
    splits).
    """

    depth: int
    split_depth: int | None = None


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
    "--noise_path": {"type": Path, "help": "noise folder (MUSAN's layout) for augmentation"},
    "--rir_path": {"type": Path, "help": "room impulse responses for augmentation"},
    "--ffmpeg": {"help": "ffmpeg to use (default: the one on the PATH)"},
    "--jobs": COMMON_ARGUMENTS["--jobs"],
}


def run(arguments: argparse.Namespace) -> int:
    """Prepare the folder and print what to do next: train from scratch, or fine-tune a model."""
    # Checked first, so that nothing is made for a mistyped folder.
    if arguments.table is None and not arguments.root.is_dir():
        raise ValueError(
            f"{arguments.root} "
            f"{'is a file, not a folder' if arguments.root.is_file() else 'does not exist'}; give "
            "the folder that contains the speakers' folders"
        )
    if arguments.ffmpeg:
        os.environ[FFMPEG_VARIABLE] = arguments.ffmpeg
    save_path = arguments.save_path or Path("data") / arguments.root.resolve().name
    options = argparse.Namespace(**vars(arguments) | {"save_path": save_path})
    with exclusive(save_path):
        configs, fine_tuning, summaries = prepare_folder(options)
        code = finish(summaries, save_path / "summary.txt")
    # Not fetched automatically, because they take 12 GB.
    if options.noise_path is None or options.rir_path is None:
        logger.info(
            "augmentation helps most with few recordings: fetch noise and RIRs with %s and %s, "
            "then give --noise_path data/musan_split and --rir_path "
            "data/RIRS_NOISES/simulated_rirs here",
            own_command("prepare musan"), own_command("prepare rirs"),
        )  # fmt: skip
    logger.info(
        "the first command trains from scratch, the second fine-tunes MODEL.pt (models: "
        "docs/published.md)"
    )
    print_next_command(*configs)
    print_next_command(Path(FINE_TUNING), fine_tuning, options="--initial_model MODEL.pt")
    return code


def prepare_folder(options: argparse.Namespace) -> tuple[list[Path], Path, list[StepSummary]]:
    """Make lists, split, trials and configurations under `save_path`.

    Returns:
        The configurations that train from scratch, the one for fine-tuning, and a summary of each
        step.
    """
    summaries = []
    scan = StepSummary("scan", options.save_path, *SCANNED)
    listed, split_of = _rows(options, scan)
    rows = without_copies(listed, scan)
    on_disk = UnicodeNames(options.root).on_disk
    pairs = {
        row: (
            options.root / on_disk(row.name),
            _converted_folder(options) / _converted_name(row.name),
        )
        for row in rows
        if Path(row.name).suffix.lower() in CONVERTIBLE_SUFFIXES
    }
    if pairs:
        summaries.append(StepSummary("convert", options.save_path))
        convert_all(pairs.values(), "wav", SAMPLE_RATE, options.num_jobs, summaries[0])
    found = [row for row in rows if row not in pairs]
    found += [
        row._replace(name=str(target)) for row, (_, target) in pairs.items() if target.exists()
    ]
    lists = prepare_lists(found, options, scan, split_of)
    config = options.save_path / f"{options.save_path.resolve().name}.yaml"
    fine_tuning = config.with_name(f"{config.stem}_finetune.yaml")
    sets = {"noise_path": options.noise_path, "rir_path": options.rir_path}
    is_little = lists.num_train <= LITTLE_DATA_UTTERANCES
    (write_little_data_lists if is_little else write_recipe)(config, options.root, lists, **sets)
    write_fine_tuning_lists(fine_tuning, options.root, lists, **sets)
    logger.info(
        "%s of %s for training, %.1f hours in total",
        counted(lists.num_train, "utterance"),
        counted(lists.num_speakers, "speaker"),
        lists.hours,
    )
    return [Path(LITTLE_DATA), config] if is_little else [config], fine_tuning, [*summaries, scan]


def without_copies(rows: Iterable[Row], scan: StepSummary) -> list[Row]:
    """One row for every recording: `0.m4a` beside `0.wav` or `0.m4a.wav` is the same recording in
    another format.

    A trial between the two would be trivial, so only the one that is easiest to read stays.
    """
    chosen: dict[tuple[str, str], Row] = {}
    copies = []
    for row in rows:
        key = (row.speaker, _without_suffixes(normal_name(row.name)))
        known = chosen.setdefault(key, row)
        if known is not row:
            better, copy = sorted((known, row), key=_difficulty)
            chosen[key] = better
            copies.append(f"{copy.name} (beside {better.name})")
    if copies:
        scan.add(skipped=len(copies))
        logger.warning(
            "%s skipped as the same recording in another format: %s; rename them if they differ",
            counted(len(copies), "file"),
            ", ".join(copies[:NUM_EXAMPLES]),
        )
    return list(chosen.values())


def _without_suffixes(name: str) -> str:
    """A name without its suffixes of audio: `a/0` for `a/0.m4a.wav`."""
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  called for every file
    while suffix.lower() in AUDIO_SUFFIXES:
        name = stem
        stem, suffix = os.path.splitext(name)  # noqa: PTH122
    return name


def _difficulty(row: Row) -> tuple[bool, bool, str]:
    """Orders copies: WAV and FLAC first, then what needs no ffmpeg."""
    suffix = Path(row.name).suffix.lower()
    return suffix not in WRITABLE, suffix in CONVERTIBLE_SUFFIXES, row.name


def find_layout(root: Path, wanted: str = "auto") -> Layout:
    """Where the speakers' folders are below `root`, judged by the names of the folders."""
    if wanted == "speakers":
        return Layout(0)
    depth, folder = _below_containers(root, 0)
    names = _folders(folder)
    splits = [name for name in names if name.lower() in SPLIT_FOLDERS]
    if not splits and wanted == "auto":
        return Layout(depth)
    if not splits or len(splits) < len(names):
        raise ValueError(
            f"{folder} contains {', '.join(names[:NUM_EXAMPLES])}; expected only folders with "
            "names such as train, dev and test. If each is a speaker, give --layout speakers; "
            "otherwise give the folder that contains either parts or speakers"
        )
    # With train/wav/anna beside dev/bert, a common depth would take `wav` for a speaker.
    depths = {_below_containers(folder / name, depth + 1)[0] for name in splits}
    if len(depths) > 1:
        raise ValueError(
            f"the speakers' folders are at different depths in {', '.join(splits)}; give "
            "--speaker_depth"
        )
    return Layout(depths.pop(), None if wanted == "pooled" else depth)


def _below_containers(folder: Path, depth: int) -> tuple[int, Path]:
    while (names := _folders(folder)) and all(name.lower() in CONTAINERS for name in names):
        depth = depth + 1
        folder = folder / names[0]
    return depth, folder


def _folders(folder: Path) -> list[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name)
    )


def _rows(
    options: argparse.Namespace, scan: StepSummary
) -> tuple[Iterator[Row], Callable[[str], str] | None]:
    """Rows of the table, or of the folder by pattern or layout; and the function that gives the
    split of a path.
    """
    chosen = {
        "csv": options.table is not None,
        "pattern": options.pattern is not None,
        "layout": options.layout != "auto",
        "speaker_depth": options.speaker_depth is not None,
    }
    if sum(chosen.values()) > 1:
        named = " and ".join(f"--{name}" for name, is_given in chosen.items() if is_given)
        raise ValueError(f"{named} are different ways to name the speakers; give only one of them")
    if options.table is not None:
        table = list(read_table(options.table))
        distinct = distinct_rows(table, options.table)
        if num_repeated := len(table) - len(distinct):
            scan.add(skipped=num_repeated)
            logger.warning("%s: %d rows repeat a path and are skipped", options.table, num_repeated)
        return listable_rows(distinct, (row.name for row in distinct), scan), None
    left_out = LeftOut()
    names = list(walk_files(options.root, AUDIO_SUFFIXES, left_out))
    left_out.log(options.root)
    if options.pattern is not None:
        rule = pattern_rule(options.pattern)
        return listable_rows((row_by_pattern(rule, name) for name in names), names, scan), None
    if names and not any("/" in name for name in names):
        raise ValueError(
            f"{options.root} contains {len(names):,} recordings but no speakers' folders. If they "
            "are all of one speaker, give the folder above it, which has the other speakers' "
            "folders; if their names contain the speakers, give --pattern or --csv"
        )
    depth = options.speaker_depth
    layout = find_layout(options.root, options.layout) if depth is None else Layout(depth)
    if layout.depth and options.speaker_depth is None:
        kept = "keep their splits" if layout.split_depth is not None else "are split again"
        logger.info(
            "the speakers' folders are at depth %d below %s; speakers %s",
            layout.depth,
            options.root,
            kept,
        )
    _warn_of_empty_folders(options.root, names, layout.depth)
    # A generator, so that names that cannot be listed are counted once, while it is consumed.
    rows = listable_rows((row_by_folder(name, layout.depth) for name in names), names, scan)
    # Converted files have absolute names, with the same folders below the folder of converted
    # files.
    split_depth = layout.split_depth
    converted = f"{_converted_folder(options)}/"

    def split_of(name: str) -> str:
        return SPLIT_FOLDERS[name.removeprefix(converted).split("/")[split_depth or 0].lower()]

    return rows, None if split_depth is None else split_of


def _warn_of_empty_folders(root: Path, names: Sequence[str], depth: int) -> None:
    """Warn about speakers' folders without recordings, because these speakers are missing from the
    lists.
    """
    filled = {"/".join(name.split("/")[: depth + 1]) for name in names}
    folders = (
        path.relative_to(root).as_posix()
        for path in root.glob("/".join("*" * (depth + 1)))
        if path.is_dir()
    )
    shown = (name for name in folders if not any(map(is_hidden, name.split("/"))))
    empty = sorted(name for name in shown if name not in filled)
    if empty:
        logger.warning(
            "%d of %d speakers' folders contain no readable recording: %s",
            len(empty),
            len(empty) + len(filled),
            ", ".join(empty[:NUM_EXAMPLES]),
        )


def _converted_folder(options: argparse.Namespace) -> Path:
    return (options.save_path / "converted").resolve()


def _converted_name(name: str) -> Path:
    """Where a converted file goes: in the same folders, with the old suffix kept so that a.m4a and
    a.aac differ.
    """
    pieces = [piece for piece in Path(name).parts if piece not in (Path(name).anchor, "..")]
    return Path(*pieces[:-1], pieces[-1] + ".wav")
