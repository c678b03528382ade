"""Levels of a waveform's frames, and a rough signal-to-noise ratio from them."""

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.files import parallel_map
from speakernet.options import SAMPLE_RATE

FRAME_SECONDS = 0.025
QUIET_PERCENTILE = 10
LOUD_PERCENTILE = 90
SILENCE_POWER = 1e-10
SILENT_DB = -60.0
"""Relative to full scale; even quiet speech with a low microphone gain is louder."""
FRAMES_AT_ONCE = 2400
"""One minute; longer recordings are read in blocks, so that only their frame powers stay in
memory."""


def frame_powers(waveform: np.ndarray, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Mean square of each frame of 25 ms, (frames,) float64; an incomplete last frame is dropped.

    >>> frame_powers(np.ones(1000, dtype=np.float32)).tolist()
    [1.0, 1.0]
    """
    frame_samples = round(FRAME_SECONDS * sample_rate)
    num_frames = len(waveform) // frame_samples
    frames = waveform[: num_frames * frame_samples].reshape(num_frames, frame_samples)
    if not num_frames:
        # An utterance shorter than a frame counts as one frame; its ratio is 0 dB.
        frames = waveform[None, :]
    return np.square(frames, dtype=np.float64).mean(axis=1)


def power_ratio_db(powers: np.ndarray) -> float:
    """A rough signal-to-noise ratio in dB: the 90th over the 10th percentile of the frame powers,
    (frames,).

    It ranks recordings by noise well enough for slicing and calibration, but does not measure the
    true ratio.

    >>> round(power_ratio_db(np.repeat([0.0001, 1.0], 16000)))
    40
    """
    # Digital silence has zero power, which would give an infinite ratio.
    quiet, loud = np.percentile(powers + SILENCE_POWER, [QUIET_PERCENTILE, LOUD_PERCENTILE])
    return float(10 * np.log10(loud / quiet))


def signal_to_noise_ratios(source: AudioSource, names: StringTable, num_threads: int) -> np.ndarray:
    """Signal-to-noise ratio of every utterance in dB, by `power_ratio_db`: (utterances,)
    float64.
    """

    def ratio(name: str) -> float:
        # Pauses of speech contain only noise, so quiet frames show the level of the noise and loud
        # ones that of both. The ratio is a guess, good enough for groups of five decibels and more.
        frame = round(FRAME_SECONDS * source.sample_rate)
        powers: list[np.ndarray] = []
        # Blocks hold whole frames, so the frames are the same as when the recording is read in one
        # piece.
        for block in source.blocks(name, FRAMES_AT_ONCE * frame):
            if len(block) >= frame or (len(block) and not powers):
                powers.append(frame_powers(block, source.sample_rate))
        # NaN samples make the power of their frame NaN, so this finds them too.
        decibels = power_ratio_db(np.concatenate(powers)) if powers else float("nan")
        if not np.isfinite(decibels):
            raise AudioError(f"{name}: there are no samples, or some are NaN or infinite")
        return decibels

    ratios = parallel_map(
        ratio, names, num_threads, "signal-to-noise ratios", total=len(names), unit="utterance"
    )
    return np.fromiter(ratios, dtype=np.float64, count=len(names))
