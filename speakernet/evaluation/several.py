"""Scores against several recordings of a person, put on the scale of scores against one.

Thresholds and calibration are fitted on pairs of recordings. A stranger's mean score with several
recordings of a person varies less than the score with one, and the mean embedding, being closer to
everybody, scores higher: at the threshold for 1 % false accepts, 0.6 % or 2 % of strangers would be
accepted (docs/results.md).
"""

from dataclasses import dataclass

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation.calibration import MIN_NONTARGETS
from speakernet.evaluation.scoring import Plda, pair_scores
from speakernet.evaluation.speakers import Speakers

MAX_RECORDINGS = 2000
MAX_EACH = 10
"""Recordings compared with each other to fit the scale, in all and of each speaker."""
SMALLEST_VARIANCE = 1e-12


@dataclass(frozen=True)
class SeveralRecordings:
    """How scores of different speakers vary, for decisions about several recordings of a person.

    If a stranger's scores with two recordings of a person have the correlation c, the mean over n
    recordings has the variance of a single score times `c + (1 - c) / n`. So it is stretched around
    the mean score until it varies as much. The default stretches nothing: then there are fewer
    false accepts than stated, and more misses than necessary.

    >>> several = SeveralRecordings(mean=0.1, correlation=0.5)
    >>> several.as_one(np.array([0.4]), np.array([2.0])).round(4).tolist()
    [0.4464]
    """

    mean: float = 0.0
    """Of the scores of different speakers."""
    correlation: float = 1.0
    """Of a stranger's scores with two recordings of a person."""

    def as_one(self, means: np.ndarray, num_recordings: np.ndarray) -> np.ndarray:
        """Turn mean scores over `num_recordings` into scores with one recording."""
        variance = self.correlation + (1 - self.correlation) / num_recordings
        return self.mean + (means - self.mean) / np.sqrt(variance)


NOT_STRETCHED = SeveralRecordings()


def effective_number(sums: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """How many equal weights give a mean of the same variance as weights with these sums and sums
    of squares.

    Source: Kish, Survey Sampling, 1965.

    >>> effective_number(np.array([3.0, 4.0]), np.array([3.0, 10.0])).tolist()
    [3.0, 1.6]
    """
    return sums**2 / squares


def fit_several(
    scores: np.ndarray, enrolments: np.ndarray, tests: np.ndarray
) -> SeveralRecordings | None:
    """Fit on scores of recordings with those of other people, by analysis of variance over
    (enrolment, test); None if too few tests were compared with several recordings of an enrolment.

    Args:
        scores: (comparisons,).
        enrolments: (comparisons,) number of the person or, if known, of the session.
        tests: (comparisons,) number of the other recording.
    """
    pairs = enrolments.astype(np.int64) * (int(tests.max(initial=0)) + 1) + tests
    _, groups, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    num_repeats = len(scores) - len(counts)
    if num_repeats < MIN_NONTARGETS:
        return None
    mean = scores.mean(dtype=np.float64)
    deviations = scores - mean
    within = deviations - (np.bincount(groups, deviations) / counts)[groups]
    variance = max(np.square(deviations).mean(), SMALLEST_VARIANCE)
    correlation = 1 - np.square(within).sum() / num_repeats / variance
    return SeveralRecordings(float(mean), float(np.clip(correlation, 0.0, 1.0)))


def several_of_list(
    units: np.ndarray, speakers: Speakers, trials: TrialList, plda: Plda | None
) -> SeveralRecordings | None:
    """Fit on the recordings of a labelled list; the list decides which speakers are compared, but
    all their recordings are.

    Args:
        units: (utterances, dim), unit length.
        speakers: of the utterances.
        trials: pairs of recordings.
        plda: replaces the cosine.
    """
    assert trials.labels is not None, "a calibration list is labelled"
    rows = some_recordings(speakers.ids)
    # Speakers are numbered again, because a list may have hundreds of thousands.
    known, people = np.unique(speakers.ids[rows], return_inverse=True)
    nontargets = np.flatnonzero(trials.labels == 0)
    sides = speakers.ids[np.stack([trials.enrol[nontargets], trials.test[nontargets]])]
    first, second = np.searchsorted(known, sides[:, np.isin(sides, known).all(axis=0)])
    is_compared = np.zeros((len(known), len(known)), dtype=bool)
    is_compared[first, second] = True
    enrol, test = np.nonzero((is_compared | is_compared.T)[np.ix_(people, people)])
    scores = pair_scores(units[rows], units[rows], plda)[enrol, test]
    # Recordings of one session are most alike, so they count as least: people often enrol in one.
    several = None
    if speakers.sessions is not None:
        several = fit_several(scores, speakers.sessions[rows][enrol], test)
    return several or fit_several(scores, people[enrol], test)


def several_of_people(
    units: np.ndarray, people: np.ndarray, plda: Plda | None
) -> SeveralRecordings | None:
    """Fit on all comparisons between recordings of different people.

    Args:
        units: (recordings, dim), unit length.
        people: (recordings,) numbers.
        plda: replaces the cosine.
    """
    rows = some_recordings(people)
    people = people[rows]
    enrol, test = np.nonzero(people[:, None] != people)
    scores = pair_scores(units[rows], units[rows], plda)[enrol, test]
    return fit_several(scores, people[enrol], test)


def some_recordings(people: np.ndarray) -> np.ndarray:
    """Rows of recordings of people with several, bounded in number."""
    if not len(people):
        return people
    order = np.argsort(people, kind="stable")
    ranks = np.arange(len(order)) - np.searchsorted(people[order], people[order])
    rows = order[ranks < MAX_EACH]
    return rows[np.bincount(people[rows])[people[rows]] > 1][:MAX_RECORDINGS]
