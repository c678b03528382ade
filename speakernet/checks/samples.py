"""Read every file of a list once: damaged, silent, clipped, and duplicate audio. The slow part of the doctor."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.checks.findings import Finding
from speakernet.data.audio import AudioError, to_int16
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.files import parallel_map
from speakernet.terminal import MAX_NAMED

ROWS_PER_TASK = 32
#: A minute or so: recordings may have hours.
SAMPLES_AT_ONCE = 1 << 20
#: Root mean square below which nothing but the recorder's own noise is there (-60 dB of full scale).
SILENT_RMS = 1e-3
FULL_SCALE = 0.999
#: Share of samples at full scale from which clipping is heard.
CLIPPED_SHARE = 0.001


@dataclass(frozen=True)
class SampleFacts:
    """Of every file: root mean square, share of clipped samples (float32), hash of the samples (uint64); each (rows,).

    `problems` are the rows that could not be decoded, with the reason; their facts are zero.
    """

    rms: np.ndarray
    clipped: np.ndarray
    hashes: np.ndarray
    problems: dict[int, str]


def read_facts(source: AudioSource, names: StringTable, num_jobs: int, description: str = "") -> SampleFacts:
    """Read every file, several at once, with a progress bar; memory holds 16 bytes a row and the files in flight."""
    facts = SampleFacts(
        np.zeros(len(names), np.float32), np.zeros(len(names), np.float32), np.zeros(len(names), np.uint64), {}
    )

    def look(rows: Sequence[int]) -> int:
        for row in rows:
            power, clipped, total, digest = 0.0, 0, 0, hashlib.blake2b(digest_size=8)
            try:
                for block in source.blocks(names[row], SAMPLES_AT_ONCE):
                    power += float(np.square(block, dtype=np.float64).sum())
                    clipped += int((np.abs(block) >= FULL_SCALE).sum())
                    total += len(block)
                    # Of the samples, not of the file: the same recording under another header is the same audio.
                    digest.update(to_int16(block).tobytes())
            except AudioError as error:
                facts.problems[row] = str(error)
                continue
            facts.rms[row], facts.clipped[row] = (power / total) ** 0.5, clipped / total
            facts.hashes[row] = int.from_bytes(digest.digest(), "little")
        return len(rows)

    for _ in parallel_map(look, _tasks(len(names)), num_jobs, description, total=len(names), units_of=int):
        pass
    return facts


def sample_findings(
    names: StringTable, facts: SampleFacts, check: str, labels: np.ndarray | None = None
) -> list[Finding]:
    """Findings about what was read.

    Args:
        names: the files.
        facts: as read.
        check: what the list is, as "training audio".
        labels: speaker of each row, int (rows,), or None; the same audio under two speakers is an error.
    """
    findings = []
    if facts.problems:
        bad = sorted(facts.problems)
        findings.append(
            Finding(
                "error",
                f"{check}: damaged",
                f"{len(bad):,} files cannot be decoded",
                "make them again from their source, or take them off the list",
                tuple(facts.problems[row] for row in bad[:MAX_NAMED]),
            )
        )
    is_read = np.ones(len(names), dtype=bool)
    is_read[list(facts.problems)] = False
    silent = np.flatnonzero(is_read & (facts.rms < SILENT_RMS))
    clipped = np.flatnonzero(is_read & (facts.clipped > CLIPPED_SHARE))
    if len(silent):
        advice = "a silent file has no speaker; take them off the list"
        findings.append(_some("warning", f"{check}: silent", silent, names, "files are silent", advice))
    if len(clipped):
        advice = "recorded too loud; fine for training, but listen to a few"
        findings.append(_some("warning", f"{check}: clipped", clipped, names, "files are clipped", advice))
    findings += _duplicates(names, facts, is_read, check, labels)
    if not findings:
        findings.append(
            Finding("ok", f"{check}: samples", f"all {len(names):,} decode; none silent, clipped or twice there")
        )
    return findings


def _duplicates(
    names: StringTable, facts: SampleFacts, is_read: np.ndarray, check: str, labels: np.ndarray | None
) -> list[Finding]:
    rows = np.flatnonzero(is_read)
    rows = rows[np.argsort(facts.hashes[rows], kind="stable")]
    same = np.flatnonzero(facts.hashes[rows][1:] == facts.hashes[rows][:-1])
    if not len(same):
        return []
    first, second = rows[same], rows[same + 1]
    examples = [f"{names[int(a)]} = {names[int(b)]}" for a, b in zip(first, second, strict=True)]
    findings = []
    if labels is not None:
        crossed = np.flatnonzero(labels[first] != labels[second])
        if len(crossed):
            findings.append(
                Finding(
                    "error",
                    f"{check}: two speakers",
                    f"{len(crossed):,} recordings stand under two speakers",
                    "one of the labels is wrong; remove the rows",
                    tuple(examples[row] for row in crossed[:MAX_NAMED]),
                )
            )
    message = f"{len(same):,} files hold the same audio as another"
    advice = "they count twice; target trials of such a pair are trivially right"
    return [*findings, Finding("warning", f"{check}: duplicates", message, advice, tuple(examples[:MAX_NAMED]))]


def _some(level, check: str, rows: np.ndarray, names: StringTable, what: str, advice: str) -> Finding:  # type: ignore[no-untyped-def]
    examples = tuple(names[int(row)] for row in rows[:MAX_NAMED])
    return Finding(level, check, f"{len(rows):,} {what}", advice, examples)


def _tasks(num_rows: int) -> Iterator[range]:
    for start in range(0, num_rows, ROWS_PER_TASK):
        yield range(start, min(start + ROWS_PER_TASK, num_rows))
