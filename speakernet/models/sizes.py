"""How large a model is: parameters and multiplications, counted on a network without weights."""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from speakernet.models.speaker_net import SpeakerNet
from speakernet.models.tables import MODELS
from speakernet.registry import lookup

SECONDS = 2.0
FRAMES = 200
SAMPLE_RATE = 16000


@dataclass(frozen=True)
class ModelSize:
    """A model in its published form."""

    parameters: int
    macs: int
    """Multiplications with an addition from the features of 2 seconds (200 frames) to the embedding."""
    embedding_dim: int
    num_mels: int
    """0 where it hears samples."""
    paper: str


def size_of(name: str) -> ModelSize:
    """What the model of that name amounts to with its own pooling, embedding size and mel bands.

    Raises:
        ValueError: an unknown name.
    """
    lookup(MODELS, name, "model")
    trunk = MODELS[name]
    is_raw = trunk.published_mels == 0
    options = {} if is_raw else {"num_mels": trunk.published_mels}
    # What the front end computes is not counted, so any that gives as many bands will do.
    front_end = "raw" if is_raw else "fbank"
    with torch.device("meta"):
        net = SpeakerNet(name, "auto", trunk.published_dim, front_end=front_end, front_end_options=options).eval()
        features = (
            torch.empty(1, 1, round(SECONDS * SAMPLE_RATE)) if is_raw else torch.empty(1, trunk.published_mels, FRAMES)
        )
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            net.from_features(features)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return ModelSize(parameters, counter.get_total_flops() // 2, trunk.published_dim, trunk.published_mels, trunk.paper)
