"""Front ends without an FFT: the same features from every table row, at any length, and loud and quiet."""

import copy

import pytest
import torch

from speakernet.frontend.convolved import use_convolution
from speakernet.frontend.options import FEATURES
from speakernet.registry import create, options_of


def make(name, **options):
    return create(FEATURES[name], options_of(FEATURES, name, {"name": name, **options}, "x"), sample_rate=16000, seed=0)


def speech(num_samples, seed=0):
    """Noise whose spectrum falls by 60 dB, as speech's does, with pauses."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(2, num_samples, generator=generator)
    spectrum = torch.fft.rfft(white)
    spectrum *= 10 ** torch.linspace(0, -3, spectrum.shape[1])
    loudness = (torch.arange(num_samples) % 8000 < 6000) * 0.99 + 0.01
    return 0.1 * torch.fft.irfft(spectrum, num_samples) * loudness


FORMS = [(name, {}) for name in FEATURES] + [
    ("log_mel", {"normalize_waveform": True, "preemphasis": 0.97, "window": "hann", "normalize": "none"}),
    ("fbank", {"window": "povey", "scale": 1.0, "normalize": "none"}),
    ("mfcc", {"num_mels": 30, "num_cepstra": 20}),
    ("tf_mel", {"normalize": "none"}),
]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_features_are_the_same(name, options):
    plain = make(name, **options).eval()
    convolved = copy.deepcopy(plain)
    use_convolution(convolved)
    for num_samples in (16000, 12345):
        ours, theirs = plain(speech(num_samples)), convolved(speech(num_samples))
        torch.testing.assert_close(theirs, ours, atol=2e-3, rtol=1e-3)
        assert (theirs - ours).norm() <= 1e-4 * ours.norm()


def operators(front_end):
    program = torch.export.export(front_end, (speech(16000),))
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    return {str(node.target) for graph in graphs for node in graph.nodes}


def test_no_fft_is_left():
    front_end = make("fbank").eval()
    assert any("fft" in name for name in operators(front_end))
    use_convolution(front_end)
    assert not any("fft" in name for name in operators(front_end))
