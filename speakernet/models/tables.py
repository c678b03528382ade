"""The tables of trunks and poolings by name; `speakernet.models` shows them to the other rooms."""

from typing import Any

from speakernet.models.pooling import (
    AttentiveStatisticsPooling,
    ChannelAttentivePooling,
    ChannelSelfAttentivePooling,
    ContextAttentivePooling,
    ContextFramePooling,
    MaxPooling,
    MeanPooling,
    Pooling,
    SelfAttentivePooling,
    StatisticsPooling,
)
from speakernet.models.rawnet3 import RawNet3
from speakernet.models.resnet import ResNet
from speakernet.models.resnet_se import ResNetSE34L, ResNetSE34V2
from speakernet.models.vggvox import VGGVox

# Any: the classes share class attributes (front_end_defaults, …) that no common base declares.
MODELS: dict[str, Any] = {
    "ResNetSE34L": ResNetSE34L,
    "ResNetSE34V2": ResNetSE34V2,
    "ResNet": ResNet,
    "VGGVox": VGGVox,
    "RawNet3": RawNet3,
}

POOLINGS: dict[str, type[Pooling]] = {
    "TAP": MeanPooling,
    "MAX": MaxPooling,
    "TSTP": StatisticsPooling,
    "SAP": SelfAttentivePooling,
    "ASP": AttentiveStatisticsPooling,
    "ChannelSAP": ChannelSelfAttentivePooling,
    "ChannelASP": ChannelAttentivePooling,
    "ECA": ContextAttentivePooling,
    "ContextASP": ContextFramePooling,
}
