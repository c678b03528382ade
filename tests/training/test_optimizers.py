"""Optimizers by name, parameter groups, averages of weights; against loops and hand-worked numbers."""

import copy

import pytest
import torch
from torch import nn
from training_fakes import CPU, FakeNet, optimizer_options

from speakernet.training.optimizers import WeightAverage, create_optimizer, parameter_groups, should_fuse
from speakernet.training.options import OPTIMIZERS, AdamOptions, OptimizerOptions


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_learns_and_comes_back_from_a_checkpoint(name: str):
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        return layer, create_optimizer(optimizer_options(name, learning_rate=0.05, weight_decay=1e-4), [layer], CPU)

    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    target = data @ torch.tensor([[1.0], [-2.0], [0.5]])

    def steps(layer: nn.Linear, optimizer: torch.optim.Optimizer, count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss = (layer(data) - target).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    layer, optimizer = make()
    first = steps(layer, optimizer, 1)
    # copied: an optimizer that loads a state shares its tensors
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    assert steps(layer, optimizer, 40) < 0.5 * first
    other, resumed = make()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    steps(other, resumed, 40)
    assert torch.equal(other.weight, layer.weight)


def test_norms_and_biases_do_not_decay():
    net = FakeNet()
    decaying, plain = parameter_groups([net, net], weight_decay=0.1)
    assert [tuple(p.shape) for p in decaying["params"]] == [(16, 12), (8, 16)]
    assert len(plain["params"]) == 4 and plain["weight_decay"] == 0.0
    (only,) = parameter_groups([net], weight_decay=0.1, decay_all=True)
    assert len(only["params"]) == 6
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="every weight"):
        create_optimizer(AdamOptions(learning_rate=1.0), [net], CPU)


def test_fused_is_refused_where_torch_has_none():
    assert should_fuse(optimizer_options("adam"), CPU)
    assert not should_fuse(optimizer_options("radam"), CPU)
    assert not should_fuse(optimizer_options("adam", fused="off"), CPU)
    with pytest.raises(ValueError, match="no fused nadam"):
        should_fuse(optimizer_options("nadam", fused="on"), CPU)
    with pytest.raises(ValueError, match="did you mean 'adam'"):
        create_optimizer(OptimizerOptions(name="adamx", learning_rate=1.0), [nn.Linear(1, 1)], CPU)


def test_moving_average_against_a_loop():
    net = nn.Linear(2, 2)
    average = WeightAverage(net, decay=0.8)
    expected = net.weight.detach().clone()
    for step in range(30):
        net.weight.data.normal_(generator=torch.Generator().manual_seed(step))
        average.update()
        decay = min(0.8, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * net.weight.detach()
    own = net.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(net.weight.detach(), expected)
    assert torch.equal(net.weight.detach(), own)
