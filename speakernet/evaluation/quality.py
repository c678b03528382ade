"""Measures of an utterance's quality from its samples alone, for calibration and slices."""

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.files import parallel_map
from speakernet.options import SAMPLE_RATE

FRAME_SECONDS = 0.025
FRAMES_AT_ONCE = 2400
"""A minute: of longer recordings only the powers of their frames are in memory."""
QUIET_PERCENTILE, LOUD_PERCENTILE = 10, 90
SILENCE_POWER = 1e-10


def signal_to_noise_ratios(source: AudioSource, names: StringTable, num_threads: int) -> np.ndarray:
    """`signal_to_noise_db` of every utterance, (utterances,) float64.

    Raises:
        AudioError: an utterance that cannot be read, or holds nothing.
    """
    found = parallel_map(
        lambda name: _ratio_of(source, name),
        names,
        num_threads,
        "signal-to-noise ratios",
        total=len(names),
        unit="utterance",
    )
    return np.fromiter(found, dtype=np.float64, count=len(names))


def signal_to_noise_db(waveform: np.ndarray, sample_rate: int = SAMPLE_RATE) -> float:
    """A rough signal-to-noise ratio: loud against quiet frames (90th and 10th percentile of power), in dB.

    It orders recordings by noise well enough to slice and calibrate by; it is no measurement of a known noise.

    >>> quiet_then_loud = np.repeat(np.float32([0.01, 1.0]), 16000)
    >>> round(signal_to_noise_db(quiet_then_loud))
    40
    """
    return power_ratio_db(frame_powers(waveform, sample_rate))


def _ratio_of(source: AudioSource, name: str) -> float:
    frame = round(FRAME_SECONDS * source.sample_rate)
    powers: list[np.ndarray] = []
    # Blocks hold whole frames, so that the frames are those of the recording read at once.
    for block in source.blocks(name, FRAMES_AT_ONCE * frame):
        if len(block) >= frame or (len(block) and not powers):
            powers.append(frame_powers(block, source.sample_rate))
    ratio = power_ratio_db(np.concatenate(powers)) if powers else float("nan")
    if not np.isfinite(ratio):
        raise AudioError(f"{name}: holds no samples, or some that are NaN or infinite")
    return ratio


def frame_powers(waveform: np.ndarray, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Mean square of every 25 ms, (frames,) float64; what is left over at the end is no frame.

    >>> frame_powers(np.ones(1000, dtype=np.float32)).tolist()
    [1.0, 1.0]
    """
    frame = round(FRAME_SECONDS * sample_rate)
    count = max(1, len(waveform) // frame)
    # An utterance shorter than a frame is one frame, whose ratio to itself is 0 dB.
    frames = waveform[: count * frame].reshape(count, -1) if len(waveform) >= frame else waveform[None, :]
    return np.square(frames, dtype=np.float64).mean(axis=1)


def power_ratio_db(powers: np.ndarray) -> float:
    """Loud against quiet frames: 90th and 10th percentile of (frames,) powers, in dB."""
    # A power of exactly zero (digital silence) would give an infinite ratio.
    quiet, loud = np.percentile(powers + SILENCE_POWER, [QUIET_PERCENTILE, LOUD_PERCENTILE])
    return float(10 * np.log10(loud / quiet))
