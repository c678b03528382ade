"""Softmax, AM- and AAM-softmax against plain loops and numbers worked out by hand."""

import math

import pytest
import torch

from speakernet.losses.classification import AAMSoftmax, AMSoftmax
from speakernet.losses.options import (
    AAMSoftmaxOptions,
    AMSoftmaxOptions,
    HAMSoftmaxOptions,
    SphereFace2Options,
)
from speakernet.losses.other_heads import HAMSoftmax, SphereFace2


def batch(size=6):
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(size, 5, generator=generator)
    return embeddings, torch.randint(0, 7, (size,), generator=generator)


def rows_of(tensor):
    return tensor.detach().double().tolist()


def cosines_of(loss, embedding):
    """Cosines of an embedding and each speaker, one by one."""
    cosines = []
    for vector in rows_of(loss.weight):
        product = sum(a * b for a, b in zip(embedding, vector, strict=True))
        cosines.append(product / (math.hypot(*embedding) * math.hypot(*vector)))
    return cosines


def cross_entropy(logits, label):
    return math.log(sum(map(math.exp, logits))) - logits[label]


def check_mean(loss, embeddings, labels, value_of, rel=1e-5):
    """The loss is the mean of `value_of` each embedding and label, in plain Python."""
    pairs = zip(rows_of(embeddings), labels.tolist(), strict=True)
    values = [value_of(embedding, label) for embedding, label in pairs]
    expected = pytest.approx(sum(values) / len(values), rel=rel)
    assert loss(embeddings, labels)[0].item() == expected


def widened(cosine, margin):
    """The cosine of an angle wider by the margin, with the common continuation."""
    angle = math.acos(cosine)
    return (
        math.cos(angle + margin) if angle < math.pi - margin else cosine - math.sin(margin) * margin
    )


@pytest.mark.parametrize(("margin", "scale"), [(0.0, 1.0), (0.1, 30.0), (0.3, 15.0)])
def test_amsoftmax_against_a_loop(margin, scale):
    loss = AMSoftmax(AMSoftmaxOptions(margin=margin, scale=scale), 5, 7)

    def value_of(embedding, label):
        cosines = cosines_of(loss, embedding)
        cosines[label] -= margin
        return cross_entropy([scale * cosine for cosine in cosines], label)

    check_mean(loss, *batch(), value_of)


@pytest.mark.parametrize("easy_margin", [False, True])
@pytest.mark.parametrize(("margin", "scale"), [(0.0, 1.0), (0.2, 30.0), (1.2, 15.0)])
def test_aamsoftmax_against_a_loop(margin, scale, easy_margin):
    loss = AAMSoftmax(AAMSoftmaxOptions(margin=margin, scale=scale, easy_margin=easy_margin), 5, 7)

    def value_of(embedding, label):
        cosines = cosines_of(loss, embedding)
        if not easy_margin:
            cosines[label] = widened(cosines[label], margin)
        elif cosines[label] > 0:
            cosines[label] = math.cos(math.acos(cosines[label]) + margin)
        return cross_entropy([scale * cosine for cosine in cosines], label)

    check_mean(loss, *batch(40), value_of)


@pytest.mark.parametrize(
    ("loss", "weight", "embeddings"),
    [
        (
            AAMSoftmax(AAMSoftmaxOptions(), 3, 2),
            [[1.0, 0, 0], [0, 1, 0]],
            [[2.0, 0, 0], [-2, 0, 0]],
        ),
        (
            HAMSoftmax(HAMSoftmaxOptions(), 3, 2),
            [[0.5, 0, 0], [0, 2, 0]],
            [[0.0, 0, 0], [0.5, 0, 0], [0, 1e6, 0]],
        ),
    ],
    ids=["on and opposite to the own vector", "at the origin, on a centre, far out"],
)
def test_finite_gradients(loss, weight, embeddings):
    loss.weight.data.copy_(torch.tensor(weight))
    embeddings = torch.tensor(embeddings, requires_grad=True)
    loss(embeddings, torch.zeros(len(embeddings), dtype=torch.long))[0].backward()
    assert torch.isfinite(embeddings.grad).all() and torch.isfinite(loss.weight.grad).all()


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("centers", [1, 3])
def test_sub_centers_and_inter_top_k_against_a_loop(margin, centers):
    options = AAMSoftmaxOptions(
        margin=margin, scale=20.0, sub_centers=centers, inter_top_k=2, inter_top_k_penalty=0.1
    )
    loss = AAMSoftmax(options, 5, 7)
    # 0.1 at a margin of 0.2, as in wespeaker: mp * margin / 0.2
    penalty = 0.1 * margin / 0.2

    def value_of(embedding, label):
        of_centers = cosines_of(loss, embedding)
        cosines = [max(of_centers[row * centers : (row + 1) * centers]) for row in range(7)]
        others = sorted({*range(7)} - {label}, key=lambda row: cosines[row])
        for row in others[-2:]:
            cosines[row] = math.cos(math.acos(cosines[row]) - penalty)
        cosines[label] = widened(cosines[label], margin)
        return cross_entropy([20 * cosine for cosine in cosines], label)

    check_mean(loss, *batch(20), value_of)


@pytest.mark.parametrize("margin_type", ["A", "C"])
@pytest.mark.parametrize(("margin", "exponent"), [(0.0, 1.0), (0.2, 3.0), (1.0, 2.5)])
def test_sphereface2_against_a_loop(margin_type, margin, exponent):
    options = SphereFace2Options(
        margin=margin, scale=8.0, margin_type=margin_type, exponent=exponent
    )
    loss = SphereFace2(options, 5, 7)
    loss.bias.data.fill_(-0.5)

    def spread(z):
        return 2 * ((z + 1) / 2) ** exponent - 1

    def answer(cosine, sign):
        if margin_type == "C":
            return 8 * (spread(cosine) - sign * margin) - 0.5
        angle = math.acos(cosine)
        if sign > 0 and angle >= math.pi - margin:
            return 8 * (2 * max(0.0, (cosine - 1 + math.cos(margin) + 1) / 2) ** exponent - 1) - 0.5
        return 8 * spread(math.cos(angle + sign * margin)) - 0.5

    def value_of(embedding, label):
        total = 0.0
        for row, cosine in enumerate(cosines_of(loss, embedding)):
            sign, weight = (1, 0.7) if row == label else (-1, 0.3)
            total += weight * math.log(1 + math.exp(-sign * answer(cosine, sign)))
        return total

    check_mean(loss, *batch(20), value_of)


@pytest.mark.parametrize("curvature", [1.0, 3.0])
@pytest.mark.parametrize("margin", [0.0, 0.4])
def test_hamsoftmax_against_a_loop(curvature, margin):
    embeddings, labels = batch(20)
    # Some are inside the ball, some outside.
    embeddings = embeddings * torch.linspace(0.05, 2.0, 20).unsqueeze(1)
    loss = HAMSoftmax(HAMSoftmaxOptions(margin=margin, scale=5.0, curvature=curvature), 5, 7)
    torch.nn.init.normal_(loss.weight, std=0.3, generator=torch.Generator().manual_seed(1))

    def inside(point):
        return [
            value * min(1.0, (1 - 1e-5) / curvature**0.5 / math.hypot(*point)) for value in point
        ]

    def value_of(embedding, label):
        here = inside(embedding)
        logits = []
        for vector in rows_of(loss.weight):
            there = inside(vector)
            from_edge = (1 - math.hypot(*here) ** 2) * (1 - math.hypot(*there) ** 2)
            cosh = 1 + 2 * math.dist(here, there) ** 2 / max(from_edge, 1e-5)
            logits.append(-5.0 * math.acosh(cosh))
        logits[label] -= 5.0 * margin
        return cross_entropy(logits, label)

    check_mean(loss, embeddings, labels, value_of, rel=1e-4)
