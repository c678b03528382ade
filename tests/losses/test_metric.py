"""Metric losses against plain loops and numbers worked out by hand."""

import math

import pytest
import torch

from speakernet.losses import AngularPrototypical, Prototypical


def batch(speakers=5, utterances=3, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(speakers, utterances, dim, generator=generator), torch.arange(speakers)


def cosine(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))


def diagonal_cross_entropy(logits):
    rows = [math.log(sum(map(math.exp, row))) - row[index] for index, row in enumerate(logits)]
    return sum(rows) / len(rows)


def queries_and_prototypes(embeddings):
    queries, prototypes = [], []
    for speaker in embeddings.double().tolist():
        queries.append(speaker[0])
        prototypes.append([sum(column) / len(column) for column in zip(*speaker[1:], strict=True)])
    return queries, prototypes


@pytest.mark.parametrize("utterances", [2, 3, 5])
def test_prototypical_against_a_loop(utterances):
    embeddings, labels = batch(utterances=utterances)
    queries, prototypes = queries_and_prototypes(embeddings)
    expected = diagonal_cross_entropy([[-(math.dist(query, other) ** 2) for other in prototypes] for query in queries])
    assert Prototypical()(embeddings, labels)[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("utterances", [2, 4])
def test_angular_prototypical_against_a_loop(utterances):
    embeddings, labels = batch(utterances=utterances)
    queries, prototypes = queries_and_prototypes(embeddings)
    expected = diagonal_cross_entropy([[10 * cosine(query, other) - 5 for other in prototypes] for query in queries])
    loss = AngularPrototypical()
    assert loss(embeddings, labels)[0].item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(loss.scale.detach(), torch.tensor(10.0))


def test_accuracy_by_hand():
    # Speaker 1's first utterance lies nearer to speaker 0's other one.
    embeddings = torch.tensor([[[0.0], [0.0]], [[0.1], [5.0]]])
    assert Prototypical()(embeddings, torch.arange(2))[1].item() == 50.0


@pytest.mark.parametrize("loss", [Prototypical(), AngularPrototypical()])
def test_one_utterance_a_speaker_is_refused(loss):
    with pytest.raises(ValueError, match=r"at least 2 utterances of each speaker.*nPerSpeaker"):
        loss(torch.randn(4, 1, 8), torch.arange(4))
    with pytest.raises(ValueError, match="at least 2 utterances"):
        loss(torch.randn(4, 8), torch.arange(4))


def test_close_embeddings_far_from_the_origin_keep_their_distances():
    embeddings = torch.tensor([[[1000.0], [1000.0]], [[1000.5], [1000.5]]])
    value = Prototypical()(embeddings, torch.arange(2))[0].item()
    assert value == pytest.approx(math.log(1 + math.exp(-0.25)), rel=1e-4)


def test_float32_inside_autocast():
    embeddings, labels = batch()
    loss = AngularPrototypical()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(embeddings, labels)[0]
    torch.testing.assert_close(inside, loss(embeddings, labels)[0], rtol=0, atol=0)
