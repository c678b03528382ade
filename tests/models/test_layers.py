"""Layers with hand-written gradients: the same values and gradients as torch."""

import math

import pytest
import torch
from torch.testing import assert_close

from speakernet.models.deep_resnet import SimilarityAttention
from speakernet.models.layers import CompiledReLU, SqueezeExcitation, relu
from speakernet.models.tdnn import reflect_frames


def test_relu():
    values = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 3.0])
    gradients = []
    for function in (CompiledReLU.apply, torch.relu):
        inputs = values.clone().requires_grad_()
        result = function(inputs)
        assert torch.equal(result, values.clamp_min(0))
        (result * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(gradients[0], gradients[1])
    values = torch.tensor([-1.0, 2.0])
    assert relu(values) is values and values.tolist() == [0.0, 2.0], "eager code works in place"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gate_against_autograd(memory_format):
    gate = SqueezeExcitation(16).double()
    features = torch.randn(3, 16, 4, 5, dtype=torch.float64).contiguous(memory_format=memory_format)
    weights = torch.randn_like(features)
    ours = features.clone().requires_grad_()
    plain = features.clone().requires_grad_()
    result = gate(ours)
    expected = (
        plain * gate.excite(gate.squeeze(plain.mean((2, 3))).relu()).sigmoid()[:, :, None, None]
    )
    assert_close(result, expected)
    assert result.is_contiguous(memory_format=memory_format)
    parameters = list(gate.parameters())
    for actual, wanted in zip(
        torch.autograd.grad((result * weights).sum(), [ours, *parameters]),
        torch.autograd.grad((expected * weights).sum(), [plain, *parameters]),
        strict=True,
    ):
        assert_close(actual, wanted)
        assert actual.is_contiguous(memory_format=memory_format) or actual.dim() < 4


@pytest.mark.parametrize(
    ("value", "num_mels", "gradient"),
    [(20.0, 40, 20.0), (400.0, 1, 400.0), (4.0, 40, 3_000.0)],
    ids=["sums of 80,000", "products of 160,000", "scaled gradients"],
)
def test_gate_in_float16(value, num_mels, gradient):
    gate = SqueezeExcitation(16)
    features = torch.full((1, 16, 40, 100), value, dtype=torch.float16).requires_grad_()
    (gate(features)[:, :, :num_mels, :num_mels] * gradient).sum(dtype=torch.float32).backward()
    assert features.grad is not None and features.grad.isfinite().all()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in gate.parameters()
    )


def test_reflected_ends():
    found = reflect_frames(torch.arange(12.0).reshape(2, 1, 6), torch.tensor([6, 4]), 2)
    assert found[0, 0].tolist() == [2, 1, 0, 1, 2, 3, 4, 5, 4, 3]
    assert found[1, 0, :8].tolist() == [8, 7, 6, 7, 8, 9, 8, 7]


def test_similarity_attention_by_hand():
    # Mean 2 and squared distances 1, 1, 1, 1: a variance of 4/3 over three degrees of freedom.
    gate = 1 / (1 + math.exp(-(1 / (4 * (4 / 3 + 1e-4)) + 0.5)))
    found = SimilarityAttention()(torch.tensor([[[[1.0, 3.0], [1.0, 3.0]]]]))
    assert_close(found, torch.tensor([[[[gate, 3 * gate], [gate, 3 * gate]]]]))
