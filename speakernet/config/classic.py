"""Convert flat configurations of voxceleb_trainer (commit f51bab8) to ours.

Its names are translated like those on the command line (`aliases`). What a configuration leaves out
means the program's own default, which differs from ours in most options.
"""

from collections.abc import Collection, Mapping
from typing import Any

from speakernet.config.schema import Config

# A configuration of voxceleb_trainer names a few options and relies on that program's defaults for
# the rest; with ours it would train something else without a warning. So all of them are listed,
# also those that we would not choose.
DEFAULTS: dict[str, Any] = {
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
"""Our dotted key -> voxceleb_trainer's default."""
COSTLY = ("training.max_grad_norm", "runtime.precision")
"""Defaults that are most costly to overlook; they are named first."""


def convert(set_options: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration, in our dotted keys, of a program in which only these were set.

    It has options that the chosen loss or optimizer does not take, as voxceleb_trainer's has.
    """
    # Options that the chosen loss does not take are kept here: `compose` drops them, since only it
    # knows which loss is chosen in the end.
    values = {**DEFAULTS, **set_options}
    # Its StepLR decays every test_interval epochs.
    values.setdefault("schedule.decay_interval", values["training.test_interval"])
    return values


def differing_defaults(config: Config, set_keys: Collection[str]) -> str:
    """The defaults taken from voxceleb_trainer that differ from ours, each with ours in
    brackets.
    """
    # Named in the log, because the user's file does not show them.
    values = config.model_dump()
    ours = Config().model_dump()
    texts = []
    for key in dict.fromkeys([*COSTLY, *DEFAULTS]):
        section, field = key.split(".")
        value = values[section].get(field)
        default = ours[section].get(field)
        is_path = field.endswith(("_path", "_list"))
        if key in set_keys or is_path or value is None or default is None or value == default:
            continue
        texts.append(f"{key} {value} ({default})")
    return ", ".join(texts)
