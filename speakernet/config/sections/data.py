"""The sections data and augment: which recordings, how they become batches, and how they are disturbed in training.

Only values and range checks live here; `build/data.py` turns them into a loader.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from speakernet.config.sections.ranges import at_least, between

Switch = Literal["auto", "on", "off"]


@dataclass
class DataSection:
    """Which recordings, and how they become batches."""

    train_list: str = ""
    """Training list: `speaker path` a line."""
    train_path: str = ""
    """Folder (or packed corpus) that the paths of train_list start from; empty: the folder of the list."""
    validation_list: str = ""
    """Trials that choose the best checkpoint during training; empty: test_list, and the report says so."""
    validation_path: str = ""
    """Folder (or packed corpus) of validation_list; empty: the folder of the list."""
    test_list: str = ""
    """Trials that are reported: `1 enrol test`, `enrol test target`, or unlabelled pairs for scores alone."""
    test_path: str = ""
    """Folder (or packed corpus) of test_list; empty: the folder of the list."""
    synthetic_corpus: str = ""
    """Folder of the synthetic corpus, made there on first use when it is not complete."""
    sample_rate: int = 16000
    """Samples a second; recordings of another rate are resampled."""
    crop_frames: int = 200
    """Length of a training crop in frames of 10 ms (200 frames are 2 seconds)."""
    crop_frames_max: int = 0
    """Longest crop: each batch draws its length from crop_frames to this, with as much audio in all; 0: fixed."""
    batch_size: int = 64
    """Utterances in a batch; with utterances_per_speaker above 1, speakers in a batch."""
    utterances_per_speaker: int = 1
    """Utterances of each speaker in a batch; metric losses need 2 or more."""
    max_utterances_per_speaker: int = 500
    """Utterances of one speaker used in an epoch (balanced sampler)."""
    sampler: Literal["auto", "shuffled", "balanced"] = "auto"
    """shuffled: all utterances in random order; balanced: no speaker twice in a batch; auto: by the loss."""
    num_classes: int = 0
    """Speakers in the classification head; 0: as many as the training list has."""
    min_seconds: float = 0.0
    """Shorter training utterances are left out (counted in the log)."""
    max_seconds: float = 0.0
    """Longer training utterances are left out (counted in the log); 0: no bound."""
    num_workers: int | Literal["auto"] = "auto"
    """Loader processes; 0 loads in the training process; auto: from cores and corpus, the reason is logged."""
    prefetch_factor: int | Literal["auto"] = "auto"
    """Batches that each worker prepares ahead."""
    persistent_workers: bool = True
    """Keep the workers between epochs."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Page-locked memory for faster transfer; auto: with a GPU."""
    cache_megabytes: int = 512
    """Memory for decoded audio that is read again and again (noise, RIRs, short utterances), per process."""
    ram_corpus: Switch = "auto"
    """Decode the training corpus once into shared memory as int16; auto: when it is compressed and fits."""
    ram_corpus_gigabytes: float = 0.0
    """Most memory the RAM corpus may take; 0: half of what is free."""
    device_resident: Switch = "auto"
    """Keep a packed (or RAM) corpus in GPU memory, crops are cut there; noise and RIRs stay here; auto: if it fits."""
    device_gigabytes: float = 0.0
    """Most device memory the resident corpus may take; 0: half of what is free."""
    on_bad_audio: Literal["error", "skip"] = "error"
    """skip replaces an unreadable utterance by another of the same speaker, and counts it."""
    max_bad_share: float = 0.01
    """With skip: share of unreadable utterances in an epoch above which the run stops."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from at_least(
            self, 1, "crop_frames", "batch_size", "utterances_per_speaker", "max_utterances_per_speaker", "sample_rate"
        )
        yield from at_least(
            self, 0, "crop_frames_max", "num_classes", "min_seconds", "max_seconds", "cache_megabytes",
            "ram_corpus_gigabytes", "device_gigabytes",
        )  # fmt: skip
        yield from between(self, 0.0, 1.0, "max_bad_share")
        if self.num_workers != "auto":
            yield from at_least(self, 0, "num_workers")
        if self.prefetch_factor != "auto":
            yield from at_least(self, 1, "prefetch_factor")
        if 0 < self.crop_frames_max < self.crop_frames:
            yield "crop_frames_max", f"{self.crop_frames_max}; expected 0 or at least crop_frames ({self.crop_frames})"
        if self.max_seconds and self.max_seconds < self.min_seconds:
            yield "max_seconds", f"{self.max_seconds}; expected 0 or more than min_seconds ({self.min_seconds})"


@dataclass
class AugmentSection:
    """How training audio is disturbed. Every choice is drawn first and then applied to the whole batch."""

    enabled: bool = True
    """Whether training audio is augmented at all; what has no files is left out, and said."""
    style: Literal["ours", "classic"] = "ours"
    """ours: SNR on true power for each source, direct path kept in place; classic: voxceleb_trainer to the letter."""
    noise_path: str = ""
    """Folder with noise in MUSAN's layout (noise/, music/, speech/); empty: no noise."""
    rir_path: str = ""
    """Folder with room impulse responses; empty: no reverberation."""
    probability: float = 0.8
    """Share of utterances that get one of the disturbances below (four fifths in the classic five-way choice)."""
    categories: list[Literal["reverb", "music", "babble", "noise"]] = field(
        default_factory=lambda: ["reverb", "music", "babble", "noise"]
    )
    """Disturbances to choose from, each equally likely; one without files is redistributed."""
    noise_snr_db: list[float] = field(default_factory=lambda: [0.0, 15.0])
    """Lowest and highest signal-to-noise ratio of noise."""
    music_snr_db: list[float] = field(default_factory=lambda: [5.0, 15.0])
    """Lowest and highest signal-to-noise ratio of music."""
    babble_snr_db: list[float] = field(default_factory=lambda: [13.0, 20.0])
    """Lowest and highest signal-to-noise ratio of babble."""
    babble_speakers: list[int] = field(default_factory=lambda: [3, 7])
    """Fewest and most talkers in babble."""
    speed_factors: list[float] = field(default_factory=lambda: [1.0])
    """Speeds to draw from; each but 1.0 makes new speakers (0.9, 1.0, 1.1: three times as many)."""
    volume_db: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Lowest and highest gain."""
    telephone_probability: float = 0.0
    """Share of utterances limited to the telephone band (300 to 3400 Hz)."""
    codec_probability: float = 0.0
    """Share of utterances passed through mu-law quantisation at half the sample rate."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where augmentation runs: cpu with the loading (no corpus on a GPU), cuda after the transfer; auto: by GPU."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from between(self, 0.0, 1.0, "probability", "telephone_probability", "codec_probability")
        for name in ("noise_snr_db", "music_snr_db", "babble_snr_db", "volume_db", "babble_speakers"):
            value = getattr(self, name)
            if len(value) != 2 or value[0] > value[1]:
                yield name, f"{value}; expected two numbers, the lower first"
        if len(self.babble_speakers) == 2 and self.babble_speakers[0] < 1:
            yield "babble_speakers", f"{self.babble_speakers}; expected at least one talker"
        if not self.speed_factors or not all(0.5 <= factor <= 2.0 for factor in self.speed_factors):
            yield "speed_factors", f"{self.speed_factors}; expected factors between 0.5 and 2"
