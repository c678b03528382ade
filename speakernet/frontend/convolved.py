"""Front ends whose spectra are convolutions: the same numbers without an FFT, which runtimes of other makers lack.

The kernels are not written down a second time: a spectrum is linear, so what it makes of each sample of a window alone
is the convolution. Used by exported networks only; here an FFT takes a tenth of the time.
"""

import copy
import types
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from speakernet.frontend.features import FrontEnd
from speakernet.frontend.raw import RawWaveform


def use_convolution(front_end: FrontEnd) -> None:
    """Let a front end compute its power spectra by one convolution; one that hears samples stays as it is."""
    if isinstance(front_end, RawWaveform):
        return
    front_end.register_buffer("kernels", spectrum_kernels(front_end), persistent=False)
    front_end.power = types.MethodType(_convolved_power, front_end)  # type: ignore[method-assign]


def spectrum_kernels(front_end: FrontEnd) -> Tensor:
    """The convolution that gives the real, then the imaginary parts of the spectra, (2 bins, 1, samples) float32.

    >>> from speakernet.frontend.features import KaldiFbank
    >>> from speakernet.frontend.options import KaldiFbankOptions
    >>> spectrum_kernels(KaldiFbank(KaldiFbankOptions())).shape
    torch.Size([514, 1, 400])
    """
    # In float64: 512 rounded sines would add up to what the quietest bands hold.
    precise = copy.deepcopy(front_end).double()
    spectra = precise.spectrum(torch.eye(front_end.span_samples, dtype=torch.float64))[:, :, 0]  # (samples, bins)
    return torch.cat((spectra.real, spectra.imag), dim=1).T.unsqueeze(1).float().contiguous()


def _convolved_power(front_end: FrontEnd, waveforms: Tensor) -> Tensor:
    """Squared magnitudes, (batch, bins, frames)."""
    kernels = cast(Tensor, front_end.kernels)
    spectra = functional.conv1d(waveforms.unsqueeze(1), kernels, stride=front_end.hop_samples)
    real, imaginary = spectra.chunk(2, dim=1)
    return real.square() + imaginary.square()
