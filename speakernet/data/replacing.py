"""An utterance that cannot be read is replaced by another of the same speaker, and both are reported."""

from collections.abc import Callable

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.requests import BatchReport, BatchRequest
from speakernet.data.sharing import SharedArray
from speakernet.random import REPLACEMENT_STREAM, KeyedRandom

MAX_REPLACEMENTS = 8  # a speaker without one readable utterance in so many has none


class SpeakerIndex:
    """The rows of each speaker, for finding another utterance of the same one."""

    def __init__(self, labels: np.ndarray, eligible: np.ndarray) -> None:
        order = eligible[np.argsort(labels[eligible], kind="stable")].astype(np.int32)
        counts = np.bincount(labels[eligible], minlength=int(labels.max(initial=0)) + 1)
        self._order = SharedArray(order)
        self._first = SharedArray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        self._labels = SharedArray(labels)

    def another(self, row: int, uniform: float) -> int:
        """Another row of the speaker of `row`, chosen by a number in [0, 1); `row` itself when it is the only one."""
        label = int(self._labels.array[row])
        first, last = int(self._first.array[label]), int(self._first.array[label + 1])
        return int(self._order.array[first + int(uniform * (last - first))]) if last > first else row

    def share(self) -> None:
        """Move into shared memory."""
        for array in (self._order, self._first, self._labels):
            array.share()


def read_or_replace(
    request: BatchRequest,
    report: BatchReport,
    read: Callable[[np.ndarray, np.ndarray], dict[int, str]],
    *,
    seed: int,
    speakers: SpeakerIndex | None,
) -> None:
    """Read a request's rows; one that cannot be read is replaced by another of its speaker, and both are reported.

    Args:
        request: what to read.
        report: its `rows` become those that were read, its `problems` grow.
        read: (rows, their places in the batch) -> place -> what is wrong.
        seed: of the run.
        speakers: where other utterances are found; None makes a row that cannot be read an error.

    Raises:
        AudioError: it is not to be replaced, or no replacement can be read either.
    """
    places = np.arange(len(request.rows))
    attempt = 0
    while problems := read(report.rows[places], places):
        if speakers is None or attempt == MAX_REPLACEMENTS:
            advice = "" if speakers else " (data.on_bad_audio: skip replaces such utterances and counts them)"
            raise AudioError(next(iter(problems.values())) + advice)
        # Another draw at each attempt, keyed by the row that was asked for: no worker or rank changes it.
        attempt += 1
        report.problems.extend(problems.values())
        places = np.array(sorted(problems))
        uniform = KeyedRandom(seed, request.epoch, request.rows[places]).uniform(REPLACEMENT_STREAM, attempt)[:, -1]
        report.rows[places] = [
            speakers.another(int(row), float(u)) for row, u in zip(request.rows[places], uniform, strict=True)
        ]
