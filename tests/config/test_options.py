"""Every option of every component is described and bounded; wrong ones are refused with file and
line.
"""

import math
import os
import pickle
from pathlib import Path

import pytest
import yaml

from speakernet.assembly.training import build_loss
from speakernet.config import ConfigError, config_from_dict
from speakernet.config.loading import save_config
from speakernet.config.schema import CHOICES, MODELS, POOLINGS, SECTIONS, stages_of, with_changes
from speakernet.losses.options import (
    AMSoftmaxOptions,
    AngularPrototypicalOptions,
    CombinedOptions,
    GE2EOptions,
    SoftmaxOptions,
    TripletOptions,
)
from speakernet.options import OptionError, default_of, description_of, in_words
from tests.config.layers import load_line, load_text, write


def every_option():
    """Holder, name of the component, its class and the field; one for each type an option is
    declared with.
    """
    owners = [(section, "", owner) for section, owner in SECTIONS.items() if section not in CHOICES]
    owners += [
        (one, name, row.options)
        for one, choice in CHOICES.items()
        for name, row in choice.table.items()
    ]
    found = {}
    for holder, name, owner in owners:
        for field, info in owner.model_fields.items():
            found.setdefault(
                (holder, field, str(info.rebuild_annotation())), (holder, name, owner, field)
            )
    return list(found.values())


OPTIONS = every_option()


def words(owner, field):
    return in_words(owner.model_fields[field].rebuild_annotation())


NUMBERS = [option for option in OPTIONS if "number" in words(*option[2:]).split()]


def test_described_and_default_valid():
    for holder, _, owner, field in OPTIONS:
        assert len(description_of(owner, field)) > 8, f"{holder}.{field}"
        default = default_of(owner, field)
        if not isinstance(default, dict) and "Options" not in type(default).__name__:
            made = owner(**{field: default}), owner()
            assert made[0] == made[1], f"{holder}.{field}"


def test_lists_and_mappings_never_change():
    changes = {"noise_snr_db": [5, 10], "speed_factors": [1.0, 0.9]}
    stage = {"name": "first", "epochs": 2, "loss": {"margin": 0.1}}
    config = config_from_dict(
        {
            "augment": changes,
            "model": {"name": "ReDimNetB0"},
            "data": {"test_lists": {"other": "trials.txt"}},
            "training": {"stages": [stage]},
        }
    )
    for values in (config.augment.noise_snr_db, config.training.trackers, config.training.stages):
        with pytest.raises(AttributeError):
            values.append(values[0] if values else 1)
    stages = config.training.stages
    for values, key in (
        (config.model.options.stages[0], 0),
        (config.data.test_lists, "other"),
        (stages[0].loss, "margin"),
    ):
        with pytest.raises(TypeError):
            values[key] = 9
    # Saved, compared and printed as lists.
    values = config.model_dump()
    assert values["augment"]["noise_snr_db"] == [5, 10]
    assert values["model"]["options"]["stages"][0] == [1, 2, 1, 30]
    assert yaml.safe_load(yaml.safe_dump(values)) == values
    assert config_from_dict(values) == config
    # Spawned loader workers get the options pickled.
    assert pickle.loads(pickle.dumps(config)) == config


def test_numbers_have_finite_bounds():
    assert len(NUMBERS) > 140 and {number[0] for number in NUMBERS} >= {*SECTIONS, *CHOICES}
    for _, _, owner, field in NUMBERS:
        is_list = "list" in words(owner, field)
        for value in (
            math.nan,
            math.inf,
            -math.inf,
            10**15,
            "abc",
            True,
            None,
        ):
            if (value is None and "nothing" in words(owner, field)) or (value is True and is_list):
                continue
            with pytest.raises(OptionError) as caught:
                owner(**{field: [value] if is_list else value})
            assert caught.value.field == field


BROKEN = {
    "NUL": ("data:\n  batch_size: 3\0\n", "my.yaml:1"),
    "deep nesting": ("model:\n  options: " + "[" * 5000 + "]" * 5000 + "\n", "my.yaml:2"),
    "aliases of aliases": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{b}: &{b} [{', '.join(9 * [f'*{a}'])}]\n"
            for a, b in zip("abcdefg", "bcdefgh", strict=True)
        )
        + "model:\n  options: {x: *h}\n",
        "my.yaml:4",
    ),
    "date": ("data:\n  batch_size: 2024-13-45\n", "my.yaml:2: '2024-13-45'"),
    "tag": ("data:\n  batch_size: !!int 'x'\n", "my.yaml:2"),
    "object": ("data: !!python/object/apply:os.mkdir ['made']\n", "my.yaml:1"),
    "minutes": ("data:\n  batch_size: 1" + ":59" * 60_000 + "\n", "my.yaml:2"),
    "empty": ("data:\n  batch_size:\n", "my.yaml:2: data.batch_size is empty"),
    "list of lists": (
        "model:\n  options: {blocks: [[1], [2]]}\n  name: ResNet\n",
        "my.yaml:2: model.options.blocks",
    ),
    "dot in a name": ("data: {train_list.x: a}\n", "my.yaml:1: data.train_list.x"),
    "long path": (f"data:\n  train_list: {'x' * 70_000}\n", "my.yaml:2: data.train_list"),
    "not text": (b"\xff\xfe\x00data", "my.yaml"),
    "too large": ("# " + "x" * (1 << 18) + "\n", "262,144"),
    "cut off": ("data: [1, 2\n", "my.yaml:2"),
    "given twice": ("data:\n  batch_size: 1\n  batch_size: 2\n", "my.yaml:3: batch_size"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(name):
    content, found = BROKEN[name]
    with pytest.raises(ConfigError) as caught:
        load_text(content)
    assert found in str(caught.value)
    assert not Path("made").exists()


@pytest.mark.parametrize(
    "text",
    [
        "{channels: " + "[" * 5000 + "]" * 5000 + "}",
        "{a: &a [x, x, x], channels: [" + ", ".join(["*a"] * 21) + "]}",
        "{channels: !!python/object/apply:os.getcwd []}",
        "{channels: 8",
        "{channels: " + "x" * (1 << 18) + "}",
    ],
    ids=lambda text: text[:20],
)
def test_broken_value_in_a_line(text):
    with pytest.raises(ConfigError, match=r"^command line: model\.options"):
        load_line(f"--model.name ResNet --model.options '{text}'")
    with pytest.raises(ConfigError, match=r"my\.yaml"):
        load_text(f"model:\n  name: ResNet\n  options: '{text}'\n")


def test_fifo_is_not_opened():
    os.mkfifo("fifo.yaml")
    with pytest.raises(ConfigError, match=r"fifo\.yaml"):
        load_line("--config fifo.yaml")


# Text, key, and the nearest option or the components that have it.
IDLE = [
    ("loss: {name: aamsoftmax, hard_rank: 3}", "loss.hard_rank", "triplet"),
    (
        "model: {name: RawNet3}\nfrontend: {num_mels: 40}",
        "frontend.num_mels",
        "log_mel, fbank, mfcc",
    ),
    (
        "model: {name: ResNet, options: {sinc_stride: 3}}",
        "model.options.sinc_stride",
        "stem_stride",
    ),
    ("model: {name: RawNet3, pooling_options: {heads: 4}}", "model.pooling_options.heads", "ECA"),
    ("loss: {classification: {margin: 0.3}}", "loss.classification.margin", "combined"),
    (
        "loss: {name: combined, classification: {name: softmax, margin: 0.3}}",
        "loss.classification.margin",
        "sharded",
    ),
    (
        "loss: {name: combined, metric: {inital_scale: 3}}",
        "loss.metric.inital_scale",
        "initial_scale",
    ),
    ("loss: {name: combined, metric: ge2e}", "loss.metric", "ge2e"),
    (
        "loss: {name: combined, metric_weight: 0, classification_weight: 0}",
        "loss.metric_weight",
        "0",
    ),
    ("model: {name: ECAPA_TDNN, options: {channels: 60}}", "model.options.channels", "60"),
    (
        "model: {name: ReDimNetB0, options: {stages: [[1, 2, 3]]}}",
        "model.options.stages",
        "[1.0, 2.0, 3.0]",
    ),
    ("training: {batch_scaling: linear}", "training.batch_scaling", "reference_batch"),
    (
        "model: {name: ReDimNetB0, options: {two_layers: true, embedding_norm: true}}",
        "model.options.embedding_norm",
        "true",
    ),
]


@pytest.mark.parametrize(("text", "key", "hint"), IDLE)
def test_refused_with_place_and_hint(text, key, hint):
    with pytest.raises(ConfigError) as caught:
        load_text(text + "\n")
    found = str(caught.value)
    assert "my.yaml:" in found and f"{key} " in found.replace(":", " ") and hint in found


def test_flat_file_is_warned(caplog):
    text = "trainfunc: amsoftmax\nhard_rank: 3\nsinc_stride: 10\n"
    load_text(text)
    assert "my.yaml:2: loss.hard_rank" in caplog.text
    assert "my.yaml:3: model.options.sinc_stride" in caplog.text
    load_line("--defaults voxceleb_trainer --hard_prob 0.3")
    assert "loss.hard_probability" in caplog.text
    with pytest.raises(ConfigError, match=r"--hard_rank: loss\.hard_rank"):
        load_line("--hard_rank 3")


def test_later_layer_replaces_a_component(caplog):
    text = "loss: {name: triplet, hard_rank: 3}\noptimizer: {name: sgd, momentum: 0.5}\n"
    first = write(text, "a.yaml")
    second = write("optimizer: {name: adamw}\n", "b.yaml")
    config = load_line(f"--config {first} --config {second} --loss.name softmax").config
    assert (config.loss.name, config.optimizer.name) == ("softmax", "adamw")
    (message,) = caplog.messages
    assert all(word in message for word in ("loss.hard_rank", "optimizer.momentum", "a.yaml:1"))
    with pytest.raises(ConfigError, match=r"loss\.scale"):
        load_line(f"--config {first} --loss.name triplet --loss.scale 3")
    # The same name replaces nothing, and an option in an earlier layer may belong to a name in a
    # later one.
    idle = write("loss: {hard_rank: 3}\n", "c.yaml")
    for file in (first, idle):
        assert load_line(f"--config {file} --loss.name triplet").config.loss.hard_rank == 3


def test_another_model_or_pooling(caplog):
    def model_of(line, text=""):
        return load_text(text, line).config.model

    text = "model: {name: ResNet, options: {channels: 32}}\nfrontend: {num_mels: 40}\n"
    assert model_of("--model RawNet3", text).options == MODELS["RawNet3"].options()
    assert "model.options.channels" in caplog.text and "frontend.num_mels" in caplog.text
    text = "model: {name: ResNet, pooling: MQMHASTP, pooling_options: {heads: 4}}\n"
    options = model_of("--model.pooling_options.queries 3", text).pooling_options
    assert options == POOLINGS["MQMHASTP"].options(heads=4, queries=3)
    # The model's meaning of a common option name.
    options = model_of("--model ECAPA_TDNN --model.pooling ASP").pooling_options
    assert options == POOLINGS["GlobalASTP"].options()
    # The model's default pooling.
    config = load_line("--model CAMPPlus --model.pooling_options.variance_floor 1e-8").config
    options = config.model.pooling_options
    assert options.variance_floor == 1e-8 and config_from_dict(config.model_dump()) == config
    assert with_changes(config, model={"name": "ResNet34"}).model.pooling_options == options
    changed = with_changes(config, model={"pooling": "ASTP"})
    assert changed.model.pooling_options == POOLINGS["ASTP"].options()


COMBINED = """\
loss:
  name: combined
  classification: {name: amsoftmax, margin: 0.3}
  metric:
    name: triplet
    margin: 0.1
  metric_weight: 0.5
"""
MEANT = CombinedOptions(
    classification=AMSoftmaxOptions(margin=0.3),
    metric=TripletOptions(margin=0.1),
    metric_weight=0.5,
)


def test_losses_within_combined(caplog):
    file = write(COMBINED)
    config = load_line(f"--config {file}").config
    assert config.loss == MEANT and config.loss.margin == 0.3
    assert config_from_dict(config.model_dump()) == config
    save_config(config, Path("config.yaml"))
    assert load_line("--config config.yaml").config.loss == MEANT
    line = (
        "--loss.name combined --loss.metric.name triplet --loss.metric.margin 0.1 "
        "--loss.metric_weight 0.5 --loss.classification '{name: amsoftmax, margin: 0.3}'"
    )
    assert load_line(line).config.loss == MEANT
    assert load_line("--loss.name combined").config.loss == CombinedOptions()
    other = load_line(f"--config {file} --loss.metric.name ge2e").config
    assert other.loss.metric == GE2EOptions() and other.loss.classification == MEANT.classification
    assert "loss.metric.margin (" in caplog.text
    caplog.clear()
    assert load_line(f"--config {file} --loss.name softmax").config.loss == SoftmaxOptions()
    for key in ("classification.margin", "metric.name", "metric_weight"):
        assert f"loss.{key} (" in caplog.text
    # The second stage enlarges the margin of the classification loss.
    base = "{name: base, epochs: 1}"
    later = "{name: later, epochs: 1, loss: {classification: {margin: 0.5}}}"
    staged = load_line(f"--config {file} --training.stages '[{base}, {later}]'").config
    larger = MEANT.classification.model_copy(update={"margin": 0.5})
    assert stages_of(staged)["later"].loss == MEANT.model_copy(update={"classification": larger})


def test_changes_within_combined():
    config = load_text(COMBINED).config
    assert with_changes(config, loss={"name": "softmax"}).loss == SoftmaxOptions()
    changed = with_changes(config, loss={"metric": {"name": "angleproto"}})
    assert changed.loss.metric == AngularPrototypicalOptions() and changed.loss.metric_weight == 0.5
    loss = build_loss(config, 5)
    assert (loss.margin, len(loss.classification.weight), loss.metric.margin) == (0.3, 5, 0.1)
    with pytest.raises(OptionError):
        CombinedOptions(metric=AMSoftmaxOptions())
    with pytest.raises(ValueError, match="metirc"):
        with_changes(config, loss={"metirc": {}})
