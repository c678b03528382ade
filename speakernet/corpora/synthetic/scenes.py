"""The surroundings of a synthetic voice: rooms, recording sessions (room, microphone, background,
level) and noises; and the files and lists of a corpus.

All utterances of a session share these, so that trials between sessions compare voices and not
channels. Rooms and noises also serve as augmentation.

Source: Allen & Berkley, "Image method for efficiently simulating small-room acoustics", JASA 65
(1979); decay time by Eyring's formula.
"""

import csv
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy import fft
from scipy.ndimage import gaussian_filter1d

from speakernet.corpora.synthetic.speech import (
    HOP,
    SAMPLE_RATE,
    draw_phones,
    draw_voice,
    lay_out,
    synthesise,
)
from speakernet.data.audio import audio_info, write_audio
from speakernet.data.lists import write_training_list, write_trials
from speakernet.files import atomic_write
from speakernet.random import numpy_generator

SPEED_OF_SOUND = 343.0  # m/s
EARLY_SECONDS = 0.05  # images up to here; later ones are so dense that noise is as good
IMAGE_ORDER = 5  # reflections along one axis; reaches EARLY_SECONDS in rooms from about 3 m

# Sides in metres (low, high) and decay time to -60 dB in seconds (low, high), named as in
# RIRS_NOISES.
ROOM_KINDS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "smallroom": ((2.5, 6.0), (0.15, 0.4)),
    "mediumroom": ((6.0, 12.0), (0.3, 0.7)),
    "largeroom": ((12.0, 25.0), (0.5, 1.2)),
}


def draw_room_response(
    generator: Generator,
    kind: str,
    *,
    distance_metres: tuple[float, float],
) -> ndarray:
    """RIR of a random room of this kind, from a talker to a microphone; (samples,) float32, direct
    path 1.
    """
    (shortest, longest), (dry, wet) = ROOM_KINDS[kind]
    sides = generator.uniform(shortest, longest, 3)
    sides[2] = generator.uniform(2.4, 3.5 if kind == "smallroom" else 6.0)
    decay_seconds = float(generator.uniform(dry, wet))
    microphone = generator.uniform(0.15, 0.85, 3) * sides
    # Three normal numbers have no preferred direction; uniform ones would favour the corners.
    direction = generator.standard_normal(3)
    direction *= generator.uniform(*distance_metres) / np.linalg.norm(direction)
    # The image method holds only for a talker inside the room.
    talker = np.clip(microphone + direction, 0.05 * sides, 0.95 * sides)
    return room_response(sides, talker, microphone, decay_seconds, generator)


def room_response(
    sides: ndarray,
    talker: ndarray,
    microphone: ndarray,
    decay_seconds: float,
    generator: Generator,
) -> ndarray:
    """Impulse response from `talker` to `microphone`, (3,) metres each, in a box of `sides`; starts
    at the direct path.

    Delays are rounded to whole samples. All walls absorb equally.
    """
    volume = float(np.prod(sides))
    surface = 2.0 * float(sides @ np.roll(sides, 1))
    # 0.161 s/m is 24 ln(10) / c.
    reflection = np.exp(
        -0.5 * 0.161 * volume / (surface * decay_seconds)
    )  # amplitude; Eyring solved for the walls

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
    response[: num_early + 1] = np.bincount(np.maximum(delay, 0), height, num_early + 1)[
        : num_early + 1
    ]

    # The tail continues at the level of the last fifth of the early part and falls 60 dB in
    # `decay_seconds`.
    level = float(np.sqrt(np.mean(response[num_early * 4 // 5 : num_early] ** 2)))
    tail = generator.standard_normal(len(response) - num_early)
    tail *= level * 10.0 ** (-3.0 * np.arange(len(tail)) / (decay_seconds * SAMPLE_RATE))
    response[num_early:] = tail
    return response


MICROPHONE_TAPS = 512
_GRID_HZ = np.linspace(0.0, 8000.0, MICROPHONE_TAPS // 2 + 1)
_KNOTS_HZ = np.array([60.0, 150.0, 400.0, 1000.0, 2200.0, 4500.0, 8000.0])
PEAK = 0.95

# How much sessions differ; the counterpart of the spread of voices in `speech`.
COLOUR_SD_DB = 2.5
SNR_DB = (15.0, 35.0)
PITCH_SHIFT_SD_OCTAVES = 0.08
TEMPO_SD = 0.10


# What makes the corpus a test. If every recording had a room of its own, a network could only tell
# voices apart; if each speaker had one room, it would learn the rooms, and trials within a session
# would look far too easy. So a speaker has several sessions with a few utterances each, and target
# trials join different ones. How much sessions differ against how much speakers differ decides the
# error rate; the spreads were set by trial so that a small network reaches a few per cent.
def draw_session(generator: Generator) -> SimpleNamespace:
    """A random session: the properties shared by the utterances of one recording session."""
    room = draw_room_response(
        generator,
        str(generator.choice(["smallroom", "smallroom", "mediumroom"])),
        distance_metres=(0.15, 1.0),
    )
    microphone = _microphone(generator)
    size = fft.next_fast_len(len(room) + MICROPHONE_TAPS, real=True)
    response = fft.irfft(fft.rfft(room, size) * fft.rfft(microphone, size), size)
    slope_db_per_octave = generator.uniform(-8.0, -1.0)
    noise_db = slope_db_per_octave * np.log2(np.maximum(_GRID_HZ, 60.0) / 1000.0) + _colour_db(
        generator, 4.0
    )
    return SimpleNamespace(
        response=response.astype(np.float32),  # (samples,) room and microphone
        # (MICROPHONE_TAPS / 2 + 1,) amplitude of the background over 0..8 kHz
        noise_shape=(10.0 ** (noise_db / 20.0)).astype(np.float32),
        snr_db=float(generator.uniform(*SNR_DB)),
        level_db=float(generator.uniform(-32.0, -18.0)),  # of the recording, relative to full scale
        pitch_shift_octaves=float(generator.normal(0.0, PITCH_SHIFT_SD_OCTAVES)),
        tempo_factor=float(np.exp(generator.normal(0.0, TEMPO_SD))),
    )


def record(session: SimpleNamespace, speech: ndarray, generator: Generator) -> ndarray:
    """Record clean speech in this session: (samples,) -> (samples,) float32 in -1..1; the last
    echoes are cut off.
    """
    num_samples = len(speech)
    size = fft.next_fast_len(num_samples + len(session.response) - 1, real=True)
    spectrum = fft.rfft(speech, size)
    spectrum *= fft.rfft(session.response, size)
    wet = fft.irfft(spectrum, size)[:num_samples]
    noise = shaped_noise(session.noise_shape, num_samples, generator)
    wet += noise * np.float32(_rms(wet) / _rms(noise) * 10.0 ** (-session.snr_db / 20.0))
    level_db = session.level_db + float(generator.normal(0.0, 2.0))
    return set_level(wet, level_db)


def shaped_noise(shape: ndarray, num_samples: int, generator: Generator) -> ndarray:
    """Noise with the amplitude spectrum `shape`, evenly spaced over 0..Nyquist; (num_samples,)
    float32.
    """
    size = fft.next_fast_len(num_samples, real=True)
    num_bins = size // 2 + 1
    parts = generator.standard_normal(2 * num_bins, dtype=np.float32)
    gain = np.interp(
        np.linspace(0.0, len(shape) - 1.0, num_bins), np.arange(len(shape)), shape
    ).astype(np.float32)
    return fft.irfft(parts.view(np.complex64) * gain, size)[:num_samples]


def set_level(waveform: ndarray, level_db: float) -> ndarray:
    """Scale to an RMS level relative to full scale, lower if the peak would clip; float32."""
    gain = min(
        10.0 ** (level_db / 20.0) / _rms(waveform), PEAK / max(float(np.abs(waveform).max()), 1e-9)
    )
    return (waveform * np.float32(gain)).astype(np.float32, copy=False)


def _microphone(generator: Generator) -> ndarray:
    """Linear-phase FIR of a random microphone: smooth colour, a low cut and, often, a high cut."""
    low_hz = generator.uniform(40.0, 250.0)
    high_hz = generator.uniform(3800.0, 9000.0)
    decibels = _colour_db(generator, COLOUR_SD_DB)
    decibels -= 10.0 * np.log10(1.0 + (low_hz / np.maximum(_GRID_HZ, 10.0)) ** 4)
    decibels -= 10.0 * np.log10(1.0 + (_GRID_HZ / high_hz) ** 8)
    taps = np.roll(fft.irfft(10.0 ** (decibels / 20.0), MICROPHONE_TAPS), MICROPHONE_TAPS // 2)
    # Tapered to zero 16 ms on either side of the centre, which is also the delay; a smooth response
    # needs no more.
    return (taps * np.hanning(MICROPHONE_TAPS)).astype(np.float32)


def _colour_db(generator: Generator, spread_db: float) -> ndarray:
    knots = generator.normal(0.0, spread_db, len(_KNOTS_HZ))
    return np.interp(np.log(np.maximum(_GRID_HZ, _KNOTS_HZ[0])), np.log(_KNOTS_HZ), knots)


def _rms(waveform: ndarray) -> float:
    return max(float(np.sqrt(np.mean(np.square(waveform)))), 1e-9)


def talker(generator: Generator, num_samples: int) -> ndarray:
    """One more synthetic speaker, talking until the clip is full; (num_samples,) float32."""
    voice = draw_voice(generator)
    session = draw_session(generator)
    pieces: list[ndarray] = []
    while sum(map(len, pieces)) < num_samples:
        tracks = lay_out(
            draw_phones(generator, 16), generator, tempo=voice.tempo * session.tempo_factor
        )
        pieces.append(
            synthesise(voice, tracks, generator, pitch_shift_octaves=session.pitch_shift_octaves)
        )
    return record(session, np.concatenate(pieces)[:num_samples], generator)


def crowd(generator: Generator, num_samples: int) -> ndarray:
    """Eight simultaneous talkers at different distances."""
    mixture = np.zeros(num_samples, dtype=np.float32)
    for _ in range(8):
        mixture += set_level(talker(generator, num_samples), float(generator.uniform(-38.0, -26.0)))
    return set_level(mixture, -26.0)


def machine(generator: Generator, num_samples: int) -> ndarray:
    """A motor: harmonics of a slowly drifting rotation, broadband noise that beats with it, some
    knocks.
    """
    frames = num_samples // HOP + 2
    drift = gaussian_filter1d(generator.standard_normal(frames), 40.0) * 3.0
    rotation_hz = generator.uniform(18.0, 160.0) * (1.0 + 0.03 * drift)
    at_sample = np.arange(num_samples)
    phase = (
        2.0
        * np.pi
        * np.cumsum(np.interp(at_sample, np.arange(frames) * HOP, rotation_hz))
        / SAMPLE_RATE
    )
    num_harmonics = int(generator.integers(6, 24))
    heights = generator.exponential(1.0, num_harmonics) / np.arange(
        1, num_harmonics + 1
    ) ** generator.uniform(0.2, 1.2)
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


def room_noise(generator: Generator, num_samples: int) -> ndarray:
    """Ventilation, traffic behind a window, rain: coloured noise that swells slowly."""
    noise = _coloured(generator, num_samples, (-10.0, 0.0))
    frames = num_samples // HOP + 2
    swell = (
        gaussian_filter1d(generator.standard_normal(frames), 60.0)
        * 12.0
        * generator.uniform(0.0, 0.4)
    )
    noise *= np.interp(np.arange(num_samples), np.arange(frames) * HOP, np.exp(swell))
    return set_level(noise.astype(np.float32), -26.0)


def music(generator: Generator, num_samples: int) -> ndarray:
    """Chords, a melody and a bass over one scale: notes with their own timbre, attack and decay."""
    scale = np.array([0, 2, 4, 5, 7, 9, 11] if generator.random() < 0.5 else [0, 2, 3, 5, 7, 8, 10])
    root_hz = 110.0 * 2.0 ** generator.uniform(0.0, 1.0)
    beat = int(SAMPLE_RATE * generator.uniform(0.22, 0.5))
    timbres = [
        generator.exponential(1.0, 8) / np.arange(1, 9) ** generator.uniform(0.5, 1.8)
        for _ in range(3)
    ]
    # The last notes begin before the end and last up to four beats.
    mixture = np.zeros(num_samples + 4 * beat, dtype=np.float32)
    for start in range(0, num_samples, beat):
        degree = int(generator.integers(0, 7))
        notes = [
            (0, 24 + int(scale[generator.integers(0, 7)]), 2, 1.0)
        ]  # timbre, semitone, beats, height
        if start // beat % 4 == 0:
            notes += [
                (1, 12 * ((degree + step) // 7) + 12 + int(scale[(degree + step) % 7]), 4, 0.6)
                for step in (0, 2, 4)
            ]
            notes += [(2, int(scale[degree]) - 12, 4, 1.0)]
        for timbre, semitone, beats, height in notes:
            tone = _note(timbres[timbre], root_hz * 2.0 ** (semitone / 12.0), beats * beat)
            mixture[start : start + len(tone)] += np.float32(height) * tone
    return set_level(mixture[:num_samples], -26.0)


#: Kind -> (category of MUSAN, maker); the order determines the kind of each clip.
NOISES: dict[str, tuple[str, Callable[[Generator, int], ndarray]]] = {
    "crowd": ("noise", crowd),
    "machine": ("noise", machine),
    "room": ("noise", room_noise),
    "music": ("music", music),
    "talker": ("speech", talker),
}


def _note(timbre: ndarray, hz: float, num_samples: int) -> ndarray:
    seconds = np.arange(num_samples, dtype=np.float32) / np.float32(SAMPLE_RATE)
    envelope = np.minimum(seconds / 0.01, 1.0) * np.exp(-3.0 * seconds)
    harmonics = np.arange(1, len(timbre) + 1)
    # Higher harmonics would alias to wrong tones.
    is_below_nyquist = harmonics * hz < 0.45 * SAMPLE_RATE
    waves = np.sin(
        np.float32(2.0 * np.pi * hz)
        * harmonics[is_below_nyquist, None].astype(np.float32)
        * seconds
    )
    return envelope * (timbre[is_below_nyquist].astype(np.float32) @ waves)


def _coloured(generator: Generator, num_samples: int, slopes: tuple[float, float]) -> ndarray:
    """Noise with a random slope in dB per octave and a few broad resonances."""
    hz = np.linspace(0.0, SAMPLE_RATE / 2, 257)
    decibels = generator.uniform(*slopes) * np.log2(np.maximum(hz, 50.0) / 1000.0)
    for _ in range(3):
        centre = generator.uniform(100.0, 7000.0)
        width = generator.uniform(100.0, 1500.0)
        decibels += generator.uniform(-6.0, 15.0) * np.exp(-0.5 * ((hz - centre) / width) ** 2)
    return shaped_noise(10.0 ** (decibels / 20.0), num_samples, generator)


SPLITS = ("train", "trial", "validation")
PREFIX = {"train": "syn", "trial": "new", "validation": "val"}
# Keys of the random streams; only append, because a different order would change the corpus of the
# same parameters.
_VOICE_KEY, _SESSION_KEY, _SENTENCE_KEY, _CLIP_KEY, _ROOM_KEY, _TRIAL_KEY = range(6)
NOISE_SECONDS = 5.0
# Relative to full scale, for 16-bit files; `RirBank` divides a response by the root of its energy
# before convolving.
RESPONSE_PEAK = 0.5
MAX_TARGETS = 12
NONTARGETS_PER_TARGET = 8
"""Maximum number of target trials of a speaker, and non-target trials for each of them."""

# A task makes some files and returns one row per utterance; with the number of files.
Row = dict[str, Any]
Task = tuple[int, Callable[[], list[Row]]]


def tasks(paths: SimpleNamespace, parameters: Any) -> Iterator[Task]:
    seed = parameters.seed
    few = parameters.trial_utterances_per_speaker
    for split, count, utterances, root in (
        ("train", parameters.num_speakers, parameters.utterances_per_speaker, paths.train_path),
        ("trial", parameters.num_trial_speakers, few, paths.test_path),
        ("validation", parameters.num_validation_speakers, few, paths.validation_path),
    ):
        per_session = parameters.utterances_per_session
        for speaker in range(count):
            yield (
                utterances,
                partial(_make_speaker, root, split, speaker, utterances, per_session, seed),
            )
    # Talkers twice, because babble mixes three to seven different ones.
    makers = itertools.cycle([*NOISES, "talker"])
    for number, kind in zip(range(parameters.num_noises), makers, strict=False):
        category = NOISES[kind][0]
        name = f"{category}/synthetic/{category}-{kind}-{number:04d}/00000.wav"
        yield 1, partial(_make_noise, paths.noise_path / name, kind, number, seed)
    for number, kind in zip(range(parameters.num_rooms), itertools.cycle(ROOM_KINDS), strict=False):
        room = f"Room{number // len(ROOM_KINDS) + 1:03d}"
        path = paths.rir_path / kind / room / f"{room}-00001.wav"
        yield 1, partial(_make_room, path, kind, number, seed)


def do(task: Task) -> list[Row]:
    """Run a task; a function of its own, because processes can only be sent names."""
    return task[1]()


def _make_speaker(
    root: Path, split: str, speaker: int, utterances: int, per_session: int, seed: int
) -> list[Row]:
    """Make the missing utterances of one speaker; returns one row per utterance."""
    keys = (SPLITS.index(split), speaker)
    voice = draw_voice(numpy_generator(seed, _VOICE_KEY, *keys))
    name = f"{PREFIX[split]}{speaker:05d}"
    rows = []
    session = None
    for number in range(utterances):
        session_number, within = divmod(number, per_session)
        session = session if within else None
        path = root / name / f"session{session_number:02d}" / f"{number:05d}.wav"
        if not path.exists():
            session = session or draw_session(
                numpy_generator(seed, _SESSION_KEY, *keys, session_number)
            )
            # One generator per sentence, so that a missing file is the same as in a full run.
            generator = numpy_generator(seed, _SENTENCE_KEY, *keys, number)
            phones = draw_phones(generator, int(generator.integers(10, 16)))
            tracks = lay_out(phones, generator, tempo=voice.tempo * session.tempo_factor)
            speech = synthesise(
                voice, tracks, generator, pitch_shift_octaves=session.pitch_shift_octaves
            )
            write_audio(path, record(session, speech, generator), SAMPLE_RATE)
        rows.append(
            {
                "part": split, "path": path.relative_to(root).as_posix(), "speaker": name,
                "session": f"session{session_number:02d}", "gender": voice.gender,
                "seconds": round(audio_info(path).num_samples / SAMPLE_RATE, 3),
                "pitch_hz": round(voice.pitch_hz, 1),
                "tract_centimetres": round(voice.tract_centimetres, 2),
            }
        )  # fmt: skip
    return rows


def _make_noise(path: Path, kind: str, number: int, seed: int) -> list[Row]:
    if not path.exists():
        make = NOISES[kind][1]
        generator = numpy_generator(seed, _CLIP_KEY, number)
        write_audio(path, make(generator, round(NOISE_SECONDS * SAMPLE_RATE)), SAMPLE_RATE)
    return []


def _make_room(path: Path, kind: str, number: int, seed: int) -> list[Row]:
    if not path.exists():
        generator = numpy_generator(seed, _ROOM_KEY, number)
        response = draw_room_response(generator, kind, distance_metres=(0.5, 4.0))
        gain = np.float32(RESPONSE_PEAK / np.abs(response).max())
        write_audio(path, response * gain, SAMPLE_RATE)
    return []


def write_lists(paths: SimpleNamespace, seed: int, rows: list[Row]) -> None:
    write_training_list(
        paths.train_list, ((row["speaker"], row["path"]) for row in rows if row["part"] == "train")
    )
    for part, path in (("trial", paths.test_list), ("validation", paths.validation_list)):
        write_trials(path, draw_trials([row for row in rows if row["part"] == part], seed))
    speakers = list({row["speaker"]: row for row in rows}.values())
    located = [{**row, "path": f"{row['part']}/{row['path']}"} for row in rows]
    for path, columns, table in (
        (paths.speakers, ("speaker", "part", "gender", "pitch_hz", "tract_centimetres"), speakers),
        (paths.utterances, ("path", "speaker", "session", "gender", "seconds"), located),
    ):
        with atomic_write(path) as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


def draw_trials(rows: list[Row], seed: int) -> list[tuple[int, str, str]]:
    """Trials among these: targets between sessions, non-targets between speakers, every other one
    within a gender.
    """
    generator = numpy_generator(seed, _TRIAL_KEY)
    by_speaker: dict[str, list[Row]] = {}
    for row in rows:
        by_speaker.setdefault(row["speaker"], []).append(row)
    trials: list[tuple[int, str, str]] = []
    for speaker, utterances in by_speaker.items():
        pairs = [
            (enrol["path"], test["path"])
            for enrol, test in itertools.combinations(utterances, 2)
            if enrol["session"] != test["session"]
        ]
        chosen = generator.permutation(len(pairs))[:MAX_TARGETS]
        trials += [(1, *pairs[pair]) for pair in sorted(chosen)]
        strangers = [row for row in rows if row["speaker"] != speaker]
        gender = utterances[0]["gender"]
        alike = [row for row in strangers if row["gender"] == gender] or strangers
        num_nontargets = len(chosen) * NONTARGETS_PER_TARGET
        nontargets: set[tuple[str, str]] = set()
        # The number of draws is fixed, so that the trials of a speaker do not move the next one's.
        for attempt in range(3 * num_nontargets):
            pool = alike if attempt % 2 else strangers
            enrol = utterances[int(generator.integers(len(utterances)))]
            test = pool[int(generator.integers(len(pool)))]
            if len(nontargets) < num_nontargets:
                nontargets.add((enrol["path"], test["path"]))
        trials += [(0, *pair) for pair in sorted(nontargets)]
    return trials
