"""Stages of a run: what each starts from, draws, changes and frees, and how it resumes."""

import dataclasses
import math
import weakref
from typing import Any

import pytest
import torch
import yaml

from speakernet import distributed
from speakernet.assembly import fine_tuning, reports
from speakernet.assembly.runs import train_experiment
from speakernet.assembly.training import build_loss
from speakernet.checkpoint import read_own_checkpoint
from speakernet.config import Config, ConfigError, load_config
from speakernet.config.schema import with_changes
from speakernet.data.batches import ResidentMaker
from speakernet.evaluation.results import Results
from speakernet.losses.sharded import shard_head
from speakernet.run_folder import later_stages
from speakernet.training.trainer import Trainer
from tests.outcomes import digests
from tests.parallel.several import in_several
from tests.tiny_recipe import two_stages, write_recipe

SPEAKERS = 8


CHANGES = yaml.safe_load("""
data: {batch_size: 8, crop_frames: 50, ram_corpus: "on"}
augment: {enabled: true, speed_factors: [0.9, 1.0, 1.1]}
frontend: {spec_augment: true}
loss: {name: aamsoftmax}
training: {test_interval: 1, average_checkpoints: 0, save_steps: 1}
evaluation: {num_crops: 1, eval_frames: 60, bootstrap_samples: 0}
""")
"""Everything that is random."""


@dataclasses.dataclass
class Evaluated:
    """An evaluation that takes no time."""

    results: Results = dataclasses.field(default_factory=Results)
    speakers: Any = None
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """The report takes longer than these runs."""
    skip_report(monkeypatch)


def skip_report(patch):
    patch.setattr(reports, "run_evaluation", lambda *arguments, **options: Evaluated())
    patch.setattr(reports, "write_evaluation", lambda *arguments: [])


@pytest.fixture
def stages(monkeypatch):
    """The arguments with which each stage is built, and what of the first is still `alive` when the
    second begins.
    """
    seen = {"plans": [], "starts": [], "classes": [], "parts": [], "alive": None}
    build_loader = fine_tuning.build_training_loader

    def watch_loader(*arguments, **options):
        if seen["parts"]:
            seen["alive"] = [name for name, part in seen["parts"] if part() is not None]
        loader = build_loader(*arguments, **options)
        for name, part in (
            ("loader", loader),
            ("maker", loader.maker),
            ("corpus", loader.maker.reader),
        ):
            seen["parts"].append((name, weakref.ref(part)))
        if isinstance(loader.maker, ResidentMaker):
            seen["parts"].append(("resident corpus", weakref.ref(loader.maker.corpus.samples)))
        seen["plans"].append([loader.sampler.epoch(epoch) for epoch in range(2)])
        seen["classes"].append(loader.num_classes)
        return loader

    monkeypatch.setattr(fine_tuning, "build_training_loader", watch_loader)
    build_trainer = fine_tuning.build_trainer

    def watch_trainer(*arguments, **options):
        trainer = build_trainer(*arguments, **options)
        copies = [
            {k: v.clone() for k, v in one.state_dict().items()}
            for one in (trainer.net, trainer.loss)
        ]
        seen["starts"].append(copies)
        parts = {
            "optimizer": trainer.step.optimizer,
            "average": trainer.average,
            "step": trainer.step,
        }
        seen["parts"] += [(name, weakref.ref(part)) for name, part in parts.items()]
        return trainer

    monkeypatch.setattr(fine_tuning, "build_trainer", watch_trainer)
    return seen


STAGES = yaml.safe_load("""
- name: head
  epochs: 1
  training: {ema_decay: 0.5}
  augment: {speed_factors: [0.9, 1.0, 1.1]}
- name: joint
  epochs: 2
  optimizer: {name: sgd, learning_rate: 0.01}
  data: {crop_frames: 60}
- name: long
  epochs: 1
  loss: {margin: 0.4}
  augment: {enabled: false}
""")


@pytest.fixture
def staged(tiny_corpus, tmp_path):
    """A function that makes the configuration of a run of three stages."""

    def make(name, *options, stages=STAGES):
        path = tmp_path / f"{name}.yaml"
        later = {"training": {"stages": stages}}
        recipe = write_recipe(path, tiny_corpus, tmp_path / name, CHANGES, later)
        return load_config(["--config", str(recipe), *options])

    return make


def test_start_of_the_second_stage(staged, tmp_path, stages):
    run = tmp_path / "run"
    words = "--training.ema_decay 0.9 --training.average_checkpoints 2 --data.device_resident on"
    train_experiment(staged("run", *words.split(), stages=two_stages(2, 2, 70)))
    assert "resident corpus" in dict(stages["parts"]) and stages["alive"] == []
    kept = [
        torch.load(path, weights_only=True)
        for path in sorted((run / "checkpoints").glob("epoch_*.pt"))
    ]
    net, head = stages["starts"][1]
    for part, found in (("weights", net), ("head", head)):
        for key, value in kept[0][part].items():
            if value.is_floating_point() and "running" not in key:
                mean = ((value.double() + kept[1][part][key].double()) / 2).float()
                assert torch.equal(found[key], mean), key
    first, second = stages["plans"]
    assert not any((one.rows == other.rows).all() for one in first for other in second)
    # Three times the speakers stay in the head; unperturbed speech keeps its labels.
    assert stages["classes"] == [3 * SPEAKERS, SPEAKERS]
    assert next(value for value in head.values() if value.ndim == 2).shape[0] == 3 * SPEAKERS
    assert not any(plan.voices.any() for plan in second)


def train_until_killed(config, monkeypatch, stage, killed_at):
    """Train until `killed_at` steps of a later stage are done."""
    run_step = Trainer.run_step
    train = Trainer.train

    def stop_after(trainer, batches):
        run_step(trainer, batches)
        if trainer.stage.name == stage and trainer.state.step == killed_at:
            trainer.store.wait()
            raise InterruptedError

    def stop_before(trainer):
        if trainer.stage.name == stage and killed_at == 0:
            raise InterruptedError
        return train(trainer)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(Trainer, "run_step", stop_after)
        patch.setattr(Trainer, "train", stop_before)
        train_experiment(config)


def assert_same(one, other, names):
    for name in names:
        found = [digests(folder / name) for folder in (one, other)]
        assert found[0] == found[1], name


@pytest.mark.slow
def test_stages_resume(staged, tmp_path, monkeypatch, stages, caplog):
    caplog.set_level("INFO", "speakernet")
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    train_experiment(staged("straight"))
    assert stages["classes"] == [3 * SPEAKERS, 3 * SPEAKERS, SPEAKERS]
    assert "long stage: 1 epoch, crops of 60 frames, learning rate 0.01" in caplog.text
    assert "epoch 2 of the joint stage: loss" in caplog.text
    last = [
        read_own_checkpoint(straight / name)["training"] for name in ("last.pt", "3_long/last.pt")
    ]
    assert [one["config"]["loss"]["margin"] for one in last] == [0.2, 0.4]
    assert [one["config"]["optimizer"]["name"] for one in last] == ["adam", "sgd"]
    assert last[1]["first_stage_steps"] == 3 * last[0]["state"]["step"]
    for stage, step in (("joint stage", 3), ("long stage", 0)):
        train_until_killed(staged("killed"), monkeypatch, stage, step)
        torch.manual_seed(123)
    train_experiment(staged("killed"))
    assert_same(straight, killed, ["2_joint/last.pt", "3_long/last.pt", "best.pt"])
    # A longer first stage: the later ones start over.
    longer = [{**STAGES[0], "epochs": 2}, *STAGES[1:]]
    train_experiment(staged("killed", stages=longer))
    assert (killed / "2_joint.before-1").is_dir() and (killed / "3_long.before-1").is_dir()
    assert later_stages(killed) == {"joint": killed / "2_joint", "long": killed / "3_long"}


def test_stage_starts_from_the_previous_model(staged, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--stage joint"):
        train_experiment(staged("run", "--stage", "joint"))
    longer = [{**STAGES[0], "epochs": 3}, *STAGES[1:]]
    train_until_killed(staged("run", stages=longer), monkeypatch, "head stage", 5)
    train_experiment(staged("run", "--stage", "joint", stages=longer))
    run = tmp_path / "run"
    states = [
        read_own_checkpoint(path)["training"]["state"]
        for path in (run / "last.pt", run / "2_joint" / "last.pt")
    ]
    assert [state["epoch"] for state in states] == [1, 2]


def test_penalty_at_a_larger_margin():
    """wespeaker: mp x margin / 0.2, so 0.06 becomes 0.15 radians at the margin of 0.5 of the second
    stage.
    """
    first = with_changes(
        Config(), loss={"margin": 0.2, "scale": 1.0, "inter_top_k": 1}, model={"embedding_dim": 2}
    )
    head = fine_tuning.next_head(with_changes(first, loss={"margin": 0.5}), build_loss(first, 2))
    head.weight.data.copy_(torch.eye(2))
    angle = 0.3
    logits = head.logits(torch.tensor([[math.cos(angle), math.sin(angle)]]), torch.tensor([0]))[
        0
    ].tolist()
    assert logits == pytest.approx(
        [math.cos(angle + 0.5), math.cos(math.pi / 2 - angle - 0.15)], abs=1e-5
    )


def test_head_of_a_stage_keeps_what_was_learned():
    """A combined loss with a learned scale, and a head with the classes of voices that the stage no
    longer has.
    """
    first = with_changes(
        Config(),
        loss={"name": "combined"},
        model={"embedding_dim": 8},
        data={"utterances_per_speaker": 2},
    )
    before = build_loss(first, 12)
    state = {name: value + 0.5 for name, value in before.state_dict().items()}
    before.load_state_dict(state)
    head = fine_tuning.next_head(
        with_changes(first, loss={"classification": {"margin": 0.4}}), before
    )
    assert head.margin == 0.4 and all(
        torch.equal(head.state_dict()[name], value) for name, value in state.items()
    )


def sharded_head():
    """In each of two processes: the head of a stage has the rows of the previous one, and its own
    margin.
    """
    options = {"name": "aamsoftmax", "margin": 0.2, "sharded": "on"}
    first = with_changes(Config(), loss=options, model={"embedding_dim": 4})
    torch.manual_seed(3)
    before = build_loss(first, 5)
    whole = before.weight.detach().clone()
    shard_head(first.loss, before)
    head = fine_tuning.next_head(with_changes(first, loss={"margin": 0.5}), before)
    # Rank 0 gathers the whole head, the others keep their own rows.
    expected = whole if distributed.is_main() else whole[2:]
    return torch.equal(head.state_dict()["weight"], expected) and head.margin == 0.5


@pytest.mark.slow
def test_sharded_head_of_a_stage(tmp_path):
    assert in_several(__file__, "sharded_head", tmp_path) == [True, True]
