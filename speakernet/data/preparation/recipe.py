"""Write a configuration that trains on prepared lists as it is, sized to the amount of data."""

from pathlib import Path
from typing import Any

import yaml

from speakernet.data.preparation.listing import ListFiles
from speakernet.files import atomic_write

#: Utterances seen in a whole run of a small corpus; a few minutes on a GPU, a quarter of an hour on two CPU cores.
WANTED_UTTERANCES = 50_000
LEAST_EPOCHS, MOST_EPOCHS = 20, 60
LARGEST_BATCH = 64
FRAMES_PER_SECOND = 100
SHORTEST_CROP, LONGEST_CROP = 50, 200


def write_recipe(
    path: Path, root: Path, lists: ListFiles, *, noise_path: Path | None = None, rir_path: Path | None = None
) -> None:
    """Write the configuration; every path in it is absolute, so that it works from any folder."""
    steps_wanted = 8
    batch_size = max(2, min(LARGEST_BATCH, lists.num_train // steps_wanted))
    data: dict[str, Any] = {
        "train_list": str(lists.train.resolve()),
        "train_path": str(root.resolve()),
        "batch_size": batch_size,
        # Half of the utterances are at least this long; shorter ones are repeated.
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
    epochs = max(LEAST_EPOCHS, min(MOST_EPOCHS, WANTED_UTTERANCES // max(1, lists.num_train)))
    sections = {"data": data, "augment": augment, "training": {"max_epochs": epochs}}
    with atomic_write(path) as file:
        file.write(f"# Trains on {lists.num_train} utterances of {lists.num_speakers} speakers of {root.name}.\n")
        file.write(
            "# What is not set here keeps its default; `speakernet show-config --config FILE` shows everything.\n"
        )
        yaml.safe_dump(sections, file, sort_keys=False, allow_unicode=True)


def next_command(config: Path) -> str:
    """The command that trains on it, as a shell takes it."""
    text = str(config)
    quoted = (
        text if all(char.isalnum() or char in "/._-+" for char in text) else "'" + text.replace("'", "'\"'\"'") + "'"
    )
    return f"python trainSpeakerNet.py --config {quoted}"
