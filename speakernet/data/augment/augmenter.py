"""Augmentation of whole batches: draw every choice, gather the audio for it from the banks, apply
it with torch.

`draw` makes every random choice and reads no audio; on a CPU the mixer reads and applies in one go.
On a GPU, clips and RIRs are on the device: `ResidentBanks.gather` cuts them there, and `apply`,
which is plain torch, mixes a whole batch at once, with the same result. Choices are keyed by (seed,
epoch, row), so they do not depend on workers or ranks.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speakernet.data.augment.banks import (
    BABBLE,
    CLEAN,
    KINDS,
    LOWEST_RESPONSE_HZ,
    MUSIC,
    NOISE,
    RESPONSE_POINTS,
    REVERB,
    ClipBank,
    Crops,
    Drawn,
    Ingredients,
    ResidentBanks,
    RirBank,
    transform_samples,
)
from speakernet.data.augment.options import AUGMENTATIONS, AugmentOptions
from speakernet.data.on_device import send
from speakernet.options import SAMPLE_RATE, create, options_of
from speakernet.random import KeyedRandom, derive_seed

# Streams of the keyed random numbers; different streams are unrelated.
KIND_STREAM, RIR_STREAM, TALKERS_STREAM, CLIP_STREAM, PLACE_STREAM, SNR_STREAM = range(100, 106)
VOLUME_STREAM, TELEPHONE_STREAM, CODEC_STREAM = range(106, 109)
MICROPHONE_STREAM, RESPONSE_STREAM, DEVICE_STREAM = range(109, 112)
OUTSIDE_STREAM = 1000
NO_MICROPHONES = np.empty(0, dtype=np.int64), np.empty((0, RESPONSE_POINTS))
CLASSIC_POWER_FLOOR = 1e-4  # voxceleb_trainer adds it to every power
POWER_FLOOR = (
    1e-10  # -100 dB relative to full scale: keeps the ratio of silent speech or noise finite
)
MIN_FFT_ROWS = 2  # transforming a single row takes four times as long as each of two rows
MICROPHONE_ROWS = 8  # filtered at once on a CPU
MAX_LENGTHS = 8  # transform lengths for which scratch memory is kept
TELEPHONE_BAND_HZ = (300.0, 3400.0)
TELEPHONE_ORDER = 8
CODEC_RATE_HZ = 8000
MU_LAW = 255.0  # ITU-T G.711


class CpuMixer:
    """Reverberation and noise on a CPU: read and added one utterance at a time, while its samples
    are in the cache.

    The same function as `Augmenter.apply` (a test compares them), but faster: noise in memory is
    cast straight into a scratch row and its scale goes into the weight; weights are Python numbers,
    so a source is added in one pass; spectra are multiplied in place; scratch memory is kept
    between batches, so a mixer serves only one thread.
    """

    def __init__(
        self, banks: Mapping[str, ClipBank], rirs: RirBank | None, is_classic: bool
    ) -> None:
        self._banks = banks
        self._rirs = rirs
        self._is_classic = is_classic
        self._sources = torch.empty(0, 0)
        self._mixture = torch.empty(0)
        self._weights = torch.empty(0)
        self._rows: tuple[Tensor, ...] = ()
        self._padded: dict[tuple[int, int], Tensor] = {}

    def __reduce__(self) -> Any:
        # Each worker has its own scratch memory.
        return CpuMixer, (self._banks, self._rirs, self._is_classic)

    def add_noises(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Add every source of `drawn` to its utterance of `waveforms` (batch, samples)."""
        if len(drawn.clips) == 0:
            return
        num_samples = waveforms.shape[1]
        utterances, first, counts = np.unique(
            drawn.source_rows, return_index=True, return_counts=True
        )
        most = int(counts.max())
        if self._sources.shape[0] < most or self._sources.shape[1] != num_samples:
            self._sources = torch.empty(most, num_samples)
            self._rows = self._sources.unbind()
            self._mixture = torch.empty(num_samples)
            self._weights = torch.empty(most)
        arrays = [row.numpy() for row in self._rows]
        crops = {
            code: Crops(
                self._banks[KINDS[code]],
                drawn.clips,
                drawn.places,
                drawn.source_kinds == code,
                num_samples,
            )
            for code in np.unique(drawn.source_kinds).tolist()
        }
        all_ratios = (10 ** (-drawn.snr_db / 10)).tolist()
        kinds = drawn.source_kinds.tolist()
        speeches = waveforms.unbind()
        for utterance, begin, count in zip(
            utterances.tolist(), first.tolist(), counts.tolist(), strict=True
        ):
            some = crops[kinds[begin]]
            speech = speeches[utterance]
            ratios = all_ratios[begin : begin + count]
            scales = [some.write(begin + k, arrays[k]) for k in range(count)]
            powers = some.powers[begin : begin + count]
            if any(map(math.isnan, powers)):
                powers = [
                    float(torch.dot(row, row)) * scale * scale / num_samples
                    for row, scale in zip(self._rows, scales, strict=False)
                ]
            power = float(torch.dot(speech, speech)) / num_samples
            floor = CLASSIC_POWER_FLOOR
            if self._is_classic:
                weights = [
                    scale * math.sqrt((power + floor) / (each + floor) * ratio)
                    for each, ratio, scale in zip(powers, ratios, scales, strict=True)
                ]
            else:
                # All talkers are equally loud; together they are one noise at one ratio.
                weights = [
                    scale / math.sqrt(max(each, POWER_FLOOR))
                    for each, scale in zip(powers, scales, strict=True)
                ]
            if count > 1:
                source = self._mixture
                gain = 1.0
                self._weights.numpy()[:count] = weights
                # Six sources take 17 us as one product, 36 us when added one after another.
                torch.mv(self._sources[:count].t(), self._weights[:count], out=source)
            else:
                source = self._rows[0]
                gain = weights[0] if self._is_classic else scales[0]
            if not self._is_classic:
                mixed = powers[0] if count == 1 else float(torch.dot(source, source)) / num_samples
                gain = (
                    math.sqrt(max(power, POWER_FLOOR) / max(mixed, POWER_FLOOR) * ratios[0]) * gain
                )
            torch.add(speech, source, alpha=gain, out=speech)

    def reverberate(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Convolve each utterance of `waveforms` (batch, samples) with the RIR that was drawn for
        it, if any.
        """
        rirs = self._rirs
        num_samples = waveforms.shape[1]
        if rirs is None:
            return
        members: dict[int, list[tuple[int, np.ndarray]]] = {}
        for utterance in np.flatnonzero(drawn.rirs >= 0).tolist():
            spectrum = rirs.spectrum(int(drawn.rirs[utterance]), num_samples)
            members.setdefault(2 * (len(spectrum) - 1), []).append((utterance, spectrum))
        for length, group in members.items():
            count = max(len(group), MIN_FFT_ROWS)
            padded = self._padded.get((length, num_samples))
            if padded is None or len(padded) < count:
                if len(self._padded) > MAX_LENGTHS:
                    self._padded.clear()
                # Zero from `num_samples` on.
                self._padded[length, num_samples] = padded = torch.zeros(count, length)
            for row, (utterance, _) in zip(padded, group, strict=False):
                row[:num_samples] = waveforms[utterance]
            # With a fifth of the crops reverberated, the two transforms cost 40 us per crop on
            # average; scipy's are no faster from four rows on.
            product = torch.fft.rfft(padded[:count])
            for row, (_, spectrum) in zip(product.numpy(), group, strict=False):
                row *= spectrum
            for row, (utterance, _) in zip(torch.fft.irfft(product, length), group, strict=False):
                waveforms[utterance] = row[:num_samples]


class Augmenter:
    """Draws, gathers and applies; categories without files are skipped, and the others take over
    their share.
    """

    def __init__(
        self,
        banks: Mapping[str, ClipBank],
        rirs: RirBank | None,
        options: AugmentOptions,
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int = 0,
        devices: np.ndarray | None = None,
    ) -> None:
        #: Responses of real microphones (`device_responses`).
        self.devices = devices
        self.banks = dict(banks)
        self.rirs = rirs
        self.options = options
        self.sample_rate = sample_rate
        self.is_classic = options.style == "classic"
        has_files = {
            "reverb": bool(rirs),
            **{kind: bool(len(bank)) for kind, bank in self.banks.items()},
        }
        # In a fixed order, however they are listed; a category listed twice is twice as likely.
        wanted = sorted(options.categories, key=KINDS.index)
        self.available = [kind for kind in wanted if has_files.get(kind, False)]
        self.missing = [kind for kind in dict.fromkeys(wanted) if kind not in self.available]
        self._codes = np.array([KINDS.index(kind) for kind in self.available], dtype=np.int8)
        self._seed = seed
        #: Clips and spectra on the device of the batches; None: they and the batches are on the
        # host.
        self.resident: ResidentBanks | None = None
        self._mixer = CpuMixer(self.banks, rirs, self.is_classic)
        #: Augmentations from plugins, in the order of the configuration.
        self._others = [
            create(
                AUGMENTATIONS[name], options_of(AUGMENTATIONS, name, given), sample_rate=sample_rate
            )
            for name, given in options.components.items()
        ]
        effects = (
            options.telephone_probability,
            options.codec_probability,
            options.microphone_probability,
        )
        #: Whether any waveform can change.
        self.has_effect = bool(self.available or self._others) or any(
            (*options.volume_db, *effects)
        )

    def __call__(self, waveforms: Tensor, *, epoch: int, rows: np.ndarray) -> Tensor:
        """Augment a batch in place: (batch, samples) float32, every choice keyed by (epoch,
        row).
        """
        drawn = self.draw(rows, epoch)
        if self.resident is not None:
            waveforms = self.apply(
                waveforms, drawn, self.resident.gather(drawn, waveforms.shape[1])
            )
        else:
            # A separate code path: with choices drawn per batch, it cut the CPU time of a crop from
            # 187 to 145 us.
            self._mixer.reverberate(waveforms, drawn)
            self._mixer.add_noises(waveforms, drawn)
            waveforms = self._apply_channel(waveforms, drawn)
        for place, augmentation in enumerate(self._others):
            seed = derive_seed(self._seed, OUTSIDE_STREAM + place)
            waveforms = augmentation(waveforms, KeyedRandom(seed, epoch, rows))
        return waveforms

    def draw(self, rows: np.ndarray, epoch: int) -> Drawn:
        """Every choice for the utterances `rows` of the training list (batch,) in an epoch."""
        # Keyed numbers, not generators: a generator per utterance costs 15 us, a tenth of a crop's
        # whole budget.
        random = KeyedRandom(self._seed, epoch, rows)
        options = self.options
        codes = self._codes
        streams = (
            KIND_STREAM,
            RIR_STREAM,
            TALKERS_STREAM,
            VOLUME_STREAM,
            TELEPHONE_STREAM,
            CODEC_STREAM,
        )
        kind, rir, talkers, volume, telephone, codec = random.uniforms(streams)[:, :, 0]
        kinds = np.zeros(len(rows), dtype=np.int8)
        if len(codes):
            # One number decides both: the range below `probability` is divided evenly among the
            # categories.
            kind = kind / max(options.probability, 1e-12)
            chosen = codes[np.minimum((kind * len(codes)).astype(np.int64), len(codes) - 1)]
            kinds = np.where(kind < 1, chosen, CLEAN).astype(np.int8)
        fewest, most = options.babble_speakers
        counts = np.where(
            kinds == BABBLE, fewest + (talkers * (most - fewest + 1)).astype(np.int64), 0
        )
        counts[(kinds == MUSIC) | (kinds == NOISE)] = 1
        width = max(int(counts.max(initial=0)), 1)
        is_used = np.arange(width) < counts[:, None]
        source_rows = np.nonzero(is_used)[0]
        clip, place, snr_db = random.uniforms((CLIP_STREAM, PLACE_STREAM, SNR_STREAM), width)
        clips = np.zeros((len(kinds), width), dtype=np.int64)
        if options.style != "classic":
            # The talkers of babble are one noise at one ratio; the classic pipeline draws a ratio
            # for each.
            snr_db[:] = snr_db[:, :1]
        for code in (MUSIC, BABBLE, NOISE):
            some = np.flatnonzero(kinds == code)
            if len(some):
                most_used = width if code == BABBLE else 1
                clips[some, :most_used] = distinct_choices(
                    clip[some, :most_used], len(self.banks[KINDS[code]])
                )
                low, high = getattr(options, f"{KINDS[code]}_snr_db")
                snr_db[some] = low + (high - low) * snr_db[some]
        low, high = options.volume_db
        microphones, responses_db = (
            self._microphones(random) if options.microphone_probability else NO_MICROPHONES
        )
        return Drawn(
            kinds=kinds,
            rirs=np.where(kinds == REVERB, (rir * len(self.rirs or ())).astype(np.int64), -1),
            source_rows=source_rows,
            source_kinds=kinds[source_rows],
            clips=clips[is_used],
            places=place[is_used],
            snr_db=snr_db[is_used],
            gains_db=low + (high - low) * volume,
            telephone=telephone < options.telephone_probability,
            codec=codec < options.codec_probability,
            microphones=microphones,
            responses_db=responses_db,
        )

    def _microphones(self, random: KeyedRandom) -> tuple[np.ndarray, np.ndarray]:
        """Utterances with a different microphone, and the microphones' responses in dB."""
        options = self.options
        rows = np.flatnonzero(
            random.uniform(MICROPHONE_STREAM)[:, 0] < options.microphone_probability
        )
        uniform = torch.from_numpy(random.uniform(RESPONSE_STREAM, options.microphone_points)[rows])
        normal = torch.special.ndtri(uniform.clamp_min(1e-12)).numpy()
        # Not a matrix product, whose last bits depend on the other rows.
        responses_db = options.microphone_db * np.einsum(
            "rp,pk->rk", normal, splines(options.microphone_points)
        )
        if self.devices is not None:
            drawn = random.uniform(DEVICE_STREAM)[rows, 0]
            responses_db += self.devices[(drawn * len(self.devices)).astype(np.int64)]
        return rows, responses_db

    def apply(self, waveforms: Tensor, drawn: Drawn, ingredients: Ingredients) -> Tensor:
        """Augment a batch in place, without any random choice.

        Returns:
            The same tensor.
        """
        if ingredients.reverberated is not None:
            rows = ingredients.reverberated
            num_samples = waveforms.shape[1]
            product = torch.fft.rfft(waveforms[rows], ingredients.fft_samples)
            product *= ingredients.spectra
            waveforms.index_copy_(
                0, rows, torch.fft.irfft(product, ingredients.fft_samples)[:, :num_samples]
            )
        self._add_noises(waveforms, drawn, ingredients.noises)
        return self._apply_channel(waveforms, drawn)

    def _apply_channel(self, waveforms: Tensor, drawn: Drawn) -> Tensor:
        """Effects on the whole utterance: microphone, telephone, codec, volume."""
        # After the noise, because the microphone records it too and the telephone line carries
        # both.
        if len(drawn.microphones):
            rows, responses_db = send(
                waveforms.device, [drawn.microphones, drawn.responses_db.ravel()]
            )
            responses_db = responses_db.view(len(rows), RESPONSE_POINTS).to(waveforms.dtype)
            # A few rows at a time stay in the processor's cache.
            count = MICROPHONE_ROWS if waveforms.device.type == "cpu" else len(rows)
            grid = response_grid(waveforms, RESPONSE_POINTS, self.sample_rate)
            for some, curves in zip(rows.split(count), responses_db.split(count), strict=True):
                waveforms.index_copy_(0, some, through_microphones(waveforms[some], curves, grid))
        telephone = np.flatnonzero(drawn.telephone)
        codec = np.flatnonzero(drawn.codec)
        gains = drawn.gains_db
        if not (len(telephone) or len(codec) or gains.any()):
            # Nothing to send; the condition names every effect below.
            return waveforms
        by_telephone, by_codec, factors = send(
            waveforms.device, [telephone, codec, 10 ** (gains / 20)]
        )
        if len(telephone):
            waveforms.index_copy_(
                0, by_telephone, telephone_band(waveforms[by_telephone], self.sample_rate)
            )
        if len(codec):
            waveforms.index_copy_(0, by_codec, mu_law_codec(waveforms[by_codec], self.sample_rate))
        if gains.any():
            waveforms *= factors.to(waveforms.dtype)[:, None]
        return waveforms

    def _add_noises(self, waveforms: Tensor, drawn: Drawn, noises: Tensor) -> None:
        """Add noise; each utterance's sources are one run of rows, and one call sums all runs.

        For an utterance without sources the sum is zero, so nothing is added.
        """
        if len(noises) == 0:
            return
        batch, num_samples = waveforms.shape
        counts = np.bincount(drawn.source_rows, minlength=batch)
        firsts = np.cumsum(counts) - counts
        level = 10 ** (-drawn.snr_db / 10)
        # Except in the classic style, all sources of an utterance have the ratio of the first.
        level_of_first = level[np.minimum(firsts, len(level) - 1)]
        begins, owners, places, alone, levels, first_levels = send(
            waveforms.device,
            [firsts, drawn.source_rows, np.arange(len(level)), counts == 1, level, level_of_first],
        )
        power = torch.linalg.vecdot(waveforms, waveforms) / num_samples
        powers = torch.linalg.vecdot(noises, noises) / num_samples
        if self.is_classic:
            floor = CLASSIC_POWER_FLOOR
            weights = ((power[owners] + floor) / (powers + floor) * levels.to(powers)).sqrt()
            waveforms += sums_of_runs(noises, places, begins, weights)
            return
        # All talkers are equally loud; together they are one noise at one ratio. A single noise
        # then has power 1.
        mixtures = sums_of_runs(noises, places, begins, powers.clamp_min(POWER_FLOOR).rsqrt())
        mixed = (torch.linalg.vecdot(mixtures, mixtures) / num_samples).clamp_min(POWER_FLOOR)
        ratio = power.clamp_min(POWER_FLOOR) / mixed.masked_fill_(alone.bool(), 1.0)
        torch.addcmul(
            waveforms, (ratio * first_levels.to(ratio)).sqrt()[:, None], mixtures, out=waveforms
        )


def sums_of_runs(rows: Tensor, places: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of runs of consecutive rows, in one launch and always in the same order.

    Returns:
        Float32 (runs, samples).
    """
    # In torch, this is the sum of a bag of word embeddings.
    return functional.embedding_bag(places, rows, begins, mode="sum", per_sample_weights=weights)


@functools.cache
def splines(num_points: int) -> np.ndarray:
    """Natural cubic splines through 1 at one of `num_points` points and 0 at the others, (points,
    RESPONSE_POINTS).
    """
    # Imported late: only runs with microphone_probability need scipy's splines.
    from scipy.interpolate import CubicSpline

    curves = CubicSpline(np.linspace(0, 1, num_points), np.eye(num_points), bc_type="natural")
    return np.asarray(curves(np.linspace(0, 1, RESPONSE_POINTS))).T


def response_grid(waveforms: Tensor, num_points: int, sample_rate: int) -> tuple[Tensor, Tensor]:
    """Each bin of (rows, samples) among the points of `through_microphones`: the point below it,
    and the remainder.

    The bins are those of a transform padded with zeros, into which the filter's wrap-around falls.
    """
    last = num_points - 1
    fft_samples = transform_samples(waveforms.shape[1])
    hertz = torch.fft.rfftfreq(fft_samples, 1 / sample_rate, device=waveforms.device).clamp_min(
        LOWEST_RESPONSE_HZ
    )
    places = torch.log(hertz / LOWEST_RESPONSE_HZ) * (
        last / math.log(sample_rate / 2 / LOWEST_RESPONSE_HZ)
    )
    below = places.floor().clamp_max(last - 1).long()
    return below, places - below


def through_microphones(
    waveforms: Tensor, responses_db: Tensor, grid: tuple[Tensor, Tensor]
) -> Tensor:
    """Filter (rows, samples) with magnitude responses of zero phase.

    Args:
        waveforms: float32 (rows, samples).
        responses_db: dB (rows, points) at frequencies evenly spaced in log frequency from 60 Hz to
            half the sample rate; linear between them, constant below.
        grid: `response_grid` of waveforms of this length.
    """
    (below, share), length = grid, waveforms.shape[1]
    fft_samples = 2 * (len(below) - 1)
    gains_db = torch.lerp(
        responses_db.index_select(1, below), responses_db.index_select(1, below + 1), share
    )
    product = torch.fft.rfft(waveforms, fft_samples)
    product *= torch.exp(gains_db * (math.log(10) / 20))
    return torch.fft.irfft(product, fft_samples)[:, :length]


def telephone_band(waveforms: Tensor, sample_rate: int) -> Tensor:
    """Keep 300 to 3400 Hz (Butterworth magnitude of order 8, zero phase), (rows, samples)."""
    length = waveforms.shape[1]
    frequency = torch.fft.rfftfreq(length, 1 / sample_rate, device=waveforms.device).clamp_min(1e-3)
    low, high = TELEPHONE_BAND_HZ
    response = (1 + (low / frequency) ** (2 * TELEPHONE_ORDER)) * (
        1 + (frequency / high) ** (2 * TELEPHONE_ORDER)
    )
    return torch.fft.irfft(torch.fft.rfft(waveforms) * response.rsqrt(), length)


def mu_law_codec(waveforms: Tensor, sample_rate: int) -> Tensor:
    """Convert to 8 kHz, 8-bit mu-law (G.711) and back, (rows, samples). Each row is coded at its
    own full scale.
    """
    length = waveforms.shape[1]
    # Band-limited by truncating the spectrum: an exact resampler for any length, without filter
    # delay.
    short = max(2, length * CODEC_RATE_HZ // sample_rate // 2 * 2)
    spectrum = torch.fft.rfft(waveforms)[:, : short // 2 + 1]
    narrow = torch.fft.irfft(spectrum, short) * (short / length)
    peak = narrow.abs().amax(1, keepdim=True).clamp_min(1e-9)
    scaled = narrow / peak
    coded = torch.sign(scaled) * torch.log1p(MU_LAW * scaled.abs()) / np.log1p(MU_LAW)
    # 8 bits are a sign and 127 steps; zero has both signs (G.711), and full scale is one of the
    # steps.
    coded = (coded * 127).round() / 127
    decoded = torch.sign(coded) * torch.expm1(coded.abs() * np.log1p(MU_LAW)) / MU_LAW * peak
    return torch.fft.irfft(torch.fft.rfft(decoded), length) * (length / short)


def distinct_choices(numbers: np.ndarray, num_choices: int) -> np.ndarray:
    """For each row, distinct members of 0 … num_choices - 1 from uniform numbers (rows, count),
    int64 (rows, count).

    The k-th number chooses among those that are left. If there are fewer members than numbers, they
    repeat.

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
