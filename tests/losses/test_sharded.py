"""Losses with a head that can be sharded, and its shards; `tests/parallel/test_same_meaning.py`
trains them.
"""

import pytest
import torch
from torch.nn import functional

from speakernet.losses import LOSSES, sharded
from speakernet.losses.classification import AMSoftmax
from speakernet.losses.options import (
    AAMSoftmaxOptions,
    AMSoftmaxOptions,
    CombinedOptions,
    GE2EOptions,
    SoftmaxOptions,
)
from speakernet.losses.sharded import MIN_SHARDED_CLASSES, ClassShard
from speakernet.parallel.sharding import RowShare
from tests.losses.sharded_heads import HEADS


def test_sharding_needs_a_head():
    compared = {options.name for options in HEADS}
    assert {name for name, part in LOSSES.items() if part.options().has_head} == compared
    for part in LOSSES.values():
        assert list(part.options(sharded="auto").problems()) == []
        problems = [field for field, _ in part.options(sharded="on").problems()]
        assert problems == ([] if part.options.has_head else ["sharded"])
    assert list(CombinedOptions(metric=GE2EOptions()).problems()) == []
    within = CombinedOptions(classification=SoftmaxOptions(sharded="on"))
    assert [field for field, message in within.problems() if "loss.sharded" in message] == [
        "classification"
    ]


def test_shards_make_the_whole():
    with pytest.raises(ValueError, match=r"3 classes .* 4"):
        ClassShard(3, 0, 4)
    whole = torch.arange(22.0).reshape(11, 2)
    shares = [RowShare(11, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([share.take(whole) for share in shares]), whole)
    centres = [RowShare(11, rank, 4, rows_per_unit=3).rows for rank in range(4)]
    assert [len(rows) % 3 for rows in centres] == [0, 0, 0, 0]
    assert centres[-1].stop == 33


class Whole(AMSoftmax):
    """A plug-in's loss that takes a label for a column."""

    def logits(self, embeddings, labels):
        scores = functional.linear(
            functional.normalize(embeddings), functional.normalize(self.weight)
        )
        return self.scale * (scores - self.margin * functional.one_hot(labels, scores.shape[1]))


class Shifted(AMSoftmax):
    """The loss of docs/components.md."""

    def logits(self, embeddings, labels):
        cosine = functional.linear(
            functional.normalize(embeddings), functional.normalize(self.weight)
        )
        own = self.classes.own(labels)
        return self.scale * own.replaced(cosine, own.of(cosine) - self.margin)


class Outside(Shifted):
    """Computes a loss of its own from whole rows."""

    def forward(self, embeddings, labels):
        logits = self.logits(embeddings, labels)
        return functional.cross_entropy(logits, labels), logits.argmax(1).eq(labels).float().mean()


@pytest.mark.parametrize(("kind", "can"), [(Whole, False), (Shifted, True), (Outside, False)])
def test_losses_of_plugins(kind, can, monkeypatch):
    options = AMSoftmaxOptions(name="mine")
    loss = kind(options, 2, MIN_SHARDED_CLASSES)
    assert sharded.can_be_sharded(loss) is can
    monkeypatch.setattr(sharded.distributed, "world_size", lambda: 2)
    shards = []
    monkeypatch.setattr(sharded, "shard", lambda *arguments: shards.append(arguments))
    sharded.shard_head(options, loss)
    assert len(shards) == can
    if not can:
        with pytest.raises(ValueError, match=r"the loss mine .*self\.classes"):
            sharded.shard_head(options.model_copy(update={"sharded": "on"}), loss)


@pytest.mark.parametrize(
    ("options", "speakers", "processes", "is_shared", "reason"),
    [
        (
            AAMSoftmaxOptions(),
            sharded.MIN_SHARDED_CLASSES,
            2,
            True,
            "20,000 classes on 2 processes",
        ),
        (AAMSoftmaxOptions(), sharded.MIN_SHARDED_CLASSES - 1, 64, False, "from 20,000"),
        (AAMSoftmaxOptions(sharded="off"), 10**6, 8, False, "switched off"),
        (GE2EOptions(), 0, 8, False, "no head"),
    ],
)
def test_choices_have_reasons(options, speakers, processes, is_shared, reason):
    choice = sharded.choose_sharding(options, speakers, processes)
    assert choice.value is is_shared and reason in choice.reason
