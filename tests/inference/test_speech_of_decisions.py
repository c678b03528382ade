"""Decisions are about speech: noise around it changes nothing, and without it there are none.

The voices are those of the synthetic corpus, which silero-vad takes for speech.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.data import speech
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.speech import find_speech
from speakernet.evaluation.calibration import BY_DURATION, AffineCalibration
from speakernet.inference.verifier import enroll, identify
from tests.commands import run_command
from tests.inference.conftest import make_discriminant, sentence, write_voices
from tests.small_networks import tiny_resnet, write_model

RATE = 16000
NUM_SPEAKERS = 12
STRANGERS = range(NUM_SPEAKERS // 2)
OFFSET = np.float32(0.1)
RECALIBRATE = "before 0.4.0"


@pytest.fixture(autouse=True, scope="module")
def silero():
    """The usual detector, which the conftest replaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech, "default_detector", lambda: speech.SILERO)
        yield


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A folder with five sentences of each voice, and all pairs in `trials.txt`."""
    return write_voices(tmp_path_factory.mktemp("spoken"), clip)


@pytest.fixture(scope="module")
def model(spoken, tmp_path_factory):
    """A network that distinguishes these voices, calibrated by the command."""
    # Kaldi's features ignore an offset too.
    net = tiny_resnet(NUM_SPEAKERS - 1, "TSTP", "fbank")
    make_discriminant(net, spoken)
    path = write_model(tmp_path_factory.mktemp("spoken_model") / "m.pt", net)
    run_command(f"calibrate --model {path} --trials {spoken}/trials.txt")
    return path


@pytest.fixture(scope="module")
def verifier(model):
    return speakernet.load(model, "cpu")


def clip(speaker, number):
    return sentence(speaker, number, 14)


def hiss(seconds, seed=0, level=10 ** (-60 / 20)):
    random = np.random.default_rng(seed)
    return (level * random.standard_normal(round(seconds * RATE))).astype(np.float32)


def then_hiss(waveform, seed):
    return np.concatenate([waveform, hiss(30, seed)])


def test_hiss_is_not_the_voice(verifier):
    """Strangers followed by the same kind of hiss stay strangers, and a person stays the same."""
    for speaker in STRANGERS:
        own = clip(speaker, 3)
        decision = verifier.verify(
            then_hiss(own, 1), then_hiss(clip(speaker + 6, 4), 2), sample_rate=RATE
        )
        assert not decision.same_speaker and decision.log_likelihood_ratio < 0
        clean = verifier.verify(own, clip(speaker, 4), sample_rate=RATE)
        noisy = verifier.verify(own, then_hiss(clip(speaker, 4), 2), sample_rate=RATE)
        assert clean.same_speaker and noisy.same_speaker
        assert noisy.score == pytest.approx(clean.score, abs=0.1)


@pytest.mark.parametrize(
    "sound",
    [
        hiss(3, level=0.1),
        0.1 * np.sin(np.arange(3 * RATE) / 9).astype(np.float32),
    ],
    ids=["hiss", "tone"],
)
def test_no_speech(verifier, model, tmp_path, call, sound):
    """Every command refuses it, also with a threshold given."""
    voice_file = tmp_path / "voice.wav"
    sound_file = tmp_path / "sound.wav"
    write_audio(voice_file, clip(0, 0))
    write_audio(sound_file, sound)
    store = tmp_path / "people.db"
    known = f"--model {model} --store {store}"
    run_command(f"enroll Ann {voice_file} {known}")
    before = store.read_bytes()
    for command in (
        f"verify {voice_file} {sound_file} --model {model}",
        f"verify {sound_file} {sound_file} --model {model} --threshold=-1",
        f"identify {sound_file} {known}",
        f"enroll Bo {sound_file} {known}",
    ):
        status, out, err = call(command)
        assert (status, out) == (2, ""), command
        assert "sound.wav: no speech" in err or "sound.wav: silent" in err, err
    assert store.read_bytes() == before
    stream = verifier.stream(RATE, verifier.embed(clip(0, 0), sample_rate=RATE, speech=True))
    assert [state.decision for state in stream.add(sound)] == [None, None, None]
    with pytest.raises(AudioError, match="no speech"):
        stream.finish()


def short_clip(speaker, number):
    """Between 0.3 and 1 s of speech, followed by digital silence."""
    waveform = clip(speaker, number)
    (start, _), *_ = speech.sample_edges(find_speech(waveform, RATE), RATE)
    return np.concatenate([waveform[start : start + RATE // 2], np.zeros(2 * RATE, np.float32)])


def test_too_little_speech(verifier, model, tmp_path, call):
    """Half a second gives neither odds nor a name, and the answer says how much was heard."""
    first = tmp_path / "first.wav"
    second = tmp_path / "second.wav"
    write_audio(first, clip(0, 0))
    write_audio(second, short_clip(0, 1))
    status, out, _ = call(f"verify {first} {second} --model {model} --json")
    answer = json.loads(out)
    assert 0.3 < answer["speech_seconds"] < 1.0 and answer["log_likelihood_ratio"] is None
    assert status == 2 and not answer["same_speaker"]
    status, out, _ = call(f"verify {first} {second} --model {model}")
    assert status == 2 and out.startswith("undecided") and "times as likely" not in out
    assert f"{answer['speech_seconds']:.2f} s" in out
    with verifier.people(tmp_path / "people.db") as store:
        enroll(verifier, store, "Ann", [first])
        assert identify(verifier, store, second).name is None
        assert identify(verifier, store, clip(0, 2), sample_rate=RATE).name == "Ann"


def test_offset(verifier):
    """A constant added to all samples changes neither what is heard nor the answer."""
    own = clip(0, 0)
    other = clip(0, 1)
    heard, shifted = (verifier.hear(audio, RATE).quality for audio in (own, own + OFFSET))
    assert shifted.speech == pytest.approx(heard.speech, abs=1e-6)
    assert shifted.warnings == heard.warnings
    plain = verifier.verify(own, other, sample_rate=RATE)
    offset = verifier.verify(own + OFFSET, other + OFFSET, sample_rate=RATE)
    assert offset.score == pytest.approx(plain.score, abs=2e-3)
    assert offset.same_speaker == plain.same_speaker


@pytest.fixture
def whole_model(model, tmp_path):
    """The model file as version 0.3.0 wrote it: its calibration does not say what it is for."""
    contents = read_checkpoint(model)
    for entry in (*contents["calibration"]["fits"], *contents["thresholds"]):
        del entry["backend"]["speech"]
    path = tmp_path / "old.pt"
    write_checkpoint(path, contents)
    return path


def test_files_of_0_3_compare_whole_recordings(
    whole_model, verifier, spoken, tmp_path, caplog, call
):
    old = speakernet.load(whole_model, "cpu")
    first = then_hiss(clip(0, 0), 1)
    second = then_hiss(clip(0, 1), 2)
    embeddings = [old.embed(waveform, sample_rate=RATE) for waveform in (first, second)]
    score = old.verify(first, second, sample_rate=RATE).score
    assert score == pytest.approx(old.compare(*embeddings), abs=1e-6)
    now = verifier.verify(first, second, sample_rate=RATE).score
    assert abs(score - now) > 1e-3, "what is compared differs"
    files = f"{spoken}/s00/3.wav {spoken}/s00/4.wav"
    assert call(f"verify {files} --model {whole_model}")[0] in (0, 1)
    assert caplog.text.count(RECALIBRATE) == 1 and "speakernet calibrate" in caplog.text
    # `embed --speech` embeds what is compared.
    out = tmp_path / "e.npz"
    run_command(f"embed {files} --model {whole_model} --speech --out {out}")
    with np.load(out) as embedded:
        compared = old.compare(*embedded["embeddings"][:, None])
    assert compared == pytest.approx(old.verify(*files.split()).score, abs=1e-5)
    # Speech is still needed.
    with pytest.raises(AudioError, match="no speech"):
        old.verify(first, hiss(3, level=0.1), sample_rate=RATE)
    new = tmp_path / "new.pt"
    trials = f"--trials {spoken}/trials.txt --out {new}"
    run_command(f"calibrate --model {whole_model} {trials}")
    assert speakernet.load(new, "cpu").cuts_speech
    caplog.clear()
    call(f"verify {files} --model {new}")
    assert RECALIBRATE not in caplog.text


def test_streams_count_the_speech_of_both_sides(verifier):
    """Against a word there is no decision, however long the stream is."""
    live = clip(0, 1)
    word = clip(0, 0)[: int(0.8 * RATE)]
    for reference, is_made in ((clip(0, 0), True), (word, False)):
        enrolled = verifier.hear(reference, RATE)
        assert (enrolled.quality.speech_seconds >= 1) == is_made
        stream = verifier.stream(RATE, enrolled)
        stream.add(live)
        assert stream.finish().decision.is_made == is_made


def test_durations_count_everywhere(verifier, tmp_path, monkeypatch):
    """Pairs, several recordings, identification and streams are decided by seconds of speech."""
    weights = np.array([4.0, -1.0, 0.5, 1.0, 0.0])
    fitted = AffineCalibration(weights, 0.0, BY_DURATION, 0.5, (1.0, 60.0))
    limits = [{**limit, "threshold": 2.0} for limit in verifier.rule.thresholds]
    rule = replace(verifier.rule, quality=(fitted, limits))
    monkeypatch.setattr(verifier, "rule", rule)
    test = verifier.hear(clip(0, 0)[:RATE], RATE, min_speech_seconds=0)
    several = [verifier.hear(clip(0, number), RATE) for number in (1, 2)]
    seconds = [heard.quality.speech_seconds for heard in (test, *several)]
    with verifier.people(tmp_path / "people.db") as store:
        enroll(verifier, store, "Ada", several)
        identified = identify(verifier, store, test)
    of_all = rule.for_seconds(seconds[0], sum(seconds[1:]))
    for decision in (verifier.verify(test, several), identified.decision):
        assert decision == of_all.decide(decision.score, speech_seconds=decision.speech_seconds)
        assert decision.threshold != rule.decide(0.0).threshold
    assert identified.ratios == (of_all.log_likelihood_ratio(identified.decision.score),)
    stream = verifier.stream(RATE, several[0])
    stream.add(clip(0, 0))
    state = stream.finish()
    so_far = rule.for_seconds(state.speech_seconds, seconds[1])
    assert state.decision.threshold == so_far.decide(state.score).threshold
