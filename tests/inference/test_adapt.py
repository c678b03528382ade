"""`speakernet adapt`: written files, the commands that use them, and refusals."""

import json
import shutil

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import speakernet
from speakernet.assembly.evaluation import run_evaluation
from speakernet.assembly.inputs import Inputs
from speakernet.checkpoint import read_checkpoint
from speakernet.config import load_config
from speakernet.data.audio import read_audio, write_audio
from speakernet.evaluation import adaptation, embedding
from speakernet.evaluation.metrics import eer
from speakernet.inference.adapt import AS_IT_IS, Labels, adapt, cross_validate, embed_domain
from speakernet.inference.people import StoreError
from speakernet.inference.serve.in_browser import RUNTIME_FILES, page_files
from tests.commands import run_command
from tests.small_networks import tiny_resnet, write_model
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture(scope="module")
def adapted(voices, uncalibrated, tmp_path_factory):
    """A folder with a copy of the small model adapted by each method."""
    folder = tmp_path_factory.mktemp("adapted")
    before = uncalibrated.read_bytes()
    for method, labels in (("whitening", None), ("plda", "folders")):
        out = folder / f"{method}.pt"
        done = adapt(uncalibrated, [voices], labels=labels, out=out, method=method, device="cpu")
        assert done.path == out and done.method.startswith(method)
    assert uncalibrated.read_bytes() == before
    return folder


def test_adapted_embeddings(voices, uncalibrated, adapted):
    files = sorted(map(str, voices.glob("s*/*.wav")))
    plain = speakernet.load(uncalibrated, "cpu").embed(files, speech=True)
    white = speakernet.load(adapted / "whitening.pt", "cpu").embed(files, speech=True)
    covariance = np.cov(plain.T, bias=True)
    identity = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    variances, directions = np.linalg.eigh(0.2 * covariance + 0.8 * identity)
    expected = (plain - plain.mean(axis=0)) @ (directions / np.sqrt(variances)) @ directions.T
    assert_allclose(white, expected, atol=1e-4)
    # Adapting an adapted model starts from its embeddings before adaptation.
    again = adapt(adapted / "plda.pt", [voices], out=adapted / "again.pt", method="whitening")
    embedding = speakernet.load(again.path, "cpu").embed(files[:1], speech=True)
    assert_allclose(embedding, white[:1], atol=1e-5)


def test_noise_is_not_the_voice(voices, adapted, random):
    verifier = speakernet.load(adapted / "plda.pt", "cpu")
    hiss = 1e-3 * random.standard_normal(20 * 16000)
    first, *strangers = (read_audio(voices / f"s0{row}/3.wav") for row in range(5))
    for stranger in strangers:
        clips = np.append(first, hiss), np.append(stranger, hiss)
        assert not verifier.verify(*clips, sample_rate=16000).same_speaker
    assert "whole" not in verifier.rule.caution


@pytest.mark.slow
def test_commands(voices, adapted, tmp_path, call):
    path = adapted / "plda.pt"
    first, second, third = (voices / name for name in ("s00/3.wav", "s00/4.wav", "s01/3.wav"))
    verifier = speakernet.load(path, "cpu")
    same, other = (verifier.verify(first, audio).score for audio in (second, third))
    embeddings = [verifier.embed(audio, speech=True) for audio in (first, second)]
    expected = verifier.plda.scores(*embeddings)[0, 0]
    assert same == pytest.approx(expected, rel=1e-5) and same > other
    model = f"--model {path}"
    status, out, _ = call(f"verify {first} {second} {model} --json")
    assert status == 0 and json.loads(out)["score"] == pytest.approx(same, abs=1e-4)
    default = f"verify {first} {second} {model} --threshold default"
    assert call(default)[0] == 2, "0.4 is a cosine"
    store = f"--store {tmp_path}/people.db"
    for speaker in range(3):
        enroll = f"enroll V{speaker} {voices}/s0{speaker}/0.wav {model} {store}"
        run_command(enroll)
    assert call(f"identify {first} {model} {store}")[1].splitlines()[1].endswith("V0")
    # A different adaptation is a different model.
    with pytest.raises(StoreError, match="different model"):
        speakernet.load(adapted / "whitening.pt", "cpu").people(tmp_path / "people.db")
    assert "training adaptation" in call(f"info {path}")[1]
    calibrated = tmp_path / "calibrated.pt"
    trials = f"--trials {voices}/trials.txt --out {calibrated}"
    assert "for PLDA scores" in call(f"calibrate {model} {trials}")[1]
    cohort = f"--cohort {voices}/s05 --out {tmp_path}/c.pt"
    assert call(f"calibrate --model {calibrated} {store} {cohort}")[0] == 1


@pytest.mark.parametrize("method", ["whitening", "plda"])
def test_evaluation(tiny_corpus, adapted, tmp_path, method):
    short = {"evaluation": {"eval_frames": 0, "bootstrap_samples": 0, "subtract_mean": True}}
    path = write_recipe(tmp_path / "tiny.yaml", tiny_corpus, tmp_path / "run", short)
    config = load_config(["--config", str(path)]).config
    evaluated = run_evaluation(
        config, Inputs(config, torch.device("cpu")), adapted / f"{method}.pt"
    )
    verifier = speakernet.load(adapted / f"{method}.pt", "cpu")
    trials = evaluated.trials
    for row in (0, len(trials.enrol) - 1):
        names = trials.names[trials.enrol[row]], trials.names[trials.test[row]]
        score = verifier.compare(*(verifier.embed(tiny_corpus / name) for name in names))
        assert evaluated.scores[row] == pytest.approx(score, rel=1e-3, abs=1e-3)
    name = verifier.contents["adaptation"]["name"]
    assert evaluated.results.backend["adaptation"] == name


def test_choice_of_the_method(voices, uncalibrated, tmp_path, call):
    # A table with sessions, and trials to compare on.
    lines = ["path,speaker,session\n"]
    for path in sorted(voices.glob("s*/*.wav")):
        lines.append(f"{path},{path.parent.name},{path.stem}\n")
    (tmp_path / "who.csv").write_text("".join(lines[:-1]))
    status, out, _ = call(
        f"adapt --model {uncalibrated} --recordings {voices} --labels {tmp_path}/who.csv "
        f"--method wccn --out {tmp_path}/a.pt --trials {voices}/trials.txt"
    )
    assert status == 0
    left_out = "left out 1 recording without a label"
    for words in ("wccn 0.3", AS_IT_IS, left_out, "optimistic", "interval", "threshold"):
        assert words in out
    summary = read_checkpoint(tmp_path / "a.pt")["training_summary"]
    assert summary["licence"] == "MIT" and summary["adaptation"]["recordings"] == 59


def few_files(folder, voices, num_speakers, num_files):
    """Two or more recordings of each speaker, as paths by speaker."""
    for speaker in range(num_speakers):
        target = folder / f"s{speaker:02d}"
        target.mkdir(parents=True)
        for number in range(num_files):
            shutil.copy(voices / target.name / f"{number}.wav", target)
    return folder


def test_copies_count_once(voices, uncalibrated, tmp_path):
    new = tmp_path / "new.pt"
    calls = tmp_path / "calls"
    calls.mkdir()
    for number in range(60):
        shutil.copy(voices / "s00/0.wav", calls / f"{number:02d}.wav")
    message = r"only 1 usable recording of 60.*01\.wav: a copy of .*00\.wav"
    with pytest.raises(ValueError, match=message):
        adapt(uncalibrated, [calls], out=new)
    assert not new.exists()
    # A copy beside enough others is left out, and said.
    folder = few_files(tmp_path / "more", voices, 12, 2)
    shutil.copy(folder / "s00/0.wav", folder / "s11/9.wav")
    done = adapt(uncalibrated, [folder], out=new, method="mean")
    assert done.num_recordings == 24 and "s11/9.wav: a copy of" in " ".join(done.notes)


def test_other_domain(voices, uncalibrated, tmp_path):
    """Files of the other domain that lie in no speaker's folder change nothing."""
    other = few_files(tmp_path / "other", voices, 4, 3)
    kinds = {"labels": "folders", "method": "plda", "out_of_domain": other}
    tried = adapt(uncalibrated, [voices], out=tmp_path / "a.pt", **kinds).tried
    for file in voices.glob("s0[4-9]/*.wav"):
        shutil.copy(file, other / f"{file.parent.name}{file.name}")
    assert adapt(uncalibrated, [voices], out=tmp_path / "b.pt", **kinds).tried == tried


def test_noise_is_no_domain(uncalibrated, tmp_path):
    for number in range(20):
        hiss = np.random.default_rng(number).standard_normal(48000).astype(np.float32)
        write_audio(tmp_path / f"calls/{number}.wav", 0.1 * hiss)
    with pytest.raises(ValueError, match=r"only 0 usable recordings of 20.*no speech"):
        adapt(uncalibrated, [tmp_path / "calls"], out=tmp_path / "new.pt", device="cpu")
    assert not (tmp_path / "new.pt").exists()


def test_sessions_of_one_speaker_alone_do_not_decide(voices, uncalibrated, tmp_path):
    folder = few_files(tmp_path / "calls", voices, 12, 3)
    lines = ["path,speaker,session\n"]
    for path in sorted(folder.glob("*/*.wav")):
        speaker = path.parent.name
        lines.append(f"{path},{speaker},{path.stem if speaker == 's00' else 'monday'}\n")
    (tmp_path / "who.csv").write_text("".join(lines))
    notes = []
    verifier = speakernet.load(uncalibrated, "cpu")
    domain = embed_domain(verifier, [str(folder)], tmp_path / "who.csv", notes)
    assert (domain.who.sessions == -1).all()
    assert any(note.startswith("1 of 12 speakers") for note in notes)


def test_labels_name_converted_recordings(voices, uncalibrated, tmp_path):
    """The list has the paths that `prepare` wrote; the recordings are the originals, below sessions
    of people with a space in their names.
    """
    lines = []
    for speaker, number in np.ndindex(10, 2):
        name = f"Ann {speaker}/day {number}/take 1.wav"
        (tmp_path / "my voices" / name).parent.mkdir(parents=True)
        shutil.copy(voices / f"s{speaker:02d}" / f"{number}.wav", tmp_path / "my voices" / name)
        lines.append(f"Ann_{speaker} /gone/converted/{name}.wav\n")
    (tmp_path / "train_list.txt").write_text("".join(lines))
    notes = []
    verifier = speakernet.load(uncalibrated, "cpu")
    recordings = [str(tmp_path / "my voices")]
    domain = embed_domain(verifier, recordings, tmp_path / "train_list.txt", notes)
    speakers, sessions = domain.who
    assert notes == [] and len(domain.names) == len(np.unique(sessions)) == 20
    assert np.bincount(speakers).tolist() == [2] * 10


def test_cross_validation():
    random = np.random.default_rng(0)
    who = np.stack([np.repeat(np.arange(20), 4), np.repeat(np.arange(40), 2)])
    rows = random.standard_normal((80, 5))
    fitted_on = []

    def fitter(some, speakers):
        fitted_on.append(set(speakers.tolist()))
        return adaptation.centring(some)

    error, (trials, scores) = cross_validate(rows, Labels(*who), fitter)
    assert len(fitted_on) == 15 and all(len(speakers) == 16 for speakers in fitted_on)
    same_speaker, same_session = who[:, trials.enrol] == who[:, trials.test]
    assert (trials.labels == same_speaker).all() and not same_session.any()
    # Four pairs across the two sessions of each speaker.
    assert trials.labels.sum() == 80 and abs(error - eer(scores, trials.labels)) < 15


@pytest.mark.slow
def test_telephones(voices, tmp_path, monkeypatch, call):
    """A model adapted to narrow-band recordings has an energy floor, and embeds their speech,
    repeated to 16 s.
    """
    path = write_model(tmp_path / "m.pt", tiny_resnet(front_end="fbank"))
    before = speakernet.load(path, "cpu").fingerprint
    calls = tmp_path / "calls"
    files = []
    for source in sorted(voices.glob("s0[0-7]/*.wav")):
        files.append(str(calls / source.parent.name / source.name))
        write_audio(files[-1], read_audio(source, sample_rate=8000), 8000)
    # The middle second stands for the speech, whatever the detector finds in these voices.
    monkeypatch.setattr(
        embedding, "speech_of", lambda waveform, rate, min_gap_seconds: waveform[rate : 2 * rate]
    )
    done = adapt(path, [calls], method="mean")
    assert done.path == tmp_path / "m.adapted.pt"
    assert "upper band" in done.notes[0] and "16 s" in done.notes[0]
    model = speakernet.load(done.path, "cpu")
    assert model.contents["front_end"]["options"]["energy_floor_db"] > 0
    assert model.fingerprint != before
    speech = [np.tile(read_audio(name, sample_rate=16000)[16000:32000], 16) for name in files]
    lengths = torch.full((len(files),), 16 * 16000)
    expected = model.net.embed(torch.from_numpy(np.stack(speech)), lengths, sample_rate=16000)
    # In a batch, and by the command for many recordings.
    out = tmp_path / "e.npz"
    run_command(f"embed {calls} --model {done.path} --out {out}")
    for embeddings in (model.embed(files), np.load(out)["embeddings"]):
        assert_allclose(embeddings, expected, atol=1e-5)
    # The mean was fitted on the same embeddings.
    assert np.abs(expected.numpy().mean(axis=0)).max() < 1e-4
    # The page in a browser cannot find speech.
    for name in RUNTIME_FILES:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"m.adapted.pt: .* repeated to 16 s"):
        page_files(done.path, tmp_path, [])
    # Adapted again, it starts from the network alone; nothing tells these wide-band recordings from
    # others.
    again = adapt(done.path, [voices], out=tmp_path / "again.pt", method="mean")
    assert not again.notes and "speech" not in read_checkpoint(again.path)["adaptation"]
    assert "repeat_seconds=16" in call(f"info {done.path}")[1]


@pytest.mark.parametrize(
    ("num_speakers", "options", "message"),
    [
        (1, "", "usable recordings of 5"),
        (6, "--labels folders", "6 of 6 speakers"),
        (6, "--labels {folder}/list.txt", "names none"),
        (6, "--method wccn", "--labels"),
        (6, "--method coral", "--out-of-domain"),
        (6, "--out {model}", "would overwrite"),
    ],
)
def test_refusals(voices, uncalibrated, tmp_path, refuse, num_speakers, options, message):
    folder = few_files(tmp_path / "calls", voices, num_speakers, 5)
    (tmp_path / "list.txt").write_text("anna anna/1.wav\n")
    before = uncalibrated.read_bytes()
    given = options.format(folder=tmp_path, model=uncalibrated)
    out = "" if "--out " in given else f"--out {tmp_path}/new.pt"
    assert message in refuse(f"adapt --model {uncalibrated} --recordings {folder} {given} {out}")
    assert uncalibrated.read_bytes() == before and not list(tmp_path.glob("*.pt*"))
