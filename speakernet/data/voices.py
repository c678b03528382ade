"""The voices that every speaker is heard in: as recorded, at other speeds, with vocal tracts of other lengths.

The one place where the classes of a head are counted, numbered and drawn. Each voice but the recorded one makes a new
speaker of everybody: with three speeds and three warps a list of 150 speakers has 1,350 classes.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from speakernet.random import REAL_STREAM, VOICE_STREAM, KeyedRandom


@dataclass(frozen=True)
class Voices:
    """Every speed with every warp, and how often each is heard. Voice 0 is the recorded one where there is one.

    Attributes:
        speeds: played so many times as fast, 1 first where it is among them (`speeds.speed_fractions`).
        warps: frequencies raised so many times (`frontend.perturbation`), 1 first where it is among them.
        real_share: share of every batch that is heard as recorded; None: each voice is as likely as every other.
        real_from: the first epoch, from 0, that is heard as recorded altogether; None: there is none.

    >>> voices = Voices(speeds=(Fraction(1), Fraction(9, 10)), warps=(1.0, 0.9, 1.1))
    >>> len(voices), voices.num_classes(150)
    (6, 900)
    >>> drawn = np.array([0, 1, 5])
    >>> voices.speeds_of(drawn), voices.warps_of(drawn), voices.classes_of(np.array([7, 7, 7]), drawn, 150)
    (array([0, 1, 1]), array([0, 0, 2]), array([  7, 157, 757]))
    """

    speeds: tuple[Fraction, ...] = (Fraction(1),)
    warps: tuple[float, ...] = (1.0,)
    real_share: float | None = None
    real_from: int | None = None

    def __len__(self) -> int:
        return len(self.speeds) * len(self.warps)

    @property
    def has_real(self) -> bool:
        """Whether the recorded voice is among them."""
        return self.speeds[0] == 1 and self.warps[0] == 1

    @property
    def has_warps(self) -> bool:
        """Whether any frequency is moved."""
        return self.warps != (1.0,)

    @property
    def share_at_other_speeds(self) -> float:
        """The share of utterances, on average, that are played faster or slower."""
        changed = len(self.warps) * sum(speed != 1 for speed in self.speeds)
        if self.real_share is None or len(self) == 1:
            return changed / len(self)
        return (1 - self.real_share) * changed / (len(self) - 1)

    def num_classes(self, num_speakers: int) -> int:
        """Classes of a head for so many speakers."""
        return num_speakers * len(self)

    def classes_of(self, labels: np.ndarray, voices: np.ndarray, num_speakers: int) -> np.ndarray:
        """Classes int64 (utterances,) of speakers (labels) in voices: those of voice n follow those of voice n - 1."""
        # In 64 bits, whatever the arrays hold: 128 speakers in voice 1 do not fit into a byte.
        return labels.astype(np.int64) + num_speakers * voices.astype(np.int64)

    def speeds_of(self, voices: np.ndarray) -> np.ndarray:
        """Index into `speeds` of each voice, (utterances,)."""
        return voices % len(self.speeds)

    def warps_of(self, voices: np.ndarray) -> np.ndarray:
        """Index into `warps` of each voice, (utterances,)."""
        return voices // len(self.speeds)

    def draw(self, seed: int, epoch: int, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """The voice of each utterance (or of each unit of utterances) of an epoch, int64 (utterances,).

        What is drawn for a row depends on seed, epoch and row alone; with `real_share` it depends on the batch too, in
        which those with the lowest numbers are left as recorded.

        Args:
            seed: of the run.
            epoch: counted from 0.
            rows: of the training list, batch after batch, (utterances,).
            bounds: batch b is `rows[bounds[b]:bounds[b + 1]]`, (batches + 1,).
        """
        if len(self) == 1 or (self.real_from is not None and epoch >= self.real_from):
            return np.zeros(len(rows), dtype=np.int64)
        choice, order = KeyedRandom(seed, epoch, rows).uniforms((VOICE_STREAM, REAL_STREAM))[..., 0]
        if self.real_share is None:
            return (choice * len(self)).astype(np.int64)
        others = 1 + (choice * (len(self) - 1)).astype(np.int64)
        # Rounded over the whole epoch, not batch by batch: a tenth of batches of 4 is one in every third batch or so.
        wanted = np.diff(np.floor(self.real_share * bounds + 0.5)).astype(np.int64)
        batches = np.repeat(np.arange(len(wanted)), np.diff(bounds))
        places = np.empty(len(rows), dtype=np.int64)
        places[np.lexsort((order, batches))] = np.arange(len(rows)) - bounds[batches]
        return np.where(places < wanted[batches], 0, others)
