"""From waveform to features: log-mel, Kaldi fbank, raw samples, and SpecAugment on top of them."""

from speakernet.frontend.features import FrontEnd, KaldiFbank, LogMel, RawWaveform, valid_frames
from speakernet.frontend.masking import SpecAugment

FEATURES: dict[str, type[FrontEnd]] = {"log_mel": LogMel, "fbank": KaldiFbank, "raw": RawWaveform}

__all__ = ["FEATURES", "FrontEnd", "KaldiFbank", "LogMel", "RawWaveform", "SpecAugment", "valid_frames"]
