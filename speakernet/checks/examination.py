"""The whole examination: every check in order, over lists, audio and machine. What `speakernet doctor` shows."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speakernet.checks.findings import Finding
from speakernet.checks.headers import DEFAULT_MIN_SECONDS, header_findings
from speakernet.checks.machine import disk_finding, machine_findings
from speakernet.checks.quick import quick_check
from speakernet.checks.rows import row_findings
from speakernet.checks.samples import read_facts, sample_findings
from speakernet.data.lists import ListError, StringTable, read_training_list, read_trials
from speakernet.data.opening import open_source
from speakernet.data.sources import AudioSource


@dataclass(frozen=True)
class Patient:
    """What to examine. `trials` are (list, root) pairs."""

    train_list: Path | None = None
    train_root: Path | None = None
    trials: tuple[tuple[Path, Path | None], ...] = ()
    save_path: Path = Path("exps")
    min_utterances: int = 1
    min_seconds: float = DEFAULT_MIN_SECONDS
    sample_rate: int = 16000


@dataclass
class Examination:
    """The findings, and the durations in seconds of every list whose audio was looked at."""

    findings: list[Finding] = field(default_factory=list)
    durations: dict[str, np.ndarray] = field(default_factory=dict)


def examine(patient: Patient, *, is_fast: bool, num_jobs: int) -> Examination:
    """Run every check that the patient's parts allow; `is_fast` reads headers only.

    Raises:
        Nothing for what lists or files hold: that becomes findings.
    """
    result = Examination()
    findings = result.findings
    if patient.train_list is not None:
        findings += row_findings(patient.train_list, read_training_list, "training rows")
    for path, _ in patient.trials:
        findings += row_findings(path, read_trials, "trial rows")
    findings += quick_check(
        train_list=patient.train_list,
        train_root=patient.train_root,
        trials=patient.trials,
        min_utterances=patient.min_utterances,
        # Looked at below, with more to say.
        reads_headers=False,
    )
    if patient.train_list is not None and patient.train_root is not None:
        try:
            training = read_training_list(patient.train_list)
        except ListError:
            # Said already by the quick check.
            pass
        else:
            _examine_audio(
                result,
                patient,
                training.paths,
                patient.train_root,
                "training audio",
                training.labels,
                is_fast,
                num_jobs,
            )
    for path, root in patient.trials:
        if root is None:
            continue
        try:
            names = read_trials(path).names
        except ListError:
            continue
        _examine_audio(result, patient, names, root, f"trial audio ({path.name})", None, is_fast, num_jobs)
    findings += machine_findings(patient.save_path)
    return result


def _examine_audio(
    result: Examination,
    patient: Patient,
    names: StringTable,
    root: Path,
    check: str,
    labels: np.ndarray | None,
    is_fast: bool,
    num_jobs: int,
) -> None:
    source = _open(root, patient.sample_rate)
    if source is None:
        return
    lookup = source.lookup_table(names, num_threads=4 * num_jobs)
    result.findings += header_findings(names, lookup, check, patient.min_seconds)
    is_good = np.ones(len(names), dtype=bool)
    is_good[list(lookup.problems)] = False
    if is_good.any():
        result.durations[check] = lookup.seconds[is_good]
    rows = np.flatnonzero(is_good)
    if not len(rows):
        return
    good = names if len(rows) == len(names) else names.take(rows)
    result.findings.append(disk_finding(source, good, f"{check}: disk"))
    if not is_fast:
        facts = read_facts(source, good, num_jobs, check)
        result.findings += sample_findings(good, facts, check, None if labels is None else labels[rows])


def _open(root: Path, sample_rate: int) -> AudioSource | None:
    try:
        return open_source(root, sample_rate, show_progress=True)
    except (ValueError, OSError):
        # The quick check has said so.
        return None
