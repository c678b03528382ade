"""The sections frontend, model and loss: what is heard, what hears it, and what it is taught by.

Only values and range checks live here; `build/model.py` turns them into objects and knows which names exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from speakernet.config.sections.ranges import at_least, between, positive


@dataclass
class FrontendSection:
    """From samples to features, and SpecAugment on them. What is `auto` follows the model's own definition."""

    name: Literal["auto", "log_mel", "fbank", "raw"] = "auto"
    """log_mel (as voxceleb_trainer computes it), fbank (Kaldi's), raw (samples, for RawNet3); auto: the model's own."""
    num_mels: int = 64
    """Mel bands."""
    log_input: bool = True
    """log_mel: take the logarithm of the mel energies."""
    window: Literal["auto", "hamming", "hann", "povey"] = "auto"
    """Analysis window; auto: hamming, and hann in VGGVox."""
    preemphasis: float | Literal["auto"] = "auto"
    """log_mel: coefficient of the pre-emphasis, 0 for none; auto: 0.97 in ResNetSE34V2, else 0."""
    normalize: Literal["auto", "instance", "mean", "none"] = "auto"
    """Over each utterance and band: instance (mean and variance), mean, none; auto: instance, and mean for fbank."""
    scale: float = 32768.0
    """fbank: the waveform in -1..1 is multiplied by this (32768 in wespeaker, 1 in 3D-Speaker)."""
    dither: float = 0.0
    """fbank: standard deviation of the noise added in training, in scaled samples (1.0 in wespeaker)."""
    spec_augment: bool = False
    """Hide bands and stretches of time in training, with masks of its own for every utterance."""
    mel_masks: int = 1
    """SpecAugment: masks along the mel axis."""
    mel_mask_width: int = 8
    """SpecAugment: widest mel mask, in bands."""
    frame_masks: int = 1
    """SpecAugment: masks along time."""
    frame_mask_width: int = 20
    """SpecAugment: widest time mask, in frames of 10 ms."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from between(self, 1, 512, "num_mels")
        yield from positive(self, "scale")
        yield from at_least(self, 0, "dither", "mel_masks", "mel_mask_width", "frame_masks", "frame_mask_width")
        if self.preemphasis != "auto":
            yield from between(self, 0.0, 1.0, "preemphasis")


@dataclass
class ModelSection:
    """The network between features and embedding."""

    name: str = "ResNetSE34L"
    """Name of the model; `speakernet list models` shows them all."""
    pooling: str = "auto"
    """How frames become one vector; `speakernet list poolings` shows them all; auto: the model's own."""
    embedding_dim: int = 256
    """Numbers in an embedding."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of that model, such as {channels: 32} for ResNet or {sinc_stride: 10} for RawNet3."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from at_least(self, 1, "embedding_dim")


@dataclass
class LossSection:
    """What the embeddings are taught by. An option that the chosen loss does not have is left alone."""

    name: str = "aamsoftmax"
    """Name of the loss; `speakernet list losses` shows them all."""
    margin: float = 0.2
    """Margin: cosine (amsoftmax), radians (aamsoftmax), squared distance (triplet); schedule.margin_* can ramp it."""
    scale: float = 30.0
    """Scale of the cosines before the softmax (amsoftmax, aamsoftmax)."""
    easy_margin: bool = False
    """aamsoftmax: apply the margin only to angles below 90 degrees."""
    hard_probability: float = 0.5
    """triplet: share of negatives that are chosen among the hardest; the others are random."""
    hard_rank: int = 10
    """triplet: a hard negative is one of the hard_rank + 1 nearest; below 0: semi-hard negatives."""
    initial_scale: float = 10.0
    """angleproto, ge2e: starting value of the learned scale."""
    initial_bias: float = -5.0
    """angleproto, ge2e: starting value of the learned bias."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values out of range, as (field, what was found and what is expected)."""
        yield from at_least(self, 0.0, "margin")
        yield from positive(self, "scale")
        yield from between(self, 0.0, 1.0, "hard_probability")
