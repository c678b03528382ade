"""Trunks, poolings, the network around them, and the file a trained one is kept in."""

from speakernet.models.options import FAMILIES, MODELS, POOLINGS, ModelOptions

__all__ = ["FAMILIES", "MODELS", "POOLINGS", "ModelOptions"]
