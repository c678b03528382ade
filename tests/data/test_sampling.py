"""Samplers: the composition of batches, counts, and epochs that depend only on labels, seed and
epoch.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from speakernet.data import sampling
from speakernet.data.joined import plan_mixture
from speakernet.data.options import DataOptions
from speakernet.data.sampling import BalancedSampler, ShuffledSampler, Voices, rank_share
from speakernet.random import KeyedRandom


def test_shuffled():
    sampler = ShuffledSampler(np.zeros(103, np.int32), DataOptions(batch_size=10), seed=1)
    plan = sampler.epoch(0)
    assert len(plan) == 10 and plan.num_left_out == 3
    assert len(set(plan.rows.tolist())) == 100
    assert_array_equal(plan.rows, sampler.epoch(0).rows)
    assert not np.array_equal(plan.rows, sampler.epoch(1).rows)
    with pytest.raises(ValueError, match="103 usable utterances"):
        ShuffledSampler(np.zeros(103, np.int32), DataOptions(batch_size=104), seed=1)


def test_limit_per_speaker():
    labels = np.repeat(np.arange(3), [2, 10, 5]).astype(np.int32)
    sampler = ShuffledSampler(
        labels, DataOptions(batch_size=2, max_utterances_per_speaker=4), seed=1
    )
    plans = [sampler.epoch(epoch) for epoch in range(2)]
    for plan in plans:
        assert (
            np.bincount(labels[plan.rows]).tolist() == [2, 4, 4]
            and len(set(plan.rows.tolist())) == 10
        )
        assert plan.num_left_out == 7
    assert set(plans[0].rows.tolist()) != set(plans[1].rows.tolist())
    with pytest.raises(ValueError, match="10 usable utterances"):
        ShuffledSampler(labels, DataOptions(batch_size=11, max_utterances_per_speaker=4), seed=1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=12),
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
)
def test_balanced_batches(counts, unit, size, by_rounds):
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    options = {"utterances_per_speaker": unit, "batch_size": size}
    if sum(count >= unit for count in counts) < size:
        with pytest.raises(ValueError, match=f"{size} speakers with {unit} "):
            BalancedSampler(labels, DataOptions(**options), seed=3)
        return
    before = sampling.EXACT_WORK
    sampling.EXACT_WORK = 0 if by_rounds else sampling.EXACT_WORK
    try:
        plan = BalancedSampler(labels, DataOptions(**options), seed=3).epoch(0)
    finally:
        sampling.EXACT_WORK = before
    groups = np.array(counts) // unit
    # The largest possible number of batches: no speaker is used more often than there are batches.
    best = max(
        b for b in range(int(groups.sum()) // size + 1) if np.minimum(groups, b).sum() >= b * size
    )
    assert len(plan) == best or by_rounds
    batches = labels[plan.rows].reshape(len(plan), size, unit)
    for batch in batches:
        assert (batch == batch[:, :1]).all(), "row = speaker * K + utterance"
        assert len(set(batch[:, 0].tolist())) == size
    assert len(set(plan.rows.tolist())) == len(plan.rows)
    assert plan.num_left_out == len(labels) - len(plan.rows)


def test_balanced_limits(caplog):
    labels = np.repeat(np.arange(4), [1, 10, 10, 10]).astype(np.int32)
    options = DataOptions(utterances_per_speaker=2, batch_size=3, max_utterances_per_speaker=5)
    sampler = BalancedSampler(labels, options, seed=1)
    assert "1 speaker with fewer than 2" in caplog.text
    assert np.bincount(labels[sampler.epoch(0).rows]).tolist() == [0, 4, 4, 4]
    with pytest.raises(ValueError, match="max_utterances_per_speaker"):
        BalancedSampler(
            labels, options.model_copy(update={"max_utterances_per_speaker": 1}), seed=1
        )


def test_drawn_lengths():
    options = DataOptions(batch_size=40, crop_frames=200, crop_frames_max=400)
    plan = ShuffledSampler(np.zeros(1000, np.int32), options, seed=1).epoch(0)
    sizes = np.diff(plan.bounds)
    assert (
        set(plan.crop_frames.tolist()) <= set(range(200, 401))
        and len(set(plan.crop_frames.tolist())) > 5
    )
    audio = sizes * plan.crop_frames
    assert audio.max() <= 40 * 200 and audio.min() > 40 * 200 - 401
    assert plan.bounds[-1] == len(plan.rows) > 950


@pytest.mark.parametrize("has_corpora", [False, True])
def test_balanced_batches_of_drawn_lengths(has_corpora):
    labels = np.arange(360, dtype=np.int32) // 30
    rows = np.arange(360)
    options = DataOptions(
        batch_size=8, utterances_per_speaker=2, crop_frames=200, crop_frames_max=400
    )
    sampler = BalancedSampler(labels, options, seed=1)
    if has_corpora:
        half = options.model_copy(update={"batch_size": 4})
        parts = {"a": rows[:180], "b": rows[180:]}
        corpora = {
            name: BalancedSampler(labels, half, seed=1, eligible=part)
            for name, part in parts.items()
        }
        sampler.divide(lambda epoch: plan_mixture(corpora, epoch))
    plan = sampler.epoch(0)
    batches = [
        labels[rows_of_batch % 360][::2].tolist()
        for rows_of_batch in np.split(plan.rows, plan.bounds[1:-1])
    ]
    assert len({len(batch) for batch in batches}) > 2 and len(np.unique(plan.rows)) > 300
    assert all(len(set(batch)) == len(batch) for batch in batches)


@pytest.mark.parametrize(
    ("unit", "world_size", "sizes"), [(1, 3, [2, 2, 3]), (2, 3, [4, 4, 6]), (3, 7, [3] * 7)]
)
def test_shares_of_ranks(unit, world_size, sizes):
    """Seven units of a batch, none of them cut; as many ranks as units is the most."""
    options = DataOptions(utterances_per_speaker=unit, batch_size=7)
    labels = np.repeat(np.arange(8), 6).astype(np.int32)
    plan = BalancedSampler(labels, options, seed=1).epoch(0)
    for batch in range(len(plan)):
        shares = [rank_share(plan, batch, unit, rank, world_size) for rank in range(world_size)]
        assert [share.stop - share.start for share in shares] == sizes
        assert (shares[0].start, shares[-1].stop) == tuple(plan.bounds[batch : batch + 2])


def test_keyed_numbers():
    rows = np.arange(1000)
    whole = KeyedRandom(1, 2, rows).uniform(5, 3)
    assert_array_equal(whole[[7, 3]], KeyedRandom(1, 2, np.array([7, 3])).uniform(5, 3))
    others = [KeyedRandom(*keys, rows).uniform(5, 3) for keys in ((1, 3), (2, 2))]
    for other in (*others, KeyedRandom(1, 2, rows).uniform(6, 3)):
        assert abs(np.corrcoef(whole.ravel(), other.ravel())[0, 1]) < 0.08
    counts, _ = np.histogram(whole, 10, (0, 1))
    assert counts.min() > 230 and counts.sum() == 3000


SPEEDS = tuple(Fraction(tenths, 10) for tenths in (10, 9, 11, 8, 12, 7, 13, 6, 14))


def shuffled(voices, batch_size=32):
    return ShuffledSampler(
        np.zeros(960, np.int32), DataOptions(batch_size=batch_size), seed=1, voices=voices
    )


def test_voice_depends_on_the_row():
    plans = [shuffled(Voices(SPEEDS), batch_size=size).epoch(3) for size in (8, 32)]
    by_row = [plan.voices[np.argsort(plan.rows)] for plan in plans]
    assert_array_equal(*by_row)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_share_as_recorded(share):
    plan = shuffled(Voices(SPEEDS, real_share=share)).epoch(0)
    real = (plan.voices == 0).reshape(len(plan), 32)
    assert np.abs(real.sum(axis=1) - 32 * share).max() < 1
    assert real.sum() == round(960 * share)
    if 0 < share < 1:
        # The recorded voice's positions in a batch vary, and the other eight voices are equally
        # frequent.
        assert 0.5 * share < real[:, 0].mean() < 2 * share
        assert np.bincount(plan.voices)[1:].min() > 960 * (1 - share) / 16


def test_voices_of_compared_utterances():
    labels = np.repeat(np.arange(12), 6).astype(np.int32)
    options = DataOptions(batch_size=4, utterances_per_speaker=3)
    sampler = BalancedSampler(labels, options, seed=1, voices=Voices(SPEEDS, real_share=0.5))
    plan = sampler.epoch(0)
    groups = plan.voices.reshape(-1, 3)
    assert (groups == groups[:, :1]).all() and len(set(groups[:, 0].tolist())) > 2
    assert ((groups[:, 0] == 0).reshape(-1, 4).sum(axis=1) == 2).all()
