"""From configuration to a trainer that runs: real parts on a tiny corpus, and the refusals before the first step."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.fine_tuning import large_margin_config, train_large_margin_stage
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.training import (
    build_loss,
    build_model,
    build_precision,
    build_schedules,
    build_trainer,
    prepare_machine,
    refuse_impossible,
)
from speakernet.checkpoint import CheckpointError
from speakernet.cli import main
from speakernet.config import ConfigError, load_config
from speakernet.config.schema import Config, config_from_dict, problems, replaced
from speakernet.data.audio import write_audio
from speakernet.machine.device import choose_device
from speakernet.models.model_file import load_model_file
from speakernet.training.optimizers import create_optimizer
from speakernet.training.progress import Interrupted

CPU = torch.device("cpu")
SPEAKERS, UTTERANCES = 6, 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six "speakers", each a tone in noise; 0.8 s an utterance."""
    root = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    lines = []
    for speaker in range(SPEAKERS):
        for utterance in range(UTTERANCES):
            name = f"id{speaker}/{utterance}.wav"
            (root / name).parent.mkdir(exist_ok=True)
            time = np.arange(12800) / 16000
            tone = 0.3 * np.sin(2 * np.pi * (200 + 150 * speaker) * time)
            write_audio(root / name, (tone + 0.05 * random.standard_normal(12800)).astype(np.float32), 16000)
            lines.append(f"id{speaker} {name}\n")
    (root / "train.txt").write_text("".join(lines))
    return root


def tiny_config(corpus: Path, **sections) -> Config:
    values = {
        "data": {
            "train_list": str(corpus / "train.txt"),
            "train_path": str(corpus),
            "crop_frames": 50,
            "batch_size": 6,
            "num_workers": 0,
        },
        "augment": {"enabled": False},
        "model": {"name": "ResNetSE34L", "embedding_dim": 16},
        "frontend": {"num_mels": 40},
        "loss": {"name": "amsoftmax"},
        "training": {"max_epochs": 2, "test_interval": 1, "log_interval": 1},
        "runtime": {"device": "cpu", "compile": "off"},
    }
    for section in {*values, *sections}:
        values[section] = {**values.get(section, {}), **sections.get(section, {})}
    return replaced(Config(), **values)


def ready(config: Config, folder: Path, validate=lambda net: {"eer_percent": 10.0}, **options):
    torch.manual_seed(0)
    loader = build_training_loader(config, Inputs(config, CPU))
    net, loss = build_model(config), build_loss(config, loader.num_classes)
    refuse_impossible(config, net, CPU)
    return build_trainer(config, net, loss, loader, lambda: validate(net), folder, CPU, **options), net, loss


def test_real_parts_train_and_leave_a_model_file(corpus: Path, tmp_path: Path):
    trainer, _, _ = ready(tiny_config(corpus), tmp_path)
    summary = trainer.train()
    assert summary["steps"] == 6 and summary["bad_steps"] == 0
    kept = load_model_file(tmp_path / "best.pt")
    assert not any(key.startswith(("_orig_mod.", "module.")) for key in kept.contents["weights"])
    assert load_model_file(tmp_path / "last.pt").net.embedding_dim == 16
    for name in ("metrics.jsonl", "last.pt", "best.pt"):
        assert (tmp_path / name).stat().st_size > 0
    assert list(tmp_path.glob("events.out.tfevents*"))


@pytest.mark.parametrize(
    "sections",
    [
        {"runtime": {"precision": "bf16", "gradient_checkpointing": True, "channels_last": "on"}},
        {"training": {"accumulation_steps": 2, "ema_decay": 0.9, "average_checkpoints": 2}},
        {
            "loss": {"name": "angleproto"},
            "data": {"utterances_per_speaker": 2, "batch_size": 3, "max_utterances_per_speaker": 2},
            "training": {"accumulation_steps": 2},
        },
        {"runtime": {"profiling": True, "profile_steps": 1, "precision": "no"}},
    ],
    ids=["memory", "averages", "gradient_cache", "profiling"],
)
def test_options_work_together(corpus: Path, tmp_path: Path, sections: dict):
    trainer, net, _ = ready(tiny_config(corpus, **sections), tmp_path)
    before = net.embedding.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, net.embedding.weight)
    if "profiling" in sections.get("runtime", {}):
        assert list((tmp_path / "profile").iterdir())


def test_stopped_and_resumed_equals_straight_with_real_parts(corpus: Path, tmp_path: Path):
    """Deterministic, mid-epoch, with the real loader, voices, SpecAugment and batch norm."""
    config = tiny_config(
        corpus,
        runtime={"deterministic": True, "precision": "no"},
        frontend={"spec_augment": True, "num_mels": 40},
        augment={"enabled": True, "speed_factors": [1.0, 0.9], "warp_factors": [0.9, 1.0], "real_share": 0.5},
        training={"save_steps": 1},
    )
    prepare_machine(config)
    try:
        straight, net, _ = ready(config, tmp_path / "straight")
        straight.train()
        stopped, _, _ = ready(config, tmp_path / "run")
        run_step = stopped.run_step

        def stop_after(batches: Any) -> None:
            run_step(batches)
            if stopped.state.step == 4:
                raise InterruptedError

        stopped.run_step = stop_after  # type: ignore[method-assign]
        with pytest.raises(InterruptedError):
            stopped.train()
        torch.manual_seed(123)
        resumed, other, _ = ready(config, tmp_path / "run")
        resumed.train()
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_a_resume_with_another_batch_size_leaves_nothing_of_the_epoch_out(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = tiny_config(corpus, training={"max_epochs": 1, "save_steps": 1})
    stopped, _, _ = ready(config, tmp_path)
    stopped.stop.number = signal.SIGINT
    with pytest.raises(Interrupted):
        stopped.train()
    assert stopped.state.batch == 1
    smaller = replaced(config, data={"batch_size": 3})
    resumed, _, _ = ready(smaller, tmp_path)
    resumed.train()
    assert "restarting epoch 1: 1 of" in caplog.text
    assert resumed.state.step == 1 + len(resumed.loader) and resumed.state.utterances == 6 + SPEAKERS * UTTERANCES


def test_a_resume_with_other_speakers_is_refused_and_other_changes_are_named(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = tiny_config(corpus, training={"max_epochs": 1})
    trainer, _, _ = ready(config, tmp_path)
    trainer.train()
    lines = (corpus / "train.txt").read_text().splitlines()
    renamed, turned = corpus / "renamed.txt", corpus / "turned.txt"
    renamed.write_text("".join(f"z{SPEAKERS - int(line[2])} {line.split()[1]}\n" for line in lines))
    turned.write_text("".join(f"{line}\n" for line in reversed(lines)))

    def resumed(path: Path, **sections):
        return ready(replaced(tiny_config(corpus, **sections), data={"train_list": str(path)}), tmp_path)

    with pytest.raises(CheckpointError, match="trained with other speakers, or other names of them"):
        resumed(renamed)[0].train()
    caplog.clear()
    with pytest.raises(
        CheckpointError, match=r"another model.*: model.embedding_dim 8 \(was 16\)\. Set that back"
    ) as refused:
        resumed(turned, model={"embedding_dim": 8})[0].train()
    assert "state_dict" not in str(refused.value) and "going on" not in caplog.text
    other, _, _ = resumed(turned, training={"max_epochs": 2}, optimizer={"weight_decay": 0.25})
    other.train()
    assert "optimizer.weight_decay 0.25 (was " in caplog.text
    assert "holds other utterances, or the same in another order" in caplog.text
    assert other.state.epoch == 2


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"schedule": {"warmup_epochs": 2.0}}, "warmup_epochs: 2 of training.max_epochs: 2: the learning rate never"),
        ({"schedule": {"warmup_epochs": 1.0, "name": "one_cycle"}}, "the learning rate rises twice"),
        ({"schedule": {"margin": "linear"}, "loss": {"name": "softmax"}}, "schedule.margin: linear has no effect"),
        ({"schedule": {"margin": "linear"}}, "margin_end_epoch: 10 of training.max_epochs: 2: the margin never"),
        ({"training": {"accumulation_steps": 100}}, "accumulation_steps: 100, but an epoch has 3 batches"),
        ({"training": {"average_checkpoints": 5}}, "average_checkpoints: 5 of training.max_epochs: 2"),
        ({"training": {"gradient_cache": "on"}}, "gradient_cache: on has no effect"),
        ({"runtime": {"gpu_id": 3, "device": "cpu"}}, "runtime.gpu_id: 3 has no effect"),
        ({"runtime": {"compile": "off", "compile_scope": "regional"}}, "compile_scope: regional has no effect"),
        ({"runtime": {"compile": "off", "compile_mode": "max-autotune"}}, "compile_mode: max-autotune has no effect"),
        ({"runtime": {"compile": "on", "device": "cpu", "compile_mode": "max-autotune"}}, "max-autotune has no effect"),
    ],
)
def test_options_that_do_nothing_are_told(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict, told: str
):
    ready(tiny_config(corpus, **sections), tmp_path)
    assert told in caplog.text


def test_an_option_of_another_schedule_is_refused():
    with pytest.raises(ConfigError, match="final_learning_rate has no effect: the schedule step does not take it"):
        load_config(["--schedule.name", "step", "--schedule.final_learning_rate", "1e-5"])


def test_large_margin_stage_goes_on_with_the_same_weights(corpus: Path, tmp_path: Path):
    config = tiny_config(
        corpus,
        training={"max_epochs": 1, "large_margin_epochs": 1, "large_margin_crop_frames": 70, "large_margin": 0.4},
    )
    trainer, net, loss = ready(config, tmp_path)
    trainer.train()
    parts = (config, net, loss, Inputs(config, CPU))
    summary = train_large_margin_stage(*parts, lambda: {"eer_percent": 5.0}, tmp_path, 3)
    assert summary["epochs"] == 1 and loss.margin == 0.4
    better = (tmp_path / "large_margin" / "best.pt").read_bytes()
    assert (tmp_path / "best.pt").read_bytes() == better
    again = train_large_margin_stage(*parts, lambda: {"eer_percent": 1.0}, tmp_path, 3)
    assert again["performance"]["steps"] == 0 and (tmp_path / "best.pt").read_bytes() == better
    # The first stage has gone on: its margin stage begins anew, and the old one is kept.
    anew = train_large_margin_stage(*parts, lambda: {"eer_percent": 1.0}, tmp_path, 6)
    assert anew["performance"]["steps"] > 0 and (tmp_path / "large_margin.before-1" / "best.pt").read_bytes() == better
    stage = large_margin_config(config)
    assert (stage.data.crop_frames, stage.augment.speed_factors, stage.training.large_margin_epochs) == (70, [1.0], 0)


def test_the_better_model_of_a_margin_stage_is_the_one_to_beat(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A first stage that went on wrote its worse model over the better one of its margin stage."""
    caplog.set_level("INFO", "speakernet")
    more = {"large_margin_epochs": 1, "large_margin_crop_frames": 70, "test_interval": 1}
    config = tiny_config(corpus, training={"max_epochs": 1, **more})
    trainer, net, loss = ready(config, tmp_path)  # its EER is 10 %
    trainer.train()
    parts = (config, net, loss, Inputs(config, CPU))
    train_large_margin_stage(*parts, lambda: {"eer_percent": 5.0}, tmp_path, 3)
    assert "epoch 1 of the large-margin stage: loss" in caplog.text and "best.pt before 10.00 %: kept" in caplog.text
    better = (tmp_path / "best.pt").read_bytes()

    train_large_margin_stage(*parts, lambda: {"eer_percent": 5.0}, tmp_path, 3)
    assert "EER 5.00 %; best.pt is its model already" in caplog.text
    assert "--training.large_margin_epochs 11" in caplog.text
    longer = tiny_config(corpus, training={"max_epochs": 2, **more})
    on, _, _ = ready(longer, tmp_path, lambda net: {"eer_percent": 7.0})
    summary = on.train()
    assert (tmp_path / "best.pt").read_bytes() == better
    assert (summary["best_eer_percent"], summary["best_epoch"], summary["best_stage"]) == (5.0, 1, "large-margin stage")
    longest = tiny_config(corpus, training={"max_epochs": 3, **more})
    further, _, _ = ready(longest, tmp_path, lambda net: {"eer_percent": 4.0})
    summary = further.train()
    assert (summary["best_eer_percent"], summary["best_epoch"], summary["best_stage"]) == (4.0, 3, "")
    assert (tmp_path / "best.pt").read_bytes() != better


@pytest.mark.slow
def test_compiled_training_leaves_an_eager_network_to_averages_and_stages(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Evaluations, statistics of an average and the second stage have lengths and modes of their own."""
    caplog.set_level("INFO", "speakernet")
    config = tiny_config(
        corpus,
        model={"name": "VGGVox", "embedding_dim": 16},
        training={
            "max_epochs": 2,
            "average_checkpoints": 2,
            "large_margin_epochs": 1,
            "large_margin_crop_frames": 70,
        },
        runtime={"compile": "on", "device": "cpu"},
        data={"crop_frames": 65},
    )
    evaluated = []

    def validate(net: torch.nn.Module) -> dict[str, float]:
        evaluated.append(net(torch.zeros(1, 12000 + 160 * len(evaluated))).shape)
        return {"eer_percent": 9.0}

    trainer, net, loss = ready(config, tmp_path, validate)
    trainer.train()
    compiled = torch._dynamo.utils.counters["frames"]["ok"]
    assert "compiled (whole, default) in" in caplog.text and "averaged the last 2 checkpoints" in caplog.text
    stage = replaced(config, runtime={"compile": "off"})
    parts = (stage, net, loss, Inputs(stage, CPU))
    train_large_margin_stage(*parts, lambda: validate(net), tmp_path, trainer.state.step)
    assert torch._dynamo.utils.counters["frames"]["ok"] == compiled
    assert len(evaluated) == 2 + 1 + 1 and "compilation failed" not in caplog.text


def test_impossible_combinations_are_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metric = tiny_config(
        corpus, loss={"name": "angleproto"}, training={"accumulation_steps": 2, "gradient_cache": "off"}
    )
    with pytest.raises(ValueError, match="own negatives"):
        refuse_impossible(metric, build_model(metric), CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            choose_device(tiny_config(corpus, runtime={"device": "cuda"}).runtime)
    with pytest.raises(ValueError, match="large_margin_epochs: 2, but the loss softmax has no margin"):
        ready(tiny_config(corpus, loss={"name": "softmax"}, training={"large_margin_epochs": 2}), tmp_path)
    cached = tiny_config(
        corpus,
        loss={"name": "angleproto"},
        data={"utterances_per_speaker": 2, "batch_size": 3, "max_utterances_per_speaker": 2},
        training={"accumulation_steps": 2},
        runtime={"compile": "on"},
    )
    with pytest.raises(ValueError, match="compile: on, but the gradient cache"):
        ready(cached, tmp_path)
    varying = tiny_config(corpus, data={"crop_frames_max": 90}, runtime={"compile": "on"})
    with pytest.raises(ValueError, match="crop_frames_max"):
        ready(varying, tmp_path)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        ready(tiny_config(corpus, runtime={"compile": "on", "gradient_checkpointing": True}), tmp_path)
    monkeypatch.setattr("speakernet.training.precision.cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(ValueError, match="fp16"):
        build_precision(tiny_config(corpus, runtime={"precision": "fp16"}), CPU)
    assert build_precision(tiny_config(corpus), CPU).name == "no"
    monkeypatch.setattr("speakernet.training.compiling.shutil.which", lambda name: None)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="C\\+\\+ compiler"):
            ready(tiny_config(corpus, runtime={"compile": "on", "device": "cpu"}), tmp_path)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "radam", "nadam"])
def test_every_optimizer_of_the_section_is_built(corpus: Path, name: str):
    config = tiny_config(corpus, optimizer={"name": name, "weight_decay": 0.1})
    optimizer = create_optimizer(config.optimizer, [torch.nn.Linear(2, 2)], CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_schedules_take_their_numbers_from_the_section(corpus: Path):
    config = tiny_config(
        corpus,
        schedule={"name": "step", "decay": 0.5, "decay_interval": 1.0, "margin": "linear", "margin_end_epoch": 2.0},
        loss={"name": "amsoftmax", "margin": 0.2},
    )
    rate, margin = build_schedules(config, build_loss(config, SPEAKERS), steps_per_epoch=4)
    assert [rate(step) for step in (0, 4, 8)] == pytest.approx([1e-3, 5e-4, 2.5e-4])
    assert margin is not None and margin(4) == pytest.approx(0.1)
    plain = replaced(config, loss={"name": "softmax"})
    assert build_schedules(plain, build_loss(plain, SPEAKERS), 4)[1] is None


def test_exponential_falls_to_its_end_or_by_its_factor(corpus: Path):
    def rates(**schedule) -> list[float]:
        config = tiny_config(corpus, schedule={"name": "exponential", **schedule}, training={"max_epochs": 20})
        rate, _ = build_schedules(config, build_loss(config, SPEAKERS), steps_per_epoch=1)
        return [rate(0), rate(10), rate(20)]

    assert rates() == pytest.approx([1e-3, 0.95e-3, 0.95**2 * 1e-3])
    assert rates(decay=0.5) == pytest.approx([1e-3, 5e-4, 2.5e-4])
    assert rates(final_learning_rate=1e-5) == pytest.approx([1e-3, 1e-4, 1e-5])
    both = tiny_config(corpus, schedule={"name": "exponential", "decay": 0.5, "final_learning_rate": 1e-5})
    ((key, message),) = problems(both)
    assert key == "schedule.final_learning_rate" and "1e-05 together with decay: 0.5" in message


def test_a_resumed_run_has_the_options_it_is_given(corpus: Path, tmp_path: Path):
    config = tiny_config(corpus, training={"max_epochs": 1})
    ready(config, tmp_path)[0].train()
    more = {"training": {"max_epochs": 2}}
    again, _, _ = ready(tiny_config(corpus, optimizer={"weight_decay": 0.5, "beta1": 0.5}, **more), tmp_path)
    again.train()
    kept = torch.load(tmp_path / "last.pt", weights_only=True)["training"]["optimizer"]["param_groups"][0]
    assert (kept["weight_decay"], kept["betas"][0]) == (0.5, 0.5)
    with pytest.raises(ValueError, match="another model, loss, optimizer"):
        ready(tiny_config(corpus, optimizer={"name": "sgd"}, training={"max_epochs": 3}), tmp_path)[0].train()


def test_what_a_start_writes_waits_for_the_lock_and_the_checkpoint(corpus: Path, tmp_path: Path):
    written = tmp_path / "config.yaml"

    def start(**sections: Any) -> bool:
        """Whether a start has written its configuration."""
        before = written.read_text() if written.exists() else ""
        ready(tiny_config(corpus, **sections), tmp_path)[0].train()
        return written.read_text() != before

    assert start(training={"max_epochs": 1})
    first = written.read_text()
    with pytest.raises(ValueError):
        start(optimizer={"name": "sgd"})
    assert written.read_text() == first
    assert start(optimizer={"learning_rate": 0.002})
    # Nothing is left to train: config.yaml stays what was trained.
    assert not start(training={"max_epochs": 1})


def test_narrow_networks_stay_out_of_channels_last(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """In oneDNN the process ended there; long crops, on which it did, train."""
    narrow = {"name": "ResNet", "options": {"channels": 8, "blocks": [1, 1]}}
    for layout in ("auto", "on"):
        config = tiny_config(corpus, model=narrow, data={"crop_frames": 300}, runtime={"channels_last": layout})
        trainer, net, _ = ready(config, tmp_path / layout)
        assert net.trunk.stages[1].blocks[0].conv1.weight.is_contiguous()
        trainer.train()
    assert "oneDNN crashes" in caplog.text
    # Compiled code is in channels_last by itself.
    caplog.set_level("INFO", "speakernet")
    trainer, _, _ = ready(tiny_config(corpus, model=narrow, runtime={"compile": "auto", "device": "cpu"}), tmp_path)
    assert trainer.step.compiler.options is None and "crash in oneDNN" in caplog.text
    with pytest.raises(ValueError, match="fewer than 16 channels"):
        ready(tiny_config(corpus, model=narrow, runtime={"compile": "on", "device": "cpu"}), tmp_path)
    wide = build_model(tiny_config(corpus, model={"name": "ResNet", "options": {"channels": 16, "blocks": [1, 1]}}))
    assert not wide.trunk.stages[1].blocks[0].conv1.weight.is_contiguous()


def test_options_that_are_gone_say_what_to_write(capsys: pytest.CaptureFixture[str]):
    command = ["train", "--train_list", "nowhere.txt", "--runtime.cuda_graphs", "on"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "reduce-overhead" in said and "nowhere.txt" not in said


def test_the_machine_is_prepared_for_the_gpu_that_the_run_takes(monkeypatch: pytest.MonkeyPatch):
    given: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        "speakernet.assembly.training.optimize_torch_settings",
        lambda options, device, **_more: given.append((options.memory_fraction, device)),
    )
    prepare_machine(config_from_dict({"runtime": {"gpu_id": 1, "memory_fraction": 0.25}}))
    assert given == [(0.25, torch.device("cuda:1"))]
