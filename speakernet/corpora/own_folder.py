"""Your own voices, ready to train: lists, a speaker-disjoint split, trials, a configuration, and the next command.

One folder a speaker, sessions in folders below it if you have them:

    my_voices/anna/monday/1.wav    my_voices/bert/2.flac

the same below folders named train, dev or test, whose speakers are then kept apart as they are (--layout pooled takes
them together), or a table with the headings path,speaker[,session,gender] (--csv), or a regular expression over the
paths with the groups speaker and, optionally, session and gender (--pattern '(?P<speaker>[^_]+)_(?P<session>[^_]+)_').
WAV, FLAC, OGG and MP3 are used where they lie; m4a, aac, webm and the like are converted first (needs ffmpeg).

    speakernet prepare folder my_voices
    speakernet prepare folder my_voices --part 2/4     a quarter of the files; the last part to be done writes the lists
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from speakernet.corpora.commands import add_jobs_argument, add_list_arguments, chosen, say_next
from speakernet.corpora.conversion import Conversion, ConversionOptions, convert_all
from speakernet.corpora.folder_parts import FOLDER as PARTS_FOLDER
from speakernet.corpora.folder_parts import WORK_SUFFIX, Voices, do_part, join_parts, missing_of
from speakernet.corpora.listing import ListOptions, listable_rows, prepare_lists, read_headers
from speakernet.corpora.recipe import (
    FINE_TUNING,
    LITTLE_DATA,
    LITTLE_DATA_UTTERANCES,
    write_fine_tuning_lists,
    write_little_data_lists,
    write_recipe,
)
from speakernet.corpora.summary import StepSummary, finish
from speakernet.corpora.utterances import NUM_EXAMPLES, Row, pattern_rule, read_table, row_by_folder, row_by_pattern
from speakernet.corpora.walking import READABLE_SUFFIXES, walk_files
from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES, find_ffmpeg
from speakernet.files import WHOLE, WorkPart, add_part_argument, exclusive, list_parts, own_command, parse_part

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "speakers", "parts", "pooled")
#: Folders of these names hold parts of a corpus, not speakers.
PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "development", "val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
#: Folders of these names hold neither: the speakers, or the parts, lie in them.
CONTAINERS = frozenset({"wav", "wavs", "flac", "audio", "data", "speech"})


@dataclass(frozen=True)
class FolderOptions(ListOptions):
    """What the user asked for.

    Attributes:
        table: CSV or TSV that names speakers, in place of the folders.
        pattern: regular expression over the paths, likewise.
        layout: one of LAYOUTS; `auto` keeps parts apart where the top folders are named so.
        speaker_depth: folders above the speakers'; None finds out.
        ffmpeg: the ffmpeg to use; None takes the one on the PATH.
        noise_path: noise for augmentation, into the configuration.
        rir_path: room impulse responses, likewise.
    """

    table: Path | None = None
    pattern: str | None = None
    layout: str = "auto"
    speaker_depth: int | None = None
    ffmpeg: str | None = None
    noise_path: Path | None = None
    rir_path: Path | None = None


class Layout(NamedTuple):
    """How many folders lie above the speakers', and which of them names the part (None: there are no parts)."""

    depth: int
    part_depth: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of this part."""
    help_text = "the folder that holds the voices; paths in lists are relative to it"
    parser.add_argument("root", metavar="folder", type=Path, help=help_text)
    parser.add_argument(
        "--save_path", type=Path, help="where lists and configuration go (default: data/NAME OF THE FOLDER)"
    )
    help_text = "table with the headings path,speaker[,session,gender]"
    parser.add_argument("--csv", type=Path, dest="table", help=help_text)
    parser.add_argument("--pattern", help="regular expression over relative paths with a group named speaker")
    help_text = (
        "speakers: the top folders are speakers; parts: they are train, dev and test, kept apart; pooled: they are, "
        "but their speakers are split anew; auto: by their names"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default=FolderOptions.layout, help=help_text)
    parser.add_argument("--speaker_depth", type=int, help="folders above the speakers' folders (default: found out)")
    add_list_arguments(parser)
    parser.add_argument("--same_session", action="store_true", help="also make target trials within one session")
    parser.add_argument("--noise_path", type=Path, help="noise folder (MUSAN's layout) for augmentation")
    parser.add_argument("--rir_path", type=Path, help="room impulse responses for augmentation")
    parser.add_argument("--ffmpeg", help="ffmpeg to use (default: the one on the PATH)")
    add_part_argument(parser, "give all the same folder, options and --save_path; the last to be done writes the lists")
    add_jobs_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prepare the folder and say what to do next: train from scratch, or from a model that there is."""
    # Before anything is made for a folder that is a slip of the pen.
    if arguments.table is None and not arguments.root.is_dir():
        raise ValueError(f"there is no folder {arguments.root}; give the folder that holds the speakers' folders")
    save_path = arguments.save_path or Path("data") / arguments.root.resolve().name
    options = chosen(FolderOptions, arguments, save_path=save_path)
    part = parse_part(arguments.part) if arguments.part else WHOLE
    if not part.is_whole and (missing := prepare_part(options, part)):
        logger.info("part %s is prepared; the parts %s are missing", part, list_parts(missing))
        return 0
    # The last two of the parts may be done at the same moment: both write the same.
    with exclusive(save_path, waits=not part.is_whole):
        config, recipe, summaries = prepare_folder(options, part)
        code = finish(summaries, save_path / "summary.txt")
    # Not fetched unasked: 12 GB.
    if options.noise_path is None or options.rir_path is None:
        logger.info(
            "augmentation teaches much where recordings are few: %s and %s bring noise and room responses, then "
            "--noise_path data/musan_split and --rir_path data/RIRS_NOISES/simulated_rirs here",
            own_command("prepare musan"), own_command("prepare rirs"),
        )  # fmt: skip
    logger.info("the first command trains from scratch, the second starts from a model (docs/models.md: MODEL.pt)")
    say_next(*(Path(one) for one in (recipe, config) if one))
    say_next(Path(FINE_TUNING), _fine_tuning_lists(config), options="--initial_model MODEL.pt")
    return code


def _fine_tuning_lists(config: Path) -> Path:
    return config.with_name(f"{config.stem}_finetune.yaml")


def prepare_part(options: FolderOptions, part: WorkPart) -> list[WorkPart]:
    """Convert one part's files and read its headers, for whichever part is the last to write lists from.

    Returns:
        The parts that are not done yet.

    Raises:
        ValueError: a folder that cannot be prepared, another process that does this part, or parts of another number.
    """
    folder = options.save_path / PARTS_FOLDER
    work = folder / (part.name + WORK_SUFFIX)
    # A lock of its own: the parts work beside each other.
    with exclusive(work):
        with StepSummary("scan", work) as scan:
            voices = _voices(_rows(options, scan)[0], options)
        do_part(
            voices,
            part,
            folder,
            lambda some, where: _convert(some, options, where),
            lambda names: read_headers(names, options.root, options.num_jobs),
        )
    return missing_of(folder)


def prepare_folder(options: FolderOptions, part: WorkPart = WHOLE) -> tuple[Path, str, list[StepSummary]]:
    """Make lists, split, trials and configuration under `save_path`.

    Args:
        options: what the user asked for.
        part: the last of several parts that `prepare_part` has done; the whole does their work too.

    Returns:
        The configuration, the recipe that it needs before it (empty: none), and what each step found.

    Raises:
        ValueError: too few speakers or utterances, parts that share speakers, or a table that cannot be read.
    """
    summaries: list[StepSummary] = []
    lookup = None
    with StepSummary("scan", options.save_path, made="usable") as scan:
        rows, part_of = _rows(options, scan)
        voices = _voices(rows, options)
        if not part.is_whole:
            prepared = join_parts(voices, options.save_path / PARTS_FOLDER, options.save_path)
            summaries += [prepared.conversion] if prepared.conversion else []
            found, lookup = prepared.rows, prepared.lookup
        else:
            if voices.conversions:
                summaries.append(_convert(voices.conversions, options, options.save_path))
            found = voices.converted()
        lists = prepare_lists(found, options, scan, part_of, lookup)
    summaries.append(scan)
    config = options.save_path / f"{options.save_path.resolve().name}.yaml"
    sets = {"noise_path": options.noise_path, "rir_path": options.rir_path}
    is_little = lists.num_train <= LITTLE_DATA_UTTERANCES
    (write_little_data_lists if is_little else write_recipe)(config, options.root, lists, **sets)
    write_fine_tuning_lists(_fine_tuning_lists(config), options.root, lists, **sets)
    logger.info(
        "%d utterances of %d speakers for training, %.1f hours in all",
        *(lists.num_train, lists.num_speakers, lists.hours),
    )
    return config, LITTLE_DATA if is_little else "", summaries


def find_layout(root: Path, wanted: str = "auto") -> Layout:
    """Where the speakers' folders lie below `root`, told from the names of the folders.

    Raises:
        ValueError: folders named as parts beside others, or no parts where parts are wanted.
    """
    if wanted == "speakers":
        return Layout(0)
    depth, folder = _below_containers(root, 0)
    names = _folders(folder)
    parts = [name for name in names if name.lower() in PARTS]
    if not parts:
        if wanted != "auto":
            raise ValueError(f"--layout {wanted}: {folder} holds no folders named train, dev, test or the like")
        return Layout(depth)
    if len(parts) < len(names):
        others = sorted(set(names) - set(parts))
        raise ValueError(
            f"{folder} holds folders named as parts of a corpus ({', '.join(parts)}) beside others "
            f"({', '.join(others[:NUM_EXAMPLES])}): if each is a speaker, say --layout speakers, else give the folder "
            "that holds either parts or speakers"
        )
    # train/wav/anna beside dev/bert: one depth for both would take `wav` for a speaker.
    depths = {_below_containers(folder / name, depth + 1)[0] for name in parts}
    if len(depths) > 1:
        raise ValueError(f"the speakers lie at another depth in each of {', '.join(parts)}; say --speaker_depth")
    return Layout(depths.pop(), None if wanted == "pooled" else depth)


def _below_containers(folder: Path, depth: int) -> tuple[int, Path]:
    while (names := _folders(folder)) and all(name.lower() in CONTAINERS for name in names):
        depth, folder = depth + 1, folder / names[0]
    return depth, folder


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _rows(options: FolderOptions, scan: StepSummary) -> tuple[Iterator[Row], Callable[[str], str] | None]:
    """Rows of the table, or of the folder by pattern or by its folders; and what tells the part of a path."""
    named = [f"--{name}" for name, given in (("csv", options.table), ("pattern", options.pattern)) if given]
    if options.layout != "auto" and (named or options.speaker_depth is not None):
        raise ValueError(f"--layout and {', '.join(named or ['--speaker_depth'])} both tell the speakers; give one")
    if options.table is not None:
        table = list(read_table(options.table))
        return listable_rows(table, (row.name for row in table), scan), None
    names = list(walk_files(options.root, READABLE_SUFFIXES | CONVERTIBLE_SUFFIXES))
    if options.pattern is not None:
        rule = pattern_rule(options.pattern)
        return listable_rows((row_by_pattern(rule, name) for name in names), names, scan), None
    if names and not any("/" in name for name in names):
        raise ValueError(
            f"{options.root} holds {len(names)} recordings and no folder for each speaker. If all are one speaker's, "
            "give the folder above it, with other speakers' folders beside it; if their names tell the speakers, "
            "give --pattern or --csv"
        )
    if options.speaker_depth is None:
        layout = find_layout(options.root, options.layout)
    else:
        layout = Layout(options.speaker_depth)
    if layout.depth and options.speaker_depth is None:
        kept = "are kept apart as they are" if layout.part_depth is not None else "are split anew"
        logger.info("the speakers are taken from %d folders below %s and %s", layout.depth, options.root, kept)
    _name_empty_folders(options.root, names, layout.depth)
    # A generator: what a list cannot hold is counted while it is walked, once.
    rows = listable_rows((row_by_folder(name, layout.depth) for name in names), names, scan)
    if layout.part_depth is None:
        return rows, None
    # Converted files are named by their whole path, below which their folders are as they were.
    part_depth, converted = layout.part_depth, f"{_converted_folder(options)}/"
    return rows, lambda name: PARTS[name.removeprefix(converted).split("/")[part_depth].lower()]


def _name_empty_folders(root: Path, names: Sequence[str], depth: int) -> None:
    """Tell of speakers' folders without a recording: somebody who was meant to be there is not."""
    filled = {"/".join(name.split("/")[: depth + 1]) for name in names}
    folders = (path.relative_to(root).as_posix() for path in root.glob("/".join("*" * (depth + 1))) if path.is_dir())
    empty = sorted(name for name in folders if name not in filled and not name.startswith("."))
    if empty:
        logger.warning(
            "%d of %d speakers' folders hold no recording that can be read: %s",
            *(len(empty), len(empty) + len(filled), ", ".join(empty[:NUM_EXAMPLES])),
        )


def _voices(rows: Iterator[Row], options: FolderOptions) -> Voices:
    """What soundfile can read, and what is converted first into `save_path/converted`."""
    kinds: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        kinds[Path(row.name).suffix.lower() in CONVERTIBLE_SUFFIXES].append(row)
    folder = _converted_folder(options)
    foreign = kinds[1]
    return Voices(*kinds, [Conversion(options.root / row.name, folder / _converted_name(row.name)) for row in foreign])


def _convert(conversions: Sequence[Conversion], options: FolderOptions, summary_folder: Path) -> StepSummary:
    with StepSummary("convert", summary_folder) as summary:
        convert_all(
            conversions,
            ConversionOptions(find_ffmpeg(options.ffmpeg)),
            options.num_jobs,
            summary,
            total=len(conversions),
        )
    return summary


def _converted_folder(options: FolderOptions) -> Path:
    return (options.save_path / "converted").resolve()


def _converted_name(name: str) -> Path:
    """Where a converted file goes: the same folders below, the old suffix kept so that a.m4a and a.aac stay apart."""
    parts = [part for part in Path(name).parts if part not in (Path(name).anchor, "..")]
    return Path(*parts[:-1], parts[-1] + ".wav")
