"""A tracker for Weights & Biases, configured by its environment variables (WANDB_MODE, WANDB_PROJECT, …).

The run folder stores the wandb run id, so a resumed run and its final evaluation continue the same wandb run.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from speakernet.training.trackers import PROJECT, scalars


class WeightsAndBiases:
    """A run of the project WANDB_PROJECT (default `speakernet`); WANDB_MODE=offline writes files for `wandb sync`."""

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
        # wandb's own steps can only increase, but a resumed run goes back to its last checkpoint.
        self._run.define_metric("*", step_metric="optimizer_step")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of one record."""
        self._run.log({**dict(scalars(kind, values)), "optimizer_step": step})

    def results(self, step: int, figures: Mapping[str, Any], plots: Sequence[Path], model: Path) -> None:
        """Log figures, plots as images, and the model file as an artifact."""
        pictures = {f"test/{path.stem}": wandb.Image(str(path)) for path in plots}
        self._run.log({**dict(scalars("test", figures)), **pictures, "optimizer_step": step})
        self._run.log_artifact(str(model), name=f"model-{self._run.id}", type="model")

    def close(self) -> None:
        """Finish the wandb session; the run can be resumed."""
        self._run.finish()
