"""Recordings as input to a network, from a file, an array, command-line arguments or a pipe, and
their quality.

Long recordings are read piece by piece, so that memory does not grow with them. No network is
needed here.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from speakernet.data.audio import (
    AUDIO_SUFFIXES,
    SAMPLE_BYTES,
    SAMPLE_RATE,
    UNKNOWN_BYTES,
    AudioError,
    AudioInfo,
    NoSpeechError,
    audio_of_array,
    crop_of_file,
    decode_pcm,
    open_audio,
    parse_riff,
    read_audio,
)
from speakernet.data.folders import LeftOut, UnicodeNames, walk_recordings
from speakernet.data.levels import SILENT_DB, frame_powers, power_ratio_db
from speakernet.data.lists import ListError, StringTable
from speakernet.data.names import advice_on_name
from speakernet.data.opening import KaldiSource, is_kaldi, kaldi_advice, open_source
from speakernet.data.packed import PackedSource, is_packed
from speakernet.data.sources import AudioSource, FolderSource
from speakernet.data.speech import PIECE_SECONDS, find_speech, read_speech, sample_edges
from speakernet.data.windows import Stretch, stretches_of
from speakernet.files import open_text, reading, refuse_overwriting
from speakernet.inference import channels
from speakernet.terminal import MAX_NAMED

Array: TypeAlias = np.ndarray | Tensor

LIST_SUFFIXES = ("", ".txt", ".lst", ".list", ".scp")
STANDARD_INPUT = "-"
LIST_FORM = "a list of audio files with lines `path` or `speaker path`"

HEADER_BYTES = 4096
"""The samples of a piped WAV must begin within this many bytes; recorders write a few dozen before
them."""
CHUNK_SECONDS = 0.1

MIN_ENROL_SECONDS = 2.0
"""Speech needed for enrolment; with less, scores vary so much that the voice is often not
recognised."""
KEPT_SECONDS = 180.0
"""Shorter recordings are decoded once and kept in memory while they are inspected."""
MAX_SPEECH_SECONDS = 30.0
"""More speech adds no weight to a recording: it is still the same session."""
MIN_WEIGHT_SECONDS = 0.1
MIN_SECONDS = 0.25
"""Length of a syllable; shorter recordings are refused for enrolment and decisions."""
# A recording with a lower signal-to-noise ratio or more clipped samples has a warning.
NOISY_DB = 10.0
CLIPPED_SHARE = 0.001
# Clipped samples reach this level, or this share of the recording's own peak.
CLIP_LEVEL = 0.98
NEAR_PEAK = 0.999
SPECTRUM_SAMPLES = 512
BAND_HZ = (300.0, 3400.0)
UPPER_BAND_HZ = (5000.0, 7500.0)
BAND_LIMITED = "band-limited"
BAND_LIMITED_DB = -60.0
"""Power density above the telephone band relative to that within it; audio resampled from 8 kHz is
below -65 dB."""


@dataclass(frozen=True)
class Recording:
    """A file, or samples in memory, read as mono at one sample rate."""

    name: str
    sample_rate: int
    num_samples: int
    file: Path | None = None
    samples: np.ndarray | None = None
    is_cut_off: bool = False
    channel: int | None = None
    """The channel of the file that is read, counted from 0; None for the mean of all."""
    channel_warning: str = ""
    """If its channels hold different sounds, or cancel each other."""
    is_channel_requested: bool = False
    """Whether the user chose one of several channels, so that the file holds other sounds too."""
    edges: np.ndarray | None = None
    """Only these stretches of the recording are read, one after the other: (stretches, 2)
    samples."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.num_samples / self.sample_rate

    def read(self, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """A stretch, (samples,) float32 in -1..1; shorter at the end."""
        # Cut speech is a list of edges rather than a copy, so that an hour of it is read piece by
        # piece like any recording.
        if self.edges is not None:
            return read_speech(replace(self, edges=None).read, self.edges, start, num_samples)
        if self.samples is not None:
            stop = None if num_samples is None else start + num_samples
            return self.samples[start:stop]
        assert self.file is not None, "a recording is a file or samples"
        return read_audio(self.file, start, num_samples, self.sample_rate, channel=self.channel)

    def pieces(self, row: int = 0) -> Iterator[tuple[Stretch, np.ndarray]]:
        """The whole recording, or the windows of a long one, one by one; the pieces belong to row
        `row`.
        """
        # A table of lengths with this recording alone, in row 0.
        rows = np.zeros(1, np.int64)
        lengths = np.array([self.num_samples])
        for stretch in stretches_of(rows, lengths, self.sample_rate):
            yield replace(stretch, row=row), self.read(stretch.start, stretch.num_samples)

    def blocks(self) -> Iterator[np.ndarray]:
        """Consecutive blocks to search for speech, (samples,) each."""
        step = round(PIECE_SECONDS * self.sample_rate)
        for start in range(0, self.num_samples, step):
            yield self.read(start, step)

    def in_memory(self) -> "Recording":
        """The same recording, decoded unless it is long, so that it is not decoded again."""
        if self.samples is not None or self.seconds > KEPT_SECONDS:
            return self
        samples = self.read()
        return replace(self, samples=samples, num_samples=len(samples))

    def cut_to(self, speech: np.ndarray) -> "Recording":
        """The recording reduced to stretches, (stretches, 2) in seconds."""
        edges = sample_edges(speech, self.sample_rate)
        cut = replace(self, edges=edges, num_samples=int(np.diff(edges).sum()))
        if self.samples is None:
            return cut
        # Samples in memory are cut at once; otherwise each window would search the edges again.
        return replace(cut, samples=cut.read(), edges=None)


Audio: TypeAlias = str | os.PathLike | Array | Recording


def open_recording(
    audio: Audio, array_rate: int | None, sample_rate: int, channel: int | str | None = None
) -> Recording:
    """Open a recording to be read at `sample_rate`; only the header of a file with one channel is
    read.

    An array has `array_rate`. `channel` is a channel counted from 1, `mix`, or None to choose
    automatically (`channels.choose`).
    """
    requested = channels.checked_channel(channel)
    if isinstance(audio, Recording):
        return audio
    if isinstance(audio, str | os.PathLike):
        path = Path(audio)
        with open_audio(path) as (file, info):
            if not info.num_samples:
                raise AudioError(
                    f"{path}: the file has a header but no samples; convert it again from its "
                    "source"
                )
            chosen = channels.choose_of_file(file, info, str(path), requested)
        return Recording(
            str(path),
            sample_rate,
            info.num_samples_at(sample_rate),
            file=path,
            is_cut_off=info.is_truncated,
            channel=chosen.channel,
            channel_warning=chosen.warning,
            is_channel_requested=isinstance(requested, int) and info.num_channels > 1,
        )
    if not isinstance(audio, np.ndarray | Tensor):
        raise AudioError(
            f"audio is a {type(audio).__name__}; expected a file or an array of samples"
        )
    if array_rate is None:
        raise AudioError(f"an array has no sample rate; give sample_rate, such as {sample_rate}")
    array = array_of(audio)
    chosen = channels.Chosen()
    # More columns than rows means a transposed array, which is refused below.
    if array.ndim == 2 and 1 < array.shape[1] <= array.shape[0]:
        chosen = channels.choose_of_array(array, array_rate, sample_rate, requested)
        if chosen.channel is not None:
            array = array[:, [chosen.channel]]
    samples = audio_of_array(array, array_rate, sample_rate)
    return Recording(
        "the array", sample_rate, len(samples), samples=samples, channel_warning=chosen.warning
    )


def array_of(values: object) -> np.ndarray:
    """The values of an array or of a dense tensor."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    # NumPy has no bfloat16.
    tensor = values.float() if values.is_floating_point() else values
    return tensor.detach().cpu().numpy()  # type: ignore[no-any-return]


class ChosenChannels(FolderSource):
    """Audio files, each read from the channel that `open_recording` chooses.

    `warnings` has those about a file's channels once the file has been read.
    """

    def __init__(self, root: str, sample_rate: int, requested: int | str | None) -> None:
        # A lookup table of a few files is not worth keeping.
        super().__init__(root, sample_rate, keep_lookup=False)
        self.requested = requested
        self._channels: dict[str, int | None] = {}
        """Name of a file with several channels -> the channel that is read."""

    def read(self, name: str, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """See `AudioSource.read`."""
        # A long file is read window by window, and every window has to come from the same channel,
        # so the choice is made once per file.
        path = self.path_of(name)
        with open_audio(path) as (file, info):
            if info.num_channels > 1 and name not in self._channels:
                chosen = channels.choose_of_file(file, info, path, self.requested)
                self._channels[name] = chosen.channel
                if chosen.warning:
                    self.warnings[name] = chosen.warning
            channel = self._channels.get(name)
            return crop_of_file(
                file, info, path, start, num_samples, self.sample_rate, channel=channel
            )


def audio_inputs(
    arguments: Sequence[str],
    sample_rate: int,
    lines: Iterable[str] = (),
    channel: int | str | None = None,
) -> tuple[AudioSource, StringTable]:
    """All recordings in the given files, folders, lists, `-` (names in `lines`), or one packed
    corpus or Kaldi folder.

    Of files with several channels, `channel` is read, as by `open_recording`; corpora have mixed
    them already.

    Returns:
        The source that reads them by name, and the names, each once and in order.
    """
    for argument in arguments:
        is_corpus = Path(argument).is_dir() and (is_packed(argument) or is_kaldi(argument))
        if not is_corpus:
            continue
        if channel is not None or len(arguments) > 1:
            raise AudioError(
                f"{argument} is a corpus; give it as the only argument, and without --channel"
            )
        source = open_source(argument, sample_rate)
        if isinstance(source, PackedSource):
            return source, source.index.names
        assert isinstance(source, KaldiSource), "only these two are corpora"
        return source, source.names
    # A dictionary keeps the order, and a file once if a folder and a list both name it.
    names: dict[str, None] = {}
    for argument in arguments:
        names |= dict.fromkeys(_files_of(argument, lines))
    if not names:
        raise AudioError(
            "no audio was given; expected files, folders, lists, or - for names on standard input"
        )
    chosen = ChosenChannels(".", sample_rate, channels.checked_channel(channel))
    return chosen, StringTable.from_strings(names)


def refuse_recording_as_output(
    out: str | Path | None, source: AudioSource, names: Iterable[str]
) -> None:
    """Refuse to overwrite a recording, even if the arguments name only its folder or list."""
    if out is not None and Path(out).exists():
        paths = (source.path_of(name) for name in names)
        refuse_overwriting([out], [path for path in paths if path])


def _files_of(argument: str, lines: Iterable[str]) -> Iterable[str]:
    """The files that an argument refers to."""
    path = Path(argument)
    if argument == STANDARD_INPUT:
        return _read_names(lines, "standard input", Path())
    if path.is_dir():
        left_out = LeftOut()
        names = sorted(walk_recordings(path, left_out))
        if not names:
            content = f"only {left_out}" if left_out.counts else "nothing"
            content = kaldi_advice(path) or content
            raise AudioError(
                f"{path}: no audio in this folder, {content}; expected files ending in "
                f"{', '.join(sorted(AUDIO_SUFFIXES))}"
            )
        return [str(path / name) for name in names]
    # Not by the suffix alone, because recordings of some corpora have none or an unusual one.
    if path.suffix.lower() in LIST_SUFFIXES and not _is_binary(path):
        with reading(path, f"a folder or {LIST_FORM}", ListError), open_text(path) as file:
            return _read_names(file.read().splitlines(), str(path), path.parent)
    # Problems with the file are reported when it is read.
    return [argument]


def _is_binary(path: Path) -> bool:
    """Whether a file is not text; a recording may have no suffix."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(HEADER_BYTES)


def _read_names(lines: Iterable[str], where: str, folder: Path) -> list[str]:
    """The files in a list, with paths relative to the list or to the working directory."""
    names = []
    # macOS decomposes accented letters in file names, while lists from elsewhere compose them.
    roots = [(root, UnicodeNames(root)) for root in (folder, Path())]
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line:
            continue
        # Try the whole line first, since a path may contain spaces.
        candidates = [line, *line.split(maxsplit=1)[1:]]
        paths = []
        for candidate in candidates:
            for root, unicode_names in roots:
                paths.append(root / unicode_names.on_disk(candidate))
        existing = [path for path in paths if path.is_file()]
        if not existing:
            advice = advice_on_name(candidates[-1]) or f"expected {LIST_FORM}"
            tried = " nor ".join(repr(candidate[:200]) for candidate in reversed(candidates))
            raise ListError(
                f"{where}, line {number}: found no file {tried} in the working directory or "
                f"{folder}; {advice}"
            )
        names.append(str(existing[0]))
    return names


def open_piped(file: BinaryIO) -> tuple[AudioInfo, bytes]:
    """The layout of a WAV that is still being written, and the samples read along with its
    header.
    """
    head = b""
    # A pipe may return less than requested.
    while len(head) < HEADER_BYTES and (block := file.read(HEADER_BYTES - len(head))):
        head += block
    # A recorder that writes to a pipe does not know the length and states 0 or the largest number;
    # both mean that samples follow until the pipe ends.
    info = parse_riff(io.BytesIO(head), "standard input", UNKNOWN_BYTES)
    if info is None or info.data_offset > len(head):
        raise AudioError(
            f"standard input: found no uncompressed WAV in the first {len(head)} bytes; pipe one "
            "into the command, for example with `arecord -f S16_LE -r 16000 -t wav |` or `ffmpeg "
            "-i FILE -f wav - |`"
        )
    return info, head[info.data_offset :]


def chunks_of(file: BinaryIO, info: AudioInfo, first_bytes: bytes) -> Iterator[np.ndarray]:
    """The samples as they arrive, (samples, channels) float32, until they or the pipe end;
    `first_bytes` were read by `open_piped`.
    """
    # A pipe returns as many bytes as it has, so a block may end within a sample; the rest waits for
    # the next one. Shorter chunks cost time, longer ones delay the answer.
    frame_bytes = SAMPLE_BYTES[info.format] * info.num_channels
    chunk_bytes = max(1, round(CHUNK_SECONDS * info.sample_rate)) * frame_bytes
    # What follows the samples, if the header says how many there are, is not sound.
    bytes_left = info.num_samples * frame_bytes
    waiting = first_bytes
    while bytes_left:
        size = min(bytes_left, len(waiting) // frame_bytes * frame_bytes)
        if size:
            yield decode_pcm(waiting[:size], info.format).reshape(-1, info.num_channels)
        bytes_left -= size
        block = file.read(chunk_bytes)
        if not block:
            return
        waiting = waiting[size:] + block


@dataclass(frozen=True)
class Quality:
    """The quality of a recording for recognising a voice; all but the duration are of its speech
    alone.
    """

    name: str
    seconds: float
    speech_seconds: float
    snr_db: float
    """Computed as `speakernet.data.levels.signal_to_noise_ratios` does."""
    warnings: tuple[str, ...]
    """Each begins with its cause and a colon."""
    digest: str
    is_band_limited: bool
    """Whether nothing is above 4 kHz, as over a telephone; this matters only if the other recording
    is different."""
    speech: np.ndarray = field(compare=False)
    """Stretches of speech, (stretches, 2) in seconds."""


class Heard(NamedTuple):
    """A recording as it is embedded for a decision, and its quality."""

    recording: Recording
    quality: Quality


def inspect_recording(
    audio: Audio, *, sample_rate: int | None = None, min_speech_seconds: float = MIN_ENROL_SECONDS
) -> Quality:
    """Find the speech in a recording and judge it, piece by piece.

    Raises:
        AudioError: audio that cannot be read, is silent, or is shorter than a syllable.

    >>> hiss = 0.1 * np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    >>> inspect_recording(hiss, sample_rate=16000).speech_seconds
    0.0
    """
    # Read twice, to find the speech and to measure it. A long recording is read piece by piece both
    # times; a short one is decoded once and kept.
    recording = open_recording(audio, sample_rate, SAMPLE_RATE).in_memory()
    name = recording.name
    # Of the samples, not of the file: a copy in another container is still a copy.
    digest = hashlib.sha256()
    speech = find_speech(_hash_pieces(recording.blocks(), digest), recording.sample_rate)
    speech_seconds = float(np.diff(speech).sum())
    measured = recording.cut_to(speech) if len(speech) else recording
    power, spectrum, clipped_share = _measure(measured)
    loudest_db = 10 * np.log10(float(power.max()) + 1e-12)
    if not len(speech) and loudest_db < SILENT_DB:
        raise NoSpeechError(
            f"{name}: silent: nothing is louder than {SILENT_DB:g} dB relative to full scale; turn "
            "the microphone up and record again"
        )
    seconds = recording.seconds
    if seconds < MIN_SECONDS:
        raise AudioError(
            f"{name}: {seconds:.3f} s of audio is too short to recognise a voice; "
            f"expected at least {MIN_SECONDS:g} s, and several seconds for a reliable answer"
        )
    warnings = [recording.channel_warning] if recording.channel_warning else []
    if not speech_seconds:
        warnings.append(f"no speech: none was found in {seconds:.2f} s of audio")
    elif speech_seconds < min_speech_seconds:
        warnings.append(
            f"too short: {speech_seconds:.2f} s of speech in {seconds:.2f} s; expected at "
            f"least {min_speech_seconds:g} s"
        )
    if recording.is_cut_off:
        warnings.append(
            "cut off: the file is shorter than its header says; copy or record it again"
        )
    if clipped_share > CLIPPED_SHARE:
        warnings.append("clipped: too many samples are at the peak level; record at a lower level")
    snr_db = power_ratio_db(power)
    if speech_seconds and snr_db < NOISY_DB:
        warnings.append(f"noisy: speech is only {snr_db:.0f} dB above the quiet parts")
    return Quality(
        name,
        seconds,
        speech_seconds,
        snr_db,
        tuple(warnings),
        digest.hexdigest(),
        _is_band_limited(spectrum, recording.sample_rate),
        speech,
    )


def _measure(recording: Recording) -> tuple[np.ndarray, np.ndarray, float]:
    """Power of each frame, (frames,), power spectrum, (bins,), and the share of clipped samples."""
    # In one pass over pieces, since the recording may be longer than memory. Whether a sample is
    # clipped depends on the highest peak, which is known only at the end, so each piece counts the
    # samples near its own peak.
    powers = []
    peaks = []
    near_peak = []
    num_full = 0
    spectrum = np.zeros(SPECTRUM_SAMPLES // 2 + 1)
    for _, waveform in recording.pieces():
        powers.append(frame_powers(waveform - waveform.mean(), recording.sample_rate))
        magnitudes = np.abs(waveform)
        peaks.append(float(magnitudes.max(initial=1e-9)))
        near_peak.append(np.count_nonzero(magnitudes >= NEAR_PEAK * peaks[-1]))
        num_full += np.count_nonzero(magnitudes >= CLIP_LEVEL)
        num_frames = len(waveform) // SPECTRUM_SAMPLES
        frames = waveform[: num_frames * SPECTRUM_SAMPLES].reshape(num_frames, SPECTRUM_SAMPLES)
        transformed = np.fft.rfft(frames * np.hanning(SPECTRUM_SAMPLES), axis=1)  # (frames, bins)
        # Loud frames dominate the sum, so pauses need not be removed.
        spectrum += np.square(np.abs(transformed)).sum(axis=0)
    # Clipped at full scale, or at the recording's own peak below it.
    is_peak = np.array(peaks) >= NEAR_PEAK * max(peaks)
    num_clipped = max(np.array(near_peak)[is_peak].sum(), num_full)
    return np.concatenate(powers), spectrum, num_clipped / recording.num_samples


def _hash_pieces(pieces: Iterable[np.ndarray], digest: Any) -> Iterator[np.ndarray]:
    """The pieces, each added to the digest of all samples."""
    for piece in pieces:
        digest.update(piece.astype("<f4").tobytes())
        yield piece


def warnings_by_cause(qualities: Sequence[Quality]) -> list[str]:
    """The warnings about several recordings, one for each cause, and one if their channels
    differ.
    """
    by_cause: dict[str, tuple[str, list[str]]] = {}
    for quality in qualities:
        for text in quality.warnings:
            # Of several recordings, the numbers of the first are shown.
            _, names = by_cause.setdefault(text.partition(":")[0], (text, []))
            names.append(quality.name)
    # Narrow-band recordings are comparable with each other; scores change if only some of them are.
    narrow = [quality.name for quality in qualities if quality.is_band_limited]
    if 0 < len(narrow) < len(qualities):
        text = f"{BAND_LIMITED}: as over a telephone, unlike the others; use one kind of microphone"
        by_cause[BAND_LIMITED] = text, narrow
    return [f"{join_names(names)}: {text}" for text, names in by_cause.values()]


def join_names(names: Sequence[str]) -> str:
    """Names in one line; of many, the first few and their number."""
    text = ", ".join(names[:MAX_NAMED])
    return f"{text} … ({len(names)} recordings)" if len(names) > MAX_NAMED else text


def _is_band_limited(spectrum: np.ndarray, sample_rate: int) -> bool:
    """Whether the band above the telephone band is empty."""
    # At a lower rate the band does not exist, so its emptiness means nothing.
    if sample_rate / 2 < UPPER_BAND_HZ[1]:
        return False
    hz = np.linspace(0, sample_rate / 2, len(spectrum))

    def density(band: tuple[float, float]) -> float:
        return float(spectrum[(hz >= band[0]) & (hz <= band[1])].mean()) + 1e-12

    return bool(10 * np.log10(density(UPPER_BAND_HZ) / density(BAND_HZ)) < BAND_LIMITED_DB)
