"""One recording, a file or an array, at the rate of a network: its length, and any stretch of it.

Long recordings are read stretch by stretch, so that memory does not grow with them. The cutting into windows is that of
evaluation; nothing here knows networks.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from speakernet.data.audio import AudioError, audio_info, audio_of_array, read_audio
from speakernet.evaluation.batching import Piece, Stretch
from speakernet.evaluation.embedding import stretches_of
from speakernet.options import nearest

Array: TypeAlias = np.ndarray | Tensor


@dataclass(frozen=True)
class Recording:
    """A file or samples in memory, mono at one rate.

    Attributes:
        name: of the file; `the array` for samples.
        sample_rate: Hz of everything read.
        num_samples: at that rate.
        file: where it lies; None for samples in memory.
        samples: (samples,) float32; None for a file.
        is_cut_off: the file's header promises more than it holds.
    """

    name: str
    sample_rate: int
    num_samples: int
    file: Path | None = None
    samples: np.ndarray | None = None
    is_cut_off: bool = False

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.num_samples / self.sample_rate

    def read(self, start: int = 0, num_samples: int | None = None) -> np.ndarray:
        """A stretch, (samples,) float32 in -1..1; shorter at the end.

        Raises:
            AudioError: it cannot be read, or holds NaN.
        """
        if self.samples is not None:
            return self.samples[start : None if num_samples is None else start + num_samples]
        assert self.file is not None, "a recording is a file or samples"
        return read_audio(self.file, start, num_samples, self.sample_rate)

    def pieces(self, row: int = 0) -> Iterator[Piece]:
        """What a network is given for it, one after the other: the whole, or windows of a long recording.

        Args:
            row: what the pieces say they belong to.
        """
        for stretch in stretches_of(np.zeros(1, np.int64), np.array([self.num_samples]), self.sample_rate):
            waveform = self.read(stretch.start, stretch.num_samples)
            placed = Stretch(row, stretch.start, stretch.num_samples, stretch.num_windows)
            yield Piece(placed, waveform[None], np.zeros(1, dtype=np.int64))


Audio: TypeAlias = str | os.PathLike | Array | Recording


def open_recording(audio: Audio, sample_rate: int | None, wanted_rate: int) -> Recording:
    """A recording as it will be read at `wanted_rate`; of a file only the header is read.

    Args:
        audio: a file, or an array `(samples,)` or `(samples, channels)`, floating point in -1..1 or int16, or a
            recording that was opened.
        sample_rate: Hz, of the array; a file says its own.
        wanted_rate: Hz of everything read.

    Raises:
        AudioError: missing, broken, of another shape or type, without samples, or two rates that contradict each other.
    """
    if isinstance(audio, Recording):
        return audio
    if isinstance(audio, str | os.PathLike):
        path = Path(audio)
        if not path.exists():
            raise AudioError(_not_there(path))
        info = audio_info(path)
        if sample_rate not in (None, info.sample_rate):
            raise AudioError(
                f"{path} says {info.sample_rate} Hz, sample_rate says {sample_rate}; leave it out for a file"
            )
        if not info.num_samples:
            raise AudioError(f"{path}: the file holds no samples (header only); convert it again from its source")
        num_samples = info.num_samples_at(wanted_rate)
        return Recording(str(path), wanted_rate, num_samples, file=path, is_cut_off=info.is_truncated)
    if not is_array(audio):
        raise AudioError(f"audio is a {type(audio).__name__}; expected a file or an array of samples")
    if sample_rate is None:
        raise AudioError(f"an array does not say its rate; give sample_rate, such as {wanted_rate}")
    array = audio.detach().cpu().numpy() if isinstance(audio, Tensor) else audio
    samples = audio_of_array(array, sample_rate, wanted_rate)
    return Recording("the array", wanted_rate, len(samples), samples=samples)


def _not_there(path: Path) -> str:
    """Which part of a path there is not, and what is called much like it."""
    lost = next((one for one in (path, *path.parents) if one.parent.is_dir()), path)
    with contextlib.suppress(OSError):
        near = nearest(lost.name, (one.name for one in lost.parent.iterdir()), count=1)
        if near:
            return f"{path}: there is no such file; did you mean {lost.parent / near[0]}?"
    return f"{path}: there is no such file"


def is_array(audio: Any) -> bool:
    """Whether samples were given, not a file."""
    return isinstance(audio, np.ndarray | Tensor)
