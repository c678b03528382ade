"""`import-config`: wespeaker's options as ours, compared with our recipes, written by hand from the
same source.
"""

import copy

import pytest
import yaml

from speakernet.cli import main
from speakernet.config import load_config
from speakernet.config.loading import RECIPES

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
  {initial_margin: 0.0, final_margin: 0.2, increase_start_epoch: 20, fix_start_epoch: 40, update_margin: True,
   increase_type: "exp"}
optimizer: SGD
optimizer_args: {momentum: 0.9, nesterov: True, weight_decay: 0.0001}
scheduler: ExponentialDecrease
scheduler_args: {initial_lr: 0.1, final_lr: 0.00005, warm_up_epoch: 6, warm_from_zero: True}
"""
LARGE_MARGIN = {
    **{"num_avg": 1, "num_epochs": 5, "dataloader_args": {"batch_size": 64}},
    "scheduler_args": {
        "initial_lr": 1e-4,
        "final_lr": 2.5e-5,
        "warm_up_epoch": 1,
        "warm_from_zero": True,
    },
}
TFMEL = {"n_mels": 72, "f_min": 20, "f_max": 7600, "do_preemph": True, "norm_signal": True}
RECIPES_THERE = {
    "resnet34": {},
    "campplus_aam": {"model": "CAMPPlus", "model_args": {"embed_dim": 512, "pooling_func": "TSTP"}},
    "ecapa1024_aam": {
        "model": "ECAPA_TDNN_GLOB_c1024",
        "model_args": {"embed_dim": 192, "pooling_func": "ASTP"},
    },
    "simam_resnet34": {"model": "SimAM_ResNet34_ASP", "model_args": {"embed_dim": 256}},
    "redimnet2_b0": {
        **{
            "model": "ReDimNet2B0",
            "model_args": {"embed_dim": 192, "pooling_func": "ASTP"},
            "num_epochs": 120,
        },
        "dataloader_args": {"batch_size": 512},
        **{"optimizer_args": {"weight_decay": 2e-5}, "scheduler_args": {"final_lr": 6e-5}},
        "dataset_args": {
            "frontend": "tfmel",
            "filter": False,
            "fbank_args": None,
            "tfmel_args": TFMEL,
        },
        "projection_args": {
            "project_type": "sphereface2",
            "lanbuda": 0.7,
            "t": 3,
            "margin_type": "C",
        },
    },
}
# Not in wespeaker's YAML: paths, the validation interval, and calibration, which run.sh has.
NOT_THERE = {
    **{
        "data": {"train_list", "train_path", "test_list", "test_path", "test_lists"},
        "training": {"test_interval"},
    },
    **{"augment": {"noise_path", "rir_path"}, "runtime": {"seed", "precision"}},
    # SpecAugment is off.
    "frontend": {"frame_mask_width"},
    "evaluation": {
        "calibration_list",
        "calibration_path",
        "quality_measures",
        "score_norm",
        "cohort_size",
        "cohort_utterances",
    },
}


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
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    return main(
        [
            "import-config",
            str(tmp_path / "theirs.yaml"),
            *words,
            "--out",
            str(tmp_path / "ours.yaml"),
        ]
    )


@pytest.mark.parametrize("recipe", RECIPES_THERE)
def test_recipes(recipe, tmp_path, capsys):
    stage = changed(
        {
            **LARGE_MARGIN,
            "dataset_args": {"num_frms": 600},
            "margin_update": {"initial_margin": 0.5, "final_margin": 0.5},
        }
    )
    if recipe == "redimnet2_b0":
        rates = {
            "scheduler_args": {"final_lr": 1e-5, "warm_up_epoch": 0},
            "dataloader_args": {"batch_size": 128},
        }
        others = {
            "dataset_args": {"aug_prob": 0.0},
            "margin_update": {"initial_margin": 0.3, "update_margin": False},
        }
        stage = changed({**rates, **others}, stage)
    (tmp_path / "lm.yaml").write_text(yaml.safe_dump(stage))
    assert (
        convert(
            tmp_path, changed(RECIPES_THERE[recipe]), "--large-margin", str(tmp_path / "lm.yaml")
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "not converted: dataset_args.filter_args.max_num_frames: 800" in out
    found, by_hand = (
        load_config(["--config", str(path)]).config.model_dump()
        for path in (tmp_path / "ours.yaml", RECIPES / "voxceleb" / f"{recipe}.yaml")
    )
    by_hand["training"]["save_path"] = found["training"]["save_path"]
    for section, values in by_hand.items():
        for name, value in values.items():
            if name not in NOT_THERE.get(section, ()):
                # 1e-4 x 4 differs from 4e-4 in the last bit.
                expected = pytest.approx(value) if isinstance(value, float) else value
                assert found[section][name] == expected, f"{section}.{name}"
    assert (found["runtime"]["seed"], found["runtime"]["precision"]) == (42, "no")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"dataset_args": {"spec_aug": True}},
            {"frontend.spec_augment": True, "frontend.frame_mask_width": 10},
        ),
        (
            {"model": "XVEC", "model_args": {"embed_dim": 512, "pooling_func": "TSTP"}},
            {"model.name": "XVector"},
        ),
        (
            {"model_args": {"embed_dim": 9, "two_emb_layer": True}},
            {"model.options": {"two_layers": True}},
        ),
        (
            {"projection_args": {"project_type": "arc_margin_intertopk_subcenter"}},
            {"loss.name": "aamsoftmax", "loss.sub_centers": 3, "loss.inter_top_k": 5},
        ),
        (
            {"projection_args": {"project_type": "ham_margin", "curvature": 3.0}},
            {"loss.curvature": 3.0},
        ),
        ({"optimizer": "AdamW", "optimizer_args": None}, {"optimizer.name": "adamw"}),
        ({"margin_update": {"update_margin": False, "initial_margin": 0.3}}, {"loss.margin": 0.3}),
        (
            {"gpus": "[0]", "enable_amp": True},
            {"data.batch_size": 128, "optimizer.learning_rate": 0.2},
        ),
        (
            {"margin_update": {"increase_type": "linear"}},
            {"schedule.margin": "linear", "schedule.margin_end_epoch": 39},
        ),
    ],
)
def test_other_options(changes, expected, tmp_path):
    assert convert(tmp_path, changed(changes)) == 0
    found = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    load_config(["--config", str(tmp_path / "ours.yaml")])
    for key, value in expected.items():
        section, option = key.split(".")
        assert found[section][option] == value, key


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "REPVGG_TINY_A0"}, "REPVGG_TINY_A0"),
        ({"model": "ResNet35"}, "'ResNet34'"),
        ({"dataset_args": {"frontend": "s3prl"}}, "s3prl"),
        ({"projection_args": {"project_type": "sphere"}}, "sphere"),
        ({"scheduler": "WarmupLR_withStepDecay"}, "WarmupLR_withStepDecay"),
        ({"dataloader_args": None}, "dataloader_args"),
        ({"dataset_args": {"num_frms": "many"}}, "many"),
    ],
)
def test_unsupported_options(changes, words, tmp_path, capsys):
    assert convert(tmp_path, changed(changes)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line and not (tmp_path / "ours.yaml").exists()


def test_no_mapping(tmp_path, capsys):
    assert convert(tmp_path, ["a", "b"]) == 2
    assert "theirs.yaml is not a YAML mapping" in capsys.readouterr().err


def test_options_without_counterpart(tmp_path, capsys):
    assert convert(tmp_path, changed({"dataset_args": {"new_option": 3}})) == 0
    assert "not converted: dataset_args.new_option: 3" in capsys.readouterr().out
