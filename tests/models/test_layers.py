"""Layers with gradients of their own: the same values and gradients as torch's."""

import math

import pytest
import torch
from torch import Tensor

from speakernet.models.layers import (
    CompiledReLU,
    SimilarityAttention,
    SqueezeExcitation,
    TrainingGate,
    mean_over_frames,
    reflect_frames,
    relu,
)
from speakernet.models.redimnet import FrameGroupNorm


def test_values_and_gradients_of_a_relu_are_those_of_torch() -> None:
    values = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 3.0])
    gradients = []
    for function in (CompiledReLU.apply, torch.relu):
        inputs = values.clone().requires_grad_()
        result = function(inputs)
        assert torch.equal(result, values.clamp_min(0))
        (result * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_eager_networks_overwrite_the_input_of_a_relu() -> None:
    values = torch.tensor([-1.0, 2.0])
    assert relu(values) is values and values.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_values_and_gradients_of_a_gate_are_those_of_autograd(memory_format: torch.memory_format) -> None:
    gate = SqueezeExcitation(16).double()
    features = torch.randn(3, 16, 4, 5, dtype=torch.float64).contiguous(memory_format=memory_format)
    weights = torch.randn_like(features)
    ours, plain = features.clone().requires_grad_(), features.clone().requires_grad_()

    result = gate(ours)
    expected = _gated_by_autograd(gate, plain)

    torch.testing.assert_close(result, expected)
    assert result.is_contiguous(memory_format=memory_format)
    parameters = list(gate.parameters())
    for actual, wanted in zip(
        torch.autograd.grad((result * weights).sum(), [ours, *parameters]),
        torch.autograd.grad((expected * weights).sum(), [plain, *parameters]),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)
        assert actual.is_contiguous(memory_format=memory_format) or actual.dim() < 4


def test_the_gradients_of_a_gate_are_those_of_finite_differences() -> None:
    gate = SqueezeExcitation(8).double()
    features = torch.randn(2, 8, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = (gate.squeeze.weight, gate.squeeze.bias, gate.excite.weight, gate.excite.bias)

    assert torch.autograd.gradcheck(TrainingGate.apply, (features, *weights))


def test_a_gate_keeps_the_precision_of_its_features_and_computes_in_that_of_its_weights() -> None:
    gate = SqueezeExcitation(16)
    features = torch.randn(4, 16, 5, 6, dtype=torch.bfloat16).requires_grad_()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gate(features)
    result.float().square().sum().backward()

    assert result.dtype == torch.bfloat16
    assert features.grad is not None and features.grad.dtype == torch.bfloat16
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in gate.parameters())
    expected = _gated_by_autograd(gate, features.detach().float())
    torch.testing.assert_close(result.float(), expected, rtol=2**-7, atol=0)


def test_sums_of_float16_features_do_not_overflow() -> None:
    gate = SqueezeExcitation(16)
    features = torch.full((1, 16, 40, 100), 20.0, dtype=torch.float16).requires_grad_()  # their sums: 80,000
    result = gate(features)
    (result * 20).sum(dtype=torch.float32).backward()
    assert result.isfinite().all() and features.grad is not None and features.grad.isfinite().all()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in gate.parameters())


def test_products_of_float16_features_and_scaled_gradients_do_not_overflow() -> None:
    """Else the usable loss scale would be the gate's: a product is 160,000, the gradient itself a few hundred."""
    gate = SqueezeExcitation(16)
    features = torch.full((1, 16, 40, 100), 400.0, dtype=torch.float16).requires_grad_()
    (gate(features)[:, :, :1, :1] * 400).sum(dtype=torch.float32).backward()
    assert features.grad is not None and features.grad.isfinite().all() and features.grad.abs().max() < 1000
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in gate.parameters())


def test_a_gate_without_gradients_scores_as_it_trains() -> None:
    gate = SqueezeExcitation(16)
    features = torch.randn(2, 16, 4, 9)

    torch.testing.assert_close(gate(features.clone()), gate(features.clone().requires_grad_()))


def test_mirrored_edges_of_different_lengths_are_those_of_each_alone() -> None:
    features = torch.arange(12.0).reshape(2, 1, 6)
    found = reflect_frames(features, torch.tensor([6, 4]), 2)
    assert found[0, 0].tolist() == [2, 1, 0, 1, 2, 3, 4, 5, 4, 3]
    assert found[1, 0, :8].tolist() == [8, 7, 6, 7, 8, 9, 8, 7]


def test_similarity_attention_by_hand() -> None:
    # Mean 2 and squared distances 1, 1, 1, 1: a variance of 4/3 over three degrees of freedom.
    features = torch.tensor([[[[1.0, 3.0], [1.0, 3.0]]]])
    gate = 1 / (1 + math.exp(-(1 / (4 * (4 / 3 + 1e-4)) + 0.5)))
    expected = torch.tensor([[[[gate, 3 * gate], [gate, 3 * gate]]]])
    torch.testing.assert_close(SimilarityAttention()(features), expected)


def test_group_norm_of_valid_frames_is_that_of_torch_alone() -> None:
    norm = FrameGroupNorm(2, 6)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    features = torch.randn(2, 6, 5)
    together = norm(features, torch.tensor([5, 3]))
    torch.testing.assert_close(together[0], norm(features[:1])[0])
    torch.testing.assert_close(together[1, :, :3], norm(features[1:, :, :3])[0])


def _gated_by_autograd(gate: SqueezeExcitation, features: Tensor) -> Tensor:
    means = features.mean((2, 3))
    return features * gate.excite(gate.squeeze(means).relu()).sigmoid()[:, :, None, None]


def test_attention_and_means_of_float16_features_do_not_overflow() -> None:
    features = torch.full((1, 2, 4, 100), -300.0, dtype=torch.float16)
    features[..., 50:] = 2000.0
    assert SimilarityAttention()(features).isfinite().all()
    assert mean_over_frames(features[:, 0], torch.tensor([100])).tolist() == [[850.0] * 4]


def test_the_gates_product_does_not_overflow_in_half_precision() -> None:
    """Scaled gradients of float16 go up to 65,504; times a feature of 4 they would be infinite."""
    torch.manual_seed(0)
    features = torch.full((1, 2, 2, 3), 4.0, dtype=torch.float16, requires_grad=True)
    weights = [torch.randn(1, 2) * 1e-3, torch.zeros(1), torch.randn(2, 1) * 1e-3, torch.zeros(2)]
    made = TrainingGate.apply(features, *(one.requires_grad_() for one in weights))
    made.backward(torch.full_like(made, 30_000.0))
    assert all(torch.isfinite(one.grad).all() for one in (features, *weights))
    assert weights[3].grad.tolist() == pytest.approx([30_000 * 4 * 6 / 4] * 2, rel=1e-3)
