"""Detect speech in a recording that may be long: it is read in pieces, so memory hardly grows with
its length.
"""

import numpy as np

from speakernet.data import speech
from speakernet.inference.recordings import Recording

BEGIN = 0.2
END = 0.1
"""Lower than for a decision about one voice: here a missed word costs as much as a noise that is
mistaken for one."""


def find_speech(recording: Recording) -> tuple[np.ndarray, str]:
    """Stretches of speech in seconds, (stretches, 2), sorted and disjoint, and the name of the
    detector.
    """
    stretches = speech.find_speech(recording.blocks(), recording.sample_rate, begin=BEGIN, end=END)
    return stretches, speech.default_detector()
