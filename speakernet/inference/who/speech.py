"""Detect speech in a recording that may be long: it is read in pieces, so memory hardly grows with
its length.
"""

from collections.abc import Sequence

import numpy as np

from speakernet.data import speech
from speakernet.inference.recordings import Recording
from speakernet.inference.who.segmentation import Section, Segmentation

BEGIN = 0.2
END = 0.1
"""Lower than for a decision about one voice: here a missed word costs as much as a noise that is
mistaken for one."""
SEGMENTATION_WEIGHT = 0.3
"""Of the segmentation's log-odds; the rest is the detector's. The two mistake different sounds."""
SPOKEN = 0.2
SPOKEN_PADDING_SECONDS = 0.06
"""With a segmentation, somebody speaks at this probability, and this much around it."""


def find_speech(
    recording: Recording, segmentation: Segmentation | None = None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Where voices are looked for and, within that, where somebody speaks, both (stretches, 2) in
    seconds, sorted and disjoint; and the name of the detector.
    """
    # Voices are looked for where the detector finds speech, with or without a segmentation: it
    # hears soft words better, and people keep their names. The segmentation sees the borders of
    # words and short pauses more sharply.
    detector = speech.default_detector()
    scores, seconds = speech.frame_scores(recording.blocks(), recording.sample_rate)
    stretches = speech.stretches(scores, seconds, BEGIN, END)
    if segmentation is None:
        return stretches, stretches, detector
    # The frames differ (32 and 17 ms), so the segmentation is read at the middles of the
    # detector's. Log-odds are averaged, so that the more certain of the two decides.
    middles = speech.FRAME_SECONDS * (np.arange(len(scores)) + 0.5)
    log_odds = SEGMENTATION_WEIGHT * _log_odds(segmentation.speech_at(middles))
    log_odds += (1.0 - SEGMENTATION_WEIGHT) * _log_odds(scores)
    probabilities = 1.0 / (1.0 + np.exp(-log_odds))
    spoken = speech.stretches(
        probabilities, seconds, SPOKEN, SPOKEN, 0.0, padding_seconds=SPOKEN_PADDING_SECONDS
    )
    return stretches, spoken, f"{detector} and {segmentation.name}"


def within(sections: Sequence[Section], spoken: np.ndarray) -> list[Section]:
    """The sections, cut to where somebody speaks; whole where nothing would be left.

    >>> within([(0.0, 2.0, 5), (3.0, 4.0, 6)], np.array([[0.5, 1.0], [1.5, 2.5]]))
    [(0.5, 1.0, 5), (1.5, 2.0, 5), (3.0, 4.0, 6)]
    """
    cut = []
    for start, stop, voice in sections:
        # Parts outside the section become empty.
        parts = np.clip(spoken, start, stop)
        parts = parts[parts[:, 0] < parts[:, 1]]
        cut += [(begin, end, voice) for begin, end in parts.tolist()] or [(start, stop, voice)]
    return cut


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    """Logarithms of the odds, bounded at about 7."""
    return np.asarray(np.log((probabilities + 1e-3) / (1.0 - probabilities + 1e-3)))
