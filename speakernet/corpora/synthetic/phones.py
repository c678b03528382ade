"""The sounds of the synthetic speakers: a table of phones, random sentences, and their tracks over time.

First step of the synthesiser: a sentence is drawn as a sequence of segments and laid out as one row a frame (formant
targets, gains of the three sources, nasality), with coarticulation. It knows nothing of who speaks; `voices` does.
"""

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter1d

FRAME_SECONDS = 0.008

# Formants 1-3 in Hz of a 17.5-cm vocal tract. Vowels: means of the 33 men of Peterson & Barney, "Control methods used
# in a study of the vowels", JASA 24 (1952), table II. Consonants: round figures in the range of Klatt, "Software for a
# cascade/parallel formant synthesizer", JASA 67 (1980), table III.
VOWELS: dict[str, tuple[float, float, float]] = {
    "i": (270, 2290, 3010),
    "I": (390, 1990, 2550),
    "e": (530, 1840, 2480),
    "ae": (660, 1720, 2410),
    "a": (730, 1090, 2440),
    "o": (570, 840, 2410),
    "U": (440, 1020, 2240),
    "u": (300, 870, 2240),
    "V": (640, 1190, 2390),
    "er": (490, 1350, 1690),
}


@dataclass(frozen=True)
class Segment:
    """One steady target: formants in Hz (None: those of the next vowel), gains of the sources, duration in seconds."""

    formants: tuple[float, float, float] | None
    seconds: float
    voicing: float = 0.0
    aspiration: float = 0.0
    frication: float = 0.0
    noise_hz: float = 4000.0  # centre of the frication band
    noise_width_hz: float = 1500.0
    nasality: float = 0.0
    stretch: float = 1.0  # how far tempo and chance change the duration


def _vowel(formants: tuple[float, float, float]) -> tuple[Segment, ...]:
    return (Segment(formants, 0.115, voicing=1.0),)


def _sonorant(formants: tuple[float, float, float], nasality: float = 0.0) -> tuple[Segment, ...]:
    return (Segment(formants, 0.065, voicing=0.45, nasality=nasality),)


def _fricative(
    formants: tuple[float, float, float], hz: float, width_hz: float, gain: float, voicing: float = 0.0
) -> tuple[Segment, ...]:
    return (Segment(formants, 0.095, voicing, 0.0, gain, hz, width_hz),)


def _stop(formants: tuple[float, float, float], hz: float, width_hz: float, voiced: bool) -> tuple[Segment, ...]:
    # Closure, burst, then voice onset: at once after a voiced stop, after some aspiration otherwise.
    closure = Segment(formants, 0.055, voicing=0.06 if voiced else 0.0)
    burst = Segment(formants, 0.012, frication=0.30, noise_hz=hz, noise_width_hz=width_hz, stretch=0.3)
    if voiced:
        return closure, burst
    return closure, burst, Segment(None, 0.035, aspiration=0.10)


CONSONANTS: dict[str, tuple[Segment, ...]] = {
    "m": _sonorant((300, 1000, 2200), nasality=1.0),
    "n": _sonorant((300, 1650, 2600), nasality=0.8),
    "ng": _sonorant((300, 2100, 2700), nasality=0.9),
    "l": _sonorant((330, 1100, 2800)),
    "r": _sonorant((330, 1120, 1500)),
    "w": _sonorant((290, 650, 2200)),
    "j": _sonorant((270, 2150, 2950)),
    "f": _fricative((340, 1100, 2080), 5500, 3500, 0.035),
    "v": _fricative((280, 1100, 2080), 5500, 3500, 0.02, voicing=0.25),
    "th": _fricative((320, 1290, 2540), 6000, 3000, 0.03),
    "s": _fricative((320, 1500, 2600), 6200, 1100, 0.20),
    "z": _fricative((280, 1500, 2600), 6200, 1100, 0.12, voicing=0.2),
    "sh": _fricative((300, 1840, 2750), 3300, 900, 0.20),
    "h": (Segment(None, 0.06, aspiration=0.12),),
    "p": _stop((300, 900, 2100), 1200, 900, voiced=False),
    "b": _stop((250, 900, 2100), 1000, 800, voiced=True),
    "t": _stop((300, 1750, 2650), 4800, 1400, voiced=False),
    "d": _stop((250, 1750, 2650), 4500, 1400, voiced=True),
    "k": _stop((300, 1950, 2500), 2200, 600, voiced=False),
    "g": _stop((250, 1950, 2500), 2100, 600, voiced=True),
}
SILENCE = Segment((500, 1500, 2500), 0.14)

PHONES: dict[str, tuple[Segment, ...]] = {
    "sil": (SILENCE,),
    **{name: _vowel(formants) for name, formants in VOWELS.items()},
    **CONSONANTS,
}
PHONE_NAMES = tuple(PHONES)
# Drawn from by place: a phone that is added or moved makes another corpus (`SYNTHESISER_VERSION`).
_VOWEL_NAMES = tuple(VOWELS)
_CONSONANT_NAMES = tuple(CONSONANTS)


@dataclass(frozen=True)
class Tracks:
    """A sentence over time, one row a frame of 8 ms; gains are linear, frequencies in Hz of a 17.5-cm vocal tract."""

    phone: np.ndarray  # (frames,) int64, row of PHONE_NAMES
    formants: np.ndarray  # (frames, 3), steps from target to target: `voices` colours, then smooths them
    voicing: np.ndarray  # (frames,)
    aspiration: np.ndarray
    frication: np.ndarray
    noise_hz: np.ndarray
    noise_width_hz: np.ndarray
    nasality: np.ndarray
    stress: np.ndarray  # (frames,) 0..1, one bump a stressed syllable

    def __len__(self) -> int:
        return len(self.phone)


def draw_phones(generator: np.random.Generator, num_syllables: int) -> list[str]:
    """A random sentence: words of one to three syllables (consonant, vowel, maybe a final consonant), with pauses."""
    phones = ["sil"]
    while num_syllables > 0:
        word_length = min(int(generator.integers(1, 4)), num_syllables)
        for _ in range(word_length):
            if generator.random() < 0.9:
                phones.append(str(generator.choice(_CONSONANT_NAMES)))
            phones.append(str(generator.choice(_VOWEL_NAMES)))
        if generator.random() < 0.4:
            phones.append(str(generator.choice(_CONSONANT_NAMES)))
        num_syllables -= word_length
        if num_syllables > 0 and generator.random() < 0.2:
            phones.append("sil")
    return [*phones, "sil"]


def lay_out(phones: list[str], generator: np.random.Generator, *, tempo: float = 1.0) -> Tracks:
    """The tracks of a sentence spoken at `tempo` (1 is about 4 syllables a second, higher is faster)."""
    segments = [(row, segment) for row, name in enumerate(phones) for segment in PHONES[name]]
    following: tuple[float, float, float] = SILENCE.formants  # type: ignore[assignment]
    targets = np.empty((len(segments), 3))
    for place in range(len(segments) - 1, -1, -1):
        following = segments[place][1].formants or following
        targets[place] = following

    columns = np.array(
        [
            (s.seconds, s.stretch, s.voicing, s.aspiration, s.frication, s.noise_hz, s.noise_width_hz, s.nasality)
            for _, s in segments
        ]
    )
    chance = np.exp(generator.normal(0.0, 0.22, len(segments))) / tempo
    seconds = columns[:, 0] * chance ** columns[:, 1]
    # Rounded ends, not rounded lengths: errors do not add up over the sentence.
    ends = np.maximum.accumulate(np.round(np.cumsum(seconds) / FRAME_SECONDS).astype(np.int64))
    lengths = np.diff(ends, prepend=0)
    phone_of_segment = np.array([row for row, _ in segments])
    codes = np.array([PHONE_NAMES.index(name) for name in phones])
    is_stressed = generator.random(len(phones)) < 0.45
    is_vowel = np.array([name in VOWELS for name in phones])

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, lengths, axis=0)

    gains = gaussian_filter1d(spread(columns[:, 2:5]), 0.9, axis=0, mode="nearest")
    smooth = gaussian_filter1d(spread(columns[:, 5:8]), 1.5, axis=0, mode="nearest")
    stress = gaussian_filter1d(spread((is_stressed & is_vowel)[phone_of_segment].astype(np.float64)), 8.0)
    return Tracks(
        phone=spread(codes[phone_of_segment]),
        formants=spread(targets),
        voicing=gains[:, 0],
        aspiration=gains[:, 1],
        frication=gains[:, 2],
        noise_hz=smooth[:, 0],
        noise_width_hz=smooth[:, 1],
        nasality=smooth[:, 2],
        stress=stress,
    )
