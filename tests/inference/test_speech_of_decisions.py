"""Decisions are about speech: noise around it changes nothing, and without it there are none.

The voices are those of the synthetic corpus, which silero-vad takes for speech.
"""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import speakernet
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.corpora.synthetic.speech import draw_phones, draw_voice, lay_out, synthesise
from speakernet.data import speech
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.speech import find_speech
from speakernet.inference.verifier import enroll, identify
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet

RATE = 16000
NUM_SPEAKERS = 12
NUM_SENTENCES = 5
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
    root = tmp_path_factory.mktemp("spoken")
    names = [
        f"s{speaker:02d}/{number}.wav"
        for speaker in range(NUM_SPEAKERS)
        for number in range(NUM_SENTENCES)
    ]
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        write_audio(root / name, clip(int(name[1:3]), int(name[4])), RATE)
    pairs = itertools.combinations(names, 2)
    lines = [f"{int(one[:3] == other[:3])} {one} {other}" for one, other in pairs]
    (root / "trials.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def model(spoken, set_discriminant, tmp_path_factory):
    """A network that distinguishes these voices, calibrated by the command."""
    torch.manual_seed(0)
    sizes = {"channels": 8, "blocks": [1, 1]}
    # Kaldi's features ignore an offset too.
    net = SpeakerNet.named("ResNet", "TSTP", NUM_SPEAKERS - 1, sizes, front_end="fbank").eval()
    set_discriminant(net, spoken)
    path = tmp_path_factory.mktemp("spoken_model") / "m.pt"
    write_checkpoint(path, model_file_contents(net, loss_normalizes=True))
    assert main(["calibrate", "--model", str(path), "--trials", str(spoken / "trials.txt")]) == 0
    return path


@pytest.fixture(scope="module")
def verifier(model):
    return speakernet.load(model, "cpu")


def clip(speaker, number):
    """A sentence of a synthetic voice with a little noise, (samples,) float32."""
    generator = np.random.default_rng([speaker, number])
    voice = draw_voice(np.random.default_rng(speaker))
    waveform = synthesise(voice, lay_out(draw_phones(generator, 14), generator), generator)
    noise = 1e-3 * generator.standard_normal(len(waveform))
    return (0.3 * waveform / np.abs(waveform).max() + noise).astype(np.float32)


def hiss(seconds, seed=0, level=10 ** (-60 / 20)):
    random = np.random.default_rng(seed)
    return (level * random.standard_normal(round(seconds * RATE))).astype(np.float32)


def then_hiss(waveform, seed):
    return np.concatenate([waveform, hiss(30, seed)])


def test_calibration_is_for_detected_speech(model):
    contents = read_checkpoint(model)
    for one in (*contents["calibration"]["fits"], *contents["thresholds"]):
        assert one["backend"]["speech"] == "detected"


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


def test_names_are_not_given_to_hiss(verifier, tmp_path):
    with verifier.people(tmp_path / "people.db") as store:
        enroll(verifier, store, "Ann", [then_hiss(clip(0, 0), 1)], sample_rate=RATE)
        stranger = identify(verifier, store, then_hiss(clip(7, 1), 2), sample_rate=RATE)
        assert stranger.name is None and stranger.candidates[0][0] == "Ann"
        assert identify(verifier, store, then_hiss(clip(0, 2), 3), sample_rate=RATE).name == "Ann"
        assert len(store.recordings("Ann")) == 1


@pytest.mark.parametrize(
    "sound",
    [
        hiss(3, level=0.1),
        np.full(3 * RATE, OFFSET),
        0.1 * np.sin(np.arange(3 * RATE) / 9).astype(np.float32),
    ],
    ids=["hiss", "constant", "tone"],
)
def test_no_speech(verifier, model, tmp_path, capsys, sound):
    """Every command refuses it, also with a threshold given."""
    write_audio(tmp_path / "voice.wav", clip(0, 0), RATE)
    write_audio(tmp_path / "sound.wav", sound, RATE)
    store = tmp_path / "people.db"
    known = ["--model", str(model), "--store", str(store)]
    assert main(["enroll", "Ann", str(tmp_path / "voice.wav"), *known]) == 0
    before = store.read_bytes()
    sound_file = str(tmp_path / "sound.wav")
    commands = [
        ["verify", str(tmp_path / "voice.wav"), sound_file, "--model", str(model)],
        ["verify", sound_file, sound_file, "--model", str(model), "--threshold=-1"],
        ["identify", sound_file, *known],
        ["enroll", "Bo", sound_file, *known],
    ]
    for command in commands:
        capsys.readouterr()
        status = main(command)
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), command
        assert "sound.wav: no speech" in err or "sound.wav: silent" in err, err
    assert store.read_bytes() == before
    with pytest.raises(AudioError, match=r"no speech|silent"):
        verifier.embed(sound, sample_rate=RATE, speech=True)
    stream = verifier.stream(RATE, verifier.embed(clip(0, 0), sample_rate=RATE, speech=True))
    assert [state.decision for state in stream.add(sound)] == [None, None, None]
    with pytest.raises(AudioError, match="no speech"):
        stream.finish()


def short_clip(speaker, number):
    """Between 0.3 and 1 s of speech, followed by digital silence."""
    waveform = clip(speaker, number)
    (start, _), *_ = speech.sample_edges(find_speech(waveform, RATE), RATE)
    return np.concatenate([waveform[start : start + RATE // 2], np.zeros(2 * RATE, np.float32)])


def test_too_little_speech(verifier, model, tmp_path, capsys):
    """Half a second gives neither odds nor a name, and the answer says how much was heard."""
    first = tmp_path / "first.wav"
    second = tmp_path / "second.wav"
    write_audio(first, clip(0, 0), RATE)
    write_audio(second, short_clip(0, 1), RATE)
    found = verifier.verify(first, second)
    assert 0.3 < found.speech_seconds < 1.0 and not found.is_made
    assert found.log_likelihood_ratio is None and not found.same_speaker
    capsys.readouterr()
    assert main(["verify", str(first), str(second), "--model", str(model)]) == 2
    out = capsys.readouterr().out
    assert out.startswith("undecided") and f"{found.speech_seconds:.2f} s" in out
    assert "times as likely" not in out
    assert main(["verify", str(first), str(second), "--model", str(model), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["log_likelihood_ratio"] is None
    with verifier.people(tmp_path / "people.db") as store:
        enroll(verifier, store, "Ann", [first])
        assert identify(verifier, store, second).name is None
        assert identify(verifier, store, clip(0, 2), sample_rate=RATE).name == "Ann"


def test_odds_are_bounded(verifier, model):
    """The 1,650 pairs of different speakers support odds of 1,000 for one, the 120 pairs of the
    same speaker odds of 100 for two.
    """
    fit = read_checkpoint(model)["calibration"]["fits"][0]
    assert (fit["num_targets"], fit["num_nontargets"]) == (120, 1650)
    assert verifier.rule.bounds == pytest.approx((-math.log(100), math.log(1000)))
    same = verifier.decide(1.0)
    assert fit["offset"] + fit["weights"][0] > math.log(1000)
    assert same.log_likelihood_ratio == pytest.approx(math.log(1000)) and same.is_at_bound
    assert "more than 1,000 times" in same.sentence
    different = verifier.decide(-1.0)
    assert different.log_likelihood_ratio == pytest.approx(-math.log(100))
    assert "more than 100 times" in different.sentence


def test_offset(verifier):
    """A constant added to all samples changes neither what is heard nor the answer."""
    own = clip(0, 0)
    other = clip(0, 1)
    heard = verifier.hear(own, RATE).quality
    shifted = verifier.hear(own + OFFSET, RATE).quality
    assert shifted.speech == pytest.approx(heard.speech, abs=1e-6)
    assert shifted.warnings == heard.warnings
    assert shifted.snr_db == pytest.approx(heard.snr_db, abs=0.1)
    plain = verifier.verify(own, other, sample_rate=RATE)
    offset = verifier.verify(own + OFFSET, other + OFFSET, sample_rate=RATE)
    assert offset.score == pytest.approx(plain.score, abs=2e-3)
    assert offset.same_speaker == plain.same_speaker


@pytest.fixture()
def whole_model(model, tmp_path):
    """The model file as version 0.3.0 wrote it: its calibration does not say what it is for."""
    contents = read_checkpoint(model)
    for one in (*contents["calibration"]["fits"], *contents["thresholds"]):
        del one["backend"]["speech"]
    path = tmp_path / "old.pt"
    write_checkpoint(path, contents)
    return path


def test_files_of_0_3_compare_whole_recordings(whole_model, verifier, spoken, tmp_path, caplog):
    old = speakernet.load(whole_model, "cpu")
    first = then_hiss(clip(0, 0), 1)
    second = then_hiss(clip(0, 1), 2)
    rows = [old.embed(one, sample_rate=RATE) for one in (first, second)]
    found = old.verify(first, second, sample_rate=RATE)
    assert found.score == pytest.approx(old.compare(*rows), abs=1e-6)
    now = verifier.verify(first, second, sample_rate=RATE).score
    assert abs(found.score - now) > 1e-3, "what is compared differs"
    files = [str(spoken / "s00/3.wav"), str(spoken / "s00/4.wav")]
    assert main(["verify", *files, "--model", str(whole_model)]) in (0, 1)
    assert caplog.text.count(RECALIBRATE) == 1 and "speakernet calibrate" in caplog.text
    # Speech is still needed.
    with pytest.raises(AudioError, match="no speech"):
        old.verify(first, hiss(3, level=0.1), sample_rate=RATE)
    fitting = ["--trials", str(spoken / "trials.txt"), "--out", str(tmp_path / "new.pt")]
    assert main(["calibrate", "--model", str(whole_model), *fitting]) == 0
    assert speakernet.load(tmp_path / "new.pt", "cpu").cuts_speech
    caplog.clear()
    main(["verify", *files, "--model", str(tmp_path / "new.pt")])
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
