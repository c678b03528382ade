"""Convert a wespeaker configuration (github wenet-e2e/wespeaker, commit dfa7419) to ours.

Its learning rates and batch sizes are per GPU listed in `gpus`; ours are for all GPUs together.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from speakernet.config.schema import CHOICES
from speakernet.models.options import MODELS as OUR_MODELS
from speakernet.options import lookup

SAME = {
    "dataset_args.num_frms": "data.crop_frames",
    "dataset_args.resample_rate": "data.sample_rate",
    "dataset_args.aug_prob": "augment.probability",
    "dataset_args.fbank_args.num_mel_bins": "frontend.num_mels",
    "dataset_args.fbank_args.dither": "frontend.dither",
    "dataset_args.tfmel_args.n_mels": "frontend.num_mels",
    "dataset_args.tfmel_args.f_min": "frontend.low_hz",
    "dataset_args.tfmel_args.f_max": "frontend.high_hz",
    "dataset_args.tfmel_args.norm_signal": "frontend.normalize_waveform",
    "dataset_args.spec_aug": "frontend.spec_augment",
    "dataset_args.spec_aug_args.num_f_mask": "frontend.mel_masks",
    "dataset_args.spec_aug_args.max_f": "frontend.mel_mask_width",
    "dataset_args.spec_aug_args.num_t_mask": "frontend.frame_masks",
    "dataset_args.spec_aug_args.max_t": "frontend.frame_mask_width",
    "model_args.embed_dim": "model.embedding_dim",
    "model_args.pooling_func": "model.pooling",
    "projection_args.scale": "loss.scale",
    "projection_args.easy_margin": "loss.easy_margin",
    "projection_args.K": "loss.sub_centers",
    "projection_args.k_top": "loss.inter_top_k",
    "projection_args.mp": "loss.inter_top_k_penalty",
    "projection_args.lanbuda": "loss.positive_weight",
    "projection_args.t": "loss.exponent",
    "projection_args.margin_type": "loss.margin_type",
    "projection_args.curvature": "loss.curvature",
    "optimizer_args.momentum": "optimizer.momentum",
    "optimizer_args.nesterov": "optimizer.nesterov",
    "optimizer_args.weight_decay": "optimizer.weight_decay",
    "num_epochs": "training.max_epochs",
    "num_avg": "training.average_checkpoints",
    "seed": "runtime.seed",
}
"""wespeaker's option -> ours with the same meaning."""
MODELS = {
    **{
        one: one
        for one in OUR_MODELS
        if one.startswith(("ResNet1", "ResNet2", "ResNet3", "ResNet5"))
    },
    **{one: one for one in OUR_MODELS if one.startswith(("CAMPPlus", "Gemini_DF", "ReDimNet"))},
    **{"XVEC": "XVector", "Res2Net34_Base": "Res2Net34"},
    **{"ECAPA_TDNN_c512": "ECAPA_TDNN", "ECAPA_TDNN_GLOB_c512": "ECAPA_TDNN"},
    **{"ECAPA_TDNN_c1024": "ECAPA_TDNN_1024", "ECAPA_TDNN_GLOB_c1024": "ECAPA_TDNN_1024"},
    **{"SimAM_ResNet34_ASP": "SimAM_ResNet34", "SimAM_ResNet100_ASP": "SimAM_ResNet100"},
    **{"ERes2Net34_Base": "ERes2NetBase", "ERes2Net34_Large": "ERes2NetLarge"},
}
LOSSES: dict[str, dict[str, Any]] = {
    "arc_margin": {"name": "aamsoftmax"},
    "arc_margin_intertopk_subcenter": {"name": "aamsoftmax", "sub_centers": 3, "inter_top_k": 5},
    "add_margin": {"name": "amsoftmax"},
    "sphereface2": {"name": "sphereface2"},
    "ham_margin": {"name": "hamsoftmax"},
    "softmax": {"name": "softmax"},
}
FRONT_ENDS = {
    "fbank": {"name": "fbank", "scale": 32768, "window": "hamming", "normalize": "mean"},
    "tfmel": {"name": "tf_mel", "preemphasis": 0.97, "normalize": "mean"},
}
OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
BATCH = 64
"""Utterances per step for which wespeaker states its learning rates; it scales them with the
batch."""
FRAMES_PER_SECOND = 100
LONGEST = "dataset_args.filter_args.max_num_frames"
ALWAYS: dict[str, Any] = {
    "data": {"sampler": "shuffled"},
    # Half reverberation, half a file drawn from all 2,016 of MUSAN, of which 46 % are noise, 33 %
    # music, 21 % speech.
    "augment": {
        "categories": [*["reverb"] * 6, *["noise"] * 3, *["music"] * 2, "babble"],
        **{"babble_speakers": [1, 1], "babble_snr_db": [10, 30]},
    },
    "optimizer": {"decay_norms_and_biases": True},
    "schedule": {"name": "exponential", "warmup_overlaps": True},
    "training": {"max_grad_norm": 0, "final_model": "last"},
    "runtime": {"sync_batch_norm": "off"},
    "evaluation": {
        **{"eval_frames": 0, "score": "cosine", "subtract_mean": True},
        **{"score_norm": "as", "cohort_size": 300, "cohort_utterances": 0},
    },
}
"""What wespeaker's code and run.sh always do, without an option for it."""
READ = (
    "model",
    "optimizer",
    "scheduler",
    "gpus",
    "enable_amp",
    "dataset_args.frontend",
    "dataset_args.speed_perturb",
    "dataset_args.filter_args.min_num_frames",
    "dataset_args.tfmel_args.do_preemph",
    "dataloader_args.batch_size",
    "model_args.two_emb_layer",
    "projection_args.project_type",
    "projection_args.do_lm",
    "scheduler_args.",
    "margin_update.",
)
# Specific to wespeaker's code or the machine, or the same in all its configurations.
NOT_NEEDED = (
    "exp_dir",
    "save_epoch_interval",
    "log_batch_interval",
    "do_lm",
    "data_type",
    "model_init",
    "loss",
    "margin_scheduler",
    "dataset_args.filter",
    "dataloader_args.",
    "dataset_args.shuffle",
    "dataset_args.sample_num_per_epoch",
    "dataset_args.cmvn",
    "dataset_args.fbank_args.frame",
    "dataset_args.spec_aug_args.prob",
    "dataset_args.tfmel_args.",
    "model_args.feat_dim",
)


def converted(
    theirs: Mapping[str, Any], stage: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Our sections, and the options of `theirs` without a counterpart; `stage` is the large-margin
    configuration.

    Raises:
        ValueError: the front end, network, loss, optimizer or schedule is not supported.
        LookupError: an option that all wespeaker configurations have is missing.
    """
    given = dict(_flat(theirs))
    lookup({"ExponentialDecrease": 0}, given["scheduler"], "scheduler")
    sections: dict[str, Any] = {
        **{name: dict(values) for name, values in ALWAYS.items()},
        "frontend": dict(
            lookup(FRONT_ENDS, given.get("dataset_args.frontend", "fbank"), "front end")
        ),
        "model": {"name": lookup(MODELS, given["model"], "model of wespeaker")},
        "loss": dict(lookup(LOSSES, given["projection_args.project_type"], "project_type")),
    }
    for name, key in SAME.items():
        section, _, option = key.partition(".")
        if name in given:
            sections[section][option] = given[name]
    size = given["dataloader_args.batch_size"] * (str(given.get("gpus", "")).count(",") + 1)
    shortest = (
        given.get("dataset_args.filter_args.min_num_frames", 0)
        if given.get("dataset_args.filter", True)
        else 0
    )
    sections["data"] |= {"batch_size": size, "min_seconds": shortest / FRAMES_PER_SECOND}
    sections["augment"]["speed_factors"] = (
        [0.9, 1.0, 1.1] if given.get("dataset_args.speed_perturb") else [1.0]
    )
    sections["optimizer"] |= {
        "name": lookup(OPTIMIZERS, given["optimizer"], "optimizer"),
        "learning_rate": given["scheduler_args.initial_lr"] * size / BATCH,
    }
    sections["schedule"] |= {
        "final_learning_rate": given["scheduler_args.final_lr"] * size / BATCH,
        "warmup_epochs": given["scheduler_args.warm_up_epoch"]
        if given["scheduler_args.warm_from_zero"]
        else 0,
    }
    first, last = (given[f"margin_update.{one}_margin"] for one in ("initial", "final"))
    ramps = given["margin_update.update_margin"] and first != last
    sections["loss"]["margin"] = last if ramps else first
    if ramps:
        sections["schedule"] |= {
            "margin": "exponential" if given["margin_update.increase_type"] == "exp" else "linear",
            "margin_initial": first,
            # wespeaker counts epochs from 1.
            "margin_begin_epoch": given["margin_update.increase_start_epoch"] - 1,
            "margin_end_epoch": given["margin_update.fix_start_epoch"] - 1,
        }
    sections["runtime"]["precision"] = "fp16" if given.get("enable_amp") else "no"
    _adapt_network(given, sections)
    if stage is not None:
        sections["training"] |= _second_stage(converted(stage)[0])
    # Long utterances are kept, so their limit is reported as not converted.
    unknown = (one for one in given if one not in SAME and not one.startswith((*READ, *NOT_NEEDED)))
    return sections, [
        f"{one}: {given[one]}" for one in (*unknown, *(LONGEST,) * (LONGEST in given))
    ]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values as dotted names and values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _adapt_network(given: Mapping[str, Any], sections: dict[str, Any]) -> None:
    """Set what depends on the network, and drop options that the chosen front end and loss do not
    take.
    """
    theirs = given["model"]
    model = sections["model"]
    loss = sections["loss"]
    if theirs.startswith("SimAM"):
        model["pooling"] = "ASP"
    elif model.get("pooling") == "ASTP" and ("GLOB" in theirs or theirs.startswith("ReDimNet")):
        model["pooling"] = "GlobalASTP"
    options = {
        "two_layers": given.get("model_args.two_emb_layer"),
        "pooled_norm": not theirs.startswith("ReDimNetB"),
    }
    model["options"] = {
        name: value for name, value in options.items() if value is (name == "two_layers")
    }
    if given.get("projection_args.do_lm"):
        loss["inter_top_k"] = 0
    if not given.get("dataset_args.tfmel_args.do_preemph", True):
        sections["frontend"]["preemphasis"] = 0.0
    for holder in ("frontend", "loss"):
        known = CHOICES[holder].table[sections[holder]["name"]].options.model_fields
        sections[holder] = {
            name: value for name, value in sections[holder].items() if name in known
        }


def _second_stage(ours: Mapping[str, Any]) -> dict[str, Any]:
    """The options of our large-margin stage from a converted configuration."""
    return {
        "large_margin_epochs": ours["training"]["max_epochs"],
        "large_margin": ours["loss"]["margin"],
        "large_margin_crop_frames": ours["data"]["crop_frames"],
        "large_margin_batch_size": ours["data"]["batch_size"],
        "large_margin_learning_rate": ours["optimizer"]["learning_rate"],
        "large_margin_final_learning_rate": ours["schedule"]["final_learning_rate"],
        "large_margin_warmup_epochs": ours["schedule"]["warmup_epochs"],
        "large_margin_augment": ours["augment"]["probability"] > 0,
    }
