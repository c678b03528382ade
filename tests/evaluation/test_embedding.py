"""Utterances to embeddings: batches equal one by one, crops, long recordings in parts, kept embeddings."""

import copy
import dataclasses
import itertools
import math
import tracemalloc

import numpy as np
import pytest
import soundfile
import torch

from speakernet.assembly.evaluation import subset
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.augment.banks import RirBank, noise_banks
from speakernet.data.lists import StringTable, read_trials
from speakernet.data.sources import FolderSource
from speakernet.evaluation import embedding
from speakernet.evaluation import embedding as module
from speakernet.evaluation import slices as quality
from speakernet.evaluation.embedding import Embedder, embed_utterances, plan_of, usual_width
from speakernet.evaluation.evaluate import evaluate, score_trials
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import Backend
from speakernet.evaluation.slices import FRAME_SECONDS, signal_to_noise_db, signal_to_noise_ratios
from speakernet.evaluation.speakers import speakers_of
from speakernet.evaluation.sweep import KINDS, DegradedSource, sweep_steps
from speakernet.models.speaker_net import SpeakerNet


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(3)
    return SpeakerNet.named("ResNet", embedding_dim=16, model_options={"channels": 8, "blocks": [1, 1]}).eval()


@pytest.fixture()
def source(tiny_corpus):
    return FolderSource(tiny_corpus, keep_lookup=False)


@pytest.fixture()
def names(tiny_corpus):
    return read_trials(tiny_corpus / "trials.txt").names


@pytest.mark.parametrize("has_few_shapes", [False, True])
def test_whole_utterances_in_buckets_equal_one_by_one(net, source, names, monkeypatch, has_few_shapes):
    shapes: list[tuple[int, int]] = []
    embed = net.embed

    def watched(waveforms, lengths, *, sample_rate):
        shapes.append(tuple(waveforms.shape))
        return embed(waveforms, lengths, sample_rate=sample_rate)

    monkeypatch.setattr(net, "embed", watched)
    options = EvaluationOptions(eval_frames=0, batch_size=5)
    batched = embed_utterances(net, source, names, options, has_few_shapes=has_few_shapes)
    assert len(shapes) > 2
    if has_few_shapes:
        assert all(rows in (1, 2, 4) and samples == usual_width(samples) for rows, samples in shapes)
    monkeypatch.undo()
    single = [net.embed(torch.from_numpy(source.read(name))[None], sample_rate=16000).numpy() for name in names]
    assert batched.shape == (len(names), 1, 16)
    np.testing.assert_allclose(batched[:, 0], np.concatenate(single), atol=1e-5)


def test_batches_beside_each_other_give_what_one_after_the_other_gives(net, source, names):
    """Also of a network that is being trained, whose mode no batch may change below another."""
    options, before = EvaluationOptions(eval_frames=60, num_crops=2, batch_size=3), torch.get_num_threads()
    trained = copy.deepcopy(net).train()
    expected = embed_utterances(net, source, names, options)
    torch.set_num_threads(3)
    try:
        for _ in range(3):
            np.testing.assert_allclose(embed_utterances(trained, source, names, options), expected, atol=1e-6)
        assert torch.get_num_threads() == 3 and trained.training
    finally:
        torch.set_num_threads(before)
    assert torch.equal(trained.trunk.norm1.running_mean, net.trunk.norm1.running_mean)


@pytest.mark.parametrize(("batch_size", "frames"), [(7, 60), (64, 110), (1, 300)])
def test_crops_equal_one_utterance_at_a_time(net, source, names, batch_size, frames):
    options = EvaluationOptions(eval_frames=frames, num_crops=4, batch_size=batch_size)
    found = embed_utterances(net, source, names, options)
    for row, name in enumerate(names):
        audio, length = source.read(name), frames * 160 + 240
        if len(audio) <= length:
            audio = np.pad(audio, (0, length - len(audio) + 1), "wrap")
        crops = [audio[int(start) : int(start) + length] for start in np.linspace(0, len(audio) - length, num=4)]
        lengths = torch.full((len(crops),), length)
        expected = net.embed(torch.from_numpy(np.stack(crops)), lengths, sample_rate=16000)
        np.testing.assert_allclose(found[row], expected.numpy(), atol=1e-5)


def test_long_recordings_are_the_mean_of_their_windows(net, source, names, monkeypatch, caplog):
    caplog.set_level("INFO", logger="speakernet")
    whole = embed_utterances(net, source, names, EvaluationOptions(eval_frames=0))
    monkeypatch.setattr(embedding, "LONG_SECONDS", 1.05)
    monkeypatch.setattr(embedding, "WINDOW_SECONDS", 0.7)
    found = embed_utterances(net, source, names, EvaluationOptions(eval_frames=0, batch_size=5))
    num_long = 0
    for row, name in enumerate(names):
        audio = source.read(name)
        if len(audio) <= 1.05 * 16000:
            np.testing.assert_allclose(found[row], whole[row], atol=1e-5)
            continue
        num_long += 1
        windows = np.array_split(audio, math.ceil(len(audio) / 11200))
        expected = [net.embed(torch.from_numpy(one.copy())[None], sample_rate=16000).numpy() for one in windows]
        np.testing.assert_allclose(found[row], np.mean(expected, axis=0), atol=1e-3)
    assert num_long == 12 and f"{num_long} recordings" in caplog.text


def test_an_accelerator_sees_few_shapes(random):
    """As many utterances as VoxCeleb1-E has by their lengths, and a long one in windows."""
    lengths = np.sort(np.append(random.lognormal(11.6, 0.6, 20_000).clip(8000, 2_300_000).astype(np.int64), 5_000_000))
    stretches = embedding.stretches_of(np.arange(len(lengths)), lengths, 16000)
    free, few = (plan_of(stretches, 0, 1, 8000, 64, 16000, has_few_shapes=one) for one in (False, True))
    samples = np.array([one.num_samples for one in stretches])
    for plan in (free, few):
        rows, widths = plan.shapes.T
        counts = np.diff(plan.bounds)
        assert plan.bounds[0] == 0 and plan.bounds[-1] == len(stretches) and counts.min() > 0
        assert (rows >= counts).all() and (widths >= np.maximum.reduceat(samples, plan.bounds[:-1])).all()
        # One recording may be longer than the bound; what holds more than one keeps within it.
        assert (rows * widths)[rows > 1].max() <= 64 * 4 * 16000
    assert len(np.unique(few.shapes, axis=0)) <= 130 < 400 < len(np.unique(free.shapes, axis=0))
    assert set(few.shapes[:, 0].tolist()) <= {1 << power for power in range(7)}
    # Crops have one length: nothing is added to them.
    read = embedding.stretches_of(np.arange(len(lengths)), lengths, 16000, are_whole=False)
    crops = plan_of(read, 32240, 10, 8000, 48, 16000, has_few_shapes=True)
    assert set(crops.shapes[:-1, 0].tolist()) == {48} and set(crops.shapes[:, 1].tolist()) == {32240}


def test_missing_utterances_are_named_before_anything_is_embedded(net, source):
    missing = ["nobody/1.wav", "nobody/2.wav"]
    with pytest.raises(AudioError, match=r"2 of 3 utterances cannot be read.*nobody/1\.wav") as some:
        embed_utterances(net, source, ["spk08/utt0.wav", *missing], EvaluationOptions())
    with pytest.raises(AudioError, match=r"2 of 2 utterances cannot be read.*another folder\? --test_path"):
        embed_utterances(net, source, missing, EvaluationOptions())
    assert "another folder" not in str(some.value)


def test_embeddings_are_reused_only_while_model_and_audio_are_the_same(net, source, tiny_corpus, tmp_path, monkeypatch):
    trials = read_trials(tiny_corpus / "trials.txt")
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return embed_utterances(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "embed_utterances", counted)
    options = EvaluationOptions(eval_frames=60, num_crops=2)
    embedder = Embedder(net, options, stores=(tmp_path,), model_digest="one")

    def evaluated(embedder):
        return evaluate(embedder, Backend(options), trials, source, speakers_of(trials), options, 0).scores

    first, again = evaluated(embedder), evaluated(embedder)
    assert len(calls) == 1
    np.testing.assert_array_equal(first, again)
    evaluated(dataclasses.replace(embedder, model_digest="two"))
    assert len(calls) == 2
    kept = next(tmp_path.glob("*.npz"))
    kept.write_bytes(kept.read_bytes()[:100])
    evaluated(embedder)
    assert len(calls) == 3


def test_both_is_the_mean_of_crops_and_whole(net, source, tiny_corpus):
    trials = read_trials(tiny_corpus / "trials.txt")
    scores = {}
    for mode in ("crops", "whole", "both"):
        options = EvaluationOptions(embedding=mode, eval_frames=60, num_crops=2)
        scores[mode] = score_trials(Embedder(net, options), Backend(EvaluationOptions()), trials, source).scores
    np.testing.assert_allclose(scores["both"], (scores["crops"] + scores["whole"]) / 2, atol=1e-6)


def test_a_subset_is_fixed_and_keeps_the_share_of_targets(tiny_corpus):
    trials = read_trials(tiny_corpus / "trials.txt")
    chosen, again = subset(trials, 22, seed=1), subset(trials, 22, seed=1)
    assert trials.labels is not None and chosen.labels is not None and len(chosen) == 22
    assert chosen.labels.sum() == round(22 * trials.labels.sum() / len(trials))
    np.testing.assert_array_equal(chosen.enrol, again.enrol)
    pairs = {(trials.names[a], trials.names[b]) for a, b in zip(trials.enrol, trials.test, strict=True)}
    assert all((chosen.names[a], chosen.names[b]) in pairs for a, b in zip(chosen.enrol, chosen.test, strict=True))


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
def long_source(folder):
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


def test_ratios_in_parts_are_those_of_the_whole(long_source, monkeypatch):
    names = StringTable.from_strings([*(f"{number}.wav" for number in range(6)), "narrow.flac"])
    expected = [signal_to_noise_db(long_source.read(name)) for name in names]
    np.testing.assert_array_equal(signal_to_noise_ratios(long_source, names, 2), expected)
    monkeypatch.setattr(quality, "FRAMES_AT_ONCE", 5)
    np.testing.assert_allclose(signal_to_noise_ratios(long_source, names, 2), expected, rtol=1e-6)
    assert expected[0] == 0 and len(set(expected)) > 5


def test_degraded_crops_of_a_long_recording_are_cut_from_its_windows(long_source, steps, monkeypatch):
    monkeypatch.setattr(embedding, "LONG_SECONDS", 0.2)
    monkeypatch.setattr(embedding, "WINDOW_SECONDS", 0.1)
    names = StringTable.from_strings(["5.wav", "0.wav"])
    total = 12 * FRAME + 99
    edges = embedding.window_edges(total, RATE)
    assert len(edges) == 5 and embedding.window_edges(FRAME, RATE) == [0, FRAME]
    for kind in ("noise", "reverb", "telephone"):
        step = steps[kind][0]
        degraded = DegradedSource(long_source, names, step)
        whole = degraded.read("5.wav")
        assert len(whole) == total and degraded.lookup_table(names).num_samples[0] == total
        parts = [degraded.read("5.wav", first, last - first) for first, last in itertools.pairwise(edges)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        np.testing.assert_array_equal(degraded.read("5.wav", 1000, 3000), whole[1000:4000])
        np.testing.assert_array_equal(degraded.read("5.wav", 4000), whole[4000:])
        assert step.transform is not None
        np.testing.assert_array_equal(
            parts[1], step.transform(long_source.read("5.wav", edges[1], edges[2] - edges[1]), 0)
        )
        # A short one is degraded as a whole.
        np.testing.assert_array_equal(degraded.read("0.wav"), step.transform(long_source.read("0.wav"), 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [0, 200])
def test_a_sweep_over_a_long_recording_takes_the_memory_of_its_windows(long_source, steps, kind, frames, monkeypatch):
    # What waits for the network is bounded too, at more than this recording has.
    monkeypatch.setattr(embedding, "READ_AHEAD_SAMPLES", 1 << 20)
    names = StringTable.from_strings(["long.wav"])
    degraded = DegradedSource(long_source, names, steps[kind][-1])
    long_source.lookup_table(names)
    options = EvaluationOptions(eval_frames=frames, num_crops=2, num_workers=1, batch_size=4)
    assert peak_of(lambda: embed_utterances(Counting(), degraded, names, options)) < WHOLE_BYTES
