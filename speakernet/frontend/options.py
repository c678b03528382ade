"""The options of front ends and of SpecAugment, and the table of front ends. No torch is imported
here.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from speakernet.options import Component, Options, Positive, Share

MelCount = Annotated[int, Ge(1), Le(512)]
Hertz = Annotated[float, Ge(0.0), Le(400_000.0)]
MaskCount = Annotated[int, Ge(0), Le(100)]


class SpecAugmentOptions(Options):
    """Masks over features in training."""

    spec_augment: bool = False
    """Mask bands and stretches of time in training, differently for every utterance."""
    spec_augment_probability: Share = 1.0
    """SpecAugment: share of utterances that are masked."""
    mel_masks: MaskCount = 1
    """SpecAugment: masks along the mel axis."""
    mel_mask_width: Annotated[int, Ge(0), Le(512)] = 8
    """SpecAugment: widest mel mask, in bands."""
    frame_masks: MaskCount = 1
    """SpecAugment: masks along time."""
    frame_mask_width: Annotated[int, Ge(0), Le(10_000)] = 20
    """SpecAugment: widest time mask, in frames of 10 ms."""


class FrontendOptions(Options):
    """From samples to features, and SpecAugment on them. Options set to `auto` follow the
    definition of the model.
    """

    name: str = "auto"
    """log_mel (voxceleb_trainer's), fbank or mfcc (Kaldi's), speechbrain, tf_mel, raw (samples);
    auto: the model's."""

    auto_values: ClassVar[Mapping[str, Any]] = {}
    """Meaning of `auto` unless the model defines it."""

    def resolve(self, published: Mapping[str, Any]) -> Any:
        """A copy without `auto`: the values of the model's definition, else of the front end."""
        values = {}
        for name, value in self.auto_values.items():
            if getattr(self, name) == "auto":
                values[name] = published.get(name, value)
        return self.model_copy(update=values)


class MelOptions(SpecAugmentOptions, FrontendOptions):
    """The base of front ends with mel bands."""

    num_mels: MelCount = 64
    """Mel bands."""
    normalize: Literal["auto", "instance", "mean", "none"] = "auto"
    """Per utterance and band: instance (mean and variance), mean, none; auto: instance in log_mel,
    else mean."""


class TfMelOptions(MelOptions):
    """The log mel energies on which wespeaker trains ReDimNet2 (`tfmel`): triangles over mels, mean
    removed.
    """

    preemphasis: Share | Literal["auto"] = "auto"
    """Coefficient of the pre-emphasis, 0 for none; auto: 0.97 in ResNetSE34V2, ReDimNet and tf_mel,
    else 0."""
    low_hz: Hertz | Literal["auto"] = "auto"
    """Lower edge of the lowest band; auto: 20 in ReDimNet and tf_mel, else 0."""
    high_hz: Hertz | Literal["auto"] = "auto"
    """Upper edge of the highest band, 0 for half the sample rate; auto: 7600 in ReDimNet and
    tf_mel, else 0."""
    normalize_waveform: bool | Literal["auto"] = "auto"
    """First remove the mean of each utterance's samples, divide by their deviation; auto: on in
    ReDimNet and tf_mel."""

    auto_values: ClassVar = {
        "preemphasis": 0.97,
        "normalize": "mean",
        "low_hz": 20.0,
        "high_hz": 7600.0,
        "normalize_waveform": True,
    }


class LogMelOptions(TfMelOptions):
    """Mel spectrogram as in voxceleb_trainer: centred frames, HTK mel scale, optional log, instance
    norm.
    """

    log_input: bool = True
    """Take the logarithm of the mel energies."""
    window: Literal["auto", "hamming", "hann"] = "auto"
    """Analysis window; auto: hamming, but hann in VGGVox."""

    auto_values: ClassVar = {
        "window": "hamming",
        "preemphasis": 0.0,
        "normalize": "instance",
        "low_hz": 0.0,
        "high_hz": 0.0,
        "normalize_waveform": False,
    }


class KaldiFbankOptions(MelOptions):
    """Kaldi's log filterbank energies for a whole batch at once, with the differences between
    toolkits as options.
    """

    window: Literal["auto", "hamming", "povey"] = "auto"
    """Analysis window: hamming in wespeaker, povey in 3D-Speaker; auto: hamming."""
    scale: Positive = 32768.0
    """Factor applied to the waveform in -1..1 (32768 in wespeaker, 1 in 3D-Speaker)."""
    dither: Annotated[float, Ge(0.0), Le(1e6)] = 0.0
    """Standard deviation of the noise added in training, in scaled samples (1.0 in wespeaker)."""
    style: Literal["kaldi", "lhotse"] = "kaldi"
    """kaldi: whole windows, bands up to half the sample rate; lhotse (and sherpa-onnx): centred
    frames, bands up to 400 Hz below half the sample rate."""
    energy_floor_db: Annotated[float, Ge(0.0), Le(200.0)] = 0.0
    """Floor against rounding noise in empty bands: the utterance's mean energy, reduced by this
    many dB, is added to every energy; 0: none."""

    auto_values: ClassVar = {"window": "hamming", "normalize": "mean"}


class KaldiMfccOptions(KaldiFbankOptions):
    """Kaldi's cepstra of the energies of fbank (no energy term, lifter 22)."""

    num_cepstra: MelCount = 40
    """Cepstral coefficients, including the zeroth; at most num_mels."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """More coefficients than bands."""
        yield from super().problems()
        if self.num_cepstra > self.num_mels:
            yield "num_cepstra", f"{self.num_cepstra}; expected at most num_mels ({self.num_mels})"


class SpeechBrainFbankOptions(MelOptions):
    """Mel energies in decibels as in SpeechBrain: centred frames of 400 points, with a floor below
    the maximum.
    """

    top_db: Annotated[float, Gt(0.0), Le(1000.0)] = 80.0
    """Floor of the energies, in dB below an utterance's largest."""

    auto_values: ClassVar = {"normalize": "mean"}


FEATURES: dict[str, Component] = {
    "log_mel": Component(LogMelOptions, "speakernet.frontend.features:LogMel"),
    "fbank": Component(KaldiFbankOptions, "speakernet.frontend.kaldi:KaldiFbank"),
    "mfcc": Component(KaldiMfccOptions, "speakernet.frontend.kaldi:KaldiMfcc"),
    "speechbrain": Component(
        SpeechBrainFbankOptions, "speakernet.frontend.speechbrain:SpeechBrainFbank"
    ),
    "tf_mel": Component(TfMelOptions, "speakernet.frontend.tf_mel:TfMel"),
    "raw": Component(
        FrontendOptions,
        "speakernet.frontend.features:RawWaveform",
        "The samples themselves as one feature, for models that learn their own filterbank "
        "(RawNet3).",
    ),
}
