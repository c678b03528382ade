"""Diarization error rates against a reference, with intervals over recordings.

All rates come from one sweep over the borders of a recording: between two borders nothing changes,
so each piece of time is counted once, weighted by its length. Time and memory grow linearly with
the number of turns. Speakers are mapped before collars and overlaps are excluded, as in NIST's
md-eval; pyannote.metrics maps them afterwards, which gives lower rates if much is excluded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from speakernet.inference.who.rttm import Channel, SpeakerTurns, describe_channels
from speakernet.terminal import counted

MISSED, FALSE_ALARM, CONFUSION, TOTAL, JACCARD, SPEAKERS = range(6)
"""Columns of `DiarizationErrors.parts`: four of seconds, the sum of Jaccard errors over speakers,
their number."""


@dataclass(frozen=True)
class DiarizationErrors:
    """Errors of one system.

    Attributes:
        names: names of the recordings.
        parts: (recordings, 6), in the order of the constants above.
        num_right: number of recordings in which the right number of speakers was found.
    """

    names: tuple[str, ...]
    parts: np.ndarray
    num_right: int

    def rates(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """DER, missed speech, false alarms, confusion and JER, in percent over the chosen
        recordings, (…, 5).

        Without speech in the reference they are undefined (NaN).
        """
        sums = self.parts[rows].sum(axis=-2)
        errors = sums[..., [MISSED, FALSE_ALARM, CONFUSION]]
        shares = np.concatenate([errors.sum(axis=-1, keepdims=True), errors], axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            error_rates = shares / sums[..., [TOTAL]]
            jaccard_rate = sums[..., [JACCARD]] / sums[..., [SPEAKERS]]
        rates = 100 * np.concatenate([error_rates, jaccard_rate], axis=-1)
        return np.where(sums[..., [TOTAL]] > 0, rates, np.nan)

    def false_alarm_seconds(self, rows: slice) -> float:
        """Seconds of false alarms in the chosen recordings."""
        return float(self.parts[rows, FALSE_ALARM].sum())

    def draws(self, num_draws: int, seed: int) -> np.ndarray:
        """Rates of `num_draws` bootstrap draws of recordings, (draws, 5); every system gets the
        same draws.
        """
        count = len(self.names)
        return self.rates(np.random.default_rng(seed).integers(count, size=(num_draws, count)))


def diarization_errors(
    reference: Mapping[Channel, SpeakerTurns],
    hypothesis: Mapping[Channel, SpeakerTurns],
    scored: Mapping[Channel, np.ndarray] | None = None,
    *,
    collar: float,
    skips_overlap: bool = False,
) -> DiarizationErrors:
    """Compute the errors in each recording of the reference.

    Args:
        reference: turns in each channel of each recording.
        hypothesis: turns found by the system; in recordings that it lacks, all speech counts as
            missed.
        scored: scored regions, (regions, 2) seconds; by default from the first to the last turn in
            reference or hypothesis.
        collar: unscored seconds on each side of each border of the reference.
        skips_overlap: leave out regions in which two people speak.

    Raises:
        ValueError: `scored` lacks a recording of the reference, or leaves none of its speech, as a
            wide collar may do.

    Source: https://github.com/usnistgov/SCTK, md-eval; Ryant et al., "The second DIHARD diarization
        challenge", Interspeech 2019 (JER).
    """
    # A recording without scored regions would count as free of errors, but more often its name is
    # wrong.
    names = describe_channels(reference)
    lacking = []
    if scored is not None:
        lacking = [
            name for name, channel in zip(names, reference, strict=True) if channel not in scored
        ]
    if lacking:
        raise ValueError(
            f"the UEM has no line for {lacking[0]} ({counted(len(lacking), 'recording')} of the "
            "reference without one); add the regions to score in each"
        )
    parts = np.zeros((len(reference), 6))
    num_right = 0
    for row, (channel, true) in enumerate(reference.items()):
        regions = None if scored is None else scored[channel]
        parts[row], is_right_number = _sweep(
            true, hypothesis.get(channel, {}), regions, collar, skips_overlap
        )
        num_right += is_right_number
    if any(reference.values()) and not parts[:, TOTAL].any():
        raise ValueError(
            f"no speech of the reference is left to score in {', '.join(names[:3])}, with a collar "
            f"of {collar:g} s around each boundary; use a narrower collar, and check the UEM if "
            "there is one"
        )
    return DiarizationErrors(tuple(names), parts, num_right)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of bootstrap draws, (draws,); draws without speech in the reference are
    left out.
    """
    # A draw may consist of silent recordings only, whose rates are undefined.
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return float("nan"), float("nan")
    low, high = np.percentile(defined, [2.5, 97.5])
    return float(low), float(high)


def _sweep(
    true: SpeakerTurns,
    claimed: SpeakerTurns,
    regions: np.ndarray | None,
    collar: float,
    skips_overlap: bool,
) -> tuple[np.ndarray, bool]:
    """The six parts of `DiarizationErrors` of a recording, and whether as many people speak in the
    scored regions as the system claims.
    """
    true_turns, true_speakers = _stack(true)
    claimed_turns, claimed_speakers = _stack(claimed)
    borders = np.concatenate([true_turns.ravel(), claimed_turns.ravel()])
    if regions is None:
        regions = np.array([[borders.min(), borders.max()]]) if len(borders) else np.zeros((0, 2))
    # Collars are borders too, so that every piece is either scored or not.
    collars = np.stack([true_turns.ravel() - collar, true_turns.ravel() + collar], axis=1)
    borders = np.unique(np.concatenate([borders, regions.ravel(), collars.ravel()]))
    # Between two borders the same people speak throughout: (pieces,) and (pieces, speakers).
    seconds = np.diff(borders)
    is_true = _speaking(borders, true_turns, true_speakers, len(true))
    is_claimed = _speaking(borders, claimed_turns, claimed_speakers, len(claimed))
    is_scored = _count_covering(borders, regions) > 0
    seconds_in_regions = seconds * is_scored
    true_seconds = is_true.T @ seconds_in_regions
    claimed_seconds = is_claimed.T @ seconds_in_regions
    shared = (is_true.T @ (is_claimed * seconds_in_regions[:, None])).toarray()
    rows, columns = _pair(shared)
    num_true = is_true.sum(axis=1)
    num_claimed = is_claimed.sum(axis=1)
    num_right = (is_true[:, rows] * is_claimed[:, columns]).sum(axis=1)
    is_scored &= _count_covering(borders, collars) == 0
    if skips_overlap:
        is_scored &= num_true < 2
    seconds *= is_scored
    # In each piece: if fewer people are claimed than speak, the difference is missed; if more, it
    # is a false alarm; of the rest, whoever is not right is confused (md-eval's definition).
    missed = np.maximum(num_true - num_claimed, 0) @ seconds
    false_alarm = np.maximum(num_claimed - num_true, 0) @ seconds
    confusion = (np.minimum(num_true, num_claimed) - num_right) @ seconds
    # JER has neither collars nor excluded overlaps.
    speaks = true_seconds > 0
    jaccard = speaks.astype(np.float64)
    shared_seconds = shared[rows, columns]
    either = true_seconds[rows] + claimed_seconds[columns] - shared_seconds
    jaccard[rows] -= shared_seconds / either
    parts = [missed, false_alarm, confusion, num_true @ seconds, jaccard.sum(), speaks.sum()]
    return np.array(parts), speaks.sum() == np.count_nonzero(claimed_seconds)


def _pair(shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of speakers (rows, columns) that share as much time as possible, given the seconds
    that any two share.
    """
    rows, columns = linear_sum_assignment(-shared)
    # To fill the smaller side, the assignment also pairs people who share nothing.
    are_pairs = shared[rows, columns] > 0
    return rows[are_pairs], columns[are_pairs]


def _stack(turns: SpeakerTurns) -> tuple[np.ndarray, np.ndarray]:
    """The turns of all speakers, (turns, 2), and the number of each one's speaker, (turns,)."""
    if not turns:
        return np.zeros((0, 2)), np.zeros(0, dtype=np.int64)
    counts = [len(stretches) for stretches in turns.values()]
    return np.concatenate(list(turns.values())), np.repeat(np.arange(len(turns)), counts)


def _count_covering(borders: np.ndarray, stretches: np.ndarray) -> np.ndarray:
    """How many of the stretches, (stretches, 2), cover each piece between borders, (pieces,)."""
    if not len(borders):
        return np.zeros(0, dtype=np.int64)
    # One more stretch covers from its start on, one less from its stop on.
    changes = np.zeros(len(borders), dtype=np.int64)
    np.add.at(changes, np.searchsorted(borders, stretches[:, 0]), 1)
    np.add.at(changes, np.searchsorted(borders, stretches[:, 1]), -1)
    return np.cumsum(changes)[:-1]


def _speaking(
    borders: np.ndarray, turns: np.ndarray, speakers: np.ndarray, num_speakers: int
) -> csr_array:
    """Whether each speaker talks in each piece, (pieces, speakers) of 0 and 1; sparse, as most
    people are silent.
    """
    first, last = np.searchsorted(borders, turns).T
    counts = last - first
    # The pieces of all turns, one after the other: first, first + 1, …, last - 1 of each turn.
    pieces = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
    shape = max(len(borders) - 1, 0), num_speakers
    return csr_array((np.ones(len(pieces)), (pieces, np.repeat(speakers, counts))), shape=shape)
