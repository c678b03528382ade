"""Every option of voxceleb_trainer's command line and of its fork: understood, with its meaning and its default."""

import functools
from pathlib import Path

import pytest
import yaml

from speakernet.assembly.training import build_loss, build_model
from speakernet.config.aliases import ALIASES, CLASSIC_NAMES, MODE_FLAGS
from speakernet.config.loading import load_config

# Option, value as written, our key, and the value here if it is another one.
OPTIONS = """
max_frames 300 data.crop_frames
eval_frames 400 evaluation.eval_frames
batch_size 32 data.batch_size
max_seg_per_spk 100 data.max_utterances_per_speaker
nDataLoaderThread 8 data.num_workers
augment True augment.enabled
seed 11 runtime.seed
test_interval 5 training.test_interval
max_epoch 36 training.max_epochs
trainfunc ge2e loss.name
optimizer sgd optimizer.name
scheduler steplr schedule.name step
lr 0.01 optimizer.learning_rate
lr_decay 0.75 schedule.decay
weight_decay 5.0e-05 optimizer.weight_decay
hard_prob 0.7 loss.hard_probability
hard_rank 3 loss.hard_rank
margin 0.3 loss.margin
scale 15 loss.scale
nPerSpeaker 2 data.utterances_per_speaker
nClasses 5991 data.num_classes
dcf_p_target 0.01 evaluation.dcf_target_priors [0.01]
dcf_c_miss 10 evaluation.c_miss
dcf_c_fa 2 evaluation.c_fa
initial_model a.model training.initial_model
save_path exps/a training.save_path
train_list a.txt data.train_list
test_list b.txt data.test_list
train_path a data.train_path
test_path b data.test_path
musan_path m augment.noise_path
rir_path r augment.rir_path
n_mels 64 frontend.num_mels
log_input True frontend.log_input
model RawNet3 model.name
encoder_type ASP model.pooling
nOut 256 model.embedding_dim
sinc_stride 16 model.options.sinc_stride
mixedprec True runtime.precision auto
gpu_id 1 runtime.gpu_id
num_eval 5 evaluation.num_crops
prefetch_factor 3 data.prefetch_factor
persistent_workers true data.persistent_workers
gradient_accumulation_steps 4 training.accumulation_steps
compile_model false runtime.compile 'off'
enable_profiling true runtime.profiling
pin_memory false data.pin_memory
patience 15 training.patience
max_test_pairs 50000 evaluation.max_trials
eval_batch_size 128 evaluation.batch_size
distributed true runtime.distributed
port 1234 runtime.port
"""
ROWS = [line.split() for line in OPTIONS.strip().splitlines()]
# The defaults of its argument parser.
DEFAULTS = yaml.safe_load("""
data:
  {crop_frames: 200, batch_size: 200, max_utterances_per_speaker: 500, utterances_per_speaker: 1, num_workers: 5,
  train_list: data/train_list.txt, test_list: data/veri_test.txt, train_path: data/voxceleb2/dev/wav,
  test_path: data/voxceleb1/test/wav}
evaluation:
  {eval_frames: 300, num_crops: 10, score: mean_distance, dcf_target_priors: [0.05], c_miss: 1.0, c_fa: 1.0}
augment:
  {enabled: false, style: classic, noise_path: data/musan_split, rir_path: data/RIRS_NOISES/simulated_rirs}
runtime: {seed: 10, precision: 'no'}
training: {test_interval: 10, max_epochs: 500, max_grad_norm: 0.0}
optimizer: {name: adam, learning_rate: 0.001, weight_decay: 0.0}
schedule: {name: step, decay: 0.95, decay_interval: 10}
loss: {margin: 0.1, scale: 30.0}
frontend: {num_mels: 40, log_input: false}
model: {pooling: SAP, embedding_dim: 512}
""")
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
nPerSpeaker: 2
batch_size: 200
"""
FORK = """
model: ResNetSE34L
trainfunc: amsoftmax
patience: 15
max_test_pairs: 50000
eval_batch_size: 128
persistent_workers: true
compile_model: false
nLcasses: 5991
mixedprec: true
"""
# What has to be chosen for an option to have an effect; voxceleb_trainer ignores it otherwise.
CHOOSES = {
    "lr_decay": {"scheduler": "steplr"},
    "hard_prob": {"trainfunc": "triplet"},
    "hard_rank": {"trainfunc": "triplet"},
    "sinc_stride": {"model": "RawNet3"},
}


def value_of(config, key):
    return functools.reduce(getattr, key.split("."), config)


def loaded(text: str, tmp_path: Path, *options: str):
    (tmp_path / "their.yaml").write_text(text)
    return load_config(["--config", str(tmp_path / "their.yaml"), *options])


def test_no_option_is_left_out():
    theirs = {row[0] for row in ROWS} | {"eval"}
    assert theirs <= {*ALIASES, *MODE_FLAGS} and set(CLASSIC_NAMES) <= theirs


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_same_meaning_on_the_command_line_and_in_yaml(row, tmp_path):
    name, written, key, *other = row
    given = {**CHOOSES.get(name, {}), name: written}
    flags = [word for option, value in given.items() for word in (f"--{option}", value)]
    expected = yaml.safe_load((other or [written])[0])
    assert value_of(load_config(flags).config, key) == expected
    lines = "".join(f"{option}: {value}\n" for option, value in given.items())
    assert value_of(loaded(lines, tmp_path).config, key) == expected


def test_omitted_options(tmp_path):
    flags = ["--defaults", "voxceleb_trainer", "--trainfunc", "amsoftmax"]
    for config in (loaded("trainfunc: amsoftmax\n", tmp_path).config, load_config(flags).config):
        for section, values in DEFAULTS.items():
            found = getattr(config, section).model_dump()
            assert {name: found[name] for name in values} == values
    triplet = load_config(["--defaults", "voxceleb_trainer", "--trainfunc", "triplet", "--optimizer", "sgd"]).config
    assert (triplet.loss.hard_probability, triplet.loss.hard_rank, triplet.optimizer.nesterov) == (0.5, 10, False)
    # Its learning rate decays every test_interval.
    assert loaded("test_interval: 4\n", tmp_path).config.schedule.decay_interval == 4


def test_recipes_build(tmp_path):
    config = loaded(RAWNET3_AAM, tmp_path).config
    net = build_model(config)
    assert sum(parameter.numel() for parameter in net.parameters()) == 16_280_322
    options = net.spec()["model"]["options"]
    assert (options["sinc_stride"], options["pooling"], options["embedding_dim"]) == (10, "ECA", 256)
    loss = build_loss(config, 20)
    assert (type(loss).__name__, loss.margin, loss.scale) == ("AAMSoftmax", 0.1, 30.0)
    config = loaded(LIGHT_AP, tmp_path).config
    assert sum(parameter.numel() for parameter in build_model(config).parameters()) == 1_437_078
    assert build_loss(config, 20).is_metric
    assert (config.data.batch_size, config.data.utterances_per_speaker) == (200, 2)
    config = loaded(FORK, tmp_path).config
    assert (config.training.patience, config.evaluation.max_trials, config.evaluation.batch_size) == (15, 50000, 128)
    assert config.data.num_classes == 5991 and config.runtime.precision == "auto" and config.runtime.compile == "off"


def test_evaluation_by_flags_alone():
    """Its README's command, with a checkpoint that is recognised as its own."""
    flags = "--eval --model ResNetSE34L --log_input --trainfunc angleproto --eval_frames 400 --initial_model FILE"
    options = [*flags.split(), "--test_list", "a", "--test_path", "b", "--save_path", "c"]
    answer = load_config(options, lambda path: path == Path("FILE"))
    assert answer.evaluate_only and answer.is_classic
    assert answer.config.evaluation.score == "mean_distance" and answer.config.evaluation.eval_frames == 400
