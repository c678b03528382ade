"""One's own voices: a folder of speakers, a table, or a pattern, turned into lists, trials and a configuration."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.corpora.conversion import Conversion, ConversionOptions, convert_all
from speakernet.corpora.listing import listable_rows, usable_utterances, write_lists
from speakernet.corpora.pairing import PairRules
from speakernet.corpora.recipe import write_recipe
from speakernet.corpora.splits import MIN_FOR_SAME_GENDER, MIN_HELD_OUT_SPEAKERS, Split, split_speakers
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import (
    Row,
    Utterances,
    pattern_rule,
    read_table,
    row_by_folder,
    row_by_pattern,
)
from speakernet.corpora.walking import CONVERTIBLE_SUFFIXES, READABLE_SUFFIXES, walk_files
from speakernet.data.ffmpeg import find_ffmpeg

logger = logging.getLogger(__name__)

#: Folders of these names hold parts of a corpus, not speakers.
PART_NAMES = frozenset(
    {"train", "training", "dev", "development", "test", "testing", "eval", "evaluation", "val", "valid", "validation"}
    | {"wav", "wavs", "flac", "audio", "data", "speech"}
)


@dataclass(frozen=True)
class FolderOptions:
    """What the user asked for; see `data_prep/folder.py --help`."""

    root: Path
    save_path: Path
    table: Path | None = None
    pattern: str | None = None
    speaker_depth: int | None = None
    validation_share: float = 0.1
    test_share: float = 0.1
    targets_per_speaker: int = 50
    allow_same_session: bool = False
    same_gender: bool = False
    min_seconds: float = 0.5
    seed: int = 10
    num_jobs: int = 1
    ffmpeg: str | None = None
    noise_path: Path | None = None
    rir_path: Path | None = None


def prepare_folder(options: FolderOptions) -> tuple[Path, list[StepSummary]]:
    """Make lists, split, trials and configuration under `save_path`.

    Returns:
        The configuration, and what each step found.

    Raises:
        ValueError: too few speakers or utterances, or a table that cannot be read.
    """
    summaries: list[StepSummary] = []
    options.save_path.mkdir(parents=True, exist_ok=True)
    with StepSummary("scan", options.save_path) as scan:
        rows: Iterator[Row] = _with_conversions(_rows(options, scan), options, summaries)
        utterances, lookup = usable_utterances(rows, options.root, options.min_seconds, options.num_jobs, scan)
        if not len(utterances):
            raise ValueError(
                f"none of the {scan.broken} files under {options.root} can be used; the first: {scan.first_broken[:1]}"
            )
    summaries.append(scan)
    fewest = MIN_FOR_SAME_GENDER if options.same_gender else MIN_HELD_OUT_SPEAKERS
    split = split_speakers(utterances, options.seed, options.validation_share, options.test_share, fewest)
    rules = PairRules(other_session=_avoid_same_session(utterances, split, options), same_gender=options.same_gender)
    lists = write_lists(
        options.save_path,
        utterances,
        split,
        seed=options.seed,
        rules=rules,
        median_seconds=float(np.median(lookup.seconds)),
        targets_per_speaker=options.targets_per_speaker,
    )
    config = options.save_path / f"{options.save_path.resolve().name}.yaml"
    write_recipe(config, options.root, lists, noise_path=options.noise_path, rir_path=options.rir_path)
    logger.info(
        "%d utterances of %d speakers for training, %.1f hours in all", lists.num_train, lists.num_speakers,
        float(lookup.seconds.sum()) / 3600,
    )  # fmt: skip
    return config, summaries


def guess_depth(root: Path) -> int:
    """How many folders lie above the speakers: one where the top folders are named train, dev, test and the like."""
    depth = 0
    folder = root
    while True:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if not names or not all(name.lower() in PART_NAMES for name in names):
            return depth
        depth += 1
        folder = folder / names[0]


def _rows(options: FolderOptions, summary: StepSummary) -> Iterator[Row]:
    """Rows of the table, or of the folder by pattern or by its folders."""
    if options.table is not None:
        table = list(read_table(options.table))
        return listable_rows(table, (row.name for row in table), summary)
    if not options.root.is_dir():
        raise ValueError(f"there is no folder {options.root}; give the folder that holds the speakers' folders")
    names = list(walk_files(options.root, READABLE_SUFFIXES | CONVERTIBLE_SUFFIXES))
    if options.pattern is not None:
        rule = pattern_rule(options.pattern)
        return listable_rows((row_by_pattern(rule, name) for name in names), names, summary)
    depth = guess_depth(options.root) if options.speaker_depth is None else options.speaker_depth
    if depth and options.speaker_depth is None:
        logger.info(
            "the top folders of %s are parts of a corpus; the speakers are taken from %d below", options.root, depth
        )
    return listable_rows((row_by_folder(name, depth) for name in names), names, summary)


def _with_conversions(rows: Iterator[Row], options: FolderOptions, summaries: list[StepSummary]) -> Iterator[Row]:
    """Convert what soundfile cannot read into `save_path/converted`; those rows then name the converted file."""
    plain: list[Row] = []
    foreign: list[Row] = []
    for row in rows:
        (foreign if Path(row.name).suffix.lower() in CONVERTIBLE_SUFFIXES else plain).append(row)
    if not foreign:
        return iter(plain)
    folder = (options.save_path / "converted").resolve()
    conversions = [Conversion(options.root / row.name, folder / _converted_name(row.name)) for row in foreign]
    with StepSummary("convert", options.save_path) as summary:
        convert_all(
            conversions,
            ConversionOptions(find_ffmpeg(options.ffmpeg)),
            options.num_jobs,
            summary,
            total=len(conversions),
        )
    summaries.append(summary)
    made = [
        row._replace(name=str(one.target)) for row, one in zip(foreign, conversions, strict=True) if one.target.exists()
    ]
    return iter(plain + made)


def _converted_name(name: str) -> Path:
    """Where a converted file goes: the same folders below, the old suffix kept so that a.m4a and a.aac stay apart."""
    parts = [part for part in Path(name).parts if part not in (Path(name).anchor, "..")]
    return Path(*parts[:-1], parts[-1] + ".wav")


def _avoid_same_session(utterances: Utterances, split: Split, options: FolderOptions) -> bool:
    """Whether target trials within a session can be left out: only if held-out speakers have several sessions."""
    if options.allow_same_session:
        return False
    for rows in (split.validation, split.test):
        pairs = np.unique(np.stack([utterances.labels[rows], utterances.sessions[rows]]), axis=1)
        if (
            len(rows)
            and pairs.shape[1] == len(np.unique(utterances.labels[rows]))
            and (utterances.sessions[rows] >= 0).all()
        ):
            logger.warning(
                "every held-out speaker has one session only: target trials are made within it, so the error rate is "
                "flattered by room and microphone"
            )
            return False
    return True
