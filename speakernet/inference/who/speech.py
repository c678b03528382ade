"""Detect speech in a recording, with silero-vad if it is installed, otherwise by energy.

Recordings are read in pieces of a few minutes, so memory hardly grows with their length. Only
silero-vad distinguishes speech from other sounds (music, doors, dogs).
"""

import functools
from typing import Any

import numpy as np
import torch

from speakernet.data.audio import SAMPLE_RATE, audio_of_array
from speakernet.evaluation.slices import FRAME_SECONDS, frame_powers
from speakernet.inference.recordings import Recording, are_speech

# silero-vad sets torch to one thread when it is imported.
_threads = torch.get_num_threads()
try:
    import onnxruntime  # noqa: F401  # silero-vad needs it
    import silero_vad
except ImportError:  # It is an optional dependency.
    silero_vad = None
torch.set_num_threads(_threads)

SILERO = "silero-vad"
ENERGY = "energy"
SILERO_SECONDS = 512 / SAMPLE_RATE
PIECE_SECONDS = 300.0
BEGIN = 0.2
END = 0.1
"""Probabilities: a stretch of speech reaches `BEGIN` and extends for as long as it stays at or
above `END`."""
MIN_SURE = 0.8
"""A recording that stays below this has no speech: music and noise reach 0.7, speech in a large
hall 0.9."""
PADDING_SECONDS = 0.1
"""Added on both sides for soft beginnings and ends of words, which the detector misses."""
MIN_GAP_SECONDS = 0.3
"""A shorter pause is part of the speech around it."""
MIN_SPEECH_SECONDS = 0.2


@functools.cache
def silero() -> Any:
    """The silero-vad model that takes whole blocks of frames; None if it is not installed."""
    return silero_vad and silero_vad.load_silero_vad(sequence=True)


def find_speech(recording: Recording) -> tuple[np.ndarray, str]:
    """Stretches of speech in seconds, (stretches, 2), sorted and disjoint, and the name of the
    detector.
    """
    step = round(PIECE_SECONDS * recording.sample_rate)
    detector = silero()
    found = []
    for start in range(0, recording.num_samples, step):
        piece = recording.read(start, step)
        at_16k = audio_of_array(piece, recording.sample_rate, SAMPLE_RATE)
        found.append(detector.audio_forward(at_16k) if detector else frame_powers(at_16k))
    scores = np.concatenate(found)
    if detector:
        return stretches(
            scores * (scores.max() >= MIN_SURE), SILERO_SECONDS, recording.seconds
        ), SILERO
    is_speech = are_speech(10 * np.log10(scores + 1e-12))
    return stretches(is_speech.astype(np.float32), FRAME_SECONDS, recording.seconds), ENERGY


def stretches(scores: np.ndarray, frame_seconds: float, seconds: float) -> np.ndarray:
    """Stretches of speech, (stretches, 2) seconds, from the probability of each frame.

    >>> stretches(np.array([0, 0, 0.4, 0.2, 0.2, 0.05, 0, 0.9]), 1.0, 8.0).tolist()
    [[1.9, 5.1], [6.9, 8.0]]
    """
    # Runs of frames at or above `END` in which at least one frame reaches `BEGIN`.
    runs = np.split(np.arange(len(scores)), np.flatnonzero(np.diff(scores >= END)) + 1)
    spoken = [run for run in runs if len(run) and scores[run].max() >= BEGIN]
    if not spoken:
        return np.zeros((0, 2))
    edges = np.array([(run[0], run[-1] + 1) for run in spoken]) * frame_seconds
    edges = np.clip(edges + np.array([-PADDING_SECONDS, PADDING_SECONDS]), 0.0, seconds)
    apart = edges[1:, 0] - edges[:-1, 1] >= MIN_GAP_SECONDS
    joined = np.stack([edges[np.append(True, apart), 0], edges[np.append(apart, True), 1]], axis=1)
    return joined[joined[:, 1] - joined[:, 0] >= MIN_SPEECH_SECONDS]
