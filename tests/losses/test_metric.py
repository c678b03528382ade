"""Metric losses against plain loops and numbers worked out by hand."""

import math

import pytest
import torch

from speakernet.losses.metric import (
    GE2E,
    AngularPrototypical,
    Prototypical,
    SupervisedContrastive,
    Triplet,
)
from speakernet.losses.options import (
    AngularPrototypicalOptions,
    GE2EOptions,
    PrototypicalOptions,
    SupervisedContrastiveOptions,
    TripletOptions,
)

ANGULAR = AngularPrototypicalOptions()
PROTOTYPICAL = [Prototypical(PrototypicalOptions()), AngularPrototypical(ANGULAR)]


def batch(speakers=5, utterances=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(speakers, utterances, 4, generator=generator), torch.arange(speakers)


def cosine(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True)) / (
        math.hypot(*left) * math.hypot(*right)
    )


@pytest.mark.parametrize("utterances", [2, 3, 5])
@pytest.mark.parametrize(
    ("loss", "score"),
    [
        (PROTOTYPICAL[0], lambda query, other: -(math.dist(query, other) ** 2)),
        (PROTOTYPICAL[1], lambda query, other: 10 * cosine(query, other) - 5),
    ],
    ids=["prototypical", "angular"],
)
def test_prototypical_against_a_loop(loss, score, utterances):
    embeddings, labels = batch(utterances=utterances)
    queries = []
    prototypes = []
    for speaker in embeddings.double().tolist():
        queries.append(speaker[0])
        prototypes.append([sum(column) / len(column) for column in zip(*speaker[1:], strict=True)])
    logits = [[score(query, other) for other in prototypes] for query in queries]
    rows = [math.log(sum(map(math.exp, row))) - row[index] for index, row in enumerate(logits)]
    assert loss(embeddings, labels)[0].item() == pytest.approx(sum(rows) / len(rows), rel=1e-5)


def test_accuracy_by_hand():
    # Speaker 1's first utterance is nearer to speaker 0's other one.
    embeddings = torch.tensor([[[0.0], [0.0]], [[0.1], [5.0]]])
    assert Prototypical(PrototypicalOptions())(embeddings, torch.arange(2))[1].item() == 50.0


@pytest.mark.parametrize(
    ("loss", "shape", "words"),
    [
        (PROTOTYPICAL[0], (4, 1, 8), "at least 2"),
        (PROTOTYPICAL[1], (4, 8), "at least 2"),
        (Triplet(TripletOptions()), (4, 3, 8), "3 of 4"),
    ],
)
def test_wrong_numbers_of_utterances(loss, shape, words):
    with pytest.raises(ValueError, match=words):
        loss(torch.randn(shape), torch.arange(4))


@pytest.mark.parametrize("utterances", [2, 3, 5])
def test_ge2e_against_a_loop(utterances):
    embeddings, labels = batch(utterances=utterances)
    speakers = embeddings.double().tolist()
    rows = []
    own = []
    for index, speaker in enumerate(speakers):
        for place, utterance in enumerate(speaker):
            logits = []
            for other_index, other in enumerate(speakers):
                members = [
                    member
                    for row, member in enumerate(other)
                    if (other_index, row) != (index, place)
                ]
                centroid = [sum(column) / len(members) for column in zip(*members, strict=True)]
                logits.append(10 * max(cosine(utterance, centroid), 1e-6) - 5)
            rows.append(math.log(sum(map(math.exp, logits))) - logits[index])
            own.append(logits.index(max(logits)) == index)
    value, accuracy = GE2E(GE2EOptions())(embeddings, labels)
    assert value.item() == pytest.approx(sum(rows) / len(rows), rel=1e-5)
    assert accuracy.item() == pytest.approx(100 * sum(own) / len(own))


@pytest.mark.parametrize("utterances", [2, 3])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_supervised_contrastive_against_a_loop(utterances, temperature):
    embeddings, labels = batch(utterances=utterances)
    flat = [
        (index, row)
        for index, speaker in enumerate(embeddings.double().tolist())
        for row in speaker
    ]
    total = 0.0
    right = 0
    for place, (speaker, anchor) in enumerate(flat):
        others = [
            (cosine(anchor, row) / temperature, who)
            for at, (who, row) in enumerate(flat)
            if at != place
        ]
        everything = math.log(sum(math.exp(score) for score, _ in others))
        positives = [score - everything for score, who in others if who == speaker]
        total -= sum(positives) / len(positives)
        right += max(others)[1] == speaker
    value, accuracy = SupervisedContrastive(SupervisedContrastiveOptions(temperature=temperature))(
        embeddings, labels
    )
    assert value.item() == pytest.approx(total / len(flat), rel=1e-5)
    assert accuracy.item() == pytest.approx(100 * right / len(flat))


def unit_distances(embeddings):
    unit = torch.nn.functional.normalize(embeddings, dim=2).double().tolist()
    return [[math.dist(left[0], right[1]) ** 2 for right in unit] for left in unit]


def test_hardest_triplets_against_a_loop():
    embeddings, labels = batch(speakers=6, utterances=2)
    total = 0.0
    for index, row in enumerate(unit_distances(embeddings)):
        total += max(0.0, row[index] - min(row[:index] + row[index + 1 :]) + 0.3)
    loss = Triplet(TripletOptions(margin=0.3, hard_probability=1.0, hard_rank=0))
    assert loss(embeddings, labels)[0].item() == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize(
    ("rank", "probability"), [(0, 1.0), (2, 1.0), (50, 1.0), (2, 0.0), (-1, 0.5)]
)
def test_mined_negatives(rank, probability):
    embeddings, _ = batch(speakers=7, utterances=2)
    distances = torch.tensor(unit_distances(embeddings))
    loss = Triplet(TripletOptions(margin=0.5, hard_probability=probability, hard_rank=rank))
    drawn = torch.stack([loss.mine(distances) for _ in range(400)])
    for index, row in enumerate(distances.tolist()):
        others = sorted((value, other) for other, value in enumerate(row) if other != index)
        allowed = {
            other for _, other in others[: rank + 1 if rank >= 0 and probability == 1.0 else None]
        }
        if rank < 0:
            allowed = {
                other for value, other in others if row[index] < value < row[index] + 0.5
            } or allowed
        assert set(drawn[:, index].tolist()) == allowed


def test_triplet_draws_resume():
    distances = torch.tensor(unit_distances(batch(speakers=30, utterances=2)[0]))
    straight = Triplet(TripletOptions(), seed=4)
    stopped = Triplet(TripletOptions(), seed=4)
    first = straight.mine(distances)
    assert torch.equal(stopped.mine(distances), first)
    resumed = Triplet(TripletOptions(), seed=9)
    resumed.load_state_dict(stopped.state_dict())
    assert torch.equal(resumed.mine(distances), straight.mine(distances))
