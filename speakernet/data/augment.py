"""Augmentation of whole batches: draw every choice, gather what it needs from the banks, apply it with torch.

`draw` makes every random choice and touches no audio; `gather` reads clips and spectra; `apply` makes no choice and is
plain torch, so it runs in a loader's worker or on a GPU after the transfer, with the same result. Choices are keyed by
(seed, epoch, row), so they do not depend on workers or ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from speakernet.data.augment_banks import ClipBank, RoomBank
from speakernet.data.keyed import KeyedRandom

CLEAN, REVERB, MUSIC, BABBLE, NOISE = range(5)
KINDS = ("clean", "reverb", "music", "babble", "noise")
# Streams of the keyed random numbers; another number gives unrelated ones.
KIND_STREAM, ROOM_STREAM, TALKERS_STREAM, CLIP_STREAM, PLACE_STREAM, SNR_STREAM = range(100, 106)
VOLUME_STREAM, TELEPHONE_STREAM, CODEC_STREAM = range(106, 109)
CLASSIC_POWER_FLOOR = 1e-4  # voxceleb_trainer adds it to every power
POWER_FLOOR = 1e-10  # -100 dB of full scale: keeps the ratio of silent speech or noise finite
TELEPHONE_BAND_HZ = (300.0, 3400.0)
TELEPHONE_ORDER = 8
CODEC_RATE_HZ = 8000
MU_LAW = 255.0  # ITU-T G.711


@dataclass(frozen=True)
class AugmentRanges:
    """What is drawn from which range; see the section augment of the configuration."""

    probability: float = 0.8
    categories: Sequence[str] = KINDS[1:]
    snr_db: Mapping[str, Sequence[float]] | None = None
    babble_speakers: Sequence[int] = (3, 7)
    volume_db: Sequence[float] = (0.0, 0.0)
    telephone_probability: float = 0.0
    codec_probability: float = 0.0


DEFAULT_SNR_DB = {"noise": (0.0, 15.0), "music": (5.0, 15.0), "babble": (13.0, 20.0)}


@dataclass(frozen=True)
class Drawn:
    """Every choice for one batch. Sources are the clips that are added, in the order of their utterances.

    Attributes:
        kinds: index into KINDS, int8 (batch,).
        rooms: impulse response of each utterance, -1 for none, int64 (batch,).
        source_rows: utterance that a source is added to, ascending, int64 (sources,).
        source_kinds: index into KINDS, int8 (sources,).
        clips: clip of the kind's bank, int64 (sources,).
        places: where in the clip the crop begins, in [0, 1), float64 (sources,).
        snr_db: signal-to-noise ratio, float64 (sources,).
        gains_db: of the whole utterance, float64 (batch,).
        telephone: whether the utterance is band-limited, bool (batch,).
        codec: whether it passes the codec, bool (batch,).
    """

    kinds: np.ndarray
    rooms: np.ndarray
    source_rows: np.ndarray
    source_kinds: np.ndarray
    clips: np.ndarray
    places: np.ndarray
    snr_db: np.ndarray
    gains_db: np.ndarray
    telephone: np.ndarray
    codec: np.ndarray


class ClipReader:
    """Stands in for the tensor of all crops: reads the sources of one utterance when they are asked for.

    On a CPU this is faster than reading them all first: a few crops stay in the processor's cache until they are added.
    What a slice gives is valid until the next one.
    """

    def __init__(self, banks: Mapping[str, ClipBank], drawn: "Drawn", num_samples: int, scratch: np.ndarray) -> None:
        self._banks, self._drawn, self._num_samples, self._scratch = banks, drawn, num_samples, scratch

    def __len__(self) -> int:
        return len(self._drawn.clips)

    def __getitem__(self, sources: slice) -> Tensor:
        drawn = self._drawn
        clips = drawn.clips[sources]
        out = self._scratch[: len(clips) * self._num_samples].reshape(len(clips), self._num_samples)
        kind = KINDS[int(drawn.source_kinds[sources.start])]
        self._banks[kind].fill(clips, drawn.places[sources], out)
        return torch.from_numpy(out)


@dataclass(frozen=True)
class Ingredients:
    """The audio that the choices need; moves to a device with the batch.

    Attributes:
        noises: crops of the sources, float32 (sources, samples), or a reader that gives them utterance by utterance.
        reverberation: by length of transform: utterances int64 (rows,), spectra complex64 (rows, bins), length.
    """

    noises: Tensor | ClipReader
    reverberation: tuple[tuple[Tensor, Tensor, int], ...] = ()

    def to(self, device: torch.device, non_blocking: bool = False) -> "Ingredients":
        """The same on another device."""
        rooms = tuple(
            (rows.to(device, non_blocking=non_blocking), spectra.to(device, non_blocking=non_blocking), length)
            for rows, spectra, length in self.reverberation
        )
        assert isinstance(self.noises, Tensor), "a reader of clips stays where the files are"
        return replace(self, noises=self.noises.to(device, non_blocking=non_blocking), reverberation=rooms)


class Augmenter:
    """Draws, gathers and applies; the categories without files are left out and the others share their part.

    Args:
        banks: clips by kind (noise, music, babble).
        rooms: impulse responses; None for no reverberation.
        ranges: what is drawn from where.
        is_classic: voxceleb_trainer to the letter (power floor, one SNR for each babble talker).
        sample_rate: Hz.
        seed: of the run.
    """

    def __init__(
        self,
        banks: Mapping[str, ClipBank],
        rooms: RoomBank | None,
        *,
        ranges: AugmentRanges | None = None,
        is_classic: bool = False,
        sample_rate: int = 16_000,
        seed: int = 0,
    ) -> None:
        self.banks = dict(banks)
        self.rooms = rooms
        self.ranges = ranges or AugmentRanges()
        self.snr_db = {**DEFAULT_SNR_DB, **(self.ranges.snr_db or {})}
        self.is_classic = is_classic
        self.sample_rate = sample_rate
        self.seed = seed
        has_files = {"reverb": bool(rooms), **{kind: bool(len(bank)) for kind, bank in self.banks.items()}}
        wanted = [kind for kind in KINDS[1:] if kind in self.ranges.categories]
        self.available = [kind for kind in wanted if has_files.get(kind, False)]
        self.missing = [kind for kind in wanted if kind not in self.available]
        self._scratch = np.empty(0, dtype=np.float32)

    def __call__(self, waveforms: Tensor, *, epoch: int, rows: np.ndarray) -> Tensor:
        """Disturb a batch in place: (batch, samples) float32, every choice keyed by (epoch, row)."""
        drawn = self.draw(rows, epoch)
        num_samples = waveforms.shape[1]
        if waveforms.device.type == "cpu":
            reverberation = self._gather_rooms(drawn.rooms, num_samples)
            return self.apply(waveforms, drawn, Ingredients(self._clip_reader(drawn, num_samples), reverberation))
        return self.apply(waveforms, drawn, self.gather(drawn, num_samples).to(waveforms.device, non_blocking=True))

    def _clip_reader(self, drawn: Drawn, num_samples: int) -> ClipReader:
        most = int(np.bincount(drawn.source_rows).max(initial=0)) if len(drawn.source_rows) else 0
        if len(self._scratch) < most * num_samples:
            self._scratch = np.empty(most * num_samples, dtype=np.float32)
        return ClipReader(self.banks, drawn, num_samples, self._scratch)

    def draw(self, rows: np.ndarray, epoch: int) -> Drawn:
        """Every choice for the utterances `rows` of the training list (batch,) in an epoch."""
        random = KeyedRandom(self.seed, epoch, rows)
        ranges = self.ranges
        kinds = self._draw_kinds(random)
        rooms = np.full(len(rows), -1, dtype=np.int64)
        if self.rooms is not None:
            chosen = (random.uniform(ROOM_STREAM)[:, 0] * len(self.rooms)).astype(np.int64)
            rooms = np.where(kinds == REVERB, chosen, -1)
        return Drawn(
            kinds=kinds,
            rooms=rooms,
            **self._draw_sources(random, kinds),
            gains_db=random.between(VOLUME_STREAM, *ranges.volume_db),
            telephone=random.uniform(TELEPHONE_STREAM)[:, 0] < ranges.telephone_probability,
            codec=random.uniform(CODEC_STREAM)[:, 0] < ranges.codec_probability,
        )

    def _draw_kinds(self, random: KeyedRandom) -> np.ndarray:
        if not self.available:
            return np.zeros(len(random.rows), dtype=np.int8)
        # one number decides both: below `probability` it is divided evenly among the categories
        number = random.uniform(KIND_STREAM)[:, 0] / max(self.ranges.probability, 1e-12)
        codes = np.array([KINDS.index(kind) for kind in self.available], dtype=np.int8)
        chosen = codes[np.minimum((number * len(codes)).astype(np.int64), len(codes) - 1)]
        return np.where(number < 1, chosen, CLEAN).astype(np.int8)

    def _draw_sources(self, random: KeyedRandom, kinds: np.ndarray) -> dict[str, np.ndarray]:
        fewest, most = self.ranges.babble_speakers
        talkers = fewest + (random.uniform(TALKERS_STREAM)[:, 0] * (most - fewest + 1)).astype(np.int64)
        counts = np.where(kinds == BABBLE, talkers, ((kinds == MUSIC) | (kinds == NOISE)).astype(np.int64))
        width = max(int(counts.max(initial=0)), 1)
        is_used = np.arange(width) < counts[:, None]
        source_rows = np.nonzero(is_used)[0]
        source_kinds = kinds[source_rows]
        clips = np.zeros((len(kinds), width), dtype=np.int64)
        snr_db = random.uniform(SNR_STREAM, width)
        if not self.is_classic:
            snr_db[:] = snr_db[:, :1]
        for code in (MUSIC, BABBLE, NOISE):
            rows = np.flatnonzero(kinds == code)
            if len(rows):
                drawn = random.uniform(CLIP_STREAM, width)[rows]
                clips[rows] = distinct_choices(drawn, len(self.banks[KINDS[code]]))
                low, high = self.snr_db[KINDS[code]]
                snr_db[rows] = low + (high - low) * snr_db[rows]
        return {
            "source_rows": source_rows,
            "source_kinds": source_kinds,
            "clips": clips[is_used],
            "places": random.uniform(PLACE_STREAM, width)[is_used],
            "snr_db": snr_db[is_used],
        }

    def gather(self, drawn: Drawn, num_samples: int) -> Ingredients:
        """Read the crops and spectra that the choices need, for utterances of `num_samples`.

        Raises:
            AudioError: a clip or an impulse response cannot be read.
        """
        noises = torch.empty(len(drawn.clips), num_samples)
        target = noises.numpy()
        for code in (MUSIC, BABBLE, NOISE):
            sources = np.flatnonzero(drawn.source_kinds == code)
            if len(sources) == 0:
                continue
            # runs of neighbouring sources are written in place; there are few runs, for kinds alternate rarely
            for run in np.split(sources, np.flatnonzero(np.diff(sources) > 1) + 1):
                part = slice(int(run[0]), int(run[-1]) + 1)
                self.banks[KINDS[code]].fill(drawn.clips[part], drawn.places[part], target[part])
        return Ingredients(noises, self._gather_rooms(drawn.rooms, num_samples))

    def _gather_rooms(self, rooms: np.ndarray, num_samples: int) -> tuple[tuple[Tensor, Tensor, int], ...]:
        if self.rooms is None:
            return ()
        rows = np.flatnonzero(rooms >= 0)
        lengths = np.array([self.rooms.fft_samples(int(rooms[row]), num_samples) for row in rows], dtype=np.int64)
        groups = []
        for length in np.unique(lengths).tolist():
            members = rows[lengths == length]
            spectra = np.stack([self.rooms.spectrum(int(rooms[row]), num_samples, length) for row in members])
            groups.append((torch.from_numpy(members), torch.from_numpy(spectra), length))
        return tuple(groups)

    def apply(self, waveforms: Tensor, drawn: Drawn, ingredients: Ingredients) -> Tensor:
        """Disturb a batch in place; no random choice is made here.

        Args:
            waveforms: (batch, samples) float32 in -1..1, on the device of the ingredients.
            drawn: the choices.
            ingredients: what `gather` read for them.

        Returns:
            The same tensor.
        """
        for rows, spectra, length in ingredients.reverberation:
            waveforms[rows] = reverberate(waveforms[rows], spectra, length)
        self._add_noises(waveforms, drawn, ingredients.noises)
        if drawn.telephone.any():
            rows = torch.from_numpy(np.flatnonzero(drawn.telephone)).to(waveforms.device)
            waveforms[rows] = telephone_band(waveforms[rows], self.sample_rate)
        if drawn.codec.any():
            rows = torch.from_numpy(np.flatnonzero(drawn.codec)).to(waveforms.device)
            waveforms[rows] = mu_law_codec(waveforms[rows], self.sample_rate)
        if drawn.gains_db.any():
            gains = torch.from_numpy(10 ** (drawn.gains_db / 20)).to(waveforms)
            waveforms *= gains[:, None]
        return waveforms

    def _add_noises(self, waveforms: Tensor, drawn: Drawn, noises: Tensor | ClipReader) -> None:
        """Each utterance's sources are one run of rows, so a mixture is one product of a vector and a matrix."""
        if len(noises) == 0:
            return
        utterances, first = np.unique(drawn.source_rows, return_index=True)
        last = np.append(first[1:], len(drawn.source_rows))
        ratios = torch.from_numpy(10 ** (-drawn.snr_db / 10)).to(waveforms)
        num_samples = waveforms.shape[1]
        for row, begin, end in zip(utterances.tolist(), first.tolist(), last.tolist(), strict=True):
            speech, sources = waveforms[row], noises[begin:end]
            power = torch.dot(speech, speech) / num_samples
            powers = torch.linalg.vecdot(sources, sources) / num_samples
            if self.is_classic:
                floor = CLASSIC_POWER_FLOOR
                weights = ((power + floor) / (powers + floor) * ratios[begin:end]).sqrt()
                speech += weights @ sources
            elif end - begin == 1:
                # one source: its weight is known before anything is added
                weight = (power.clamp_min(POWER_FLOOR) / powers[0].clamp_min(POWER_FLOOR) * ratios[begin]).sqrt()
                torch.addcmul(speech, weight, sources[0], out=speech)
            else:
                # talkers equally loud; together they are one noise at one ratio
                mixture = powers.clamp_min(POWER_FLOOR).rsqrt() @ sources
                mixed = (torch.dot(mixture, mixture) / num_samples).clamp_min(POWER_FLOOR)
                weight = (power.clamp_min(POWER_FLOOR) / mixed * ratios[begin]).sqrt()
                torch.addcmul(speech, weight, mixture, out=speech)


def distinct_choices(numbers: np.ndarray, num_choices: int) -> np.ndarray:
    """For each row, different members of 0 … num_choices - 1 from uniform numbers (rows, count), int64 (rows, count).

    The k-th number chooses among those that are left. Where there are fewer members than numbers they repeat.

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


def reverberate(waveforms: Tensor, spectra: Tensor, fft_samples: int) -> Tensor:
    """Convolve each waveform (rows, samples) with its response, given as spectrum (rows, bins); same length."""
    product = torch.fft.rfft(waveforms, fft_samples)
    product *= spectra
    return torch.fft.irfft(product, fft_samples)[:, : waveforms.shape[1]]


def telephone_band(waveforms: Tensor, sample_rate: int) -> Tensor:
    """Keep 300 to 3400 Hz (Butterworth magnitude of order 8, no phase), (rows, samples)."""
    length = waveforms.shape[1]
    frequency = torch.fft.rfftfreq(length, 1 / sample_rate, device=waveforms.device).clamp_min(1e-3)
    low, high = TELEPHONE_BAND_HZ
    response = (1 + (low / frequency) ** (2 * TELEPHONE_ORDER)) * (1 + (frequency / high) ** (2 * TELEPHONE_ORDER))
    return torch.fft.irfft(torch.fft.rfft(waveforms) * response.rsqrt(), length)


def mu_law_codec(waveforms: Tensor, sample_rate: int) -> Tensor:
    """To 8 kHz, 8-bit mu-law (G.711) and back, (rows, samples). Each row is coded at its own full scale."""
    length = waveforms.shape[1]
    short = max(2, length * CODEC_RATE_HZ // sample_rate // 2 * 2)
    spectrum = torch.fft.rfft(waveforms)[:, : short // 2 + 1]
    narrow = torch.fft.irfft(spectrum, short) * (short / length)
    peak = narrow.abs().amax(1, keepdim=True).clamp_min(1e-9)
    scaled = narrow / peak
    coded = torch.sign(scaled) * torch.log1p(MU_LAW * scaled.abs()) / np.log1p(MU_LAW)
    coded = (coded * 127.5).round() / 127.5
    decoded = torch.sign(coded) * torch.expm1(coded.abs() * np.log1p(MU_LAW)) / MU_LAW * peak
    return torch.fft.irfft(torch.fft.rfft(decoded), length) * (length / short)
