"""Losses by name; a loss is imported only when it is built."""

from speakernet.losses.options import LOSSES, LossOptions

__all__ = ["LOSSES", "LossOptions"]
