"""Speed perturbation: the factors that speakers are multiplied by, and audio played that much faster."""

from fractions import Fraction
from typing import Any

import numpy as np

from speakernet.data.audio import resample, to_int16

RESAMPLER_MARGIN = 32  # samples read beyond a crop whose speed is changed, so that its end is not the filter's
LARGEST_DENOMINATOR = 20  # of a factor: with larger ones the resampler's filter grows long


def speed_fractions(factors: list[float]) -> list[Fraction]:
    """The speed factors as fractions, 1 first where it is among them, so that its speakers keep their labels.

    >>> speed_fractions([0.9, 1.0, 1.1])
    [Fraction(1, 1), Fraction(9, 10), Fraction(11, 10)]
    """
    fractions = [Fraction(factor).limit_denominator(LARGEST_DENOMINATOR) for factor in dict.fromkeys(factors)]
    return sorted(fractions, key=lambda fraction: fraction != 1)


def samples_to_read(factor: Fraction, num_samples: int) -> int:
    """Samples that a crop of `num_samples` at that speed is made of."""
    if factor == 1:
        return num_samples
    return -(-num_samples * factor.numerator // factor.denominator) + RESAMPLER_MARGIN


def change_speed(crops: np.ndarray, factor: Fraction, num_samples: int, dtype: Any = np.float32) -> np.ndarray:
    """Play (batch, samples) `factor` times as fast (tempo and pitch, as sox's `speed`), cut to `num_samples`."""
    if factor == 1:
        return crops
    made = resample(crops, factor.denominator, factor.numerator)[:, :num_samples]
    return to_int16(made) if dtype == np.int16 else made
