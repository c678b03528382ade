"""CN-Celeb 1 and 2: download, unpack, join short utterances by session, write lists and the
published trials.

    speakernet prepare cnceleb --save_path data --download --join
    speakernet prepare cnceleb --save_path data         lists only

Lists go to data/cnceleb_lists, with paths relative to data; cnceleb_trials.txt has the published
trials (CNC-Eval). A third of the utterances are shorter than two seconds; as in wespeaker,
utterances of one speaker, genre and session that are shorter than five seconds can be joined, in
order, until they last that long.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from speakernet.corpora.listing import CORPUS_ARGUMENTS, DOWNLOAD_ARGUMENTS, prepare_public
from speakernet.corpora.steps import Folder, StepSummary, audio_seconds
from speakernet.corpora.utterances import Row
from speakernet.data.audio import SAMPLE_RATE, AudioError, audio_info, read_audio, write_audio
from speakernet.data.folders import walk_files
from speakernet.data.lists import ListError, write_trials
from speakernet.files import parallel_map

logger = logging.getLogger(__name__)

# FLAC releases first: the published trials are taken from the first folder that exists.
CORPORA = ("CN-Celeb_flac", "CN-Celeb2_flac", "CN-Celeb", "CN-Celeb2")
JOINED_FOLDER = "CN-Celeb_joined"
DEFAULT_JOIN_SECONDS = 5.0


ARGUMENTS = {
    **CORPUS_ARGUMENTS,
    "--download": {"action": "store_true", "help": "fetch and unpack what is missing"},
    "--join": {
        "action": "store_true",
        "help": "join the short utterances of a session, as wespeaker does",
    },
    "--join_seconds": {
        "type": float,
        "default": DEFAULT_JOIN_SECONDS,
        "help": "join utterances shorter than this",
    },
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    lists = arguments.save_path / "cnceleb_lists"
    joining = [StepSummary("join", lists)] if arguments.join else []

    def rows(root: Path) -> Iterable[Row]:
        write_published_trials(root, lists / "cnceleb_trials.txt")
        found = cnceleb_rows(root)
        return (
            join_short(found, root, arguments.num_jobs, joining[0], arguments.join_seconds)
            if joining
            else found
        )

    return prepare_public("cnceleb", arguments, rows, more=joining)


def cnceleb_rows(root: Path) -> Iterator[Row]:
    """Utterances of the training speakers below `root`; the session is the genre and recording in
    the file's name.

    Evaluation speakers, which are not in `dev/dev.lst` of CN-Celeb 1, are left out.
    """
    corpora = [name for name in CORPORA if (root / name / "data").is_dir()]
    if not corpora:
        raise ValueError(
            f"{root} has none of the folders {', '.join(CORPORA)}; give their parent folder, or "
            "use --download"
        )
    for corpus in corpora:
        listed = root / corpus / "dev" / "dev.lst"
        wanted = None
        # CN-Celeb 2 has no such list: all its speakers are for training.
        if listed.is_file():
            wanted = {
                line.split()[0]
                for line in listed.read_text(encoding="utf-8").splitlines()
                if line.strip()
            }
        for name in walk_files(root / corpus / "data", {".flac", ".wav"}):
            speaker, _, file_name = name.partition("/")
            if file_name and "/" not in file_name and (wanted is None or speaker in wanted):
                # singing-02-013.flac: genre, recording, utterance.
                yield Row(
                    speaker, f"{corpus}/data/{name}", file_name.rsplit(".", 1)[0].rpartition("-")[0]
                )


def join_short(
    rows: Iterable[Row], root: Path, num_jobs: int, summary: StepSummary, join_seconds: float
) -> list[Row]:
    """Join utterances shorter than `join_seconds` within a session; returns the new rows.

    Joined files are below `root`/CN-Celeb_joined and are made once; long utterances stay where they
    are.
    """
    target = Folder(root / JOINED_FOLDER)
    # Rows are sorted by name, so the files of a session are adjacent.
    sessions = (
        list(group) for _, group in groupby(rows, key=lambda row: (row.speaker, row.session))
    )

    def join(session: list[Row]) -> list[Row]:
        seconds = {}
        for row in session:
            try:
                seconds[row] = audio_info(root / row.name).seconds
            except AudioError as error:
                summary.add_broken(row.name, str(error))
        short = [row for row in seconds if seconds[row] < join_seconds]
        kept = [row for row in seconds if row not in short]
        for number, group in enumerate(
            groups_of_length([seconds[row] for row in short], join_seconds)
        ):
            members = [short[one] for one in group]
            path = target.path(f"{members[0].speaker}/{members[0].session}-joined{number:03d}.flac")
            # A second run only compares lengths. A difference of a millisecond per file is rounding
            # in resampling; a larger one means that a different tool made the file.
            found = audio_seconds(path, SAMPLE_RATE)
            is_there = found is not None and abs(
                found - sum(seconds[row] for row in members)
            ) <= 1e-3 * len(group)
            if not is_there:
                write_audio(
                    path,
                    np.concatenate([read_audio(root / row.name) for row in members]),
                    SAMPLE_RATE,
                )
            summary.add(not is_there, is_there)
            kept.append(members[0]._replace(name=path.relative_to(root).as_posix()))
        return kept

    return [
        row
        for kept in parallel_map(join, sessions, num_jobs, "join", unit="session")
        for row in kept
    ]


def groups_of_length(seconds: list[float], wanted_seconds: float) -> list[list[int]]:
    """Groups of consecutive indices that last at least `wanted_seconds`; a remainder joins the last
    group.

    >>> groups_of_length([2, 2, 2, 4, 1, 1], 5)
    [[0, 1, 2], [3, 4, 5]]
    """
    groups: list[list[int]] = [[]]
    for row in range(len(seconds)):
        if sum(seconds[one] for one in groups[-1]) >= wanted_seconds:
            groups.append([])
        groups[-1].append(row)
    # As in wespeaker: a remainder of a second or two would be useless on its own.
    if len(groups) > 1 and sum(seconds[one] for one in groups[-1]) < wanted_seconds:
        rest = groups.pop()
        groups[-1] += rest
    return groups if groups[0] else []


def write_published_trials(root: Path, path: Path) -> None:
    """Write the published trials with file names on both sides, relative to `root`, if the
    evaluation set exists.
    """
    found = [
        root / name for name in CORPORA if (root / name / "eval" / "lists" / "trials.lst").is_file()
    ]
    if not found:
        logger.warning(
            "no CN-Celeb folder in %s has eval/lists/trials.lst: the published trials are not "
            "written",
            root,
        )
        return
    lists = found[0] / "eval" / "lists"

    def existing(name: str) -> str:
        # The lists have .wav names, but the FLAC release has .flac files.
        stem = f"{found[0].name}/eval/{name.rsplit('.', 1)[0]}"
        return next(
            (stem + one for one in (".wav", ".flac") if (root / (stem + one)).is_file()),
            stem + ".wav",
        )

    def fields_of(name: str, expected: str) -> Iterator[list[str]]:
        for number, line in enumerate(
            (lists / name).read_text(encoding="utf-8").splitlines(), start=1
        ):
            fields = line.split()
            if fields and len(fields) < len(expected.split()):
                raise ListError(
                    f"{lists / name}, line {number}: expected '{expected}', found {line!r}"
                )
            if fields:
                yield fields

    enrolments = {name: existing(file) for name, file, *_ in fields_of("enroll.lst", "name path")}

    def rows() -> Iterator[tuple[int, str, str]]:
        for name, test, label, *_ in fields_of("trials.lst", "enrolment test 0|1"):
            if name not in enrolments or label not in ("0", "1"):
                raise ListError(
                    f"{lists / 'trials.lst'}: expected 'enrolment test 0|1', found '{name} {test} "
                    f"{label}'"
                )
            yield int(label), enrolments[name], existing(test)

    write_trials(path, rows())
