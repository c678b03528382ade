"""Options that contradict each other in training, and options without effect."""

import pytest
import yaml

from speakernet.config import Config
from speakernet.config.problems import options_without_effect, problems, training_problems
from speakernet.config.schema import with_changes


def config_of(text):
    changes = yaml.safe_load(text)
    return with_changes(Config(), **{"training": {"max_epochs": 2}, **changes})


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("data.utterances_per_speaker", "loss: {name: angleproto}"),
        ("augment.real_epochs", "augment: {real_epochs: 2, speed_factors: [0.9, 1.0]}"),
        (
            "training.average_checkpoints",
            """
            model: {name: Pretrained, options: {backbone: b, trained: lora}}
            training: {average_checkpoints: 2}
            """,
        ),
        (
            "training.freeze_epochs",
            "training: {max_epochs: 2, freeze_epochs: 2, initial_model: a.pt}",
        ),
        (
            "training.freeze_epochs",
            """
            loss: {name: angleproto}
            data: {utterances_per_speaker: 2}
            training: {freeze_epochs: 1, initial_model: a.pt}
            """,
        ),
        ("training.initial_weight", "training: {initial_weight: 0.3}"),
        ("training.ema_decay", "{runtime: {parallel: fsdp}, training: {ema_decay: 0.9}}"),
        ("loss.sharded", '{runtime: {parallel: fsdp}, loss: {sharded: "on"}}'),
    ],
)
def test_impossible_in_training(option, text):
    config = config_of(text)
    assert [key for key, _ in training_problems(config)] == [option]
    assert not list(problems(config)), "scoring ignores what only training refuses"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("schedule.warmup_epochs", "schedule: {warmup_epochs: 2.0}"),
        ("schedule.warmup_epochs", "schedule: {warmup_epochs: 1.0, name: one_cycle}"),
        ("schedule.margin", "{schedule: {margin: linear}, loss: {name: softmax}}"),
        ("schedule.margin_end_epoch", "schedule: {margin: linear}"),
        ("training.accumulation_steps", "training: {accumulation_steps: 5}"),
        ("training.average_checkpoints", "training: {max_epochs: 2, average_checkpoints: 5}"),
        ("runtime.gpu_id", "runtime: {gpu_id: 3}"),
        ("runtime.compile_scope", 'runtime: {compile: "off", compile_scope: whole}'),
        ("runtime.compile_mode", 'runtime: {compile: "on", compile_mode: max-autotune}'),
        ("runtime.parallel", "runtime: {parallel: fsdp}"),
        ("loss.sharded", 'loss: {sharded: "on"}'),
    ],
)
def test_without_effect(option, text):
    found = options_without_effect(config_of(text), 4, is_on_cpu=True, is_distributed=False)
    assert [key for key, _ in found] == [option]


def test_shuffled_utterances_of_one_speaker():
    config = config_of("data: {sampler: shuffled, utterances_per_speaker: 2}")
    assert [key for key, _ in problems(config)] == ["data.utterances_per_speaker"]
