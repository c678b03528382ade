"""Vocal tracts of other lengths: the warp itself, that factor 1 changes no bit, and that evaluation is never warped."""

import numpy as np
import pytest
import torch

from speakernet.frontend.options import FEATURES
from speakernet.frontend.vocal_tract import warped
from speakernet.registry import create

WITH_BANDS = [name for name in FEATURES if name != "raw"]
FACTORS = (1.0, 0.9, 1.1)


def front_end(name: str, **options: object):
    made = FEATURES[name].options(name=name, num_mels=40, normalize="none", **options)
    return create(FEATURES[name], made, sample_rate=16000, seed=0)


@pytest.fixture(scope="module")
def speech() -> torch.Tensor:
    """Noise whose loudness changes, (4, samples)."""
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(4, 8000, generator=generator) * torch.linspace(0.1, 1, 8000)


def tone(hertz: float) -> torch.Tensor:
    return 0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(8000) / 16000).unsqueeze(0)


@pytest.mark.parametrize("factor", [0.7, 0.9, 1.0, 1.1, 1.4])
def test_the_warp_rises_and_keeps_its_ends(factor: float) -> None:
    hertz = torch.linspace(0, 8000, 801, dtype=torch.float64)
    moved = warped(hertz, factor, 16000)
    assert moved[0] == 0 and moved[-1] == pytest.approx(8000)
    assert (moved.diff() > 0).all()
    # By hand: below the boundary (4800 Hz, or 4800 / factor where that is lower) frequencies are multiplied.
    low = hertz <= 4800 * min(factor, 1) / factor
    torch.testing.assert_close(moved[low], hertz[low] * factor)
    assert int(low.sum()) == {0.7: 481, 0.9: 481, 1.0: 481, 1.1: 437, 1.4: 343}[factor]
    # The rest is one straight line.
    assert moved[~low].diff(n=2).abs().max() < 1e-6


@pytest.mark.parametrize("name", WITH_BANDS)
def test_utterances_of_a_batch_are_heard_each_with_its_own_factor(name: str, speech: torch.Tensor) -> None:
    plain, warping = front_end(name).train(), front_end(name).train()
    warping.warp(FACTORS)
    expected = plain(speech)
    # Nobody said anything, and all as recorded: the very same bits.
    assert torch.equal(warping(speech), expected)
    warping.tracts.take_warps(np.zeros(4, np.int64))
    assert torch.equal(warping(speech), expected)
    warping.tracts.take_warps(np.array([0, 1, 2, 0]))
    mixed = warping(speech)
    assert torch.equal(mixed[[0, 3]], expected[[0, 3]])
    for row, factor in ((1, 1), (2, 2)):
        assert not torch.allclose(mixed[row], expected[row], atol=1e-2)
        warping.tracts.take_warps(np.array([factor]))
        torch.testing.assert_close(warping(speech[row : row + 1])[0], mixed[row], atol=1e-4, rtol=1e-4)
    # What was said holds for one pass.
    assert torch.equal(warping(speech), expected)


@pytest.mark.parametrize("name", WITH_BANDS)
def test_evaluation_is_never_warped(name: str, speech: torch.Tensor) -> None:
    plain, warping = front_end(name).eval(), front_end(name).eval()
    warping.warp((0.9, 1.1))
    warping.tracts.take_warps(np.array([0, 1, 1, 0]))
    assert torch.equal(warping(speech), plain(speech))
    assert not any("tracts" in key for key in warping.state_dict())


@pytest.mark.parametrize("name", [one for one in WITH_BANDS if one != "mfcc"])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_tone_is_heard_where_a_tone_of_the_moved_frequency_lies(name: str, factor: float) -> None:
    warping = front_end(name).train()
    warping.warp((1.0, factor))
    for hertz in (700.0, 2000.0, 3500.0):
        warping.tracts.take_warps(np.array([1]))
        heard = warping(tone(hertz)).mean(dim=2).argmax()
        meant = warping(tone(hertz * factor)).mean(dim=2).argmax()
        assert heard == meant != warping(tone(hertz)).mean(dim=2).argmax()


@pytest.mark.parametrize("name", WITH_BANDS)
def test_filters_between_bins_are_the_filters(name: str) -> None:
    """The fine bank at the bins is the bank itself."""
    made = front_end(name)
    torch.testing.assert_close(made.make_bank(8)[::8], made.mel_bank, atol=1e-5, rtol=0)


def test_another_number_of_utterances_than_announced_is_refused(speech: torch.Tensor) -> None:
    warping = front_end("log_mel").train()
    warping.warp(FACTORS)
    warping.tracts.take_warps(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="a pass over 4 utterances, but vocal tracts were said for 3"):
        warping(speech)


def test_samples_have_no_bands_to_warp() -> None:
    raw = create(FEATURES["raw"], FEATURES["raw"].options(name="raw"), sample_rate=16000, seed=0)
    with pytest.raises(ValueError, match=r"augment\.warp_factors: \[1\.0, 0\.9, 1\.1\], but .* no mel bands"):
        raw.warp(FACTORS)


@pytest.mark.slow
def test_compiled_code_asks_for_the_factors_of_every_pass(speech: torch.Tensor) -> None:
    warping, plain = front_end("log_mel").train(), front_end("log_mel").train()
    warping.warp(FACTORS)
    plain.warp(FACTORS)
    compiled = torch.compile(warping, backend="eager", dynamic=False)
    for warps in ([0, 1, 2, 0], [0, 0, 0, 0], [2, 1, 1, 0]):
        warping.tracts.take_warps(np.array(warps))
        plain.tracts.take_warps(np.array(warps))
        torch.testing.assert_close(compiled(speech), plain(speech))
