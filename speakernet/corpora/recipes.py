"""Configurations for prepared lists: a complete one, or only lists and folders for use with a
shipped recipe.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from speakernet.files import atomic_write, own_command

#: Utterances seen in a whole run on a small corpus: a few minutes on a GPU, a quarter of an hour on
# two CPU cores.
UTTERANCES_PER_RUN = 50_000
MIN_EPOCHS = 20
MAX_EPOCHS = 60
LARGEST_BATCH = 64
LARGEST_SMALL_BATCH = 32
MIN_STEPS = 8  # per epoch
FRAMES_PER_SECOND = 100
SHORTEST_CROP = 50  # frames
LONGEST_CROP = 200
#: Up to this many utterances, the compact network below is large enough and can be trained on a
# CPU.
SMALL_CORPUS_UTTERANCES = 20_000
Sections = dict[str, dict[str, Any]]
"""Section of a configuration -> option -> value."""
#: The network and optimizer of configs/speechocean_fast.yaml, which were tuned on 150 speakers of
# real speech.
SMALL_CORPUS_SECTIONS: Sections = {
    "frontend": {"num_mels": 56, "spec_augment": True, "mel_mask_width": 6, "frame_mask_width": 20},
    "model": {
        "name": "ResNet",
        "embedding_dim": 192,
        "options": {"channels": 16, "blocks": [2, 2, 2, 2], "stem_stride": 2},
    },
    "loss": {"name": "aamsoftmax", "margin": 0.2, "scale": 30},
    "optimizer": {"name": "adamw", "learning_rate": 2.0e-3, "weight_decay": 0.02},
}
#: Up to this many training utterances, a folder's lists are for the small-data recipe.
LITTLE_DATA_UTTERANCES = 5_000
LITTLE_DATA = "small_data.yaml"
FINE_TUNING = "finetune.yaml"
LITTLE_DATA_CROP = 150
LITTLE_DATA_EPOCHS = 200
LITTLE_DATA_RAMP = (12, 58)
"""From configs/small_data.yaml: frames per crop, epochs of the run, first and last epoch of the
margin's ramp."""
LITTLE_DATA_TUNED_UTTERANCES = 1_200
"""Utterances for which these epochs were tuned; with more there are fewer epochs, so that a run
takes no longer."""


@dataclass(frozen=True)
class ListFiles:
    """The lists written; `test` is None if there is no test split, and `everyone`, trials among all
    speakers, only exists for a small folder.
    """

    train: Path
    validation: Path | None
    test: Path | None
    everyone: Path | None
    num_train: int
    num_speakers: int
    median_seconds: float
    hours: float


@dataclass(frozen=True)
class Inputs:
    """What a configuration trains on; all paths are written as absolute ones, so that it works from
    any folder.
    """

    root: Path
    lists: ListFiles
    noise_path: Path | None = None
    rir_path: Path | None = None

    def sections(self) -> Sections:
        """The sections data and augment, with batch and crop as large as the speech allows."""
        # With the sizes for a large corpus, a small one might not fill a single batch, and most of
        # its recordings might be shorter than a crop.
        lists = self.lists
        root = str(self.root.resolve())
        is_small = lists.num_train <= SMALL_CORPUS_UTTERANCES
        # With batches of 64, 8 epochs of 1,440 utterances taught next to nothing; 32 and a ramped
        # margin worked.
        largest_batch = LARGEST_SMALL_BATCH if is_small else LARGEST_BATCH
        # Most utterances are at least this long; shorter ones are repeated.
        crop = lists.median_seconds * FRAMES_PER_SECOND * 0.8
        data: dict[str, Any] = {
            "train_list": str(lists.train.resolve()),
            "train_path": root,
            "batch_size": max(2, min(largest_batch, lists.num_train // MIN_STEPS)),
            "crop_frames": int(min(LONGEST_CROP, max(SHORTEST_CROP, crop))),
        }
        trials = {"validation": lists.validation, "test": lists.test or lists.validation}
        for name, path in trials.items():
            if path is not None:
                data |= {f"{name}_list": str(path.resolve()), f"{name}_path": root}
        augment: dict[str, Any] = {"enabled": bool(self.noise_path or self.rir_path)}
        for name, path in (("noise_path", self.noise_path), ("rir_path", self.rir_path)):
            if path is not None:
                augment[name] = str(path.resolve())
        return {"data": data, "augment": augment}


def write_recipe(path: Path, inputs: Inputs) -> None:
    """Write a complete configuration, sized to the amount of data."""
    # A network needs a certain number of steps, so fewer utterances need more epochs.
    num_train = inputs.lists.num_train
    epochs = max(MIN_EPOCHS, min(MAX_EPOCHS, UTTERANCES_PER_RUN // max(1, num_train)))
    sections = inputs.sections() | {"training": {"max_epochs": epochs}}
    if num_train <= SMALL_CORPUS_UTTERANCES:
        # As in speechocean_fast.yaml, the margin grows once the speakers are roughly separated.
        schedule = {
            "name": "cosine",
            "warmup_epochs": 2,
            "final_learning_rate": 1.0e-5,
            "margin": "linear",
            "margin_begin_epoch": epochs // 8,
            "margin_end_epoch": epochs // 2,
        }
        sections |= SMALL_CORPUS_SECTIONS | {"schedule": schedule}
    _write(path, inputs, "--config THIS", sections)


def write_little_data_lists(path: Path, inputs: Inputs) -> None:
    """Write a configuration with only the lists and the run folder, for use with the small-data
    recipe.

    It overrides the batch or the crop if the utterances are too few or too short for the recipe's,
    and the epochs if there are more utterances than they were tuned for.
    """
    sections = inputs.sections() | {"training": {"save_path": f"exps/{path.stem}"}}
    for name, usual in (("batch_size", LARGEST_SMALL_BATCH), ("crop_frames", LITTLE_DATA_CROP)):
        if sections["data"][name] >= usual:
            del sections["data"][name]
    # Speed perturbation needs no files, so augmentation stays on without them.
    del sections["augment"]["enabled"]
    if inputs.lists.num_train > LITTLE_DATA_TUNED_UTTERANCES:
        share = LITTLE_DATA_TUNED_UTTERANCES / inputs.lists.num_train
        begin, end = LITTLE_DATA_RAMP
        epochs = round(share * LITTLE_DATA_EPOCHS)
        sections["schedule"] = {
            "margin_begin_epoch": round(share * begin),
            "margin_end_epoch": round(share * end),
        }
        sections["training"] |= {"max_epochs": epochs, "test_interval": epochs}
    _write(path, inputs, f"--config {LITTLE_DATA} --config THIS", sections)


def write_fine_tuning_lists(path: Path, inputs: Inputs) -> None:
    """Write a configuration with only the lists and a run folder, for use with the fine-tuning
    recipe.
    """
    sections = inputs.sections() | {"training": {"save_path": f"exps/{path.stem}"}}
    use = f"--config {FINE_TUNING} --config THIS --initial_model MODEL.pt"
    _write(path, inputs, use, sections)


def _write(path: Path, inputs: Inputs, use: str, sections: Sections) -> None:
    filled = {name: section for name, section in sections.items() if section}
    lists = inputs.lists
    with atomic_write(path) as file:
        file.write(
            f"# {lists.num_train} utterances of {lists.num_speakers} speakers from "
            f"{inputs.root.name}, for `{use}`.\n# Options that are not set here keep their "
            "defaults; `speakernet show-config --config FILE` shows all.\n"
        )
        yaml.safe_dump(filled, file, sort_keys=False, allow_unicode=True)


def print_next_command(*configs: Path | str, options: str = "") -> None:
    """Print the shell command that trains on the configurations; `options` are added unquoted."""
    words = [own_command("train")]
    words += [f"--config {shlex.quote(str(config))}" for config in configs]
    sys.stdout.write(" ".join([*words, options]).rstrip() + "\n")
