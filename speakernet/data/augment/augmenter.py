"""Augmentation of whole batches: every choice is drawn first, then applied.

`build_augmenter` opens the noise, RIRs and microphones that the options name. `mixers.py` adds
reverberation and noise, on the host or on the device of the batch; the effects of microphone,
telephone and codec are here.
"""

# Draw, then apply. `draw` makes every random choice of a batch as arrays of numbers and reads no
# audio; what follows is a function of the waveforms and these numbers. So a test can look at the
# choices alone, the two mixers can be compared on the same choices, and on a GPU the host has
# nothing to wait for.
#
# Numbers are keyed by (seed, epoch, row, stream), not taken from a generator one after the other:
# an utterance is augmented in the same way in whatever batch, worker or process it is. Each choice
# has a stream of its own, so that a new option does not change the draws of the others. The order
# of the effects is the way of the sound: the room, the noise in it, the microphone, the line, the
# gain.

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

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
    RirBank,
    device_responses,
    noise_banks,
    transform_samples,
)
from speakernet.data.augment.codecs import CODECS, Coding, encode_and_decode, resample
from speakernet.data.augment.mixers import DeviceMixer, Drawn, HostMixer
from speakernet.data.augment.options import AUGMENTATIONS, AugmentOptions
from speakernet.data.lookup import LookupTable
from speakernet.data.on_device import DeviceAudio, send
from speakernet.data.options import DataOptions
from speakernet.data.packed import PackedRows
from speakernet.data.sources import AudioCache, RowReader
from speakernet.distributed import refuse_differences
from speakernet.options import SAMPLE_RATE, create, options_of
from speakernet.random import KeyedRandom, derive_seed

logger = logging.getLogger(__name__)

# Streams of the keyed random numbers; different streams are unrelated.
KIND_STREAM, RIR_STREAM, TALKERS_STREAM, CLIP_STREAM, PLACE_STREAM, SNR_STREAM = range(100, 106)
VOLUME_STREAM, TELEPHONE_STREAM, CODEC_STREAM = range(106, 109)
MICROPHONE_STREAM, RESPONSE_STREAM, DEVICE_STREAM = range(109, 112)
CODING_STREAM = 112
PLUGIN_STREAM = 1000
MICROPHONE_ROWS = 8  # filtered at once on a CPU
TELEPHONE_BAND_HZ = (300.0, 3400.0)
TELEPHONE_ORDER = 8
MU_LAW_RATE_HZ = 8000
MU_LAW = 255.0  # ITU-T G.711


def build_augmenter(
    options: AugmentOptions,
    data: DataOptions,
    seed: int,
    reader: RowReader,
    table: LookupTable,
    eligible: ndarray,
) -> "Augmenter | None":
    """The augmenter, or None if it is switched off or has nothing to do.

    Babble may be mixed from the `eligible` rows of the training list, which `reader` reads.
    """
    sample_rate = data.sample_rate
    if not options.enabled:
        return None
    cache = AudioCache(data.cache_megabytes << 20)
    banks = noise_banks(options.noise_path, sample_rate, cache) if options.noise_path else {}
    if banks and "babble" not in banks and "babble" in options.categories and not reader.is_remote:
        banks["babble"] = ClipBank(reader, eligible, table.num_samples[eligible])
        logger.info("the noise has no folder 'speech': babble is mixed from training utterances")
    rirs: RirBank | None = None
    if options.rir_path:
        # The classic pipeline keeps the delay of the direct path, which shifts the speech in its
        # crop.
        rirs = RirBank(options.rir_path, sample_rate, cache, is_aligned=options.style == "ours")
    devices = None
    if options.microphone_path:
        devices = device_responses(options.microphone_path, sample_rate)
    sizes = {kind: [len(bank), int(bank.lengths.sum())] for kind, bank in banks.items()}
    # All processes draw from the same clips, by number.
    refuse_differences(
        {
            "the noise of augment.noise_path (clips and samples)": sizes,
            "the names of augment.rir_path (CRC-32)": f"{rirs.names.checksum:08x}" if rirs else "",
            "the devices of augment.microphone_path": 0 if devices is None else len(devices),
        }
    )
    augmenter = Augmenter(banks, rirs, options, sample_rate=sample_rate, seed=seed, devices=devices)
    if augmenter.missing and (options.noise_path or options.rir_path):
        logger.warning(
            "augmentation: found no files for %s; their share goes to %s",
            ", ".join(augmenter.missing),
            ", ".join(dict.fromkeys(augmenter.available)) or "clean speech",
        )
    if not augmenter.has_effect:
        logger.warning(
            "augmentation is skipped, because augment.noise_path and augment.rir_path contain "
            "nothing to mix in; `speakernet prepare musan` and `speakernet prepare rirs` fetch "
            "noise and RIRs"
        )
        return None
    logger.info("augmentation: %s", ", ".join(_describe_augmentation(augmenter, options)))
    return augmenter


def _describe_augmentation(augmenter: "Augmenter", options: AugmentOptions) -> Iterator[str]:
    """What may happen to a crop, for the log."""
    for kind, bank in augmenter.banks.items():
        yield f"{len(bank):,} clips of {kind}"
    if augmenter.rirs is not None:
        yield f"{len(augmenter.rirs):,} RIRs"
    if options.microphone_probability:
        yield f"frequency responses of {options.microphone_db:g} dB"
    if augmenter.devices is not None:
        yield f"{len(augmenter.devices)} real microphones"
    if options.telephone_probability:
        yield "telephone"
    if options.codec_probability:
        yield f"codecs ({', '.join(dict.fromkeys(options.codecs))})"
    if any(options.volume_db):
        yield "volume"
    yield from options.components


class Augmenter:
    """Draws and applies; categories without files are skipped, and the others take over their
    share.
    """

    def __init__(
        self,
        banks: Mapping[str, ClipBank],
        rirs: RirBank | None,
        options: AugmentOptions,
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int = 0,
        devices: ndarray | None = None,
    ) -> None:
        self.banks = dict(banks)
        self.rirs = rirs
        self.options = options
        self.sample_rate = sample_rate
        self.devices = devices
        """Responses of real microphones (`device_responses`)."""
        categories_with_files = [kind for kind, bank in self.banks.items() if len(bank)]
        if rirs:
            categories_with_files.append("reverb")
        # In a fixed order, however they are listed; a category listed twice is twice as likely.
        categories = sorted(options.categories, key=KINDS.index)
        self.available = [kind for kind in categories if kind in categories_with_files]
        self.missing = [kind for kind in dict.fromkeys(categories) if kind not in self.available]
        self._codes = np.array([KINDS.index(kind) for kind in self.available], dtype=np.int8)
        self._snr_db = {
            MUSIC: options.music_snr_db,
            BABBLE: options.babble_snr_db,
            NOISE: options.noise_snr_db,
        }
        self._seed = seed
        self._is_classic = options.style == "classic"
        self.mixer: HostMixer | DeviceMixer = HostMixer(self.banks, rirs, self._is_classic)
        # Augmentations from plugins, in the order of the configuration.
        self._plugins = []
        for name, values in options.components.items():
            component = AUGMENTATIONS[name]
            plugin_options = options_of(AUGMENTATIONS, name, values)
            self._plugins.append(create(component, plugin_options, sample_rate=sample_rate))
        self.has_effect = bool(self.available or self._plugins or options.changes_channel)
        """Whether any waveform can change."""

    def move_to(
        self, device: torch.device, *, corpus: tuple[PackedRows, DeviceAudio] | None = None
    ) -> None:
        """Keep clips and RIRs on the device of the batches; see `DeviceMixer`."""
        self.mixer = DeviceMixer(self.banks, self.rirs, self._is_classic, device, corpus)

    def __call__(self, waveforms: Tensor, *, epoch: int, rows: ndarray) -> Tensor:
        """Augment a batch in place: (batch, samples) float32, every choice keyed by (epoch,
        row).
        """
        drawn = self.draw(rows, epoch)
        self.mixer.reverberate(waveforms, drawn)
        self.mixer.add_noises(waveforms, drawn)
        self._apply_channel(waveforms, drawn)
        for place, plugin in enumerate(self._plugins):
            seed = derive_seed(self._seed, PLUGIN_STREAM + place)
            waveforms = plugin(waveforms, KeyedRandom(seed, epoch, rows))
        return waveforms

    def draw(self, rows: ndarray, epoch: int) -> Drawn:
        """Every choice for the utterances `rows` of the training list (batch,) in an epoch."""
        # A generator per utterance would cost 15 us, a tenth of a crop's whole budget.
        random = KeyedRandom(self._seed, epoch, rows)
        options = self.options
        streams = (
            KIND_STREAM,
            RIR_STREAM,
            TALKERS_STREAM,
            VOLUME_STREAM,
            TELEPHONE_STREAM,
            CODEC_STREAM,
        )
        kind, rir, talkers, volume, telephone, codec = random.uniforms(streams)[:, :, 0]
        kinds = self._choose_kinds(kind)
        fewest, most = options.babble_speakers
        num_talkers = fewest + (talkers * (most - fewest + 1)).astype(np.int64)
        counts = np.where(kinds == BABBLE, num_talkers, (kinds == MUSIC) | (kinds == NOISE))
        width = max(int(counts.max(initial=0)), 1)
        is_used = np.arange(width) < counts[:, None]  # (batch, sources of an utterance)
        clip, place, level = random.uniforms((CLIP_STREAM, PLACE_STREAM, SNR_STREAM), width)
        if not self._is_classic:
            # The talkers of babble are one noise at one ratio; the classic pipeline draws a ratio
            # for each.
            level[:] = level[:, :1]
        clips = np.zeros(is_used.shape, dtype=np.int64)
        snr_db = np.zeros(is_used.shape)
        for code, bounds in self._snr_db.items():
            chosen = np.flatnonzero(kinds == code)
            if len(chosen):
                sources = width if code == BABBLE else 1
                numbers = clip[chosen, :sources]
                clips[chosen, :sources] = choose_distinct(numbers, len(self.banks[KINDS[code]]))
                snr_db[chosen] = scale_to(bounds, level[chosen])
        source_rows = np.nonzero(is_used)[0]
        microphones, responses_db = self._draw_microphones(random)
        is_coded, codings = self._draw_codecs(random, codec < options.codec_probability)
        return Drawn(
            kinds=kinds,
            rirs=np.where(kinds == REVERB, (rir * len(self.rirs or ())).astype(np.int64), -1),
            source_rows=source_rows,
            source_kinds=kinds[source_rows],
            clips=clips[is_used],
            places=place[is_used],
            snr_db=snr_db[is_used],
            gains_db=scale_to(options.volume_db, volume),
            telephone=telephone < options.telephone_probability,
            codec=is_coded,
            codings=codings,
            microphones=microphones,
            responses_db=responses_db,
        )

    def _choose_kinds(self, uniform: ndarray) -> ndarray:
        """The category of each utterance, int8 (batch,).

        One number decides both: the range below `probability` is divided evenly among the
        categories.
        """
        codes = self._codes
        if not len(codes):
            return np.full(len(uniform), CLEAN, dtype=np.int8)
        share = uniform / max(self.options.probability, 1e-12)
        chosen = codes[np.minimum((share * len(codes)).astype(np.int64), len(codes) - 1)]
        return np.where(share < 1, chosen, CLEAN).astype(np.int8)

    def _draw_microphones(self, random: KeyedRandom) -> tuple[ndarray, ndarray]:
        """Utterances with a different microphone, and the microphones' responses in dB."""
        options = self.options
        if not options.microphone_probability:
            return np.empty(0, dtype=np.int64), np.empty((0, RESPONSE_POINTS))
        is_chosen = random.uniform(MICROPHONE_STREAM)[:, 0] < options.microphone_probability
        rows = np.flatnonzero(is_chosen)
        uniform = torch.from_numpy(random.uniform(RESPONSE_STREAM, options.microphone_points)[rows])
        normal = torch.special.ndtri(uniform.clamp_min(1e-12)).numpy()
        # Not a matrix product, whose last bits depend on the other rows.
        curves = np.einsum("rp,pk->rk", normal, splines(options.microphone_points))
        responses_db = options.microphone_db * curves
        if self.devices is not None:
            number = random.uniform(DEVICE_STREAM)[rows, 0] * len(self.devices)
            responses_db += self.devices[number.astype(np.int64)]
        return rows, responses_db

    def _draw_codecs(
        self, random: KeyedRandom, is_coded: ndarray
    ) -> tuple[ndarray, dict[int, Coding]]:
        """Of the coded utterances, those with mu-law, and the codings of the others."""
        names = self.options.codecs
        codings: dict[int, Coding] = {}
        if not self.options.real_codecs:
            return is_coded, codings
        for row, (codec, bit_rate) in enumerate(random.uniform(CODING_STREAM, 2)):
            name = names[int(codec * len(names))]
            if is_coded[row] and name in CODECS:
                bit_rates = list(CODECS[name].levels)
                codings[row] = Coding(name, bit_rates[int(bit_rate * len(bit_rates))])
        is_coded[list(codings)] = False
        return is_coded, codings

    def _apply_channel(self, waveforms: Tensor, drawn: Drawn) -> None:
        """Effects on the whole utterance: microphone, telephone, codec, volume."""
        # After the noise, because the microphone records it too and the telephone line carries
        # both.
        device = waveforms.device
        if len(drawn.microphones):
            rows, responses_db = send(device, [drawn.microphones, drawn.responses_db.ravel()])
            responses_db = responses_db.view(len(rows), RESPONSE_POINTS).to(waveforms.dtype)
            # A few rows at a time stay in the processor's cache.
            count = MICROPHONE_ROWS if device.type == "cpu" else len(rows)
            grid = response_grid(waveforms, RESPONSE_POINTS, self.sample_rate)
            for some, curves in zip(rows.split(count), responses_db.split(count), strict=True):
                waveforms.index_copy_(0, some, through_microphones(waveforms[some], curves, grid))
        for is_chosen, effect in ((drawn.telephone, telephone_band), (drawn.codec, mu_law_codec)):
            if is_chosen.any():
                (rows,) = send(device, [np.flatnonzero(is_chosen)])
                waveforms.index_copy_(0, rows, effect(waveforms[rows], self.sample_rate))
        if drawn.codings:
            encode_and_decode(waveforms, drawn.codings, self.sample_rate)
        if drawn.gains_db.any():
            (factors,) = send(device, [10 ** (drawn.gains_db / 20)])
            waveforms *= factors.to(waveforms.dtype)[:, None]


def scale_to(bounds: Sequence[float], uniform: ndarray) -> ndarray:
    """Numbers in 0..1 as numbers between two bounds."""
    low, high = bounds
    return low + (high - low) * uniform


@functools.cache
def splines(num_points: int) -> ndarray:
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
    hertz = torch.fft.rfftfreq(fft_samples, 1 / sample_rate, device=waveforms.device)
    hertz = hertz.clamp_min(LOWEST_RESPONSE_HZ)
    points_per_nat = last / math.log(sample_rate / 2 / LOWEST_RESPONSE_HZ)
    places = torch.log(hertz / LOWEST_RESPONSE_HZ) * points_per_nat
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
    below, share = grid
    fft_samples = 2 * (len(below) - 1)
    lower = responses_db.index_select(1, below)
    upper = responses_db.index_select(1, below + 1)
    gains_db = torch.lerp(lower, upper, share)  # (rows, bins)
    product = torch.fft.rfft(waveforms, fft_samples)
    product *= torch.exp(gains_db * (math.log(10) / 20))
    return torch.fft.irfft(product, fft_samples)[:, : waveforms.shape[1]]


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
    narrow = resample(waveforms, max(2, length * MU_LAW_RATE_HZ // sample_rate // 2 * 2))
    peak = narrow.abs().amax(1, keepdim=True).clamp_min(1e-9)
    scaled = narrow / peak
    coded = torch.sign(scaled) * torch.log1p(MU_LAW * scaled.abs()) / np.log1p(MU_LAW)
    # 8 bits are a sign and 127 steps; zero has both signs (G.711), and full scale is one of the
    # steps.
    coded = (coded * 127).round() / 127
    decoded = torch.sign(coded) * torch.expm1(coded.abs() * np.log1p(MU_LAW)) / MU_LAW * peak
    return resample(decoded, length)


# Babble of one voice twice is no babble, so the talkers of an utterance are distinct. The k-th
# number picks among the members that are left, counted without the taken ones; going through those
# in ascending order and stepping over each gives the member itself. No loop over utterances: a
# batch of a thousand takes as many operations as one of ten.
def choose_distinct(numbers: ndarray, num_choices: int) -> ndarray:
    """For each row, distinct members of 0 … num_choices - 1 from uniform numbers (rows, count),
    int64 (rows, count).

    The k-th number chooses among those that are left. If there are fewer members than numbers, they
    repeat.

    >>> choose_distinct(np.array([[0.0, 0.0, 0.99]]), 4).tolist()
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
