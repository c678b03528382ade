"""Winograd gradients of compiled convolutions against torch's own: values, rounding, who gets them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from speakernet.models.kernels import WinogradGradient, use_compiled_convolutions, use_compiled_kernels
from speakernet.training.compiling import Compiler
from speakernet.training.options import CompileOptions


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# One tile not full, one and several, with every remainder; one band.
@pytest.mark.parametrize("shape", [(5, 1), (5, 2), (5, 3), (2, 7), (1, 8), (4, 9), (3, 50)])
def test_outputs_and_gradients_are_those_of_torch(shape: tuple[int, int]) -> None:
    results = []
    for convolve in (WinogradGradient.apply, lambda *inputs: functional.conv2d(*inputs, padding=1)):
        features, weight = draw(2, 4, *shape), draw(6, 4, 3, 3, seed=1)
        features.requires_grad_()
        weight.requires_grad_()
        result = convolve(features, weight)
        (result * draw(2, 6, *shape, seed=2)).sum().backward()
        results.append((result.detach(), features.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_in_bfloat16_stay_within_four_times_the_rounding_of_direct_ones() -> None:
    features, weight = draw(4, 128, 5, 51).relu().bfloat16(), draw(128, 128, 3, 3, seed=1, dtype=torch.float32) / 34
    gradient = draw(4, 128, 5, 51, seed=2).bfloat16()

    def gradients(convolve, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = features.to(dtype).requires_grad_(), weight.clone().requires_grad_()
        return torch.autograd.grad(convolve(*inputs), inputs, gradient.to(dtype))

    def direct(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(features, weight.to(features.dtype), padding=1)

    exact = gradients(direct, torch.float64)
    for usual, ours, true in zip(
        gradients(direct, torch.bfloat16), gradients(WinogradGradient.apply, torch.bfloat16), exact, strict=True
    ):
        usual_error, our_error = (float((one.double() - true).norm() / true.norm()) for one in (usual, ours))
        assert usual_error < our_error < 4 * usual_error < 0.012


def test_only_wide_plain_convolutions_are_taken() -> None:
    taken = [nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.Conv2d(64, 128, 3, padding=1, bias=False)]
    left = [
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.Conv2d(128, 128, 3, padding=1),
        nn.Conv2d(128, 128, 3, padding=1, stride=2, bias=False),
        nn.Conv2d(128, 128, 3, padding=2, dilation=2, bias=False),
        nn.Conv2d(512, 512, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(128, 128, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(128, 128, 1, bias=False),
        nn.Conv1d(128, 128, 3, padding=1, bias=False),
    ]
    assert use_compiled_convolutions(nn.ModuleList([*taken, *left])) == len(taken)
    assert all("forward" in vars(module) for module in taken)
    assert not any("forward" in vars(module) for module in left)


def test_eager_networks_are_left_as_they_are() -> None:
    plain = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1, bias=False))
    ours = copy.deepcopy(plain)
    assert use_compiled_convolutions(ours) == 1
    features = draw(1, 128, 3, 7, dtype=torch.float32)
    assert torch.equal(ours(features), plain(features))
    assert ours.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_networks_have_the_outputs_and_gradients_of_eager_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # No ReLU: a sum rounded to the other side of zero would change its gradient wholly.
    eager = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128))
    eager = eager.to(memory_format=torch.channels_last)
    compiled = copy.deepcopy(eager)
    Compiler(
        compiled,
        CompileOptions(compile="on", compile_scope="whole"),
        recover=lambda: None,
        prepare=use_compiled_kernels,
    )
    gradients, outputs = [], []
    for net in (eager, compiled):
        features = draw(4, 128, 5, 10, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = net(features)
        (result.float() * draw(4, 128, 5, 10, seed=1, dtype=torch.float32)).sum().backward()
        outputs.append(result.detach().float())
        gradients.append([features.grad, *(parameter.grad for parameter in net.parameters())])
    allowed = 1e-4 if dtype == torch.float32 else 0.02
    for ours, theirs in zip([outputs[1], *gradients[1]], [outputs[0], *gradients[0]], strict=True):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() < allowed * theirs.norm()
    # The compiled network did take the other way: it rounds differently.
    assert not torch.equal(outputs[0], outputs[1])
