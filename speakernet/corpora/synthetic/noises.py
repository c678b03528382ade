"""Background sounds for augmentation: machines, rooms, crowds, music, and single talkers to mix babble from.

Made like the synthetic speakers, from a generator alone. `corpus` lays them out as MUSAN does; no files here.
"""

from collections.abc import Callable

import numpy as np
from scipy.ndimage import gaussian_filter1d

from speakernet.corpora.synthetic.phones import draw_phones, lay_out
from speakernet.corpora.synthetic.sessions import draw_session, record, set_level, shaped_noise
from speakernet.corpora.synthetic.voices import HOP, SAMPLE_RATE, draw_voice, synthesise

NoiseMaker = Callable[[np.random.Generator, int], np.ndarray]


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


NOISES: dict[str, NoiseMaker] = {"crowd": crowd, "machine": machine, "room": room_noise}


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
