"""What surrounds a synthetic voice: rooms, recording sessions (room, microphone, background, level), and noises.

All utterances of a session share it, so that trials between sessions compare voices and not channels. Rooms and noises
also serve as augmentation.

Source: Allen & Berkley, "Image method for efficiently simulating small-room acoustics", JASA 65 (1979); decay time by
Eyring's formula.
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from scipy import fft
from scipy.ndimage import gaussian_filter1d

from speakernet.corpora.synthetic.speech import HOP, SAMPLE_RATE, draw_phones, draw_voice, lay_out, synthesise

SPEED_OF_SOUND = 343.0  # m/s
EARLY_SECONDS = 0.05  # images up to here; later there are so many that noise is as good
IMAGE_ORDER = 5  # reflections along one axis; reaches EARLY_SECONDS in rooms from about 3 m

# Sides in metres (low, high) and decay time to -60 dB in seconds (low, high), named as in RIRS_NOISES.
ROOM_KINDS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "smallroom": ((2.5, 6.0), (0.15, 0.4)),
    "mediumroom": ((6.0, 12.0), (0.3, 0.7)),
    "largeroom": ((12.0, 25.0), (0.5, 1.2)),
}


def draw_room_response(
    generator: np.random.Generator,
    kind: str = "smallroom",
    *,
    distance_metres: tuple[float, float] = (0.3, 2.5),
) -> np.ndarray:
    """A random room of this kind with talker and microphone in it; (samples,) float32, direct path of height one."""
    (shortest, longest), (dry, wet) = ROOM_KINDS[kind]
    sides = generator.uniform(shortest, longest, 3)
    sides[2] = generator.uniform(2.4, 3.5 if kind == "smallroom" else 6.0)
    decay_seconds = float(generator.uniform(dry, wet))
    microphone = generator.uniform(0.15, 0.85, 3) * sides
    direction = generator.standard_normal(3)
    direction *= generator.uniform(*distance_metres) / np.linalg.norm(direction)
    talker = np.clip(microphone + direction, 0.05 * sides, 0.95 * sides)
    return room_response(sides, talker, microphone, decay_seconds, generator)


def room_response(
    sides: np.ndarray,
    talker: np.ndarray,
    microphone: np.ndarray,
    decay_seconds: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """Impulse response from `talker` to `microphone`, (3,) metres each, in a box of `sides`; starts at the direct path.

    Delays are rounded to whole samples. All walls absorb alike.
    """
    volume, surface = float(np.prod(sides)), 2.0 * float(sides @ np.roll(sides, 1))
    # 0.161 s/m is 24 ln(10) / c.
    reflection = np.exp(-0.5 * 0.161 * volume / (surface * decay_seconds))  # amplitude; Eyring solved for the walls

    # Along one axis an image is at 2 n L + s or 2 n L - s, after |2n| or |2n - 1| reflections.
    order = np.arange(-IMAGE_ORDER, IMAGE_ORDER + 1)
    offsets = [
        np.concatenate([2 * order * side + source, 2 * order * side - source]) - ear
        for side, source, ear in zip(sides, talker, microphone, strict=True)
    ]
    bounces = np.concatenate([np.abs(2 * order), np.abs(2 * order - 1)])
    squared = offsets[0][:, None, None] ** 2 + offsets[1][:, None] ** 2 + offsets[2] ** 2
    total = bounces[:, None, None] + bounces[:, None] + bounces
    direct = float(np.linalg.norm(talker - microphone))
    is_early = squared < (direct + SPEED_OF_SOUND * EARLY_SECONDS) ** 2
    distance = np.sqrt(squared[is_early])
    delay = np.round((distance - direct) * (SAMPLE_RATE / SPEED_OF_SOUND)).astype(np.int64)
    height = reflection ** total[is_early] * (direct / np.maximum(distance, 1e-3))

    num_early = round(EARLY_SECONDS * SAMPLE_RATE)
    response = np.zeros(num_early + round(decay_seconds * SAMPLE_RATE), dtype=np.float32)
    response[: num_early + 1] = np.bincount(np.maximum(delay, 0), height, num_early + 1)[: num_early + 1]

    # The tail continues at the level of the last fifth of the early part and falls 60 dB in `decay_seconds`.
    level = float(np.sqrt(np.mean(response[num_early * 4 // 5 : num_early] ** 2)))
    tail = generator.standard_normal(len(response) - num_early)
    tail *= level * 10.0 ** (-3.0 * np.arange(len(tail)) / (decay_seconds * SAMPLE_RATE))
    response[num_early:] = tail
    return response


MICROPHONE_TAPS = 512
_GRID_HZ = np.linspace(0.0, 8000.0, MICROPHONE_TAPS // 2 + 1)
_KNOTS_HZ = np.array([60.0, 150.0, 400.0, 1000.0, 2200.0, 4500.0, 8000.0])
PEAK = 0.95

# How much sessions differ; the counterpart of the spreads of voices in `speech`.
COLOUR_SD_DB = 2.5
SNR_DB = (15.0, 35.0)
PITCH_SHIFT_SD_OCTAVES = 0.08
TEMPO_SD = 0.10


def draw_session(generator: np.random.Generator) -> SimpleNamespace:
    """A random session: what the utterances of one recording session share."""
    room = draw_room_response(
        generator, str(generator.choice(["smallroom", "smallroom", "mediumroom"])), distance_metres=(0.15, 1.0)
    )
    microphone = _microphone(generator)
    size = fft.next_fast_len(len(room) + MICROPHONE_TAPS, real=True)
    response = fft.irfft(fft.rfft(room, size) * fft.rfft(microphone, size), size)
    slope_db_per_octave = generator.uniform(-8.0, -1.0)
    noise_db = slope_db_per_octave * np.log2(np.maximum(_GRID_HZ, 60.0) / 1000.0) + _colour_db(generator, 4.0)
    return SimpleNamespace(
        response=response.astype(np.float32),  # (samples,) room and microphone
        # (MICROPHONE_TAPS / 2 + 1,) amplitude of the background over 0..8 kHz
        noise_shape=(10.0 ** (noise_db / 20.0)).astype(np.float32),
        snr_db=float(generator.uniform(*SNR_DB)),
        level_db=float(generator.uniform(-32.0, -18.0)),  # of the recording, relative to full scale
        pitch_shift_octaves=float(generator.normal(0.0, PITCH_SHIFT_SD_OCTAVES)),
        tempo_factor=float(np.exp(generator.normal(0.0, TEMPO_SD))),
    )


def record(session: SimpleNamespace, speech: np.ndarray, generator: np.random.Generator) -> np.ndarray:
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
    taps = np.roll(fft.irfft(10.0 ** (decibels / 20.0), MICROPHONE_TAPS), MICROPHONE_TAPS // 2)
    # Tapered to nothing 16 ms either side of the centre, by which the voice comes late; a smooth curve needs no more.
    return (taps * np.hanning(MICROPHONE_TAPS)).astype(np.float32)


def _colour_db(generator: np.random.Generator, spread_db: float) -> np.ndarray:
    knots = generator.normal(0.0, spread_db, len(_KNOTS_HZ))
    return np.interp(np.log(np.maximum(_GRID_HZ, _KNOTS_HZ[0])), np.log(_KNOTS_HZ), knots)


def _rms(waveform: np.ndarray) -> float:
    return max(float(np.sqrt(np.mean(np.square(waveform)))), 1e-9)


def talker(generator: np.random.Generator, num_samples: int) -> np.ndarray:
    """One more synthetic speaker, talking on until the clip is full; (num_samples,) float32."""
    voice, session = draw_voice(generator), draw_session(generator)
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < num_samples:
        tracks = lay_out(draw_phones(generator, 16), generator, tempo=voice.tempo * session.tempo_factor)
        pieces.append(synthesise(voice, tracks, generator, pitch_shift_octaves=session.pitch_shift_octaves))
    return record(session, np.concatenate(pieces)[:num_samples], generator)


def crowd(generator: np.random.Generator, num_samples: int) -> np.ndarray:
    """Eight talkers at different distances at once."""
    mixture = np.zeros(num_samples, dtype=np.float32)
    for _ in range(8):
        mixture += set_level(talker(generator, num_samples), float(generator.uniform(-38.0, -26.0)))
    return set_level(mixture, -26.0)


def machine(generator: np.random.Generator, num_samples: int) -> np.ndarray:
    """A motor: harmonics of a slowly drifting rotation, broadband noise that beats with it, some knocks."""
    frames = num_samples // HOP + 2
    drift = gaussian_filter1d(generator.standard_normal(frames), 40.0) * 3.0
    rotation_hz = generator.uniform(18.0, 160.0) * (1.0 + 0.03 * drift)
    at_sample = np.arange(num_samples)
    phase = 2.0 * np.pi * np.cumsum(np.interp(at_sample, np.arange(frames) * HOP, rotation_hz)) / SAMPLE_RATE
    num_harmonics = int(generator.integers(6, 24))
    heights = generator.exponential(1.0, num_harmonics) / np.arange(1, num_harmonics + 1) ** generator.uniform(0.2, 1.2)
    hum = sum(
        height * np.sin(harmonic * phase + generator.uniform(0.0, 6.28))
        for harmonic, height in enumerate(heights, start=1)
    )
    hiss = _coloured(generator, num_samples, (-5.0, 2.0))
    hiss *= 1.0 + generator.uniform(0.0, 0.9) * np.sin(phase * generator.integers(1, 4))
    mixture = hum / np.std(hum) + generator.uniform(0.2, 2.0) * hiss / np.std(hiss)
    knocks = np.zeros(num_samples)
    places = generator.integers(0, num_samples, int(generator.integers(0, 25)))
    knocks[places] = generator.exponential(1.0, len(places)) * 30.0
    ring = np.exp(-np.arange(800) / 120.0) * np.sin(np.arange(800) * generator.uniform(0.2, 1.5))
    mixture += np.convolve(knocks, ring)[:num_samples]
    return set_level(mixture.astype(np.float32), -26.0)


def room_noise(generator: np.random.Generator, num_samples: int) -> np.ndarray:
    """Ventilation, traffic behind a window, rain: coloured noise that swells slowly."""
    noise = _coloured(generator, num_samples, (-10.0, 0.0))
    frames = num_samples // HOP + 2
    swell = gaussian_filter1d(generator.standard_normal(frames), 60.0) * 12.0 * generator.uniform(0.0, 0.4)
    noise *= np.interp(np.arange(num_samples), np.arange(frames) * HOP, np.exp(swell))
    return set_level(noise.astype(np.float32), -26.0)


def music(generator: np.random.Generator, num_samples: int) -> np.ndarray:
    """Chords, a melody and a bass over one scale: notes with their own timbre, attack and decay."""
    scale = np.array([0, 2, 4, 5, 7, 9, 11] if generator.random() < 0.5 else [0, 2, 3, 5, 7, 8, 10])
    root_hz = 110.0 * 2.0 ** generator.uniform(0.0, 1.0)
    beat = int(SAMPLE_RATE * generator.uniform(0.22, 0.5))
    timbres = [generator.exponential(1.0, 8) / np.arange(1, 9) ** generator.uniform(0.5, 1.8) for _ in range(3)]
    mixture = np.zeros(num_samples + 4 * beat, dtype=np.float32)
    for start in range(0, num_samples, beat):
        degree = int(generator.integers(0, 7))
        notes = [(0, 24 + int(scale[generator.integers(0, 7)]), 2, 1.0)]  # timbre, semitone, beats, height
        if start // beat % 4 == 0:
            notes += [
                (1, 12 * ((degree + step) // 7) + 12 + int(scale[(degree + step) % 7]), 4, 0.6) for step in (0, 2, 4)
            ]
            notes += [(2, int(scale[degree]) - 12, 4, 1.0)]
        for timbre, semitone, beats, height in notes:
            tone = _note(timbres[timbre], root_hz * 2.0 ** (semitone / 12.0), beats * beat)
            mixture[start : start + len(tone)] += np.float32(height) * tone
    return set_level(mixture[:num_samples], -26.0)


#: Kind -> (category of MUSAN, maker); the order decides which clip is of which kind.
NOISES: dict[str, tuple[str, Callable[[np.random.Generator, int], np.ndarray]]] = {
    "crowd": ("noise", crowd),
    "machine": ("noise", machine),
    "room": ("noise", room_noise),
    "music": ("music", music),
    "talker": ("speech", talker),
}


def _note(timbre: np.ndarray, hz: float, num_samples: int) -> np.ndarray:
    seconds = np.arange(num_samples, dtype=np.float32) / np.float32(SAMPLE_RATE)
    envelope = np.minimum(seconds / 0.01, 1.0) * np.exp(-3.0 * seconds)
    harmonics = np.arange(1, len(timbre) + 1)
    is_below_nyquist = harmonics * hz < 0.45 * SAMPLE_RATE
    waves = np.sin(np.float32(2.0 * np.pi * hz) * harmonics[is_below_nyquist, None].astype(np.float32) * seconds)
    return envelope * (timbre[is_below_nyquist].astype(np.float32) @ waves)


def _coloured(generator: np.random.Generator, num_samples: int, slopes: tuple[float, float]) -> np.ndarray:
    """Noise with a random slope in dB an octave and a few broad resonances."""
    hz = np.linspace(0.0, SAMPLE_RATE / 2, 257)
    decibels = generator.uniform(*slopes) * np.log2(np.maximum(hz, 50.0) / 1000.0)
    for _ in range(3):
        centre, width = generator.uniform(100.0, 7000.0), generator.uniform(100.0, 1500.0)
        decibels += generator.uniform(-6.0, 15.0) * np.exp(-0.5 * ((hz - centre) / width) ** 2)
    return shaped_noise(10.0 ** (decibels / 20.0), num_samples, generator)
