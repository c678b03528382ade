"""Trunks, poolings, the network around them, and the file a trained one is kept in."""

from speakernet.models.options import MODELS, POOLINGS, ModelOptions

__all__ = ["MODELS", "POOLINGS", "ModelOptions"]
