"""Batch norms merged into the preceding layers: every family gives the same numbers with fewer
norms.
"""

import copy

import pytest
import torch
from torch import nn

from speakernet.models.speaker_net import fold_batch_norms
from tests.small_networks import SMALLEST, small_network

# Families whose norms all follow an activation.
NOTHING_TO_MERGE = {"Pretrained", "RawNet3", "XVector", "ECAPA_TDNN"}
LENGTHS = torch.tensor([12600, 11373])


def trained(name):
    """A network with trained-looking batch norms."""
    net = small_network(name).eval()
    for part in norms_of(net):
        part.running_mean.normal_(0, 0.2)
        part.running_var.uniform_(0.5, 1.5)
        if part.affine:
            # Some channels negated, one ignored.
            part.weight.data.uniform_(-1.5, 1.5)[0] = 0
            part.bias.data.normal_(0, 0.2)
    return net


def norms_of(net):
    return [part for part in net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def strides_of(net):
    return [part.weight.stride() for part in net.trunk.modules() if isinstance(part, nn.Conv2d)]


@pytest.mark.parametrize("name", SMALLEST)
def test_every_family(name):
    net = trained(name)
    folded = copy.deepcopy(net)
    count = fold_batch_norms(folded)
    assert strides_of(folded) == strides_of(net)
    assert count == len(norms_of(net)) - len(norms_of(folded))
    assert (count == 0) == (name in NOTHING_TO_MERGE)
    waveforms = 0.1 * torch.randn(2, 12600, generator=torch.Generator().manual_seed(1))
    ours = net.embed(waveforms, LENGTHS, sample_rate=16000)
    theirs = folded.embed(waveforms, LENGTHS, sample_rate=16000)
    assert (theirs - ours).norm() <= 1e-5 * ours.norm()
