"""The training loop and its parts: what moves the weights, in which precision, and what survives a kill."""

from speakernet.training.optimizers import OPTIMIZERS
from speakernet.training.schedules import SCHEDULES

__all__ = ["OPTIMIZERS", "SCHEDULES"]
