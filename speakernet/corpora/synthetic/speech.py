"""Synthetic speech: random sentences as tracks over time, and their source-filter synthesis in a
random voice.

A sentence is drawn as a sequence of phones and laid out as one row per frame of 8 ms. A glottal
pulse train and noise (the source) pass through a cascade of formant resonators (the filter) that
changes with every frame. The result is clean close-talk speech; `scenes` puts it into a room.

Source: Klatt & Klatt, "Analysis, synthesis, and perception of voice quality variations among female
and male talkers", JASA 87 (1990), for the pulse (KLGLOTT88) and the nasal pole-zero pair.
"""

import collections
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy import fft
from scipy.ndimage import gaussian_filter1d

from speakernet.data.audio import audio_of_array
from speakernet.files import read_yaml_file
from speakernet.random import numpy_generator

FRAME_SECONDS = 0.008
SYNTHETIC_SYLLABLES = 16
"""Minimum number of syllables of `synthetic_speech`, about four seconds."""
SPEECH_STREAM = 7001

PHONE_TABLE = read_yaml_file(Path(__file__).with_name("phones.yaml"), "the table of phones")
VOWELS: dict[str, list[float]] = PHONE_TABLE["vowels"]

Segment = collections.namedtuple(
    "Segment",
    "formants seconds stretch voicing aspiration frication noise_hz noise_width_hz nasality",
    defaults=(1.0, 0.0, 0.0, 0.0, 4000.0, 1500.0, 0.0),
)
"""One steady target: formants in Hz (None: those of the next vowel), duration in seconds, how much
tempo and chance stretch it, gains of the sources, band of the frication, nasality."""
ASPIRATION = Segment(None, 0.035, aspiration=0.10)
SILENCE = Segment((500, 1500, 2500), 0.14)

PHONES = {
    "sil": (SILENCE,),
    **{name: (Segment(formants, 0.115, voicing=1.0),) for name, formants in VOWELS.items()},
    **{
        name: (Segment(formants, 0.065, voicing=0.45, nasality=nasality),)
        for name, (formants, nasality) in PHONE_TABLE["sonorants"].items()
    },
    **{
        name: (
            Segment(
                formants, 0.095, voicing=voicing, frication=gain, noise_hz=hz, noise_width_hz=width
            ),
        )
        for name, (formants, gain, hz, width, voicing) in PHONE_TABLE["fricatives"].items()
    },
    "h": (Segment(None, 0.06, aspiration=0.12),),
    # Closure, burst, then voice onset: immediately after a voiced stop, otherwise after some
    # aspiration.
    **{
        name: (
            Segment(formants, 0.055, voicing=0.06 if is_voiced else 0.0),
            Segment(
                formants, 0.012, stretch=0.3, frication=0.30, noise_hz=hz, noise_width_hz=width
            ),
            *(() if is_voiced else (ASPIRATION,)),
        )
        for name, (formants, hz, width, is_voiced) in PHONE_TABLE["stops"].items()
    },
}
PHONE_NAMES = tuple(PHONES)
# Drawn by position: adding or moving a phone changes the corpus (`SYNTHESISER_VERSION`).
_VOWEL_NAMES = tuple(VOWELS)
_CONSONANT_NAMES = PHONE_NAMES[1 + len(VOWELS) :]


def draw_phones(generator: Generator, num_syllables: int) -> list[str]:
    """A random sentence: words of one to three syllables (consonant, vowel, maybe a final
    consonant), with pauses.
    """
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


# Speech is not a row of stills. A phone is a target that the mouth moves towards and, at this
# tempo, hardly reaches before the next one pulls it away; that is why tracks are drawn as steps and
# then smoothed. Gains are smoothed least, because a burst is short, and formants by the speaker's
# own amount (in `_vocal_tract`), which is part of a voice.
def lay_out(phones: list[str], generator: Generator, *, tempo: float = 1.0) -> SimpleNamespace:
    """A sentence spoken at `tempo` (1 is about 4 syllables per second, higher is faster), one row
    per frame of 8 ms.

    Gains are linear, frequencies in Hz of a 17.5-cm vocal tract.
    """
    segments = [(row, segment) for row, name in enumerate(phones) for segment in PHONES[name]]
    following = SILENCE.formants
    targets = np.empty((len(segments), 3))
    for place, (_, segment) in reversed(list(enumerate(segments))):
        following = targets[place] = segment.formants or following
    columns = np.array([segment[1:] for _, segment in segments])
    chance = np.exp(generator.normal(0.0, 0.22, len(segments))) / tempo
    seconds = columns[:, 0] * chance ** columns[:, 1]
    # Ends are rounded, not lengths, so that errors do not add up over the sentence.
    ends = np.maximum.accumulate(np.round(np.cumsum(seconds) / FRAME_SECONDS).astype(np.int64))
    lengths = np.diff(ends, prepend=0)
    phone_of_segment = np.array([row for row, _ in segments])
    codes = np.array([PHONE_NAMES.index(name) for name in phones])
    is_stressed = generator.random(len(phones)) < 0.45
    is_vowel = np.array([name in VOWELS for name in phones])

    def spread(values: ndarray) -> ndarray:
        return np.repeat(values, lengths, axis=0)

    gains = gaussian_filter1d(spread(columns[:, 2:5]), 0.9, axis=0, mode="nearest")
    smooth = gaussian_filter1d(spread(columns[:, 5:8]), 1.5, axis=0, mode="nearest")
    return SimpleNamespace(
        phone=spread(codes[phone_of_segment]),  # (frames,) int64, row of PHONE_NAMES
        # (frames, 3), steps from target to target; the voice scales, then smooths them.
        formants=spread(targets),
        voicing=gains[:, 0],
        aspiration=gains[:, 1],
        frication=gains[:, 2],
        noise_hz=smooth[:, 0],
        noise_width_hz=smooth[:, 1],
        nasality=smooth[:, 2],
        # 0..1, one bump per stressed syllable
        stress=gaussian_filter1d(
            spread((is_stressed & is_vowel)[phone_of_segment].astype(np.float64)), 8.0
        ),
    )


SAMPLE_RATE = 16000
HOP = round(FRAME_SECONDS * SAMPLE_RATE)
WINDOW = 2 * HOP
FFT_SIZE = 512  # window + 16 ms, in which the ringing of the formants dies away
NUM_FORMANTS = 8  # one per kHz up to the Nyquist frequency
PULSE_TABLE = 2048
NASAL_POLE_HZ = 280.0

# How much speakers differ (standard deviations). Together with the spreads in `scenes`, this sets
# the difficulty.
TRACT_SD = 0.05  # share of the vocal tract's length, within a gender
# Formants at 3.5 % (colour 4 dB, SNR 12 to 32 dB) were nearly hopeless, with an EER of 26 % after
# 12 epochs; at 8 % (2 dB, 18 to 38 dB) it was 3.5 %; these values gave 5.2 % after 16 epochs with
# the recipe at the time.
FORMANT_SD = 0.07  # share, of each formant of a speaker
PHONE_SD = 0.04  # share, of each formant of each phone of a speaker
PITCH_SD_OCTAVES = 0.25


def draw_voice(generator: Generator) -> SimpleNamespace:
    """A random speaker: all constant properties. Factors multiply the values of a 17.5-cm vocal
    tract.
    """
    is_male = bool(generator.random() < 0.5)
    tract = (17.2 if is_male else 15.0) * float(np.exp(generator.normal(0.0, TRACT_SD)))
    individual = np.exp(generator.normal(0.0, FORMANT_SD, NUM_FORMANTS))
    return SimpleNamespace(
        gender="m" if is_male else "f",
        tract_centimetres=tract,
        pitch_hz=(118.0 if is_male else 200.0)
        * 2.0 ** float(generator.normal(0.0, PITCH_SD_OCTAVES)),
        pitch_range_octaves=float(generator.uniform(0.12, 0.45)),
        tempo=float(np.exp(generator.normal(0.0, 0.15))),
        open_quotient=float(generator.uniform(0.45, 0.75)),
        # Above this frequency, the source falls by an additional 6 dB per octave.
        tilt_hz=float(np.exp(generator.uniform(np.log(900.0), np.log(4500.0)))),
        breathiness=float(np.exp(generator.uniform(np.log(0.004), np.log(0.08)))),
        jitter=float(np.exp(generator.uniform(np.log(0.003), np.log(0.02)))),
        shimmer=float(generator.uniform(0.02, 0.12)),
        bandwidth_factor=float(np.exp(generator.normal(0.0, 0.2))),
        coarticulation_frames=float(generator.uniform(2.8, 4.8)),
        nasal_zero_hz=float(generator.uniform(550.0, 1100.0)),
        # Scales the bands of fricatives.
        frication_factor=float(np.exp(generator.normal(0.0, 0.08))),
        frication_gain=float(np.exp(generator.normal(0.0, 0.3))),
        formant_factors=17.5 / tract * individual,  # (NUM_FORMANTS,)
        phone_factors=np.exp(generator.normal(0.0, PHONE_SD, (len(PHONE_NAMES), 3))),
    )


def synthesise(
    voice: SimpleNamespace,
    tracks: SimpleNamespace,
    generator: Generator,
    *,
    pitch_shift_octaves: float = 0.0,
) -> ndarray:
    """Speak one sentence: (samples,) float32, 16 kHz, at no particular level, without room or
    noise.
    """
    pitch_hz = _pitch_contour(voice, tracks, generator, pitch_shift_octaves)
    num_samples = (len(tracks.phone) + 1) * HOP
    noise = generator.standard_normal(num_samples, dtype=np.float32)
    source = _glottal_source(voice, pitch_hz, noise, generator)

    frequencies = np.arange(FFT_SIZE // 2 + 1, dtype=np.float32) * np.float32(
        SAMPLE_RATE / FFT_SIZE
    )
    tilt = 1.0 / (1.0 + 1j * frequencies / np.float32(voice.tilt_hz))
    voiced = _spectra(source)  # (frames, bins)
    voiced *= tracks.voicing.astype(np.float32)[:, None] * tilt.astype(np.complex64)
    unvoiced = _spectra(noise)
    voiced += unvoiced * (
        tracks.aspiration.astype(np.float32)[:, None] * np.abs(tilt).astype(np.float32)
    )
    voiced *= _vocal_tract(voice, tracks)

    # Frication arises at the front of the tract: its band is the phone's, shifted by the speaker's
    # front cavity.
    fricated = np.flatnonzero(tracks.frication > 1e-4)
    centre = (tracks.noise_hz[fricated] * voice.frication_factor).astype(np.float32)[:, None]
    width = tracks.noise_width_hz[fricated].astype(np.float32)[:, None]
    band = np.exp(-0.5 * ((frequencies - centre) / width) ** 2)
    band *= (tracks.frication[fricated] * voice.frication_gain).astype(np.float32)[:, None]
    voiced[fricated] += unvoiced[fricated] * band
    return _overlap_add(fft.irfft(voiced, FFT_SIZE, axis=1))


def _pitch_contour(
    voice: SimpleNamespace,
    tracks: SimpleNamespace,
    generator: Generator,
    shift_octaves: float,
) -> ndarray:
    """(frames,) Hz: falls over the sentence, rises on stressed syllables, wanders, and trembles."""
    frames = len(tracks.phone)
    place = np.linspace(0.5, -0.5, frames)
    declination = generator.uniform(0.2, 1.0) * place
    accents = generator.uniform(0.5, 1.2) * tracks.stress
    wander = gaussian_filter1d(generator.standard_normal(frames), 25.0) * 4.0
    octaves = shift_octaves + voice.pitch_range_octaves * (declination + accents + 0.5 * wander)
    tremble = 1.0 + voice.jitter * generator.standard_normal(frames)
    return np.clip(voice.pitch_hz * 2.0**octaves * tremble, 55.0, 500.0)


def _glottal_source(
    voice: SimpleNamespace, pitch_hz: ndarray, noise: ndarray, generator: Generator
) -> ndarray:
    """Derivative of the glottal flow plus breath noise while the glottis is open; (samples,)
    float32.
    """
    num_samples = len(noise)
    at_frame = (np.arange(len(pitch_hz)) + 1.0) * HOP
    phase = np.cumsum(np.interp(np.arange(num_samples), at_frame, pitch_hz)) * (1.0 / SAMPLE_RATE)
    period = phase.astype(np.int64)
    place = ((phase - period) * PULSE_TABLE).astype(np.int64)
    pulse = _pulse_table(voice.open_quotient, voice.pitch_hz)
    is_open = (np.arange(PULSE_TABLE) < voice.open_quotient * PULSE_TABLE).astype(np.float32)
    shimmer = np.exp(voice.shimmer * generator.standard_normal(int(period[-1]) + 1)).astype(
        np.float32
    )
    return pulse[place] * shimmer[period] + np.float32(voice.breathiness) * is_open[place] * noise


def _pulse_table(open_quotient: float, pitch_hz: float) -> ndarray:
    """One period of KLGLOTT88's flow derivative, with only as many harmonics as fit below the
    Nyquist frequency.
    """
    place = np.arange(PULSE_TABLE) / (PULSE_TABLE * open_quotient)
    spectrum = fft.rfft(np.where(place < 1.0, 2.0 * place - 3.0 * place**2, 0.0))
    spectrum[0] = 0.0
    # Harmonics above the Nyquist frequency would alias to tones below it.
    spectrum[int(0.95 * SAMPLE_RATE / 2 / pitch_hz) + 1 :] = 0.0
    return fft.irfft(spectrum, PULSE_TABLE).astype(np.float32)


def _spectra(signal: ndarray) -> ndarray:
    """(samples,) -> (frames, bins) complex64 of Hann windows that add up to one."""
    window = (0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
    # All frames at once: a sample-by-sample filter with changing coefficients could not be
    # vectorised; this runs at about 430 x real time on one core.
    frames = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[::HOP]
    return fft.rfft(frames * window, FFT_SIZE, axis=1)


def _overlap_add(frames: ndarray) -> ndarray:
    """(frames, FFT_SIZE) -> (frames * HOP,) float32."""
    num_frames, size = frames.shape
    steps = size // HOP
    output = np.zeros((num_frames + steps - 1, HOP), dtype=np.float32)
    for step in range(steps):
        output[step : step + num_frames] += frames[:, step * HOP : (step + 1) * HOP]
    return output[:num_frames].reshape(-1)


def _vocal_tract(voice: SimpleNamespace, tracks: SimpleNamespace) -> ndarray:
    """Transfer function of the tract at every frame, (frames, bins) complex64: resonators of unit
    gain at 0 Hz.
    """
    individual = tracks.formants * voice.phone_factors[tracks.phone]
    low = gaussian_filter1d(individual, voice.coarticulation_frames, axis=0, mode="nearest")
    high = np.broadcast_to(
        500.0 + 1000.0 * np.arange(3, NUM_FORMANTS), (len(tracks.phone), NUM_FORMANTS - 3)
    )
    hz = np.concatenate([low, high], axis=1) * voice.formant_factors
    hz = np.minimum(hz, 0.495 * SAMPLE_RATE)
    # Bandwidths grow with frequency (about 60 Hz at F1, 400 Hz at the top). Poles that a short
    # tract would have above the Nyquist frequency are flattened: piled up at the edge, they would
    # ring louder than the vowel.
    bandwidth = voice.bandwidth_factor * (50.0 + 0.02 * hz + 4e-6 * hz**2) + 4.0 * np.maximum(
        hz - 6600.0, 0.0
    )
    denominator = _resonator_polynomials(hz, bandwidth)

    # Nasal pole and zero cancel in oral sounds; the zero moves away as the velum opens.
    zero_hz = NASAL_POLE_HZ + tracks.nasality * (voice.nasal_zero_hz - NASAL_POLE_HZ)
    pole = _resonator_polynomials(
        np.full((len(tracks.phone), 1), NASAL_POLE_HZ), np.full((len(tracks.phone), 1), 100.0)
    )
    zero = _resonator_polynomials(zero_hz[:, None], np.full((len(tracks.phone), 1), 100.0))
    top = fft.rfft(zero.astype(np.float32), FFT_SIZE, axis=1)
    # float64: at low frequencies the coefficients of nine resonators cancel to nothing in float32.
    top /= fft.rfft(_multiply_polynomials(denominator, pole), FFT_SIZE, axis=1)
    return top


def _resonator_polynomials(hz: ndarray, bandwidth_hz: ndarray) -> ndarray:
    """Product of each frame's second-order sections, (frames, sections) -> (frames, 2 * sections +
    1), 1 at DC.
    """
    radius = np.exp(-np.pi * bandwidth_hz / SAMPLE_RATE)
    first = -2.0 * radius * np.cos(2.0 * np.pi * hz / SAMPLE_RATE)
    second = radius**2
    sections = np.stack([np.ones_like(first), first, second], axis=2)  # (frames, sections, 3)
    sections /= sections.sum(axis=2, keepdims=True)
    product = sections[:, 0]
    for section in range(1, sections.shape[1]):
        product = _multiply_polynomials(product, sections[:, section])
    return product


def _multiply_polynomials(long: ndarray, short: ndarray) -> ndarray:
    """Row by row: (frames, n) x (frames, 3) -> (frames, n + 2)."""
    product = np.zeros((long.shape[0], long.shape[1] + 2))
    for power in range(3):
        product[:, power : power + long.shape[1]] += long * short[:, power : power + 1]
    return product


def synthetic_speech(count: int, sample_rate: int) -> list[ndarray]:
    """Sentences by synthetic voices, always the same, each (samples,) float32."""
    speech = []
    for number in range(count):
        generator = numpy_generator(0, SPEECH_STREAM, number)
        tracks = lay_out(draw_phones(generator, SYNTHETIC_SYLLABLES + number), generator)
        sentence = synthesise(draw_voice(generator), tracks, generator)
        speech.append(
            audio_of_array(0.3 * sentence / np.abs(sentence).max(), SAMPLE_RATE, sample_rate)
        )
    return speech
