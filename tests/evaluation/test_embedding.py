"""Utterances to embeddings: batches, crops, long recordings in windows, stored embeddings; slices
and sweeps.
"""

import dataclasses
import itertools
import math
import tracemalloc
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import soundfile
import torch
from numpy.testing import assert_allclose, assert_array_equal

from speakernet.data import windows
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.augment.banks import RirBank, noise_banks
from speakernet.data.levels import FRAME_SECONDS
from speakernet.data.lists import StringTable, read_trials
from speakernet.data.opening import open_source
from speakernet.data.sources import FolderSource
from speakernet.evaluation import embedding, slices
from speakernet.evaluation.embedding import Embedder, embed_utterances, usual_width
from speakernet.evaluation.evaluate import evaluate, score_trials, subset
from speakernet.evaluation.figures import figures
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import Backend
from speakernet.evaluation.speakers import read_csv, speakers_of
from speakernet.evaluation.sweep import KINDS, DegradedSource, run_sweep, sweep_steps
from tests.evaluation.report_runs import trials_of
from tests.small_networks import tiny_resnet


@pytest.fixture(scope="module")
def net():
    return tiny_resnet(16)


@pytest.fixture
def source(tiny_corpus):
    return FolderSource(tiny_corpus)


@pytest.fixture
def names(tiny_corpus):
    return read_trials(tiny_corpus / "trials.txt").names


@pytest.mark.parametrize("has_few_shapes", [False, True])
def test_whole_utterances(net, source, names, monkeypatch, has_few_shapes):
    shapes = []
    embed = net.embed

    def watched(waveforms, lengths, *, sample_rate):
        shapes.append(tuple(waveforms.shape))
        return embed(waveforms, lengths, sample_rate=sample_rate)

    monkeypatch.setattr(net, "embed", watched)
    options = EvaluationOptions(eval_frames=0, batch_size=5)
    # As on an accelerator, but for the copy from page-locked memory.
    plan_of = partial(embedding.plan_of, has_few_shapes=has_few_shapes)
    monkeypatch.setattr(embedding, "plan_of", lambda *plan, **_: plan_of(*plan))
    batched = embed_utterances(net, source, names, options)
    assert len(shapes) > 2
    if has_few_shapes:
        assert all(
            rows in (1, 2, 4) and samples == usual_width(samples) for rows, samples in shapes
        )
    monkeypatch.undo()
    single = [
        net.embed(torch.from_numpy(source.read(name))[None], sample_rate=16000).numpy()
        for name in names
    ]
    assert batched.shape == (len(names), 1, 16)
    assert_allclose(batched[:, 0], np.concatenate(single), atol=1e-5)


@pytest.mark.parametrize(("batch_size", "frames"), [(7, 60), (64, 110), (1, 300)])
def test_crops(net, source, names, batch_size, frames):
    options = EvaluationOptions(eval_frames=frames, num_crops=4, batch_size=batch_size)
    embedded = embed_utterances(net, source, names, options)
    for row, name in enumerate(names):
        audio = source.read(name)
        length = frames * 160 + 240
        if len(audio) <= length:
            audio = np.pad(audio, (0, length - len(audio) + 1), "wrap")
        crops = [
            audio[int(start) : int(start) + length]
            for start in np.linspace(0, len(audio) - length, num=4)
        ]
        lengths = torch.full((len(crops),), length)
        expected = net.embed(torch.from_numpy(np.stack(crops)), lengths, sample_rate=16000)
        assert_allclose(embedded[row], expected.numpy(), atol=1e-5)


def test_long_recordings(net, source, names, monkeypatch):
    whole = embed_utterances(net, source, names, EvaluationOptions(eval_frames=0))
    monkeypatch.setattr(windows, "LONG_SECONDS", 1.05)
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 0.7)
    found = embed_utterances(net, source, names, EvaluationOptions(eval_frames=0, batch_size=5))
    num_long = 0
    for row, name in enumerate(names):
        audio = source.read(name)
        if len(audio) <= 1.05 * 16000:
            assert_allclose(found[row], whole[row], atol=1e-5)
            continue
        num_long += 1
        cuts = np.array_split(audio, math.ceil(len(audio) / 11200))
        expected = [
            net.embed(torch.from_numpy(window.copy())[None], sample_rate=16000).numpy()
            for window in cuts
        ]
        assert_allclose(found[row], np.mean(expected, axis=0), atol=1e-3)
    assert num_long == 12


def test_missing_utterances(net, source):
    missing = ["nobody/1.wav", "nobody/2.wav"]
    with pytest.raises(AudioError, match=r"2 of 3 utterances cannot be read.*nobody/1\.wav"):
        embed_utterances(net, source, ["spk08/utt0.wav", *missing], EvaluationOptions())


def test_reused_embeddings(net, source, tiny_corpus, tmp_path, monkeypatch):
    trials = read_trials(tiny_corpus / "trials.txt")
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return embed_utterances(*arguments, **options)

    options = EvaluationOptions(eval_frames=60, num_crops=2)
    embedder = Embedder(net, options, stores=(tmp_path,), model_digest="one", embed_with=counted)

    def evaluated(embedder):
        return evaluate(embedder, Backend(options), trials, source, speakers_of(trials), 0).scores

    first = evaluated(embedder)
    again = evaluated(embedder)
    assert len(calls) == 1
    assert_array_equal(first, again)
    # The levels of the recordings are kept too: the root mean square of each.
    levels = [20 * np.log10(np.sqrt(np.mean(source.read(name) ** 2))) for name in trials.names]
    assert_allclose(source.levels_db(trials.names), levels, atol=1e-3)
    unread = FolderSource(tiny_corpus)
    evaluate(embedder, Backend(options), trials, unread, speakers_of(trials), 0)
    assert_allclose(unread.levels_db(trials.names), levels, atol=1e-3)
    assert len(calls) == 1
    evaluated(dataclasses.replace(embedder, model_digest="two"))
    assert len(calls) == 2
    kept = next(tmp_path.glob("*.npz"))
    kept.write_bytes(kept.read_bytes()[:100])
    evaluated(embedder)
    assert len(calls) == 3


def test_both(net, source, tiny_corpus):
    trials = read_trials(tiny_corpus / "trials.txt")
    scores = {}
    for mode in ("crops", "whole", "both"):
        options = EvaluationOptions(embedding=mode, eval_frames=60, num_crops=2)
        scores[mode] = score_trials(
            Embedder(net, options), Backend(EvaluationOptions()), trials, source
        ).scores
    assert_allclose(scores["both"], (scores["crops"] + scores["whole"]) / 2, atol=1e-6)


def test_subset(tiny_corpus):
    trials = read_trials(tiny_corpus / "trials.txt")
    chosen = subset(trials, 22, seed=1)
    again = subset(trials, 22, seed=1)
    assert trials.labels is not None and chosen.labels is not None and len(chosen) == 22
    assert chosen.labels.sum() == round(22 * trials.labels.sum() / len(trials))
    assert_array_equal(chosen.enrol, again.enrol)


RATE = 16000
FRAME = round(FRAME_SECONDS * RATE)
LONG_MINUTES = 10
WHOLE_BYTES = LONG_MINUTES * 60 * RATE * 4


class Counting:
    """A network that only counts what it embeds."""

    sample_rate = RATE
    min_samples = 400
    count = 0
    preparation: ClassVar = {}

    def embed(self, waveforms, lengths, *, sample_rate):
        self.count += len(waveforms)
        return waveforms[:, 1000:1004].clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    draw = np.random.default_rng(0)
    for number, samples in enumerate(
        (FRAME - 7, FRAME, 5 * FRAME, 5 * FRAME + 1, 10 * FRAME, 12 * FRAME + 99)
    ):
        loudness = np.linspace(0.01, 0.3, samples)
        write_audio(root / f"{number}.wav", loudness * draw.standard_normal(samples))
    block = draw.integers(-9999, 9999, RATE * 60, dtype=np.int16)
    with soundfile.SoundFile(root / "long.wav", "w", RATE, 1, "PCM_16") as file:
        for _ in range(LONG_MINUTES):
            file.write(block)
    for number in range(3):
        noise = 0.2 * draw.standard_normal(2 * RATE)
        write_audio(root / "noise" / "noise" / f"{number}.wav", noise)
    response = 0.2 * draw.standard_normal(4000) * np.exp(-np.arange(4000) / 800)
    response[0] = 0.9
    write_audio(root / "rooms" / "room.wav", response)
    return root


@pytest.fixture(scope="module")
def long_source(folder):
    return FolderSource(folder)


@pytest.fixture(scope="module")
def steps(folder):
    banks = noise_banks(folder / "noise", RATE, None)
    rooms = RirBank(folder / "rooms", RATE, None, is_aligned=True)
    return sweep_steps(KINDS, banks, rooms, sample_rate=RATE)


def peak_of(work):
    """Peak bytes of arrays."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_degraded_crops_of_a_long_recording(long_source, steps, monkeypatch):
    monkeypatch.setattr(windows, "LONG_SECONDS", 0.2)
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 0.1)
    names = StringTable.from_strings(["5.wav", "0.wav"])
    total = 12 * FRAME + 99
    edges = windows.window_edges(total, RATE)
    assert len(edges) == 5 and windows.window_edges(FRAME, RATE) == [0, FRAME]
    for kind in ("noise", "reverb", "telephone"):
        step = steps[kind][0]
        degraded = DegradedSource(long_source, names, step)
        whole = degraded.read("5.wav")
        assert len(whole) == total and degraded.lookup_table(names).num_samples[0] == total
        parts = [
            degraded.read("5.wav", first, last - first) for first, last in itertools.pairwise(edges)
        ]
        assert_array_equal(np.concatenate(parts), whole)
        assert_array_equal(degraded.read("5.wav", 1000, 3000), whole[1000:4000])
        # A short recording is degraded as a whole.
        assert_array_equal(degraded.read("0.wav"), step.transform(long_source.read("0.wav"), 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [0, 200])
def test_memory_of_a_sweep(long_source, steps, kind, frames, monkeypatch):
    # The queue before the network is bounded too, at more than this recording has.
    monkeypatch.setattr(embedding, "READ_AHEAD_SAMPLES", 1 << 20)
    names = StringTable.from_strings(["long.wav"])
    degraded = DegradedSource(long_source, names, steps[kind][-1])
    long_source.lookup_table(names)
    options = EvaluationOptions(eval_frames=frames, num_crops=2, num_workers=1, batch_size=4)
    assert peak_of(lambda: embed_utterances(Counting(), degraded, names, options)) < WHOLE_BYTES


def some_trials(num_speakers=8, utterances=3):
    count = num_speakers * utterances
    names = [f"s{row // utterances}/{row % utterances}.wav" for row in range(count)]
    pairs = np.transpose(np.triu_indices(count, 1))
    speakers = pairs // utterances
    return trials_of(names, pairs, speakers[:, 0] == speakers[:, 1])


def scores_of(trials, random):
    return random.standard_normal(len(trials)) + 1.5 * trials.labels


def test_duration_groups(random):
    trials = some_trials(2, 2)
    slicing = slices.value_slicing(
        "duration", np.array([1.0, 2.0, 5.0, 30.0]), trials, slices.DURATION_EDGES_SECONDS, " s"
    )
    # trials: 0-1 0-2 0-3 1-2 1-3 2-3; an edge belongs to the upper group
    assert slicing.labels == ["under 2 s", "2 to 4 s", "4 to 6 s"]
    assert slicing.groups.tolist() == [0, 0, 0, 1, 1, 2]


POINTS = {"0.05": (0.05, 1.0, 1.0)}


def test_costs_of_slices(audio):
    """One group holds every trial, so its minDCF is the headline's, with the costs of the
    options.
    """
    # Targets 0.9 and 0.3; the others 0.5, 0.1, 0.2 and 0.1: rejecting 0.3 misses half, accepting it
    # accepts a quarter.
    trials = some_trials(2, 2)
    scores = np.array([0.9, 0.5, 0.1, 0.2, 0.1, 0.3])
    speakers = speakers_of(trials)
    source = open_source(audio)
    options = EvaluationOptions(slices=["snr"], c_miss=40.0, c_fa=0.5, bootstrap_samples=0)
    headline = figures(trials, scores, speakers, options, 0)
    (found,) = slices.all_slices(trials, scores, speakers, source, options, seed=0)
    (whole,) = (row.min_dcf for row in found.rows if row.num_trials == len(trials))
    # 0.5 x 0.95 x 1/4 against 0.5 x 0.95 for accepting everybody; with equal costs half the targets
    # are missed.
    assert whole["0.05"] == pytest.approx(0.25) and headline.min_dcf["0.05"] == pytest.approx(0.25)
    usual = figures(trials, scores, speakers, EvaluationOptions(bootstrap_samples=0), 0)
    assert usual.min_dcf["0.05"] == pytest.approx(0.5)


def test_slices_without_targets(random):
    trials = some_trials()
    gender = ["f" if int(name[1]) % 2 else "m" for name in trials.names]
    same, both = slices.column_slicings("gender", gender, trials)
    scores = scores_of(trials, random)
    result = slices.slice_results(same, trials, scores, speakers_of(trials), POINTS, 10, 0)
    different = (same.groups == 1) | (trials.labels == 1)
    assert not trials.labels[same.groups == 1].any()
    assert result.rows[1].eer_percent == pytest.approx(
        eer(scores[different], trials.labels[different])
    )
    assert "all targets" in result.note
    assert (
        both.labels == ["gender f", "gender m"]
        and (both.groups == -1).sum() == (same.groups == 1).sum()
    )


def test_numeric_columns():
    trials = some_trials()
    ages = [str(20 + row) for row in range(len(trials.names))]
    (slicing,) = slices.column_slicings("age", ages, trials)
    assert len(slicing.labels) == 3 and np.bincount(slicing.groups).min() > len(trials) / 5
    words = [f"w{row}" for row in range(len(trials.names))]
    for values in (words, ["x"] * len(words)):
        assert slices.column_slicings("file", values, trials) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"path,speaker\ncaf\xe9,x\n", "not UTF-8"), (b"path,speaker\na,b\na\n", "line 3: ")],
)
def test_damaged_tables(content, message, tmp_path):
    (tmp_path / "my.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"my\.csv.*({message})"):
        read_csv(tmp_path / "my.csv", ["path", "speaker"])


def test_incomplete_metadata(tmp_path):
    path = tmp_path / "meta.csv"
    path.write_text("path,speaker,gender\na.wav,s,f\n")
    assert slices.read_metadata(path, ["a.wav"]) == {"gender": ["f"]}
    with pytest.raises(ValueError, match=r"11 .*: u0, "):
        slices.read_metadata(path, ["a.wav", *(f"u{row}" for row in range(11))])


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    root = tmp_path_factory.mktemp("audio")
    random = np.random.default_rng(5)
    for name, seconds in (
        ("s0/0.wav", 1.5),
        ("s0/1.wav", 5.0),
        ("s1/0.wav", 3.0),
        ("s1/1.wav", 3.0),
    ):
        write_audio(
            root / name,
            (0.1 * random.standard_normal(round(seconds * RATE))).astype(np.float32),
            RATE,
        )
    return root


def test_all_slices(audio, random):
    trials = some_trials(2, 2)
    speakers = speakers_of(trials)
    source = open_source(audio)
    options = EvaluationOptions(slices=["duration", "snr"], bootstrap_samples=0)
    results = slices.all_slices(
        trials, scores_of(trials, random), speakers, source, options, seed=0
    )
    kinds = [result.by.split(" of ")[0] for result in results]
    assert kinds == ["duration", "signal-to-noise ratio"]
    assert [row.label for row in results[0].rows] == ["under 2 s", "2 to 4 s"]
    # If speech alone is embedded, its seconds count.
    for options in (
        EvaluationOptions(slices=["speech"], bootstrap_samples=0),
        EvaluationOptions(slices=["duration"], speech="detected", bootstrap_samples=0),
    ):
        (result,) = slices.all_slices(
            trials, scores_of(trials, random), speakers, source, options, seed=0
        )
        assert result.by.startswith("seconds of speech")


def test_noise(steps, random):
    speech = (0.1 * random.standard_normal(RATE)).astype(np.float32)
    before = speech.copy()
    shapes = []
    for step in steps["noise"]:
        added = step.transform(speech, 7) - speech
        assert 10 * np.log10(np.mean(speech**2) / np.mean(added**2)) == pytest.approx(
            float(step.label), abs=0.01
        )
        shapes.append(added / np.linalg.norm(added))
    assert_allclose(shapes[0], shapes[-1], atol=1e-4)
    assert_array_equal(speech, before)


def test_durations(steps, audio):
    source = open_source(audio)
    names = StringTable.from_strings(["s0/0.wav", "s0/1.wav"])
    whole = source.read("s0/1.wav")
    for step, seconds in zip(steps["duration"], (4, 3, 2, 1), strict=True):
        middle = DegradedSource(source, names, step)
        begin = (len(whole) - seconds * RATE) // 2
        assert_array_equal(middle.read("s0/1.wav"), whole[begin : begin + seconds * RATE])
        assert_array_equal(middle.read("s0/1.wav", 100, 50), whole[begin + 100 : begin + 150])
        assert not len(middle.read("s0/1.wav", seconds * RATE, 50))
        assert middle.lookup_table(names).num_samples.tolist() == [
            len(middle.read(name)) for name in names
        ]


def test_sweep(audio, steps):
    trials = some_trials(2, 2)
    source = open_source(audio)
    speakers = speakers_of(trials)
    base = trials.labels.astype(float)
    steps = {"duration": steps["duration"]}
    (result,) = run_sweep(
        steps, source, lambda _: np.arange(6.0), trials, base, speakers, num_draws=200, seed=0
    )
    assert [row.label for row in result.rows] == ["all", "4", "3", "2", "1"]
    assert result.rows[0].eer_percent == 0.0
    assert result.rows[1].eer_percent == pytest.approx(eer(np.arange(6.0), trials.labels))


def test_sweep_without_files():
    needed = {
        "noise": "augment.noise_path",
        "reverb": "augment.rir_path",
        "distance": "augment.rir_path",
    }
    for kind, option in needed.items():
        with pytest.raises(ValueError, match=option):
            sweep_steps([kind], {}, None, sample_rate=RATE)


def test_critical_distance(audio, steps):
    impulse = np.zeros(RATE, dtype=np.float32)
    impulse[0] = 1
    ratios_db = []
    for step in steps["distance"]:
        heard = step.transform(impulse, 0)
        direct = heard[: round(0.0025 * RATE)]
        late = heard[round(0.0025 * RATE) :]
        ratios_db.append(10 * np.log10(np.dot(direct, direct) / np.dot(late, late)))
    # At twice the distance, direct sound is 6 dB weaker.
    assert ratios_db == pytest.approx([12.04, 6.02, 0, -6.02, -12.04], abs=0.1)
