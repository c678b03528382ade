"""Speed perturbation: the factors that speakers are multiplied by, and audio played that much faster.

The resampler is scipy's (`resample_poly` with its default filter; a test compares them), as one product of matrices for
a whole batch, so that the same code runs in a loader worker and on the training device.
"""

import functools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speakernet.data.audio import RESAMPLER_REACH
from speakernet.data.on_device import send

RESAMPLER_MARGIN = 32  # samples read beyond a crop whose speed is changed, so that its end is not the filter's
KAISER_BETA = 5.0  # of scipy's default window
LARGEST_DENOMINATOR = 20  # of a factor: with larger ones the resampler's filter grows long
KEPT_FILTERS = 64


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


def most_samples_to_read(factors: Sequence[Fraction], num_samples: int) -> int:
    """Samples that a crop of `num_samples` is made of at the fastest of several speeds."""
    return max(samples_to_read(factor, num_samples) for factor in factors)


def change_speed(crops: Tensor, factor: Fraction, num_samples: int) -> Tensor:
    """Play float32 (batch, samples) `factor` times as fast (tempo and pitch, as sox's `speed`), cut to `num_samples`.

    Before the first sample and after the last there is silence.
    """
    if factor == 1:
        return crops[:, :num_samples]
    up, down = factor.denominator, factor.numerator
    bank, before = _filter_bank(factor, crops.device)
    # Output q * up + p is a sum over the samples around q * down: one window for each q gives `up` outputs.
    num_windows = -(-num_samples // up)
    needed = (num_windows - 1) * down + len(bank)
    padded = functional.pad(crops, (before, max(0, needed - before - crops.shape[1])))
    windows = padded[:, :needed].unfold(1, len(bank), down)
    # Of matrices, whose products keep all bits of float32 (`machine.settings`): TF32 would leave the stop band ten. And
    # whoever takes a batch within autocast, as the measuring of statistics does, wants no bfloat16 audio.
    with torch.autocast(crops.device.type, enabled=False):
        filtered = windows @ bank
    return filtered.reshape(len(crops), num_windows * up)[:, :num_samples]


def change_speeds(crops: Tensor, speeds: np.ndarray, factors: Sequence[Fraction], num_samples: int) -> Tensor:
    """Play every row of a batch at its own speed.

    Args:
        crops: float32 (batch, `most_samples_to_read`); a row is read as far as its speed needs.
        speeds: index of each row into `factors`, (batch,).
        factors: the speeds.
        num_samples: length of the result.

    Returns:
        Float32 (batch, num_samples).
    """
    if not speeds.any():
        return change_speed(crops[:, : samples_to_read(factors[0], num_samples)], factors[0], num_samples)
    out = torch.empty(len(crops), num_samples, device=crops.device)
    present = np.unique(speeds).tolist()
    sent = send(crops.device, [np.flatnonzero(speeds == speed) for speed in present])
    for speed, chosen in zip(present, sent, strict=True):
        some = crops[chosen, : samples_to_read(factors[speed], num_samples)]
        out.index_copy_(0, chosen, change_speed(some, factors[speed], num_samples))
    return out


@functools.lru_cache(maxsize=KEPT_FILTERS)
def _filter_bank(factor: Fraction, device: torch.device) -> tuple[Tensor, int]:
    """Float32 (taps, up), a filter for each of the `up` outputs of a window, and samples before the window's own."""
    up, down = factor.denominator, factor.numerator
    slower = max(up, down)
    reach = RESAMPLER_REACH * slower
    places = np.arange(-reach, reach + 1)
    taps = np.sinc(places / slower) * np.kaiser(2 * reach + 1, KAISER_BETA)
    taps *= up / taps.sum()
    before, after = reach // up, ((up - 1) * down + reach) // up
    # Output p, `p * down` steps of the fine grid behind the window's own sample, meets sample j at `j * up`.
    distance = np.arange(up) * down - np.arange(-before, after + 1)[:, None] * up
    is_inside = np.abs(distance) <= reach
    bank = np.where(is_inside, taps[np.where(is_inside, distance, 0) + reach], 0.0)
    return torch.from_numpy(bank.astype(np.float32)).to(device), before
