"""Detect speech in a recording that may be long: it is read in pieces, so memory hardly grows with
its length.
"""

import numpy as np

from speakernet.data import speech
from speakernet.inference.recordings import Recording
from speakernet.inference.who.segmentation import Segmentation

BEGIN = 0.2
END = 0.1
"""Lower than for a decision about one voice: here a missed word costs as much as a noise that is
mistaken for one."""
SEGMENTATION_WEIGHT = 0.7
"""Of the segmentation's log-odds; the rest is the detector's. The two mistake different sounds."""
BEGIN_OF_BOTH = 0.6
END_OF_BOTH = 0.3
"""Probabilities, as `BEGIN` and `END`."""


def find_speech(
    recording: Recording, segmentation: Segmentation | None = None
) -> tuple[np.ndarray, str]:
    """Stretches of speech in seconds, (stretches, 2), sorted and disjoint, and the name of the
    detector.
    """
    detector = speech.default_detector()
    scores, seconds = speech.frame_scores(recording.blocks(), recording.sample_rate)
    if segmentation is None:
        return speech.stretches(scores, seconds, BEGIN, END), detector
    middles = speech.FRAME_SECONDS * (np.arange(len(scores)) + 0.5)
    log_odds = SEGMENTATION_WEIGHT * _log_odds(segmentation.speech_at(middles))
    log_odds += (1.0 - SEGMENTATION_WEIGHT) * _log_odds(scores)
    probabilities = 1.0 / (1.0 + np.exp(-log_odds))
    # The segmentation sees the borders of words more sharply than the detector: no padding.
    stretches = speech.stretches(
        probabilities, seconds, BEGIN_OF_BOTH, END_OF_BOTH, padding_seconds=0.0
    )
    return stretches, f"{detector} and {segmentation.name}"


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    """Logarithms of the odds, bounded at about 7."""
    return np.asarray(np.log((probabilities + 1e-3) / (1.0 - probabilities + 1e-3)))
