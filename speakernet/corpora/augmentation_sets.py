"""Noise and room responses for augmentation: MUSAN cut into pieces, RIRS_NOISES made uniform.

MUSAN's long files are cut into five-second pieces with the classic tools' names, so that a random piece is one small
read. Measured room responses come with many channels and long tails of silence: each channel becomes a mono file that
ends where the response has decayed by 60 dB. Simulated ones are fine as they are.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from speakernet.corpora.conversion import audio_seconds
from speakernet.corpora.safe_paths import Folder
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.walking import READABLE_SUFFIXES, walk_files
from speakernet.data.audio import SAMPLE_BYTES, SAMPLE_RATE, AudioError, audio_info, decode_pcm, read_audio, write_audio
from speakernet.files import parallel_map

logger = logging.getLogger(__name__)

PIECE_SECONDS = 5.0
HOP_SECONDS = 3.0
DECAY_DB = 60.0
SHORTEST_RESPONSE_SAMPLES = 160
#: Parts of RIRS_NOISES by what is in them.
SIMULATED_FOLDER = "RIRS_NOISES/simulated_rirs"
MEASURED_FOLDER = "RIRS_NOISES/real_rirs_isotropic_noises"
PREPARED_FOLDER = "RIRS_NOISES/real_rirs_mono"


def split_noise(
    source_root: Path,
    target_root: Path,
    num_jobs: int,
    summary: StepSummary,
    piece_seconds: float = PIECE_SECONDS,
    hop_seconds: float = HOP_SECONDS,
) -> None:
    """Cut every file below `source_root` into pieces `NAME/SSSSS.wav`, SSSSS being the second that a piece begins at.

    Pieces overlap as the classic tools cut them; a file shorter than a piece becomes one piece. Pieces that are there,
    whole, are left alone.
    """
    target = Folder(target_root)

    def cut(name: str) -> tuple[str, int, int, str | None]:
        try:
            made, skipped = _cut_file(source_root / name, target, name, piece_seconds, hop_seconds)
        except AudioError as error:
            return name, 0, 0, str(error)
        return name, made, skipped, None

    names = walk_files(source_root, READABLE_SUFFIXES)
    for name, made, skipped, problem in parallel_map(cut, names, num_jobs, "split"):
        summary.add_made(made)
        summary.add_skipped(skipped)
        if problem is not None:
            summary.add_broken(name, problem)


def piece_starts(num_samples: int, piece_samples: int, hop_samples: int) -> list[int]:
    """Where pieces begin; the last one ends within the file.

    >>> piece_starts(16, 5, 3)
    [0, 3, 6, 9]
    >>> piece_starts(3, 5, 3)
    [0]
    """
    return list(range(0, max(1, num_samples - piece_samples + 1), hop_samples))


def prepare_responses(save_path: Path, num_jobs: int, summary: StepSummary) -> None:
    """Check the simulated responses and make mono, trimmed copies of the measured ones.

    What is broken is counted; files that are recordings of noise, which the folder of measured ones also holds, are
    passed over.
    """
    found = False
    simulated = save_path / SIMULATED_FOLDER
    if simulated.is_dir():
        found = True
        for name, seconds in parallel_map(
            lambda name: (name, audio_seconds(simulated / name)),
            walk_files(simulated, READABLE_SUFFIXES),
            num_jobs,
            "check simulated",
        ):
            if seconds is None:
                summary.add_broken(f"{SIMULATED_FOLDER}/{name}", "not readable, or header only")
            else:
                summary.add_skipped()
    measured = save_path / MEASURED_FOLDER
    if measured.is_dir():
        found = True
        _prepare_measured(measured, Folder(save_path / PREPARED_FOLDER), num_jobs, summary)
    if not found:
        raise ValueError(
            f"{save_path} holds neither {SIMULATED_FOLDER} nor {MEASURED_FOLDER}; run with --download first"
        )


def trimmed_response(response: np.ndarray, decay_db: float = DECAY_DB) -> np.ndarray:
    """The response up to where the energy still to come is `decay_db` below the whole; shape (samples,).

    Source: Schroeder, "New method of measuring reverberation time", JASA 1965, eq. 2 (backward integration).
    """
    energy = np.cumsum(np.square(response[::-1], dtype=np.float64))[::-1]
    if not len(energy) or energy[0] <= 0:
        raise AudioError("the response is silent")
    num_samples = int(np.count_nonzero(energy > energy[0] * 10 ** (-decay_db / 10)))
    return response[: max(SHORTEST_RESPONSE_SAMPLES, num_samples)]


def _cut_file(path: Path, target: Folder, name: str, piece_seconds: float, hop_seconds: float) -> tuple[int, int]:
    """(made, skipped) pieces of one file; it is decoded only if a piece is missing."""
    num_samples = audio_info(path).num_samples_at(SAMPLE_RATE)
    piece, hop = int(piece_seconds * SAMPLE_RATE), int(hop_seconds * SAMPLE_RATE)
    stem = name.rsplit(".", 1)[0]
    wanted = []
    starts = piece_starts(num_samples, piece, hop)
    for start in starts:
        piece_path = target.path(f"{stem}/{start // SAMPLE_RATE:05d}.wav")
        expected = min(piece, num_samples - start) / SAMPLE_RATE
        if audio_seconds(piece_path, SAMPLE_RATE) != expected:
            wanted.append((start, piece_path))
    if wanted:
        waveform = read_audio(path, sample_rate=SAMPLE_RATE)
        for start, piece_path in wanted:
            write_audio(piece_path, waveform[start : start + piece], SAMPLE_RATE)
    return len(wanted), len(starts) - len(wanted)


def _prepare_measured(measured: Path, target: Folder, num_jobs: int, summary: StepSummary) -> None:
    def names() -> Iterator[str]:
        for name in walk_files(measured, READABLE_SUFFIXES):
            if "noise" not in name.rsplit("/", 1)[-1].lower():
                yield name

    def prepare(name: str) -> tuple[str, int, int, str | None]:
        try:
            made, skipped = _prepare_response(measured / name, target, name)
        except AudioError as error:
            return name, 0, 0, str(error)
        return name, made, skipped, None

    for name, made, skipped, problem in parallel_map(prepare, names(), num_jobs, "measured responses"):
        summary.add_made(made)
        summary.add_skipped(skipped)
        if problem is not None:
            summary.add_broken(name, problem)


def _prepare_response(path: Path, target: Folder, name: str) -> tuple[int, int]:
    """(made, skipped) mono files of one response, one a channel."""
    stem = name.rsplit(".", 1)[0]
    num_channels = audio_info(path).num_channels
    paths = [target.path(f"{stem}_ch{channel + 1}.wav") for channel in range(num_channels)]
    if all(audio_seconds(one, SAMPLE_RATE) is not None for one in paths):
        return 0, num_channels
    for channel, one in zip(_channels(path), paths, strict=True):
        response = trimmed_response(channel)
        # Written as 16 bits: a quiet recording would lose its tail in the rounding.
        write_audio(one, response * (0.9 / max(float(np.abs(response).max()), 1e-9)), SAMPLE_RATE)
    return num_channels, 0


def _channels(path: Path) -> list[np.ndarray]:
    """Every channel on its own at 16 kHz: mixing the microphones of an array would comb-filter the response."""
    info = audio_info(path)
    if info.num_channels == 1:
        return [read_audio(path)]
    if not info.is_direct:
        raise AudioError(f"{path}: {info.num_channels} channels of {info.format}; expected WAV, convert it first")
    with path.open("rb") as file:
        file.seek(info.data_offset)
        content = file.read()
    samples = decode_pcm(content[: info.num_samples * info.num_channels * SAMPLE_BYTES[info.format]], info.format)
    frames = samples.reshape(-1, info.num_channels).astype(np.float64)
    divisor = math.gcd(SAMPLE_RATE, info.sample_rate)
    resampled = resample_poly(frames, SAMPLE_RATE // divisor, info.sample_rate // divisor, axis=0)
    return list(resampled.T.astype(np.float32))
