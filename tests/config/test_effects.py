"""No option is silently without effect: what no chosen part takes is refused, dropped with a word, or forgiven."""

import math
from pathlib import Path

import pytest
import yaml

from speakernet.config import ConfigError, config_to_dict, load_config
from speakernet.config.loading import save_config
from speakernet.config.schema import MODELS, POOLINGS, SECTIONS, TABLES, config_from_dict, replaced
from speakernet.options import annotations, checked, default_of, documentation, field_names, in_words


def write(folder: Path, text: str, name: str = "my.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


IDLE = [
    ("loss: {name: aamsoftmax, hard_rank: 3}", "loss.hard_rank", "triplet would"),
    ("optimizer: {name: adam, momentum: 0.5}", "optimizer.momentum", "sgd would"),
    ("frontend: {name: log_mel, dither: 1.0}", "frontend.dither", "fbank, mfcc would"),
    ("schedule: {name: cosine, power: 3}", "schedule.power", "polynomial would"),
    ("schedule: {name: constant, final_learning_rate: 1e-5}", "schedule.final_learning_rate", "linear, cosine"),
    (
        "model: {name: RawNet3}\nfrontend: {num_mels: 40}",
        "frontend.num_mels",
        "log_mel, fbank, mfcc",
    ),
    ("model: {name: ResNet, options: {sinc_stride: 3}}", "model.options.sinc_stride", "did you mean 'stem_stride'"),
    (
        "model: {name: ResNet, pooling: MQMHASTP, pooling_options: {head: 4}}",
        "model.pooling_options.head",
        "pooling MQMHASTP has no option 'head'; did you mean 'heads'",
    ),
    ("model: {name: RawNet3, pooling_options: {heads: 4}}", "model.pooling_options.heads", "pooling ECA .*has none"),
]


@pytest.mark.parametrize(("text", "key", "hint"), IDLE)
def test_an_option_that_no_chosen_part_takes_is_refused_by_name(text: str, key: str, hint: str, tmp_path: Path) -> None:
    file = write(tmp_path, text + "\n")
    with pytest.raises(ConfigError, match=rf"my\.yaml:\d: {key} has no effect: .*{hint}"):
        load_config(["--config", file])


def test_the_command_line_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"command line: --hard_rank: loss\.hard_rank has no effect"):
        load_config(["--hard_rank", "3"])
    assert load_config(["--trainfunc", "triplet", "--hard_rank", "3"]).config.loss.hard_rank == 3


def test_flat_files_and_their_defaults_are_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_config(["--config", write(tmp_path, "trainfunc: amsoftmax\nhard_rank: 3\n")])
    assert "my.yaml:2: loss.hard_rank has no effect: the loss amsoftmax" in caplog.text
    caplog.clear()
    load_config(["--defaults", "voxceleb_trainer", "--hard_prob", "0.3"])
    assert "loss.hard_probability has no effect" in caplog.text


def test_what_was_meant_for_a_part_that_a_later_layer_replaces_is_dropped_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = write(tmp_path, "loss: {name: triplet, hard_rank: 3}\noptimizer: {name: sgd, momentum: 0.5}\n", "a.yaml")
    second = write(tmp_path, "optimizer: {name: adamw}\n", "b.yaml")
    config = load_config(["--config", first, "--config", second, "--loss.name", "softmax"]).config
    assert (config.loss.name, config.optimizer.name) == ("softmax", "adamw")
    (record,) = [one for one in caplog.records if "left out" in one.message]
    assert (
        "loss.hard_rank" in record.message and "optimizer.momentum" in record.message and "a.yaml:1" in record.message
    )


def test_naming_the_same_part_again_replaces_nothing(tmp_path: Path) -> None:
    first = write(tmp_path, "loss: {name: triplet, hard_rank: 3}\n", "a.yaml")
    assert load_config(["--config", first, "--loss.name", "triplet"]).config.loss.hard_rank == 3
    with pytest.raises(ConfigError, match="has no effect"):
        load_config(["--config", first, "--loss.name", "triplet", "--loss.scale", "3"])


def test_another_model_replaces_its_front_end_and_its_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write(tmp_path, "model: {name: ResNet, options: {channels: 32}}\nfrontend: {num_mels: 40}\n")
    config = load_config(["--config", first, "--model", "RawNet3"]).config
    assert config.model.options == MODELS["RawNet3"].options()
    assert "model.options.channels" in caplog.text and "frontend.num_mels" in caplog.text


def test_another_pooling_replaces_the_options_of_the_old_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write(tmp_path, "model: {name: ResNet, pooling: MQMHASTP, pooling_options: {heads: 4}}\n")
    config = load_config(["--config", first, "--model.pooling_options.queries", "3"]).config
    assert config.model.pooling_options == POOLINGS["MQMHASTP"].options(heads=4, queries=3)
    config = load_config(["--config", first, "--model.pooling", "auto"]).config
    assert config.model.pooling_options == POOLINGS["TSTP"].options()
    assert "model.pooling is TSTP" in caplog.text and "model.pooling_options.heads" in caplog.text


def test_options_of_a_pooling_follow_the_pooling_that_is_meant() -> None:
    # The model's own pooling, and what it means by a common name.
    config = load_config(["--model", "CAMPPlus", "--model.pooling_options.variance_floor", "1e-8"]).config
    assert config.model.pooling_options.variance_floor == 1e-8
    assert config_from_dict(config_to_dict(config)) == config
    # Another model that has the same pooling keeps them; another pooling drops them.
    assert replaced(config, model={"name": "ResNet34"}).model.pooling_options == config.model.pooling_options
    assert replaced(config, model={"pooling": "ASTP"}).model.pooling_options == POOLINGS["ASTP"].options()
    config = load_config(["--model", "ECAPA_TDNN", "--model.pooling", "ASP"]).config
    assert config.model.pooling_options == POOLINGS["GlobalASTP"].options()
    with pytest.raises(ConfigError, match=r"model\.pooling: unknown pooling 'TSPT'; did you mean 'TSTP'"):
        load_config(["--model.pooling", "TSPT"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("ECAPA_TDNN", "{channels: 60}"), "model.options.channels: 60; expected a multiple of 8"),
        (("ReDimNetB0", "{stages: [[1, 2, 3]]}"), r"\[1.0, 2.0, 3.0\] among them; expected 4 numbers above 0"),
        (("ReDimNet2B0", "{stages: [[1, 1.5, 1, 1, 3, 3, 0]]}"), "expected 7 numbers .*whole but for the width"),
        (("ReDimNetB0", "{stages: []}"), r"\[\]; expected 1 to 64 stages"),
        (("ReDimNetB0", "{two_layers: true, embedding_norm: true}"), "embedding_norm: .*false beside two_layers"),
        (("ReDimNetB0", "{block: resnet}"), "block is 'resnet'; expected basic_resnet or"),
    ],
)
def test_values_of_a_family_that_fit_no_network_are_refused_with_their_place(
    options: tuple[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"command line: --model.options.*{message}"):
        load_config(["--model", options[0], "--model.options", options[1]])


def test_a_saved_copy_holds_what_the_chosen_parts_take_and_loads_again(tmp_path: Path) -> None:
    choices = ["--schedule.name", "constant", "--loss.name", "softmax", "--save_path", str(tmp_path)]
    config = load_config(["--config", "exp01.yaml", *choices]).config
    save_config(config, tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["loss"] == {"name": "softmax", "sharded": "auto"} and "final_learning_rate" not in saved["schedule"]
    again = load_config(["--config", str(tmp_path / "config.yaml")]).config
    assert (again.loss, again.schedule, again.model) == (config.loss, config.schedule, config.model)


@pytest.mark.parametrize("schedule", ["cosine", "exponential"])
def test_a_copy_saved_by_an_earlier_version_loads_with_a_warning(
    schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = config_to_dict(load_config(["--schedule.name", schedule]).config)
    del values["schedule"]["warmup_overlaps"]
    values["loss"] |= {"hard_rank": 10, "initial_scale": 10.0}
    values["schedule"] |= {"decay": 0.9, "decay_interval": 10.0, "power": 2.0, "final_learning_rate": 1e-6}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    config = load_config(["--config", str(tmp_path / "config.yaml")]).config
    assert "loss.hard_rank has no effect" in caplog.text and "schedule.power has no effect" in caplog.text
    assert config.schedule.final_learning_rate == ("auto" if schedule == "exponential" else 1e-6)


def every_option() -> list[tuple[str, type, str]]:
    """(dotted key, class, field) of every option of every part."""
    owners = {section: [owner] for section, owner in SECTIONS.items()}
    for section, (_, table) in TABLES.items():
        owners[section] += [part.options for part in table.values()]
    owners["model.options"] = [part.options for part in MODELS.values()]
    owners["model.pooling_options"] = [part.options for part in POOLINGS.values()]
    found = {
        (section, name): owner for section, ones in owners.items() for owner in ones for name in field_names(owner)
    }
    return [(f"{section}.{name}", owner, name) for (section, name), owner in found.items()]


def numeric(owner: type, name: str) -> bool:
    words = in_words(annotations(owner)[name])
    return "int" in words or "float" in words


@pytest.mark.parametrize(("key", "owner", "name"), every_option(), ids=lambda one: one if isinstance(one, str) else "")
def test_every_option_is_documented_and_its_default_is_one_of_its_values(key: str, owner: type, name: str) -> None:
    assert len(documentation(owner)[name]) > 8, f"{key} has no docstring below it"
    if key not in ("model.options", "model.pooling_options"):
        default = default_of(owner, name)
        assert checked(owner, name, default) == default


@pytest.mark.parametrize(
    ("key", "owner", "name"),
    [one for one in every_option() if numeric(*one[1:])],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_every_number_has_finite_bounds(key: str, owner: type, name: str) -> None:
    is_list = in_words(annotations(owner)[name]).startswith("a list")
    for value in (math.nan, math.inf, -math.inf, 1e15, 10**15, ".nan", ".inf", "abc", ""):
        with pytest.raises(ValueError, match="expected"):
            checked(owner, name, [value] if is_list else value)
