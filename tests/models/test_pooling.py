"""Poolings by hand, and over valid frames only."""

import math

import pytest
import torch

from speakernet.models.attentive_pooling import (
    AttentiveStatisticsPooling,
    MultiQueryPooling,
    SelfAttentivePooling,
)
from speakernet.models.options.poolings import (
    POOLINGS,
    MultiQueryPoolingOptions,
    StatisticsPoolingOptions,
)
from speakernet.models.pooling import StatisticsPooling
from speakernet.options import create

FRAMES = torch.tensor(
    [[[1.0, 2.0, 6.0, 100.0], [0.0, 4.0, 2.0, -100.0]]]
)  # (1, 2 channels, 4 frames)


def test_mean_and_deviation_by_hand():
    lengths = torch.tensor([3])
    # Squared deviations 4 + 1 + 9 and 4 + 4 + 0, over n - 1 = 2.
    expected = torch.tensor([[3.0, 2.0, math.sqrt(7), 2.0]])
    torch.testing.assert_close(
        StatisticsPooling(StatisticsPoolingOptions(), 2)(FRAMES, lengths), expected
    )


def test_attention_by_hand():
    pooling = SelfAttentivePooling(2)
    with torch.no_grad():
        pooling.hidden.weight.copy_(torch.eye(2))
        pooling.hidden.bias.zero_()
        pooling.attention.copy_(torch.tensor([[1.0], [0.0]]))
    # Weights exp(tanh 1), exp(tanh 2) over the two valid frames.
    first = math.exp(math.tanh(1.0))
    second = math.exp(math.tanh(2.0))
    expected = [(1 * first + 2 * second) / (first + second), 4 * second / (first + second)]
    found = pooling(FRAMES, torch.tensor([2]))
    assert found.tolist()[0] == pytest.approx(expected, rel=1e-5)


def test_floors():
    still = torch.full((1, 2, 5), 3.0)
    for pooling, floor in (
        (AttentiveStatisticsPooling(2), math.sqrt(1e-5)),
        (StatisticsPooling(StatisticsPoolingOptions(), 2), math.sqrt(1e-7)),
        (StatisticsPooling(StatisticsPoolingOptions(variance_floor=1e-12), 2), 1e-6),
    ):
        assert pooling(still)[0, 2:].tolist() == pytest.approx([floor] * 2, rel=0.2)


def test_queries_and_heads_by_hand():
    pooling = MultiQueryPooling(MultiQueryPoolingOptions(queries=1, heads=2, bottleneck=3), 4)
    for head in pooling.queries[0]:
        torch.nn.init.zeros_(head.expand.weight)
        torch.nn.init.zeros_(head.expand.bias)
    # With equal weights: the plain mean and deviation (over n) of the channels of each head, in
    # order.
    frames = torch.tensor([[[0.0, 2.0], [1.0, 3.0], [5.0, 5.0], [-4.0, 4.0]]])
    floor = math.sqrt(1e-7)
    assert pooling(frames)[0].tolist() == pytest.approx(
        [1.0, 2.0, 1.0, 1.0, 5.0, 0.0, floor, 4.0], abs=1e-6
    )


@pytest.mark.parametrize(
    "name", [name for name in POOLINGS if not POOLINGS[name].options.takes_layers]
)
def test_lengths(name):
    torch.manual_seed(0)
    pooling = create(POOLINGS[name], POOLINGS[name].options(), channels=16).eval()
    frames = torch.randn(3, 16, 9)
    lengths = torch.tensor([9, 4, 1])
    together = pooling(frames, lengths)
    assert together.shape == (3, pooling.dim)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(
            together[row], pooling(frames[row : row + 1, :, :length])[0], atol=1e-6, rtol=1e-5
        )
    assert torch.isfinite(together).all()
