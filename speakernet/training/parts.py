"""What a trainer is built of, in three groups: what is trained, what drives it, and what it keeps and tells."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from speakernet.training.averaging import WeightAverage
from speakernet.training.compiling import Compiler, NoCompiler
from speakernet.training.freezing import Freezing
from speakernet.training.interfaces import Loader
from speakernet.training.progress import Progress
from speakernet.training.schedules import LearningRateSchedule, MarginSchedule
from speakernet.training.step import TrainingStep
from speakernet.training.store import CheckpointStore
from speakernet.training.threads import ThreadWatch
from speakernet.training.tracker import PerformanceTracker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """What is trained, and what computes it."""

    step: TrainingStep
    """Network, loss and optimizer, their precision, and the profiler."""
    freezing: Freezing
    """What of the network stays as it was given, and for how long."""
    average: WeightAverage
    compiler: Compiler | NoCompiler
    threads: ThreadWatch
    """Fewer threads where other work keeps the cores busy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """What drives the training."""

    loader: Loader
    validate: Callable[[], Mapping[str, Any]]
    """Evaluates the network as it is then; `eer_percent` of what it returns chooses the best model."""
    learning_rate: LearningRateSchedule
    margin: MarginSchedule | None
    """None for a loss without a margin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """What a run keeps and tells."""

    store: CheckpointStore
    model_contents: Callable[[dict[str, Any]], dict[str, Any]]
    """From a summary of the training to the contents of a model file."""
    origin: Mapping[str, Any]
    """Where a checkpoint comes from (options, versions, lists): kept in it, and compared by a run that goes on."""
    progress: Progress
    tracker: PerformanceTracker
    on_start: Callable[[], None]
    """Called on the main process once the run folder is held, the last checkpoint loaded, and something left to do."""
    advise: Callable[[float], str]
    """From the share of time spent waiting for data to what would help; empty where nothing is wrong."""
