"""Every random choice of augmentation, for a whole batch at once; no audio is touched here.

Choices are keyed by (seed, epoch, row), so they do not depend on batches, workers or ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from speakernet.data.augment.options import AugmentOptions
from speakernet.random import KeyedRandom

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


class Drawer:
    """Draws the choices of batches."""

    def __init__(
        self,
        available: Sequence[str],
        options: AugmentOptions,
        *,
        num_clips: Mapping[str, int],
        num_rirs: int,
        seed: int,
    ) -> None:
        self.options = options
        self.snr_db = {"noise": options.noise_snr_db, "music": options.music_snr_db, "babble": options.babble_snr_db}
        self._codes = np.array([KINDS.index(kind) for kind in available], dtype=np.int8)
        self._num_clips, self._num_rirs = dict(num_clips), num_rirs
        self._seed = seed

    def draw(self, rows: np.ndarray, epoch: int) -> Drawn:
        """Every choice for the utterances `rows` of the training list (batch,) in an epoch."""
        # Keyed numbers, not generators: a generator for each utterance costs 15 us, a tenth of a crop's whole budget.
        random, options, codes = KeyedRandom(self._seed, epoch, rows), self.options, self._codes
        streams = (KIND_STREAM, RIR_STREAM, TALKERS_STREAM, VOLUME_STREAM, TELEPHONE_STREAM, CODEC_STREAM)
        kind, rir, talkers, volume, telephone, codec = random.uniforms(streams)[:, :, 0]
        kinds = np.zeros(len(rows), dtype=np.int8)
        if len(codes):
            # One number decides both: below `probability` it is divided evenly among the categories.
            kind = kind / max(options.probability, 1e-12)
            chosen = codes[np.minimum((kind * len(codes)).astype(np.int64), len(codes) - 1)]
            kinds = np.where(kind < 1, chosen, CLEAN).astype(np.int8)
        fewest, most = options.babble_speakers
        counts = np.where(kinds == BABBLE, fewest + (talkers * (most - fewest + 1)).astype(np.int64), 0)
        counts[(kinds == MUSIC) | (kinds == NOISE)] = 1
        width = max(int(counts.max(initial=0)), 1)
        is_used = np.arange(width) < counts[:, None]
        source_rows = np.nonzero(is_used)[0]
        clip, place, snr_db = random.uniforms((CLIP_STREAM, PLACE_STREAM, SNR_STREAM), width)
        clips = np.zeros((len(kinds), width), dtype=np.int64)
        if options.style != "classic":
            # The talkers of babble are one noise, at one ratio; the classic pipeline draws one for each.
            snr_db[:] = snr_db[:, :1]
        for code in (MUSIC, BABBLE, NOISE):
            some = np.flatnonzero(kinds == code)
            if len(some):
                most_used = width if code == BABBLE else 1
                clips[some, :most_used] = distinct_choices(clip[some, :most_used], self._num_clips[KINDS[code]])
                low, high = self.snr_db[KINDS[code]]
                snr_db[some] = low + (high - low) * snr_db[some]
        low, high = options.volume_db
        return Drawn(
            kinds=kinds,
            rirs=np.where(kinds == REVERB, (rir * self._num_rirs).astype(np.int64), -1),
            source_rows=source_rows,
            source_kinds=kinds[source_rows],
            clips=clips[is_used],
            places=place[is_used],
            snr_db=snr_db[is_used],
            gains_db=low + (high - low) * volume,
            telephone=telephone < options.telephone_probability,
            codec=codec < options.codec_probability,
        )


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
