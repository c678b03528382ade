"""The smallest size of every family, reduced further if an option allows it: networks fast enough
for tests.
"""

import torch
import yaml

from speakernet.checkpoint import write_checkpoint
from speakernet.models.model_file import model_file_contents
from speakernet.models.options import FAMILIES, MODELS
from speakernet.models.speaker_net import SpeakerNet

SMALLEST = [next(iter(sizes)) for sizes in FAMILIES.values()]
SMALL = yaml.safe_load("""
ResNet: {channels: 8, blocks: [1, 1, 1]}
RawNet3: {channels: 256}
XVector: {channels: 64, statistics_channels: 96}
ECAPA_TDNN: {channels: 64, aggregate_channels: 96}
ResNet18: {channels: 16}
SimAM_ResNet34: {channels: 16}
Res2Net34: {channels: 16}
ERes2NetBase: {channels: 16}
ERes2NetV2: {channels: 16}
Pretrained:
  config:
    model_type: wavlm
    # Heads have 64 dimensions, as in published backbones: bf16 kernels of some processors fail with
    # 8.
    hidden_size: 128
    num_hidden_layers: 2
    num_attention_heads: 2
    intermediate_size: 64
    conv_dim: [16, 16, 16]
    conv_stride: [5, 8, 8]
    conv_kernel: [10, 8, 8]
    num_feat_extract_layers: 3
    num_conv_pos_embeddings: 8
    num_conv_pos_embedding_groups: 2
""")
MELS = {"VGGVox": 40, "ReDimNetB0": 72, "ReDimNet2B0": 72}


def small_network(
    name,
    pooling="auto",
    *,
    model_options=None,
    front_end=None,
    **front_end_options,
):
    """A network with 32-dimensional embeddings and the same random weights each time."""
    torch.manual_seed(0)
    is_raw = MODELS[name].options.front_end_defaults["name"] == "raw"
    mels = {} if is_raw else {"num_mels": MELS.get(name, 40)}
    return SpeakerNet.named(
        name,
        pooling,
        embedding_dim=32,
        model_options=model_options or SMALL.get(name),
        front_end=front_end,
        front_end_options={**mels, **front_end_options},
    )


def tiny_resnet(embedding_dim=8, pooling="auto", front_end=None, **front_end_options):
    """A ResNet of two blocks in evaluation mode, with the same random weights each time."""
    torch.manual_seed(0)
    sizes = {"channels": 8, "blocks": [1, 1]}
    return SpeakerNet.named(
        "ResNet", pooling, embedding_dim, sizes, front_end, front_end_options
    ).eval()


def write_model(path, net, **entries):
    """Write a model file of a network with further entries; returns its path."""
    write_checkpoint(path, model_file_contents(net, loss_normalizes=True) | entries)
    return path


def scoring(weight, offset, backend, **thresholds):
    """The entries of a model file that is calibrated by score, with thresholds by name."""
    fit = {"inputs": ["score"], "weights": [weight], "offset": offset, "prior": 0.5}
    limits = [
        {"name": name, "threshold": threshold, "backend": backend}
        for name, threshold in thresholds.items()
    ]
    return {"calibration": {"fits": [fit | {"backend": backend}]}, "thresholds": limits}
