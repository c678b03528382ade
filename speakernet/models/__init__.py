"""Trunks, poolings, the network around them, and the file a trained one is kept in."""

from speakernet.models.speaker_net import SpeakerNet
from speakernet.models.tables import FAMILIES, MODELS, POOLINGS

__all__ = ["FAMILIES", "MODELS", "POOLINGS", "SpeakerNet"]
