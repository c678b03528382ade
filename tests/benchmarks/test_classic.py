"""The classic pipeline equals voxceleb_trainer: numbers from its code, and its rules."""

import random

import numpy as np
import pytest
import soundfile
import torch

from benchmarks import classic

FRAMES = 20
SAMPLES = 20 * 160 + 240


def triangle(period, num_samples, height):
    """A triangle wave of integers, the same on every machine, as int16."""
    phase = np.arange(num_samples) % period
    return ((2 * np.minimum(phase, period - phase) * height) // period - height // 2).astype(
        np.int16
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Six utterances (the second shorter than a crop), MUSAN-like noise and two RIRs."""
    root = tmp_path_factory.mktemp("classic")
    for row, num_samples in enumerate([9000, 2500, 8000, 3440, 5000, 7001]):
        _write(root / "speech" / f"{row}.wav", triangle(97 + 10 * row, num_samples, 12000))
    for row in range(7):
        _write(
            root / "musan" / "speech" / "x" / "y" / f"{row}.wav",
            triangle(41 + 6 * row, 6000 + row, 9000),
        )
    _write(root / "musan" / "music" / "x" / "y" / "m.wav", triangle(29, 6000, 5000))
    _write(root / "musan" / "noise" / "x" / "y" / "n.wav", triangle(7, 6000, 200))
    for row in range(2):
        decay = 16000 // (1 + np.arange(800) * (1 + row))
        _write(root / "rirs" / "Room" / f"r{row}" / "r.wav", decay.astype(np.int16))
    return root


@pytest.fixture(scope="module")
def speech(corpus):
    return [str(path) for path in sorted((corpus / "speech").iterdir())]


def _write(path, samples):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, 16000)


def figures(audio):
    return [audio[0, 0], audio[0, 1000], audio[0, -1], np.abs(audio).sum()]


def test_crops_and_augmentation(corpus, speech):
    """The expected numbers come from voxceleb_trainer's loader on these files, with seed 3."""
    generator = random.Random(3)
    augmentation = classic.ClassicAugmentation(
        str(corpus / "musan"), str(corpus / "rirs"), FRAMES, generator
    )
    # The order of a folder is arbitrary.
    for paths in (*augmentation.noises.values(), augmentation.responses):
        paths.sort()
    audio = classic.read_training_crop(speech[0], FRAMES, generator)
    assert audio.dtype == np.float64 and audio.shape == (1, SAMPLES)
    results = [audio, augmentation.reverberate(audio)]
    results += [augmentation.add(category, audio) for category in ("music", "speech", "noise")]
    expected = [
        [0.08114624, -0.145355225, -0.11517334, 314.952056885],
        [0.063299412, -0.254581959, -0.363942848, 784.700406761],
        [0.064991365, -0.122805712, -0.131328215, 342.699856881],
        [0.106743913, -0.126953431, -0.10406893, 324.379537714],
        [0.078082401, -0.152480433, -0.110114442, 315.131689016],
    ]
    np.testing.assert_allclose([*map(figures, results)], expected, atol=1e-8)


def test_evaluation_crops(speech):
    short = classic.read_evaluation_crops(speech[1], FRAMES, 4)
    assert short.shape == (4, SAMPLES)
    # From the original's loader: the wrapped file is one sample longer than a crop, so the last
    # crop starts at 1.
    np.testing.assert_allclose(
        short[:, 100], [-0.135192871, -0.135192871, -0.135192871, -0.142059326], atol=1e-8
    )
    whole, _ = soundfile.read(speech[0])
    crops = classic.read_evaluation_crops(speech[0], FRAMES, 3)
    np.testing.assert_array_equal(crops[1], whole[2780 : 2780 + SAMPLES])
    np.testing.assert_array_equal(classic.read_evaluation_crops(speech[0], 0, 9), whole[None])


def test_embeddings_and_scores_one_by_one(speech):
    paths = speech[:3]
    embeddings = classic.embed_one_by_one(
        lambda crops: crops[:, 100:102], paths, num_frames=FRAMES, num_crops=2
    )
    assert list(embeddings) == paths and embeddings[paths[0]].shape == (2, 2)
    by_hand = {
        "a": torch.tensor([[3.0, 4.0], [0.0, 2.0]]),
        "b": torch.tensor([[0.0, 1.0], [0.0, 5.0]]),
    }
    # Unit vectors (0.6, 0.8) and (0, 1) against (0, 1) twice: distances sqrt(0.4) twice and 0
    # twice.
    assert classic.score_one_by_one(by_hand, [("a", "b")]) == pytest.approx(
        [-(0.4**0.5) / 2], abs=1e-6
    )
