"""Read every file of a list once to find damaged, silent, clipped, truncated and duplicate
audio.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.checks import Finding, some
from speakernet.data.audio import AudioError, audio_info, to_int16
from speakernet.data.lists import StringTable, TrialList
from speakernet.data.sources import AudioSource
from speakernet.files import parallel_map
from speakernet.terminal import MAX_NAMED, counted

ROWS_PER_TASK = 32
SAMPLES_AT_ONCE = 1 << 20
"""About a minute; recordings may last hours."""
SILENT_RMS = 1e-3
"""Root mean square below which there is only recorder noise (-60 dB relative to full scale)."""
FULL_SCALE = 0.999
CLIPPED_SHARE = 0.001
"""Share of samples at full scale above which clipping is audible."""


@dataclass(frozen=True)
class SampleFacts:
    """Facts about the audio of each of `names`: root mean square and share of clipped samples
    (float32), hash of the samples (uint64), and whether the header promises more than the file
    contains (bool).

    `problems` are the rows that could not be decoded, with the reason; their facts are zero.
    """

    names: StringTable
    rms: np.ndarray
    clipped: np.ndarray
    hashes: np.ndarray
    cut_off: np.ndarray
    problems: dict[int, str]


def read_facts(
    source: AudioSource, names: StringTable, num_jobs: int, description: str = ""
) -> SampleFacts:
    """Read every file, several at once, with a progress bar; memory holds 17 bytes per row and the
    current blocks.
    """
    rows = len(names)
    columns = {"rms": np.float32, "clipped": np.float32, "hashes": np.uint64, "cut_off": np.bool_}
    facts = SampleFacts(
        names, **{name: np.zeros(rows, kind) for name, kind in columns.items()}, problems={}
    )

    def look(some_rows: Sequence[int]) -> int:
        for row in some_rows:
            power = 0.0
            clipped = 0
            total = 0
            digest = hashlib.blake2b(digest_size=8)
            try:
                for block in source.blocks(names[row], SAMPLES_AT_ONCE):
                    power += float(np.square(block, dtype=np.float64).sum())
                    clipped += int((np.abs(block) >= FULL_SCALE).sum())
                    total += len(block)
                    # The hash covers the samples only: a different header does not make a different
                    # recording.
                    digest.update(to_int16(block).tobytes())
                path = source.path_of(names[row])
                facts.cut_off[row] = bool(path) and audio_info(path).is_truncated
            except AudioError as error:
                facts.problems[row] = str(error)
                continue
            facts.rms[row] = (power / total) ** 0.5
            facts.clipped[row] = clipped / total
            facts.hashes[row] = int.from_bytes(digest.digest(), "little")
        return len(some_rows)

    tasks = (
        range(first, min(first + ROWS_PER_TASK, rows)) for first in range(0, rows, ROWS_PER_TASK)
    )
    list(parallel_map(look, tasks, num_jobs, description, total=rows, units_of=int))
    return facts


def sample_findings(
    facts: SampleFacts, check: str, labels: np.ndarray | None = None
) -> list[Finding]:
    """Findings about the samples; if each row's speaker is given, the same audio under two speakers
    is an error.
    """
    names = facts.names.__getitem__
    advice = "recreate them from their source or remove them from the list"
    damaged = sorted(facts.problems)
    findings = some(
        "error",
        f"{check}: damaged",
        damaged,
        facts.problems.__getitem__,
        "undecodable file",
        advice,
    )
    is_read = ~np.isin(np.arange(len(facts.names)), damaged)
    for kind, is_bad, advice in (
        (
            "silent",
            facts.rms < SILENT_RMS,
            "silence has no speaker; remove such files from the list",
        ),
        (
            "clipped",
            facts.clipped > CLIPPED_SHARE,
            "recorded too loud; fine for training, but listen to a few",
        ),
        ("truncated", facts.cut_off, "copy or convert them again; their end is missing"),
    ):
        findings += some(
            "warning",
            f"{check}: {kind}",
            np.flatnonzero(is_read & is_bad),
            names,
            f"{kind} file",
            advice,
        )
    # Silent files are left out: equal silence does not mean the same recording.
    rows = np.flatnonzero(facts.rms >= SILENT_RMS)
    rows = rows[np.argsort(facts.hashes[rows], kind="stable")]
    same = facts.hashes[rows[1:]] == facts.hashes[rows[:-1]]
    pairs = zip(rows[:-1][same].tolist(), rows[1:][same].tolist(), strict=True)
    # A person in two folders gets one line, not one per recording.
    groups: dict[tuple[int, ...], list[str]] = {}
    for pair in pairs:
        speakers = tuple(sorted({int(labels[row]) for row in pair})) if labels is not None else ()
        groups.setdefault(speakers, []).append(" = ".join(map(names, pair)))
    crossed = [one for speakers, one in groups.items() if len(speakers) > 1]
    if crossed:
        shown = (
            f"{one[0]}{f', and {len(one) - 1} more under these two' if one[1:] else ''}"
            for one in crossed
        )
        message = f"{counted(sum(map(len, crossed)), 'recording')} under two speakers"
        advice = (
            "one person in two folders, or a wrong label: merge the speakers or remove the rows"
        )
        examples = tuple(itertools.islice(shown, MAX_NAMED))
        findings.append(Finding("error", f"{check}: two speakers", message, advice, examples))
    twice = [pair for speakers, one in groups.items() if len(speakers) < 2 for pair in one]
    advice = "they count twice, and a target trial between them is trivial"
    findings += some(
        "warning",
        f"{check}: duplicates",
        range(len(twice)),
        twice.__getitem__,
        "duplicate file",
        advice,
    )
    whole = f"all {len(facts.names):,} decode; none silent, clipped, truncated or duplicate"
    return findings or [Finding("ok", f"{check}: samples", whole)]


def trial_findings(
    trials: TrialList, rows: np.ndarray, facts: SampleFacts, check: str
) -> list[Finding]:
    """Non-target trials with the same recording on both sides; `rows` of the list's names were
    read.
    """
    if trials.labels is None:
        return []
    hashes = np.zeros(len(trials.names), np.uint64)
    has_sound = np.zeros(len(trials.names), dtype=bool)
    hashes[rows] = facts.hashes
    has_sound[rows] = facts.rms >= SILENT_RMS
    enrol = trials.enrol
    test = trials.test
    wrong = np.flatnonzero(
        (trials.labels == 0) & (hashes[enrol] == hashes[test]) & has_sound[enrol] & has_sound[test]
    )

    def pair(row: int) -> str:
        return f"{trials.names[int(enrol[row])]} = {trials.names[int(test[row])]}"

    advice = "the same recording on both sides: one person in two folders, or a wrong label"
    return some("error", f"{check}: two speakers", wrong, pair, "non-target trial", advice)


def shared_findings(
    known: SampleFacts, facts: SampleFacts, checks: tuple[str, str], *, renamed: bool
) -> list[Finding]:
    """Recordings that are in both lists; for two trial lists (`renamed`), only those with different
    names.
    """
    rows_of = {int(known.hashes[row]): int(row) for row in np.flatnonzero(known.rms >= SILENT_RMS)}
    shared = [
        f"{facts.names[row]} = {known.names[other]}"
        for row in np.flatnonzero(facts.rms >= SILENT_RMS).tolist()
        if (other := rows_of.get(int(facts.hashes[row]))) is not None
        and not (renamed and facts.names[row] == known.names[other])
    ]
    if not shared:
        return []
    message = (
        f"{counted(len(shared), 'recording')} also in {checks[0]}"
        + " under a different name" * renamed
    )
    advice = (
        "the error rate says nothing about unseen speakers; perhaps one person is in two folders"
    )
    if renamed:
        advice = "a model chosen on one of the lists is not tested on new recordings by the other"
    return [Finding("warning", f"{checks[1]}: overlap", message, advice, tuple(shared[:MAX_NAMED]))]
