"""Write a configuration that trains on prepared lists as it is, sized to the amount of data."""

from pathlib import Path
from typing import Any

import yaml

from speakernet.corpora.listing import ListFiles
from speakernet.files import atomic_write

#: Utterances seen in a whole run of a small corpus; a few minutes on a GPU, a quarter of an hour on two CPU cores.
WANTED_UTTERANCES = 50_000
LEAST_EPOCHS, MOST_EPOCHS = 20, 60
LARGEST_BATCH, LARGEST_SMALL_BATCH = 64, 32
#: Up to so many utterances the compact network below is large enough, and trains on a CPU.
SMALL_CORPUS_UTTERANCES = 20_000
#: The network and optimizer of configs/speechocean_fast.yaml, which were tuned on 150 speakers of real speech.
SMALL_CORPUS_SECTIONS: dict[str, dict[str, Any]] = {
    "frontend": {"num_mels": 56, "spec_augment": True, "mel_mask_width": 6, "frame_mask_width": 20},
    "model": {
        "name": "ResNet",
        "embedding_dim": 192,
        "options": {"channels": 16, "blocks": [2, 2, 2, 2], "stem_stride": 2},
    },
    "loss": {"name": "aamsoftmax", "margin": 0.2, "scale": 30},
    "optimizer": {"name": "adamw", "learning_rate": 2.0e-3, "weight_decay": 0.02},
}
#: Up to so many training utterances a folder's own lists are trained by the recipe for little data.
LITTLE_DATA_UTTERANCES = 5_000
LITTLE_DATA = "small_data.yaml"
#: The recipe that trains on from a given model.
FINE_TUNING = "finetune.yaml"
LEAST_STEPS = 8  # in an epoch
FRAMES_PER_SECOND = 100
SHORTEST_CROP, LONGEST_CROP = 50, 200
LITTLE_DATA_CROP, LITTLE_DATA_EPOCHS, LITTLE_DATA_RAMP = 150, 200, (12, 58)
"""Of configs/small_data.yaml: frames of a crop, and epochs, of the whole run and of the margin's ramp."""
LITTLE_DATA_TUNED_UTTERANCES = 1_200
"""What those epochs are for: more utterances are heard fewer times, so that a run takes no longer."""


def write_recipe(
    path: Path, root: Path, lists: ListFiles, *, noise_path: Path | None = None, rir_path: Path | None = None
) -> None:
    """Write the configuration; every path in it is absolute, so that it works from any folder."""
    epochs = max(LEAST_EPOCHS, min(MOST_EPOCHS, WANTED_UTTERANCES // max(1, lists.num_train)))
    sections = _inputs(root, lists, noise_path, rir_path)
    if lists.num_train <= SMALL_CORPUS_UTTERANCES:
        sections |= SMALL_CORPUS_SECTIONS
        # The margin grows as in that recipe, once the speakers are roughly told apart.
        ramp = {"margin": "linear", "margin_begin_epoch": epochs // 8, "margin_end_epoch": epochs // 2}
        sections["schedule"] = {"name": "cosine", "warmup_epochs": 2, "final_learning_rate": 1.0e-5, **ramp}
    sections["training"] = {"max_epochs": epochs}
    _write(path, f"Trains on {_amount(root, lists)}.", sections)


def write_little_data_lists(
    path: Path, root: Path, lists: ListFiles, *, noise_path: Path | None = None, rir_path: Path | None = None
) -> None:
    """Write a configuration of nothing but the lists and the run folder, for the recipe for little data.

    Where there are too few utterances, or too short ones, for the recipe's batches and crops, it has its own; where
    there are more than the recipe's epochs are for, it has fewer epochs.
    """
    sections = _inputs(root, lists, noise_path, rir_path)
    data = sections["data"]
    for name, usual in (("batch_size", LARGEST_SMALL_BATCH), ("crop_frames", LITTLE_DATA_CROP)):
        if data[name] >= usual:
            del data[name]
    # Voices at other speeds need no files: nothing is switched off where there are none.
    del sections["augment"]["enabled"]
    sections["training"] = {"save_path": f"exps/{path.stem}"}
    if lists.num_train > LITTLE_DATA_TUNED_UTTERANCES:
        share = LITTLE_DATA_TUNED_UTTERANCES / lists.num_train
        begin, end, epochs = (round(share * one) for one in (*LITTLE_DATA_RAMP, LITTLE_DATA_EPOCHS))
        sections["schedule"] = {"margin_begin_epoch": begin, "margin_end_epoch": end}
        sections["training"] |= {"max_epochs": epochs, "test_interval": epochs}
    first = f"The lists of {_amount(root, lists)}, for `--config {LITTLE_DATA} --config THIS`."
    _write(path, first, {name: section for name, section in sections.items() if section})


def write_fine_tuning_lists(
    path: Path, root: Path, lists: ListFiles, *, noise_path: Path | None = None, rir_path: Path | None = None
) -> None:
    """Write a configuration of nothing but the lists and the run folder; network and recipe come from elsewhere."""
    sections = _inputs(root, lists, noise_path, rir_path)
    # A run of its own beside the one from scratch, which is another network.
    sections["training"] = {"save_path": f"exps/{path.stem}"}
    first = f"The lists of {_amount(root, lists)}, for `--config {FINE_TUNING} --config THIS --initial_model MODEL.pt`."
    _write(path, first, sections)


def _amount(root: Path, lists: ListFiles) -> str:
    return f"{lists.num_train} utterances of {lists.num_speakers} speakers of {root.name}"


def _inputs(root: Path, lists: ListFiles, noise_path: Path | None, rir_path: Path | None) -> dict[str, Any]:
    """The sections data and augment."""
    largest = LARGEST_SMALL_BATCH if lists.num_train <= SMALL_CORPUS_UTTERANCES else LARGEST_BATCH
    # Batches of 64 had learned next to nothing after 8 epochs of 1,440 utterances; 32 with a ramped margin had.
    batch_size = max(2, min(largest, lists.num_train // LEAST_STEPS))
    data: dict[str, Any] = {
        "train_list": str(lists.train.resolve()),
        "train_path": str(root.resolve()),
        "batch_size": batch_size,
        # Most utterances are at least this long; shorter ones are repeated.
        "crop_frames": int(min(LONGEST_CROP, max(SHORTEST_CROP, lists.median_seconds * FRAMES_PER_SECOND * 0.8))),
    }
    if lists.validation is not None:
        data |= {"validation_list": str(lists.validation.resolve()), "validation_path": str(root.resolve())}
    report_on = lists.test or lists.validation
    if report_on is not None:
        data |= {"test_list": str(report_on.resolve()), "test_path": str(root.resolve())}
    augment: dict[str, Any] = {"enabled": noise_path is not None or rir_path is not None}
    if noise_path is not None:
        augment["noise_path"] = str(noise_path.resolve())
    if rir_path is not None:
        augment["rir_path"] = str(rir_path.resolve())
    return {"data": data, "augment": augment}


def _write(path: Path, first_line: str, sections: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(f"# {first_line}\n")
        file.write(
            "# What is not set here keeps its default; `speakernet show-config --config FILE` shows everything.\n"
        )
        yaml.safe_dump(sections, file, sort_keys=False, allow_unicode=True)
