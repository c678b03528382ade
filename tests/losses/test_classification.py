"""Softmax, AM- and AAM-softmax against plain loops and numbers worked out by hand."""

import math

import pytest
import torch

from speakernet.losses.classification import AAMSoftmax, AMSoftmax, Softmax
from speakernet.losses.options import LOSSES, AAMSoftmaxOptions, AMSoftmaxOptions, SoftmaxOptions


def batch(num_classes=7, dim=5, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(size, dim, generator=generator, dtype=torch.float32)
    return embeddings, torch.randint(0, num_classes, (size,), generator=generator)


def loop_loss(embeddings, labels, weight, own_logit, scale):
    """Mean cross entropy with plain Python; `own_logit` maps a cosine to the label's."""
    total = 0.0
    for embedding, label in zip(embeddings.double().tolist(), labels.tolist(), strict=True):
        logits = []
        for row, vector in enumerate(weight.double().tolist()):
            norm = math.hypot(*embedding) * math.hypot(*vector)
            cosine = sum(a * b for a, b in zip(embedding, vector, strict=True)) / norm
            logits.append(scale * (own_logit(cosine) if row == label else cosine))
        total += math.log(sum(math.exp(value) for value in logits)) - logits[label]
    return total / len(labels)


@pytest.mark.parametrize(("margin", "scale"), [(0.0, 1.0), (0.1, 30.0), (0.3, 15.0)])
def test_amsoftmax_against_a_loop(margin, scale):
    embeddings, labels = batch()
    loss = AMSoftmax(AMSoftmaxOptions(margin=margin, scale=scale), 5, 7)
    expected = loop_loss(embeddings, labels, loss.weight.detach(), lambda cosine: cosine - margin, scale)
    assert loss(embeddings, labels)[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("easy_margin", [False, True])
@pytest.mark.parametrize(("margin", "scale"), [(0.0, 1.0), (0.2, 30.0), (1.2, 15.0)])
def test_aamsoftmax_against_a_loop(margin, scale, easy_margin):
    embeddings, labels = batch(size=40)
    loss = AAMSoftmax(AAMSoftmaxOptions(margin=margin, scale=scale, easy_margin=easy_margin), 5, 7)

    def own(cosine):
        angle = math.acos(cosine)
        if easy_margin:
            return math.cos(angle + margin) if cosine > 0 else cosine
        if angle < math.pi - margin:
            return math.cos(angle + margin)
        return cosine - math.sin(margin) * margin

    expected = loop_loss(embeddings, labels, loss.weight.detach(), own, scale)
    assert loss(embeddings, labels)[0].item() == pytest.approx(expected, rel=1e-5)


def test_softmax_by_hand():
    loss = Softmax(SoftmaxOptions(), 2, 2)
    with torch.no_grad():
        loss.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        loss.bias.copy_(torch.tensor([0.0, 1.0]))
    value, accuracy = loss(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0]))
    # logits (1, 1) and (3, 1): -log(1/2) and -log(e²/(e² + 1))
    assert value.item() == pytest.approx((math.log(2) + math.log(1 + math.exp(-2))) / 2, rel=1e-6)
    assert value.ndim == accuracy.ndim == 0


def test_accuracy_is_in_percent():
    loss = AMSoftmax(AMSoftmaxOptions(margin=0.0), 2, 2)
    with torch.no_grad():
        loss.weight.copy_(torch.eye(2))
    embeddings = torch.tensor([[1.0, 0.1], [1.0, 0.2], [1.0, 0.3], [0.0, 1.0]])
    assert loss(embeddings, torch.tensor([0, 0, 1, 1]))[1].item() == 75.0


def test_the_margin_can_be_ramped():
    embeddings, labels = batch()
    for loss in (AMSoftmax(AMSoftmaxOptions(margin=0.0), 5, 7), AAMSoftmax(AAMSoftmaxOptions(margin=0.0), 5, 7)):
        without = loss(embeddings, labels)[0]
        loss.margin = 0.3
        assert loss(embeddings, labels)[0] > without


@pytest.mark.parametrize("name", ["softmax", "amsoftmax", "aamsoftmax"])
def test_float32_inside_autocast(name):
    embeddings, labels = batch()
    loss = LOSSES[name].load()(LOSSES[name].options(), 5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(embeddings.bfloat16(), labels)[0]
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, loss(embeddings.bfloat16().float(), labels)[0], rtol=0, atol=0)


def test_gradient_is_finite_on_and_opposite_to_the_own_vector():
    loss = AAMSoftmax(AAMSoftmaxOptions(), 3, 2)
    with torch.no_grad():
        loss.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    embeddings = torch.tensor([[2.0, 0.0, 0.0], [-2.0, 0.0, 0.0]], requires_grad=True)
    loss(embeddings, torch.tensor([0, 0]))[0].backward()
    assert torch.isfinite(embeddings.grad).all() and torch.isfinite(loss.weight.grad).all()
