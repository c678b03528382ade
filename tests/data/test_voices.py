"""Voices: how many classes there are, which is whose, and how often each is heard."""

from fractions import Fraction

import numpy as np
import pytest

from speakernet.data.options import DataOptions
from speakernet.data.sampling import BalancedSampler, Sampler, ShuffledSampler, Voices

NINE = {"speeds": (Fraction(1), Fraction(9, 10), Fraction(11, 10)), "warps": (1.0, 0.92, 1.08)}


def shuffled(voices: Voices, num_rows: int = 960, batch_size: int = 32) -> Sampler:
    return ShuffledSampler(np.zeros(num_rows, np.int32), DataOptions(batch_size=batch_size), seed=1, voices=voices)


def test_every_voice_of_every_speaker_has_a_class_of_its_own() -> None:
    voices = Voices(**NINE)
    labels, heard = (part.ravel() for part in np.meshgrid(np.arange(150), np.arange(len(voices))))
    # As small as arrays get: 150 speakers in voice 1 do not fit into a byte.
    classes = voices.classes_of(labels.astype(np.uint8), heard.astype(np.int8), 150)
    assert len(voices) == 9
    assert sorted(classes.tolist()) == list(range(1350)) and classes.dtype == np.int64
    # What three speeds alone have always had.
    assert Voices(speeds=NINE["speeds"]).classes_of(np.array([7]), np.array([2]), 150).tolist() == [307]


def test_a_voice_is_that_of_its_row_whatever_the_batch() -> None:
    plans = [shuffled(Voices(**NINE), batch_size=size).epoch(3) for size in (8, 32)]
    by_row = [plan.voices[np.argsort(plan.rows)] for plan in plans]
    np.testing.assert_array_equal(*by_row)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_share_as_recorded_holds_in_every_batch(share: float) -> None:
    plan = shuffled(Voices(**NINE, real_share=share)).epoch(0)
    real = (plan.voices == 0).reshape(len(plan), 32)
    assert np.abs(real.sum(axis=1) - 32 * share).max() < 1
    assert real.sum() == round(960 * share)
    if 0 < share < 1:
        # Not always the first of a batch, and the other eight voices are alike.
        assert 0.5 * share < real[:, 0].mean() < 2 * share
        assert np.bincount(plan.voices)[1:].min() > 960 * (1 - share) / 16


def test_the_tail_is_as_recorded() -> None:
    sampler = shuffled(Voices(**NINE, real_share=0.5, real_from=2))
    assert [bool(sampler.epoch(epoch).voices.any()) for epoch in range(4)] == [True, True, False, False]


def test_utterances_that_are_compared_share_their_voice() -> None:
    labels = np.repeat(np.arange(12), 6).astype(np.int32)
    options = DataOptions(batch_size=4, utterances_per_speaker=3)
    sampler = BalancedSampler(labels, options, seed=1, voices=Voices(**NINE, real_share=0.5))
    plan = sampler.epoch(0)
    groups = plan.voices.reshape(-1, 3)
    assert (groups == groups[:, :1]).all() and len(set(groups[:, 0].tolist())) > 2
    assert ((groups[:, 0] == 0).reshape(-1, 4).sum(axis=1) == 2).all()


def test_the_share_at_other_speeds_is_what_is_drawn() -> None:
    for voices in (Voices(**NINE), Voices(**NINE, real_share=0.5), Voices(warps=(1.0, 1.1)), Voices()):
        drawn = voices.draw(1, 0, np.arange(6400), np.arange(0, 6401, 64))
        share = np.mean(drawn % len(voices.speeds) != 0)
        assert share == pytest.approx(voices.share_at_other_speeds, abs=0.03)
