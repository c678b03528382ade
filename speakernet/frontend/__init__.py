"""From waveform to features: log-mel, Kaldi fbank, raw samples, and SpecAugment on top of them."""

from speakernet.frontend.options import FEATURES, FrontendOptions

__all__ = ["FEATURES", "FrontendOptions"]
