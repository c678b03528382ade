"""Trunks, poolings, the network built from them, and the model file."""

from speakernet.models.options import FAMILIES, MODELS, POOLINGS, ModelOptions

__all__ = ["FAMILIES", "MODELS", "POOLINGS", "ModelOptions"]
