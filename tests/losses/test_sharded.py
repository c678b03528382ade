"""Losses with a head that can be sharded, and its shards; `tests/parallel/test_same_meaning.py`
trains them.
"""

import pytest
import torch

from speakernet.losses import LOSSES
from speakernet.losses.options import CombinedOptions, GE2EOptions, SoftmaxOptions
from speakernet.losses.sharded import ClassShard
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
    assert torch.equal(torch.cat([one.take(whole) for one in shares]), whole)
    centres = [RowShare(11, rank, 4, rows_per_unit=3).rows for rank in range(4)]
    assert [len(one) % 3 for one in centres] == [0, 0, 0, 0]
    assert centres[-1].stop == 33
