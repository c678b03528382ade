"""`import-config`: wespeaker's options as ours, compared with our recipes, written by hand from the
same source.
"""

import copy

import pytest
import yaml

from speakernet.cli import main
from speakernet.config import load_config
from speakernet.config.loading import RECIPES
from speakernet.config.schema import stages_of
from speakernet.training.schedules import LearningRateSchedule

RESNET = """
gpus: "[0,1]"
num_avg: 10
enable_amp: False
seed: 42
num_epochs: 150
dataloader_args: {batch_size: 128, num_workers: 16}
dataset_args:
  filter_args: {min_num_frames: 100, max_num_frames: 800}
  resample_rate: 16000
  speed_perturb: True
  num_frms: 200
  aug_prob: 0.6
  fbank_args: {num_mel_bins: 80, frame_shift: 10, frame_length: 25, dither: 1.0}
  spec_aug: False
  spec_aug_args: {num_t_mask: 1, num_f_mask: 1, max_t: 10, max_f: 8, prob: 0.6}
model: ResNet34
model_args: {feat_dim: 80, embed_dim: 256, pooling_func: "TSTP", two_emb_layer: False}
projection_args: {project_type: "arc_margin", scale: 32.0, easy_margin: False}
margin_update:
  {initial_margin: 0.0, final_margin: 0.2, increase_start_epoch: 20, fix_start_epoch: 40,
   update_margin: True, increase_type: "exp"}
optimizer: SGD
optimizer_args: {momentum: 0.9, nesterov: True, weight_decay: 0.0001}
scheduler: ExponentialDecrease
scheduler_args: {initial_lr: 0.1, final_lr: 0.00005, warm_up_epoch: 6, warm_from_zero: True}
"""
LARGE_MARGIN = yaml.safe_load("""
do_lm: True
num_avg: 1
num_epochs: 5
dataloader_args: {batch_size: 64}
scheduler_args:
  {initial_lr: 1.0e-4, final_lr: 2.5e-5, warm_up_epoch: 1, warm_from_zero: True}
""")
RECIPES_THERE = {
    "resnet34": {},
    "campplus_aam": {"model": "CAMPPlus", "model_args": {"embed_dim": 512, "pooling_func": "TSTP"}},
    "ecapa1024_aam": {
        "model": "ECAPA_TDNN_GLOB_c1024",
        "model_args": {"embed_dim": 192, "pooling_func": "ASTP"},
    },
    "simam_resnet34": {"model": "SimAM_ResNet34_ASP", "model_args": {"embed_dim": 256}},
    "redimnet2_b0": yaml.safe_load("""
      model: ReDimNet2B0
      model_args: {embed_dim: 192, pooling_func: ASTP}
      num_epochs: 120
      dataloader_args: {batch_size: 512}
      optimizer_args: {weight_decay: 2.0e-5}
      scheduler_args: {final_lr: 6.0e-5}
      dataset_args:
        frontend: tfmel
        filter: False
        fbank_args: null
        tfmel_args: {n_mels: 72, f_min: 20, f_max: 7600, do_preemph: True, norm_signal: True}
      projection_args: {project_type: sphereface2, lanbuda: 0.7, t: 3, margin_type: C}
      """),
}
NOT_THERE = yaml.safe_load("""
data: [train_list, train_path, test_list, test_path, test_lists]
training: [test_interval, save_path]
augment: [noise_path, rir_path]
runtime: [seed, precision]
# SpecAugment is off.
frontend: [frame_mask_width, spec_augment_probability]
evaluation:
  [calibration_list, calibration_path, quality_measures, score_norm, cohort_size,
   cohort_utterances]
""")


def changed(changes, into=None):
    """The recipe with changed values; None removes an option."""
    found = copy.deepcopy(yaml.safe_load(RESNET) if into is None else into)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict) and name != "model_args":
            found[name] = changed(value, found[name])
        else:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def convert(tmp_path, theirs, *words):
    source, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(yaml.safe_dump(theirs))
    return main(["import-config", str(source), *words, "--out", str(ours)])


@pytest.mark.parametrize("recipe", RECIPES_THERE)
def test_recipes(recipe, tmp_path, capsys):
    base = changed(RECIPES_THERE[recipe])
    margins = {"initial_margin": 0.5, "final_margin": 0.5}
    changes = {"dataset_args": {"num_frms": 600}, "margin_update": margins}
    stage = changed({**LARGE_MARGIN, **changes}, base)
    has_limit = recipe != "redimnet2_b0"
    if not has_limit:
        changes = {
            "scheduler_args": {"final_lr": 1e-5, "warm_up_epoch": 0},
            "dataloader_args": {"batch_size": 128},
            "dataset_args": {"aug_prob": 0.0},
            "margin_update": {"initial_margin": 0.3, "update_margin": False},
        }
        stage = changed(changes, stage)
    (tmp_path / "lm.yaml").write_text(yaml.safe_dump(stage))
    assert convert(tmp_path, base, "--large-margin", str(tmp_path / "lm.yaml")) == 0
    out = capsys.readouterr().out
    assert ("not converted: dataset_args.filter_args.max_num_frames: 800" in out) == has_limit
    converted_stages, stages_by_hand = (
        stages_of(load_config(["--config", str(path)]).config)
        for path in (tmp_path / "ours.yaml", RECIPES / "voxceleb" / f"{recipe}.yaml")
    )
    assert list(converted_stages) == list(stages_by_hand) == ["base", "large_margin"]
    for stage_name, by_hand in stages_by_hand.items():
        config = converted_stages[stage_name].model_dump()
        for section, values in by_hand.model_dump().items():
            for name, value in values.items():
                has_no_effect = name == "probability" and not by_hand.augment.enabled
                if name not in NOT_THERE.get(section, ()) and not has_no_effect:
                    # 1e-4 x 4 differs from 4e-4 in the last bit.
                    expected = pytest.approx(value) if isinstance(value, float) else value
                    assert config[section][name] == expected, f"{stage_name}: {section}.{name}"
        assert (config["runtime"]["seed"], config["runtime"]["precision"]) == (42, "no")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            "dataset_args: {spec_aug: True}",
            "frontend: {spec_augment: True, frame_mask_width: 10, spec_augment_probability: 0.6}",
        ),
        (
            "projection_args: {project_type: arc_margin_intertopk_subcenter}",
            "loss: {name: aamsoftmax, sub_centers: 3, inter_top_k: 5}",
        ),
        ("projection_args: {project_type: ham_margin, curvature: 3.0}", "loss: {curvature: 3.0}"),
        ("margin_update: {update_margin: False, initial_margin: 0.3}", "loss: {margin: 0.3}"),
        (
            "{gpus: '[0]', enable_amp: True}",
            "{data: {batch_size: 128}, optimizer: {learning_rate: 0.2}}",
        ),
        (
            "margin_update: {increase_type: linear}",
            "schedule: {margin: linear, margin_end_epoch: 39}",
        ),
    ],
)
def test_other_options(changes, expected, tmp_path):
    assert convert(tmp_path, changed(yaml.safe_load(changes))) == 0
    found = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    load_config(["--config", str(tmp_path / "ours.yaml")])
    for section, options in yaml.safe_load(expected).items():
        assert found[section].items() >= options.items()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("model: ResNet35", "'ResNet34'"),
        ("dataset_args: {frontend: s3prl}", "s3prl"),
        ("scheduler: TriAngular2", "TriAngular2"),
        ("dataloader_args: null", "dataloader_args"),
        ("dataset_args: {num_frms: many}", "many"),
        ("[a, b]", "theirs.yaml is not a YAML mapping"),
    ],
)
def test_unsupported_options(changes, words, tmp_path, capsys):
    theirs = yaml.safe_load(changes)
    if isinstance(theirs, dict):
        theirs = changed(theirs)
    assert convert(tmp_path, theirs) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line and not (tmp_path / "ours.yaml").exists()


def rates(path, stage, epochs, steps_per_epoch=100):
    """The learning rate of a converted stage at these epochs."""
    config = stages_of(load_config(["--config", str(path)]).config)[stage]
    schedule = LearningRateSchedule(
        config.schedule,
        config.optimizer.learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_epochs=config.training.max_epochs,
    )
    return [schedule(epoch * steps_per_epoch) for epoch in epochs]


GEMINI = """
model: Gemini_DF_ResNet114
num_epochs: 165
optimizer: AdamW
scheduler_args: {initial_lr: 1.25e-4, final_lr: 1.0e-6, warm_from_zero: False}
"""


def test_stage_with_another_optimizer(tmp_path, capsys):
    """Wespeaker's Gemini pair: AdamW from a warm start, then SGD."""
    first = changed(yaml.safe_load(GEMINI))
    first["optimizer_args"] = {"weight_decay": 0.05}
    second = changed({**LARGE_MARGIN, "dataset_args": {"sample_num_per_epoch": 1000}})
    second["model"] = first["model"]
    (tmp_path / "lm.yaml").write_text(yaml.safe_dump(second))
    assert convert(tmp_path, first, str(tmp_path / "lm.yaml")) == 0
    stages = stages_of(load_config(["--config", str(tmp_path / "ours.yaml")]).config)
    adamw, sgd = (stages[name].optimizer for name in ("base", "large_margin"))
    assert (adamw.name, adamw.weight_decay) == ("adamw", 0.05)
    assert (sgd.name, sgd.weight_decay, sgd.momentum, sgd.nesterov) == ("sgd", 0.0001, 0.9, True)
    # 256 utterances a step: four times the rate of 64, reached from the rate of 64.
    decay = (1e-6 / 1.25e-4) ** (1 / 165)
    assert rates(tmp_path / "ours.yaml", "base", [0, 3, 6]) == pytest.approx(
        [1.25e-4, 2.5 * 1.25e-4 * decay**3, 4 * 1.25e-4 * decay**6]
    )
    assert "sample_num_per_epoch: 1000 (stage large_margin)" in capsys.readouterr().out


BACKBONE = """
model: W2VBert_Adapter_MFA
model_args: {embed_dim: 256, pooling_func: ASP, adapter_dim: 128}
dataset_args:
  frontend: w2vbert
  fbank_args: null
  cmvn: False
  speed_perturb_mode: expanded
  w2vbert_args:
    {model_name: facebook/w2v-bert-2.0, frozen: True, use_lora: True,
     lora_config_args: {r: 64, lora_alpha: 128, target_modules: [linear_q, linear_v]}}
num_epochs: 15
optimizer: AdamW
scheduler: WarmupLR_withStepDecay
"""


def test_stages_of_a_backbone(tmp_path):
    # Not changed, but replaced.
    arguments = {"optimizer_args": None, "scheduler_args": None}
    first = changed(arguments, changed(yaml.safe_load(BACKBONE)))
    first["optimizer_args"] = {"lr": 1e-4, "weight_decay": 1e-4}
    first["scheduler_args"] = {"warmup_step": 5, "decay_step": 5, "gamma": 0.1}
    second = changed({"num_epochs": 4, "scheduler": "WarmupCosineScheduler"}, first)
    backbone = {"model_name": "facebook/w2v-bert-2.0", "frozen": False}
    second["dataset_args"]["w2vbert_args"] = backbone
    second["scheduler_args"] = {"max_lr": 1e-5, "min_lr": 5e-6, "warmup_epoch": 0, "fix_epoch": 2}
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(second))
    assert convert(tmp_path, first, str(tmp_path / "second.yaml")) == 0
    stages = stages_of(load_config(["--config", str(tmp_path / "ours.yaml")]).config)
    options = [stages[name].model.options for name in ("base", "stage2")]
    assert [option.trained for option in options] == ["lora", "all"]
    assert (options[0].lora_rank, options[0].lora_alpha) == (64, 128)
    assert rates(tmp_path / "ours.yaml", "base", [2.5, 5, 10]) == pytest.approx([5e-5, 1e-4, 1e-5])
    assert rates(tmp_path / "ours.yaml", "stage2", [0, 4]) == pytest.approx([1e-5, 5e-6])


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ("dataset_args: {new_option: 3}", "dataset_args.new_option: 3"),
        ("dataset_args: {fbank_args: {frame_shift: 5}}", "fbank_args.frame_shift: 5"),
        ("model_init: avg.pt", "model_init: avg.pt"),
        ("loss_args: {label_smoothing: 0.1}", "loss_args.label_smoothing: 0.1"),
        ("dataset_args: {speed_perturb_mode: expanded}", "speed_perturb_mode: expanded"),
    ],
)
def test_what_is_not_converted(changes, note, tmp_path, capsys):
    assert convert(tmp_path, changed(yaml.safe_load(changes))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("not converted: ") and line.endswith(note) for line in lines)


def test_large_margin_configuration_alone(tmp_path):
    """`do_lm` is an option of the whole configuration: no speeds, no penalty on near speakers."""
    theirs = {**changed(LARGE_MARGIN)}
    theirs["projection_args"] = {"project_type": "arc_margin_intertopk_subcenter"}
    assert convert(tmp_path, theirs) == 0
    config = load_config(["--config", str(tmp_path / "ours.yaml")]).config
    assert config.augment.speed_factors == (1.0,) and config.loss.inter_top_k == 0
