"""Convert configurations of wespeaker (github wenet-e2e/wespeaker, commit dfa7419) to ours.

Its learning rates and batch sizes are per GPU listed in `gpus`; ours are for all GPUs together.
Every option that is read is crossed off; what remains has no counterpart and is reported.
"""

from collections.abc import Mapping
from typing import Any

from speakernet.config.schema import CHOICES, OF_A_STAGE
from speakernet.models.options import MODELS as OUR_MODELS
from speakernet.options import lookup

# Names are translated by tables: what means the same, what has a fixed value here, what has no
# effect. Only what depends on several options at once is code.
SAME = {
    "exp_dir": "training.save_path",
    "dataset_args.num_frms": "data.crop_frames",
    "feature_args.num_frms": "data.crop_frames",
    "dataset_args.resample_rate": "data.sample_rate",
    "dataset_args.aug_prob": "augment.probability",
    "dataset_args.fbank_args.num_mel_bins": "frontend.num_mels",
    "dataset_args.fbank_args.dither": "frontend.dither",
    "dataset_args.tfmel_args.n_mels": "frontend.num_mels",
    "dataset_args.tfmel_args.f_min": "frontend.low_hz",
    "dataset_args.tfmel_args.f_max": "frontend.high_hz",
    "dataset_args.tfmel_args.norm_signal": "frontend.normalize_waveform",
    "dataset_args.spec_aug": "frontend.spec_augment",
    "dataset_args.spec_aug_args.prob": "frontend.spec_augment_probability",
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
    "seed": "runtime.seed",
}
"""wespeaker's option -> ours with the same meaning."""
# The only values that our code reproduces. Any other is reported, because it would train a
# different model.
FIXED: dict[str, Any] = {
    "model_init": None,
    "loss": "CrossEntropyLoss",
    "margin_scheduler": "MarginScheduler",
    "dataloader_args.drop_last": True,
    "feature_args.raw_wav": True,
    "dataset_args.shuffle": True,
    "dataset_args.sample_num_per_epoch": 0,
    "dataset_args.speed_perturb_mode": "random",
    "dataset_args.cmvn": True,
    "dataset_args.cmvn_args.norm_mean": True,
    "dataset_args.cmvn_args.norm_var": False,
    "dataset_args.fbank_args.frame_shift": 10,
    "dataset_args.fbank_args.frame_length": 25,
    "dataset_args.tfmel_args.n_fft": 512,
    "dataset_args.tfmel_args.win_length": 400,
    "dataset_args.tfmel_args.hop_length": 160,
    "dataset_args.tfmel_args.eps": 1e-8,
    "dataset_args.tfmel_args.do_spec_aug": False,
    "dataset_args.w2vbert_args.lora_config_args": None,
    "dataset_args.w2vbert_args.lora_config_args.bias": "none",
    "model_args.n_mfa_layers": -1,
    "model_args.dropout": 0.0,
    "model_args.num_frontend_hidden_layers": 24,
}
"""Options that always have this value here; any other value is reported."""
WITHOUT_EFFECT = (
    "save_epoch_interval",
    "log_batch_interval",
    "data_type",
    "dataloader_args.num_workers",
    "dataloader_args.pin_memory",
    "dataloader_args.prefetch_factor",
    "dataset_args.shuffle_args.shuffle_size",
    # The front end determines it.
    "model_args.feat_dim",
    # Its trainer sets these itself.
    "projection_args.margin",
    "projection_args.do_lm",
    "projection_args.num_class",
    "scheduler_args.scale_ratio",
    "scheduler_args.num_epochs",
    "scheduler_args.epoch_iter",
)
"""Options of the machine and the log, and those that another option overrules."""
MODELS = {
    "XVEC": "XVector",
    "Res2Net34_Base": "Res2Net34",
    "ECAPA_TDNN_c512": "ECAPA_TDNN",
    "ECAPA_TDNN_GLOB_c512": "ECAPA_TDNN",
    "ECAPA_TDNN_c1024": "ECAPA_TDNN_1024",
    "ECAPA_TDNN_GLOB_c1024": "ECAPA_TDNN_1024",
    "SimAM_ResNet34_ASP": "SimAM_ResNet34",
    "SimAM_ResNet100_ASP": "SimAM_ResNet100",
    "ERes2Net34_Base": "ERes2NetBase",
    "ERes2Net34_Large": "ERes2NetLarge",
    "W2VBert_Adapter_MFA": "Pretrained",
}
EQUAL_NAMES = (
    "ResNet1",
    "ResNet2",
    "ResNet3",
    "ResNet5",
    "CAMPPlus",
    "Gemini_DF",
    "ReDimNet",
)
"""Models whose names begin like this have the same name in both toolkits."""
MODELS.update({name: name for name in OUR_MODELS if name.startswith(EQUAL_NAMES)})
LOSSES: dict[str, dict[str, Any]] = {
    "arc_margin": {"name": "aamsoftmax"},
    "arc_margin_intertopk_subcenter": {"name": "aamsoftmax", "sub_centers": 3, "inter_top_k": 5},
    "add_margin": {"name": "amsoftmax"},
    "sphereface2": {"name": "sphereface2"},
    "ham_margin": {"name": "hamsoftmax"},
    "softmax": {"name": "softmax"},
}
FRONT_ENDS: dict[str, dict[str, Any]] = {
    "fbank": {
        "name": "fbank",
        "scale": 32768,
        "window": "hamming",
        "dither": 1.0,
        "normalize": "mean",
    },
    "tfmel": {"name": "tf_mel", "preemphasis": 0.97, "normalize": "mean"},
    "w2vbert": {"name": "auto"},
}
OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
SCHEDULES = {
    "WarmupLR_withStepDecay": (
        "step",
        {
            "optimizer.learning_rate": "optimizer_args.lr",
            "schedule.decay": "scheduler_args.gamma",
            "schedule.decay_interval": "scheduler_args.decay_step",
            "schedule.warmup_epochs": "scheduler_args.warmup_step",
        },
    ),
    "WarmupCosineScheduler": (
        "cosine",
        {
            "optimizer.learning_rate": "scheduler_args.max_lr",
            "schedule.final_learning_rate": "scheduler_args.min_lr",
            "schedule.warmup_epochs": "scheduler_args.warmup_epoch",
        },
    ),
    "ExponentialDecrease": (
        "exponential",
        {
            "optimizer.learning_rate": "scheduler_args.initial_lr",
            "schedule.final_learning_rate": "scheduler_args.final_lr",
            "schedule.warmup_epochs": "scheduler_args.warm_up_epoch",
        },
    ),
}
"""wespeaker's schedule -> ours, and our options with the same meaning as its own."""
OPTIONAL = {"scheduler_args.gamma": 0.1, "scheduler_args.warm_up_epoch": 6}
"""Defaults of its schedules."""
BATCH = 64
"""Utterances per step for which wespeaker states the learning rates of its exponential schedule;
it scales them with the batch."""
FRAMES_PER_SECOND = 100
ALWAYS: dict[str, Any] = {
    "data": {"sampler": "shuffled"},
    # Half reverberation, half a file drawn from all 2,016 of MUSAN, of which 46 % are noise, 33 %
    # music, 21 % speech.
    "augment": {
        "categories": ["reverb"] * 6 + ["noise"] * 3 + ["music"] * 2 + ["babble"],
        "babble_speakers": [1, 1],
        "babble_snr_db": [10, 30],
    },
    "optimizer": {"decay_norms_and_biases": True},
    "schedule": {},
    "training": {"max_grad_norm": 0, "final_model": "last"},
    "runtime": {"sync_batch_norm": "off"},
    "evaluation": {
        "eval_frames": 0,
        "score": "cosine",
        "subtract_mean": True,
        "score_norm": "as",
        "cohort_size": 300,
        "cohort_utterances": 0,
    },
}
"""What wespeaker's code and run.sh always do, without an option for it."""
STAGE_SECTIONS = ("data", "augment", "loss", "optimizer", "schedule")
"""Sections that a stage can change; of `model` and `training` a stage changes single options."""

Sections = dict[str, dict[str, Any]]


def convert(
    theirs: Mapping[str, Any], *later: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Our sections, and the options without a counterpart.

    Args:
        theirs: the configuration of the first stage.
        later: configurations of the stages after it, such as the large-margin fine-tuning.

    Raises:
        ValueError: the front end, network, loss, optimizer or schedule is not supported.
        LookupError: an option that all its configurations have is missing.
    """
    first, notes = _one_stage(theirs)
    if not later:
        return first, notes
    training = first["training"]
    base: dict[str, Any] = {"name": "base", "epochs": training["max_epochs"]}
    if training["average_checkpoints"]:
        base["training"] = {"average_checkpoints": training["average_checkpoints"]}
    stages = [base]
    # In wespeaker a stage is another configuration that starts from the last model; here it is part
    # of one run and names only what changes.
    before = first
    for number, values in enumerate(later, start=2):
        sections, notes_of_stage = _one_stage(values)
        name = "large_margin" if values.get("do_lm") else f"stage{number}"
        changes, differing = _changes(before, sections)
        stages.append({"name": name, "epochs": sections["training"]["max_epochs"], **changes})
        notes += [f"{note} (stage {name})" for note in [*notes_of_stage, *differing]]
        before = sections
    del training["max_epochs"]
    del training["average_checkpoints"]
    training["stages"] = stages
    return first, notes


def _one_stage(theirs: Mapping[str, Any]) -> tuple[Sections, list[str]]:
    """Our sections for a single configuration, and the options without a counterpart."""
    # What is not understood must not be dropped in silence: a forgotten option trains another
    # model. So every option that is read is crossed off, also those that change nothing here, and
    # whatever is left over is a note for the user.
    options = _Unread(theirs)
    sections: Sections = {name: dict(values) for name, values in ALWAYS.items()}
    front_end = options.take("dataset_args.frontend", "fbank")
    sections["frontend"] = dict(lookup(FRONT_ENDS, front_end, "front end"))
    their_model = options.take("model")
    sections["model"] = {"name": lookup(MODELS, their_model, "model of wespeaker")}
    project_type = options.take("projection_args.project_type")
    sections["loss"] = dict(lookup(LOSSES, project_type, "project_type"))
    if front_end == "fbank" and "model_args.feat_dim" in options.values:
        sections["frontend"]["num_mels"] = options.values["model_args.feat_dim"]
    for name, key in SAME.items():
        section, _, option = key.partition(".")
        if name in options.values:
            sections[section][option] = options.take(name)
    # An average of one model is the model itself.
    num_averaged = options.take("num_avg", 0)
    sections["training"]["average_checkpoints"] = num_averaged if num_averaged > 1 else 0
    sections["runtime"]["precision"] = "fp16" if options.take("enable_amp", False) else "no"
    # Text or a list, such as `[0,1]`; either has one comma less than GPUs.
    num_gpus = str(options.take("gpus", "")).count(",") + 1
    batch_size = options.take("dataloader_args.batch_size") * num_gpus
    _convert_data(options, sections, batch_size)
    _convert_network(options, sections, their_model, front_end)
    _convert_optimizer(options, sections, batch_size)
    _convert_margin(options, sections)
    # Some of its options do not exist in our loss or front end of that name.
    for holder in ("frontend", "loss"):
        for option in sections[holder].keys() - _known_options(holder, sections):
            del sections[holder][option]
    for name in WITHOUT_EFFECT:
        options.take(name, None)
    for name, value in FIXED.items():
        # Only its fbank needs this; the other front ends normalise by themselves.
        if name == "dataset_args.cmvn" and front_end != "fbank":
            value = False
        options.cross_off(name, value)
    return sections, [f"{name}: {value}" for name, value in options.unread.items()]


class _Unread:
    """Options by dotted name; whoever reads one crosses it off the unread ones."""

    REQUIRED = object()

    def __init__(self, nested: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self._flatten(nested, "")
        self.unread = dict(self.values)

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of an option; without a default it must be there (LookupError)."""
        self.unread.pop(name, None)
        if default is self.REQUIRED:
            return self.values[name]
        return self.values.get(name, default)

    def cross_off(self, name: str, value: Any) -> None:
        """Cross an option off if it has this value, and leave it to be reported otherwise."""
        if name in self.values and self.values[name] == value:
            self.unread.pop(name, None)

    def _flatten(self, nested: Mapping[str, Any], before: str) -> None:
        for name, value in nested.items():
            if isinstance(value, Mapping):
                self._flatten(value, f"{before}{name}.")
            else:
                self.values[f"{before}{name}"] = value


def _convert_data(options: _Unread, sections: Sections, batch_size: int) -> None:
    """Batch, speeds, and the shortest utterance. Long utterances are kept, so their limit stays
    unread.
    """
    # Their filter also drops long utterances. Ours are kept, because a crop is read wherever it
    # lies, so the upper limit is reported unless the filter was off.
    shortest = options.take("dataset_args.filter_args.min_num_frames", 0)
    if not options.take("dataset_args.filter", True):
        shortest = 0
        options.take("dataset_args.filter_args.max_num_frames", None)
    sections["data"]["batch_size"] = batch_size
    sections["data"]["min_seconds"] = shortest / FRAMES_PER_SECOND
    # As in its trainer, the large-margin stage uses recorded speech only.
    has_speeds = options.take("dataset_args.speed_perturb", False)
    if options.take("do_lm", False):
        has_speeds = False
        # Its loss then leaves out the penalty on the nearest other speakers.
        sections["loss"]["inter_top_k"] = 0
    sections["augment"]["speed_factors"] = [0.9, 1.0, 1.1] if has_speeds else [1.0]
    sections["augment"]["enabled"] = has_speeds or sections["augment"].get("probability") != 0


def _convert_network(
    options: _Unread, sections: Sections, their_model: str, front_end: str
) -> None:
    """What depends on the network."""
    model = sections["model"]
    if front_end == "w2vbert":
        _convert_backbone(options, model)
        return
    # Their SimAM models have an attentive pooling whatever `pooling_func` says, and in those with
    # GLOB and in ReDimNet the attention sees the whole utterance.
    if their_model.startswith("SimAM"):
        model["pooling"] = "ASP"
    elif model.get("pooling") == "ASTP" and (
        "GLOB" in their_model or their_model.startswith("ReDimNet")
    ):
        model["pooling"] = "GlobalASTP"
    model["options"] = {}
    if options.take("model_args.two_emb_layer", False):
        model["options"]["two_layers"] = True
    if their_model.startswith("ReDimNetB"):
        model["options"]["pooled_norm"] = False
    if not options.take("dataset_args.tfmel_args.do_preemph", True):
        sections["frontend"]["preemphasis"] = 0.0


def _convert_backbone(options: _Unread, model: dict[str, Any]) -> None:
    """A pretrained backbone with adapters on its layers."""
    within = "dataset_args.w2vbert_args"
    model["pooling"] = "AdapterMFA"
    model["pooling_options"] = {"dim": options.take("model_args.adapter_dim")}
    options.cross_off("model_args.pooling_func", "ASP")
    # Two switches there are one word here.
    backbone = {"backbone": options.take(f"{within}.model_name"), "trained": "nothing"}
    has_adapters = options.take(f"{within}.use_lora", False)
    if not options.take(f"{within}.frozen", True):
        backbone["trained"] = "all"
    elif has_adapters:
        lora = f"{within}.lora_config_args"
        backbone |= {
            "trained": "lora",
            "lora_rank": options.take(f"{lora}.r"),
            "lora_alpha": options.take(f"{lora}.lora_alpha"),
            "lora_targets": options.take(f"{lora}.target_modules"),
            "lora_dropout": options.take(f"{lora}.lora_dropout", 0.0),
        }
    model["options"] = backbone


def _convert_optimizer(options: _Unread, sections: Sections, batch_size: int) -> None:
    """Optimizer and learning-rate schedule."""
    optimizer = sections["optimizer"]
    schedule = sections["schedule"]
    optimizer["name"] = lookup(OPTIMIZERS, options.take("optimizer"), "optimizer")
    their_schedule = options.take("scheduler")
    schedule["name"], counterparts = lookup(SCHEDULES, their_schedule, "scheduler")
    # Each schedule has its own options; the two in `OPTIONAL` have defaults in their code.
    for key, name in counterparts.items():
        section, _, option = key.partition(".")
        default = OPTIONAL.get(name, options.REQUIRED)
        sections[section][option] = options.take(name, default)
    if schedule["name"] == "cosine":
        options.take("optimizer_args.lr", None)
        # Ours reaches the end of the cosine with the last epoch.
        options.cross_off("scheduler_args.fix_epoch", sections["training"].get("max_epochs"))
    elif schedule["name"] == "exponential":
        # Its rates are those of one batch of 64; our rates are those of the whole batch.
        factor = batch_size / BATCH
        optimizer["learning_rate"] *= factor
        schedule["final_learning_rate"] *= factor
        schedule["warmup_overlaps"] = True
        if not options.take("scheduler_args.warm_from_zero", False):
            # It warms up from the rate of one batch of 64, and only if the batch is larger.
            schedule["warmup_start"] = min(1.0, 1 / factor)


def _convert_margin(options: _Unread, sections: Sections) -> None:
    """The margin and its ramp."""
    first = options.take("margin_update.initial_margin")
    last = options.take("margin_update.final_margin")
    begin = options.take("margin_update.increase_start_epoch")
    end = options.take("margin_update.fix_start_epoch")
    # Read in any case, because a loss without a margin has these options too and they would be
    # reported as unread.
    is_ramp = options.take("margin_update.update_margin") and first != last
    is_exponential = options.take("margin_update.increase_type", "exp") == "exp"
    if "margin" not in _known_options("loss", sections):
        return
    sections["loss"]["margin"] = last if is_ramp else first
    if is_ramp:
        sections["schedule"]["margin"] = "exponential" if is_exponential else "linear"
        sections["schedule"]["margin_initial"] = first
        # wespeaker counts epochs from 1.
        sections["schedule"]["margin_begin_epoch"] = begin - 1
        sections["schedule"]["margin_end_epoch"] = end - 1


def _known_options(holder: str, sections: Sections) -> Mapping[str, Any]:
    name = sections[holder]["name"]
    if name == "auto":
        return {"name": None}
    return CHOICES[holder].table[name].options.model_fields


def _changes(before: Sections, after: Sections) -> tuple[dict[str, Any], list[str]]:
    """What a stage changes, and notes on differences that a stage cannot make."""
    changes: dict[str, Any] = {}
    notes = []
    # Every difference is written into the stage or named in a note; none is dropped.
    for section, values in after.items():
        # A stage's epochs stand beside its changes, and it has no folder of its own to choose.
        skipped = ("max_epochs", "save_path") if section == "training" else ()
        allowed = ("average_checkpoints",) if section == "training" else OF_A_STAGE.get(section)
        is_replaced = values.get("name") != before[section].get("name")
        changed = {}
        for option, value in values.items():
            if option in skipped or (not is_replaced and value == before[section].get(option)):
                continue
            if section == "model" and option == "options":
                same = before[section].get(option, {}).items()
                changed[option] = dict(item for item in value.items() if item not in same)
            elif (
                section in STAGE_SECTIONS and (allowed is None or option in allowed)
            ) or option == "average_checkpoints":
                changed[option] = value
            else:
                notes.append(f"{section}.{option}: {value}")
        if changed:
            changes[section] = changed
    return changes, notes
