"""Weights & Biases, by its own environment variables (WANDB_MODE, WANDB_PROJECT, …).

A run that goes on, and its final evaluation, find the run of the service by the name kept in the run folder.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from speakernet.training.trackers import PROJECT, scalars


class WeightsAndBiases:
    """A run of the project `speakernet`, or of WANDB_PROJECT; WANDB_MODE=offline writes files for `wandb sync`."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        kept = folder / "wandb.id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=folder,
            config=dict(configuration) or None,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own steps only grow, and those of a resumed run go back to its last checkpoint.
        self._run.define_metric("*", step_metric="optimizer_step")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of one record."""
        self._run.log({**dict(scalars(kind, values)), "optimizer_step": step})

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Figures as the summary too, drawings as images, the model file as an artifact."""
        pictures = {f"test/{path.stem}": wandb.Image(str(path)) for path in plots}
        self._run.log({**dict(scalars("test", figures)), **pictures, "optimizer_step": step})
        self._run.log_artifact(str(model), name=f"model-{self._run.id}", type="model")

    def close(self) -> None:
        """End the session; the run can be continued."""
        self._run.finish()
