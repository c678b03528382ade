"""The front end of models that learn their own filterbank: none but the samples."""

from torch import Tensor

from speakernet.frontend.features import FrontEnd, valid_frames
from speakernet.frontend.options import RawWaveformOptions


class RawWaveform(FrontEnd):
    """The samples themselves as one feature, for models that learn their own filterbank (RawNet3)."""

    num_features = 1
    window_samples = hop_samples = min_samples = 1

    def __init__(self, options: RawWaveformOptions) -> None:
        super().__init__()
        self.options = options

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Every sample is a frame."""
        return num_samples

    def extract(self, waveforms: Tensor, lengths: Tensor | None) -> Tensor:
        """(batch, 1, samples)."""
        features = waveforms.unsqueeze(1)
        return features if lengths is None else features * valid_frames(lengths, waveforms.shape[1]).unsqueeze(1)
