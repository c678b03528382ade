"""Scoring and validation: normalisation, mean, calibration, thresholds; held-out speakers."""

import shutil

import numpy as np
import pytest
import torch

import speakernet
from speakernet.assembly.disturbed import SHRINKAGE
from speakernet.assembly.evaluation import run_evaluation
from speakernet.assembly.inputs import Inputs
from speakernet.checkpoint import read_checkpoint
from speakernet.cli import main
from speakernet.config import Config, load_config
from speakernet.config.schema import with_changes
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.lists import read_training_list, read_trials
from speakernet.evaluation.adaptation import plda
from speakernet.models.model_file import load_model_file
from tests.commands import run_command
from tests.outcomes import records_of, results_of
from tests.small_networks import tiny_resnet, write_model
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")
# An untrained network is enough.
SHORT = {"evaluation": {"eval_frames": 60, "num_crops": 2, "bootstrap_samples": 20}}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "best.pt", tiny_resnet(16))


def configure(root, folder, options=""):
    path = write_recipe(folder / "tiny.yaml", root, folder / "run", SHORT)
    return load_config(["--config", str(path), *options.split()]).config


def evaluated(config, model, **how):
    return run_evaluation(config, Inputs(config, torch.device("cpu")), model, **how)


def test_result_after_training(tiny_corpus, tmp_path, model):
    options = f"--validation_list {tiny_corpus}/trials.txt --data.validation_path {tiny_corpus}"
    config = configure(tiny_corpus, tmp_path, options)
    results = evaluated(config, model, after_training=True).results
    # Four utterances of each speaker have 4.9 s.
    assert results.training == {"speakers": 8, "utterances": 32, "hours": 0.01}
    assert [results.list_name(role) for role in ("trials", "training", "validation")] == [
        "trials.txt",
        "train_list.txt",
        "trials.txt",
    ]
    assert evaluated(configure(tiny_corpus, tmp_path), model).results.training is None


def test_what_decides_besides_the_voices(tiny_corpus, tmp_path, model):
    """The quantities of the scored recordings, also of kept embeddings, and shared speakers."""
    lines = (tiny_corpus / "trials.txt").read_text().splitlines(keepends=True)
    (tmp_path / "fit.txt").write_text("".join(lines[1:]))
    options = f"--evaluation.calibration_list {tmp_path}/fit.txt"
    speakers = {line.split()[1].split("/")[0] for line in lines}
    config = configure(tiny_corpus, tmp_path, options)
    first, again = (evaluated(config, model).results for _ in range(2))
    labels = {row.label for row in first.shortcuts}
    assert {"difference in loudness", "loudness"} <= labels and first.shortcuts == again.shortcuts
    warning = f"{len(speakers)} speakers of the calibration list may also be in the trials"
    assert any(text.startswith(warning) for text in first.warnings)


def test_lists_are_whole_unless_speech_is_asked_for(tiny_corpus, tmp_path, model, monkeypatch):
    """`detected` scores the list as if its recordings had been cut before."""
    cut = tmp_path / "cut"
    edges = np.array([[0.2, 0.9]])
    monkeypatch.setattr("speakernet.data.speech.find_speech", lambda *_: edges)
    for path in tiny_corpus.glob("*/*.wav"):
        name = cut / path.relative_to(tiny_corpus)
        write_audio(name, read_audio(path)[3200:14400])
    for name in ("trials.txt", "train_list.txt"):
        shutil.copy(tiny_corpus / name, cut)
    of_whole = "--evaluation.embedding=whole"
    whole = evaluated(configure(tiny_corpus, tmp_path, of_whole), model).results
    assert whole.backend.get("speech", "whole") == "whole"
    asked = configure(tiny_corpus, tmp_path, f"{of_whole} --evaluation.speech=detected")
    detected = evaluated(asked, model).results
    assert detected.backend["speech"] == "detected"
    of_cut = evaluated(configure(cut, tmp_path, of_whole), model).results
    assert detected.eer_percent == pytest.approx(of_cut.eer_percent)
    assert detected.eer_percent != whole.eer_percent


def test_training_calibrates_for_detected_speech(tiny_corpus, tmp_path, model, monkeypatch):
    """Whatever is reported, decisions get thresholds of their own, fitted on detected speech."""
    searched = []

    def first_half(pieces, sample_rate):
        searched.append(sum(len(piece) for piece in pieces) / sample_rate)
        return np.array([[0.0, searched[-1] / 2]])

    monkeypatch.setattr("speakernet.data.speech.find_speech", first_half)
    trials = tiny_corpus / "trials.txt"
    config = configure(tiny_corpus, tmp_path, f"--evaluation.calibration_list {trials}")
    results = evaluated(config, model, after_training=True).results
    assert results.backend.get("speech", "whole") == "whole"
    thresholds = read_checkpoint(model)["thresholds"]
    kinds = {threshold["backend"].get("speech", "whole") for threshold in thresholds}
    assert kinds == {"whole", "detected"}
    assert len(searched) == len(read_trials(str(trials)).names)
    assert speakernet.load(model, "cpu").cuts_speech


def test_a_finished_run_keeps_a_later_calibration(tiny_corpus, tmp_path, model):
    options = f"--validation_list {tiny_corpus}/trials.txt --data.validation_path {tiny_corpus}"
    config = configure(tiny_corpus, tmp_path, options)
    evaluated(config, model, after_training=True)
    other = tmp_path / "other.txt"
    other.write_text(
        "".join((tiny_corpus / "trials.txt").read_text().splitlines(keepends=True)[::-1])
    )
    run_command(f"calibrate --model {model} --trials {other} --audio {tiny_corpus}")
    calibrated = read_checkpoint(model)["thresholds"]
    evaluated(config, model, after_training=True)
    assert calibrated == read_checkpoint(model)["thresholds"]
    assert calibrated[-1]["list"] == "other.txt"


def test_scoring_does_not_change_the_model_file(tiny_corpus, tmp_path, model):
    options = "--score_norm as --evaluation.cohort_size 5 --evaluation.subtract_mean true"
    fitting = f"--evaluation.calibration_list {tiny_corpus}/trials.txt"
    config = configure(tiny_corpus, tmp_path, f"{options} {fitting}")
    before = model.read_bytes()
    alone = evaluated(config, model).results
    assert model.read_bytes() == before and alone.cllr is not None and alone.thresholds
    written = {
        path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*") if path.is_file()
    }
    assert written == {("best.pt",), ("tiny.yaml",), ("run", "eval", "trials")}
    fitted = evaluated(config, model, after_training=True).results
    contents = torch.load(model, weights_only=True)
    assert contents["embedding_mean"].shape == (16,) and fitted.cllr == pytest.approx(alone.cllr)
    assert contents["thresholds"][0]["backend"] == fitted.backend == alone.backend
    assert fitted.backend["cohort_members"] == 8
    assert len(list(tmp_path.glob("*.pt"))) == 1, "no backup of this run's own file"
    again = evaluated(configure(tiny_corpus, tmp_path, options), model).results
    assert again.cllr == pytest.approx(fitted.cllr)
    for one in (alone, fitted, again):
        assert any("calibration was fitted" in warning for warning in one.warnings)
    # A second scoring must not use the stored calibration.
    assert "cllr" not in evaluated(configure(tiny_corpus, tmp_path), model).results.to_dict()


@pytest.fixture
def calibration_of_training_speakers(tiny_corpus, tmp_path):
    """A list of trials among training speakers 0 to `last`."""

    def write(last):
        pairs = [(1, speaker, speaker) for speaker in range(last + 1)]
        pairs += [(0, speaker, (speaker + 1) % (last + 1)) for speaker in range(last + 1)]
        path = tmp_path / "calibration.txt"
        lines = (
            f"{label} spk{one:02d}/utt0.wav spk{other:02d}/utt1.wav\n"
            for label, one, other in pairs
        )
        path.write_text("".join(lines))
        calibration = "--evaluation.calibration"
        return f"--score_norm s {calibration}_list {path} {calibration}_path {tiny_corpus}"

    return write


def test_cohort_without_those_who_calibrate(
    tiny_corpus, tmp_path, model, calibration_of_training_speakers, caplog
):
    """Speakers held out for validation and those of a calibration list would be normalised against
    themselves.
    """
    caplog.set_level("INFO", "speakernet")
    held_out = "--score_norm s --data.validation_speakers 3"
    for options, left_out in (
        (held_out, 3),
        (calibration_of_training_speakers(1), 2),
        (f"{held_out} --cohort_list {tiny_corpus}/train_list.txt", 3),
    ):
        config = configure(tiny_corpus, tmp_path, options)
        scored = [evaluated(config, model, after_training=after).results for after in (True, False)]
        assert (
            scored[0].backend == scored[1].backend
            and scored[0].backend["cohort_members"] == 8 - left_out
        )
        assert f"leaves out {left_out} speakers" in caplog.text
        assert scored[1].cllr is not None, "the calibration of the training is used again"


def test_mean_is_tied_to_the_embedding_mode(tiny_corpus, tmp_path, model):
    def score(frames=60):
        options = f"--evaluation.subtract_mean true --eval_frames {frames}"
        options += " --evaluation.keep_embeddings false"
        evaluated(configure(tiny_corpus, tmp_path, options), model, after_training=True)
        contents = torch.load(model, weights_only=True)
        return contents["embedding_mean"], contents["embedding_mean_of"]

    crops, of_crops = score()
    assert of_crops == {"embedding": "crops", "eval_frames": 60, "num_crops": 2}
    assert torch.equal(score()[0], crops)
    whole, of_whole = score(frames=0)
    assert of_whole == {"embedding": "whole"} and not torch.allclose(whole, crops)
    assert torch.equal(score()[0], crops)


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_plda_through_microphones(tiny_corpus, tmp_path, model, probability):
    options = "--evaluation.plda true --eval_frames 0 --augment.microphone_probability"
    config = configure(tiny_corpus, tmp_path, f"{options} {probability}")
    train = read_training_list(tiny_corpus / "train_list.txt")
    rows = speakernet.load(model, "cpu").embed([tiny_corpus / path for path in train.paths])
    assert any(
        "evaluation.plda" in warning for warning in evaluated(config, model).results.warnings
    )
    found = evaluated(config, model, after_training=True)
    verifier = speakernet.load(model, "cpu")
    names = list(found.trials.names)
    pair = [tiny_corpus / names[side[0]] for side in (found.trials.enrol, found.trials.test)]
    assert found.scores[0] == pytest.approx(verifier.compare(*map(verifier.embed, pair)), rel=1e-3)
    # As recorded, it equals PLDA of the embeddings; through microphones it differs.
    by_hand = plda(rows.astype(np.float64), train.labels, shrinkage=SHRINKAGE)
    assert np.allclose(verifier.plda.between, by_hand.plda.between, rtol=1e-3) == (probability == 0)
    written = model.read_bytes()
    assert not any(
        "evaluation.plda" in warning for warning in evaluated(config, model).results.warnings
    )
    np.testing.assert_array_equal(
        evaluated(config, model, after_training=True).scores, found.scores
    )
    assert model.read_bytes() == written, "written only once"


def test_impossible_plda_is_refused(tiny_corpus, tmp_path, refuse):
    lines = (tiny_corpus / "train_list.txt").read_text().splitlines()[::4]
    (tmp_path / "one_each.txt").write_text("\n".join(lines) + "\n")
    path = write_recipe(tmp_path / "tiny.yaml", tiny_corpus, tmp_path / "run", SHORT)
    words = f"train --config {path} --evaluation.plda true --train_list {tmp_path}/one_each.txt"
    assert "evaluation.plda" in refuse(words)
    assert not (tmp_path / "run" / "best.pt").exists()


def short_run(corpus, folder, more=""):
    """The minimal command, with fewer epochs."""
    words = f"--train_list {corpus}/train_list.txt --test_list {corpus}/trials.txt {more}"
    words += f" --max_epoch 2 --data.num_workers 0 --runtime.device cpu --save_path {folder}"
    words += " --evaluation.bootstrap_samples 0 --data.crop_frames 60"
    return main(["train", "--config", "small_data.yaml", *words.split()])


@pytest.mark.slow
def test_recipe_with_two_lists(tiny_corpus, tmp_path):
    """The reported trials choose neither epoch nor threshold, and are scored in float32."""
    assert short_run(tiny_corpus, tmp_path, "--mixed-precision bf16 --test_interval 1") == 0
    results = results_of(tmp_path)
    rows = records_of(tmp_path, "evaluation")
    assert [row["precision"] for row in rows] == ["bf16", "bf16"]
    assert results["precision"] == "float32"
    assert results["backend"]["embedding"] == "whole"
    assert not any(
        "chosen on this" in one or "calibration" in one for one in results.get("warnings", [])
    )
    kept = load_model_file(tmp_path / "best.pt").contents
    assert kept["training_summary"]["epoch"] == 2
    assert not kept.get("calibration") and not kept.get("thresholds")


def test_seed_of_held_out_speakers(tiny_corpus):
    data = {
        "train_list": str(tiny_corpus / "train_list.txt"),
        "test_list": str(tiny_corpus / "trials.txt"),
        "validation_speakers": 3,
    }

    def inputs(seed):
        config = with_changes(Config(), data=data, runtime={"seed": seed})
        return Inputs(config, torch.device("cpu"))

    first, again, other = map(inputs, (1, 1, 5))
    assert len(first.training.rows.speakers) == 5
    assert first.checksums() == again.checksums()
    trials = [of_seed.validation.trials for of_seed in (first, again, other)]
    assert trials[0].checksum == trials[1].checksum != trials[2].checksum
    assert first.validation.source is first.training.source


def test_damaged_trial_recording(tiny_corpus, tmp_path, capsys):
    """The header is intact, so only decoding finds the damage; without the check, only after the
    last epoch.
    """
    corpus = tmp_path / "corpus"
    shutil.copytree(tiny_corpus, corpus)
    name = read_trials(corpus / "trials.txt").names[0]
    waveform = read_audio(corpus / name)
    damaged = corpus / "damaged.flac"
    write_audio(damaged, waveform)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    damaged.write_bytes(bytes(content))
    (corpus / "trials.txt").write_text(
        (corpus / "trials.txt").read_text().replace(name, "damaged.flac")
    )
    assert short_run(corpus, tmp_path / "run") == 1
    assert "damaged: 1 undecodable file" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_disk_space_for_a_checkpoint(tiny_corpus, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "speakernet.assembly.runs.shutil.disk_usage", lambda _: usage._replace(free=400 << 10)
    )
    assert short_run(tiny_corpus, tmp_path / "run") == 1
    printed = capsys.readouterr().err
    assert "400.0 KiB" in printed and "--save_path" in printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
