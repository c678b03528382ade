"""Training, resuming and scoring through the command line on a tiny corpus, and common mistakes."""

import logging
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from speakernet.cli import main
from speakernet.files import sha256_of
from tests.outcomes import records_of, results_of, scores_of
from tests.tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")
RECIPE = yaml.safe_load("""
data: {batch_size: 8, crop_frames: 60}
model: {embedding_dim: 32, options: {channels: 8, blocks: [1, 1], stem_stride: 2}}
training: {max_epochs: 2, test_interval: 1, log_interval: 2}
evaluation: {eval_frames: 60, num_crops: 2, bootstrap_samples: 50}
""")


@pytest.fixture
def run_folder(tmp_path):
    return tmp_path / "exps" / "tiny"


@pytest.fixture
def recipe(tiny_corpus, tmp_path, run_folder):
    return write_recipe(tmp_path / "tiny.yaml", tiny_corpus, run_folder, RECIPE)


def train(recipe, *options):
    """Train with a recipe; an option that is text may hold several words."""
    words = ["train", "--config", str(recipe)]
    for option in options:
        words += option.split() if isinstance(option, str) else [str(option)]
    return main(words)


@pytest.fixture(scope="module")
def finished(tiny_corpus, tmp_path_factory):
    """A finished run of two epochs, and its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_recipe(folder / "tiny.yaml", tiny_corpus, folder / "run", RECIPE)
    assert train(path) == 0
    return folder / "run", path


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished[0], tmp_path / "my copy"))


def weights_of(folder):
    return torch.load(folder / "last.pt", weights_only=True)["weights"]


def test_the_run_folder(finished, tiny_corpus):
    run, _ = finished
    assert {"config.yaml", "last.pt", "best.pt", "report.html"} <= {
        path.name for path in run.iterdir()
    }
    results = results_of(run)
    assert 0 <= results["eer_percent"] <= 100 and len(results["eer_interval_percent"]) == 2
    assert set(results["min_dcf"]) >= {"0.01", "0.05"}
    assert (results["num_trials"], results["num_targets"]) == (153, 18)
    trials = [line.split()[1:] for line in (tiny_corpus / "trials.txt").read_text().splitlines()]
    assert [line.split()[:2] for line in (run / "scores.txt").read_text().splitlines()] == trials
    assert all(score == score for score in scores_of(run))
    assert {record["kind"] for record in records_of(run)} >= {"step", "epoch", "evaluation"}
    # Six speakers are enough for a rough interval at every validation.
    for record in records_of(run, "evaluation"):
        assert len(record["eer_interval_percent"]) == 2
    assert any("chosen on" in warning for warning in results["warnings"])


def test_few_lines_before_the_first_step(recipe, run_folder, caplog):
    caplog.set_level(logging.INFO)
    assert train(recipe, "--max_epoch", "1", "--runtime.cudnn_benchmark", "true") == 0
    # The terminal's handler omits the details.
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    first = next(number for number, line in enumerate(lines) if line.startswith("epoch 1: loss"))
    assert first <= 12, lines[:first]
    assert sum("device" in line for line in lines[:first]) == 1
    assert sum("cudnn_benchmark has no effect" in line for line in lines[:first]) == 1
    log = (run_folder / "log.txt").read_text()
    for detail in (
        "torch settings: ",
        "machine: ",
        "RAM corpus: no (",
        "audio: files: all 32 exist",
    ):
        assert detail in log and not any(detail in line for line in lines), detail
    assert all(line in log for line in lines if "\n" not in line)


def test_more_epochs(finished, copy, caplog, capsys):
    caplog.set_level(logging.INFO)
    before = (copy / "last.pt").read_bytes()
    assert train(finished[1], "--save_path", copy, "--initial_model", "other.pt") == 0
    assert "initial model other.pt" in caplog.text and (copy / "last.pt").read_bytes() == before
    assert train(finished[1], "--save_path", copy, "--max_epoch", "3") == 0
    assert records_of(copy, "epoch")[-1]["epoch"] == 3
    lines = capsys.readouterr().out.splitlines()
    assert f"best model: {copy / 'best.pt'} (epoch " in " ".join(lines)
    # Options from the command line are only in the run's copy, so the next commands must name that
    # copy; they can be pasted into a shell although its name has a space.
    printed = [line.rpartition("    ")[0] for line in lines[lines.index("next:") + 1 :]]
    scoring, continuing = map(shlex.split, printed)
    for words in (scoring, continuing):
        assert words[0] == "python" and words[2:4] == ["--config", str(copy / "config.yaml")]
    assert scoring[-1] == str(copy / "best.pt") and continuing[-1] == "6"


@pytest.mark.parametrize("name", ["report.html", "best.pt", ""])
def test_report_is_remade(finished, copy, name):
    """It is remade if a file is missing or older than the last checkpoint, as after a kill during
    the report.
    """
    if name:
        (copy / name).unlink()
    last = weights_of(copy)
    made = (copy / "report.html").stat().st_mtime_ns if not name else 0
    leftover = copy / "plots" / ".scores.png.1-ab.tmp"
    if not name:
        os.utime(copy / "last.pt", ns=(made + 1, made + 1))
        leftover.write_bytes(b"half")
    assert train(finished[1], "--save_path", copy) == 0
    assert results_of(copy)["num_trials"] == 153
    assert all(torch.equal(last[name], value) for name, value in weights_of(copy).items())
    assert scores_of(copy) == scores_of(finished[0]) and (copy / "best.pt").is_file()
    assert (copy / "report.html").stat().st_mtime_ns > made and not leftover.exists()


@pytest.mark.parametrize("is_older", [False, True])
def test_changed_training_list(finished, copy, tiny_corpus, tmp_path, caplog, capsys, is_older):
    """A finished model belongs to the earlier training list, also in a copy whose files lost their
    dates.
    """
    before = results_of(copy)
    if is_older:
        os.utime(copy / "last.pt")
    caplog.set_level(logging.INFO)
    options = f"--train_list {without_last(tiny_corpus / 'train_list.txt', tmp_path)}"
    assert train(finished[1], "--save_path", copy, f"--train_path {tiny_corpus} {options}") == 0
    after = results_of(copy)
    assert "nothing to train" not in caplog.text
    assert after["training"] == before["training"]
    is_said = "train_list.txt as it was" in capsys.readouterr().out
    assert (after == before) == is_said == (not is_older)
    assert sha256_in(after, "training") == sha256_of(tiny_corpus / "train_list.txt")


def test_changed_trials(finished, copy, tiny_corpus, tmp_path):
    """Other trials get another report; the list that chose the best model stays as it was."""
    before = results_of(copy)
    trials = tiny_corpus / "trials.txt"
    changed = without_last(trials, tmp_path)
    options = f"--test_list {changed} --test_path {tiny_corpus} --data.validation_list {trials}"
    options += f" --data.validation_path {tiny_corpus}"
    assert train(finished[1], options, "--save_path", copy) == 0
    after = results_of(copy)
    assert after["num_trials"] == before["num_trials"] - 1
    assert sha256_in(after, "trials") == sha256_of(changed)
    assert sha256_in(after, "validation") == sha256_of(trials)


def without_last(path, folder):
    """A copy of a list without its last line."""
    lines = path.read_text().splitlines(keepends=True)
    (folder / path.name).write_text("".join(lines[:-1]))
    return folder / path.name


def sha256_in(results, role):
    (sha256,) = (listed["sha256"] for listed in results["lists"] if listed["role"] == role)
    return sha256


def test_damaged_run_is_kept(finished, tmp_path, capsys):
    (tmp_path / "last.pt").write_bytes(b"cut off")
    options = f"--save_path {tmp_path} --initial_model {finished[0]}/best.pt --max_epoch 1"
    assert train(finished[1], options) == 1
    assert "last.pt" in capsys.readouterr().err
    assert (tmp_path / "last.pt").read_bytes() == b"cut off"


def test_scoring_a_finished_run(finished, copy):
    def files():
        return {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}

    before = files()
    missing = "--train_list nowhere --train_path nowhere --musan_path nowhere --rir_path nowhere"
    own = ("--initial_model", copy / "best.pt", "--save_path", copy)
    assert train(finished[1], "--eval", missing, *own) == 0
    folder = copy / "eval" / "trials"
    assert {path.name for path in folder.iterdir()} >= {"results.json", "scores.txt", "report.html"}
    assert files() == before
    assert scores_of(folder) == pytest.approx(scores_of(copy), abs=1e-4)
    # The model file records the list it was chosen on.
    assert any("chosen on" in warning for warning in results_of(folder)["warnings"])


@pytest.mark.parametrize("kind", ["unlabelled", "targets"])
def test_lists_without_an_error_rate(finished, tiny_corpus, tmp_path, kind, capsys):
    lines = (tiny_corpus / "trials.txt").read_text().splitlines()
    kept = [line for line in lines if line.startswith("1 ")]
    if kind == "unlabelled":
        kept = [line.split(maxsplit=1)[1] for line in lines]
    (tmp_path / "pairs.txt").write_text("\n".join(kept))
    options = (
        f"--eval --test_list {tmp_path}/pairs.txt --test_path {tiny_corpus} --eval_frames 0 "
        f"--initial_model {finished[0]}/best.pt --save_path {tmp_path}/out"
    )
    assert train(finished[1], options) == 0
    folder = tmp_path / "out" / "eval" / "pairs"
    assert len(scores_of(folder)) == len(kept) and results_of(folder).get("eer_percent") is None
    printed = capsys.readouterr().out
    assert f"{len(kept)} trials scored" in printed
    assert ("unlabelled" in printed) == (kind == "unlabelled")


MISTAKES = {
    "--train_list nowhere.txt": "nowhere.txt",
    "--train_list broken.txt": "broken.txt, line 2",
    "--test_list trials.txt": "none0.wav",
    "--nClasses 3": "8",
    "--model ResNetSE43L": "ResNetSE34L",
    "--trainfunc angleproto --nPerSpeaker 1": "utterances_per_speaker",
    "--initial_model nowhere.pt": "nowhere.pt",
    "--eval --save_path nowhere": "initial_model",
    "--eval --initial_model half.pt": "half.pt",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_mistakes(options, recipe, run_folder, finished, tmp_path, monkeypatch, capsys):
    """Refused before the first step, without a traceback or a run folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.txt").write_text("a a/1.wav\njustonecolumn\n")
    trials = [f"{n % 2} spk08/utt0.wav spk08/none{n}.wav\n" for n in range(14)]
    (tmp_path / "trials.txt").write_text("".join(trials))
    if "half.pt" in options:
        contents = torch.load(finished[0] / "best.pt", weights_only=True)
        contents["weights"].popitem()
        torch.save(contents, tmp_path / "half.pt")
    assert train(recipe, options) != 0
    message = capsys.readouterr().err
    assert MISTAKES[options] in message and "Traceback" not in message and not run_folder.exists()
