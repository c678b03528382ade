"""The synthetic corpus: voices that differ, determinism, resuming, what is refused, lists that training reads."""

import shutil

import numpy as np
import pytest
from scipy import signal

from speakernet.corpora.synthetic import CorpusParameters, make_corpus
from speakernet.corpora.synthetic.scenes import NOISES, draw_session, record, room_response
from speakernet.corpora.synthetic.speech import (
    SAMPLE_RATE,
    _resonator_polynomials,
    draw_phones,
    draw_voice,
    lay_out,
    synthesise,
)
from speakernet.data.audio import audio_info, read_audio
from speakernet.data.lists import read_training_list, read_trials

NUMBERS = {"num_speakers": 3, "num_trial_speakers": 3, "num_noises": 6, "num_rooms": 3}
SMALL = NUMBERS | {"utterances_per_speaker": 4, "trial_utterances_per_speaker": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make(tmp_path_factory.mktemp("synthetic") / "corpus")


def make(folder, **options):
    workers = options.pop("num_workers", None)
    parameters = CorpusParameters(**{"seed": 5, **SMALL, **options})
    return make_corpus(folder, parameters, num_workers=workers, show_progress=False)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def generator(*keys):
    return np.random.default_rng(keys)


def steady_vowel(voice, vowel="V", seed=0):
    tracks = lay_out([vowel] * 6, generator(seed))
    waveform = synthesise(voice, tracks, generator(seed + 1))
    return waveform[len(waveform) // 4 : 3 * len(waveform) // 4]


def test_the_cascade_has_its_poles_at_the_formants():
    hz, bandwidth = np.array([[500.0, 1500.0, 2500.0]]), np.array([[60.0, 90.0, 150.0]])
    polynomial = _resonator_polynomials(hz, bandwidth)
    roots = np.roots(polynomial[0])
    found = roots[roots.imag > 0]
    found = found[np.argsort(np.angle(found))]
    np.testing.assert_allclose(np.angle(found) * SAMPLE_RATE / (2 * np.pi), hz[0], rtol=1e-6)
    np.testing.assert_allclose(-np.log(np.abs(found)) * SAMPLE_RATE / np.pi, bandwidth[0], rtol=1e-6)
    assert polynomial.sum() == pytest.approx(1.0)  # unit gain at 0 Hz


def test_the_pitch_of_the_waveform_is_the_voices():
    for seed in range(6):
        voice = draw_voice(generator(seed))
        vowel = steady_vowel(voice).astype(np.float64)
        autocorrelation = signal.correlate(vowel, vowel, method="fft")[len(vowel) - 1 :]
        lags = np.arange(len(autocorrelation))
        candidates = (lags >= SAMPLE_RATE / 450) & (lags <= SAMPLE_RATE / 55)
        best = lags[candidates][autocorrelation[candidates].argmax()]
        # Half an octave of intonation around the mean; an octave error would be found.
        assert abs(np.log2(SAMPLE_RATE / best / voice.pitch_hz)) < 0.7


def test_a_session_colours_and_levels_but_keeps_the_speech():
    random = generator(11)
    speech = synthesise(draw_voice(random), lay_out(draw_phones(random, 10), random), random)
    session = draw_session(random)
    first, second = (record(session, speech, generator(12, take)) for take in range(2))
    assert first.dtype == np.float32 and first.shape == speech.shape
    assert np.abs(first).max() <= 0.951
    # Two takes differ by their background noise only, which lies snr_db below.
    aligned = second * (first @ second) / (second @ second)
    noise_share = np.sum((first - aligned) ** 2) / np.sum(first**2)
    assert noise_share == pytest.approx(2 * 10 ** (-session.snr_db / 10), rel=0.4)


def test_a_room_decays_by_60_db_in_its_decay_time():
    sides, talker_place, microphone = np.array([5.0, 4.0, 3.0]), np.array([1.0, 1.0, 1.5]), np.array([3.0, 2.5, 1.2])
    response = room_response(sides, talker_place, microphone, 0.5, generator(1)).astype(np.float64)
    assert response[0] == pytest.approx(1.0)  # nothing comes before the direct path
    decay_db = 10 * np.log10(np.cumsum(response[::-1] ** 2)[::-1] / np.sum(response**2))
    fit = slice(int(np.argmax(decay_db < -10)), int(np.argmax(decay_db < -35)))
    slope_db = np.polyfit(np.arange(len(response))[fit] / SAMPLE_RATE, decay_db[fit], 1)[0]
    assert -60.0 / slope_db == pytest.approx(0.5, rel=0.2)


def test_the_first_echo_comes_from_the_nearest_wall():
    # Talker and microphone 2 m apart and 0.5 m above the floor of a vast room: the floor's image is sqrt(4 + 1) m off.
    sides, talker, microphone = np.array([[9.0, 9.0, 9.0], [3.5, 4.5, 0.5], [5.5, 4.5, 0.5]])
    response = room_response(sides, talker, microphone, 1.0, generator(1))
    expected = round((np.sqrt(5.0) - 2.0) / 343.0 * SAMPLE_RATE)
    assert np.flatnonzero(response)[:2].tolist() == [0, expected]
    assert 0.5 < response[expected] * np.sqrt(5.0) / 2.0 < 1.0  # 1/r, and what the floor absorbs


@pytest.mark.parametrize("name", NOISES)
def test_every_noise_is_sound_of_the_length_asked_for(name):
    _, make = NOISES[name]
    clips = [make(generator(seed), 24001) for seed in (1, 2, 1)]
    assert clips[0].dtype == np.float32 and clips[0].shape == (24001,)
    assert 0.005 < clips[0].std() < 0.3 and np.abs(clips[0]).max() <= 0.96
    np.testing.assert_array_equal(clips[0], clips[2])
    assert not np.array_equal(clips[0], clips[1])


def test_lists_and_tables(corpus):
    training, trials = read_training_list(corpus.train_list), read_trials(corpus.test_list)
    assert list(training.speakers) == ["syn00000", "syn00001", "syn00002"] and len(training.paths) == 12
    assert trials.labels is not None and set(trials.labels.tolist()) == {0, 1}
    lines = corpus.utterances.read_text().splitlines()
    assert lines[0] == "path,speaker,session,gender,seconds" and len(lines) == 1 + 12 + 12
    for line in lines[1:]:
        path, _, _, _, seconds = line.split(",")
        assert len(read_audio(corpus.utterances.parent / path)) / 16000 == pytest.approx(float(seconds), abs=0.001)
        assert 1.0 < float(seconds) < 9.0
    for root, names in ((corpus.train_path, training.paths), (corpus.test_path, trials.names)):
        assert all(audio_info(root / name).sample_rate == 16000 for name in names)
    assert len(corpus.speakers.read_text().splitlines()) == 1 + 6


def test_trials_ask_for_the_voice_and_not_for_the_channel(corpus):
    trials = read_trials(corpus.test_list)
    training_speakers = set(read_training_list(corpus.train_list).speakers)
    for enrol, test, label in zip(trials.enrol, trials.test, trials.labels, strict=True):
        speakers = [trials.names[row].split("/")[0] for row in (enrol, test)]
        sessions = [trials.names[row].split("/")[1] for row in (enrol, test)]
        assert (speakers[0] == speakers[1]) == bool(label)
        assert not label or sessions[0] != sessions[1]
        assert not training_speakers & set(speakers)


def test_the_same_corpus_from_processes_and_another_from_another_seed(corpus, tmp_path):
    make(tmp_path / "processes", num_workers=2)
    expected = contents(corpus.train_list.parent)
    assert contents(tmp_path / "processes") == expected
    make(tmp_path / "other", seed=6, num_speakers=1, num_noises=0, num_rooms=0, utterances_per_speaker=1)
    name = "train/syn00000/session00/00000.wav"
    assert contents(tmp_path / "other")[name] != expected[name]


def test_a_stopped_run_is_finished_and_a_finished_one_left_alone(corpus, tmp_path):
    whole = contents(corpus.train_list.parent)
    folder = tmp_path / "stopped"
    shutil.copytree(corpus.train_list.parent, folder)
    for name in {*list(whole)[::2], "complete.json", "trials.txt"} - {"parameters.json"}:
        (folder / name).unlink()
    make(folder)
    assert contents(folder) == whole
    (folder / "train/syn00000/session00/00000.wav").unlink()
    make(folder)  # complete: not looked into again
    assert not (folder / "train/syn00000/session00/00000.wav").exists()


def test_other_parameters_and_other_folders_are_refused(corpus, tmp_path):
    before = contents(corpus.train_list.parent)
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "parameters.json").write_text("{")
    for folder, seed, message in (
        (corpus.train_list.parent, 7, "seed 5 -> 7"),
        (tmp_path, 5, "not a synthetic"),
        (tmp_path / "broken", 5, "broken"),
    ):
        with pytest.raises(ValueError, match=message):
            make(folder, seed=seed)
    assert contents(corpus.train_list.parent) == before


@pytest.mark.parametrize(
    "changes",
    [{"num_speakers": 0}, {"num_trial_speakers": 1}, {"seed": -1}, {"trial_utterances_per_speaker": 2}],
    ids=str,
)
def test_numbers_that_make_no_corpus_are_refused_before_anything_is_written(changes, tmp_path):
    with pytest.raises(ValueError, match="synthetic corpus: "):
        make(tmp_path / "corpus", **changes)
    assert not (tmp_path / "corpus").exists()
