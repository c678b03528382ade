"""Scores against several recordings of a person, put on the scale of scores against one.

Thresholds and calibration are fitted on pairs of recordings. A stranger's mean score with several
recordings of a person varies less than the score with one, and the mean embedding, being closer to
everybody, scores higher: at the threshold for 1 % false accepts, 0.6 % or 2 % of strangers would be
accepted (docs/results.md).
"""

from dataclasses import dataclass

import numpy as np

from speakernet.evaluation.calibration import MIN_NONTARGETS
from speakernet.evaluation.scoring import Plda, pair_scores

MAX_RECORDINGS = 2000
MAX_EACH = 10
"""Recordings compared with each other to fit the scale, in all and of each speaker."""


@dataclass(frozen=True)
class SeveralRecordings:
    """How scores of different speakers vary, for decisions about several recordings of a person.

    The more a person's unit-length embeddings differ, the smaller is the length L of their mean. If
    strangers' embeddings pointed equally in all directions, the variance of their mean scores would
    be L^2 times that of single scores. In fact it is 1 - share x (1 - L^2) times as large. Mean
    scores are stretched around the mean of different speakers until they vary as single ones. The
    default stretches nothing: then there are fewer false accepts than stated, and more misses than
    necessary.

    >>> several = SeveralRecordings(mean=0.1, share=0.5)
    >>> several.as_one(np.array([0.4]), np.array([0.6])).round(4).tolist()
    [0.4354]
    """

    mean: float = 0.0
    """Of the scores of different speakers."""
    share: float = 0.0
    """0: averaging does not reduce the variance; 1: it does as if all directions were equal."""

    def as_one(self, means: np.ndarray, squared_lengths: np.ndarray) -> np.ndarray:
        """Turn mean scores with people whose mean embeddings have these squared lengths into scores
        with one recording, whose length is 1.
        """
        return self.mean + (means - self.mean) / np.sqrt(1 - self.share * (1 - squared_lengths))


NOT_STRETCHED = SeveralRecordings()


def fit_several_on_people(
    units: np.ndarray, people: np.ndarray, plda: Plda | None, pairs: np.ndarray | None = None
) -> SeveralRecordings | None:
    """Fit on comparisons between recordings of different people; None if there are too few.

    Args:
        units: (recordings, dim), unit length.
        people: (recordings,) numbers.
        plda: replaces the cosine.
        pairs: (2, pairs) people to compare; None: all.
    """
    # Time and memory grow with the square of the number of recordings. Few of each speaker are
    # used, so that one with a thousand recordings does not decide alone.
    rows = _some_recordings(people)
    units = units[rows]
    people = people[rows].astype(np.int64)
    is_compared = people[:, None] != people
    if pairs is not None:
        # One number for each pair of people, in both orders.
        size = 1 + max(people.max(initial=0), pairs.max(initial=0))
        listed = pairs.astype(np.int64)
        numbers = np.concatenate([listed[0] * size + listed[1], listed[1] * size + listed[0]])
        is_compared &= np.isin(people[:, None] * size + people, numbers)
    scores = pair_scores(units, units, plda).astype(np.float64)
    return fit_several(scores, units, people, is_compared)


def fit_several(
    scores: np.ndarray, units: np.ndarray, people: np.ndarray, is_compared: np.ndarray
) -> SeveralRecordings | None:
    """Fit on scores between recordings of different people; None if there are too few.

    Args:
        scores: (recordings, recordings).
        units: (recordings, dim), unit length.
        people: (recordings,) numbers.
        is_compared: (recordings, recordings), the same for all recordings of a person.
    """
    num_repeats = 0
    score_distances = 0.0
    unit_distances = 0.0
    # Two sums over people: the squared distances of a stranger's scores with a person's recordings
    # from their mean, and those of the recordings from theirs. If embeddings pointed equally in all
    # directions, their ratio would be the variance of all scores between strangers.
    for person in np.unique(people):
        rows = np.flatnonzero(people == person)
        block = scores[np.ix_(rows, is_compared[rows[0]])]  # (recordings, strangers)
        num_strangers = block.shape[1]
        num_repeats += num_strangers * (len(rows) - 1)
        score_distances += np.square(block - block.mean(axis=0)).sum()
        unit_distances += num_strangers * np.square(units[rows] - units[rows].mean(axis=0)).sum()
    if num_repeats < MIN_NONTARGETS:
        return None
    strangers = scores[is_compared]
    variance = strangers.var()
    if unit_distances * variance == 0:
        return None
    # The true share is at most 1, but an estimate from few recordings may exceed it.
    share = score_distances / unit_distances / variance
    return SeveralRecordings(float(strangers.mean()), float(min(share, 1.0)))


def _some_recordings(people: np.ndarray) -> np.ndarray:
    """Rows of people with several recordings, at most `MAX_EACH` of each and `MAX_RECORDINGS`."""
    rows = first_of_each(people, MAX_EACH)
    # A person with a single recording shows no variation between recordings.
    _, numbers, counts = np.unique(people[rows], return_inverse=True, return_counts=True)
    return rows[counts[numbers] > 1][:MAX_RECORDINGS]


def first_of_each(people: np.ndarray, limit: int) -> np.ndarray:
    """The first `limit` rows of each person, person by person.

    >>> first_of_each(np.array([7, 3, 7, 7, 3]), 2).tolist()
    [1, 4, 0, 2]
    """
    order = np.argsort(people, kind="stable")
    # The place of each row among those of its person.
    places = np.arange(len(order)) - np.searchsorted(people[order], people[order])
    return order[places < limit]
