"""The quick checks that training runs before its first step: lists, files, headers, speakers. Reads no audio.

Everything that would stop or spoil a run hours later and that a look at names can tell: malformed rows, missing files,
speakers in both training and trials, speakers with too few utterances, trial lists with one kind of trial.
"""

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Protocol

import numpy as np

from speakernet.checks.findings import Finding
from speakernet.checks.headers import header_findings
from speakernet.data.audio import AUDIO_SUFFIXES
from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES
from speakernet.data.list_identity import identify_trials
from speakernet.data.lists import StringTable, TrainingList, TrialList, one_word, repeated_trials
from speakernet.data.sources import AudioSource
from speakernet.files import own_command
from speakernet.terminal import MAX_NAMED

NAMES_OF_AUDIO = {*AUDIO_SUFFIXES, *CONVERTIBLE_SUFFIXES}


class FileSource(Protocol):
    """What the checks need of an audio source: which of the names it does not have."""

    def missing(self, names: StringTable) -> Sequence[int] | np.ndarray:
        """Rows of `names` that are not there."""


def quick_check(
    *,
    train_list: TrainingList | None,
    train_source: FileSource | None,
    trials: Iterable[tuple[TrialList, FileSource | None]],
    min_utterances: int,
    max_bad_share: float,
    reads_headers: bool = True,
) -> list[Finding]:
    """Check lists against each other and against their files.

    Args:
        train_list: the training list; None checks trials alone.
        train_source: its audio; None leaves the files unchecked.
        trials: (trial list, its audio) pairs.
        min_utterances: utterances a speaker needs for the loss in use (2 for metric losses).
        max_bad_share: share of missing files up to which it is a warning only.
        reads_headers: also look at rates and durations, from the lookup tables that loading needs anyway (they are
            kept on disk, so only the first start reads the headers).

    Returns:
        Findings, the good ones too, in the order of the checks. Nothing is raised for what a list holds.
    """
    findings: list[Finding] = []
    if train_list is not None:
        if is_exchanged(train_list):
            found = f"{train_list.source} has the path first and the speaker second"
            return [Finding("error", "training list", found, "exchange them: expected `speaker path` lines")]
        if form := trial_form(train_list):
            # Its names are no files, and its speakers no speakers: more findings would only bury this one.
            advice = "name it as --test_list; --train_list takes `speaker path` lines, as the data preparation writes"
            return [Finding("error", "training list", f"{train_list.source} is a list of trials ({form})", advice)]
        findings += training_findings(train_list, min_utterances)
        findings += file_findings(train_list.paths, train_source, "training files", max_bad_share, reads_headers)
    for one, source in trials:
        findings += trial_findings(one)
        # One missing utterance makes every one of its trials, and so the figure, another.
        findings += file_findings(one.names, source, "trial files", 0.0, reads_headers)
        if train_list is not None:
            findings += overlap_findings(train_list, one)
    return findings


def training_findings(training: TrainingList, min_utterances: int) -> list[Finding]:
    """Size and balance of a training list, and paths that stand in it twice."""
    counts = np.bincount(training.labels, minlength=len(training.speakers))
    num_speakers = len(counts)
    size = (
        f"{len(training):,} utterances of {num_speakers:,} speakers, {counts.min()} to {counts.max()} each "
        f"(median {np.median(counts):.0f}) in {training.source}"
    )
    if num_speakers < 2:
        advice = "training tells speakers apart and needs at least two; is the first word of each line the speaker?"
        return [Finding("error", "speakers", size, advice)]
    findings = [Finding("ok", "speakers", size)]
    few = np.flatnonzero(counts < min_utterances)
    if len(few):
        findings.append(
            Finding(
                "warning",
                "few utterances",
                f"{len(few):,} speakers have fewer than the {min_utterances} utterances that a batch takes",
                "their utterances are repeated within a batch or left out; add recordings or drop the speakers",
                tuple(f"{training.speakers[row]} ({counts[row]})" for row in few[:MAX_NAMED]),
            )
        )
    # Hardly one person: rather a folder of everybody who was not named.
    if num_speakers > 2 and counts.max() > 100 * np.median(counts):
        largest = training.speakers[int(counts.argmax())]
        findings.append(
            Finding(
                "warning",
                "balance",
                f"speaker {largest} has {counts.max():,} utterances, the median speaker {np.median(counts):.0f}",
                "is this one person? cap it with data.max_utterances_per_speaker",
            )
        )
    repeated = repeated_rows(training.paths)
    if len(repeated):
        findings.append(
            Finding(
                "warning",
                "repeated rows",
                f"{len(repeated):,} rows name a path that stands in the list before",
                "the same recording counts twice, perhaps under two speakers; remove the rows",
                tuple(training.paths[row] for row in repeated[:MAX_NAMED]),
            )
        )
    return findings


def trial_findings(trials: TrialList) -> list[Finding]:
    """Size, kinds of trials and identity of a trial list."""
    size = f"{len(trials):,} trials over {len(trials.names):,} utterances in {trials.source}"
    if trials.labels is None:
        return [Finding("ok", "trials", size + ", unlabelled: scores only, no error rates")]
    num_targets = int(np.count_nonzero(trials.labels))
    size += f", {num_targets:,} of them targets"
    if num_targets in (0, len(trials)):
        kind = "non-target" if num_targets == 0 else "target"
        advice = f"an error rate needs both kinds; {own_command('prepare trials')} makes such lists"
        return [Finding("error", "trials", f"{size}: all are {kind} trials", advice)]
    findings = [Finding("ok", "trials", size)]
    if _labels_are_swapped(trials):
        message = "every target pairs two folders, every non-target two files of one"
        findings.append(Finding("warning", "labels", message, "1 is for one speaker and 0 for two: are they swapped?"))
    identity = identify_trials(trials)
    if identity:
        findings.append(Finding("ok", "trial identity", identity))
    _, contradicting = repeated_trials(trials)
    if len(contradicting):
        findings.append(
            Finding(
                "error",
                "labels",
                f"{len(contradicting):,} trials stand in the list with both labels",
                "one of the two is wrong: mend or remove them",
                tuple(
                    f"{trials.names[int(trials.enrol[row])]} {trials.names[int(trials.test[row])]}"
                    for row in contradicting[:MAX_NAMED]
                ),
            )
        )
    same = np.flatnonzero(trials.enrol == trials.test)
    if len(same):
        findings.append(
            Finding(
                "warning",
                "self trials",
                f"{len(same):,} trials pair an utterance with itself",
                "they are trivially right and flatter the figure; remove them",
                tuple(trials.names[int(trials.enrol[row])] for row in same[:MAX_NAMED]),
            )
        )
    return findings


def _labels_are_swapped(trials: TrialList) -> bool:
    """Whether a part of the names is equal in all non-targets and different in all targets, and none the other way."""
    parts = [name.split("/")[:-1] for name in trials.names]
    is_swapped = False
    for position in range(min(map(len, parts))):
        known: dict[str, int] = {}
        ids = np.array([known.setdefault(part[position], len(known)) for part in parts])
        is_same = ids[trials.enrol] == ids[trials.test]
        if np.array_equal(is_same, trials.labels == 1):
            return False
        is_swapped |= np.array_equal(is_same, trials.labels == 0)
    return is_swapped


def file_findings(
    names: StringTable,
    source: FileSource | None,
    check: str,
    tolerated_share: float,
    reads_headers: bool,
) -> list[Finding]:
    """Which of the named files are not there: how many, and the first ten; and what the others' headers say."""
    if source is None:
        return []
    missing = np.asarray(source.missing(names))
    findings = [_missing_finding(names, missing, check, tolerated_share)]
    if reads_headers and isinstance(source, AudioSource) and len(missing) < len(names):
        table = source.lookup_table(names)
        # No length is too short here: what is short is the doctor's to judge.
        findings += header_findings(
            names, table, check, min_seconds=0.0, known_missing=missing, tolerated_share=tolerated_share
        )
    return findings


def _missing_finding(names: StringTable, missing: np.ndarray, check: str, tolerated_share: float) -> Finding:
    if not len(missing):
        return Finding("ok", check, f"all {len(names):,} are there")
    share = len(missing) / len(names)
    advice = (
        "is the root right? the list's paths are taken from it"
        if share == 1
        else f"bring them back, or clean the list: {own_command('prepare trials')} clean LIST --root ROOT"
    )
    examples = tuple(names[int(row)] for row in missing[:MAX_NAMED])
    message = f"{len(missing):,} of {len(names):,} are missing"
    return Finding("warning" if share <= tolerated_share else "error", check, message, advice, examples)


def overlap_findings(training: TrainingList, trials: TrialList) -> list[Finding]:
    """Speakers and files that stand in both the training and the trial list.

    A trial list names no speakers; they are told from the folder that holds the speaker's name in the training paths,
    counted from the front and from the end of the path.
    """
    depths = speaker_depths(training)
    if not depths:
        shared_files = _shared_names(training.paths, trials.names)
        if len(shared_files):
            return [_overlap("files", [trials.names[row] for row in shared_files], trials)]
        message = f"no file of {trials.source} is in training; speakers cannot be told from these paths"
        return [Finding("ok", "overlap", message)]
    known = set(training.speakers)
    shared = {
        speaker
        for parts in (name.split("/") for name in trials.names)
        for depth in depths
        if -len(parts) <= depth < len(parts) and (speaker := one_word(parts[depth])) in known
    }
    if shared:
        return [_overlap("speakers", sorted(shared), trials)]
    return [Finding("ok", "overlap", f"no speaker of {trials.source} is in training")]


def trial_form(training: TrainingList, num_rows: int = 1000) -> str:
    """The form of a trial list that was read as a training list; empty for a list of `speaker path` lines."""
    rows = range(min(num_rows, len(training)))
    paths = [training.paths[row].split() for row in rows]
    firsts = [training.speakers[int(training.labels[row])] for row in rows]
    if all(first in ("0", "1") and len(path) == 2 for first, path in zip(firsts, paths, strict=True)):
        return "`1 enrol test` or `0 enrol test` a line"
    if all(len(path) == 2 and path[1] in ("target", "nontarget") for path in paths):
        return "`enrol test target` or `enrol test nontarget` a line"
    # A speaker may be called anything, but hardly by the name of an audio file.
    suffixes = {PurePosixPath(first).suffix.casefold() for first in firsts}
    return "`enrol test` a line" if suffixes <= NAMES_OF_AUDIO else ""


def is_exchanged(training: TrainingList, num_rows: int = 1000) -> bool:
    """Whether each line has an audio file first and one word behind it that names none."""
    rows = range(min(num_rows, len(training)))
    firsts = {PurePosixPath(training.speakers[int(training.labels[row])]).suffix.casefold() for row in rows}
    seconds = {PurePosixPath(training.paths[row]).suffix.casefold() for row in rows}
    marks = ("target", "nontarget")
    is_marked = any(word in training.paths[row].split() for row in rows for word in marks)
    return firsts <= NAMES_OF_AUDIO and not seconds & NAMES_OF_AUDIO and not is_marked


def speaker_depths(training: TrainingList, num_rows: int = 1000) -> list[int]:
    """Positions in the path (from the front, and negative from the end) where the training paths name the speaker."""
    rows = np.unique(np.linspace(0, len(training) - 1, min(num_rows, len(training))).astype(np.int64)).tolist()
    agreed: set[int] | None = None
    for row in rows:
        parts = training.paths[row].split("/")
        speaker = training.speakers[int(training.labels[row])]
        places = [place for place, part in enumerate(parts[:-1]) if one_word(part) == speaker]
        found = set(places) | {place - len(parts) for place in places}
        agreed = found if agreed is None else agreed & found
        if not agreed:
            return []
    return sorted(agreed or ())


def repeated_rows(names: StringTable) -> np.ndarray:
    """Rows whose name stands in an earlier row, int64, ascending."""
    hashes = _hashes(names)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    return np.sort(order[1:][ordered[1:] == ordered[:-1]])


def _hashes(names: StringTable) -> np.ndarray:
    # 64-bit hashes: a false match among a million names is a one-in-40-million affair, and it would only warn.
    return np.fromiter((hash(name) for name in names), dtype=np.int64, count=len(names))


def _shared_names(left: StringTable, right: StringTable) -> np.ndarray:
    return np.flatnonzero(np.isin(_hashes(right), _hashes(left)))


def _overlap(kind: str, shared: Sequence[str], trials: TrialList) -> Finding:
    return Finding(
        "warning",
        "overlap",
        f"{len(shared):,} {kind} of {trials.source} are also in the training list",
        "the error rate is not that of unknown speakers; use disjoint lists, as these are made: "
        + own_command("prepare folder"),
        tuple(shared[:MAX_NAMED]),
    )
