"""`speakernet adapt`: written files, the commands that use them, and refusals."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch

import speakernet
from speakernet.assembly.evaluation import run_evaluation
from speakernet.assembly.in_browser import RUNTIME, page_files
from speakernet.assembly.inputs import Inputs
from speakernet.checkpoint import read_checkpoint, write_checkpoint
from speakernet.cli import main
from speakernet.config import load_config
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.lists import read_trials
from speakernet.evaluation import adaptation, embedding
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.scoring import Plda
from speakernet.inference.adapt import AS_IT_IS, adapt, cross_validated, embedded
from speakernet.inference.people import StoreError
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture(scope="module")
def adapted(voices, uncalibrated, tmp_path_factory):
    """Method -> an adapted copy of the small model."""
    folder = tmp_path_factory.mktemp("adapted")
    before = uncalibrated.read_bytes()
    for method in ("whitening", "plda"):
        labels = "folders" if method == "plda" else None
        found = adapt(
            uncalibrated,
            [voices],
            labels=labels,
            out=folder / f"{method}.pt",
            method=method,
            device="cpu",
        )
        assert found.path == folder / f"{method}.pt" and found.method.startswith(method)
    assert uncalibrated.read_bytes() == before
    return folder


def test_adapted_embeddings(voices, uncalibrated, adapted):
    files = sorted(map(str, voices.glob("s*/*.wav")))
    plain, white = (
        speakernet.load(one, "cpu").embed(files) for one in (uncalibrated, adapted / "whitening.pt")
    )
    centred = plain - plain.mean(axis=0)
    covariance = np.cov(plain.T, bias=True)
    shrunk = 0.2 * covariance + 0.8 * np.trace(covariance) / len(covariance) * np.eye(
        len(covariance)
    )
    variances, directions = np.linalg.eigh(shrunk)
    np.testing.assert_allclose(
        white, centred @ (directions / np.sqrt(variances)) @ directions.T, atol=1e-4
    )

    # Adapting an adapted model starts from its embeddings before adaptation.
    again = adapt(
        adapted / "plda.pt", [voices], out=adapted / "again.pt", method="whitening", device="cpu"
    )
    np.testing.assert_allclose(
        speakernet.load(again.path, "cpu").embed(files[:1]), white[:1], atol=1e-5
    )


@pytest.mark.slow
def test_commands(voices, uncalibrated, adapted, tmp_path, capsys):
    model, a, b, c = (
        adapted / "plda.pt",
        *(str(voices / one) for one in ("s00/3.wav", "s00/4.wav", "s01/3.wav")),
    )
    verifier = speakernet.load(model, "cpu")
    store = tmp_path / "people.db"
    assert verifier.is_calibrated and isinstance(verifier.plda, Plda)
    assert {one["backend"]["score"] for one in verifier.contents["thresholds"]} == {"plda"}
    same, other = (verifier.verify(a, one).score for one in (b, c))
    expected = verifier.plda.scores(*(verifier.embed(one) for one in (a, b)))[0, 0]
    assert same == pytest.approx(expected, rel=1e-5) and same > other
    given = ["--model", str(model), "--device", "cpu"]
    assert main(["verify", a, b, *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(same, abs=1e-4)
    assert main(["verify", a, b, *given, "--threshold", "default"]) == 2, "0.4 is a cosine"
    for speaker in (0, 1, 2):
        assert (
            main(
                [
                    "enroll",
                    f"V{speaker}",
                    str(voices / f"s0{speaker}/0.wav"),
                    *given,
                    "--store",
                    str(store),
                ]
            )
            == 0
        )
    capsys.readouterr()
    assert main(["identify", a, *given, "--store", str(store)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("V0")
    # A different adaptation is a different model.
    with pytest.raises(StoreError, match="different model"):
        speakernet.load(adapted / "whitening.pt", "cpu").people(store)
    assert main(["embed", a, *given, "--out", str(tmp_path / "e.npz")]) == 0
    assert np.load(tmp_path / "e.npz")["embeddings"].shape[1] == verifier.embedding_dim
    assert main(["info", str(model)]) == 0 and "training adaptation" in capsys.readouterr().out
    trials = ["--trials", str(voices / "trials.txt"), "--out", str(tmp_path / "calibrated.pt")]
    capsys.readouterr()
    assert main(["calibrate", *given, *trials]) == 0
    assert "for PLDA scores" in capsys.readouterr().out
    again = ["calibrate", "--model", str(tmp_path / "calibrated.pt"), "--store", str(store)]
    assert main([*again, "--out", str(tmp_path / "c.pt"), "--cohort", str(voices / "s05")]) == 1
    assert main(["export", str(model), "--out", str(tmp_path / "m.onnx"), "--speech", a, b]) == 0
    onnx = pytest.importorskip("onnx")
    facts = json.loads(onnx.load(tmp_path / "m.onnx").metadata_props[0].value)
    assert (
        facts["plda"]["between"] == pytest.approx(verifier.plda.between.tolist())
        and facts["thresholds"]
    )


@pytest.mark.parametrize("method", ["whitening", "plda"])
def test_evaluation(tiny_corpus, adapted, tmp_path, method):
    short = {"evaluation": {"eval_frames": 0, "bootstrap_samples": 0, "subtract_mean": True}}
    path = write_recipe(tmp_path / "tiny.yaml", tiny_corpus, tmp_path / "run", short)
    config = load_config(["--config", str(path)]).config
    found = run_evaluation(config, Inputs(config, torch.device("cpu")), adapted / f"{method}.pt")
    verifier = speakernet.load(adapted / f"{method}.pt", "cpu")
    names = list(found.trials.names)
    for row in (0, len(found.scores) - 1):
        pair = [
            str(tiny_corpus / names[side[row]]) for side in (found.trials.enrol, found.trials.test)
        ]
        assert found.scores[row] == pytest.approx(
            verifier.compare(*map(verifier.embed, pair)), rel=1e-3, abs=1e-3
        )
    assert found.results.backend["adaptation"] == verifier.contents["adaptation"]["name"]


def test_choice_of_the_method(voices, uncalibrated, tmp_path, capsys):
    # A table with sessions, embeddings of `embed`, and trials to compare on.
    names = [f"s{speaker:02d}/{number}.wav" for speaker in range(12) for number in range(5)]
    with (tmp_path / "who.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        rows = [[voices / one, one[:3], one[4]] for one in names]
        writer.writerows([["path", "speaker", "session"], *rows[:-1]])
    arguments = ["--model", str(uncalibrated), "--device", "cpu"]
    assert main(["embed", str(voices), *arguments, "--out", str(tmp_path / "e.npz")]) == 0
    labels = [
        "--labels",
        str(tmp_path / "who.csv"),
        "--method",
        "wccn",
        "--out",
        str(tmp_path / "a.pt"),
    ]
    trials = ["--trials", str(voices / "trials.txt")]
    assert (
        main(["adapt", *arguments, "--recordings", str(tmp_path / "e.npz"), *labels, *trials]) == 0
    )
    out = capsys.readouterr().out
    for words in (
        "wccn 0.3",
        AS_IT_IS,
        "left out 1 recording without a label",
        "optimistic",
        "interval",
        "threshold",
    ):
        assert words in out
    summary = read_checkpoint(tmp_path / "a.pt")["training_summary"]
    assert summary["licence"] == "MIT" and summary["adaptation"]["recordings"] == 59


def few_files(folder, voices, num_speakers, num_files):
    """Two or more recordings of each speaker, as paths by speaker."""
    names = [(speaker, number) for speaker in range(num_speakers) for number in range(num_files)]
    for speaker, number in names:
        target = folder / f"s{speaker:02d}" / f"{number}.wav"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(voices / f"s{speaker:02d}/{number}.wav", target)
    return folder


def test_copies_count_once(voices, uncalibrated, tmp_path):
    for number in range(60):
        (tmp_path / "calls").mkdir(exist_ok=True)
        shutil.copy(voices / "s00/0.wav", tmp_path / f"calls/{number:02d}.wav")
    for method in ("auto", "mean", "whitening"):
        with pytest.raises(
            ValueError, match=r"only 1 usable recording of 60.*01\.wav: a copy of .*00\.wav"
        ):
            adapt(
                uncalibrated,
                [tmp_path / "calls"],
                out=tmp_path / "new.pt",
                method=method,
                device="cpu",
            )
    verifier = speakernet.load(uncalibrated, "cpu")
    embeddings = np.repeat(verifier.embed(str(voices / "s00/0.wav")), 60, axis=0)
    names = [f"{number}.wav" for number in range(60)]
    np.savez(
        tmp_path / "e.npz", names=names, embeddings=embeddings, fingerprint=verifier.fingerprint
    )
    with pytest.raises(ValueError, match="only 1 usable recording of 60"):
        adapt(uncalibrated, [tmp_path / "e.npz"], out=tmp_path / "new.pt", device="cpu")
    assert not (tmp_path / "new.pt").exists()
    # A copy beside enough others is left out, and said.
    folder = few_files(tmp_path / "more", voices, 12, 2)
    shutil.copy(folder / "s00/0.wav", folder / "s11/9.wav")
    found = adapt(uncalibrated, [folder], out=tmp_path / "new.pt", method="mean", device="cpu")
    assert found.num_recordings == 24
    assert any("s11/9.wav: a copy of" in note for note in found.notes)


def test_noise_is_no_domain(uncalibrated, tmp_path):
    for number in range(30):
        hiss = 0.1 * np.random.default_rng(number).standard_normal(48000).astype(np.float32)
        write_audio(tmp_path / f"calls/{number}.wav", hiss, 16000)
    with pytest.raises(ValueError, match=r"only 0 usable recordings of 30.*no speech"):
        adapt(uncalibrated, [tmp_path / "calls"], out=tmp_path / "new.pt", device="cpu")
    assert not (tmp_path / "new.pt").exists()


def test_sessions_of_one_speaker_alone_do_not_decide(voices, uncalibrated, tmp_path):
    folder = few_files(tmp_path / "calls", voices, 12, 3)
    with (tmp_path / "who.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "speaker", "session"])
        for path in sorted(folder.glob("*/*.wav")):
            speaker = path.parent.name
            writer.writerow([path, speaker, path.stem if speaker == "s00" else "one"])
    notes = []
    verifier = speakernet.load(uncalibrated, "cpu")
    domain = embedded(verifier, [str(folder)], tmp_path / "who.csv", notes)
    assert (domain.who[1] == -1).all()
    assert any(note.startswith("1 of 12 speakers") for note in notes)


def test_cross_validation():
    random = np.random.default_rng(0)
    who = np.stack([np.repeat(np.arange(20), 4), np.repeat(np.arange(40), 2)])
    rows = random.standard_normal((80, 5))
    fitted_on = []

    def fitter(some, speakers):
        fitted_on.append(set(speakers.tolist()))
        return adaptation.centring(some)

    error, (trials, scores) = cross_validated(rows, who, fitter)
    assert len(fitted_on) == 15 and all(len(one) == 16 for one in fitted_on)
    same_speaker, same_session = who[:, trials.enrol] == who[:, trials.test]
    assert (trials.labels == same_speaker).all() and not same_session.any()
    # Four pairs across the two sessions of each speaker.
    assert trials.labels.sum() == 80 and abs(error - eer(scores, trials.labels)) < 15


def test_telephones(voices, tmp_path, monkeypatch, capsys):
    """A model adapted to narrow-band recordings has an energy floor, and embeds their speech,
    repeated to 16 s.
    """
    net = SpeakerNet.named(
        "ResNet",
        embedding_dim=8,
        model_options={"channels": 8, "blocks": [1, 1]},
        front_end="fbank",
    )
    write_checkpoint(tmp_path / "m.pt", model_file_contents(net, loss_normalizes=True))
    before = speakernet.load(tmp_path / "m.pt", "cpu").fingerprint
    for name in sorted(voices.glob("s0[0-7]/*.wav")):
        (tmp_path / "calls" / name.parent.name).mkdir(parents=True, exist_ok=True)
        write_audio(
            tmp_path / "calls" / name.parent.name / name.name,
            read_audio(name, sample_rate=8000),
            8000,
        )
    # The middle second stands for the speech, whatever the detector finds in these voices.
    monkeypatch.setattr(
        embedding, "speech_of", lambda waveform, rate, min_gap_seconds: waveform[rate : 2 * rate]
    )
    found = adapt(tmp_path / "m.pt", [tmp_path / "calls"], method="mean", device="cpu")
    assert (
        found.path == tmp_path / "m.adapted.pt"
        and "upper band" in found.notes[0]
        and "16 s" in found.notes[0]
    )
    model = speakernet.load(found.path, "cpu")
    assert (
        model.contents["front_end"]["options"]["energy_floor_db"] > 0
        and model.fingerprint != before
    )
    spec = model.contents["adaptation"]
    assert (spec["speech"], spec["repeat_seconds"]) == ("detected", 16.0)
    files = sorted(map(str, (tmp_path / "calls").glob("*/*.wav")))
    speech = np.stack(
        [np.tile(read_audio(name, sample_rate=16000)[16000:32000], 16) for name in files]
    )
    expected = model.net.embed(
        torch.from_numpy(speech), torch.full((len(files),), 16 * 16000), sample_rate=16000
    )
    # Alone, in a batch, and by the command for many recordings.
    np.testing.assert_allclose(model.embed(files[0]), expected[:1], atol=1e-5)
    np.testing.assert_allclose(model.embed(files), expected, atol=1e-5)
    # The mean was fitted on the same embeddings.
    assert np.abs(expected.numpy().mean(axis=0)).max() < 1e-4
    out = ["--out", str(tmp_path / "e.npz"), "--device", "cpu"]
    assert main(["embed", *files, "--model", str(found.path), *out]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "e.npz")["embeddings"], expected, atol=1e-5)
    # The page in a browser cannot find speech.
    for name in RUNTIME:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"m.adapted.pt: .* repeated to 16 s"):
        page_files(found.path, tmp_path)
    # Adapted again, it starts from the network alone; nothing tells these wide-band recordings from
    # others.
    again = adapt(found.path, [voices], out=tmp_path / "again.pt", method="mean", device="cpu")
    assert not again.notes and "speech" not in read_checkpoint(again.path)["adaptation"]
    capsys.readouterr()
    assert main(["info", str(found.path)]) == 0 and "repeat_seconds=16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "one recording": "1 usable recording of",
        "silence": "silent",
        "one speaker": "one speaker",
        "few speakers": "3 of 3 speakers",
        "labels of others": "names none",
        "embeddings of another model": "different model",
        "embeddings of an adapted model": "an adapted model",
        "the model itself": "would overwrite",
        "no labels": "--labels",
        "coral alone": "--out-of-domain",
    }.items(),
)
def test_refusals(voices, uncalibrated, adapted, tmp_path, capsys, case, words):
    calls = tmp_path / "calls"
    out = tmp_path / "new.pt"
    options = []
    model = uncalibrated
    copied = {"one recording": ["s00/0"], "one speaker": [f"s00/{n}" for n in range(5)]}
    for name in copied.get(case, [f"s0{speaker}/{n}" for speaker in range(3) for n in range(5)]):
        for copy in range(1 if case == "one recording" else 5):
            target = calls / name.split("/")[0] / f"{name[-1]}_{copy}.wav"
            target.parent.mkdir(parents=True, exist_ok=True)
            # Another level for each: a copy would not count.
            write_audio(target, (1 - copy / 10) * read_audio(voices / f"{name}.wav"), 16000)
            if case == "silence":
                write_audio(target, np.zeros(16000, np.float32), 16000)
    if case in ("one speaker", "few speakers"):
        options = ["--labels", "folders"]
    if case == "labels of others":
        (tmp_path / "list.txt").write_text("anna anna/1.wav\n")
        options = ["--labels", str(tmp_path / "list.txt")]
    if case.startswith("embeddings of"):
        calls = tmp_path / "e.npz"
        fingerprint = "other"
        if case == "embeddings of an adapted model":
            model = adapted / "plda.pt"
            fingerprint = speakernet.load(model, "cpu").fingerprint
        np.savez(
            calls, names=["a"], embeddings=np.zeros((1, 11), np.float32), fingerprint=fingerprint
        )
    options += {"no labels": ["--method", "wccn"], "coral alone": ["--method", "coral"]}.get(
        case, []
    )
    out = model if case == "the model itself" else out
    before = model.read_bytes()
    given = [
        "--model",
        str(model),
        "--recordings",
        str(calls),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    assert main(["adapt", *given, *options]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "Traceback" not in error
    assert model.read_bytes() == before and sorted(tmp_path.glob("*.pt*")) == []


@pytest.mark.slow
def test_telephone_calls(shared_data, tmp_path):
    """Five folds of people: fitted on the calls of four, tested on the fifth, trials pooled; short
    calls, for speed.
    """
    calls = shared_data / "telephone_calls"
    model = tmp_path / "model.pt"
    published = shared_data.parent / "reference" / "campplus_3dspeaker_192.pt"
    if not calls.is_dir() or not published.is_file():
        pytest.skip("the calls and the real CAM++ of ../shared are not here")
    options = ("--from", "3dspeaker", "--model", "CAMPPlus", "--out", model)
    assert main(["import-weights", str(published), *map(str, options)]) == 0
    with (calls / "utterances.csv").open(newline="") as file:
        short = [
            str(calls / one["path"]) for one in csv.DictReader(file) if float(one["seconds"]) <= 5
        ]
    domain = embedded(speakernet.load(model, "cpu"), short, calls / "utterances.csv", [])
    row = {name: number for number, name in enumerate(domain.names)}
    trials = read_trials(calls / "trials.txt")
    rows_of = np.array([row.get(str(calls / name), -1) for name in trials.names])
    enrol = rows_of[trials.enrol]
    test = rows_of[trials.test]
    is_short = (enrol >= 0) & (test >= 0)
    enrol = enrol[is_short]
    test = test[is_short]
    is_target = trials.labels[is_short]
    tested = np.unique(domain.who[0][enrol])
    methods = {
        "as it is": (
            domain.plain,
            lambda rows, _: adaptation.Transform(((np.eye(192), np.zeros(192)),)),
        ),
        "no labels": (domain.rows, lambda rows, _: adaptation.whitening(rows, shrinkage=0.7)),
        "labels": (
            domain.rows,
            lambda rows, who: adaptation.wccn(rows, who, shrinkage=0.7, total=0.4),
        ),
    }
    errors = dict.fromkeys(methods, 0.0)
    for draw in range(5):
        fold = np.full(domain.who[0].max() + 1, -1)
        fold[np.random.default_rng(draw).permutation(tested)] = np.arange(len(tested)) % 5
        of = fold[domain.who[0]]
        for name, (rows, fit) in methods.items():
            scores = []
            labels = []
            for part in range(5):
                is_tested = (of[enrol] == part) & (of[test] == part)
                units = fit(rows[of != part], domain.who[0][of != part]).apply(rows)
                scores.append((units[enrol[is_tested]] * units[test[is_tested]]).sum(axis=1))
                labels.append(is_target[is_tested])
            errors[name] += eer(np.concatenate(scores), np.concatenate(labels)) / 5
    assert errors["as it is"] > 15 and errors["no labels"] <= 11.0 and errors["labels"] <= 9.5
