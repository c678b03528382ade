"""Losses by name; the losses themselves are imported when one is built."""

from speakernet.losses.options import LOSSES, LossOptions

__all__ = ["LOSSES", "LossOptions"]
