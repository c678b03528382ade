"""Mixing of RIRs and noise into a batch, as drawn: on the host, or on the device of the batches.

Random choices are made in `augmenter.py`, and the audio comes from `banks.py`.
"""

# Why there are two mixers. They compute the same function (a test compares them), but each is slow
# where the other belongs. `DeviceMixer` reads, convolves and adds a whole batch in a few launches,
# which is all a GPU wants; on a CPU `HostMixer` is 1.5x faster, because every pass over a batch of
# float32 goes through main memory. `HostMixer` takes one utterance at a time and stays in the
# processor's cache, with Python between the passes; on a GPU those would be dozens of launches for
# each utterance. Their sums differ in the last bits, so swapping them would change the batches of a
# seed.
#
# Both change a batch, float32 (batch, samples), in place, without any random choice.

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.nn import functional

from speakernet import distributed
from speakernet.data.augment.banks import (
    KINDS,
    ClipBank,
    Crop,
    RirBank,
    crop_starts,
    transform_samples,
)
from speakernet.data.augment.codecs import Coding
from speakernet.data.on_device import DeviceAudio, send, to_float
from speakernet.data.packed import PackedRows
from speakernet.files import parallel_map
from speakernet.machine.facts import usable_cores

CLASSIC_POWER_FLOOR = 1e-4  # voxceleb_trainer adds it to every power
# -100 dB relative to full scale: keeps the ratio of silent speech or noise finite.
POWER_FLOOR = 1e-10
MIN_FFT_ROWS = 2  # a single row is 4x slower than each of two rows


@dataclass(frozen=True)
class Drawn:
    """Every choice for one batch. Sources are the clips to add, in the order of their
    utterances.
    """

    kinds: ndarray
    rirs: ndarray
    """The RIR of each utterance, -1 for none."""
    source_rows: ndarray
    """The utterance that each source is added to."""
    source_kinds: ndarray
    clips: ndarray
    places: ndarray
    """Where in its clip a source begins, in 0..1."""
    snr_db: ndarray
    gains_db: ndarray
    telephone: ndarray
    codec: ndarray
    """The utterances coded with mu-law."""
    codings: Mapping[int, Coding]
    """The other codecs, by utterance."""
    microphones: ndarray
    """Utterances with a different microphone, and its response in dB (these utterances,
    RESPONSE_POINTS)."""
    responses_db: ndarray


class HostMixer:
    """Reads and adds one utterance at a time, while its samples are in the processor's cache.

    Noise in memory is cast straight into a scratch row and its scale goes into the weight; weights
    are Python numbers, so that a source is added in one pass. Scratch memory is kept between
    batches, so a mixer serves only one thread.
    """

    def __init__(
        self, banks: Mapping[str, ClipBank], rirs: RirBank | None, is_classic: bool
    ) -> None:
        self._banks = banks
        self._rirs = rirs
        self._is_classic = is_classic
        self._scratch = Scratch(0, 0)

    def __reduce__(self) -> Any:
        # Each worker has its own scratch memory.
        return HostMixer, (self._banks, self._rirs, self._is_classic)

    def reverberate(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Convolve each utterance with the RIR that was drawn for it, if any."""
        if self._rirs is None:
            return
        num_samples = waveforms.shape[1]
        # Utterances whose transforms have the same length are transformed together.
        groups: dict[int, list[tuple[int, ndarray]]] = defaultdict(list)
        for utterance in np.flatnonzero(drawn.rirs >= 0).tolist():
            spectrum = self._rirs.spectrum(int(drawn.rirs[utterance]), num_samples)
            groups[2 * (len(spectrum) - 1)].append((utterance, spectrum))
        for length, members in groups.items():
            padded = torch.zeros(max(len(members), MIN_FFT_ROWS), length)
            for row, (utterance, _) in zip(padded, members, strict=False):
                row[:num_samples] = waveforms[utterance]
            # With a fifth of the crops reverberated, the two transforms cost 40 us per crop on
            # average; scipy's are no faster from four rows on.
            product = torch.fft.rfft(padded)  # (utterances, bins)
            for row, (_, spectrum) in zip(product.numpy(), members, strict=False):
                row *= spectrum
            reverberated = torch.fft.irfft(product, length)
            for row, (utterance, _) in zip(reverberated, members, strict=False):
                waveforms[utterance] = row[:num_samples]

    def add_noises(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Add every source to its utterance."""
        if not len(drawn.clips):
            return
        num_samples = waveforms.shape[1]
        utterances, firsts, counts = np.unique(
            drawn.source_rows, return_index=True, return_counts=True
        )
        most = int(counts.max())
        if len(self._scratch.rows) < most or len(self._scratch.mixture) != num_samples:
            self._scratch = Scratch(most, num_samples)
        crops = self._crops_of(drawn, num_samples)
        ratios = (10 ** (-drawn.snr_db / 10)).tolist()
        kinds = drawn.source_kinds[firsts].tolist()
        speeches = waveforms.unbind()
        runs = zip(utterances.tolist(), kinds, firsts.tolist(), counts.tolist(), strict=True)
        for utterance, kind, first, count in runs:
            run = slice(first, first + count)
            self._add(speeches[utterance], self._banks[KINDS[kind]], crops[run], ratios[run])

    def _crops_of(self, drawn: Drawn, num_samples: int) -> list[Crop]:
        """The crop of every source, found for all sources of a kind at once."""
        crops: dict[int, Crop] = {}
        for kind in np.unique(drawn.source_kinds).tolist():
            places = np.flatnonzero(drawn.source_kinds == kind)
            bank = self._banks[KINDS[kind]]
            crops_of_bank = bank.crops(drawn.clips[places], drawn.places[places], num_samples)
            crops.update(zip(places.tolist(), crops_of_bank, strict=True))
        return [crops[place] for place in range(len(crops))]

    def _add(
        self, speech: Tensor, bank: ClipBank, crops: Sequence[Crop], ratios: Sequence[float]
    ) -> None:
        """Add crops of one bank, noise-to-signal ratios given, to an utterance (samples,)."""
        count = len(crops)
        rows = self._scratch.rows
        # Factors that bring each source to -1..1.
        scales = list(map(bank.write, crops, self._scratch.arrays))
        powers = [crop.power for crop in crops]
        if any(map(math.isnan, powers)):
            powers = [
                mean_square(row) * scale * scale for row, scale in zip(rows, scales, strict=False)
            ]
        power = mean_square(speech)
        if self._is_classic:
            floor = CLASSIC_POWER_FLOOR
            weights = [
                scale * math.sqrt((power + floor) / (source_power + floor) * ratio)
                for scale, source_power, ratio in zip(scales, powers, ratios, strict=True)
            ]
            if count == 1:
                mixture, gain = rows[0], weights[0]
            else:
                mixture, gain = self._scratch.sum(weights), 1.0
        elif count == 1:
            mixture = rows[0]
            gain = gain_for_ratio(power, powers[0], ratios[0]) * scales[0]
        else:
            # All talkers are equally loud; together they are one noise at one ratio.
            weights = [
                scale / math.sqrt(max(source_power, POWER_FLOOR))
                for scale, source_power in zip(scales, powers, strict=True)
            ]
            mixture = self._scratch.sum(weights)
            gain = gain_for_ratio(power, mean_square(mixture), ratios[0])
        torch.add(speech, mixture, alpha=gain, out=speech)


class Scratch:
    """Memory for the sources of one utterance, and for their weighted sum."""

    def __init__(self, num_sources: int, num_samples: int) -> None:
        self._sources = torch.empty(num_sources, num_samples)
        self._weights = torch.empty(num_sources)
        self.rows = self._sources.unbind()
        self.arrays = [row.numpy() for row in self.rows]
        self.mixture = torch.empty(num_samples)

    def sum(self, weights: list[float]) -> Tensor:
        """The weighted sum of the first rows, (samples,)."""
        count = len(weights)
        self._weights.numpy()[:count] = weights
        # Six sources take 17 us as one product, 36 us when added one after another.
        return torch.mv(self._sources[:count].t(), self._weights[:count], out=self.mixture)


def mean_square(waveform: Tensor) -> float:
    """The power of (samples,)."""
    return float(torch.dot(waveform, waveform)) / waveform.numel()


def gain_for_ratio(power: float, noise_power: float, ratio: float) -> float:
    """The gain that brings noise to a ratio of its power to that of the speech."""
    return math.sqrt(max(power, POWER_FLOOR) / max(noise_power, POWER_FLOOR) * ratio)


class DeviceMixer:
    """Mixes whole batches on one device, which holds all clips and RIRs.

    Args:
        corpus: a corpus that is on the device already, with its reader; the clips of banks with
            this reader are cut from there.
    """

    def __init__(
        self,
        banks: Mapping[str, ClipBank],
        rirs: RirBank | None,
        is_classic: bool,
        device: torch.device,
        corpus: tuple[PackedRows, DeviceAudio] | None = None,
    ) -> None:
        self._is_classic = is_classic
        self._device = device
        # Kind -> the number of the audio that holds its clips, and the first sample and the length
        # of each clip.
        self._clips: dict[int, tuple[int, ndarray, ndarray]] = {}
        num_samples = 0
        to_move: list[ClipBank] = []
        for kind, bank in banks.items():
            if corpus is not None and bank.reader is corpus[0]:
                clips = (1, corpus[0].starts_of(bank.rows), corpus[0].lengths[bank.rows])
            else:
                clips = (0, num_samples + np.cumsum(bank.lengths) - bank.lengths, bank.lengths)
                num_samples += int(bank.lengths.sum())
                to_move.append(bank)
            self._clips[KINDS.index(kind)] = clips
        samples = torch.empty(num_samples, dtype=torch.int16, device=device)
        self._audios = [DeviceAudio(samples)]
        if corpus is not None:
            self._audios.append(corpus[1])
        description = "noise to the device" if distributed.is_main() else ""
        first = 0
        for bank in to_move:
            numbers = range(len(bank))
            for clip in parallel_map(
                bank.read_whole, numbers, usable_cores(), description, total=len(bank)
            ):
                stop = first + len(clip)
                samples[first:stop] = torch.from_numpy(clip).to(device)
                first = stop
        self._load_rirs(rirs)

    def _load_rirs(self, rirs: RirBank | None) -> None:
        """Move the RIRs to the device, end to end."""
        responses: list[ndarray] = []
        if rirs is not None:
            description = "RIRs to the device" if distributed.is_main() else ""
            responses += parallel_map(rirs.prepare, range(len(rirs)), usable_cores(), description)
        self._rir_lengths = np.array([len(response) for response in responses], dtype=np.int64)
        self._rir_starts = np.cumsum(self._rir_lengths) - self._rir_lengths
        self._longest_rir = int(self._rir_lengths.max(initial=0))
        # Zeros at the end, so that a window may extend beyond the last RIR.
        responses.append(np.zeros(self._longest_rir, dtype=np.float32))
        self._rirs = torch.from_numpy(np.concatenate(responses)).to(self._device)

    def reverberate(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Convolve each utterance with the RIR that was drawn for it, if any."""
        utterances = np.flatnonzero(drawn.rirs >= 0)
        if not len(utterances):
            return
        # RIRs are cut to what can reach the crop and share one transform; each additional length
        # would cost a launch.
        num_samples = waveforms.shape[1]
        reach = min(self._longest_rir, num_samples)
        fft_samples = transform_samples(num_samples + reach - 1)
        rirs = drawn.rirs[utterances]
        lengths = np.minimum(self._rir_lengths[rirs], reach)
        rows, starts, ends = send(self._device, [utterances, self._rir_starts[rirs], lengths])
        responses = self._rirs.unfold(0, reach, 1)[starts]  # (utterances, reach)
        responses *= torch.arange(reach, device=self._device) < ends[:, None]
        product = torch.fft.rfft(waveforms[rows], fft_samples)  # (utterances, bins)
        product *= torch.fft.rfft(responses, fft_samples)
        reverberated = torch.fft.irfft(product, fft_samples)[:, :num_samples]
        waveforms.index_copy_(0, rows, reverberated)

    def add_noises(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Add every source to its utterance. An utterance's sources are one run of rows, and one
        call sums all runs; for an utterance without sources the sum is zero.
        """
        if not len(drawn.clips):
            return
        batch, num_samples = waveforms.shape
        noises = self.noises(drawn, num_samples)
        counts = np.bincount(drawn.source_rows, minlength=batch)
        firsts = np.cumsum(counts) - counts
        ratios = 10 ** (-drawn.snr_db / 10)
        # Except in the classic style, all sources of an utterance have the ratio of the first.
        ratio_of_first = ratios[np.minimum(firsts, len(ratios) - 1)]
        begins, owners, places, is_single, source_ratios, first_ratios = send(
            self._device,
            [
                firsts,
                drawn.source_rows,
                np.arange(len(ratios)),
                counts == 1,
                ratios,
                ratio_of_first,
            ],
        )
        power = torch.linalg.vecdot(waveforms, waveforms) / num_samples  # (batch,)
        powers = torch.linalg.vecdot(noises, noises) / num_samples  # (sources,)
        if self._is_classic:
            floor = CLASSIC_POWER_FLOOR
            weights = ((power[owners] + floor) / (powers + floor) * source_ratios.to(powers)).sqrt()
            waveforms += sum_runs(noises, places, begins, weights)
            return
        # All talkers are equally loud; together they are one noise at one ratio. A single noise
        # then has power 1.
        weights = powers.clamp_min(POWER_FLOOR).rsqrt()
        mixtures = sum_runs(noises, places, begins, weights)  # (batch, samples)
        mixed = (torch.linalg.vecdot(mixtures, mixtures) / num_samples).clamp_min(POWER_FLOOR)
        mixed.masked_fill_(is_single.bool(), 1.0)
        gains = (power.clamp_min(POWER_FLOOR) / mixed * first_ratios.to(power)).sqrt()
        torch.addcmul(waveforms, gains[:, None], mixtures, out=waveforms)

    def noises(self, drawn: Drawn, num_samples: int) -> Tensor:
        """The crops of all sources, float32 (sources, samples), without waiting for the device."""
        kinds = drawn.source_kinds
        audio_numbers, firsts, lengths = np.zeros((3, len(kinds)), dtype=np.int64)
        for kind in np.unique(kinds).tolist():
            sources = np.flatnonzero(kinds == kind)
            audio_numbers[sources], clip_firsts, clip_lengths = self._clips[kind]
            firsts[sources] = clip_firsts[drawn.clips[sources]]
            lengths[sources] = clip_lengths[drawn.clips[sources]]
        starts = crop_starts(drawn.places, lengths, num_samples)
        noises = torch.empty(len(kinds), num_samples, device=self._device)
        for number, audio in enumerate(self._audios):
            sources = np.flatnonzero(audio_numbers == number)
            if len(sources):
                crops = audio.crops(firsts[sources], starts[sources], lengths[sources], num_samples)
                (rows,) = send(self._device, [sources])
                noises.index_copy_(0, rows, to_float(crops))
        return noises


def sum_runs(rows: Tensor, places: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of runs of consecutive rows, float32 (runs, samples), in one launch and always
    in the same order.
    """
    # In torch, this is the sum of a bag of word embeddings.
    return functional.embedding_bag(places, rows, begins, mode="sum", per_sample_weights=weights)


def bytes_of_banks(
    banks: Mapping[str, ClipBank], rirs: RirBank | None, corpus: PackedRows | None
) -> int:
    """Bytes that a `DeviceMixer` takes: clips in 16 bits, except those of a corpus that is there
    already, and RIRs in 32.
    """
    clips = sum(2 * int(bank.lengths.sum()) for bank in banks.values() if bank.reader is not corpus)
    if rirs is None:
        return clips
    lengths = np.asarray(rirs.source.lookup_table(rirs.names).num_samples)
    # The longest once more at the end, so that a window may extend beyond the last RIR.
    return clips + 4 * int(lengths.sum() + lengths.max(initial=0))
