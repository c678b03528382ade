"""Reverberation and noise on a CPU: read and added one utterance at a time, while its samples are in the cache.

The same function as `Augmenter.apply` (a test compares them), for batches in this process's memory. What it saves:
noise in memory is cast straight into a scratch row and its scale goes into the weight; weights are Python numbers, so a
source is added in one pass; spectra are multiplied where they lie; scratch memory is kept from batch to batch.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speakernet.data.augment.banks import ClipBank, RirBank
from speakernet.data.augment.draw import KINDS, Drawn

CLASSIC_POWER_FLOOR = 1e-4  # voxceleb_trainer adds it to every power
POWER_FLOOR = 1e-10  # -100 dB of full scale: keeps the ratio of silent speech or noise finite
FEWEST_FFT_ROWS = 2  # transforms of one row take four times as long as each of two
MOST_LENGTHS = 8  # lengths of transform that scratch memory is kept for


class CpuMixer:
    """Disturbs batches in place; holds scratch memory, so it serves one thread.

    Args:
        banks: clips by kind.
        rirs: room impulse responses; None for no reverberation.
        is_classic: voxceleb_trainer's power floor, and each babble talker at a ratio of its own.
    """

    def __init__(self, banks: Mapping[str, ClipBank], rirs: RirBank | None, *, is_classic: bool) -> None:
        self._banks, self._rirs, self._is_classic = banks, rirs, is_classic
        self._forget()

    def _forget(self) -> None:
        self._sources, self._mixture, self._weights = torch.empty(0, 0), torch.empty(0), torch.empty(0)
        self._rows: tuple[Tensor, ...] = ()
        self._padded: dict[tuple[int, int], Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"banks": self._banks, "rirs": self._rirs, "is_classic": self._is_classic}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A worker makes scratch memory of its own.
        self.__init__(**state)  # type: ignore[misc]

    def add_noises(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Add every source of `drawn` to its utterance of `waveforms` (batch, samples).

        Raises:
            AudioError: a clip cannot be read.
        """
        if len(drawn.clips) == 0:
            return
        num_samples = waveforms.shape[1]
        utterances, first, counts = np.unique(drawn.source_rows, return_index=True, return_counts=True)
        self._make_room(int(counts.max()), num_samples)
        arrays = [row.numpy() for row in self._rows]
        crops = {
            code: self._banks[KINDS[code]].crops(drawn.clips, drawn.places, drawn.source_kinds == code, num_samples)
            for code in np.unique(drawn.source_kinds).tolist()
        }
        ratios = (10 ** (-drawn.snr_db / 10)).tolist()
        kinds = drawn.source_kinds.tolist()
        speeches = waveforms.unbind()
        for utterance, begin, count in zip(utterances.tolist(), first.tolist(), counts.tolist(), strict=True):
            some = crops[kinds[begin]]
            scales = [some.write(begin + k, arrays[k]) for k in range(count)]
            powers = some.powers[begin : begin + count]
            if any(map(math.isnan, powers)):
                powers = [
                    float(torch.dot(row, row)) * scale * scale / num_samples
                    for row, scale in zip(self._rows, scales, strict=False)
                ]
            self._add(speeches[utterance], scales, powers, ratios[begin : begin + count])

    def _make_room(self, count: int, num_samples: int) -> None:
        if self._sources.shape[0] < count or self._sources.shape[1] != num_samples:
            self._sources = torch.empty(count, num_samples)
            self._rows = self._sources.unbind()
            self._mixture = torch.empty(num_samples)
            self._weights = torch.empty(count)

    def _add(self, speech: Tensor, scales: list[float], powers: list[float], ratios: list[float]) -> None:
        """Add the first sources of the scratch memory to `speech`; times `scales` they have `powers`."""
        num_samples = speech.shape[0]
        power = float(torch.dot(speech, speech)) / num_samples
        floor = CLASSIC_POWER_FLOOR
        if len(scales) == 1:
            ratio = (power + floor) / (powers[0] + floor) if self._is_classic else _ratio(power, powers[0])
            torch.add(speech, self._rows[0], alpha=math.sqrt(ratio * ratios[0]) * scales[0], out=speech)
        elif self._is_classic:
            weights = (
                scale * math.sqrt((power + floor) / (each + floor) * ratio)
                for each, ratio, scale in zip(powers, ratios, scales, strict=True)
            )
            speech += self._mix(weights, len(scales))
        else:
            # talkers equally loud; together they are one noise at one ratio
            weights = (scale / math.sqrt(max(each, POWER_FLOOR)) for each, scale in zip(powers, scales, strict=True))
            mixture = self._mix(weights, len(scales))
            mixed = float(torch.dot(mixture, mixture)) / num_samples
            torch.add(speech, mixture, alpha=math.sqrt(_ratio(power, mixed) * ratios[0]), out=speech)

    def _mix(self, weights: Iterable[float], count: int) -> Tensor:
        """The weighted sum of the first sources, (samples,)."""
        self._weights.numpy()[:count] = list(weights)
        # As one product six sources take 17 us, added one after another 36.
        return torch.mv(self._sources[:count].t(), self._weights[:count], out=self._mixture)

    def reverberate(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Convolve the utterances of `waveforms` (batch, samples) that drew an RIR with that.

        Raises:
            AudioError: an RIR cannot be read.
        """
        rirs, num_samples = self._rirs, waveforms.shape[1]
        utterances = np.flatnonzero(drawn.rirs >= 0).tolist()
        if rirs is None or not utterances:
            return
        members: dict[int, list[int]] = {}
        for utterance in utterances:
            members.setdefault(rirs.fft_samples(int(drawn.rirs[utterance]), num_samples), []).append(utterance)
        for length, group in members.items():
            padded = self._padded_rows(length, len(group), num_samples)
            for row, utterance in zip(padded.unbind(), group, strict=False):
                row[:num_samples] = waveforms[utterance]
            # With a fifth of the crops reverberated the two transforms cost 40 us a crop on average; scipy's are no
            # faster from four rows on.
            product = torch.fft.rfft(padded)
            for row, utterance in zip(product.numpy(), group, strict=False):
                row *= rirs.spectrum(int(drawn.rirs[utterance]), num_samples, length)
            wet = torch.fft.irfft(product, length)
            for row, utterance in zip(wet.unbind(), group, strict=False):
                waveforms[utterance] = row[:num_samples]

    def _padded_rows(self, length: int, count: int, num_samples: int) -> Tensor:
        """Rows for a transform, zero from `num_samples` on; at least `FEWEST_FFT_ROWS`."""
        count = max(count, FEWEST_FFT_ROWS)
        kept = self._padded.get((length, num_samples))
        if kept is None or len(kept) < count:
            if len(self._padded) > MOST_LENGTHS:
                self._padded.clear()
            self._padded[length, num_samples] = kept = torch.zeros(count, length)
        return kept[:count]


def _ratio(power: float, other: float) -> float:
    """Of two powers, finite where one of them is silence."""
    return max(power, POWER_FLOOR) / max(other, POWER_FLOOR)
