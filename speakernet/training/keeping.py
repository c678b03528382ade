"""What a run keeps of itself: the contents of last.pt, declared in one place, and the model files beside it."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from speakernet.checkpoint import CheckpointError
from speakernet.files import reading
from speakernet.parallel import distributed
from speakernet.random import capture_random_state, restore_random_state
from speakernet.training.continuity import misfit
from speakernet.training.optimizers import OptimizerState
from speakernet.training.options import TrainerOptions
from speakernet.training.parts import Course, Learner, Records
from speakernet.training.state import Stage, TrainingState


class HasState(Protocol):
    """A part with state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take up where `state_dict` was taken."""


class Keeper:
    """Saves a run on the main process, and gives every part its state back.

    Attributes:
        modules: what is trained, by its name in last.pt.
        parts: everything else that has state, by its name in last.pt; the loader comes after them.
    """

    def __init__(self, learner: Learner, course: Course, records: Records, state: TrainingState, stage: Stage) -> None:
        step = learner.step
        self.net, self.loss, self.average = step.net, step.loss, learner.average
        self.loader = course.loader
        self.store, self.origin = records.store, records.origin
        self.state, self.stage = state, stage
        self.modules: dict[str, nn.Module] = {"net": step.net, "loss": step.loss}
        self.parts: dict[str, HasState] = {
            # Its moments alone: the options are those that the resumed run is given.
            "optimizer": OptimizerState(step.optimizer),
            "learning_rate": course.learning_rate,
            "precision": step.precision,
            "average": learner.average,
        }
        self._model_contents = records.model_contents
        self._saved_at = time.monotonic()

    def is_due_by_steps(self, options: TrainerOptions) -> bool:
        """Whether it is time to write last.pt again, by steps: all processes know."""
        return options.save_steps > 0 and self.state.step % options.save_steps == 0

    def is_due_by_minutes(self, options: TrainerOptions) -> bool:
        """Whether it is by the clock, of which there is one."""
        waited_seconds = time.monotonic() - self._saved_at
        return distributed.is_main() and options.save_minutes > 0 and waited_seconds > 60 * options.save_minutes

    def save_last(self) -> None:
        """Write everything that a resume needs."""
        self._saved_at = time.monotonic()
        # By every rank: what they share has to be gathered.
        training = self.training()
        if distributed.is_main():
            self.store.save_last({**self.model(), "training": training})

    def save_best(self) -> None:
        """Make the weights of now best.pt."""
        if distributed.is_main():
            self.store.save_best(self.model())

    def save_epoch(self, *, with_head: bool) -> None:
        """Keep the weights of now in checkpoints/, with the head of the loss where it will be averaged too."""
        head = {"head": self.loss.state_dict()} if with_head else {}
        if distributed.is_main():
            self.store.save_epoch(self.state.epoch, {**self.model(), **head})

    def save_average(self, head: Mapping[str, Any] | None) -> None:
        """Keep the weights of now as the average, with its head: that of the loss where none was averaged."""
        own = self.loss.state_dict() if head is None else head
        if distributed.is_main():
            self.store.save_average({**self.model(), "head": own})

    def model(self) -> dict[str, Any]:
        """The contents of a model file of now."""
        state = self.state
        # A model file says how good it is, so that another stage, or another run, can compare itself with it.
        summary: dict[str, Any] = {
            "epoch": state.epoch,
            "step": state.step,
            "best_eer_percent": state.best_eer_percent,
        }
        summary |= {"stage": self.stage.name} if self.stage.name else {}
        # Licence and training data of the weights that it was made from hold for it too.
        summary |= {"initial_model": dict(self.stage.given)} if self.stage.given is not None else {}
        return self._model_contents(summary)

    def training(self) -> dict[str, Any]:
        """The `training` entry of last.pt: tensors and plain values only."""
        return {
            "state": self.state.to_dict(),
            **{name: module.state_dict() for name, module in self.modules.items()},
            **{name: part.state_dict() for name, part in self.parts.items()},
            "loader": self.loader.state_dict(),
            "random": capture_random_state(),
            **self.origin,
        }

    def restore(self, contents: Mapping[str, Any], source: object) -> Mapping[str, Any]:
        """Give every part the state that `training` took, all but the loader's; returns the saved entry.

        Raises:
            CheckpointError: no training state, or that of another model, loss, optimizer or number of speakers.
        """
        saved = contents.get("training")
        if not isinstance(saved, dict) or "state" not in saved:
            raise CheckpointError(f"{source} holds a model but no training state; use it as --initial_model instead")
        try:
            for name, module in self.modules.items():
                module.load_state_dict(saved[name])
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = misfit(saved, self.origin, self.modules, error)
            raise CheckpointError(
                f"{source} is of another model, loss, optimizer or number of speakers: {why}. Set that back to go on, "
                "choose another --save_path, or remove the folder to start anew"
            ) from error
        with reading(source, "the training state of this program; choose another --save_path", CheckpointError):
            self.state.load_dict(saved["state"])
            # Last: loading may draw, and what was drawn after the save must be drawn again.
            restore_random_state(saved["random"])
        return saved
