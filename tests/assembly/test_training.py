"""From configuration to a running trainer: real components on a tiny corpus, voices, refused
options.
"""

import functools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from speakernet.assembly import training
from speakernet.assembly.data import build_training_loader
from speakernet.assembly.fine_tuning import StagedRun
from speakernet.assembly.inputs import Inputs
from speakernet.assembly.ranks import choose_shared_norms
from speakernet.checkpoint import CheckpointError
from speakernet.config import Config
from speakernet.config.loading import save_config
from speakernet.config.schema import with_changes, with_options
from speakernet.training.state import Stage
from speakernet.training.stopping import Interrupted
from tests.data.test_loader import epoch
from tests.tiny_recipe import recipe_of, two_stages

CPU = torch.device("cpu")
UTTERANCES = 32
BATCH_SIZE = 8
"""In the corpus: four batches."""


def tiny_config(corpus, **sections):
    usual = {
        "data": {"batch_size": BATCH_SIZE},
        "model": {"options": {"channels": 16, "blocks": [1, 1], "stem_stride": 2}},
        "frontend": {"num_mels": 40},
        "training": {"max_epochs": 2, "test_interval": 1},
        "runtime": {"precision": "auto"},
    }
    return with_changes(Config(), **recipe_of(corpus, "", usual, sections))


def ready(config, folder, validate=lambda net: {"eer_percent": 10.0}, **options):
    torch.manual_seed(0)
    loader = build_training_loader(config, Inputs(config, CPU))
    net = training.build_model(config)
    loss = training.build_loss(config, loader.num_classes)
    training.refuse_impossible(config, net, CPU)
    parts = training.Parts(net, loss, loader, CPU)
    stage = Stage(on_start=functools.partial(save_config, config, folder / "config.yaml"))
    return (
        training.build_trainer(
            config, parts, lambda epoch: validate(net), folder, stage=stage, **options
        ),
        net,
        loss,
    )


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
def test_options_work_together(tiny_corpus, tmp_path, sections):
    trainer, net, _ = ready(tiny_config(tiny_corpus, **sections), tmp_path)
    before = net.embedding.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, net.embedding.weight)
    if "profiling" in sections.get("runtime", {}):
        assert list((tmp_path / "profile").iterdir())


def test_resume_with_another_batch_size(tiny_corpus, tmp_path, caplog):
    config = tiny_config(tiny_corpus, training={"max_epochs": 1, "save_steps": 1})
    stopped, _, _ = ready(config, tmp_path)
    stopped.stop.known = signal.SIGINT
    with pytest.raises(Interrupted):
        stopped.train()
    assert stopped.state.micro_batch == 1
    smaller = with_changes(config, data={"batch_size": 4})
    resumed, _, _ = ready(smaller, tmp_path)
    resumed.train()
    assert "restarting epoch 1: 1 of" in caplog.text
    assert (
        resumed.state.step == 1 + len(resumed.loader)
        and resumed.state.utterances == BATCH_SIZE + UTTERANCES
    )


def test_resume_from_another_folder(tiny_corpus, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "speakernet")
    config = tiny_config(tiny_corpus, training={"max_epochs": 1})
    monkeypatch.chdir(tiny_corpus)
    ready(with_changes(config, data={"train_list": "train_list.txt"}), tmp_path)[0].train()
    monkeypatch.chdir(tmp_path)
    ready(config, tmp_path)[0].train()
    assert "nothing to train" in caplog.text and "have changed since" not in caplog.text


def test_resume_with_changed_options(tiny_corpus, tmp_path, caplog):
    config = tiny_config(tiny_corpus, training={"max_epochs": 1})
    trainer, _, _ = ready(config, tmp_path)
    trainer.train()
    lines = (tiny_corpus / "train_list.txt").read_text().splitlines()
    renamed = tmp_path / "renamed.txt"
    turned = tmp_path / "turned.txt"
    renamed.write_text("".join(f"z{9 - int(line[4])} {line.split()[1]}\n" for line in lines))
    turned.write_text("".join(f"{line}\n" for line in reversed(lines)))

    def resumed(path, **sections):
        return ready(
            with_changes(tiny_config(tiny_corpus, **sections), data={"train_list": str(path)}),
            tmp_path,
        )

    with pytest.raises(CheckpointError, match="other speakers"):
        resumed(renamed)[0].train()
    caplog.clear()
    with pytest.raises(CheckpointError, match=r"model.embedding_dim 4 \(was 8\)") as refused:
        resumed(turned, model={"embedding_dim": 4})[0].train()
    assert "state_dict" not in str(refused.value) and "have changed since" not in caplog.text
    other, _, _ = resumed(turned, training={"max_epochs": 2}, optimizer={"weight_decay": 0.25})
    other.train()
    assert "optimizer.weight_decay 0.25 (was " in caplog.text
    assert "the training list" in caplog.text
    assert other.state.epoch == 2


def test_best_model_of_a_margin_stage(tiny_corpus, tmp_path, caplog):
    """A continued first stage once overwrote the better model of its margin stage with a worse
    one.
    """
    caplog.set_level("INFO", "speakernet")

    def of_two_stages(epochs):
        stages = two_stages(epochs, 1, 70)
        return tiny_config(
            tiny_corpus, training={"max_epochs": epochs, "test_interval": 1, "stages": stages}
        )

    config = of_two_stages(1)
    trainer, net, loss = ready(config, tmp_path)  # its EER is 10 %
    trainer.train()
    config = with_options(config, "training", save_path=str(tmp_path))

    def second_stage(eer, steps):
        run = StagedRun(config, Inputs(config, CPU), net, lambda epoch: {"eer_percent": eer})
        run.loss = loss
        run.steps = steps
        summary = run.train_stage(1)
        return run.loss, summary

    second_stage(5.0, 3)
    assert (
        "epoch 1 of the large_margin stage: loss" in caplog.text
        and "10.00 % is replaced" in caplog.text
    )
    better = (tmp_path / "best.pt").read_bytes()

    second_stage(5.0, 3)
    assert "EER 5.00 %; best.pt is already" in caplog.text
    assert "epochs: 11 in the large_margin stage" in caplog.text
    longer = of_two_stages(2)
    on, _, _ = ready(longer, tmp_path, lambda net: {"eer_percent": 7.0})
    summary = on.train()
    assert (tmp_path / "best.pt").read_bytes() == better
    assert (summary["best_eer_percent"], summary["best_epoch"], summary["best_stage"]) == (
        5.0,
        1,
        "large_margin stage",
    )
    longest = of_two_stages(3)
    further, _, _ = ready(longest, tmp_path, lambda net: {"eer_percent": 4.0})
    summary = further.train()
    assert (summary["best_eer_percent"], summary["best_epoch"], summary["best_stage"]) == (
        4.0,
        3,
        "",
    )
    assert (tmp_path / "best.pt").read_bytes() != better
    # The first stage has continued, so its margin stage starts over; the old model is kept.
    old = (tmp_path / "2_large_margin" / "best.pt").read_bytes()
    later, anew = second_stage(9.0, 9)
    assert anew["performance"]["steps"] > 0 and later.margin == 0.5
    assert (tmp_path / "2_large_margin.before-1" / "best.pt").read_bytes() == old


CODED = {"enabled": True, "codecs": ["amr-wb"], "codec_probability": 0.5}
METRIC = {"loss": {"name": "angleproto"}, "data": {"utterances_per_speaker": 2, "batch_size": 3}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loss": {"name": "angleproto"}}, "data.utterances_per_speaker: 1"),
        (
            {**METRIC, "training": {"accumulation_steps": 2}, "runtime": {"compile": "on"}},
            "the gradient cache",
        ),
        ({"runtime": {"compile": "on", "device": "cpu"}}, "C\\+\\+ compiler"),
        ({"runtime": {"precision": "fp16"}}, "fp16"),
        ({"augment": CODED}, "codecs: amr-wb.*ffmpeg"),
    ],
)
def test_impossible_combinations_are_refused(tiny_corpus, monkeypatch, sections, message):
    monkeypatch.setattr("speakernet.training.precision.cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr("speakernet.training.compiling.shutil.which", lambda name: None)
    monkeypatch.setenv("SPEAKERNET_FFMPEG", "/no/such/ffmpeg")
    config = tiny_config(tiny_corpus, **sections)
    with pytest.raises(ValueError, match=message):
        training.refuse_impossible(config, training.build_model(config), CPU)


def test_narrow_networks_are_not_channels_last(tiny_corpus, tmp_path, caplog):
    """With channels_last, such networks crashed the process in oneDNN on long crops."""
    narrow = {"options": {"channels": 8, "blocks": [1, 1]}}
    for layout in ("auto", "on"):
        config = tiny_config(
            tiny_corpus, model=narrow, data={"crop_frames": 300}, runtime={"channels_last": layout}
        )
        trainer, net, _ = ready(config, tmp_path / layout)
        assert net.trunk.stages[1].blocks[0].conv1.weight.is_contiguous()
        trainer.train()
    assert "oneDNN" in caplog.text
    wide = training.build_model(tiny_config(tiny_corpus))
    assert not wide.trunk.stages[1].blocks[0].conv1.weight.is_contiguous()


VOICES = {"speed_factors": [0.9, 1.0], "real_share": 0.25}


def voiced_config(corpus, *, augment=None, **sections):
    voiced = {
        "augment": {"enabled": True, **VOICES, **(augment or {})},
        "training": {"max_epochs": 4},
    }
    return tiny_config(corpus, **{**voiced, "loss": {"name": "softmax"}, **sections})


def loader(corpus, **sections):
    config = voiced_config(corpus, **sections)
    return build_training_loader(config, Inputs(config, CPU))


def test_labels_and_speeds(tiny_corpus):
    made = loader(tiny_corpus)
    assert made.num_classes == 8 * 2
    as_recorded = epoch(loader(tiny_corpus, augment={"enabled": False}))
    for batch, plain in zip(epoch(made), as_recorded, strict=True):
        voices = batch.labels.numpy() // 8
        np.testing.assert_array_equal(batch.labels.numpy() % 8, plain.labels.numpy())
        assert (voices == 0).sum() == 2
        same = [
            torch.equal(one, other)
            for one, other in zip(batch.waveforms, plain.waveforms, strict=True)
        ]
        assert same == (voices == 0).tolist()


def test_last_epochs_as_recorded(tiny_corpus):
    made = loader(tiny_corpus, augment={"real_epochs": 1})
    assert made.num_classes == 16
    assert any(batch.labels.max() >= 8 for batch in epoch(made, 2))
    assert all(batch.labels.max() < 8 for batch in epoch(made, 3))


@pytest.mark.parametrize(
    ("batch_size", "processes", "asked", "is_shared", "reason"),
    [
        (256, 8, "auto", False, "32 crops per process"),
        (248, 8, "auto", True, "31 crops per process"),
        (16, 8, "off", False, "as configured"),
    ],
)
def test_shared_batch_norm(batch_size, processes, asked, is_shared, reason):
    # Speakers with two utterances each.
    data = {"batch_size": batch_size // 2, "utterances_per_speaker": 2}
    choice = choose_shared_norms(
        with_changes(Config(), data=data, runtime={"sync_batch_norm": asked}), processes
    )
    assert choice.value is is_shared and reason in choice.reason


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_batch_scales_the_learning_rate(tiny_corpus, tmp_path, caplog, scaling, factor):
    caplog.set_level("INFO")
    # Two micro-batches of eight.
    options = {"accumulation_steps": 2, "reference_batch": 4, "batch_scaling": scaling}
    made, *_ = ready(
        tiny_config(tiny_corpus, training=options, schedule={"name": "constant"}), tmp_path
    )
    assert made.learning_rate(5) == pytest.approx(factor * made.learning_rate.top)
    assert f"multiplied by: {factor} (16 utterances per step instead of 4" in caplog.text


def test_compiled_code_is_kept(tiny_corpus, monkeypatch, tmp_path):
    """By block unless asked otherwise, and in the user's cache unless torch was told another."""
    config = tiny_config(tiny_corpus, runtime={"compile": "auto"})
    compiler = training._build_compiler(config, training.build_model(config), CPU)
    assert compiler.options.compile_scope == "regional"
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path))
    for named, folder in (("", tmp_path / "compiled"), ("/elsewhere", Path("/elsewhere"))):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
        if not named:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        training.prepare_machine(config)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == folder
