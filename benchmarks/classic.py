"""The classic pipeline of voxceleb_trainer, as a reference for benchmarks on the same data.

It works like that trainer's loader, augmentation and evaluation: whole files as float64, one
`scipy.signal.convolve` per utterance, one utterance per evaluation batch, one trial at a time.
Nothing is slowed down on purpose, and only benchmarks use it. The order of random draws is also the
same, so a seed reproduces the original's numbers exactly.

Source: github.com/clovaai/voxceleb_trainer, DatasetLoader.py and SpeakerNet.py.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from scipy import signal
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, get_worker_info

SAMPLES_PER_FRAME = 160  # 10 ms at 16 kHz
# A window of 400 samples starts every 160 samples, so the last window needs this many more.
WINDOW_REST_SAMPLES = 240
# Added to every power before the logarithm. It bounds the SNR of quiet noise, as in the original.
POWER_FLOOR = 1e-4
SNR_RANGES_DB = {"noise": (0, 15), "speech": (13, 20), "music": (5, 15)}
NUM_SOURCES = {"noise": (1, 1), "speech": (3, 7), "music": (1, 1)}
# The order of the five-way draw, 0 to 4.
CLEAN, REVERBERATE, MUSIC, SPEECH, NOISE = range(5)
ADDITIVE = {MUSIC: "music", SPEECH: "speech", NOISE: "noise"}


def crop_samples(num_frames: int) -> int:
    """Samples of a crop of `num_frames` frames.

    >>> crop_samples(200)
    32240
    """
    return num_frames * SAMPLES_PER_FRAME + WINDOW_REST_SAMPLES


def read_training_crop(path: str, num_frames: int, generator: random.Random) -> np.ndarray:
    """One random crop of a file as float64 (1, samples); the whole file is read."""
    audio, num_samples = _read_padded(path, num_frames)
    # A whole file is decoded to keep two seconds of it. On long files this is most of the work, and
    # the reason why our reader seeks instead.
    start = int(generator.random() * (len(audio) - num_samples))
    return audio[None, start : start + num_samples].astype(np.float64)


def read_evaluation_crops(path: str, num_frames: int, num_crops: int) -> np.ndarray:
    """Crops spread evenly over a file, float64 (crops, samples); for 0 frames, the whole file as
    one crop.
    """
    audio, num_samples = _read_padded(path, num_frames)
    if num_frames == 0:
        return audio[None].astype(np.float64)
    starts = np.linspace(0, len(audio) - num_samples, num=num_crops)
    return np.stack([audio[int(start) : int(start) + num_samples] for start in starts]).astype(
        np.float64
    )


class ClassicAugmentation:
    """Noise, music and babble from MUSAN's folders, and reverberation; one utterance at a time."""

    def __init__(
        self, noise_path: str, rir_path: str, num_frames: int, generator: random.Random
    ) -> None:
        """Find the files.

        Args:
            noise_path: folder laid out as MUSAN: category/x/y/file.wav.
            rir_path: folder laid out as RIRS_NOISES/simulated_rirs: x/y/file.wav.
            num_frames: length of the crops.
            generator: source of all random choices.
        """
        self.num_frames = num_frames
        self.generator = generator
        self.noises: dict[str, list[str]] = {}
        for path in Path(noise_path).glob("*/*/*/*.wav"):
            self.noises.setdefault(path.parts[-4], []).append(str(path))
        self.responses = [str(path) for path in Path(rir_path).glob("*/*/*.wav")]

    def __call__(self, audio: np.ndarray) -> np.ndarray:
        """Apply one of five equally likely options: unchanged, reverberation, music, babble, noise.

        A category without files is skipped; the original raises an error.
        """
        # One draw among five ways, then the draws of that way: in any other order the same seed
        # would give other numbers than the original, with which a test compares them.
        way = self.generator.randint(CLEAN, NOISE)
        while way in ADDITIVE and ADDITIVE[way] not in self.noises:
            way = self.generator.randint(CLEAN, NOISE)
        if way == REVERBERATE:
            return self.reverberate(audio)
        return self.add(ADDITIVE[way], audio) if way in ADDITIVE else audio

    def add(self, category: str, audio: np.ndarray) -> np.ndarray:
        """Add crops of noise files, each at its own SNR; audio and result (1, samples)."""
        # Every file has a signal-to-noise ratio of its own, so seven voices of babble are some 7 dB
        # louder than one ratio for their sum would make them (docs/decisions.md). That is kept
        # here, because it is what the original does.
        speech_db = _power_db(audio)
        fewest, most = NUM_SOURCES[category]
        scaled = []
        for path in self.generator.sample(
            self.noises[category], self.generator.randint(fewest, most)
        ):
            noise = read_training_crop(path, self.num_frames, self.generator)
            snr_db = self.generator.uniform(*SNR_RANGES_DB[category])
            noise_db = _power_db(noise[0])
            scaled.append(np.sqrt(10 ** ((speech_db - noise_db - snr_db) / 10)) * noise)
        return np.sum(np.concatenate(scaled, axis=0), axis=0, keepdims=True) + audio

    def reverberate(self, audio: np.ndarray) -> np.ndarray:
        """Convolve with an RIR of unit energy; audio and result (1, samples)."""
        response, _ = soundfile.read(self.generator.choice(self.responses))
        response = response.astype(np.float64)[None]
        response = response / np.sqrt(np.sum(response**2))
        # The tail beyond the crop is computed and thrown away, as in the original. scipy chooses
        # between direct and FFT convolution by size.
        return signal.convolve(audio, response, mode="full")[:, : crop_samples(self.num_frames)]


class ClassicTrainingSet(Dataset):
    """A speaker's utterances as one item, as in the original's loader."""

    def __init__(
        self,
        paths: Sequence[str],
        labels: Sequence[int],
        num_frames: int,
        generator: random.Random,
        augmentation: ClassicAugmentation | None = None,
    ) -> None:
        self.paths = paths
        self.labels = labels
        self.num_frames = num_frames
        self.generator = generator
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Sequence[int]) -> tuple[torch.Tensor, int]:
        """Crops of the rows, float32 (utterances, samples), and their speaker's label."""
        # Utterance by utterance, each through its own convolution and its own copies. Our mixer
        # does a whole batch at once, which is where most of its gain comes from.
        crops = []
        for row in rows:
            crop = read_training_crop(self.paths[row], self.num_frames, self.generator)
            crops.append(self.augmentation(crop) if self.augmentation else crop)
        return torch.FloatTensor(np.concatenate(crops, axis=0)), self.labels[rows[-1]]


class ClassicEvaluationSet(Dataset):
    """A file's evaluation crops as one item."""

    def __init__(self, paths: Sequence[str], num_frames: int, num_crops: int) -> None:
        self.paths = paths
        self.num_frames = num_frames
        self.num_crops = num_crops

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, str]:
        """Crops as float32 (crops, samples), and the path."""
        path = self.paths[row]
        return torch.FloatTensor(read_evaluation_crops(path, self.num_frames, self.num_crops)), path


def training_loader(
    dataset: ClassicTrainingSet, groups: list[list[int]], batch_size: int, num_workers: int
) -> DataLoader:
    """Batches of (waveforms (batch, utterances, samples), labels (batch,)) by torch's loader, items
    one by one.
    """
    # torch's loader sends each batch through a pipe as pickled tensors. We leave that as it is: it
    # is a part of what is compared.
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=groups,  # type: ignore[arg-type]
        num_workers=num_workers,
        worker_init_fn=_own_random_numbers,
        drop_last=True,
    )


def embed_one_by_one(
    embed: Callable[[torch.Tensor], torch.Tensor],
    paths: Sequence[str],
    *,
    num_frames: int,
    num_crops: int,
    num_workers: int = 0,
) -> dict[str, torch.Tensor]:
    """Embeddings of every file, one file a batch: path -> (crops, dim).

    Args:
        embed: (crops, samples) float32 -> (crops, dim).
        paths: the files.
        num_frames: length of a crop.
        num_crops: crops per file.
        num_workers: loader processes.
    """
    dataset = ClassicEvaluationSet(paths, num_frames, num_crops)
    embeddings = {}
    # A batch holds the crops of one file, because files may have different numbers of them. A GPU
    # or a second core has little to do with so few.
    for crops, path in DataLoader(dataset, batch_size=1, shuffle=False, num_workers=num_workers):
        with torch.no_grad():
            embeddings[path[0]] = embed(crops[0]).cpu()
    return embeddings


def score_one_by_one(
    embeddings: dict[str, torch.Tensor], trials: Iterable[tuple[str, str]]
) -> list[float]:
    """Scores of (enrol, test) trials, one at a time: the negative mean distance between all pairs
    of normalised crops.
    """
    scores = []
    for enrol, test in trials:
        # A few calls of torch for every trial, and a copy to numpy: 820 trials a second, against
        # 227,000 by matrix products on one thread (benchmarks/measurements.md).
        first = functional.normalize(embeddings[enrol], p=2, dim=1)
        second = functional.normalize(embeddings[test], p=2, dim=1)
        distances = torch.cdist(first, second).detach().cpu().numpy()
        scores.append(float(-1 * np.mean(distances)))
    return scores


def _read_padded(path: str, num_frames: int) -> tuple[np.ndarray, int]:
    """A whole file, and the samples of a crop; a file that is not longer is wrapped to one sample
    more.
    """
    num_samples = crop_samples(num_frames)
    audio, _ = soundfile.read(path)
    if len(audio) <= num_samples:
        audio = np.pad(audio, (0, num_samples - len(audio) + 1), "wrap")
    return audio, num_samples


def _power_db(audio: np.ndarray) -> float:
    return 10 * np.log10(np.mean(audio**2) + POWER_FLOOR)


def _own_random_numbers(worker: int) -> None:
    """Seed each worker differently, or all would draw the same crops."""
    information = get_worker_info()
    assert information is not None
    information.dataset.generator.seed(information.seed)  # type: ignore[attr-defined]
