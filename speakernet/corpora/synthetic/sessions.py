"""Recording sessions: the room, microphone, background noise and level that clean synthetic speech is recorded with.

Second half of an utterance's way: `voices` speaks, a session records. All utterances of a session share it, so that the
trials between sessions ask for the voice and not for the channel.
"""

from dataclasses import dataclass

import numpy as np
from scipy import fft

from speakernet.corpora.synthetic.rooms import draw_room_response

MICROPHONE_TAPS = 512
_GRID_HZ = np.linspace(0.0, 8000.0, MICROPHONE_TAPS // 2 + 1)
_KNOTS_HZ = np.array([60.0, 150.0, 400.0, 1000.0, 2200.0, 4500.0, 8000.0])
PEAK = 0.95

# How far sessions lie apart; the counterpart of the spreads in `voices`.
COLOUR_SD_DB = 2.5
SNR_DB = (15.0, 35.0)
PITCH_SHIFT_SD_OCTAVES = 0.08
TEMPO_SD = 0.10


@dataclass(frozen=True)
class Session:
    """What the utterances of one recording session share."""

    response: np.ndarray  # (samples,) float32, room and microphone
    noise_shape: np.ndarray  # (MICROPHONE_TAPS / 2 + 1,) amplitude of the background over 0..8 kHz
    snr_db: float
    level_db: float  # of the recording, relative to full scale
    pitch_shift_octaves: float
    tempo_factor: float


def draw_session(generator: np.random.Generator) -> Session:
    """A random session."""
    room = draw_room_response(
        generator, str(generator.choice(["smallroom", "smallroom", "mediumroom"])), distance_metres=(0.15, 1.0)
    )
    microphone = _microphone(generator)
    size = fft.next_fast_len(len(room) + MICROPHONE_TAPS, real=True)
    response = fft.irfft(fft.rfft(room, size) * fft.rfft(microphone, size), size)
    slope_db_per_octave = generator.uniform(-8.0, -1.0)
    noise_db = slope_db_per_octave * np.log2(np.maximum(_GRID_HZ, 60.0) / 1000.0) + _colour_db(generator, 4.0)
    return Session(
        response=response.astype(np.float32),
        noise_shape=_from_db(noise_db).astype(np.float32),
        snr_db=float(generator.uniform(*SNR_DB)),
        level_db=float(generator.uniform(-32.0, -18.0)),
        pitch_shift_octaves=float(generator.normal(0.0, PITCH_SHIFT_SD_OCTAVES)),
        tempo_factor=float(np.exp(generator.normal(0.0, TEMPO_SD))),
    )


def record(session: Session, speech: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Record clean speech in this session: (samples,) -> (samples,) float32 within -1..1; the last echoes are cut."""
    num_samples = len(speech)
    size = fft.next_fast_len(num_samples + len(session.response) - 1, real=True)
    spectrum = fft.rfft(speech, size)
    spectrum *= fft.rfft(session.response, size)
    wet = fft.irfft(spectrum, size)[:num_samples]
    noise = shaped_noise(session.noise_shape, num_samples, generator)
    wet += noise * np.float32(_rms(wet) / _rms(noise) * 10.0 ** (-session.snr_db / 20.0))
    level_db = session.level_db + float(generator.normal(0.0, 2.0))
    return set_level(wet, level_db)


def shaped_noise(shape: np.ndarray, num_samples: int, generator: np.random.Generator) -> np.ndarray:
    """Noise with the amplitude spectrum `shape`, points evenly over 0..Nyquist; (num_samples,) float32."""
    size = fft.next_fast_len(num_samples, real=True)
    num_bins = size // 2 + 1
    parts = generator.standard_normal(2 * num_bins, dtype=np.float32)
    gain = np.interp(np.linspace(0.0, len(shape) - 1.0, num_bins), np.arange(len(shape)), shape).astype(np.float32)
    return fft.irfft(parts.view(np.complex64) * gain, size)[:num_samples]


def set_level(waveform: np.ndarray, level_db: float) -> np.ndarray:
    """Scale to an RMS level relative to full scale, lower where the peak would clip; float32."""
    gain = min(10.0 ** (level_db / 20.0) / _rms(waveform), PEAK / max(float(np.abs(waveform).max()), 1e-9))
    return (waveform * np.float32(gain)).astype(np.float32, copy=False)


def _microphone(generator: np.random.Generator) -> np.ndarray:
    """Linear-phase FIR of a random microphone: smooth colour, a low cut and, often, a high cut."""
    low_hz = generator.uniform(40.0, 250.0)
    high_hz = generator.uniform(3800.0, 9000.0)
    decibels = _colour_db(generator, COLOUR_SD_DB)
    decibels -= 10.0 * np.log10(1.0 + (low_hz / np.maximum(_GRID_HZ, 10.0)) ** 4)
    decibels -= 10.0 * np.log10(1.0 + (_GRID_HZ / high_hz) ** 8)
    taps = np.roll(fft.irfft(_from_db(decibels), MICROPHONE_TAPS), MICROPHONE_TAPS // 2)
    # Tapered to nothing 16 ms either side of the centre, by which the voice comes late; a smooth curve needs no more.
    return (taps * np.hanning(MICROPHONE_TAPS)).astype(np.float32)


def _colour_db(generator: np.random.Generator, spread_db: float) -> np.ndarray:
    knots = generator.normal(0.0, spread_db, len(_KNOTS_HZ))
    return np.interp(np.log(np.maximum(_GRID_HZ, _KNOTS_HZ[0])), np.log(_KNOTS_HZ), knots)


def _from_db(decibels: np.ndarray) -> np.ndarray:
    return 10.0 ** (decibels / 20.0)


def _rms(waveform: np.ndarray) -> float:
    return max(float(np.sqrt(np.mean(np.square(waveform)))), 1e-9)
