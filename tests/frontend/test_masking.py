"""SpecAugment: drawn apart from applied, its own masks for every utterance, the same after a resume."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speakernet.frontend.masking import SpecAugment, Stretches, apply_masks, draw_stretches
from speakernet.frontend.options import SpecAugmentOptions
from speakernet.keyed import KeyedRandom


def random_of(rows: int, seed: int = 0) -> KeyedRandom:
    return KeyedRandom(seed, 0, np.arange(rows))


def test_masks_by_hand():
    features = torch.ones(2, 3, 4)
    mels = Stretches(torch.tensor([[0], [2]]), torch.tensor([[1], [0]]))
    frames = Stretches(torch.tensor([[1, 3], [0, 0]]), torch.tensor([[2, 1], [1, 0]]))
    masked = apply_masks(features, mels, frames)
    assert masked[0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert masked[1].tolist() == [[0, 1, 1, 1]] * 3


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 90), st.integers(0, 120), st.integers(0, 3), st.integers(0, 1000))
def test_stretches_fit_and_never_hide_everything(size, max_width, count, seed):
    drawn = draw_stretches(random_of(8, seed), 0, count, max_width, size)
    assert drawn.start.shape == drawn.width.shape == (8, count)
    if count:
        assert drawn.width.max() <= min(max_width, size - 1)
        assert drawn.start.min() >= 0 and (drawn.start + drawn.width).max() <= size


def test_all_widths_and_both_ends_are_reached():
    drawn = draw_stretches(random_of(4000), 0, 1, 3, 6)
    assert set(drawn.width.unique().tolist()) == {0, 1, 2, 3}
    assert int((drawn.start + drawn.width).max()) == 6 and int(drawn.start.min()) == 0


def test_every_utterance_has_its_own_masks_in_training_only():
    augment = SpecAugment(
        SpecAugmentOptions(mel_masks=2, mel_mask_width=10, frame_masks=2, frame_mask_width=30), seed=1
    )
    features = torch.ones(16, 40, 200)
    masked = augment(features)
    patterns = {tuple(row.flatten().tolist()) for row in masked}
    assert len(patterns) > 12
    assert torch.equal(augment.eval()(features), features)


def test_same_seed_same_masks_and_a_resume_goes_on():
    features = torch.ones(4, 40, 200)
    first, second = SpecAugment(SpecAugmentOptions(), seed=7), SpecAugment(SpecAugmentOptions(), seed=7)
    outputs = [first(features) for _ in range(3)]
    assert torch.equal(second(features), outputs[0])
    assert not torch.equal(outputs[0], outputs[1])
    resumed = SpecAugment(SpecAugmentOptions(), seed=7)
    resumed.load_state_dict(second.state_dict())
    assert torch.equal(resumed(features), outputs[1])
    assert not torch.equal(SpecAugment(SpecAugmentOptions(), seed=8)(features), outputs[0])


def test_masks_follow_the_utterance_and_not_the_batch():
    features = torch.ones(4, 40, 200)
    whole, part = SpecAugment(SpecAugmentOptions(), seed=7), SpecAugment(SpecAugmentOptions(), seed=7)
    whole.draws.key_draws(3, np.array([11, 5, 8, 2]))
    masked = whole(features)
    # Another process, which has come there by other passes.
    part(features)
    part.draws.key_draws(3, np.array([8, 11]))
    assert torch.equal(part(features[:2]), masked[[2, 0]])
    part.draws.key_draws(4, np.array([8, 11]))
    assert not torch.equal(part(features[:2]), masked[[2, 0]])


def test_draws_for_other_utterances_than_came_are_refused():
    augment = SpecAugment(SpecAugmentOptions())
    augment.draws.key_draws(0, np.arange(3))
    with pytest.raises(ValueError, match="a pass over 4 utterances, but draws were keyed for 3"):
        augment(torch.ones(4, 40, 200))
