"""All checks of lists, audio and the machine before a run, for `speakernet doctor`."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar

import numpy as np

from speakernet.checks import Finding
from speakernet.checks.lists import overlap_findings, quick_check, trial_audio
from speakernet.checks.samples import (
    SampleFacts,
    read_facts,
    sample_findings,
    shared_findings,
    trial_findings,
)
from speakernet.data.audio import CONVERTIBLE_SUFFIXES, SAMPLE_RATE
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.ffmpeg import FfmpegError, ffmpeg_version, find_ffmpeg
from speakernet.data.joined import join
from speakernet.data.lists import (
    ListError,
    StringTable,
    TrainingList,
    TrialList,
    read_model_trials,
    read_training_list,
    read_trials,
)
from speakernet.data.opening import open_source
from speakernet.data.options import DataOptions
from speakernet.data.sources import AudioSource
from speakernet.evaluation.figures import (
    MAX_GROUP_DRAWS,
    few_speakers_note,
    speakers_of_half_the_targets,
)
from speakernet.evaluation.metrics import missing_kind
from speakernet.evaluation.shortcuts import (
    ADVICE,
    Quantity,
    describe,
    is_notable,
    quantities_of,
    shortcuts,
)
from speakernet.evaluation.speakers import speakers_of
from speakernet.files import human_bytes
from speakernet.machine.facts import (
    TORCH_PAIR,
    cpu_name,
    describe_limits,
    driver_version,
    gpu_facts,
    native_bf16,
    unusable_gpu,
    usable_cores,
    version_of,
)
from speakernet.options import DEFAULT_SEED
from speakernet.terminal import MAX_NAMED, counted

ListType = TypeVar("ListType", TrainingList, TrialList)

MIN_FREE_BYTES = 5 << 30
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30
"""Docker's default is 64 MiB, eight batches of 64 crops of 2 s in float32."""
ADVICE_ON_SHARED_MEMORY = (
    "workers may die with a bus error: start the container with --shm-size=8g, or use fewer workers"
)
IMPORT_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class CheckRequest:
    """What to check, and how thoroughly."""

    train_list: Path | None = None
    train_root: str | Path | None = None
    """Folder or packed corpus of the list; None leaves the files unchecked."""
    trials: tuple[tuple[Path, str | Path | None], ...] = ()
    """(trial list, root) pairs."""
    save_path: Path = Path("exps")
    min_utterances: int = 1
    min_seconds: float = 0.5
    max_bad_share: float = DataOptions().max_bad_share
    sample_rate: int = SAMPLE_RATE
    is_fast: bool = False
    """Read headers only."""
    num_jobs: int = 1
    enrolment: str = ""
    """Enrolment list of the models that trials name."""
    cohort_list: Path | None = None
    calibration_list: Path | None = None
    """Lists whose speakers should not be among the trials."""
    corpora: Mapping[str, tuple[Path, str | Path]] = field(default_factory=dict)
    """Name -> training list and its folder, if there are several."""


class _CheckedList(NamedTuple):
    """A list that could be read, and its audio if that could be opened."""

    listed: TrainingList | TrialList
    source: AudioSource | None
    check: str

    @property
    def names(self) -> StringTable:
        return self.listed.recordings if isinstance(self.listed, TrialList) else self.listed.paths


# Lists, names and headers are checked before the samples, which take longest to read. A list that
# cannot be read is a finding and does not end the other checks, so that one run of the doctor shows
# everything that has to be repaired.
def full_check(request: CheckRequest) -> list[Finding]:
    """Run every check that the request allows; defects of lists and files become findings, never
    exceptions.
    """
    findings: list[Finding] = []
    training, source = _read_training(request, findings)
    trials: list[tuple[TrialList, AudioSource | None]] = []

    def read(path: Path, malformed: list[str]) -> TrialList:
        return read_model_trials(path, request.enrolment, malformed)

    for path, root in request.trials:
        trial_list = _read(path, read, "trial list", findings)
        if trial_list is not None:
            trials.append((trial_list, _open(root, request.sample_rate, "trial audio", findings)))
    findings += quick_check(
        train_list=training,
        train_source=source,
        trials=trials,
        min_utterances=request.min_utterances,
        max_bad_share=request.max_bad_share,
        min_seconds=request.min_seconds,
    )
    checked: list[_CheckedList] = []
    if training is not None:
        checked.append(_CheckedList(training, source, "training audio"))
    for trial_list, audio in trials:
        checked.append(_CheckedList(trial_list, audio, trial_audio(trial_list)))
    # Kept to the end, to find recordings of the trials in the training audio.
    facts: dict[str, SampleFacts] = {}
    for item in checked:
        findings += _check_audio(item, request, facts)
    cohort = _read(request.cohort_list, read_training_list, "cohort", findings)
    fitted_on = _read(request.calibration_list, read_trials, "calibration list", findings)
    for trial_list, audio in trials:
        if cohort is not None:
            findings += overlap_findings(cohort, trial_list, "cohort")
        # Calibrating on the reported list itself is reported by the evaluation.
        if fitted_on is not None and fitted_on.sha256 != trial_list.sha256:
            findings += _calibration_findings(fitted_on, trial_list)
        findings += _shortcut_findings(trial_list, audio, facts.get(trial_audio(trial_list)))
    for first, second in itertools.combinations(facts, 2):
        findings += shared_findings(
            facts[first], facts[second], (first, second), renamed=first != "training audio"
        )
    # Most corpora need no ffmpeg, so its absence is a warning only if a list names a file that
    # needs it.
    needs_ffmpeg = any(
        PurePath(name).suffix.lower() in CONVERTIBLE_SUFFIXES
        for item in checked
        for name in item.names
    )
    findings += machine_findings(request.save_path, needs_ffmpeg=needs_ffmpeg)
    return findings


def augmentation_findings(
    options: AugmentOptions, sample_rate: int, *, is_fast: bool = False
) -> Iterator[Finding]:
    """Whether noise and RIRs of a configuration can be read; only their headers if `is_fast`."""
    # Late: it needs torch, and a doctor without configuration does not.
    from speakernet.data.augment.banks import open_noise, open_responses

    checks = (("noise", options.noise_path, open_noise), ("RIRs", options.rir_path, open_responses))
    for check, path, open_files in checks:
        if not path or not options.enabled:
            continue
        # The functions that training calls too, so the doctor accepts exactly what training does.
        try:
            files = open_files(path, sample_rate, is_fast=is_fast)
        except (ValueError, OSError) as error:
            yield Finding("error", check, str(error))
            continue
        if problem := files.left_out():
            advice = "restore or remove them; training leaves them out"
            yield Finding("warning", check, f"{path}: {problem}", advice)
        else:
            message = f"all {counted(len(files.names), 'file')} of {path} can be read"
            yield Finding("ok", check, message)


def _read_training(
    request: CheckRequest, findings: list[Finding]
) -> tuple[TrainingList | None, AudioSource | None]:
    """The training list and its audio, or those of several corpora joined."""
    rate = request.sample_rate
    # Joined as in training: only the joined list shows one recording under speakers of two corpora.
    corpora = {}
    for name, (path, root) in request.corpora.items():
        listed = _read(path, read_training_list, f"training list {name}", findings)
        audio = _open(root, rate, f"training audio {name}", findings)
        if listed is not None and audio is not None:
            corpora[name] = listed, audio
    if corpora:
        try:
            return join(corpora, DataOptions(sample_rate=rate))
        except ValueError as error:
            findings.append(Finding("error", "data.corpora", str(error)))
    training = _read(request.train_list, read_training_list, "training list", findings)
    return training, _open(request.train_root, rate, "training audio", findings)


def _check_audio(
    checked: _CheckedList, request: CheckRequest, facts: dict[str, SampleFacts]
) -> list[Finding]:
    """Unless only headers are read, check all samples; adds to `facts`."""
    listed, source, check = checked
    if source is None or request.is_fast:
        return []
    names = checked.names
    # Reading headers waits for the disk, which four readers per core keep busy.
    lookup = source.lookup_table(names, num_threads=4 * request.num_jobs)
    rows = np.setdiff1d(np.arange(len(names)), list(lookup.problems))
    if not len(rows):
        return []
    readable = names.take(rows) if lookup.problems else names
    facts[check] = read_facts(source, readable, request.num_jobs, check)
    if isinstance(listed, TrainingList):
        return sample_findings(facts[check], check, listed.labels[rows])
    findings = sample_findings(facts[check], check)
    return findings + trial_findings(listed, rows, facts[check], check)


def _calibration_findings(fitted_on: TrialList, trials: TrialList) -> list[Finding]:
    # Speakers are compared, not recordings: other recordings of the same people make thresholds
    # optimistic too.
    shared = sorted(set(speakers_of(trials).names).intersection(speakers_of(fitted_on).names))
    if not shared:
        return []
    number = counted(len(shared), "speaker")
    message = f"{number} of {trials.source} also in the calibration list {fitted_on.source}"
    advice = "thresholds and costs are optimistic; calibrate on other speakers"
    return [Finding("warning", "overlap", message, advice, tuple(shared[:MAX_NAMED]))]


def _shortcut_findings(
    trials: TrialList, source: AudioSource | None, facts: SampleFacts | None
) -> list[Finding]:
    """What decides on a labelled list besides the voices; `facts` if samples were read."""
    if trials.labels is None or missing_kind(trials.labels):
        return []
    name = PurePath(trials.source).name
    speakers = speakers_of(trials)
    quantities = []
    if speakers.sessions is not None:
        quantities.append(Quantity("session", speakers.sessions, is_category=True))
    if source is not None:
        table = source.lookup_table(trials.recordings)
        # With --fast no samples are read, so loudness stays unknown.
        levels_db = np.full(len(table), np.nan)
        if facts is not None:
            readable = np.setdiff1d(np.arange(len(table)), list(table.problems))
            with np.errstate(divide="ignore"):
                levels_db[readable] = 20 * np.log10(facts.rms)
        quantities += quantities_of(table, trials, levels_db)
    rows = shortcuts(trials, speakers, quantities, num_draws=MAX_GROUP_DRAWS, seed=DEFAULT_SEED)
    findings = []
    num_speakers = speakers_of_half_the_targets(trials, speakers)
    if few := few_speakers_note(num_speakers, int(np.count_nonzero(trials.labels))):
        advice = "add targets of other speakers, or fewer of these"
        findings.append(Finding("warning", f"speakers of {name}", few, advice))
    notable = [row for row in rows if is_notable(row)]
    for row in notable:
        findings.append(Finding("warning", f"shortcuts in {name}", describe(row), ADVICE))
    others = [f"{row.label} {row.eer_percent:.1f} %" for row in rows if row not in notable]
    if others:
        message = f"EER of each quantity alone: {', '.join(others)}"
        findings.append(Finding("ok", f"shortcuts in {name}", message))
    return findings


def _read(
    path: Path | None,
    read: Callable[[Path, list[str]], ListType],
    check: str,
    findings: list[Finding],
) -> ListType | None:
    """Read a list without its malformed rows, which together become one finding."""
    if path is None:
        return None
    # Without this list the reader stops at the first bad row. A wrong separator makes many, and a
    # few examples show which mistake it is.
    malformed: list[str] = []
    listed = None
    try:
        listed = read(path, malformed)
    except ListError as error:
        if not malformed:
            findings.append(Finding("error", check, str(error)))
    if malformed:
        message = f"{counted(len(malformed), 'malformed row')} in {path}"
        examples = tuple(malformed[:MAX_NAMED])
        findings.append(Finding("error", check, message, "correct or remove them", examples))
    return listed


def _open(
    root: str | Path | None, sample_rate: int, check: str, findings: list[Finding]
) -> AudioSource | None:
    try:
        # The root may also be a packed corpus or an address, so more can fail than a missing
        # folder.
        return None if root is None else open_source(root, sample_rate, show_progress=True)
    except (ValueError, OSError) as error:
        findings.append(Finding("error", check, str(error)))
        return None


def machine_findings(save_path: Path, *, needs_ffmpeg: bool = False) -> Iterator[Finding]:
    """Check the machine; `needs_ffmpeg` if the lists name files that only ffmpeg can decode."""
    yield Finding("ok", "limits", describe_limits())
    bf16 = native_bf16()
    computes = f"computes bf16 natively ({bf16})" if bf16 else "no native bf16"
    yield Finding("ok", "processor", f"{cpu_name()}; {computes}")
    path = save_path.absolute()
    # The run's folder usually does not exist yet, and the doctor must not create it, so its nearest
    # existing parent is checked.
    folder = next(place for place in (path, *path.parents) if place.exists())
    if not os.access(folder, os.W_OK):
        advice = "choose a different --training.save_path"
        yield Finding("error", "save path", f"{folder} is not writable", advice)
    advice = "checkpoints of a large model may not fit; free some space"
    yield _space_finding("free space", folder, MIN_FREE_BYTES, advice)
    if SHARED_MEMORY.is_dir():
        advice = ADVICE_ON_SHARED_MEMORY
        yield _space_finding("shared memory", SHARED_MEMORY, MIN_SHARED_BYTES, advice)
    try:
        ffmpeg = find_ffmpeg()
        yield Finding("ok", "ffmpeg", f"{ffmpeg_version(ffmpeg)} ({ffmpeg})")
    except FfmpegError as error:
        if needs_ffmpeg:
            advice = "the lists name files that only ffmpeg can decode"
            yield Finding("warning", "ffmpeg", str(error), advice)
        else:
            unneeded = "not found, but only needed for m4a and similar files (as in VoxCeleb2)"
            yield Finding("ok", "ffmpeg", unneeded)
    yield _torch_pair()
    yield _gpu_finding()


def _space_finding(check: str, folder: Path, min_bytes: int, advice: str) -> Finding:
    usage = shutil.disk_usage(folder)
    message = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} free in {folder}"
    if usage.free < min_bytes:
        return Finding("warning", check, message, advice)
    return Finding("ok", check, message)


def _gpu_finding() -> Finding:
    facts = gpu_facts()
    if not facts:
        # A GPU that torch cannot use (CPU build, old driver) is easily overlooked, because training
        # works without it, only slowly.
        problem, advice = unusable_gpu()
        if problem:
            return Finding("warning", "GPU", problem, advice)
        cores = counted(usable_cores(), "CPU core")
        return Finding("ok", "GPU", f"none; training runs on {cores}", advice)
    gpus = [f"{gpu['name']} ({human_bytes(gpu['memory_bytes'])})" for gpu in facts["gpus"]]
    driver = driver_version() or "unknown"
    return Finding("ok", "GPU", f"{', '.join(gpus)}; CUDA {facts['cuda']}; driver {driver}")


@functools.cache
def _torch_pair() -> Finding:
    """Whether torchaudio loads, tried in another process, because a mismatched pair may crash."""
    # A crash of a library built for another torch cannot be caught by `try`. Cached, because the
    # import takes seconds.
    versions = [
        f"{package} {version_of(package) or '(not installed)'}"
        for package in ("torch", "torchaudio")
    ]
    message = ", ".join(versions)
    command = [sys.executable, "-c", "import torchaudio"]
    try:
        outcome = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        slow = f"{message}: torchaudio took more than {IMPORT_TIMEOUT_SECONDS} s to load"
        return Finding("warning", "torch", slow)
    if outcome.returncode == 0:
        return Finding("ok", "torch", message)
    # The last line of a traceback names the error. A crash leaves no line, only its exit status.
    lines = [f"exit status {outcome.returncode}", *outcome.stderr.strip().splitlines()]
    advice = f"install a matching pair: {TORCH_PAIR}"
    return Finding("error", "torch", f"{message}: torchaudio does not load ({lines[-1]})", advice)
