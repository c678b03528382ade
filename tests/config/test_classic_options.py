"""Every option of voxceleb_trainer's command line and of its fork: understood, with its meaning and its default."""

import functools
from pathlib import Path

import pytest

from speakernet.assembly.model import build_loss, build_model
from speakernet.config.aliases import ALIASES, CLASSIC_NAMES, MODE_FLAGS
from speakernet.config.loading import load_config

# option: (value as written, our key, value here); the defaults of its argument parser in DEFAULTS below.
OPTIONS = {
    "max_frames": ("300", "data.crop_frames", 300),
    "eval_frames": ("400", "evaluation.eval_frames", 400),
    "batch_size": ("32", "data.batch_size", 32),
    "max_seg_per_spk": ("100", "data.max_utterances_per_speaker", 100),
    "nDataLoaderThread": ("8", "data.num_workers", 8),
    "augment": ("True", "augment.enabled", True),
    "seed": ("11", "runtime.seed", 11),
    "test_interval": ("5", "training.test_interval", 5),
    "max_epoch": ("36", "training.max_epochs", 36),
    "trainfunc": ("ge2e", "loss.name", "ge2e"),
    "optimizer": ("sgd", "optimizer.name", "sgd"),
    "scheduler": ("steplr", "schedule.name", "step"),
    "lr": ("0.01", "optimizer.learning_rate", 0.01),
    "lr_decay": ("0.75", "schedule.decay", 0.75),
    "weight_decay": ("5e-05", "optimizer.weight_decay", 5e-05),
    "hard_prob": ("0.7", "loss.hard_probability", 0.7),
    "hard_rank": ("3", "loss.hard_rank", 3),
    "margin": ("0.3", "loss.margin", 0.3),
    "scale": ("15", "loss.scale", 15.0),
    "nPerSpeaker": ("2", "data.utterances_per_speaker", 2),
    "nClasses": ("5991", "data.num_classes", 5991),
    "dcf_p_target": ("0.01", "evaluation.dcf_target_priors", [0.01]),
    "dcf_c_miss": ("10", "evaluation.c_miss", 10.0),
    "dcf_c_fa": ("2", "evaluation.c_fa", 2.0),
    "initial_model": ("a.model", "training.initial_model", "a.model"),
    "save_path": ("exps/a", "training.save_path", "exps/a"),
    "train_list": ("a.txt", "data.train_list", "a.txt"),
    "test_list": ("b.txt", "data.test_list", "b.txt"),
    "train_path": ("a", "data.train_path", "a"),
    "test_path": ("b", "data.test_path", "b"),
    "musan_path": ("m", "augment.noise_path", "m"),
    "rir_path": ("r", "augment.rir_path", "r"),
    "n_mels": ("64", "frontend.num_mels", 64),
    "log_input": ("True", "frontend.log_input", True),
    "model": ("RawNet3", "model.name", "RawNet3"),
    "encoder_type": ("ASP", "model.pooling", "ASP"),
    "nOut": ("256", "model.embedding_dim", 256),
    "sinc_stride": ("16", "model.options.sinc_stride", 16),
    "mixedprec": ("True", "runtime.precision", "auto"),
    "gpu_id": ("1", "runtime.gpu_id", 1),
    "num_eval": ("5", "evaluation.num_crops", 5),
    "prefetch_factor": ("3", "data.prefetch_factor", 3),
    "persistent_workers": ("true", "data.persistent_workers", True),
    "gradient_accumulation_steps": ("4", "training.accumulation_steps", 4),
    "compile_model": ("false", "runtime.compile", "off"),
    "enable_profiling": ("true", "runtime.profiling", True),
    "pin_memory": ("false", "data.pin_memory", False),
    "patience": ("15", "training.patience", 15),
    "max_test_pairs": ("50000", "evaluation.max_trials", 50000),
    "eval_batch_size": ("128", "evaluation.batch_size", 128),
    "distributed": ("true", "runtime.distributed", True),
    "port": ("1234", "runtime.port", 1234),
}
DEFAULTS = {
    "data.crop_frames": 200,
    "evaluation.eval_frames": 300,
    "evaluation.num_crops": 10,
    "evaluation.score": "mean_distance",
    "data.batch_size": 200,
    "data.max_utterances_per_speaker": 500,
    "data.utterances_per_speaker": 1,
    "data.num_workers": 5,
    "augment.enabled": False,
    "augment.style": "classic",
    "runtime.seed": 10,
    "runtime.precision": "no",
    "training.test_interval": 10,
    "training.max_epochs": 500,
    "training.max_grad_norm": 0.0,
    "optimizer.name": "adam",
    "optimizer.learning_rate": 0.001,
    "optimizer.weight_decay": 0.0,
    "optimizer.nesterov": False,
    "schedule.name": "step",
    "schedule.decay": 0.95,
    "schedule.decay_interval": 10,
    "loss.hard_probability": 0.5,
    "loss.hard_rank": 10,
    "loss.margin": 0.1,
    "loss.scale": 30.0,
    "evaluation.dcf_target_priors": [0.05],
    "evaluation.c_miss": 1.0,
    "evaluation.c_fa": 1.0,
    "frontend.num_mels": 40,
    "frontend.log_input": False,
    "model.pooling": "SAP",
    "model.embedding_dim": 512,
    "data.train_list": "data/train_list.txt",
    "data.test_list": "data/veri_test.txt",
    "data.train_path": "data/voxceleb2/dev/wav",
    "data.test_path": "data/voxceleb1/test/wav",
    "augment.noise_path": "data/musan_split",
    "augment.rir_path": "data/RIRS_NOISES/simulated_rirs",
}
RAWNET3_AAM = """
model: RawNet3
encoder_type: ECA
nOut: 256
sinc_stride: 10
max_frames: 300
batch_size: 32
eval_frames: 400
trainfunc: aamsoftmax
lr_decay: 0.75
weight_decay: 5e-05
max_seg_per_spk: 500
augment: True
save_path: exps/RawNet3_AAM
"""
LIGHT_AP = """
model: ResNetSE34L
log_input: True
encoder_type: SAP
trainfunc: angleproto
save_path: exps/ResNetSE34L_AP
nPerSpeaker: 2
batch_size: 200
"""
LIGHT_AM = """
model: ResNetSE34L
log_input: True
encoder_type: SAP
trainfunc: amsoftmax
save_path: exps/ResNetSE34L_AM
nLcasses: 5994
batch_size: 200
scale: 30
margin: 0.3
"""
FORK = """
model: ResNetSE34L
trainfunc: amsoftmax
log_input: true
batch_size: 64
patience: 15
max_test_pairs: 50000
eval_batch_size: 128
prefetch_factor: 3
persistent_workers: true
gradient_accumulation_steps: 1
compile_model: false
enable_profiling: false
nClasses: 5991
mixedprec: true
scale: 30
margin: 0.2
"""


CHOOSES = {
    "lr_decay": {"scheduler": "steplr"},
    "hard_prob": {"trainfunc": "triplet"},
    "hard_rank": {"trainfunc": "triplet"},
    "sinc_stride": {"model": "RawNet3"},
}
"""What has to be chosen for an option to have an effect; voxceleb_trainer takes it with everything, and ignores it."""


def value_of(config, key):
    return functools.reduce(getattr, key.split("."), config)


def loaded(text: str, tmp_path: Path, *options: str):
    path = tmp_path / "their.yaml"
    path.write_text(text)
    return load_config(["--config", str(path), *options])


def test_no_option_is_left_out():
    theirs = {*OPTIONS, "eval"}
    assert theirs <= {*ALIASES, *MODE_FLAGS}
    assert set(CLASSIC_NAMES) <= theirs


@pytest.mark.parametrize("name", OPTIONS)
def test_option_means_what_it_meant_on_the_command_line_and_in_yaml(name, tmp_path):
    written, key, expected = OPTIONS[name]
    given = {**CHOOSES.get(name, {}), name: written}
    flags = [word for option, value in given.items() for word in (f"--{option}", value)]
    assert value_of(load_config(flags).config, key) == expected
    lines = "".join(f"{option}: {value}\n" for option, value in given.items())
    assert value_of(loaded(lines, tmp_path).config, key) == expected


OF_TRIPLET_OR_SGD = ("loss.hard_probability", "loss.hard_rank", "optimizer.nesterov")


def test_omitted_options_mean_what_they_meant(tmp_path):
    flags = ["--defaults", "voxceleb_trainer", "--trainfunc", "amsoftmax"]
    for config in (loaded("trainfunc: amsoftmax\n", tmp_path).config, load_config(flags).config):
        taken = {key: value for key, value in DEFAULTS.items() if key not in OF_TRIPLET_OR_SGD}
        assert {key: value_of(config, key) for key in taken} == taken
    triplet = load_config(["--defaults", "voxceleb_trainer", "--trainfunc", "triplet", "--optimizer", "sgd"]).config
    for key in OF_TRIPLET_OR_SGD:
        assert value_of(triplet, key) == DEFAULTS[key]


def test_learning_rate_decays_every_test_interval(tmp_path):
    assert loaded("test_interval: 4\n", tmp_path).config.schedule.decay_interval == 4


def test_command_line_flags_without_values():
    config = load_config(
        ["--model", "ResNetSE34L", "--log_input", "--augment", "--mixedprec", "--trainfunc", "angleproto"]
    ).config
    assert config.frontend.log_input and config.augment.enabled and config.runtime.precision == "auto"


def test_rawnet3_recipe_builds_its_model(tmp_path):
    config = loaded(RAWNET3_AAM, tmp_path).config
    net = build_model(config)
    assert sum(parameter.numel() for parameter in net.parameters()) == 16_280_322
    options = net.spec()["model"]["options"]
    assert (options["sinc_stride"], options["pooling"], options["embedding_dim"]) == (10, "ECA", 256)
    loss = build_loss(config, 20)
    assert (type(loss).__name__, loss.margin, loss.scale) == ("AAMSoftmax", 0.1, 30.0)


def test_angular_prototypical_recipe_builds_its_model(tmp_path):
    config = loaded(LIGHT_AP, tmp_path).config
    assert sum(parameter.numel() for parameter in build_model(config).parameters()) == 1_437_078
    assert build_loss(config, 20).is_metric
    assert (config.data.batch_size, config.data.utterances_per_speaker) == (200, 2)


def test_misspelt_recipe_loads(tmp_path):
    assert loaded(LIGHT_AM, tmp_path).config.data.num_classes == 5994


def test_experiment_file_of_the_fork(tmp_path):
    config = loaded(FORK, tmp_path).config
    assert (config.training.patience, config.evaluation.max_trials, config.evaluation.batch_size) == (15, 50000, 128)
    assert config.data.num_classes == 5991 and config.runtime.precision == "auto" and config.runtime.compile == "off"


def test_evaluation_by_flags_alone():
    """Its README's command, where the checkpoint says whose it is."""
    flags = "--eval --model ResNetSE34L --log_input --trainfunc angleproto --eval_frames 400 --initial_model FILE"
    options = [*flags.split(), "--test_list", "a", "--test_path", "b", "--save_path", "c"]
    answer = load_config(options, lambda path: path == Path("FILE"))
    assert answer.evaluate_only and answer.is_classic
    assert answer.config.evaluation.score == "mean_distance" and answer.config.evaluation.eval_frames == 400


@pytest.mark.parametrize(
    ("model", "extra", "preemphasis", "window"),
    [
        ("ResNetSE34L", "", 0.0, "hamming"),
        ("ResNetSE34V2", "n_mels: 64\n", 0.97, "hamming"),
        ("VGGVox", "", 0.0, "hann"),
    ],
)
def test_front_end_follows_the_model(model, extra, preemphasis, window, tmp_path):
    import torch

    front_end = build_model(loaded(f"model: {model}\nlog_input: True\n{extra}", tmp_path).config).front_end
    assert front_end.preemphasis == preemphasis
    assert torch.equal(front_end.window, getattr(torch, f"{window}_window")(400))


def test_sinc_stride_on_a_model_without_sinc_filters_is_left_alone_and_said(tmp_path, caplog):
    loaded("model: ResNetSE34L\nsinc_stride: 10\n", tmp_path)
    assert "sinc_stride has no effect: the model ResNetSE34L" in caplog.text
