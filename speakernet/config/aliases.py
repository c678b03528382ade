"""Other toolkits' option names, and removed options.

Sources of the names: voxceleb_trainer (commit f51bab8), its performance-optimised fork, and options
common to Hugging Face style trainers. Each row has a test.
"""

from typing import Any

# Commands and files of other programs should work as they are. Their names are translated once,
# when they are read; from there on, only our dotted keys exist.
MODE_FLAGS = ("eval",)
"""Options that select an action; they are not part of the configuration."""

CLASSIC_NAMES = {
    "batch_size": "data.batch_size",
    "nPerSpeaker": "data.utterances_per_speaker",
    "max_seg_per_spk": "data.max_utterances_per_speaker",
    "max_frames": "data.crop_frames",
    "eval_frames": "evaluation.eval_frames",
    "num_eval": "evaluation.num_crops",
    "nDataLoaderThread": "data.num_workers",
    "augment": "augment.enabled",
    "seed": "runtime.seed",
    "test_interval": "training.test_interval",
    "max_epoch": "training.max_epochs",
    "trainfunc": "loss.name",
    "optimizer": "optimizer.name",
    "scheduler": "schedule.name",
    "lr": "optimizer.learning_rate",
    "lr_decay": "schedule.decay",
    "weight_decay": "optimizer.weight_decay",
    "hard_prob": "loss.hard_probability",
    "hard_rank": "loss.hard_rank",
    "margin": "loss.margin",
    "scale": "loss.scale",
    "nClasses": "data.num_classes",
    "dcf_p_target": "evaluation.dcf_target_priors",
    "dcf_c_miss": "evaluation.c_miss",
    "dcf_c_fa": "evaluation.c_fa",
    "initial_model": "training.initial_model",
    "save_path": "training.save_path",
    "train_list": "data.train_list",
    "test_list": "data.test_list",
    "train_path": "data.train_path",
    "test_path": "data.test_path",
    "musan_path": "augment.noise_path",
    "rir_path": "augment.rir_path",
    "n_mels": "frontend.num_mels",
    "log_input": "frontend.log_input",
    "model": "model.name",
    "encoder_type": "model.pooling",
    "nOut": "model.embedding_dim",
    "sinc_stride": "model.options.sinc_stride",
    "gpu_id": "runtime.gpu_id",
    "prefetch_factor": "data.prefetch_factor",
    "persistent_workers": "data.persistent_workers",
    "gradient_accumulation_steps": "training.accumulation_steps",
    "enable_profiling": "runtime.profiling",
    "pin_memory": "data.pin_memory",
    "patience": "training.patience",
    "max_test_pairs": "evaluation.max_trials",
    "eval_batch_size": "evaluation.batch_size",
    "mixedprec": "runtime.precision",
    "compile_model": "runtime.compile",
    "distributed": "runtime.distributed",
    "port": "runtime.port",
}
COMMON_NAMES = {
    "gradient_checkpointing": "runtime.gradient_checkpointing",
    "dataloader_num_workers": "data.num_workers",
    "dataloader_prefetch_factor": "data.prefetch_factor",
    "dataloader_pin_memory": "data.pin_memory",
    "torch_compile_mode": "runtime.compile_mode",
    "cudnn_benchmark_toggle": "runtime.cudnn_benchmark",
    "cudnn_deterministic_toggle": "runtime.deterministic",
    "reference": "model.options.reference",
    "save_steps": "training.save_steps",
    "learning_rate": "optimizer.learning_rate",
    "num_workers": "data.num_workers",
    "max_epochs": "training.max_epochs",
    "output_dir": "training.save_path",
    "max_grad_norm": "training.max_grad_norm",
    "checkpoint_compression": "training.compress_checkpoints",
    "model_path": "training.initial_model",
    "per_device_train_batch_size": "data.batch_size",
    "validation_list": "data.validation_list",
    "validation_path": "data.validation_path",
    "score_norm": "evaluation.score_norm",
    "stage": "training.stage",
    "stages": "training.stages",
    "cohort_list": "evaluation.cohort_list",
    "use_compile": "runtime.compile",
    "use_amp": "runtime.precision",
    "mixed_precision": "runtime.precision",
    "mixed-precision": "runtime.precision",
    "fp16": "runtime.precision",
    "bf16": "runtime.precision",
}
ALIASES = CLASSIC_NAMES | COMMON_NAMES
Values = dict[str, str | None]
ON_OFF: Values = {"true": "on", "false": "off"}
AUTO_NO: Values = {"true": "auto", "false": "no"}
# Two programs may share a name but not its values: theirs are often switches where ours also have
# `auto`.
VALUES: dict[str, Values] = {
    "scheduler": {"steplr": "step", "cosine_with_restarts": "cosine_restarts"},
    "mixedprec": AUTO_NO,
    "use_amp": AUTO_NO,
    "mixed_precision": AUTO_NO,
    "mixed-precision": AUTO_NO,
    "compile_model": ON_OFF,
    "use_compile": ON_OFF,
    "fp16": {"true": "fp16", "false": None},
    "bf16": {"true": "bf16", "false": None},
    # voxceleb_trainer's default; any free port works.
    "port": {"8888": None},
}
"""Old name -> old value -> ours, or None to drop the option. Values not listed mean the same in
both programs."""
# These cannot be translated one to one: a ratio becomes epochs only when the number of epochs is
# known, and resuming is the default here. A guess could train something else.
ADVICE = {
    "warmup_ratio": (
        "use schedule.warmup_epochs: a ratio of 0.1 is a tenth of training.max_epochs"
    ),
    "resume": "leave it out: the same command resumes the run in its folder (training.save_path)",
    "resume_from_checkpoint": (
        "leave it out: the same command resumes the run in its folder (training.save_path)"
    ),
    "fsdp": "use runtime.parallel: fsdp",
}
"""Names from other programs that have no direct counterpart -> what to write."""
TYPOS = {"nLcasses": "nClasses"}
"""Misspelt names in voxceleb_trainer's published recipes; its own parser rejects them."""
BY_STAGE = (
    "write the stage under training.stages, after one named base with the epochs before it: "
    "{name: large_margin, epochs: 5, data: {crop_frames: 600}, augment: {speed_factors: [1.0]}, "
    "loss: {margin: 0.5}, optimizer: {learning_rate: 1e-4}, "
    "schedule: {name: exponential, final_learning_rate: 2.5e-5}}"
)
LARGE_MARGIN_OPTIONS = (
    "large_margin",
    "large_margin_epochs",
    "large_margin_crop_frames",
    "large_margin_batch_size",
    "large_margin_learning_rate",
    "large_margin_final_learning_rate",
    "large_margin_schedule",
    "large_margin_warmup_epochs",
    "large_margin_augment",
)
# A removed option is refused in a recipe and on the command line, where it is meant. It is left out
# of the copy that a run of an earlier version saved, which names every option with its default;
# otherwise old runs could not be scored any more.
REMOVED: dict[str, str] = {
    **{f"training.{name}": BY_STAGE for name in LARGE_MARGIN_OPTIONS},
    **{
        f"{holder}.{name}": "leave it out (a teacher gave no reliable gain)"
        for holder in ("loss", "loss.classification", "loss.metric")
        for name in ("teacher", "teacher_weight", "teacher_distance", "teacher_input")
    },
    "data.max_seconds": "leave longer recordings out of the list",
    "data.ram_corpus_gigabytes": "leave it out; the limit is half of the free memory",
    "runtime.interop_threads": "leave it out",
    "runtime.attention": "leave it out; torch chooses among its kernels",
    "runtime.memory_fraction": "leave it out; data.batch_size decides how much memory a step takes",
    "augment.warp_factors": "use augment.speed_factors for more voices, such as [0.9, 1.0, 1.1]",
    "runtime.cuda_graphs": (
        "set runtime.compile: on and runtime.compile_mode: reduce-overhead (torch's CUDA graphs)"
    ),
    "training.trackers: csv": "read metrics.jsonl, which holds every number of a run",
    "training.ema_statistics": "leave it out (the statistics are averaged like the weights)",
    "training.gradient_cache": "leave it out (a metric loss under accumulation always uses it)",
}
"""Options of earlier versions, and values of options -> what to write instead. Saved configurations
may still contain them."""
# The weights depend on these, so a run that continues without them trains differently.
CHANGED_TRAINING = (
    "training.large_margin_epochs",
    "training.ema_statistics",
    "loss.teacher",
    "augment.warp_factors",
    "data.max_seconds",
)
"""Removed options that changed the training of a run; a saved configuration with one of them is
named in a warning."""
# Recognised by their keys, because these files also end in .yaml and have no other mark; read as
# ours, every line would be an unknown option.
WESPEAKER = {
    "data_type",
    "dataloader_args",
    "dataset_args",
    "do_lm",
    "enable_amp",
    "gpus",
    "log_batch_interval",
    "loss_args",
    "margin_scheduler",
    "margin_update",
    "model_args",
    "model_init",
    "num_avg",
    "num_epochs",
    "optimizer_args",
    "projection_args",
    "save_epoch_interval",
    "scheduler_args",
}
"""Top-level keys that only wespeaker's configurations have."""


def translate(name: str, value: Any) -> dict[str, Any]:
    """Our dotted key and value for an old name and value; empty if the option is dropped."""
    # Values are text on the command line, but booleans and numbers in YAML; as lower-case text,
    # both are found.
    key = ALIASES[name]
    values = VALUES.get(name, {})
    value = values.get(str(value).casefold(), value)
    if name == "dcf_p_target" and not isinstance(value, list):
        value = [value]
    # Such a name only switches something on: `fp16: false` chooses no precision.
    if value is None and values:
        return {}
    if name == "torch_compile_mode":
        # As in the programs that have this name, a mode asks for compiling.
        return {key: value, "runtime.compile": "on"}
    return {key: value}
