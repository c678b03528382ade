"""The recordings on which both pipelines are measured: those of a configuration, as WAV, FLAC and a
packed corpus.

Utterances are joined and cut to 4 to 12 seconds, like VoxCeleb's, so that figures from different
corpora are comparable; noise and RIRs are laid out like MUSAN and RIRS_NOISES, as the classic
pipeline requires.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.classic import ClassicAugmentation
from speakernet.config.schema import Config
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import read_audio, to_int16, write_audio
from speakernet.data.augment.banks import find_audio_files, noise_banks
from speakernet.data.lists import StringTable, read_training_list, write_training_list
from speakernet.data.opening import open_source
from speakernet.data.packing import PackInput, pack
from speakernet.data.sources import AudioSource

# Lengths matter: a reader that decodes whole files looks better on short ones. VoxCeleb's
# recordings last 8 s on average, those of small corpora half of that.
SECONDS_RANGE = (4.0, 12.0)
CLASSIC_FOLDERS = {"noise": "noise", "music": "music", "babble": "speech"}
# Enough for every crop to differ, few enough to be written within seconds.
MAX_CLIPS_OF_A_KIND = 60
MAX_ROOMS = 100
UTTERANCE_SAMPLES = 128_000
"""8 s, about the mean of VoxCeleb2."""


@dataclass(frozen=True)
class BenchmarkData:
    """The benchmark's recordings.

    Attributes:
        root: folder with everything; `wav`, `flac` and `packed` have the same samples, `musan` and
            `rirs` are laid out as MUSAN and RIRS_NOISES/simulated_rirs.
        names: utterances without their suffix.
        labels: the speaker of each.
    """

    root: Path
    names: Sequence[str]
    labels: Sequence[int]

    def paths(self, form: str) -> list[str]:
        """The paths of all files."""
        return [str(self.root / form / f"{name}.{form}") for name in self.names]

    def write_list(self, form: str, num_rows: int) -> Path:
        """Write a training list of `num_rows` rows; utterances are repeated if there are fewer."""
        suffix = "flac" if form == "flac" else "wav"
        path = self.root / f"{form}-{num_rows}.txt"
        rows = (number % len(self.names) for number in range(num_rows))
        write_training_list(
            path, ((f"s{self.labels[row]:04d}", f"{self.names[row]}.{suffix}") for row in rows)
        )
        return path


def prepare_data(config: Config, folder: Path, num_utterances: int) -> BenchmarkData:
    """Write the benchmark's recordings from those of the configuration.

    Raises:
        ValueError: the configuration names no training list, noise or RIRs.
    """
    data = config.data
    sample_rate = config.data.sample_rate
    if not (data.train_list and config.augment.noise_path and config.augment.rir_path):
        raise ValueError(
            "the benchmark needs recordings, noise and RIRs: give a --config with data.train_list, "
            "augment.noise_path and augment.rir_path, such as exp01.yaml"
        )
    training = read_training_list(data.train_list)
    source = open_source(data.train_path or Path(data.train_list).parent, sample_rate)
    numbers = np.random.default_rng(config.runtime.seed)
    names = []
    labels = []
    for number in range(num_utterances):
        # Spread over the whole list, which is usually sorted by speaker: the first rows alone would
        # be the voices of a few.
        first = number * len(training) // num_utterances
        num_samples = int(numbers.uniform(*SECONDS_RANGE) * sample_rate)
        waveform = _join(source, training.paths, first, num_samples)
        # Several recordings per folder, as in a real corpus.
        name = f"{number % 97:02d}/{number:05d}"
        for form in ("wav", "flac"):
            path = folder / form / f"{name}.{form}"
            path.parent.mkdir(parents=True, exist_ok=True)
            # The same 16-bit samples in every format, so that only readers differ.
            write_audio(path, to_int16(waveform), sample_rate)
        names.append(name)
        labels.append(int(training.labels[first]))
    # The packed corpus is made of the WAV files, so all three forms hold the same samples and a
    # difference is the reader's.
    pack(FolderInput(folder / "wav"), folder / "packed", sample_rate=sample_rate)
    write_noise(config, folder)
    return BenchmarkData(folder, names, labels)


def _join(source: AudioSource, paths: Sequence[str], first: int, num_samples: int) -> np.ndarray:
    """Utterances from `first` on, concatenated and cut to the length; (samples,)."""
    pieces: list[np.ndarray] = []
    row = first
    while sum(map(len, pieces)) < num_samples:
        pieces.append(source.read(paths[row % len(paths)]))
        row += 1
    return np.concatenate(pieces)[:num_samples]


def write_noise(config: Config, folder: Path) -> None:
    """Copy the configuration's noise and RIRs to `musan` and `rirs` below `folder`, in one
    channel.
    """
    sample_rate = config.data.sample_rate
    for kind, bank in noise_banks(config.augment.noise_path, sample_rate, None).items():
        for clip in range(min(len(bank), MAX_CLIPS_OF_A_KIND)):
            path = folder / "musan" / CLASSIC_FOLDERS[kind] / "all" / "some" / f"{clip:04d}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_audio(path, bank.read_whole(clip) / 2**15, sample_rate)
    names = find_audio_files(config.augment.rir_path)
    # At regular intervals, because names are sorted by room.
    for number, name in enumerate(names[:: max(1, len(names) // MAX_ROOMS)]):
        path = folder / "rirs" / "rooms" / "some" / f"{number:04d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        response = read_audio(Path(config.augment.rir_path) / name, sample_rate=sample_rate)
        # Below full scale, so that 16 bits do not clip; the level does not matter.
        write_audio(path, 0.99 * response / np.abs(response).max(), sample_rate)


def classic_augmentation(
    config: Config, folder: Path, generator: random.Random
) -> ClassicAugmentation:
    """The classic pipeline's, with what `write_noise` has written to the folder."""
    noise = str(folder / "musan")
    return ClassicAugmentation(noise, str(folder / "rirs"), config.data.crop_frames, generator)


class Noise(PackInput):
    """Utterances of noise; only their size matters."""

    def __init__(self, num_utterances: int) -> None:
        super().__init__(
            StringTable.from_strings([f"{row:07d}.wav" for row in range(num_utterances)]), "noise"
        )
        # Two utterances long: each row is a window of it that starts at another sample, so the
        # first 128,000 rows differ, but nothing has to be drawn for a corpus of gigabytes.
        self._samples = np.random.default_rng(0).integers(
            -3000, 3000, 2 * UTTERANCE_SAMPLES, dtype=np.int16
        )

    def decode(self, row: int, content: bytes | None, sample_rate: int) -> np.ndarray:
        """See `PackInput.decode`."""
        first = row % UTTERANCE_SAMPLES
        return self._samples[first : first + UTTERANCE_SAMPLES]
