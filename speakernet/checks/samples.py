"""Read every file of a list once to find damaged, silent, clipped, truncated and duplicate audio.

A copy in another format has other samples. It is found by its beginning: how the level of three
bands changes during the first two seconds, which coding and a short delay hardly alter.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.checks import Finding, findings_for_rows
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
BANDS_HZ = ((100, 700), (700, 2000), (2000, 3600))
"""Within the telephone band, because narrow codings keep no more."""
FRAME_SECONDS, NUM_FRAMES = 0.02, 100
LEVEL_RANGE_DB = 40.0
"""Below the loudest frame; what is lower is changed by coding."""
MAX_LAG = 8
"""Frames by which a coding may delay the sound; AAC and MP3 add up to 0.13 s."""
MIN_FRAMES = 40
"""Shorter beginnings are too much alike to be compared."""
MIN_CHANGE = 20.0
"""Standard deviation of the levels, of 254, below which a beginning has no shape, as in noise (3
dB).
"""
COPY_LIKENESS = 0.97
COPY_SECONDS = 0.2
"""Largest difference in length of two copies: codings add silence at the ends."""
MAX_NEIGHBOURS = 200
"""Recordings of a speaker that one is compared with; only in corpora of equally long clips are
there more.
"""
PAIRS_AT_ONCE = 4096
ADVICE_ON_COPIES = (
    "one recording in two formats, by its beginning: keep one, because a trial between them is "
    "trivial"
)


@dataclass(frozen=True)
class SampleFacts:
    """Facts about the audio of each of `names`: root mean square, share of clipped samples and
    seconds (float32), hash of the samples (uint64), whether the header promises more than the file
    contains (bool), and `shape_of_beginning`.

    `problems` are the rows that could not be decoded, with the reason; their facts are zero.
    """

    names: StringTable
    rms: np.ndarray
    clipped: np.ndarray
    hashes: np.ndarray
    cut_off: np.ndarray
    seconds: np.ndarray
    beginnings: np.ndarray
    problems: dict[int, str]


def read_facts(
    source: AudioSource, names: StringTable, num_jobs: int, description: str = ""
) -> SampleFacts:
    """Read every file, several at once, with a progress bar; memory holds 321 bytes per row and the
    current blocks.
    """
    num_rows = len(names)
    facts = SampleFacts(
        names,
        rms=np.zeros(num_rows, np.float32),
        clipped=np.zeros(num_rows, np.float32),
        hashes=np.zeros(num_rows, np.uint64),
        cut_off=np.zeros(num_rows, np.bool_),
        seconds=np.zeros(num_rows, np.float32),
        beginnings=np.zeros((num_rows, len(BANDS_HZ), NUM_FRAMES), np.uint8),
        problems={},
    )

    def read_rows(rows: Sequence[int]) -> int:
        for row in rows:
            try:
                _read_row(source, facts, row)
            except AudioError as error:
                facts.problems[row] = str(error)
        return len(rows)

    # Several rows per task, because handing over a task may cost more than reading a short file.
    tasks = (
        range(first, min(first + ROWS_PER_TASK, num_rows))
        for first in range(0, num_rows, ROWS_PER_TASK)
    )
    list(parallel_map(read_rows, tasks, num_jobs, description, total=num_rows, units_of=int))
    return facts


def _read_row(source: AudioSource, facts: SampleFacts, row: int) -> None:
    """Read one file and write down its facts; a damaged one leaves only its beginning."""
    name = facts.names[row]
    power = 0.0
    num_clipped = 0
    num_samples = 0
    # Eight bytes are enough: in a million recordings, the chance that any two different ones have
    # equal hashes is one in forty million.
    digest = hashlib.blake2b(digest_size=8)
    for block in source.blocks(name, SAMPLES_AT_ONCE):
        if num_samples == 0:
            facts.beginnings[row] = shape_of_beginning(block, source.sample_rate)
        power += float(np.square(block, dtype=np.float64).sum())
        num_clipped += int((np.abs(block) >= FULL_SCALE).sum())
        num_samples += len(block)
        # The hash covers the samples only: a different header does not make a different recording.
        digest.update(to_int16(block).tobytes())
    path = source.path_of(name)
    # Recordings of a packed corpus have no header of their own.
    facts.cut_off[row] = bool(path) and audio_info(path).is_truncated
    facts.rms[row] = (power / num_samples) ** 0.5
    facts.clipped[row] = num_clipped / num_samples
    facts.hashes[row] = int.from_bytes(digest.digest(), "little")
    facts.seconds[row] = num_samples / source.sample_rate


def shape_of_beginning(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    """The levels of the bands in the first frames, uint8 (bands, NUM_FRAMES): 1 to 255, and 0 after
    the end.
    """
    frame_samples = round(FRAME_SECONDS * sample_rate)
    count = min(len(samples) // frame_samples, NUM_FRAMES)
    levels = np.zeros((len(BANDS_HZ), NUM_FRAMES), dtype=np.uint8)
    if not count:
        return levels
    frames = samples[: count * frame_samples].reshape(count, frame_samples)
    # Levels of bands survive coding, which may change delay, phase and every sample: listeners
    # would notice other levels.
    powers = (
        np.abs(np.fft.rfft(frames * np.hanning(frame_samples).astype(np.float32))) ** 2
    )  # (frames, bins)
    hz = np.fft.rfftfreq(frame_samples, 1 / sample_rate)
    in_band = np.array([(hz >= low) & (hz < high) for low, high in BANDS_HZ], dtype=np.float32)
    decibels = 10 * np.log10(in_band @ powers.T + 1e-12)  # (bands, frames)
    # Relative to the loudest frame, so that a quieter copy is still recognised.
    shares = np.clip(1 + (decibels - decibels.max()) / LEVEL_RANGE_DB, 0, 1)
    levels[:, :count] = 1 + np.rint(254 * shares)
    return levels


# Copies. Somebody keeps a lecture as MP3 and as WAV; a target trial between the two is trivial, and
# a model looks better than it is. Equal samples are found by a hash, but a coding changes every
# sample and may add a tenth of a second of silence. What survives is the shape of the beginning:
# how the level of three bands moves over two seconds. Two recordings of one speaker whose shapes
# correlate by `COPY_LIKENESS` at some delay, and whose lengths agree, are called copies. That is a
# guess, not a proof: a jingle at the start of every broadcast looks the same, so this is only a
# warning.
def likeness(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The correlation of pairs of beginnings at the delay at which it is highest, (pairs,).

    Args:
        first: `shape_of_beginning` of one recording of each pair, (pairs, bands, frames).
        second: of the other recording of each pair.
    """
    best = np.zeros(len(first))
    inner = slice(MAX_LAG, NUM_FRAMES - MAX_LAG)
    left = first[:, :, inner].astype(np.float32)
    for lag in range(-MAX_LAG, MAX_LAG + 1):
        right = second[:, :, inner.start + lag : inner.stop + lag].astype(np.float32)
        # Frames after the end of a recording do not count.
        is_there = ((left[:, :1] > 0) & (right[:, :1] > 0)).astype(np.float32)  # (pairs, 1, frames)
        counts = is_there.sum(axis=(1, 2))
        left_centred = _center_levels(left, is_there)
        right_centred = _center_levels(right, is_there)
        left_energy = np.square(left_centred).sum(axis=(1, 2))
        right_energy = np.square(right_centred).sum(axis=(1, 2))
        least = len(BANDS_HZ) * counts * MIN_CHANGE**2
        is_usable = (counts >= MIN_FRAMES) & (left_energy >= least) & (right_energy >= least)
        products = (left_centred * right_centred).sum(axis=(1, 2))
        correlations = products / np.sqrt(np.maximum(left_energy * right_energy, 1e-9))
        best = np.maximum(best, np.where(is_usable, correlations, 0))
    return best


def _center_levels(levels: np.ndarray, is_there: np.ndarray) -> np.ndarray:
    """The levels relative to the mean of their band, 0 where a frame does not count; (pairs, bands,
    frames).
    """
    counts = np.maximum(is_there.sum(axis=2, keepdims=True), 1)
    means = (levels * is_there).sum(axis=2, keepdims=True) / counts
    return (levels - means) * is_there


def are_copies(facts: SampleFacts, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Whether pairs of rows are one recording in two formats, bool (pairs,); equal samples do not
    count.
    """
    # Comparing shapes is slow, and different lengths rule out nearly all pairs first.
    is_near = np.abs(facts.seconds[first] - facts.seconds[second]) <= COPY_SECONDS
    pairs = np.flatnonzero(is_near & (facts.hashes[first] != facts.hashes[second]))
    is_copy = np.zeros(len(first), dtype=bool)
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        block = pairs[start : start + PAIRS_AT_ONCE]
        values = likeness(facts.beginnings[first[block]], facts.beginnings[second[block]])
        is_copy[block] = values >= COPY_LIKENESS
    return is_copy


def copies_of_speakers(facts: SampleFacts, labels: np.ndarray) -> np.ndarray:
    """Pairs of rows of one speaker that are copies in different formats, int64 (pairs, 2)."""
    # Neighbours in this order have the same speaker and similar lengths.
    order = np.lexsort((facts.seconds, labels))
    copies = [np.zeros((0, 2), dtype=np.int64)]
    for distance in range(1, min(MAX_NEIGHBOURS + 1, len(order))):
        first = order[:-distance]
        second = order[distance:]
        is_near = facts.seconds[second] - facts.seconds[first] <= COPY_SECONDS
        # If no neighbour at this distance is near enough, none further away can be.
        near = np.flatnonzero(is_near & (labels[first] == labels[second]))
        if not len(near):
            break
        first = first[near]
        second = second[near]
        is_copy = are_copies(facts, first, second)
        copies.append(np.stack([first[is_copy], second[is_copy]], axis=1))
    return np.concatenate(copies)


def sample_findings(
    facts: SampleFacts, check: str, labels: np.ndarray | None = None
) -> list[Finding]:
    """Findings about the samples; if each row's speaker is given, the same audio under two speakers
    is an error.
    """
    names = facts.names.__getitem__
    damaged = sorted(facts.problems)
    advice = "recreate them from their source or remove them from the list"
    findings = findings_for_rows(
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
            "nobody speaks in them; remove these files from the list",
        ),
        (
            "clipped",
            facts.clipped > CLIPPED_SHARE,
            "recorded too loud; fine for training, but listen to a few",
        ),
        ("truncated", facts.cut_off, "copy or convert them again; their end is missing"),
    ):
        bad = np.flatnonzero(is_read & is_bad)
        findings += findings_for_rows(
            "warning", f"{check}: {kind}", bad, names, f"{kind} file", advice
        )
    findings += _equal_samples(facts, check, labels)
    if labels is not None:
        copies = copies_of_speakers(facts, labels).tolist()
        findings += findings_for_rows(
            "warning",
            f"{check}: copies",
            range(len(copies)),
            lambda row: " = ".join(map(names, copies[row])),
            "copy",
            ADVICE_ON_COPIES,
        )
    whole = f"all {len(facts.names):,} decode; none silent, clipped, truncated or duplicate"
    return findings or [Finding("ok", f"{check}: samples", whole)]


def _equal_samples(facts: SampleFacts, check: str, labels: np.ndarray | None) -> list[Finding]:
    """Recordings with the same samples: an error under two speakers, a warning under one."""
    # Silent files are left out: equal silence does not mean the same recording.
    rows = np.flatnonzero(facts.rms >= SILENT_RMS)
    rows = rows[np.argsort(facts.hashes[rows], kind="stable")]
    is_same = facts.hashes[rows[1:]] == facts.hashes[rows[:-1]]
    duplicates: list[str] = []
    of_two_speakers: list[str] = []
    for pair in zip(rows[:-1][is_same].tolist(), rows[1:][is_same].tolist(), strict=True):
        text = " = ".join(facts.names[row] for row in pair)
        if labels is None or labels[pair[0]] == labels[pair[1]]:
            duplicates.append(text)
        else:
            of_two_speakers.append(text)
    return findings_for_rows(
        "error",
        f"{check}: two speakers",
        range(len(of_two_speakers)),
        of_two_speakers.__getitem__,
        "pair of equal recordings",
        "one person in two folders, or a wrong label: merge the speakers or remove the rows",
    ) + findings_for_rows(
        "warning",
        f"{check}: duplicates",
        range(len(duplicates)),
        duplicates.__getitem__,
        "duplicate file",
        "they count twice, and a target trial between them is trivial",
    )


def trial_findings(
    trials: TrialList, rows: np.ndarray, facts: SampleFacts, check: str
) -> list[Finding]:
    """Trials with the same recording on both sides, in other formats too; `rows` of the list's
    names were read.
    """
    if trials.labels is None:
        return []
    trials, _ = trials.by_recording()
    # Rows of the facts differ from those of the list, because unreadable files have none.
    row_of_name = np.full(len(trials.names), -1)
    row_of_name[rows] = np.arange(len(rows))
    # Only trials of which both sides were read.
    enrol = row_of_name[trials.enrol]
    test = row_of_name[trials.test]
    is_read = (enrol >= 0) & (test >= 0)
    targets = np.flatnonzero(is_read & (trials.labels == 1))
    copies = targets[are_copies(facts, enrol[targets], test[targets])]
    nontargets = np.flatnonzero(is_read & (trials.labels == 0))
    is_same = facts.hashes[enrol[nontargets]] == facts.hashes[test[nontargets]]
    # Equal silence does not mean the same recording.
    has_sound = facts.rms[enrol[nontargets]] >= SILENT_RMS

    def pair(row: int) -> str:
        return " = ".join(trials.pair(row))

    advice = "the same recording on both sides: one person in two folders, or a wrong label"
    wrong = nontargets[is_same & has_sound]
    return findings_for_rows(
        "error", f"{check}: two speakers", wrong, pair, "non-target trial", advice
    ) + findings_for_rows(
        "warning", f"{check}: copies", copies, pair, "target trial", ADVICE_ON_COPIES
    )


def shared_findings(
    known: SampleFacts, facts: SampleFacts, checks: tuple[str, str], *, renamed: bool
) -> list[Finding]:
    """Recordings that are in both lists; for two trial lists (`renamed`), only those with different
    names.
    """
    # Compared by samples, because names do not show that a recording is in both lists.
    rows_of_hash = {}
    for row in np.flatnonzero(known.rms >= SILENT_RMS).tolist():
        rows_of_hash[int(known.hashes[row])] = row
    shared = []
    for row in np.flatnonzero(facts.rms >= SILENT_RMS).tolist():
        known_row = rows_of_hash.get(int(facts.hashes[row]))
        if known_row is None:
            continue
        pair = (facts.names[row], known.names[known_row])
        if not renamed or pair[0] != pair[1]:
            shared.append(" = ".join(pair))
    if not shared:
        return []
    message = f"{counted(len(shared), 'recording')} also in {checks[0]}"
    advice = (
        "the error rate says nothing about unseen speakers; perhaps one person is in two folders"
    )
    if renamed:
        message += " under a different name"
        advice = "a model chosen on one of the lists is not tested on new recordings by the other"
    return [Finding("warning", f"{checks[1]}: overlap", message, advice, tuple(shared[:MAX_NAMED]))]
