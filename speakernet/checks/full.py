"""Everything that can be said about lists, audio and machine before a run, in order; `speakernet doctor` shows it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np

from speakernet.checks.findings import Finding
from speakernet.checks.gathering import AudioFacts, ListedAudio, gather, gather_part
from speakernet.checks.headers import header_findings
from speakernet.checks.machine import disk_finding, machine_findings
from speakernet.checks.quick import quick_check
from speakernet.checks.samples import renamed_findings, sample_findings, shared_findings, trial_findings
from speakernet.data.audio import SAMPLE_RATE
from speakernet.data.ffmpeg import CONVERTIBLE_SUFFIXES
from speakernet.data.lists import (
    ListError,
    MalformedRows,
    StringTable,
    TrainingList,
    TrialList,
    read_training_list,
    read_trials,
)
from speakernet.data.opening import open_source
from speakernet.data.options import LoadingOptions
from speakernet.data.sources import AudioSource
from speakernet.parts import WHOLE, WorkPart

ListType = TypeVar("ListType", TrainingList, TrialList)


@dataclass(frozen=True)
class CheckRequest:
    """What to check, and how thoroughly.

    Attributes:
        train_list: the training list.
        train_root: its folder or packed corpus; None leaves the files unchecked.
        trials: (trial list, root) pairs.
        save_path: where a run would write.
        min_utterances: utterances a speaker needs for the loss in use.
        min_seconds: shorter files are named.
        max_bad_share: share of missing training files up to which they are a warning only.
        sample_rate: Hz that training takes.
        is_fast: read headers only, no samples.
        num_jobs: files read at once.
    """

    train_list: Path | None = None
    train_root: Path | None = None
    trials: tuple[tuple[Path, Path | None], ...] = ()
    save_path: Path = Path("exps")
    min_utterances: int = 1
    min_seconds: float = 0.5
    max_bad_share: float = LoadingOptions().max_bad_share
    sample_rate: int = SAMPLE_RATE
    is_fast: bool = False
    num_jobs: int = 1


@dataclass
class CheckResult:
    """The findings, and the durations in seconds of every list whose audio was looked at.

    With parts `missing`, which other machines have not done yet, there are none.
    """

    findings: list[Finding] = field(default_factory=list)
    durations: dict[str, np.ndarray] = field(default_factory=dict)
    missing: Sequence[WorkPart] = ()


def full_check(request: CheckRequest, part: WorkPart = WHOLE, folder: Path | None = None) -> CheckResult:
    """Run every check that the request allows; what lists and files hold becomes findings, never an error.

    Args:
        request: what, and how thoroughly.
        part: of several machines, which look at the files of the lists together, this one's.
        folder: where they leave what they found.

    Raises:
        PartError: the parts in the folder do not belong together.
    """
    result = CheckResult()
    findings = result.findings
    training = _read(request.train_list, read_training_list, "training list", findings)
    source = _open(request.train_root, request.sample_rate, "training files", findings)
    trials = []
    for path, root in request.trials:
        one = _read(path, read_trials, "trial list", findings)
        if one is not None:
            trials.append((one, _open(root, request.sample_rate, "trial files", findings)))
    tables = ([(training.paths, source, "training audio")] if training is not None else []) + [
        (one.names, one_source, f"trial audio ({Path(one.source).name})") for one, one_source in trials
    ]
    lists = [ListedAudio(names, where, check) for names, where, check in tables if where is not None]
    is_fast, num_jobs = request.is_fast, request.num_jobs
    if part.is_whole or folder is None:
        gathered = [gather(one, is_fast=is_fast, num_jobs=num_jobs) for one in lists]
    else:
        gathered, missing = gather_part(lists, part, folder, is_fast=is_fast, num_jobs=num_jobs)
        if missing:
            return CheckResult(missing=missing)
    known = {id(one.names): facts for one, facts in zip(lists, gathered, strict=True)}
    findings += quick_check(
        train_list=training,
        train_source=known.get(id(training.paths)) if training is not None else None,
        trials=[(one, known.get(id(one.names))) for one, _ in trials],
        min_utterances=request.min_utterances,
        max_bad_share=request.max_bad_share,
        # Looked at below, with more to say.
        reads_headers=False,
    )
    lists_of_trials = {id(one.names): one for one, _ in trials}
    for audio, facts in zip(lists, gathered, strict=True):
        is_training = training is not None and audio.names is training.paths
        _check_audio(result, request, audio, facts, training.labels if training is not None and is_training else None)
        if (one := lists_of_trials.get(id(audio.names))) is not None and facts.samples is not None:
            result.findings += trial_findings(one, facts.good, facts.samples, audio.check)
    result.findings += _shared(lists, gathered, None if training is None else training.paths)
    needs_ffmpeg = any(_names_foreign_files(names) for names, _, _ in tables)
    findings += machine_findings(request.save_path, needs_ffmpeg=needs_ffmpeg)
    return result


def _read(
    path: Path | None, read: Callable[[Path, MalformedRows], ListType], check: str, findings: list[Finding]
) -> ListType | None:
    """The list without the rows that training would refuse, which are named all at once."""
    if path is None:
        return None
    malformed = MalformedRows()
    found, problem = None, ""
    try:
        found = read(path, malformed)
    except ListError as error:
        problem = str(error)
    if malformed.count:
        message = f"{malformed.count:,} malformed rows in {path}"
        findings.append(Finding("error", check, message, "mend or remove them", tuple(malformed.first)))
    elif problem:
        findings.append(Finding("error", check, problem))
    return found


def _open(root: Path | None, sample_rate: int, check: str, findings: list[Finding]) -> AudioSource | None:
    if root is None:
        return None
    try:
        return open_source(root, sample_rate, show_progress=True)
    except (ValueError, OSError) as error:
        advice = "give the folder (or packed corpus) that the list's paths start from"
        findings.append(Finding("error", check, str(error), advice))
        return None


def _check_audio(
    result: CheckResult, request: CheckRequest, audio: ListedAudio, facts: AudioFacts, labels: np.ndarray | None
) -> None:
    names, check, rows = audio.names, audio.check, facts.good
    result.findings += header_findings(names, facts.lookup, check, min_seconds=request.min_seconds)
    if not len(rows):
        return
    result.durations[check] = facts.lookup.seconds[rows]
    good = _good(names, facts)
    result.findings.append(disk_finding(audio.source, good, f"{check}: disk"))
    if facts.samples is not None:
        result.findings += sample_findings(good, facts.samples, check, None if labels is None else labels[rows])


def _shared(
    lists: Sequence[ListedAudio], gathered: Sequence[AudioFacts], training: StringTable | None
) -> list[Finding]:
    """What two lists both hold, told by the samples."""
    read = {id(one.names): (_good(one.names, facts), facts.samples) for one, facts in zip(lists, gathered, strict=True)}
    known, samples = read.get(id(training), (None, None))
    findings = []
    if known is not None and samples is not None:
        for one in lists:
            names, own = read[id(one.names)]
            if one.names is not training and own is not None:
                findings += shared_findings((known, samples), (names, own), one.check)
    for first, second in itertools.combinations([one for one in lists if one.names is not training], 2):
        (names, own), (others, found) = read[id(first.names)], read[id(second.names)]
        if own is not None and found is not None:
            findings += renamed_findings((names, own), (others, found), (first.check, second.check))
    return findings


def _good(names: StringTable, facts: AudioFacts) -> StringTable:
    """The files whose headers are good."""
    rows = facts.good
    return names if len(rows) == len(names) else names.take(rows)


def _names_foreign_files(names: StringTable) -> bool:
    return any(PurePath(name).suffix.lower() in CONVERTIBLE_SUFFIXES for name in names)
