"""Sizes of models: recounted, and compared with published figures."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from speakernet.models.options import MODELS
from speakernet.models.speaker_net import SpeakerNet

FRAMES = 200
SAMPLES = 32000


def counted(name):
    """Parameters, and multiply-adds from the features of 2 seconds to the embedding."""
    trunk = MODELS[name].options
    is_raw = trunk.published.mels == 0
    # The front end is not counted, so any with the same number of bands will do.
    front_end, options = ("raw", {}) if is_raw else ("fbank", {"num_mels": trunk.published.mels})
    # The meta device has no autocast.
    with (
        torch.device("meta"),
        mock.patch("torch.autocast", lambda *_, **__: contextlib.nullcontext()),
    ):
        dim = trunk.published.dim
        net = SpeakerNet.named(
            name, embedding_dim=dim, front_end=front_end, front_end_options=options
        ).eval()
        features = (
            torch.empty(1, 1, SAMPLES) if is_raw else torch.empty(1, trunk.published.mels, FRAMES)
        )
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            net.from_features(features)
    return sum(parameter.numel() for parameter in net.parameters()), counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("name", "parameters_millions", "macs_billions"),
    [
        ("XVector", 4.61, 0.53),
        ("ECAPA_TDNN_1024", 14.65, 2.65),
        ("ReDimNet2B4", 6.6, 4.62),
    ],
)
def test_published_counts(name, parameters_millions, macs_billions):
    parameters, macs = counted(name)
    assert parameters / 1e6 == pytest.approx(parameters_millions, rel=0.01)
    # Some counters include norms and activations.
    assert macs / 1e9 == pytest.approx(macs_billions, rel=0.02)


# Some kinds of trunks that are not above; all others take half a minute.
QUICK = {"ResNetSE34L", "RawNet3", "CAMPPlus", "ERes2NetBase"}
PUBLISHED = [name for name in MODELS if MODELS[name].options.published.parameters]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PUBLISHED],
)
def test_counts_of_options(name):
    trunk = MODELS[name].options
    assert trunk.published[-2:] == counted(name)
