"""Estimated GPU memory of each stage of a recipe with a pretrained backbone, computed on a CPU, not
measured on a GPU.

Weights, gradients and moments follow from the number of parameters. Activations are extrapolated,
to all layers and to the batch, from what two and three layers of the backbone save for the backward
pass with two and four utterances (layers after the first are alike). Not included: workspace of
kernels, the CUDA context, fragmentation and validation.

    python -m benchmarks.stage_memory voxceleb/w2v_bert.yaml --speakers 5994
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from speakernet.config import Config, load_config
from speakernet.config.schema import replaced, stages_of
from speakernet.data.audio import crop_samples
from speakernet.models.speaker_net import SpeakerNet
from speakernet.training.compiling import activation_bytes

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
BACKBONES: dict[str, dict[str, Any]] = {
    "facebook/w2v-bert-2.0": {"model_type": "wav2vec2-bert", **LARGE},
    "microsoft/wavlm-large": {
        **{"model_type": "wavlm", "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        **LARGE,
    },
    "microsoft/wavlm-base-plus": {"model_type": "wavlm", "num_hidden_layers": 12},
}
"""The sizes in their published config.json; the rest are transformers' defaults."""
MOMENTS = {"sgd": 1}
"""Moments per trained weight, by optimizer; 2 for optimizers that are not listed."""


class Count(NamedTuple):
    """Parameters and activation memory of a network."""

    parameters: float
    trained: float
    kept_once: float
    """Bytes saved for the backward pass independent of the number of utterances: weights in 16
    bits."""
    kept_each: float
    """Bytes saved per utterance."""


def count(
    config: Config, backbone: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Count:
    """The network of a stage with a backbone, extrapolated from two networks with few layers."""
    few, more = (
        _count_small(config, {**backbone, "num_hidden_layers": layers}, dtype) for layers in (2, 3)
    )
    layers = backbone["num_hidden_layers"] - 2
    return Count(*[one + layers * (other - one) for one, other in zip(few, more, strict=True)])


def _count_small(config: Config, backbone: Mapping[str, Any], dtype: torch.dtype) -> Count:
    options = config.model.options.model_copy(update={"config": dict(backbone)})
    net = SpeakerNet(
        config.model.model_copy(update={"options": options}),
        config.frontend,
        config.data.sample_rate,
    )
    net.trunk.tune(options, net)
    parameters = sum(one.numel() for one in net.parameters())
    trained = sum(one.numel() for one in net.parameters() if one.requires_grad)
    samples = crop_samples(config.data.crop_frames, config.data.sample_rate)
    two, four = (activation_bytes(net, samples, dtype, utterances) for utterances in (2, 4))
    return Count(parameters, trained, 2 * two - four, (four - two) / 2)


def rows_of(config: Config, backbone: Mapping[str, Any], speakers: int) -> list[list[str]]:
    """A table row for each stage: millions of parameters, then GiB."""
    found = []
    first = next(iter(stages_of(config).values()))
    voices = len(first.augment.speed_factors) * len(first.augment.warp_factors)
    head = speakers * voices * config.model.embedding_dim * getattr(config.loss, "sub_centers", 1)
    for name, stage in stages_of(config).items():
        counted = count(stage, backbone)
        moments = MOMENTS.get(stage.optimizer.name, 2)
        moved = counted.trained + head
        batch_size = stage.data.batch_size
        gib = [
            4 * (counted.parameters + head) + 4 * (1 + moments) * moved,
            counted.kept_once,
            counted.kept_each,
            batch_size * counted.kept_each,
        ]
        gib.append(gib[0] + gib[1] + gib[3])
        numbers = [counted.parameters / 1e6, counted.trained / 1e6, head / 1e6]
        row = (
            [f"{one:.1f}" for one in numbers]
            + [str(batch_size)]
            + [f"{one / 2**30:.2f}" for one in gib]
        )
        found.append([name, f"{stage.data.crop_frames / 100:g} s", *row])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--speakers", type=int, default=5994)
    given = parser.parse_args(arguments)
    config = load_config(["--config", given.recipe]).config
    backbone = BACKBONES[getattr(config.model.options, "backbone", "")]
    # Built from its sizes, without weights.
    config = replaced(
        config, model={"options": {**config.model.options.model_dump(), "config": backbone}}
    )
    header = ["stage", "crops", "parameters, millions", "trained", "head", "batch"]
    header += [
        "weights, gradients, moments: GiB",
        "16-bit weights",
        "per utterance",
        "batch",
        "total on one GPU",
    ]
    for row in [header, ["---"] * len(header), *rows_of(config, backbone, given.speakers)]:
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
