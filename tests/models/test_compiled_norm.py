"""The batch norm of compiled networks against torch's own: outputs, gradients, running statistics."""

import copy

import pytest
import torch
from torch import nn

from speakernet.models.kernels import TrainingBatchNorm, channel_sums, channels_behind, use_compiled_norms


def features(mean: float = 0.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return mean + torch.randn(3, 4, 5, 7, generator=random)


@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_outputs_and_statistics_are_those_of_torch(mean: float) -> None:
    """Also where the mean is many deviations from zero, as long as the running mean is not far off."""
    values, weight, bias = features(mean), torch.tensor([1.0, 2.0, 0.5, -1.0]), torch.tensor([0.0, 1.0, -1.0, 3.0])
    normalized, found_mean, variance = TrainingBatchNorm.apply(values, weight, bias, torch.full((4,), mean + 1), 1e-5)
    expected = torch.nn.functional.batch_norm(values, None, None, weight, bias, training=True, eps=1e-5)
    torch.testing.assert_close(normalized, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_mean, values.mean((0, 2, 3)))
    torch.testing.assert_close(variance, values.var((0, 2, 3), correction=0), rtol=1e-4, atol=0)


def test_gradients_are_those_of_torch() -> None:
    gradients = []
    weights = torch.randn(3, 4, 5, 7, generator=torch.Generator().manual_seed(6))
    for is_ours in (True, False):
        inputs = [features(), torch.tensor([1.0, 2.0, 0.5, -1.0]), torch.tensor([0.0, 1.0, -1.0, 3.0])]
        for one in inputs:
            one.requires_grad_()
        if is_ours:
            normalized = TrainingBatchNorm.apply(*inputs, torch.zeros(4), 1e-5)[0]
        else:
            normalized = nn.functional.batch_norm(inputs[0], None, None, *inputs[1:], training=True)
        (normalized * weights).sum().backward()
        gradients.append([one.grad for one in inputs])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_sums_over_all_but_the_channels() -> None:
    torch.testing.assert_close(channel_sums(channels_behind(features())), features().sum((0, 2, 3)))


def test_eager_networks_are_left_as_they_are() -> None:
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    ours = copy.deepcopy(plain)
    use_compiled_norms(ours)
    values = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours(values), plain(values))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for one, other in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_compiled_networks_move_the_same_statistics() -> None:
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    ours = copy.deepcopy(plain)
    use_compiled_norms(ours)
    ours.compile()
    for seed in range(3):
        values = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(ours(values), plain(values), rtol=1e-4, atol=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)
