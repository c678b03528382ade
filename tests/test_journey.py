"""The main job through the command line on a tiny corpus: train, resume, score, and the mistakes users make."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speakernet import terminal
from speakernet.assembly import runs
from speakernet.cli import main
from speakernet.evaluation import bootstrap, scoring
from speakernet.training.progress import LoadingFacts
from tests.tiny_recipe import write_recipe

JOURNEY = {
    "data": {"batch_size": 8, "crop_frames": 60},
    "model": {"embedding_dim": 32, "options": {"channels": 8, "blocks": [1, 1], "stem_stride": 2}},
    "training": {"max_epochs": 2, "test_interval": 1, "log_interval": 2},
    "evaluation": {"eval_frames": 60, "num_crops": 2, "bootstrap_samples": 50},
}


@pytest.fixture()
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "exps" / "tiny"


@pytest.fixture()
def recipe(tiny_corpus: Path, tmp_path: Path, run_folder: Path) -> Path:
    return write_recipe(tmp_path / "tiny.yaml", tiny_corpus, run_folder, JOURNEY)


def train(recipe: Path, *options: str) -> int:
    return main(["train", "--config", str(recipe), *options])


@pytest.fixture(scope="module")
def finished(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run of two epochs, and its recipe; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_recipe(folder / "tiny.yaml", tiny_corpus, folder / "run", JOURNEY)
    assert train(path) == 0
    return folder / "run", path


def test_a_run_leaves_what_the_contract_says(finished: tuple[Path, Path], tiny_corpus: Path) -> None:
    run, _ = finished
    for name in (
        "config.yaml",
        "log.txt",
        "metrics.jsonl",
        "last.pt",
        "best.pt",
        "results.json",
        "scores.txt",
        "report.html",
    ):
        assert (run / name).is_file(), name
    results = json.loads((run / "results.json").read_text())
    assert 0 <= results["eer_percent"] <= 100
    assert len(results["eer_interval_percent"]) == 2
    assert set(results["min_dcf"]) >= {"0.01", "0.05"}
    assert (results["num_trials"], results["num_targets"]) == (153, 18)
    trials = [line.split()[1:] for line in (tiny_corpus / "trials.txt").read_text().splitlines()]
    scores = [line.split() for line in (run / "scores.txt").read_text().splitlines()]
    assert [line[:2] for line in scores] == trials
    assert all(len(line) == 3 and float(line[2]) == float(line[2]) for line in scores)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {one["kind"] for one in records} >= {"step", "epoch", "evaluation"}
    evaluations = [one for one in records if one["kind"] == "evaluation"]
    # Six speakers: enough for a rough interval at every validation.
    assert all(len(one["eer_interval_percent"]) == 2 and "det_band" not in one for one in evaluations)


def test_tensorboard_shows_curves_settings_and_the_final_result(finished: tuple[Path, Path]) -> None:
    events = EventAccumulator(str(finished[0]))
    events.Reload()
    tags = events.Tags()
    wanted = {"evaluation/min_dcf/0.01", "evaluation/eer_interval_percent/low", "test/eer_percent", "step/loss"}
    assert wanted <= set(tags["scalars"]) and not {"step/margin", "evaluation/num_trials"} & set(tags["scalars"])
    assert {"test/det", "test/scores", "test/llrs"} <= set(tags["images"])
    assert "configuration/text_summary" in tags["tensors"]
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")


def test_few_lines_come_before_the_first_step_and_the_details_are_in_the_log(
    recipe: Path, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert train(recipe, "--max_epoch", "1", "--runtime.memory_fraction", "0.5") == 0
    # The terminal's handler leaves the details out.
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    first = next(number for number, line in enumerate(lines) if line.startswith("epoch 1: loss"))
    assert first <= 12, lines[:first]
    assert sum("device" in line for line in lines[:first]) == 1
    assert sum("memory_fraction = no effect" in line for line in lines[:first]) == 1
    log = (run_folder / "log.txt").read_text()
    for detail in (
        "torch setting: threads",
        "python 3",
        "RAM corpus: no (",
        "optimizer ",
        "training files: all 32 are there",
    ):
        assert detail in log and not any(detail in line for line in lines), detail
    assert all(line in log for line in lines if "\n" not in line)


@pytest.mark.parametrize(("options", "is_disk"), [((), True), (("--augment.speed_factors", "[1.0, 0.9]"), False)])
def test_advice_about_data_knows_how_fast_the_disk_was_in_training(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], is_disk: bool
) -> None:
    """Before the first step nothing has been read; and with changed speeds it is not the disk that is timed."""
    asked: list[LoadingFacts] = []
    monkeypatch.setattr(runs, "data_wait_advice", lambda share, facts: asked.append(facts) or "")
    on = ("--augment.enabled", "true", *options) if options else ()
    assert train(recipe, "--max_epoch", "1", "--loss.name", "softmax", *on) == 0
    assert [facts.read_bytes_a_second > 0 for facts in asked] == [is_disk]


def test_a_start_that_is_refused_leaves_no_folder(recipe: Path, run_folder: Path) -> None:
    assert train(recipe, "--train_list", "nowhere.txt") == 1
    assert not run_folder.exists()


def test_the_model_file_is_plain_and_self_describing(finished: tuple[Path, Path]) -> None:
    contents = torch.load(finished[0] / "best.pt", weights_only=True)
    assert set(contents) >= {
        *("model", "front_end", "sample_rate", "weights", "embedding_mean", "calibration", "thresholds"),
        "training_summary",
    }
    assert contents["model"]["name"] == "ResNet"
    assert not any("_orig_mod." in key or "module." in key for key in contents["weights"])
    assert set(torch.load(finished[0] / "last.pt", weights_only=True)) >= set(contents) - {"calibration"}


def test_a_finished_run_says_so_and_goes_on_with_more_epochs(
    finished: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    before = (copy / "last.pt").read_bytes()
    assert train(finished[1], "--save_path", str(copy), "--initial_model", "other.pt") == 0
    assert "initial model other.pt: not read, the run goes on from" in caplog.text
    said = caplog.text + "".join(capsys.readouterr())
    assert "--max_epoch" in said
    assert (copy / "last.pt").read_bytes() == before
    assert train(finished[1], "--save_path", str(copy), "--max_epoch", "3") == 0
    epochs = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert max(line["epoch"] for line in epochs if line["kind"] == "epoch") == 3
    # what was given on the command line is in the run's copy only, so the next commands have to name that
    assert f"trainSpeakerNet.py --config {copy}/config.yaml --eval" in caplog.text


@pytest.mark.parametrize("name", ["report.html", "best.pt", "scores.txt"])
def test_a_finished_run_makes_again_what_is_missing(finished: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    (copy / name).unlink()
    before = (copy / "last.pt").read_bytes()
    assert train(finished[1], "--save_path", str(copy)) == 0
    assert (copy / name).is_file() and (copy / "last.pt").read_bytes() == before
    assert (copy / "scores.txt").read_text() == (finished[0] / "scores.txt").read_text()


def test_a_finished_run_makes_damaged_results_again(finished: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    (copy / "results.json").write_text((copy / "results.json").read_text()[:300])
    assert train(finished[1], "--save_path", str(copy)) == 0
    assert json.loads((copy / "results.json").read_text())["num_trials"]


def test_a_report_of_before_the_last_epochs_is_made_again(finished: tuple[Path, Path], tmp_path: Path) -> None:
    """As a run leaves it that was trained on and killed while its report was made."""
    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    before = (copy / "report.html").stat().st_mtime_ns
    os.utime(copy / "last.pt", ns=(before + 1, before + 1))
    leftover = copy / "plots" / ".scores.png.1-ab.tmp"
    leftover.write_bytes(b"half")
    assert train(finished[1], "--save_path", str(copy)) == 0
    assert (copy / "report.html").stat().st_mtime_ns > before and not leftover.exists()


def test_an_initial_model_is_read_where_a_damaged_run_begins_anew(
    finished: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"cut off")
    options = ["--save_path", str(tmp_path / "run"), "--initial_model", str(finished[0] / "best.pt")]
    assert train(finished[1], *options, "--max_epoch", "1") == 0
    assert "so it begins anew" in caplog.text and "not read" not in caplog.text


def test_scoring_needs_no_training_data_and_touches_nothing_of_the_run(
    finished: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    options = ["--eval", "--initial_model", str(run / "best.pt"), "--save_path", str(run)]
    missing = [
        "--train_list",
        "nowhere.txt",
        "--train_path",
        "nowhere",
        "--musan_path",
        "nowhere",
        "--rir_path",
        "nowhere",
    ]
    assert train(finished[1], *options, *missing) == 0
    folder = run / "eval" / "trials"
    assert {path.name for path in folder.iterdir()} >= {"results.json", "scores.txt", "report.html"}
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    trained = [float(line.split()[2]) for line in (run / "scores.txt").read_text().splitlines()]
    alone = [float(line.split()[2]) for line in (folder / "scores.txt").read_text().splitlines()]
    assert alone == pytest.approx(trained, abs=1e-4)


def test_every_phase_of_scoring_says_where_it_is_without_a_terminal(
    finished: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 8)
    monkeypatch.setattr(bootstrap, "SHOWN_WORK", 0)
    # Without the embeddings that are kept there, which would be taken.
    shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns("embeddings"))
    options = ["--eval", "--save_path", str(tmp_path / "run"), "--evaluation.subtract_mean", "true"]
    options += ["--evaluation.score_norm", "as", "--evaluation.slices", "[snr]"]
    assert train(finished[1], *options) == 0
    phases = {line.partition(":")[0] for line in caplog.messages if "%, " in line}
    assert phases >= {
        *("embedding trials", "embedding training mean", "embedding cohort train list"),
        *("scores against the cohort", "intervals", "signal-to-noise ratios"),
    }


def test_unlabelled_pairs_are_scored_without_an_eer(
    finished: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = tmp_path / "pairs.txt"
    lines = (tiny_corpus / "trials.txt").read_text().splitlines()
    pairs.write_text("".join(line.split(maxsplit=1)[1] + "\n" for line in lines))
    options = ["--eval", "--initial_model", str(finished[0] / "best.pt"), "--test_list", str(pairs)]
    assert train(finished[1], *options, "--save_path", str(tmp_path / "out"), "--eval_frames", "0") == 0
    folder = tmp_path / "out" / "eval" / "pairs"
    assert len((folder / "scores.txt").read_text().splitlines()) == len(lines)
    assert json.loads((folder / "results.json").read_text()).get("eer_percent") is None


def test_targets_alone_are_not_called_unlabelled(
    finished: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = tmp_path / "targets.txt"
    lines = (tiny_corpus / "trials.txt").read_text().splitlines(keepends=True)
    targets.write_text("".join(line for line in lines if line.startswith("1 ")))
    options = ["--eval", "--test_list", str(targets), "--test_path", str(tiny_corpus)]
    options += ["--initial_model", str(finished[0] / "best.pt"), "--save_path", str(tmp_path / "out")]
    assert train(finished[1], *options) == 0
    assert "18 trials scored; none of the 18 trials" in caplog.text and "unlabelled" not in caplog.text


@pytest.mark.slow  # tests/assembly/test_training.py does the same with fewer steps
def test_interrupted_run_resumes_to_the_same_weights(recipe: Path, run_folder: Path, tmp_path: Path) -> None:
    deterministic = ("--runtime.deterministic", "true")
    # The schedule spans the whole run: one that was planned shorter is another run. A constant rate compares them.
    constant = ("--schedule.name", "constant")
    assert train(recipe, *deterministic, *constant, "--save_path", str(tmp_path / "a")) == 0
    assert train(recipe, *deterministic, *constant, "--save_path", str(tmp_path / "b"), "--max_epoch", "1") == 0
    assert train(recipe, *deterministic, *constant, "--save_path", str(tmp_path / "b")) == 0
    straight, resumed = (torch.load(tmp_path / name / "last.pt", weights_only=True)["weights"] for name in "ab")
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


MISTAKES = {
    "missing list": (["--train_list", "nowhere.txt"], "nowhere.txt"),
    "missing trials": (["--test_list", "nowhere.txt"], "nowhere.txt"),
    "too few classes": (["--nClasses", "3"], "8"),
    "unknown model": (["--model", "ResNetSE43L"], "ResNetSE34L"),
    "unknown loss": (["--trainfunc", "amsoftmaxx"], "amsoftmax"),
    "metric loss with one utterance": (["--trainfunc", "angleproto", "--nPerSpeaker", "1"], "utterances_per_speaker"),
    "absent GPU": (["--runtime.device", "cuda"], "GPU"),
    "missing initial model": (["--initial_model", "nowhere.pt"], "nowhere.pt"),
    "eval without a model": (["--eval", "--save_path", "nowhere"], "initial_model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_answered_before_the_first_step(
    mistake: str, recipe: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mistake == "absent GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    options, expected = MISTAKES[mistake]
    assert train(recipe, *options) != 0
    message = capsys.readouterr().err
    assert expected in message
    assert "Traceback" not in message
    assert not (run_folder / "last.pt").exists()


def test_malformed_line_is_named_with_its_number(recipe: Path, tiny_corpus: Path, tmp_path: Path, capsys) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text((tiny_corpus / "train_list.txt").read_text() + "justonecolumn\n")
    assert train(recipe, "--train_list", str(broken)) == 1
    assert "broken.txt, line 33" in capsys.readouterr().err


def test_trials_naming_missing_files_are_counted(recipe: Path, tmp_path: Path, capsys) -> None:
    trials = tmp_path / "trials.txt"
    trials.write_text("".join(f"{n % 2} spk08/utt0.wav spk08/none{n}.wav\n" for n in range(14)))
    assert train(recipe, "--test_list", str(trials)) == 1
    message = capsys.readouterr().err
    assert "14" in message
    assert "none0.wav" in message


def test_a_checkpoint_of_another_model_is_refused(finished: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    contents = torch.load(finished[0] / "best.pt", weights_only=True)
    contents["weights"].pop(next(iter(contents["weights"])))
    torch.save(contents, tmp_path / "half.pt")
    options = ["--eval", "--initial_model", str(tmp_path / "half.pt"), "--save_path", str(tmp_path / "out")]
    assert train(finished[1], *options) == 1
    assert "half.pt" in capsys.readouterr().err


def test_the_report_says_that_the_best_checkpoint_was_chosen_on_its_list(finished: tuple[Path, Path]) -> None:
    results = json.loads((finished[0] / "results.json").read_text())
    assert any("chosen on this very list" in warning for warning in results["warnings"])
    assert "chosen on this very list" in (finished[0] / "report.html").read_text()


def test_scoring_by_itself_says_so_too(finished: tuple[Path, Path], tmp_path: Path) -> None:
    """The model file knows the list that chose it."""
    options = ["--eval", "--initial_model", str(finished[0] / "best.pt"), "--save_path", str(tmp_path / "out")]
    assert train(finished[1], *options) == 0
    (path,) = (tmp_path / "out" / "eval").glob("*/results.json")
    assert any("chosen on this very list" in warning for warning in json.loads(path.read_text())["warnings"])
