"""What reads recordings of any length reads them in parts: the same answers, and memory for a part."""

import itertools
import tracemalloc

import numpy as np
import pytest
import soundfile

from speakernet.data.audio import write_audio
from speakernet.data.augment.banks import RirBank, noise_banks
from speakernet.data.lists import StringTable
from speakernet.data.sources import FolderSource
from speakernet.evaluation import embedding
from speakernet.evaluation import slices as quality
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.slices import FRAME_SECONDS, signal_to_noise_db, signal_to_noise_ratios
from speakernet.evaluation.sweep import KINDS, DegradedSource, sweep_steps

RATE = 16000
FRAME = round(FRAME_SECONDS * RATE)
LONG_MINUTES = 10
WHOLE_BYTES = LONG_MINUTES * 60 * RATE * 4


class Counting:
    """A network that is nothing but its interface."""

    sample_rate, min_samples = RATE, 400

    def embed(self, waveforms, lengths, *, sample_rate):
        return waveforms[:, :4].clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    draw = np.random.default_rng(0)
    for number, samples in enumerate((FRAME - 7, FRAME, 5 * FRAME, 5 * FRAME + 1, 10 * FRAME, 12 * FRAME + 99)):
        loudness = np.linspace(0.01, 0.3, samples)
        write_audio(root / f"{number}.wav", loudness * draw.standard_normal(samples))
    soundfile.write(root / "narrow.flac", 0.1 * draw.standard_normal(9000), 8000)
    block = draw.integers(-9999, 9999, RATE * 60, dtype=np.int16)
    with soundfile.SoundFile(root / "long.wav", "w", RATE, 1, "PCM_16") as file:
        for _ in range(LONG_MINUTES):
            file.write(block)
    (root / "noise" / "noise").mkdir(parents=True)
    (root / "rooms").mkdir()
    write_audio(root / "noise" / "noise" / "a.wav", 0.2 * draw.standard_normal(2 * RATE))
    write_audio(root / "rooms" / "a.wav", 0.2 * draw.standard_normal(2000) * np.exp(-np.arange(2000) / 300))
    return root


@pytest.fixture(scope="module")
def source(folder):
    return FolderSource(folder, keep_lookup=False)


@pytest.fixture(scope="module")
def steps(folder):
    banks, rooms = noise_banks(folder / "noise", RATE, None), RirBank(folder / "rooms", RATE, None, is_aligned=True)
    return sweep_steps(KINDS, banks, rooms, sample_rate=RATE)


def peak_of(work) -> int:  # type: ignore[no-untyped-def]
    """Bytes that arrays took at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_ratios_in_parts_are_those_of_the_whole(source, monkeypatch):
    names = StringTable.from_strings([*(f"{number}.wav" for number in range(6)), "narrow.flac"])
    expected = [signal_to_noise_db(source.read(name)) for name in names]
    np.testing.assert_array_equal(signal_to_noise_ratios(source, names, 2), expected)
    monkeypatch.setattr(quality, "FRAMES_AT_ONCE", 5)
    np.testing.assert_allclose(signal_to_noise_ratios(source, names, 2), expected, rtol=1e-6)
    assert expected[0] == 0 and len(set(expected)) > 5


def test_degraded_crops_of_a_long_recording_are_cut_from_its_windows(source, steps, monkeypatch):
    monkeypatch.setattr(embedding, "LONG_SECONDS", 0.2)
    monkeypatch.setattr(embedding, "WINDOW_SECONDS", 0.1)
    names = StringTable.from_strings(["5.wav", "0.wav"])
    total = 12 * FRAME + 99
    edges = embedding.window_edges(total, RATE)
    assert len(edges) == 5 and embedding.window_edges(FRAME, RATE) == [0, FRAME]
    for kind in ("noise", "reverb", "telephone"):
        step = steps[kind][0]
        degraded = DegradedSource(source, names, step)
        whole = degraded.read("5.wav")
        assert len(whole) == total and degraded.lookup_table(names).num_samples[0] == total
        parts = [degraded.read("5.wav", first, last - first) for first, last in itertools.pairwise(edges)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        np.testing.assert_array_equal(degraded.read("5.wav", 1000, 3000), whole[1000:4000])
        np.testing.assert_array_equal(degraded.read("5.wav", 4000), whole[4000:])
        assert step.transform is not None
        np.testing.assert_array_equal(parts[1], step.transform(source.read("5.wav", edges[1], edges[2] - edges[1]), 0))
        # A short one is degraded as a whole.
        np.testing.assert_array_equal(degraded.read("0.wav"), step.transform(source.read("0.wav"), 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [0, 200])
def test_a_sweep_over_a_long_recording_takes_the_memory_of_its_windows(source, steps, kind, frames, monkeypatch):
    # What waits for the network is bounded too, at more than this recording has.
    monkeypatch.setattr(embedding, "READ_AHEAD_SAMPLES", 1 << 20)
    names = StringTable.from_strings(["long.wav"])
    degraded = DegradedSource(source, names, steps[kind][-1])
    source.lookup_table(names)
    options = EvaluationOptions(eval_frames=frames, num_crops=2, num_workers=1, batch_size=4)
    assert peak_of(lambda: embed_utterances(Counting(), degraded, names, options)) < WHOLE_BYTES
