"""SpecAugment and dither: drawn by utterance, resumed, never in evaluation; values by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from speakernet.frontend.options import FEATURES, SpecAugmentOptions
from speakernet.frontend.perturbation import (
    KeyedDraws,
    SpecAugment,
    keep_draws_eager,
    normal_noise,
    place_stretches,
)
from speakernet.options import create
from speakernet.random import KeyedRandom


def random_of(rows, seed=0):
    return KeyedRandom(seed, 0, np.arange(rows))


def spec_augment(seed=7, **options):
    return SpecAugment(SpecAugmentOptions(**options), seed=seed)


def announce(draws, key, rows):
    """As the step does."""
    draws.announce(torch.from_numpy(draws.draw(key, np.array(rows))))


@pytest.fixture(scope="module")
def speech():
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(4, 8000, generator=generator) * torch.linspace(0.1, 1, 8000)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 90), st.integers(0, 120), st.integers(0, 3), st.integers(0, 1000))
def test_masked_stretches_fit(size, max_width, count, seed):
    numbers = torch.from_numpy(random_of(8, seed).uniform(0, 2 * count))
    start, width = place_stretches(numbers, max_width, size)
    assert start.shape == width.shape == (8, count)
    if count:
        assert width.max() <= min(max_width, size - 1)
        assert start.min() >= 0 and (start + width).max() <= size


def test_masks_by_utterance():
    augment = spec_augment(1, mel_masks=2, mel_mask_width=10, frame_masks=2, frame_mask_width=30)
    features = torch.ones(16, 40, 200)
    assert len({tuple(row.flatten().tolist()) for row in augment(features)}) > 12
    assert torch.equal(augment.eval()(features), features)


def test_share_of_masked_utterances():
    """Those that are masked have the masks that they would have if all were."""
    features = torch.ones(400, 40, 60)
    everywhere = spec_augment()(features)
    chosen = spec_augment(spec_augment_probability=0.6)(features)
    is_masked = (chosen != features).flatten(1).any(dim=1)
    # Six standard deviations of 400 draws; a mask may also have no width.
    assert abs(is_masked.float().mean() - 0.6) < 0.15
    assert torch.equal(chosen[is_masked], everywhere[is_masked])
    assert torch.equal(spec_augment(spec_augment_probability=0)(features), features)


def test_masks_resume():
    features = torch.ones(4, 40, 200)
    first = spec_augment()
    second = spec_augment()
    outputs = [first(features) for _ in range(3)]
    assert torch.equal(second(features), outputs[0]) and not torch.equal(outputs[0], outputs[1])
    resumed = spec_augment()
    resumed.load_state_dict(second.state_dict())
    assert torch.equal(resumed(features), outputs[1])
    assert not torch.equal(spec_augment(8)(features), outputs[0])


def test_masks_follow_the_utterance():
    features = torch.ones(4, 40, 200)
    whole = spec_augment()
    other = spec_augment()
    announce(whole.draws, 3, [11, 5, 8, 2])
    expected = whole(features)
    other(features)  # another rank, after a different number of passes
    announce(other.draws, 3, [8, 11])
    assert torch.equal(other(features[:2]), expected[[2, 0]])
    announce(other.draws, 4, [8, 11])
    assert not torch.equal(other(features[:2]), expected[[2, 0]])
    announce(other.draws, 0, np.arange(3))
    with pytest.raises(ValueError, match=r"4 utterances, .* 3"):
        other(features)


def by_hand(key, place):
    """SplitMix64 in Python integers, then Box-Muller."""
    word = (key + (place // 2 + 1) * 0x9E3779B97F4A7C15) % 2**64
    every = 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % every
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % every
    word ^= word >> 31
    radius = np.sqrt(-2 * np.log(((word >> 32) + 1) / 2**32))
    angle = 2 * np.pi * (word % 2**32) / 2**32
    return radius * (np.sin(angle) if place % 2 else np.cos(angle))


def test_keys_of_dither():
    keys = torch.tensor([5, 2**53 - 1, 123456789])
    noise = normal_noise(keys, 7)
    expected = [[by_hand(int(key), place) for place in range(7)] for key in keys]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(normal_noise(keys[[2, 0]], 4), noise[[2, 0], :4])
    draws = KeyedDraws(3)
    announce(draws, 1, [7, 9])
    pair = draws.normal_like(torch.zeros(2, 40))
    announce(draws, 1, [9])
    assert torch.equal(draws.normal_like(torch.zeros(1, 30)), pair[1:, :30])


@pytest.mark.slow
def test_draws_compile_in_one_piece(speech):
    """Announced numbers are inputs of the graph, so that neither dither nor masks break it."""
    pair = []
    for _ in range(2):
        made = FEATURES["fbank"].options(name="fbank", num_mels=40, dither=1.0)
        bands = create(FEATURES["fbank"], made, sample_rate=16000, seed=0)
        pair.append(torch.nn.Sequential(bands, spec_augment()).train())
    keep_draws_eager(pair[0])
    counter = CompileCounter()
    compiled = torch.compile(pair[0], backend=counter, dynamic=False)
    for key in range(3):
        for bands, masks in pair:
            announce(bands.noise, key, [3, 1, 4, 5])
            announce(masks.draws, key, [3, 1, 4, 5])
        torch.testing.assert_close(compiled(speech), pair[1](speech))
    assert counter.frame_count == 1
