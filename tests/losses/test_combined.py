"""Weighted sums of two losses against a plain loop and against the two apart; softmaxproto as it was."""

import math

import numpy as np
import pytest
import torch

from speakernet.losses.metric import Combined, SoftmaxPrototypical
from speakernet.losses.options import (
    CLASSIFICATIONS,
    METRICS,
    AAMSoftmaxOptions,
    AngularPrototypicalOptions,
    CombinedOptions,
    SoftmaxOptions,
    SoftmaxPrototypicalOptions,
    TripletOptions,
)
from speakernet.options import create

DIM, CLASSES = 6, 9
LABELS = torch.tensor([3, 0, 8, 5])


def embeddings(utterances=2):
    return torch.randn(4, utterances, DIM, generator=torch.Generator().manual_seed(0))


def cosine(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))


def cross_entropy(logits, own):
    return math.log(sum(map(math.exp, logits))) - logits[own]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 2.0), (1.0, 0.0)])
def test_aam_and_angular_prototypical_against_a_loop(weights):
    options = CombinedOptions(
        classification=AAMSoftmaxOptions(margin=0.3, scale=12.0),
        classification_weight=weights[0],
        metric=AngularPrototypicalOptions(initial_scale=8.0, initial_bias=-2.0),
        metric_weight=weights[1],
    )
    loss = Combined(options, DIM, CLASSES)
    batch, head = embeddings(3).double().tolist(), loss.classification.weight.detach().double().tolist()
    first = 0.0
    for speaker, label in zip(batch, LABELS.tolist(), strict=True):
        for utterance in speaker:
            logits = [12 * cosine(utterance, row) for row in head]
            angle = math.acos(logits[label] / 12)
            logits[label] = 12 * (
                math.cos(angle + 0.3) if angle < math.pi - 0.3 else math.cos(angle) - 0.3 * math.sin(0.3)
            )
            first += cross_entropy(logits, label) / 12
    prototypes = [np.mean(speaker[1:], axis=0).tolist() for speaker in batch]
    second = 0.0
    for row, speaker in enumerate(batch):
        second += cross_entropy([8 * cosine(speaker[0], one) - 2 for one in prototypes], row) / 4
    expected = weights[0] * first + weights[1] * second
    assert loss(embeddings(3), LABELS)[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("classification", CLASSIFICATIONS)
def test_any_two_losses(classification, metric):
    parts = {"classification": CLASSIFICATIONS[classification], "metric": METRICS[metric]}
    options = CombinedOptions(
        **{name: part.options() for name, part in parts.items()}, classification_weight=0.5, metric_weight=3.0
    )
    loss = Combined(options, DIM, CLASSES, seed=4)
    apart = {
        name: create(part, part.options(), embedding_dim=DIM, num_classes=CLASSES, seed=4)
        for name, part in parts.items()
    }
    for name, part in apart.items():
        part.load_state_dict(getattr(loss, name).state_dict())
    value, accuracy = loss(embeddings(), LABELS)
    first, expected = apart["classification"](embeddings().flatten(0, 1), LABELS.repeat_interleave(2))
    second, _ = apart["metric"](embeddings(), LABELS)
    torch.testing.assert_close(value, 0.5 * first + 3.0 * second)
    assert accuracy == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = loss(embeddings().bfloat16(), LABELS)
    assert inside.dtype == torch.float32 and torch.isfinite(inside)


def test_margin():
    loss = Combined(CombinedOptions(classification=AAMSoftmaxOptions(margin=0.0)), DIM, CLASSES)
    before = loss(embeddings(), LABELS)[0]
    loss.margin = 0.4
    assert loss.margin == loss.classification.margin == 0.4
    assert loss(embeddings(), LABELS)[0] > before
    without = CombinedOptions(classification=SoftmaxOptions(), metric=TripletOptions(margin=0.1))
    assert not hasattr(without, "margin") and not hasattr(Combined(without, DIM, CLASSES), "margin")
    assert CombinedOptions().with_margin(0.35).margin == 0.35
    assert CombinedOptions().with_margin(0.35).metric == CombinedOptions().metric


def test_one_utterance_a_speaker_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        Combined(CombinedOptions(), DIM, CLASSES)(torch.randn(4, 1, DIM), LABELS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": SoftmaxOptions()}, "metric"),
        ({"classification": TripletOptions()}, "triplet"),
        ({"classification": SoftmaxOptions(name="aamsoftmax")}, "SoftmaxOptions.*aamsoftmax"),
        ({"metric": CombinedOptions()}, "combined"),
        ({"metric_weight": -1.0}, "metric_weight"),
    ],
)
def test_impossible_combinations(options, message):
    with pytest.raises(ValueError, match=message):
        CombinedOptions(**options)


def test_softmaxproto_golden():
    random = np.random.RandomState(3)
    loss = SoftmaxPrototypical(SoftmaxPrototypicalOptions(initial_scale=7.0, initial_bias=-2.0), DIM, CLASSES)
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
