"""Find speech in a recording: with silero-vad, or by energy alone if its weights are missing; and
a source in which every recording is cut to its speech.

silero-vad's network is small, and its weights lie in its wheel. They are read here into plain torch
layers, which take all frames at once: 10x faster than its own loop over frames. Its package is
never imported, since that would set torch to one thread. Only silero-vad distinguishes speech from
other sounds (music, doors, dogs).

Source: https://github.com/snakers4/silero-vad, version 6.
"""

import functools
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.functional import conv1d, pad

from speakernet.data.audio import SAMPLE_RATE, audio_of_array
from speakernet.data.levels import SILENT_DB
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioSource
from speakernet.files import parallel_map
from speakernet.terminal import MAX_NAMED

logger = logging.getLogger(__name__)

SILERO = "silero-vad"
ENERGY = "energy"
"""Names of the detectors."""
FRAME_SAMPLES = 512
CONTEXT_SAMPLES = 64
STFT_HOP = 128
"""A frame of 32 ms at 16 kHz, the samples before it that the network also sees, and the hop of its
spectrum."""
STRIDES = (1, 2, 2, 1)
FRAME_SECONDS = FRAME_SAMPLES / SAMPLE_RATE
PIECE_SECONDS = 300.0
"""A long recording is read and searched in pieces of this length, so that memory hardly grows with
it."""
FRESH_FRAMES = 64
"""Every second the network also starts afresh, for two seconds. After long noise it recognises a
voice only after a second, and a soft voice not at all; started afresh, it recognises both at
once."""
BEGIN = 0.85
END = 0.35
"""Probabilities: a stretch of speech reaches `BEGIN` and extends for as long as it stays at or
above `END`. Music and noise reach 0.8."""
PADDING_SECONDS = 0.1
"""Added on both sides for soft beginnings and ends of words, which the detector misses."""
MIN_GAP_SECONDS = 0.3
"""A shorter pause is part of the speech around it."""
MIN_SPEECH_SECONDS = 0.2
MAX_SPAN_SAMPLES = 1 << 23
"""Speech spread over more than this (nine minutes at 16 kHz) is read stretch by stretch."""
SPEECH_RANGE_DB = 30.0
"""By energy: frames this far below the loudest are pauses, regardless of noise."""
SPEECH_SHARE_OF_RANGE = 0.25
"""By energy: speech is at least this share of the way from the quiet frames to the loudest."""
MIN_RANGE_DB = 3.0
"""By energy: if loud and quiet frames differ by less, the sound is a tone or a hiss: speech has
pauses and stops."""
EXPECTED_SHARE = 0.02
"""Share of recordings without speech from which on it is a warning."""

# Kept for each source, because several lists share it and finding speech takes far longer than
# reading. Weak, so that the stretches are freed with the source.
_sources: "WeakKeyDictionary[AudioSource, SpokenSource]" = WeakKeyDictionary()


def find_speech(
    waveform: np.ndarray | Iterable[np.ndarray],
    sample_rate: int,
    *,
    min_gap_seconds: float = MIN_GAP_SECONDS,
) -> np.ndarray:
    """Find the stretches of speech in a recording; an offset (DC) of its samples is ignored.

    Args:
        waveform: (samples,) in -1..1, or the consecutive pieces of a long recording, best of
            `PIECE_SECONDS`.
        sample_rate: in Hz.
        min_gap_seconds: stretches closer than this, padding included, are joined.

    Returns:
        (stretches, 2): begin and end in seconds, sorted and disjoint, with a tenth of a second
        around the words; (0, 2) if nobody speaks.

    >>> find_speech(np.zeros(16000, dtype=np.float32), 16000).shape
    (0, 2)
    """
    scores, seconds = frame_scores(waveform, sample_rate)
    return stretches(scores, seconds, min_gap_seconds=min_gap_seconds)


def frame_scores(
    waveform: np.ndarray | Iterable[np.ndarray], sample_rate: int
) -> tuple[np.ndarray, float]:
    """How surely each frame of `FRAME_SECONDS` is speech, (frames,) in 0..1, and the duration in
    seconds; see `find_speech`.
    """
    name = default_detector()
    # Each piece is searched by itself, so that a long recording need not be in memory. The network
    # forgets what came before a cut, which matters little once in five minutes.
    scores = [np.zeros(0)]
    num_samples = 0
    for piece in [waveform] if isinstance(waveform, np.ndarray) else waveform:
        num_samples += len(piece)
        # An offset (DC), which some sound cards add, must not change what is found.
        centred = piece - piece.mean(dtype=np.float64)
        # A simulated microphone may amplify beyond the range that the detector knows.
        centred /= max(1.0, np.abs(centred).max(initial=0.0))
        at_16k = audio_of_array(centred, sample_rate, SAMPLE_RATE)
        scores.append(speech_probabilities(at_16k) if name == SILERO else frame_levels(at_16k))
    values = np.concatenate(scores)
    if name == ENERGY:
        values = are_speech(values).astype(np.float32)
    # A recording without one frame that is surely speech has none.
    is_spoken = values.max(initial=0.0) >= BEGIN
    return values * is_spoken, num_samples / sample_rate


def default_detector() -> str:
    """The detector that `find_speech` uses: silero-vad if its weights are there."""
    return SILERO if _network() else ENERGY


def speech_probabilities(waveform: np.ndarray) -> np.ndarray:
    """silero-vad's probability of speech in each frame of `FRAME_SECONDS`, (frames,), for
    (samples,) at 16 kHz.
    """
    # `default_detector` names silero-vad only if its weights are there.
    network = _network()
    assert network is not None, "silero-vad's weights are there"
    return network(torch.from_numpy(waveform)).numpy()


def silero_file(name: str) -> Path | None:
    """A file of the network in silero-vad's wheel; None if it is not installed."""
    package = importlib.util.find_spec("silero_vad")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).with_name("data") / name


@functools.cache
def _network() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """silero-vad for 16 kHz, from the weights in its wheel; None if it is not installed."""
    path = silero_file("silero_vad.jit")
    if path is None:
        return None
    with warnings.catch_warnings():
        # Only its tensors are used.
        warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", FutureWarning)
        weights = torch.jit.load(path).state_dict()  # type: ignore[no-untyped-call]
    return SileroNetwork(_below("_model.", weights))


def _below(prefix: str, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


class SileroNetwork:
    """The network of silero-vad, applied to all frames of a waveform at once.

    Each frame, together with the end of the one before it, gives four spectra, which four
    convolutions reduce to one vector; an LSTM follows these over time: once from the beginning, and
    in windows of `FRESH_FRAMES`. The greater probability counts.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.spectrum = weights["stft.forward_basis_buffer"]
        self.layers = [
            _below(f"encoder.{number}.reparam_conv.", weights) for number in range(len(STRIDES))
        ]
        self.output = (
            weights["decoder.decoder.2.weight"][0, :, 0],
            weights["decoder.decoder.2.bias"],
        )
        recurrent = _below("decoder.rnn.", weights)
        size = recurrent["weight_hh"].shape[1]
        self.memory = nn.LSTM(size, size, batch_first=True)
        self.memory.load_state_dict({f"{name}_l0": weight for name, weight in recurrent.items()})

    @torch.inference_mode()
    def __call__(self, waveform: torch.Tensor) -> torch.Tensor:
        """(samples,) at 16 kHz -> (frames,)."""
        num_frames = -(-len(waveform) // FRAME_SAMPLES)
        # Context for the first frame, and silence that completes the last one.
        filled = pad(waveform, (CONTEXT_SAMPLES, num_frames * FRAME_SAMPLES - len(waveform)))
        frames = filled.unfold(0, CONTEXT_SAMPLES + FRAME_SAMPLES, FRAME_SAMPLES)[:, None]
        # (frames, 2 * 129, 4): real and imaginary parts of four spectra.
        parts = conv1d(
            pad(frames, (0, CONTEXT_SAMPLES), mode="reflect"), self.spectrum, stride=STFT_HOP
        )
        real, imaginary = parts.chunk(2, dim=1)
        # The convolutions shrink the time axis within a frame: 4, 4, 2, 1, 1 (see STRIDES).
        states = (real.square() + imaginary.square()).sqrt()
        for layer, stride in zip(self.layers, STRIDES, strict=True):
            states = conv1d(states, layer["weight"], layer["bias"], stride, padding=1).relu()
        # The convolutions see each frame by itself, so only the LSTM has to run a second time.
        # (frames, channels, 1) -> (1, frames, channels)
        states = states.transpose(1, 2).reshape(num_frames, -1)
        return torch.maximum(self._follow(states[None])[0], self._start_afresh(states))

    def _start_afresh(self, states: torch.Tensor) -> torch.Tensor:
        """(frames, channels) -> (frames,): the mean of the two windows in which a frame lies."""
        # All windows are one batch, so any length takes only 64 steps.
        half = FRESH_FRAMES // 2
        num_frames = len(states)
        num_windows = -(-num_frames // half)
        filled = pad(states, (0, 0, 0, (num_windows + 1) * half - num_frames))
        # (windows, channels, frames of a window) -> (windows, frames of a window)
        windows = self._follow(filled.unfold(0, FRESH_FRAMES, half).transpose(1, 2))
        sums = windows.new_zeros(num_windows + 1, half)
        sums[:-1] += windows[:, :half]
        sums[1:] += windows[:, half:]
        # The first frames lie in one window only.
        sums[1:] /= 2
        return sums.flatten()[:num_frames]

    def _follow(self, states: torch.Tensor) -> torch.Tensor:
        """(sequences, frames, channels) -> (sequences, frames)."""
        states, _ = self.memory(states)
        weight, bias = self.output
        return (states.relu() @ weight + bias).sigmoid()


def frame_levels(waveform: np.ndarray) -> np.ndarray:
    """Level of each frame of `FRAME_SECONDS` in dB relative to full scale, (frames,), for
    (samples,) at 16 kHz.
    """
    count = max(1, len(waveform) // FRAME_SAMPLES)
    # (frames, samples of a frame)
    frames = waveform[: count * FRAME_SAMPLES].reshape(count, -1)
    powers = np.square(frames, dtype=np.float64).mean(axis=1)
    return np.asarray(10 * np.log10(powers + 1e-12))


def are_speech(levels: np.ndarray) -> np.ndarray:
    """Which frames, given by level in dB (frames,), are louder than pauses and noise."""
    if not len(levels):
        return np.zeros(0, dtype=bool)
    # Percentiles, because one click would be the loudest frame and one gap the quietest.
    quiet, loud = np.percentile(levels, [10, 95])
    least = max(SILENT_DB, loud - SPEECH_RANGE_DB, quiet + SPEECH_SHARE_OF_RANGE * (loud - quiet))
    return (levels >= least) & (loud - quiet >= MIN_RANGE_DB)


def stretches(
    scores: np.ndarray,
    seconds: float,
    begin: float = BEGIN,
    end: float = END,
    min_gap_seconds: float = MIN_GAP_SECONDS,
    padding_seconds: float = PADDING_SECONDS,
) -> np.ndarray:
    """Stretches of speech, (stretches, 2) seconds, from the probability of each frame, in a
    recording of `seconds`.
    """
    # Runs of frames at or above `end` in which at least one frame reaches `begin`: a single
    # threshold would either cut words at soft consonants or let noise in.
    runs = np.split(np.arange(len(scores)), np.flatnonzero(np.diff(scores >= end)) + 1)
    spoken = [run for run in runs if len(run) and scores[run].max() >= begin]
    if not spoken:
        return np.zeros((0, 2))
    edges = np.array([(run[0], run[-1] + 1) for run in spoken]) * FRAME_SECONDS
    edges = np.clip(edges + np.array([-padding_seconds, padding_seconds]), 0.0, seconds)
    # Padding may make neighbours overlap; they are joined, like those with a short pause.
    apart = edges[1:, 0] - edges[:-1, 1] >= min_gap_seconds
    joined = np.stack([edges[np.append(True, apart), 0], edges[np.append(apart, True), 1]], axis=1)
    return joined[joined[:, 1] - joined[:, 0] >= MIN_SPEECH_SECONDS]


def sample_edges(stretches_seconds: np.ndarray, sample_rate: int) -> np.ndarray:
    """Stretches in seconds as first and last + 1 sample, int64 (stretches, 2)."""
    return np.round(stretches_seconds * sample_rate).astype(np.int64)


def read_speech(
    read: Callable[[int, int], np.ndarray],
    edges: np.ndarray,
    start: int,
    num_samples: int | None,
) -> np.ndarray:
    """Read from a recording as if only the stretches between `edges` existed, one after the other,
    and without an offset (DC): not every front end removes it.

    Args:
        read: first sample and number of samples of the recording -> (samples,).
        edges: (stretches, 2), from `sample_edges`.
        start: first sample of the joined speech.
        num_samples: number of samples; shorter at the end; None reads everything from `start`.

    >>> edges = np.array([[10, 13], [50, 60]])
    >>> read_speech(lambda start, count: np.arange(start, start + count), edges, 2, 4).tolist()
    [-29.25, 8.75, 9.75, 10.75]
    """
    # Where each stretch ends in the joined speech; `shift` leads from there to the recording.
    lasts = np.cumsum(edges[:, 1] - edges[:, 0])
    stop = int(lasts[-1]) if num_samples is None else start + num_samples
    shift = edges[:, 1] - lasts
    begins = np.maximum(edges[:, 0], start + shift)
    ends = np.minimum(edges[:, 1], stop + shift)
    spans = np.stack([begins, ends], axis=1)[begins < ends].tolist()
    if not spans:
        return np.zeros(0, np.float32)
    origin = spans[0][0]
    num_spread = spans[-1][1] - origin
    if num_spread > MAX_SPAN_SAMPLES:
        pieces = [read(begin, end - begin) for begin, end in spans]
    else:
        # One read is faster than many from files that must be decoded.
        whole = read(origin, num_spread)
        pieces = [whole[begin - origin : end - origin] for begin, end in spans]
    speech = np.concatenate(pieces)
    return speech - speech.mean(dtype=np.float64).astype(np.float32)


def speech_of(
    waveform: np.ndarray, sample_rate: int, *, min_gap_seconds: float = MIN_GAP_SECONDS
) -> np.ndarray:
    """The speech in a waveform, (samples,), joined; empty if there is none."""
    spoken = find_speech(waveform, sample_rate, min_gap_seconds=min_gap_seconds)
    edges = sample_edges(spoken, sample_rate)
    return np.concatenate([waveform[:0], *(waveform[start:stop] for start, stop in edges)])


class SpokenSource(AudioSource):
    """The speech of another source's recordings; one without any speech stays whole, which is
    logged.

    Each recording is searched once, when its length or its samples are first needed.
    """

    def __init__(self, source: AudioSource) -> None:
        super().__init__(source.root, source.sample_rate)
        self.source = source
        self._edges: dict[str, np.ndarray] = {}

    @property
    def identity(self) -> str:
        """See `AudioSource.identity`."""
        return self.source.identity

    def edges_of(self, name: str) -> np.ndarray:
        """First and last + 1 sample of each stretch of speech, int64 (stretches, 2); (0, 2) without
        speech.
        """
        # Only the edges are kept, a few numbers for each recording; samples are read again for each
        # crop, because those of a long list would not fit into memory.
        if name not in self._edges:
            pieces = self.source.blocks(name, round(PIECE_SECONDS * self.sample_rate))
            self._edges[name] = sample_edges(
                find_speech(pieces, self.sample_rate), self.sample_rate
            )
        return self._edges[name]

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """Read a crop of the joined speech as float32 in -1..1, shape (samples,); shorter at its
        end.
        """
        edges = self.edges_of(name)
        if not len(edges):
            return self.source.read(name, start, num_samples)
        read = functools.partial(self.source.read, name)
        return read_speech(read, edges, start, num_samples)

    def path_of(self, name: str) -> str:
        """An utterance's file; empty if it does not have its own."""
        return self.source.path_of(name)

    def _look_up(self, names: StringTable, num_threads: int) -> LookupTable:
        table = self.source.lookup_table(names, num_threads)
        # The source's own table must keep the lengths of the whole recordings.
        columns = {name: column.copy() for name, column in table.columns().items()}
        rows = [row for row in range(len(names)) if row not in table.problems]

        def search(row: int) -> np.ndarray:
            return self.edges_of(names[row])

        searched = parallel_map(search, rows, num_threads, "finding speech", total=len(rows))
        without = []
        for row, edges in zip(rows, searched, strict=True):
            if len(edges):
                columns["native_samples"][row] = np.diff(edges).sum()
                # Edges are counted at the requested rate, not at that of the file.
                columns["sample_rates"][row] = self.sample_rate
            else:
                without.append(names[row])
        if without:
            # A few recordings of a long list may well be empty.
            is_usual = len(without) < EXPECTED_SHARE * len(names)
            logger.log(
                logging.INFO if is_usual else logging.WARNING,
                "no speech was found in %d of %d recordings, which are used whole: %s",
                len(without),
                len(names),
                ", ".join(without[:MAX_NAMED]) + " …" * (len(without) > MAX_NAMED),
            )
        return LookupTable(self.sample_rate, columns, table.problems)


def cut_to_speech(source: AudioSource) -> SpokenSource:
    """The speech of a source; the same object each time, so that nothing is searched twice."""
    if isinstance(source, SpokenSource):
        return source
    if source not in _sources:
        _sources[source] = SpokenSource(source)
    return _sources[source]
