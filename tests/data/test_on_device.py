"""Audio on a device: crops by one indexed read, arrays in one transfer, speeds as by scipy."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly

from speakernet.data.batches import (
    change_speed,
    samples_to_read,
)
from speakernet.data.on_device import DeviceAudio

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    num_samples=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_crops(sizes, num_samples, seed):
    random = np.random.default_rng(seed)
    audio = random.integers(-30000, 30000, sum(sizes)).astype(np.int16)
    lengths = np.array(sizes)
    firsts = np.cumsum(lengths) - lengths
    rows = random.integers(0, len(sizes), 9)
    starts = (random.random(9) * np.maximum(lengths[rows] - num_samples + 1, 1)).astype(np.int64)
    crops = DeviceAudio(torch.from_numpy(audio)).crops(
        firsts[rows], starts, lengths[rows], num_samples
    )
    for crop, row, start in zip(crops, rows, starts, strict=True):
        own = audio[firsts[row] : firsts[row] + lengths[row]]
        assert crop.tolist() == [int(own[(start + k) % len(own)]) for k in range(num_samples)]


@pytest.mark.parametrize(
    "factor", [Fraction(9, 10), Fraction(11, 10), Fraction(1, 2), Fraction(2), Fraction(19, 20)]
)
def test_speeds(factor, random):
    num_samples = 3001
    crops = random.standard_normal((3, samples_to_read(factor, num_samples))).astype(np.float32)
    expected = resample_poly(
        crops.astype(np.float64), factor.denominator, factor.numerator, axis=1
    )[:, :num_samples]
    made = change_speed(torch.from_numpy(crops), factor, num_samples)
    assert made.shape == (3, num_samples)
    np.testing.assert_allclose(made.numpy(), expected, atol=2e-6, rtol=1e-5)
