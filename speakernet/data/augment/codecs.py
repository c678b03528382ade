"""Real codecs: utterances are encoded and decoded again, by libsndfile in memory or by ffmpeg.

The augmenter draws codec and bit rate; nothing is drawn here. Each utterance is coded by itself, so
that its samples do not depend on its batch. A row keeps its length and its place in time: what a
codec delays is shifted back.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy import ndarray
from torch import Tensor

from speakernet.data.audio import AudioError, to_int16
from speakernet.data.ffmpeg import (
    REPRODUCIBLY,
    FfmpegError,
    as_file,
    encoders_of,
    find_ffmpeg,
    run_ffmpeg,
)
from speakernet.data.sources import INT16_SCALE

FFMPEG_ROWS = 32
"""Utterances in two processes of ffmpeg: starting them costs as much as coding two seconds of
speech; each holds two descriptors."""
TAIL_SECONDS = 0.1
"""Silence added to an utterance while it is coded, longer than any delay or frame."""
FFMPEG_ADVICE = (
    "install an ffmpeg that has it (Debian, Ubuntu: apt install ffmpeg libavcodec-extra), or name "
    "one in SPEAKERNET_FFMPEG"
)


@dataclass(frozen=True)
class Codec:
    """A codec, and the settings of its encoder by bit rate."""

    sample_rate: int
    file_format: str
    """Of libsndfile or ffmpeg."""
    encoder: str
    """Subtype of libsndfile or encoder of ffmpeg."""
    levels: Mapping[float, float]
    """Bit rate in kbit/s, from high to low -> compression level of libsndfile. ffmpeg takes the
    rate itself."""
    by_ffmpeg: bool = False
    delay_samples: int = 0
    """By which the decoded signal is late, at the codec's rate."""


# Opus and MP3 take a compression level that is linear in the bit rate: 256 - 250 level and
# 160 - 152 level kbit/s (libsndfile 1.2, `ogg_opus.c` and `mpeg_l3_encode.c`). That of Vorbis is
# one minus its quality; its rates are those measured on speech. The delays, measured too, are the
# AMR encoders' look-ahead of 5 ms, with the resampling inside AMR-WB, and G.722's filter bank.
CODECS = {
    "gsm": Codec(8_000, "WAV", "GSM610", {13: 0.0}),
    "opus": Codec(16_000, "OGG", "OPUS", {24: 0.928, 16: 0.96, 8: 0.992}),
    "mp3": Codec(16_000, "MP3", "MPEG_LAYER_III", {64: 96 / 152, 32: 128 / 152, 16: 144 / 152}),
    "vorbis": Codec(16_000, "OGG", "VORBIS", {49: 0.4, 36: 0.7, 26: 1.0}),
    "amr-nb": Codec(
        8_000, "amr", "libopencore_amrnb", dict.fromkeys((12.2, 7.4, 4.75), 0.0), True, 40
    ),
    "amr-wb": Codec(
        16_000, "amr", "libvo_amrwbenc", dict.fromkeys((23.85, 12.65, 6.6), 0.0), True, 94
    ),
    "g722": Codec(16_000, "g722", "g722", {64: 0.0}, True, 22),
}


class Coding(NamedTuple):
    """What is drawn for an utterance."""

    codec: str
    kilobits: float
    """Bit rate, one of the codec's."""


def lacking(name: str) -> str:
    """Why this machine cannot use a codec, and what to install; empty if it can."""
    codec = CODECS.get(name)
    if codec is None:
        return ""
    if codec.by_ffmpeg:
        try:
            ffmpeg = find_ffmpeg()
            if codec.encoder in encoders_of(ffmpeg):
                return ""
            problem = f"{ffmpeg} has no encoder {codec.encoder}"
        except FfmpegError:
            problem = "it needs ffmpeg, which was not found"
        return f"{problem}; {FFMPEG_ADVICE}"
    if codec.encoder in soundfile.available_subtypes(codec.file_format):
        return ""
    version = soundfile.__libsndfile_version__
    return f"libsndfile {version} cannot write {name}; pip install -U soundfile brings a newer one"


def refuse_lacking(names: Sequence[str]) -> None:
    """Raise ValueError if this machine lacks one of the codecs."""
    for name in names:
        if problem := lacking(name):
            raise ValueError(f"augment.codecs: {name} is not available here: {problem}")


def resample(waveforms: Tensor, num_samples: int) -> Tensor:
    """Change (rows, samples) to another number of samples, in the same time.

    Truncating the spectrum is exact for any length and delays nothing.
    """
    spectrum = torch.fft.rfft(waveforms)[:, : num_samples // 2 + 1]
    return torch.fft.irfft(spectrum, num_samples) * (num_samples / waveforms.shape[1])


def encode_and_decode(waveforms: Tensor, codings: Mapping[int, Coding], sample_rate: int) -> None:
    """Encode and decode rows of a batch on the CPU, in place.

    Args:
        waveforms: float32 (batch, samples); what exceeds full scale is coded at full scale.
        codings: row -> codec and bit rate.
        sample_rate: of the batch in Hz.
    """
    by_ffmpeg = []
    for row, coding in codings.items():
        codec = CODECS[coding.codec]
        if codec.by_ffmpeg:
            by_ffmpeg.append(row)
            continue
        prepared, gain = _prepare(waveforms[row], codec, sample_rate)
        decoded = _code_in_memory(prepared, codec, codec.levels[coding.kilobits])
        _put_back(waveforms[row], decoded, codec, sample_rate, gain)
    for first in range(0, len(by_ffmpeg), FFMPEG_ROWS):
        rows = by_ffmpeg[first : first + FFMPEG_ROWS]
        _code_with_ffmpeg(waveforms, {row: codings[row] for row in rows}, sample_rate)


def _code_with_ffmpeg(waveforms: Tensor, codings: Mapping[int, Coding], sample_rate: int) -> None:
    """Encode utterances and decode them again, all of them in two processes."""
    # Many utterances in one call, because starting ffmpeg is slow, but each as its own stream: if
    # they were joined, the codec's state would make a crop depend on the rest of its batch.
    contents = []
    gains = []
    for row, coding in codings.items():
        prepared, gain = _prepare(waveforms[row], CODECS[coding.codec], sample_rate)
        contents.append(to_int16(prepared).tobytes())
        gains.append(gain)
    try:
        coded = _code_batch(contents, list(codings.values()))
    except FfmpegError as error:
        raise AudioError(f"augment.codecs: {error}") from error
    for (row, coding), content, gain in zip(codings.items(), coded, gains, strict=True):
        decoded = np.frombuffer(content, dtype=np.int16).astype(np.float32) * INT16_SCALE
        _put_back(waveforms[row], decoded, CODECS[coding.codec], sample_rate, gain)


def _code_batch(contents: Sequence[bytes], codings: Sequence[Coding]) -> list[bytes]:
    """Encode signals (raw 16-bit mono samples) and decode them again."""
    encode = ["-y"]
    decode = ["-y"]
    with contextlib.ExitStack() as stack:
        names = []
        descriptors: list[int] = []
        # A file for the samples of each signal, which takes the decoded ones later, and one for
        # its code.
        for content in [*contents, *[b""] * len(contents)]:
            name, opened = stack.enter_context(as_file(content))
            names.append(name)
            descriptors.extend(opened)
        raw = names[: len(contents)]
        coded = names[len(contents) :]
        codecs = [CODECS[coding.codec] for coding in codings]
        for row, codec in enumerate(codecs):
            encode += ["-threads", "1", "-f", "s16le", "-ar", str(codec.sample_rate)]
            encode += ["-i", raw[row]]
            decode += ["-threads", "1", "-f", codec.file_format, "-i", coded[row]]
        for row, codec in enumerate(codecs):
            encode += ["-map", f"{row}:a:0", "-c:a", codec.encoder, "-threads", "1"]
            encode += ["-b:a", str(round(1000 * codings[row].kilobits)), *REPRODUCIBLY]
            encode += ["-f", codec.file_format, coded[row]]
            decode += ["-map", f"{row}:a:0", "-c:a", "pcm_s16le", "-f", "s16le"]
            decode += ["-ar", str(codec.sample_rate), "-threads", "1", raw[row]]
        for command in (encode, decode):
            run_ffmpeg(find_ffmpeg(), command, len(contents), None, tuple(descriptors))
        return [Path(name.removeprefix("file:")).read_bytes() for name in raw]


def _prepare(waveform: Tensor, codec: Codec, sample_rate: int) -> tuple[ndarray, float]:
    """The samples for the encoder, with silence behind them, and the gain that undoes their
    scaling.
    """
    num_samples = _samples_at(codec.sample_rate, len(waveform), sample_rate)
    if num_samples != len(waveform):
        waveform = resample(waveform[None], num_samples)[0]
    # Encoders take 16 bits and clip what is louder, as a crop with added noise may be.
    gain = max(1.0, float(waveform.abs().max()))
    # Encoders do not write an incomplete last frame, and decoders add a delay at the beginning;
    # without the silence, the end of the crop would be missing.
    tail = round(TAIL_SECONDS * codec.sample_rate)
    return np.pad(waveform.numpy() / np.float32(gain), (0, tail)), gain


def _code_in_memory(samples: ndarray, codec: Codec, level: float) -> ndarray:
    buffer = io.BytesIO()
    options: dict[str, Any] = {}
    if codec.file_format != "WAV":
        options["compression_level"] = level
    if codec.file_format == "MP3":
        # Only with an average rate does the file always say how much the encoder delays.
        options["bitrate_mode"] = "AVERAGE"
    soundfile.write(
        buffer,
        samples,
        codec.sample_rate,
        format=codec.file_format,
        subtype=codec.encoder,
        **options,
    )
    buffer.seek(0)
    return soundfile.read(buffer, dtype="float32")[0]


def _put_back(
    waveform: Tensor, decoded: ndarray, codec: Codec, sample_rate: int, gain: float
) -> None:
    """Replace an utterance by what was decoded, without the delay and at its own rate."""
    num_samples = _samples_at(codec.sample_rate, len(waveform), sample_rate)
    kept = decoded[codec.delay_samples : codec.delay_samples + num_samples]
    assert len(kept) == num_samples, f"{codec.encoder} decoded {len(decoded)} samples"
    made = torch.from_numpy(kept * np.float32(gain))
    if num_samples != len(waveform):
        made = resample(made[None], len(waveform))[0]
    waveform.copy_(made)


def _samples_at(codec_rate: int, num_samples: int, sample_rate: int) -> int:
    """The length of a signal at a codec's rate, which is even if the rates differ."""
    if codec_rate == sample_rate:
        return num_samples
    return max(2, num_samples * codec_rate // sample_rate // 2 * 2)
