"""Read every file of a list once: damaged, silent, clipped, and duplicate audio. The slow part of the doctor."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.checks.findings import Finding
from speakernet.data.audio import AudioError, to_int16
from speakernet.data.lists import StringTable, TrialList
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
    """Of every file: root mean square, share of clipped samples (float32), hash of the samples (uint64), and whether
    its header promises more than there is (bool); each (rows,).

    `problems` are the rows that could not be decoded, with the reason; their facts are zero.
    """

    rms: np.ndarray
    clipped: np.ndarray
    hashes: np.ndarray
    cut_off: np.ndarray
    problems: dict[int, str]


def read_facts(source: AudioSource, names: StringTable, num_jobs: int, description: str = "") -> SampleFacts:
    """Read every file, several at once, with a progress bar; memory holds 16 bytes a row and the files in flight."""
    facts = SampleFacts(
        rms=np.zeros(len(names), np.float32),
        clipped=np.zeros(len(names), np.float32),
        hashes=np.zeros(len(names), np.uint64),
        cut_off=np.zeros(len(names), np.bool_),
        problems={},
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
                facts.cut_off[row] = source.is_cut_off(names[row])
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
    cut_off = np.flatnonzero(is_read & facts.cut_off)
    if len(cut_off):
        advice = "copy or convert them again: their end is missing"
        findings.append(
            _some("warning", f"{check}: cut off", cut_off, names, "files promise more than they hold", advice)
        )
    findings += _duplicates(names, facts, is_read & (facts.rms >= SILENT_RMS), check, labels)
    if not findings:
        findings.append(
            Finding(
                "ok", f"{check}: samples", f"all {len(names):,} decode; none silent, clipped, cut off or there twice"
            )
        )
    return findings


def shared_findings(
    training: tuple[StringTable, SampleFacts], trials: tuple[StringTable, SampleFacts], check: str
) -> list[Finding]:
    """Recordings of a trial list that training hears too, under whatever name.

    Args:
        training: the files of the training list, and what was read of them.
        trials: those of a trial list.
        check: what the trial list is, as "trial audio (dev.txt)".
    """
    shared = _same_audio(training, trials)
    if not shared:
        return []
    examples = tuple(f"{one} = {other}" for one, other in shared[:MAX_NAMED])
    message = f"{len(shared):,} recordings are in the training list too"
    advice = "one of the two may lie in the wrong person's folder; the error rate is not that of unknown speakers"
    return [Finding("warning", f"{check}: overlap", message, advice, examples)]


def trial_findings(trials: TrialList, rows: np.ndarray, facts: SampleFacts, check: str) -> list[Finding]:
    """Trials of two speakers whose two sides are one recording: a person who lies in two folders, or a wrong label.

    Args:
        trials: the list.
        rows: of its names, that were read, int64 (read,).
        facts: what was read of them.
        check: what the list is, as "trial audio (dev.txt)".
    """
    if trials.labels is None:
        return []
    hashes, is_read = np.zeros(len(trials.names), np.uint64), np.zeros(len(trials.names), dtype=bool)
    # Silence is the same as any other silence, and is told by itself.
    hashes[rows], is_read[rows] = facts.hashes, facts.rms >= SILENT_RMS
    enrol, test = trials.enrol, trials.test
    is_wrong = (trials.labels == 0) & (hashes[enrol] == hashes[test]) & is_read[enrol] & is_read[test]
    wrong = np.flatnonzero(is_wrong)
    if not len(wrong):
        return []
    pairs = ((trials.names[int(enrol[row])], trials.names[int(test[row])]) for row in wrong[:MAX_NAMED])
    message = f"{len(wrong):,} trials of two speakers have one recording on both sides"
    advice = "one person in two folders, or a wrong label: put them together and make the list again"
    return [Finding("error", f"{check}: two speakers", message, advice, tuple(f"{a} = {b}" for a, b in pairs))]


def renamed_findings(
    first: tuple[StringTable, SampleFacts], second: tuple[StringTable, SampleFacts], checks: tuple[str, str]
) -> list[Finding]:
    """Recordings that stand in two lists of trials under two names, so that one chooses what the other reports."""
    shared = [(one, other) for one, other in _same_audio(first, second) if one != other]
    if not shared:
        return []
    message = f"{len(shared):,} recordings are in {checks[0]} under another name"
    advice = "one person in two folders? then the one list has chosen what the other reports"
    examples = tuple(f"{one} = {other}" for one, other in shared[:MAX_NAMED])
    return [Finding("warning", f"{checks[1]}: overlap", message, advice, examples)]


def _same_audio(
    known: tuple[StringTable, SampleFacts], asked: tuple[StringTable, SampleFacts]
) -> list[tuple[str, str]]:
    """Names of the second that hold the audio of one of the first, each with that one's name."""
    (names, facts), (others, found) = known, asked
    # Neither what could not be read nor what is silent: its power is below any voice's.
    rows_of = {int(facts.hashes[row]): int(row) for row in np.flatnonzero(facts.rms >= SILENT_RMS)}
    heard = np.flatnonzero(found.rms >= SILENT_RMS).tolist()
    return [(others[row], names[rows_of[value]]) for row in heard if (value := int(found.hashes[row])) in rows_of]


def _duplicates(
    names: StringTable, facts: SampleFacts, is_read: np.ndarray, check: str, labels: np.ndarray | None
) -> list[Finding]:
    rows = np.flatnonzero(is_read)
    rows = rows[np.argsort(facts.hashes[rows], kind="stable")]
    same = np.flatnonzero(facts.hashes[rows][1:] == facts.hashes[rows][:-1])
    if not len(same):
        return []
    first, second = rows[same], rows[same + 1]
    is_crossed = np.zeros(len(same), dtype=bool) if labels is None else labels[first] != labels[second]
    findings = []
    if is_crossed.any():
        assert labels is not None
        # Somebody who lies in two folders is one line, not one for each recording.
        examples: dict[tuple[int, int], list[str]] = {}
        for a, b in zip(first[is_crossed].tolist(), second[is_crossed].tolist(), strict=True):
            speakers = sorted((int(labels[a]), int(labels[b])))
            examples.setdefault((speakers[0], speakers[1]), []).append(f"{names[a]} = {names[b]}")
        shown = [f"{one[0]}{f', and {len(one) - 1} more of these two' if one[1:] else ''}" for one in examples.values()]
        findings.append(
            Finding(
                "error",
                f"{check}: two speakers",
                f"{int(is_crossed.sum()):,} recordings stand under two speakers",
                "one person in two folders, or a wrong label: put them together, or remove the rows",
                tuple(shown[:MAX_NAMED]),
            )
        )
    first, second = first[~is_crossed], second[~is_crossed]
    if not len(first):
        return findings
    twice = [f"{names[int(a)]} = {names[int(b)]}" for a, b in zip(first[:MAX_NAMED], second[:MAX_NAMED], strict=True)]
    message = f"{len(first):,} files hold the same audio as another"
    advice = "they count twice; target trials of such a pair are trivially right"
    return [*findings, Finding("warning", f"{check}: duplicates", message, advice, tuple(twice))]


def _some(level, check: str, rows: np.ndarray, names: StringTable, what: str, advice: str) -> Finding:  # type: ignore[no-untyped-def]
    examples = tuple(names[int(row)] for row in rows[:MAX_NAMED])
    return Finding(level, check, f"{len(rows):,} {what}", advice, examples)


def _tasks(num_rows: int) -> Iterator[range]:
    for start in range(0, num_rows, ROWS_PER_TASK):
        yield range(start, min(start + ROWS_PER_TASK, num_rows))
