"""The recipe of a minimal run, for tests that need a real one and override what they need."""

from typing import Any

import yaml

MANY_STEPS: dict[str, Any] = {"training": {"max_epochs": 5000, "test_interval": 5000}}
"""More than any test waits for; for runs that are stopped."""


def two_stages(epochs, later_epochs, crop_frames):
    """The entries of training.stages for a run that ends with a large margin and longer crops."""
    return [
        {"name": "base", "epochs": epochs},
        {
            "name": "large_margin",
            "epochs": later_epochs,
            "data": {"crop_frames": crop_frames},
            "augment": {"speed_factors": [1.0]},
            "loss": {"margin": 0.5},
            "optimizer": {"learning_rate": 1e-4},
            "training": {"average_checkpoints": 0},
        },
    ]


EVERY_STAGE: dict[str, Any] = {
    "frontend": {"spec_augment": True},
    "loss": {"name": "aamsoftmax"},
    "schedule": {"name": "step"},
    "training": {
        "test_interval": 1,
        "save_steps": 2,
        "average_checkpoints": 2,
        "ema_decay": 0.9,
        "stages": two_stages(2, 1, 60),
    },
    "evaluation": {"eval_frames": 40, "num_crops": 2, "bootstrap_samples": 20},
    "runtime": {"deterministic": True},
}
"""Moving average, mean of checkpoints, large margin, evaluation and report; the same bits every
time."""


def recipe_of(corpus, run, *changes):
    """Section -> option -> value of a run in `run` over a corpus with its lists; later `changes`
    take precedence.
    """
    sections: dict[str, dict[str, Any]] = {
        "data": {
            **{"train_list": str(corpus / "train_list.txt"), "train_path": str(corpus)},
            **{"test_list": str(corpus / "trials.txt"), "test_path": str(corpus)},
            **{"batch_size": 4, "crop_frames": 40, "num_workers": 0},
        },
        "model": {
            "name": "ResNet",
            "embedding_dim": 8,
            "options": {"channels": 8, "blocks": [1], "stem_stride": 4},
        },
        "loss": {"name": "amsoftmax"},
        "training": {"save_path": str(run), "log_interval": 1},
        "runtime": {"device": "cpu", "precision": "no", "compile": "off"},
        "augment": {"enabled": False},
    }
    for change in changes:
        for section, options in change.items():
            sections.setdefault(section, {}).update(options)
    return sections


def write_recipe(path, corpus, run, *changes):
    """Write that recipe and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe_of(corpus, run, *changes), sort_keys=False))
    return path
