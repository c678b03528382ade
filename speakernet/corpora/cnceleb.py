"""CN-Celeb 1 and 2: download, unpack, join short utterances by session, write lists and the
published trials.

    speakernet prepare cnceleb --save_path data --download --join
    speakernet prepare cnceleb --save_path data         lists only

Lists go to data/cnceleb_lists, with paths relative to data. The published trials (CNC-Eval) are
written twice: cnceleb_trials.txt has each person's concatenated enrolment, cnceleb_avg_trials.txt
names models, whose recordings are in cnceleb_enrolment.txt (`data.enrolment_list`). A third of the
utterances are shorter than two seconds; as in wespeaker, utterances of one speaker, genre and
session that are shorter than five seconds can be joined, in order, until they last that long.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from speakernet.corpora.listing import PUBLIC_ARGUMENTS, prepare_public
from speakernet.corpora.steps import Folder, StepSummary, audio_seconds
from speakernet.corpora.utterances import Row, rows_of_corpus
from speakernet.data.audio import SAMPLE_RATE, AudioError, audio_info, read_audio, write_audio
from speakernet.data.lists import ListError, read_enrolment, write_enrolment, write_trials
from speakernet.files import parallel_map

logger = logging.getLogger(__name__)

# FLAC releases first: the published trials are taken from the first folder that exists.
CORPORA = ("CN-Celeb_flac", "CN-Celeb2_flac", "CN-Celeb", "CN-Celeb2")
#: id00011/singing-02-013.flac: speaker, then genre and recording (the session), and utterance.
RECORDING = r"^(?P<speaker>[^/]+)/(?:(?P<session>[^/]*)-)?[^-/]*$"
JOINED_FOLDER = "CN-Celeb_joined"
DEFAULT_JOIN_SECONDS = 5.0

ARGUMENTS = PUBLIC_ARGUMENTS | {
    "--join": {
        "action": "store_true",
        "help": "join the short utterances of a session, as wespeaker does",
    },
    "--join_seconds": {
        "type": float,
        "default": DEFAULT_JOIN_SECONDS,
        "help": "join utterances shorter than this",
    },
}


def run(arguments: argparse.Namespace) -> int:
    lists = arguments.save_path / "cnceleb_lists"
    summary = StepSummary("join", lists)

    def rows_of(root: Path) -> Iterable[Row]:
        write_published_trials(root, lists)
        rows = cnceleb_rows(root)
        if not arguments.join:
            return rows
        return join_short(rows, root, arguments.num_jobs, summary, arguments.join_seconds)

    further = [summary] if arguments.join else []
    return prepare_public("cnceleb", arguments, rows_of, further_summaries=further)


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
        dev_list = root / corpus / "dev" / "dev.lst"
        # CN-Celeb 2 has no such list: all its speakers are for training.
        speakers = None
        if dev_list.is_file():
            speakers = set(dev_list.read_text("utf-8").split())
        for row in rows_of_corpus(root, f"{corpus}/data", RECORDING):
            if speakers is None or row.speaker in speakers:
                yield row


def join_short(
    rows: Iterable[Row], root: Path, num_jobs: int, summary: StepSummary, join_seconds: float
) -> list[Row]:
    """Join utterances shorter than `join_seconds` within a session; returns the new rows.

    Joined files are below `root`/CN-Celeb_joined and are made once; long utterances stay where they
    are.
    """
    # A third of the utterances are shorter than a crop of two seconds and would be repeated to fill
    # it. Only those of one session are joined, so that speaker, room and microphone stay the same.
    target = Folder(root / JOINED_FOLDER)
    # Rows are sorted by name, so the files of a session are adjacent.
    by_session = groupby(rows, key=lambda row: (row.speaker, row.session))
    sessions = (list(group) for _, group in by_session)

    def join(session: list[Row]) -> list[Row]:
        kept = []
        short = []
        seconds = []
        for row in session:
            try:
                row_seconds = audio_info(root / row.name).seconds
            except AudioError as error:
                summary.add_broken(row.name, str(error))
                continue
            if row_seconds < join_seconds:
                short.append(row)
                seconds.append(row_seconds)
            else:
                kept.append(row)
        for number, group in enumerate(groups_of_length(seconds, join_seconds)):
            first = short[group[0]]
            path = target.path(f"{first.speaker}/{first.session}-joined{number:03d}.flac")
            # A second run only compares lengths. A difference of a millisecond per file is rounding
            # in resampling; a larger one means that a different tool made the file.
            difference = (audio_seconds(path, SAMPLE_RATE) or 0) - sum(
                seconds[row] for row in group
            )
            is_there = abs(difference) <= 1e-3 * len(group)
            if not is_there:
                waveforms = [read_audio(root / short[row].name) for row in group]
                write_audio(path, np.concatenate(waveforms), SAMPLE_RATE)
            summary.add(not is_there, is_there)
            kept.append(first._replace(name=path.relative_to(root).as_posix()))
        return kept

    joined: list[Row] = []
    for session_rows in parallel_map(join, sessions, num_jobs, "join", unit="session"):
        joined += session_rows
    return joined


def groups_of_length(seconds: list[float], min_seconds: float) -> list[list[int]]:
    """Groups of consecutive indices that last at least `min_seconds`; a remainder joins the last
    group.

    >>> groups_of_length([2, 2, 2, 4, 1, 1], 5)
    [[0, 1, 2], [3, 4, 5]]
    >>> groups_of_length([1, 1], 5)
    [[0, 1]]
    """
    groups = []
    group: list[int] = []
    total = 0.0
    for row, row_seconds in enumerate(seconds):
        group.append(row)
        total += row_seconds
        if total >= min_seconds:
            groups.append(group)
            group = []
            total = 0.0
    # As in wespeaker: a remainder of a second or two would be useless on its own.
    if group and groups:
        groups[-1] += group
    elif group:
        groups.append(group)
    return groups


def write_published_trials(root: Path, lists: Path) -> None:
    """Write the published trials with paths relative to `root`, if the evaluation set exists: with
    concatenated enrolments, and with models and their recordings.
    """
    folders = [root / name / "eval" for name in CORPORA]
    folders = [folder for folder in folders if (folder / "lists" / "trials.lst").is_file()]
    if not folders:
        logger.warning(
            "no CN-Celeb folder in %s has eval/lists/trials.lst: the published trials are not "
            "written",
            root,
        )
        return
    folder = folders[0]
    published = folder / "lists"

    def existing(name: str, below: Path = folder) -> str:
        # The lists have .wav names, but the FLAC release has .flac files.
        wav = below / name
        flac = wav.with_suffix(".flac")
        return (flac if flac.is_file() else wav).relative_to(root).as_posix()

    # Looked up once here, because each enrolment occurs in many trials.
    enrolments = {
        name: existing(file) for name, file in _fields(published / "enroll.lst", "name path")
    }

    def rows() -> Iterator[tuple[int, str, str]]:
        trials = published / "trials.lst"
        expected = "enrolment test 0|1"
        for name, test, label in _fields(trials, expected):
            if name not in enrolments or label not in ("0", "1"):
                raise ListError(f"{trials}: expected '{expected}', found '{name} {test} {label}'")
            yield int(label), name, existing(test)

    # Each model has several recordings, and the corpus also has one file with all of them joined.
    # 3D-Speaker's recipe embeds the joined file, wespeaker's published table uses the mean of the
    # embeddings; to compare with either, both lists are written.
    concatenated = ((label, enrolments[name], test) for label, name, test in rows())
    write_trials(lists / "cnceleb_trials.txt", concatenated)
    recordings = published / "enroll.map"
    if not recordings.is_file():
        logger.warning(
            "%s is missing: only trials of concatenated enrolments are written", recordings
        )
        return
    models, _ = read_enrolment(recordings)
    corpus = folder.parent / "data"
    pairs = []
    for model, names in models.items():
        pairs += [(model.decode(), existing(name.decode(), corpus)) for name in names]
    write_enrolment(lists / "cnceleb_enrolment.txt", pairs)
    write_trials(lists / "cnceleb_avg_trials.txt", rows())


def _fields(path: Path, expected: str) -> Iterator[list[str]]:
    """The first fields of every line that is not empty, as many as `expected` names."""
    count = len(expected.split())
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        fields = line.split()
        if fields and len(fields) < count:
            raise ListError(f"{path}, line {number}: expected '{expected}', found {line!r}")
        if fields:
            yield fields[:count]
