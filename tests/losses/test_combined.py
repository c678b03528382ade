"""Weighted sums of two losses against the separate losses; softmaxproto against golden values."""

import numpy as np
import pytest
import torch

from speakernet.losses.metric import Combined, SoftmaxPrototypical
from speakernet.losses.options import (
    CLASSIFICATIONS,
    METRICS,
    AAMSoftmaxOptions,
    CombinedOptions,
    SoftmaxOptions,
    SoftmaxPrototypicalOptions,
    TripletOptions,
)
from speakernet.options import create

DIM = 6
CLASSES = 9
LABELS = torch.tensor([3, 0, 8, 5])


def embeddings():
    return torch.randn(4, 2, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("classification", CLASSIFICATIONS)
def test_any_two_losses(classification, metric):
    parts = {"classification": CLASSIFICATIONS[classification], "metric": METRICS[metric]}
    options = CombinedOptions(
        **{name: part.options() for name, part in parts.items()},
        classification_weight=0.5,
        metric_weight=3.0,
    )
    loss = Combined(options, DIM, CLASSES, seed=4)
    apart = []
    for name, part in parts.items():
        apart.append(create(part, part.options(), embedding_dim=DIM, num_classes=CLASSES, seed=4))
        apart[-1].load_state_dict(getattr(loss, name).state_dict())
    value, accuracy = loss(embeddings(), LABELS)
    first, expected = apart[0](embeddings().flatten(0, 1), LABELS.repeat_interleave(2))
    second, _ = apart[1](embeddings(), LABELS)
    torch.testing.assert_close(value, 0.5 * first + 3.0 * second)
    assert accuracy == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = loss(embeddings().bfloat16(), LABELS)
    assert inside.dtype == torch.float32 and torch.isfinite(inside)


def test_margin():
    loss = Combined(CombinedOptions(classification=AAMSoftmaxOptions(margin=0.0)), DIM, CLASSES)
    before = loss(embeddings(), LABELS)[0]
    loss.set_margin(0.4)
    assert loss.margin == loss.classification.margin == 0.4
    assert loss(embeddings(), LABELS)[0] > before
    without = CombinedOptions(classification=SoftmaxOptions(), metric=TripletOptions(margin=0.1))
    assert not without.has_margin and Combined(without, DIM, CLASSES).margin is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classification": TripletOptions()}, "triplet"),
        ({"classification": SoftmaxOptions(name="aamsoftmax")}, "SoftmaxOptions.*aamsoftmax"),
        ({"metric": CombinedOptions()}, "combined"),
    ],
)
def test_impossible_combinations(options, message):
    with pytest.raises(ValueError, match=message):
        CombinedOptions(**options)


def test_softmaxproto_golden():
    random = np.random.RandomState(3)
    loss = SoftmaxPrototypical(
        SoftmaxPrototypicalOptions(initial_scale=7.0, initial_bias=-2.0), DIM, CLASSES
    )
    assert loss.angular.scale.item() == 7.0 and loss.angular.bias.item() == -2.0
    state = {
        "softmax.weight": torch.from_numpy(random.standard_normal((9, 6)).astype(np.float32)),
        "softmax.bias": torch.from_numpy(random.standard_normal(9).astype(np.float32)),
        "angular.scale": torch.tensor(8.0),
        "angular.bias": torch.tensor(-3.0),
    }
    loss.load_state_dict(state)
    batch = torch.from_numpy(random.standard_normal((4, 3, 6)).astype(np.float32))
    value, accuracy = loss(batch, LABELS)
    assert value.item() == pytest.approx(9.166277885437012, rel=1e-6)
    assert accuracy.item() == pytest.approx(100 / 12)
