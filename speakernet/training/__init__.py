"""The training loop and its parts: what moves the weights, in which precision, and what survives a kill."""

from speakernet.training.options import OPTIMIZERS
from speakernet.training.options.schedules import SCHEDULES

__all__ = ["OPTIMIZERS", "SCHEDULES"]
