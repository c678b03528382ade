"""Every option of voxceleb_trainer's command line and its fork is accepted, with its meaning and
default.
"""

import functools
import operator
from pathlib import Path

import pytest
import yaml

from speakernet.config.aliases import ALIASES, CLASSIC_NAMES, MODE_FLAGS
from speakernet.config.loading import load_config

# Our section -> option, our key, value as written, and our value if it differs.
OPTIONS = yaml.safe_load("""
data:
  {max_frames: [crop_frames, 300], batch_size: [batch_size, 32],
  max_seg_per_spk: [max_utterances_per_speaker, 100], nDataLoaderThread: [num_workers, 8],
  nPerSpeaker: [utterances_per_speaker, 2], nClasses: [num_classes, 5991], train_list: [train_list,
  a.txt], test_list: [test_list, b.txt], train_path: [train_path, a], test_path: [test_path, b],
  prefetch_factor: [prefetch_factor, 3], persistent_workers: [persistent_workers, true],
  pin_memory: [pin_memory, false]}
evaluation:
  {eval_frames: [eval_frames, 400], dcf_p_target: [dcf_target_priors, 0.01, [0.01]],
  dcf_c_miss: [c_miss, 10], dcf_c_fa: [c_fa, 2], num_eval: [num_crops, 5],
  max_test_pairs: [max_trials, 50000], eval_batch_size: [batch_size, 128]}
augment: {augment: [enabled, true], musan_path: [noise_path, m], rir_path: [rir_path, r]}
runtime:
  {seed: [seed, 11], mixedprec: [precision, true, auto], gpu_id: [gpu_id, 1],
  compile_model: [compile, false, "off"], enable_profiling: [profiling, true],
  distributed: [distributed, true], port: [port, 1234]}
training:
  {test_interval: [test_interval, 5], max_epoch: [max_epochs, 36], initial_model: [initial_model,
  a.model], save_path: [save_path, exps/a], gradient_accumulation_steps: [accumulation_steps, 4],
  patience: [patience, 15]}
loss:
  {trainfunc: [name, ge2e], hard_prob: [hard_probability, 0.7], hard_rank: [hard_rank, 3],
  margin: [margin, 0.3], scale: [scale, 15]}
optimizer:
  {optimizer: [name, sgd], lr: [learning_rate, 0.01], weight_decay: [weight_decay, 5.0e-05]}
schedule: {scheduler: [name, steplr, step], lr_decay: [decay, 0.75]}
frontend: {n_mels: [num_mels, 64], log_input: [log_input, true]}
model:
  {model: [name, RawNet3], encoder_type: [pooling, ASP], nOut: [embedding_dim, 256],
  sinc_stride: [options.sinc_stride, 16]}
""")
ROWS = [
    (name, f"{section}.{row[0]}", *row[1:])
    for section, rows in OPTIONS.items()
    for name, row in rows.items()
]
# The defaults of its argument parser.
DEFAULTS = yaml.safe_load("""
data:
  {crop_frames: 200, batch_size: 200, max_utterances_per_speaker: 500, utterances_per_speaker: 1,
  num_workers: 5, train_list: data/train_list.txt, test_list: data/veri_test.txt,
  train_path: data/voxceleb2/dev/wav, test_path: data/voxceleb1/test/wav}
evaluation:
  {eval_frames: 300, num_crops: 10, score: mean_distance, dcf_target_priors: [0.05], c_miss: 1.0,
  c_fa: 1.0}
augment:
  {enabled: false, style: classic, noise_path: data/musan_split,
  rir_path: data/RIRS_NOISES/simulated_rirs}
runtime: {seed: 10, precision: 'no'}
training: {test_interval: 10, max_epochs: 500, max_grad_norm: 0.0}
optimizer: {name: adam, learning_rate: 0.001, weight_decay: 0.0}
schedule: {name: step, decay: 0.95, decay_interval: 10}
loss: {margin: 0.1, scale: 30.0}
frontend: {num_mels: 40, log_input: false}
model: {pooling: SAP, embedding_dim: 512}
""")
# Other options needed for an option to have an effect; voxceleb_trainer ignores it otherwise.
CHOOSES = {
    "lr_decay": {"scheduler": "steplr"},
    "hard_prob": {"trainfunc": "triplet"},
    "hard_rank": {"trainfunc": "triplet"},
    "sinc_stride": {"model": "RawNet3"},
}


def value_of(config, key):
    return functools.reduce(operator.getitem, key.split("."), config.model_dump())


def loaded(text, tmp_path, *options):
    (tmp_path / "their.yaml").write_text(text)
    return load_config(["--config", str(tmp_path / "their.yaml"), *options])


def test_completeness():
    theirs = {row[0] for row in ROWS} | {"eval"}
    assert theirs <= {*ALIASES, *MODE_FLAGS} and set(CLASSIC_NAMES) <= theirs


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_command_line_and_yaml(row, tmp_path):
    name, key, written, *other = row
    given = {**CHOOSES.get(name, {}), name: written}
    flags = [word for option, value in given.items() for word in (f"--{option}", str(value))]
    expected = (other or [written])[0]
    assert value_of(load_config(flags).config, key) == expected
    lines = "".join(f"{option}: {value}\n" for option, value in given.items())
    assert value_of(loaded(lines, tmp_path).config, key) == expected


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("cosine_with_restarts", "cosine_restarts"), ("constant_with_warmup", "constant_with_warmup")],
)
def test_names_of_schedules(name, chosen):
    schedule = load_config(["--scheduler", name]).config.schedule
    assert schedule.name == chosen and schedule.warmup_epochs == (1.0 if "warmup" in name else 0.0)


def test_omitted_options(tmp_path):
    flags = ["--defaults", "voxceleb_trainer", "--trainfunc"]
    by_flags = load_config([*flags, "amsoftmax"]).config
    for config in (loaded("trainfunc: amsoftmax\n", tmp_path).config, by_flags):
        for section, values in DEFAULTS.items():
            found = getattr(config, section).model_dump()
            assert {name: found[name] for name in values} == values
    triplet = load_config([*flags, "triplet", "--optimizer", "sgd"]).config
    assert (triplet.loss.hard_probability, triplet.loss.hard_rank) == (0.5, 10)
    assert triplet.optimizer.nesterov is False
    # voxceleb_trainer's learning rate decays every test_interval.
    assert loaded("test_interval: 4\n", tmp_path).config.schedule.decay_interval == 4


def test_evaluation_by_flags():
    """The command of voxceleb_trainer's README, with a checkpoint that is recognised as its own."""
    flags = (
        "--eval --model ResNetSE34L --log_input --trainfunc angleproto --eval_frames 400 "
        "--initial_model FILE --test_list a --test_path b --save_path c"
    )
    options = flags.split()

    def answer_to(*words):
        return load_config([*options, *words], lambda path: path == Path("FILE"))

    answer = answer_to()
    assert answer.evaluate_only and answer.is_classic and not answer.assumed
    evaluation = answer.config.evaluation
    assert (evaluation.score, evaluation.eval_frames) == ("mean_distance", 400)
    assert answer.config.frontend.log_input
    # Without the flag, the same is assumed as in `import-weights`, and said.
    options.remove("--log_input")
    for words, is_on in (((), True), (("--log_input", "false"), False)):
        answer = answer_to(*words)
        assert answer.config.frontend.log_input is is_on
        assert ("log_input" in answer.assumed) is is_on
    assert answer_to("--defaults", "voxceleb_trainer").config.frontend.log_input is False
