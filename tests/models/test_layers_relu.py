"""ReLU as compiled networks compute it: the same values and gradients, and no mask of bytes."""

import torch

from speakernet.models.layers import CompiledReLU, relu


def test_values_and_gradients_are_those_of_torch() -> None:
    values = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 3.0])
    gradients = []
    for function in (CompiledReLU.apply, torch.relu):
        inputs = values.clone().requires_grad_()
        result = function(inputs)
        assert torch.equal(result, values.clamp_min(0))
        (result * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_eager_networks_overwrite_their_input() -> None:
    values = torch.tensor([-1.0, 2.0])
    assert relu(values) is values and values.tolist() == [0.0, 2.0]
