"""Training from a model file: the run takes its network, refuses contradictions and reports the
gain.
"""

import json

import pytest
import torch

from speakernet.assembly import reports
from speakernet.checkpoint import read_own_checkpoint
from speakernet.cli import main
from speakernet.cli.shared import load_configuration
from speakernet.data.lists import read_trials
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.results import Results
from speakernet.evaluation.speakers import speakers_of
from speakernet.models.speaker_net import SpeakerNet
from tests.outcomes import results_of
from tests.small_networks import scoring, write_model

pytestmark = pytest.mark.usefixtures("blank_figures")
RECIPE = """# small fine-tuning; does not describe the network
data:
  train_list: {root}/train_list.txt
  test_list: {root}/trials.txt
  batch_size: 8
  crop_frames: 60
  num_workers: 0
loss: {{name: amsoftmax}}
optimizer: {{network_learning_rate_factor: 0.1}}
training: {{max_epochs: 2, test_interval: 1, freeze_epochs: 1, log_interval: 2}}
evaluation: {{eval_frames: 60, num_crops: 2, bootstrap_samples: 50}}
runtime: {{device: cpu, precision: "no", compile: "off"}}
augment: {{enabled: false}}
"""
FRONT_END = {"num_mels": 24, "scale": 1.0, "window": "povey"}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model file without default values: a different front end, size and width, with a mean and a
    threshold.
    """
    torch.manual_seed(5)
    options = {"channels": 8, "blocks": [1, 1, 1, 1], "stem_stride": 2}
    net = SpeakerNet.named("ResNet", "ASP", 24, options, "fbank", FRONT_END, sample_rate=8000)
    path = tmp_path_factory.mktemp("given") / "theirs.pt"
    summary = {"imported_from": "somebody", "licence": "CC BY 4.0"}
    return write_model(
        path,
        net,
        embedding_mean=torch.ones(24),
        embedding_mean_of={"embedding": "theirs"},
        training_summary=summary | {"trained_on": "their voices"},
        **scoring(2.0, 0.1, {"theirs": 1}, theirs=0.5),
    )


@pytest.fixture
def recipe(tiny_corpus, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(root=tiny_corpus))
    return path


def train(recipe, given, run, *options):
    words = f"train --config {recipe} --initial_model {given} --save_path {run}"
    return main([*words.split(), *options])


def test_network_comes_from_the_file(given, recipe):
    loaded = load_configuration(["--config", str(recipe), "--initial_model", str(given)])
    config = loaded.config
    assert (config.model.name, config.model.pooling, config.model.embedding_dim) == (
        "ResNet",
        "ASP",
        24,
    )
    assert (config.model.options.channels, config.model.options.blocks) == (8, (1, 1, 1, 1))
    assert (config.frontend.name, config.frontend.num_mels, config.frontend.window) == (
        "fbank",
        24,
        "povey",
    )
    assert config.data.sample_rate == 8000
    # A scored model file describes itself; the configuration keeps the values of its files.
    scored = load_configuration(["--config", str(recipe), "--eval", "--initial_model", str(given)])
    assert scored.config.model.name != "ResNet"


def test_fine_tuning(given, recipe, tmp_path, capsys):
    before = given.read_bytes()
    run = tmp_path / "run"
    # Enough epochs to beat random weights.
    assert train(recipe, given, run, "--max_epoch", "4", "--lr", "0.01") == 0
    best = read_own_checkpoint(run / "best.pt")
    start = read_own_checkpoint(given)
    assert best["training_summary"]["epoch"] > 0
    assert not torch.equal(
        best["weights"]["embedding.weight"], start["weights"]["embedding.weight"]
    )
    assert best["embedding_mean"] is None or not torch.equal(
        best["embedding_mean"], start["embedding_mean"]
    )
    # Thresholds of the old weights are wrong for the new ones.
    assert "theirs" not in json.dumps([best["thresholds"], best["calibration"]])
    assert best["training_summary"]["corpus"]["is_synthetic"] is False
    facts = best["training_summary"]["initial_model"]
    assert (facts["file"], facts["licence"], facts["trained_on"]) == (
        "theirs.pt",
        "CC BY 4.0",
        "their voices",
    )
    initial = results_of(run)["initial_model"]
    assert not initial["stayed_best"] and set(initial) >= {
        "eer_percent",
        "min_dcf",
        "best_less_initial",
        "sha256",
    }
    difference = initial["best_less_initial"]["EER"]["value"]
    assert difference == pytest.approx(results_of(run)["eer_percent"] - initial["eer_percent"])
    printed = capsys.readouterr().out
    assert (
        "held-out EER: " in printed
        and "EER (%): best.pt is better than the initial model by" in printed
    )
    assert "best.pt is better than the initial model" in (run / "report.html").read_text()
    assert given.read_bytes() == before


def test_no_gain_keeps_the_initial_weights(given, recipe, tmp_path, caplog):
    run = tmp_path / "run"
    # A step too small to change any score.
    words = "--lr 1e-12 --training.freeze_norm_statistics true --frontend.energy_floor_db 20"
    assert train(recipe, given, run, *words.split()) == 0
    best = read_own_checkpoint(run / "best.pt")
    start = read_own_checkpoint(given)
    assert all(
        torch.equal(best["weights"][name], value) for name, value in start["weights"].items()
    )
    # Options for narrow-band recordings may differ from the file.
    assert (
        best["front_end"]["options"]["energy_floor_db"]
        == 20
        != start["front_end"]["options"].get("energy_floor_db", 0)
    )
    assert "no epoch was better than the initial model" in caplog.text
    results = results_of(run)
    # The initial model is not compared with itself.
    assert (
        results["initial_model"]["stayed_best"]
        and "best_less_initial" not in results["initial_model"]
    )
    assert len(results["initial_model"]["sentences"]) == 1
    assert any(
        "no epoch was better than the initial model" in warning for warning in results["warnings"]
    )
    assert "no epoch was better than the initial model" in (run / "report.html").read_text()


def test_better_initial_model_is_warned_of(given, recipe, tiny_corpus, monkeypatch):
    trials = read_trials(tiny_corpus / "trials.txt")
    monkeypatch.setattr(reports, "scores_of_model", lambda *_: trials.labels.astype(float))
    config = load_configuration(["--config", str(recipe), "--initial_model", str(given)]).config
    worse = -1.0 * trials.labels
    scored = Evaluation(trials, worse, Results(eer_percent=30.0), None, None, speakers_of(trials))
    summary = {"initial_eer_percent": 9.0, "best_eer_percent": 8.0}
    summary |= {"best_epoch": 2, "best_stage": ""}
    results = reports.compared_with_initial_model(config, None, summary, scored).results
    assert "the initial model is better than best.pt by 100.000" in results.warnings[0]


MISTAKES = {
    "front end": (["--frontend.name", "log_mel"], ["frontend.name is fbank in the file, log_mel"]),
    "network": (
        ["--model", "ResNetSE34L"],
        ["theirs.pt", "model.name is ResNet in the file, ResNetSE34L"],
    ),
    "never thawed": (
        ["--max_epoch", "1"],
        ["training.freeze_epochs: 1", "training.max_epochs is 1"],
    ),
    "none given": (["--initial_model", ""], ["training.freeze_epochs: 1", "--initial_model"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_contradictions_are_refused(mistake, given, recipe, tmp_path, capsys):
    options, expected = MISTAKES[mistake]
    assert train(recipe, given, tmp_path / "run", *options) == 1
    message = capsys.readouterr().err
    assert all(one in message for one in expected), message
    assert "Traceback" not in message and not (tmp_path / "run" / "last.pt").exists()
