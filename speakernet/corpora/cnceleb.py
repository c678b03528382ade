"""CN-Celeb 1 and 2: training speakers, short utterances of one session joined, and the published trials.

A third of CN-Celeb's utterances are shorter than two seconds; as wespeaker does, those of one speaker, genre and
session can be joined, in order, until they last five. The evaluation's enrolments and tests are taken as published.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from speakernet.corpora.conversion import audio_seconds
from speakernet.corpora.safe_paths import Folder
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import Row
from speakernet.corpora.walking import walk_files
from speakernet.data.audio import SAMPLE_RATE, AudioError, audio_info, read_audio, write_audio
from speakernet.data.lists import ListError, write_trials
from speakernet.files import parallel_map

logger = logging.getLogger(__name__)

CORPORA = ("CN-Celeb_flac", "CN-Celeb2_flac", "CN-Celeb", "CN-Celeb2")
JOINED_FOLDER = "CN-Celeb_joined"
DEFAULT_JOIN_SECONDS = 5.0


def cnceleb_rows(root: Path) -> Iterator[Row]:
    """Utterances of the training speakers below `root`; the session is the genre and recording in the file's name.

    The evaluation's speakers, which `dev/dev.lst` of CN-Celeb 1 leaves out, are passed over.

    Raises:
        ValueError: no folder of CN-Celeb is here.
    """
    corpora = [name for name in CORPORA if (root / name / "data").is_dir()]
    if not corpora:
        raise ValueError(
            f"{root} holds none of {', '.join(CORPORA)}; give the folder that holds them, or use --download"
        )
    for corpus in corpora:
        wanted = _training_speakers(root / corpus)
        for name in walk_files(root / corpus / "data", {".flac", ".wav"}):
            parts = name.split("/")
            if len(parts) == 2 and (wanted is None or parts[0] in wanted):
                yield Row(parts[0], f"{corpus}/data/{name}", session_of(parts[1]))


def session_of(file_name: str) -> str:
    """Genre and recording of a file name.

    >>> session_of("singing-02-013.flac")
    'singing-02'
    """
    return file_name.rsplit(".", 1)[0].rpartition("-")[0]


def join_short(
    rows: Iterable[Row], root: Path, num_jobs: int, summary: StepSummary, join_seconds: float = DEFAULT_JOIN_SECONDS
) -> list[Row]:
    """Join utterances shorter than `join_seconds` within a session; the rows afterwards.

    Joined files lie below `root`/CN-Celeb_joined and are made once; long utterances stay where they are. What is left
    over at a session's end joins the file before it, or stands alone.
    """
    target = Folder(root / JOINED_FOLDER)
    sessions = (list(group) for _, group in groupby(rows, key=lambda row: (row.speaker, row.session)))

    def join(session: list[Row]) -> tuple[list[Row], int, int, list[tuple[str, str]]]:
        kept: list[Row] = []
        short: list[tuple[Row, float]] = []
        broken = []
        for row in session:
            try:
                seconds = audio_info(root / row.name).seconds
            except AudioError as error:
                broken.append((row.name, str(error)))
                continue
            if seconds < join_seconds:
                short.append((row, seconds))
            else:
                kept.append(row)
        made = skipped = 0
        for number, group in enumerate(groups_of_length([seconds for _, seconds in short], join_seconds)):
            first = short[group[0]][0]
            path = target.path(f"{first.speaker}/{first.session}-joined{number:03d}.flac")
            wanted = sum(short[member][1] for member in group)
            found = audio_seconds(path, SAMPLE_RATE)
            if found is None or abs(found - wanted) > 1e-3 * len(group):
                waveforms = [read_audio(root / short[member][0].name) for member in group]
                write_audio(path, np.concatenate(waveforms), SAMPLE_RATE)
                made += 1
            else:
                skipped += 1
            kept.append(first._replace(name=path.relative_to(root).as_posix()))
        return kept, made, skipped, broken

    joined: list[Row] = []
    for kept, made, skipped, broken in parallel_map(join, sessions, num_jobs, "join", unit="session"):
        joined += kept
        summary.add_made(made)
        summary.add_skipped(skipped)
        for name, reason in broken:
            summary.add_broken(name, reason)
    return joined


def groups_of_length(seconds: list[float], wanted_seconds: float) -> list[list[int]]:
    """Consecutive indices whose seconds add up to at least the wanted ones; a rest joins the last group.

    >>> groups_of_length([2, 2, 2, 4, 1, 1], 5)
    [[0, 1, 2], [3, 4, 5]]
    """
    groups: list[list[int]] = []
    current: list[int] = []
    total = 0.0
    for row, length in enumerate(seconds):
        current.append(row)
        total += length
        if total >= wanted_seconds:
            groups.append(current)
            current, total = [], 0.0
    if current and groups:
        groups[-1] += current
    elif current:
        groups.append(current)
    return groups


def write_published_trials(root: Path, path: Path) -> int:
    """The evaluation's trials with file names on both sides, relative to `root`; their number, 0 where it is not here.

    Raises:
        ListError: a trial names an enrolment that enroll.lst does not have.
    """
    found = [root / name for name in CORPORA if (root / name / "eval" / "lists" / "trials.lst").is_file()]
    if not found:
        logger.warning("%s holds no eval/lists/trials.lst: no published trials are written", root)
        return 0
    below = f"{found[0].name}/eval"
    lists = found[0] / "eval" / "lists"
    enrolments = {}
    for number, line in enumerate((lists / "enroll.lst").read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split()
        if fields:
            if len(fields) < 2:
                raise ListError(f"{lists / 'enroll.lst'}, line {number}: expected 'name path', found {line!r}")
            enrolments[fields[0]] = _existing(root, f"{below}/{fields[1]}")
    num_trials = 0

    def rows() -> Iterator[tuple[int, str, str]]:
        nonlocal num_trials
        with (lists / "trials.lst").open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                fields = line.split()
                if not fields:
                    continue
                if len(fields) != 3 or fields[0] not in enrolments or fields[2] not in ("0", "1"):
                    raise ListError(
                        f"{lists / 'trials.lst'}, line {number}: expected 'enrolment test 0|1', found {line!r}"
                    )
                num_trials += 1
                yield int(fields[2]), enrolments[fields[0]], _existing(root, f"{below}/{fields[1]}")

    write_trials(path, rows())
    return num_trials


def _existing(root: Path, name: str) -> str:
    """The name, with .flac for .wav (and the other way round) where only that exists: the lists say .wav."""
    if (root / name).is_file():
        return name
    for suffix in (".flac", ".wav"):
        other = name.rsplit(".", 1)[0] + suffix
        if (root / other).is_file():
            return other
    return name


def _training_speakers(corpus: Path) -> set[str] | None:
    """The speakers that CN-Celeb 1 publishes for training; None where the corpus says nothing (CN-Celeb 2: all)."""
    path = corpus / "dev" / "dev.lst"
    if not path.is_file():
        return None
    return {line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
