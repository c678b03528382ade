"""What a recording is worth for recognising a voice: seconds of speech, and what is wrong with it.

Speech is found by its energy: frames that rise above the quiet ones. That is enough to tell how much there is of it and
to order recordings by noise; it is no measurement. A recording is looked at in stretches, so that an hour takes no more
memory than a minute. Knows audio only, no network.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from speakernet.data.audio import SAMPLE_RATE, AudioError
from speakernet.evaluation.quality import frame_powers, power_ratio_db
from speakernet.inference.recordings import Audio, Recording, open_recording

MIN_ENROL_SECONDS = 2.0
"""Seconds of speech in a recording to enrol with; with less, scores spread so far that a voice is often missed."""
LEAST_SECONDS = 0.25
"""A syllable; less is refused wherever an answer would be believed."""
SILENT_DB = -60.0
"""Full scale is 0 dB; speech in a quiet room with a microphone turned far down lies above."""
SPEECH_RANGE_DB = 30.0
"""Frames so far below the loudest are pauses, whatever the noise."""
SPEECH_SHARE_OF_RANGE = 0.25
"""Speech lies above the quiet frames by at least this share of the way from them to the loudest."""
LEAST_RANGE_DB = 3.0
"""A sound whose loud and quiet frames differ by less is a tone or a hiss: speech has pauses and stops."""
NOISY_DB = 10.0
CLIPPED_SHARE = 0.001
CLIP_LEVEL = 0.98
NEAR_PEAK = 0.999
BAND_HZ = (300.0, 3400.0)
UPPER_BAND_HZ = (5000.0, 7500.0)
BAND_LIMITED_DB = -60.0
"""Power density above the telephone's band against that within it; what was resampled from 8 kHz lies below -65 dB."""


@dataclass(frozen=True)
class Quality:
    """What was found of a recording.

    Attributes:
        name: of the file, or `the array`.
        seconds: duration.
        speech_seconds: of speech in it.
        peak: largest sample, 1 is full scale.
        signal_to_noise_db: loud against quiet frames, rough.
        clipped_share: of samples at full scale or at the recording's own ceiling.
        upper_band_db: power density above the telephone's band against that within it; None where the rate has none.
        warnings: what is wrong, a sentence each; empty for a good recording.
        is_silent: nothing can be recognised by it.
        is_cut_off: the end of the file is missing.
        digest: SHA-256 of the samples, float32.
    """

    name: str
    seconds: float
    speech_seconds: float
    peak: float
    signal_to_noise_db: float
    clipped_share: float
    upper_band_db: float | None
    warnings: tuple[str, ...] = ()
    is_silent: bool = False
    is_cut_off: bool = False
    digest: str = ""


def inspect_recording(
    audio: Audio, *, sample_rate: int | None = None, min_speech_seconds: float = MIN_ENROL_SECONDS
) -> Quality:
    """Look at a recording from its beginning to its end.

    Args:
        audio: a file, an array, or a recording that was opened.
        sample_rate: Hz, of an array.
        min_speech_seconds: with less speech it is called too short.

    Raises:
        AudioError: it cannot be read, is empty, or holds NaN or infinite samples.

    >>> hiss = 0.1 * np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    >>> inspect_recording(hiss, sample_rate=16000).speech_seconds
    0.0
    """
    recording = open_recording(audio, sample_rate, SAMPLE_RATE)
    seen = _Seen(recording.sample_rate)
    digest = hashlib.sha256()
    for piece in recording.pieces():
        seen.add(piece.waveforms[0])
        digest.update(piece.waveforms[0].astype("<f4").tobytes())
    powers = np.concatenate(seen.powers)
    ratio, speech = power_ratio_db(powers), _speech_seconds(powers, recording)
    quality = Quality(
        recording.name,
        recording.seconds,
        speech,
        seen.peak,
        ratio,
        seen.clipped_share,
        seen.upper_band_db,
        is_cut_off=recording.is_cut_off,
        digest=digest.hexdigest(),
        is_silent=not speech and _decibels(float(powers.max(initial=0.0))) < SILENT_DB,
    )
    return _with_warnings(quality, min_speech_seconds)


def usable(recording: Recording) -> Recording:
    """The recording, if something can be recognised by it.

    Raises:
        AudioError: it is silent, shorter than a syllable, or cannot be read.
    """
    refuse_unusable(inspect_recording(recording))
    return recording


def refuse_unusable(quality: Quality) -> None:
    """Refuse a recording by which nothing can be recognised.

    Raises:
        AudioError: it is silent, or shorter than a syllable.
    """
    if quality.is_silent:
        raise AudioError(f"{quality.name}: {quality.warnings[0]}; record it again, or turn the microphone up")
    if quality.seconds < LEAST_SECONDS:
        raise AudioError(
            f"{quality.name}: {quality.seconds:.3f} s of audio is too short to know a voice by; "
            f"expected {LEAST_SECONDS:g} s at the very least, some seconds for a sure answer"
        )


@dataclass
class _Seen:
    """What is kept of the stretches that were looked at."""

    sample_rate: int
    powers: list[np.ndarray] = field(default_factory=list)
    peak: float = 0.0
    num_samples: int = 0
    num_at_full_scale: int = 0
    num_near_peak: int = 0
    spectrum: np.ndarray | None = None

    def add(self, waveform: np.ndarray) -> None:
        """One stretch, (samples,)."""
        self.powers.append(frame_powers(waveform, self.sample_rate))
        magnitudes = np.abs(waveform)
        peak = float(magnitudes.max(initial=0.0))
        if peak > self.peak / NEAR_PEAK:
            # A new ceiling: what lay near the old one was below it.
            self.num_near_peak = 0
        self.peak = max(self.peak, peak)
        self.num_near_peak += int(np.count_nonzero(magnitudes >= NEAR_PEAK * max(self.peak, 1e-9)))
        self.num_at_full_scale += int(np.count_nonzero(magnitudes >= CLIP_LEVEL))
        self.num_samples += len(waveform)
        size = 1 << max(6, math.ceil(math.log2(self.sample_rate / 40)))
        if len(waveform) >= size:
            frames = waveform[: len(waveform) // size * size].reshape(-1, size) * np.hanning(size).astype(np.float32)
            # Loud frames outweigh the pauses by themselves.
            added = np.square(np.abs(np.fft.rfft(frames, axis=1))).sum(axis=0, dtype=np.float64)
            self.spectrum = added if self.spectrum is None else self.spectrum + added

    @property
    def clipped_share(self) -> float:
        """Of samples at full scale, or at a ceiling of the recording's own below it."""
        return max(self.num_at_full_scale, self.num_near_peak) / max(1, self.num_samples)

    @property
    def upper_band_db(self) -> float | None:
        """Power density of the upper band against the telephone's, in dB."""
        if self.spectrum is None or self.sample_rate / 2 < UPPER_BAND_HZ[1]:
            return None
        frequencies = np.linspace(0, self.sample_rate / 2, len(self.spectrum))
        low, high = (
            float(self.spectrum[(frequencies >= band[0]) & (frequencies <= band[1])].mean())
            for band in (BAND_HZ, UPPER_BAND_HZ)
        )
        return _decibels(high) - _decibels(low)


def _speech_seconds(powers: np.ndarray, recording: Recording) -> float:
    """Seconds of frames that are louder than pauses and noise."""
    levels = 10 * np.log10(powers + 1e-12)
    quiet, loud = np.percentile(levels, [10, 95])
    if loud - quiet < LEAST_RANGE_DB:
        return 0.0
    least = max(SILENT_DB, loud - SPEECH_RANGE_DB, quiet + SPEECH_SHARE_OF_RANGE * (loud - quiet))
    return float(np.mean(levels >= least)) * recording.seconds


def _with_warnings(quality: Quality, min_speech_seconds: float) -> Quality:
    """The same with what is wrong in words."""
    return Quality(**{**vars(quality), "warnings": tuple(_warnings(quality, min_speech_seconds))})


def _warnings(quality: Quality, min_speech_seconds: float) -> Iterator[str]:
    if quality.is_silent:
        yield f"silent: nothing above {SILENT_DB:g} dB of full scale"
        return
    if quality.speech_seconds < min_speech_seconds:
        yield (
            f"too short: {quality.speech_seconds:.1f} s of speech in {quality.seconds:.1f} s; "
            f"{min_speech_seconds:g} s or more are wanted"
        )
    if quality.is_cut_off:
        yield "cut off: the file promises more than it holds; copy or record it again"
    if quality.clipped_share > CLIPPED_SHARE:
        yield f"clipped: {100 * quality.clipped_share:.2g} % of the samples are at the ceiling; record it less loud"
    if quality.speech_seconds and quality.signal_to_noise_db < NOISY_DB:
        yield f"noisy: speech is only {quality.signal_to_noise_db:.0f} dB above the quiet parts"
    if quality.upper_band_db is not None and quality.upper_band_db < BAND_LIMITED_DB:
        yield "band-limited: nothing above 4 kHz, as over a telephone; enrol with the microphone that will be used"


def _decibels(power: float) -> float:
    return 10 * math.log10(power + 1e-12)
