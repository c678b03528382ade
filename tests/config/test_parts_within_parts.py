"""The two losses of `combined`: chosen by name within the section, with options of their own."""

from pathlib import Path

import pytest

from speakernet.assembly.large_margin import large_margin_config
from speakernet.assembly.model import build_loss
from speakernet.cli import main
from speakernet.config import ConfigError, config_to_dict, load_config
from speakernet.config.help import help_text
from speakernet.config.loading import save_config
from speakernet.config.schema import config_from_dict, replaced
from speakernet.losses.options import (
    AAMSoftmaxOptions,
    AMSoftmaxOptions,
    AngularPrototypicalOptions,
    CombinedOptions,
    GE2EOptions,
    SoftmaxOptions,
    TripletOptions,
)

TEXT = """\
loss:
  name: combined
  classification: {name: amsoftmax, margin: 0.3}
  metric:
    name: triplet
    margin: 0.1
  metric_weight: 0.5
"""
MEANT = CombinedOptions(
    classification=AMSoftmaxOptions(margin=0.3), metric=TripletOptions(margin=0.1), metric_weight=0.5
)


def write(folder: Path, text: str = TEXT, name: str = "my.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_file_and_the_command_line_choose_both(tmp_path: Path) -> None:
    assert load_config(["--config", write(tmp_path)]).config.loss == MEANT
    said = ["--loss.name", "combined", "--loss.metric.name", "triplet", "--loss.metric.margin", "0.1"]
    more = ["--loss.metric_weight", "0.5", "--loss.classification", "{name: amsoftmax, margin: 0.3}"]
    assert load_config([*said, *more]).config.loss == MEANT
    assert load_config(["--loss.name", "combined"]).config.loss == CombinedOptions()


def test_the_loss_is_built_of_them(tmp_path: Path) -> None:
    config = load_config(["--config", write(tmp_path), "--model.embedding_dim", "8"]).config
    loss = build_loss(config, 5)
    assert type(loss).__name__ == "Combined" and loss.margin == 0.3
    assert loss.classification.weight.shape == (5, 8) and loss.metric.margin == 0.1
    assert config.loss.is_metric and config.loss.min_utterances == 2


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    config = load_config(["--config", write(tmp_path)]).config
    assert config_from_dict(config_to_dict(config)) == config
    save_config(config, tmp_path / "config.yaml")
    assert load_config(["--config", str(tmp_path / "config.yaml")]).config.loss == MEANT


def test_another_loss_takes_the_place_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["--config", write(tmp_path), "--loss.metric.name", "ge2e"]).config
    assert config.loss.metric == GE2EOptions() and config.loss.classification == MEANT.classification
    assert "loss.metric.margin (" in caplog.text and "loss.metric is ge2e" in caplog.text
    caplog.clear()
    config = load_config(["--config", write(tmp_path), "--loss.name", "softmax"]).config
    assert config.loss == SoftmaxOptions()
    assert all(f"loss.{key} (" in caplog.text for key in ("classification.margin", "metric.name", "metric_weight"))
    assert replaced(config, loss={"name": "combined"}).loss == CombinedOptions()
    changed = replaced(load_config(["--config", write(tmp_path)]).config, loss={"metric": {"name": "angleproto"}})
    assert changed.loss.metric == AngularPrototypicalOptions() and changed.loss.metric_weight == 0.5


def test_the_second_stage_enlarges_the_margin_of_the_classification_loss(tmp_path: Path) -> None:
    config = load_config(["--config", write(tmp_path), "--training.large_margin_epochs", "1"]).config
    assert large_margin_config(config).loss == MEANT.with_margin(config.training.large_margin)
    plain = load_config(["--training.large_margin_epochs", "1"]).config
    assert large_margin_config(plain).loss == AAMSoftmaxOptions(margin=config.training.large_margin)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: {classification: {margin: 0.3}}", r"loss\.classification\.margin has no effect: .*combined would"),
        (
            "loss: {name: combined, classification: {name: softmax, margin: 0.3}}",
            "the classification loss softmax has no option 'margin'; known: sharded",
        ),
        ("loss: {name: combined, metric: {name: gee2e}}", "unknown metric loss 'gee2e'; did you mean 'ge2e'"),
        ("loss: {name: combined, metric: {name: aamsoftmax}}", "unknown metric loss 'aamsoftmax'; known: angleproto"),
        (
            "loss: {name: combined, metric: {inital_scale: 3}}",
            "metric loss angleproto has no option 'inital_scale'; did you mean 'initial_scale'",
        ),
        ("loss: {name: combined, metric: {initial_scale: many}}", r"loss\.metric\.initial_scale is 'many'; expected"),
        ("loss: {name: combined, metric: ge2e}", "loss.metric is 'ge2e'; expected `option: value` pairs"),
        ("loss: {name: combined, metric_weight: 0, classification_weight: 0}", "expected one of them above 0"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"my\.yaml:\d: .*{message}"):
        load_config(["--config", write(tmp_path, text + "\n")])


def test_help_and_list_explain_them(capsys: pytest.CaptureFixture) -> None:
    assert "--loss.classification (default aamsoftmax)" in help_text("loss")
    assert main(["list", "losses"]) == 0
    assert "loss.metric = angleproto: " in capsys.readouterr().out
