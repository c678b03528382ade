"""The synthetic corpus: different voices, determinism, resuming, refusals, lists for training."""

import json
import shutil

import numpy as np
import pytest
from scipy import signal

from speakernet.corpora.synthetic import CorpusParameters, is_synthetic, make_corpus
from speakernet.corpora.synthetic.scenes import NOISES, draw_session, record, room_response
from speakernet.corpora.synthetic.speech import (
    SAMPLE_RATE,
    draw_phones,
    draw_voice,
    lay_out,
    synthesise,
)
from speakernet.data.audio import audio_info
from speakernet.data.lists import read_training_list, read_trials

NUMBERS = {
    "num_speakers": 3,
    "num_trial_speakers": 3,
    "num_validation_speakers": 2,
    "num_noises": 6,
    "num_rooms": 3,
}
SMALL = NUMBERS | {"utterances_per_speaker": 4, "trial_utterances_per_speaker": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make(tmp_path_factory.mktemp("synthetic") / "corpus")


def make(folder, **options):
    workers = options.pop("num_workers", None)
    parameters = CorpusParameters(**{"seed": 5, **SMALL, **options})
    return make_corpus(folder, parameters, num_workers=workers, show_progress=False)


FIRST = "train/syn00000/session00/00000.wav"


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def generator(*keys):
    return np.random.default_rng(keys)


def steady_vowel(voice):
    waveform = synthesise(voice, lay_out(["V"] * 6, generator(0)), generator(1))
    return waveform[len(waveform) // 4 : 3 * len(waveform) // 4]


def test_pitch():
    for seed in range(6):
        voice = draw_voice(generator(seed))
        vowel = steady_vowel(voice).astype(np.float64)
        autocorrelation = signal.correlate(vowel, vowel, method="fft")[len(vowel) - 1 :]
        lags = np.arange(len(autocorrelation))
        candidates = (lags >= SAMPLE_RATE / 450) & (lags <= SAMPLE_RATE / 55)
        best = lags[candidates][autocorrelation[candidates].argmax()]
        # Intonation spans half an octave around the mean; an error of an octave would be noticed.
        assert abs(np.log2(SAMPLE_RATE / best / voice.pitch_hz)) < 0.7


def test_sessions():
    random = generator(11)
    speech = synthesise(draw_voice(random), lay_out(draw_phones(random, 10), random), random)
    session = draw_session(random)
    first, second = (record(session, speech, generator(12, take)) for take in range(2))
    assert first.dtype == np.float32 and first.shape == speech.shape
    assert np.abs(first).max() <= 0.951
    # Two takes differ only by their background noise, which is snr_db below.
    aligned = second * (first @ second) / (second @ second)
    noise_share = np.sum((first - aligned) ** 2) / np.sum(first**2)
    assert noise_share == pytest.approx(2 * 10 ** (-session.snr_db / 10), rel=0.4)


def test_decay_of_a_room():
    sides = np.array([5.0, 4.0, 3.0])
    talker_place = np.array([1.0, 1.0, 1.5])
    microphone = np.array([3.0, 2.5, 1.2])
    response = room_response(sides, talker_place, microphone, 0.5, generator(1)).astype(np.float64)
    assert response[0] == pytest.approx(1.0)  # the direct path comes first
    decay_db = 10 * np.log10(np.cumsum(response[::-1] ** 2)[::-1] / np.sum(response**2))
    fit = slice(int(np.argmax(decay_db < -10)), int(np.argmax(decay_db < -35)))
    slope_db = np.polyfit(np.arange(len(response))[fit] / SAMPLE_RATE, decay_db[fit], 1)[0]
    assert -60.0 / slope_db == pytest.approx(0.5, rel=0.2)


def test_first_echo():
    # Talker and microphone are 2 m apart, 0.5 m above the floor of a large room; its image is
    # sqrt(4 + 1) m away.
    sides, talker, microphone = np.array([[9.0, 9.0, 9.0], [3.5, 4.5, 0.5], [5.5, 4.5, 0.5]])
    response = room_response(sides, talker, microphone, 1.0, generator(1))
    expected = round((np.sqrt(5.0) - 2.0) / 343.0 * SAMPLE_RATE)
    assert np.flatnonzero(response)[:2].tolist() == [0, expected]
    assert 0.5 < response[expected] * np.sqrt(5.0) / 2.0 < 1.0  # 1/r, and what the floor absorbs


@pytest.mark.parametrize("name", NOISES)
def test_noises(name):
    _, make = NOISES[name]
    clips = [make(generator(seed), 24001) for seed in (1, 2, 1)]
    assert clips[0].dtype == np.float32 and clips[0].shape == (24001,)
    assert 0.005 < clips[0].std() < 0.3 and np.abs(clips[0]).max() <= 0.96
    np.testing.assert_array_equal(clips[0], clips[2])
    assert not np.array_equal(clips[0], clips[1])


def test_lists_and_tables(corpus):
    training = read_training_list(corpus.train_list)
    trials = read_trials(corpus.test_list)
    validation = read_trials(corpus.validation_list)
    assert list(training.speakers) == ["syn00000", "syn00001", "syn00002"]
    assert len(training.paths) == 12 and set(trials.labels.tolist()) == {0, 1}
    lines = corpus.utterances.read_text().splitlines()
    assert lines[0] == "path,speaker,session,gender,seconds" and len(lines) == 1 + 12 + 12 + 8
    for line in lines[1:]:
        path, *_, seconds = line.split(",")
        info = audio_info(corpus.utterances.parent / path)
        assert info.sample_rate == 16000 and 1.0 < info.seconds < 9.0
        assert info.seconds == pytest.approx(float(seconds), abs=0.001)
    people = []
    for root, names in (
        (corpus.train_path, training.paths),
        (corpus.test_path, trials.names),
        (corpus.validation_path, validation.names),
    ):
        assert all((root / name).is_file() for name in names)
        people += {name.split("/")[0] for name in names}
    assert len(people) == len(set(people)) == 3 + 3 + 2
    assert len(corpus.speakers.read_text().splitlines()) == 1 + 8


def test_recognised_by_its_folder(corpus, tmp_path):
    for place in (corpus.train_list, corpus.train_path, corpus.train_list.parent):
        assert is_synthetic(place)
    (tmp_path / "parameters.json").write_text('{"learning_rate": 0.1}')
    assert not is_synthetic(tmp_path / "train_list.txt") and not is_synthetic("s3://bucket/vox2")


def test_sessions_of_trials(corpus):
    trials = read_trials(corpus.test_list)
    for enrol, test, label in zip(trials.enrol, trials.test, trials.labels, strict=True):
        (first, day, _), (second, other_day, _) = (
            trials.names[row].split("/") for row in (enrol, test)
        )
        assert (first == second) == bool(label)
        assert not label or day != other_day


def test_processes_and_seeds(corpus, tmp_path):
    make(tmp_path / "processes", num_workers=2)
    expected = contents(corpus.train_list.parent)
    assert contents(tmp_path / "processes") == expected
    fewer = {"num_speakers": 1, "num_noises": 0, "num_rooms": 0, "utterances_per_speaker": 1}
    make(tmp_path / "other", seed=6, **fewer)
    assert contents(tmp_path / "other")[FIRST] != expected[FIRST]


def test_resuming(corpus, tmp_path):
    whole = contents(corpus.train_list.parent)
    folder = tmp_path / "stopped"
    shutil.copytree(corpus.train_list.parent, folder)
    for name in {*list(whole)[::2], "complete.json", "trials.txt"} - {"parameters.json"}:
        (folder / name).unlink()
    make(folder)
    assert contents(folder) == whole
    (folder / FIRST).unlink()
    make(folder)  # complete, so not checked again
    assert not (folder / FIRST).exists()


def test_corpus_of_an_earlier_version(corpus, tmp_path):
    """A corpus made before there were validation speakers is completed; its other files stay as
    they are.
    """
    whole = contents(corpus.train_list.parent)
    folder = tmp_path / "earlier"
    shutil.copytree(corpus.train_list.parent, folder)
    shutil.rmtree(folder / "validation")
    (folder / "validation.txt").unlink()
    parameters = json.loads((folder / "parameters.json").read_text())
    del parameters["num_validation_speakers"]
    (folder / "parameters.json").write_text(json.dumps(parameters))
    written = (folder / FIRST).stat().st_mtime_ns
    make(folder)
    assert contents(folder) == whole
    assert (folder / FIRST).stat().st_mtime_ns == written


def test_other_parameters_and_folders(corpus, tmp_path):
    folder = corpus.train_list.parent
    before = contents(folder)
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "parameters.json").write_text("{")
    for place, seed, message in (
        (folder, 7, "seed 5 -> 7"),
        (tmp_path, 5, "not a synthetic"),
        (tmp_path / "broken", 5, "broken"),
    ):
        with pytest.raises(ValueError, match=message):
            make(place, seed=seed)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"num_speakers": 0},
        {"num_trial_speakers": 1},
        {"seed": -1},
        {"trial_utterances_per_speaker": 2},
    ],
    ids=str,
)
def test_bad_parameters(changes, tmp_path):
    with pytest.raises(ValueError, match="synthetic corpus: "):
        make(tmp_path / "corpus", **changes)
    assert not (tmp_path / "corpus").exists()
