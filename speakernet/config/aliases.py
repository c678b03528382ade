"""One table from other toolkits' option names to ours, and voxceleb_trainer's defaults.

Sources of the names: voxceleb_trainer (commit f51bab8) and its performance-optimised fork, and the switches that
Hugging Face style trainers have in common. Each row has a test.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

MODE_FLAGS = ("eval",)
"""Options that say what to do rather than how; they are no part of the configuration."""


@dataclass(frozen=True)
class Alias:
    """What an old name means here."""

    convert: Callable[[Any], dict[str, Any]]
    """From the old option's value to our dotted keys and their values; ValueError where the value has no meaning."""
    describes: str
    """For --help and docs/migration.md."""
    is_classic: bool
    """Whether the name is voxceleb_trainer's or its fork's."""


def _same(key: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {key: value}


def _switch(key: str, when_true: Any, when_false: Any = None) -> Callable[[Any], dict[str, Any]]:
    """True sets `when_true`; false sets `when_false`, or nothing where that is None."""

    def convert(value: Any) -> dict[str, Any]:
        if str(value).casefold() not in ("true", "false"):
            raise ValueError(f"found {value!r}, expected true or false")
        chosen = when_true if str(value).casefold() == "true" else when_false
        if chosen is None:
            logger.info("not %s: %s stays as it is set otherwise (by default auto)", when_true, key)
            return {}
        return {key: chosen}

    return convert


def _precision(value: Any) -> dict[str, Any]:
    # a bare --mixed-precision arrives as True
    return {"runtime.precision": {"true": "auto", "false": "no"}.get(str(value).casefold(), value)}


def _renamed(key: str, names: dict[str, str]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {key: names.get(str(value).casefold(), value)}


_CLASSIC_NAMES = {
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
    "lr": "optimizer.learning_rate",
    "lr_decay": "schedule.decay",
    "weight_decay": "optimizer.weight_decay",
    "hard_prob": "loss.hard_probability",
    "hard_rank": "loss.hard_rank",
    "margin": "loss.margin",
    "scale": "loss.scale",
    "nClasses": "data.num_classes",
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
}
_COMMON_NAMES = {
    "gradient_checkpointing": "runtime.gradient_checkpointing",
    "dataloader_num_workers": "data.num_workers",
    "dataloader_prefetch_factor": "data.prefetch_factor",
    "dataloader_pin_memory": "data.pin_memory",
    "torch_compile_mode": "runtime.compile_mode",
    "cudnn_benchmark_toggle": "runtime.cudnn_benchmark",
    "cudnn_deterministic_toggle": "runtime.deterministic",
    "save_steps": "training.save_steps",
    "max_grad_norm": "training.max_grad_norm",
    "checkpoint_compression": "training.compress_checkpoints",
    "model_path": "training.initial_model",
    "per_device_train_batch_size": "data.batch_size",
    "validation_list": "data.validation_list",
    "validation_path": "data.validation_path",
    "score_norm": "evaluation.score_norm",
    "cohort_list": "evaluation.cohort_list",
}
_SCHEDULE_NAMES = {"steplr": "step"}
CLASSIC_PORT = "8888"
"""voxceleb_trainer's default, which nobody chose: a free one does as well."""


def _table() -> dict[str, Alias]:
    table = {name: Alias(_same(key), key, True) for name, key in _CLASSIC_NAMES.items()}
    table |= {name: Alias(_same(key), key, False) for name, key in _COMMON_NAMES.items()}
    table["scheduler"] = Alias(_renamed("schedule.name", _SCHEDULE_NAMES), "schedule.name (steplr is step)", True)
    table["dcf_p_target"] = Alias(
        lambda value: {"evaluation.dcf_target_priors": value if isinstance(value, list) else [value]},
        "evaluation.dcf_target_priors",
        True,
    )
    table["mixedprec"] = Alias(_switch("runtime.precision", "auto", "no"), "runtime.precision auto, or no", True)
    table["compile_model"] = Alias(_switch("runtime.compile", "on", "off"), "runtime.compile on, or off", True)
    table["use_compile"] = Alias(_switch("runtime.compile", "on", "off"), "runtime.compile on, or off", False)
    table["use_amp"] = Alias(_switch("runtime.precision", "auto", "no"), "runtime.precision auto, or no", False)
    for name in ("mixed_precision", "mixed-precision"):
        table[name] = Alias(_precision, "runtime.precision (without a value: auto)", False)
    table["fp16"] = Alias(_switch("runtime.precision", "fp16"), "runtime.precision fp16", False)
    table["bf16"] = Alias(_switch("runtime.precision", "bf16"), "runtime.precision bf16", False)
    table["distributed"] = Alias(_same("runtime.distributed"), "runtime.distributed", True)
    table["port"] = Alias(
        lambda value: {} if str(value) == CLASSIC_PORT else {"runtime.port": value},
        f"runtime.port ({CLASSIC_PORT}, the default there: a free one)",
        True,
    )
    return table


ALIASES: dict[str, Alias] = _table()

CLASSIC_DEFAULTS: dict[str, Any] = {
    "data.batch_size": 200,
    "data.crop_frames": 200,
    "data.max_utterances_per_speaker": 500,
    "data.utterances_per_speaker": 1,
    "data.sampler": "balanced",
    "data.num_workers": 5,
    "data.train_list": "data/train_list.txt",
    "data.train_path": "data/voxceleb2/dev/wav",
    "data.test_list": "data/veri_test.txt",
    "data.test_path": "data/voxceleb1/test/wav",
    "augment.enabled": False,
    "augment.style": "classic",
    "augment.noise_path": "data/musan_split",
    "augment.rir_path": "data/RIRS_NOISES/simulated_rirs",
    "frontend.name": "auto",
    "frontend.num_mels": 40,
    "frontend.log_input": False,
    "model.pooling": "SAP",
    "model.embedding_dim": 512,
    "loss.margin": 0.1,
    "loss.scale": 30.0,
    "loss.hard_probability": 0.5,
    "loss.hard_rank": 10,
    "optimizer.name": "adam",
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.0,
    "optimizer.decay_norms_and_biases": True,
    "optimizer.nesterov": False,
    "schedule.name": "step",
    "schedule.decay": 0.95,
    "training.max_epochs": 500,
    "training.test_interval": 10,
    "training.max_grad_norm": 0.0,
    "evaluation.eval_frames": 300,
    "evaluation.num_crops": 10,
    "evaluation.score": "mean_distance",
    "evaluation.dcf_target_priors": [0.05],
    "evaluation.c_miss": 1.0,
    "evaluation.c_fa": 1.0,
    "runtime.seed": 10,
    "runtime.precision": "no",
}
"""What an omitted option means in voxceleb_trainer; `config/loading.py` says when."""
