"""Audio on a device: speeds as by scipy."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.signal import resample_poly

from speakernet.data.batches import (
    change_speed,
    samples_to_read,
)


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
