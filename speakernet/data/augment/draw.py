"""Every random choice of augmentation, for a whole batch at once; no audio is touched here.

Choices are keyed by (seed, epoch, row), so they do not depend on batches, workers or ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

CLEAN, REVERB, MUSIC, BABBLE, NOISE = range(5)
KINDS = ("clean", "reverb", "music", "babble", "noise")
# Streams of the keyed random numbers; another number gives unrelated ones.
KIND_STREAM, RIR_STREAM, TALKERS_STREAM, CLIP_STREAM, PLACE_STREAM, SNR_STREAM = range(100, 106)
VOLUME_STREAM, TELEPHONE_STREAM, CODEC_STREAM = range(106, 109)


@dataclass(frozen=True)
class Drawn:
    """Every choice for one batch. Sources are the clips that are added, in the order of their utterances."""

    kinds: np.ndarray
    rirs: np.ndarray
    source_rows: np.ndarray
    source_kinds: np.ndarray
    clips: np.ndarray
    places: np.ndarray
    snr_db: np.ndarray
    gains_db: np.ndarray
    telephone: np.ndarray
    codec: np.ndarray


class Ingredients(NamedTuple):
    """The audio that the choices need, on the device where it is mixed."""

    noises: Tensor
    reverberated: Tensor | None = None
    """Utterances that are reverberated, if any, and for each the spectrum of its RIR at `fft_samples`."""
    spectra: Tensor | None = None
    fft_samples: int = 0


def distinct_choices(numbers: np.ndarray, num_choices: int) -> np.ndarray:
    """For each row, different members of 0 … num_choices - 1 from uniform numbers (rows, count), int64 (rows, count).

    The k-th number chooses among those that are left. If there are fewer members than numbers they repeat.

    >>> distinct_choices(np.array([[0.0, 0.0, 0.99]]), 4).tolist()
    [[0, 1, 3]]
    """
    rows, count = numbers.shape
    chosen = np.zeros((rows, count), dtype=np.int64)
    for k in range(count):
        pick = (numbers[:, k] * max(num_choices - k % num_choices, 1)).astype(np.int64)
        taken = np.sort(chosen[:, k - k % num_choices : k], axis=1)
        for j in range(taken.shape[1]):
            pick += pick >= taken[:, j]
        chosen[:, k] = pick
    return chosen
