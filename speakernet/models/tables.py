"""The tables of trunks and poolings by name; `speakernet.models` shows them to the other rooms."""

from speakernet.models.campplus import CAMPPlus
from speakernet.models.ecapa import ECAPAS
from speakernet.models.eres2net import ERES2NETS, ERES2NETV2S
from speakernet.models.gemini import GEMINIS
from speakernet.models.pooling import (
    AttentiveStatisticsPooling,
    ChannelAttentivePooling,
    ChannelSelfAttentivePooling,
    ContextAttentivePooling,
    ContextFramePooling,
    GlobalAttentivePooling,
    MaxPooling,
    MeanPooling,
    MultiQueryPooling,
    NormedAttentivePooling,
    Pooling,
    SelfAttentivePooling,
    StatisticsPooling,
    TanhAttentivePooling,
)
from speakernet.models.rawnet3 import RawNet3
from speakernet.models.redimnet import REDIMNETS
from speakernet.models.redimnet2 import REDIMNET2S
from speakernet.models.res2net import Res2Net
from speakernet.models.resnet import RESNETS, ResNet
from speakernet.models.resnet_se import ResNetSE34L, ResNetSE34V2
from speakernet.models.simam_resnet import SIMAM_RESNETS
from speakernet.models.trunk import Trunk
from speakernet.models.vggvox import VGGVox
from speakernet.models.xvector import XVector

FAMILIES: dict[str, dict[str, type[Trunk]]] = {
    "ResNetSE34L": {"ResNetSE34L": ResNetSE34L},
    "ResNetSE34V2": {"ResNetSE34V2": ResNetSE34V2},
    "ResNet": {"ResNet": ResNet},
    "VGGVox": {"VGGVox": VGGVox},
    "RawNet3": {"RawNet3": RawNet3},
    "x-vector": {"XVector": XVector},
    "ECAPA-TDNN": ECAPAS,
    "ResNet of published depth": RESNETS,
    "SimAM-ResNet": SIMAM_RESNETS,
    "Gemini DF-ResNet": GEMINIS,
    "Res2Net": {"Res2Net34": Res2Net},
    "CAM++": {"CAMPPlus": CAMPPlus},
    "ERes2Net": ERES2NETS,
    "ERes2NetV2": ERES2NETV2S,
    "ReDimNet": REDIMNETS,
    "ReDimNet2": REDIMNET2S,
}
"""Sizes of each family by name, smallest first."""

MODELS: dict[str, type[Trunk]] = {name: size for sizes in FAMILIES.values() for name, size in sizes.items()}

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
    "ASTP": TanhAttentivePooling,
    "GlobalASTP": GlobalAttentivePooling,
    "NormASTP": NormedAttentivePooling,
    "MQMHASTP": MultiQueryPooling,
}
