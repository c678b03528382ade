"""Adds low-rank adapters to a pretrained backbone, using peft. `speakernet.models.pretrained`
merges them.

Source: Hu et al. 2021, "LoRA: Low-rank adaptation of large language models", equation 3.
"""

import peft
from torch import nn

from speakernet.models.options.pretrained import PretrainedOptions

# The linear layers that `lora_targets: auto` adapts, by the backbone's model_type.
TARGETS = {
    "wav2vec2-bert": ["linear_q", "linear_v"],
    "wavlm": ["intermediate_dense", "output_dense"],
}
DEFAULT_TARGETS = ["q_proj", "v_proj"]
# WavLM passes its attention weights directly to torch, bypassing the layers that adapters would
# replace.
WAVLM_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


def add_adapters(backbone: nn.Module, options: PretrainedOptions) -> None:
    """Add adapters to the requested linear layers, in place."""
    names = "|".join(layers_to_adapt(backbone, options))
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        target_modules=rf"encoder\..*\.({names})",
        lora_dropout=options.lora_dropout,
    )
    peft.inject_adapter_in_model(config, backbone)


def layers_to_adapt(backbone: nn.Module, options: PretrainedOptions) -> list[str]:
    """The last parts of the names of the requested linear layers; ValueError if one matches no
    layer.
    """
    kind = str(backbone.config.model_type)  # type: ignore[union-attr]
    targets = list(options.lora_targets)
    if targets == ["auto"]:
        targets = TARGETS.get(kind, DEFAULT_TARGETS)
    supported = set()
    for name, module in backbone.encoder.named_modules():  # type: ignore[union-attr]
        is_bypassed = kind == "wavlm" and name.endswith(WAVLM_ATTENTION)
        if isinstance(module, nn.Linear) and not is_bypassed:
            supported.add(name.rpartition(".")[2])
    if unknown := [name for name in targets if name not in supported]:
        raise ValueError(
            f"model.options.lora_targets: {unknown[0]} matches no linear layer of this {kind} that "
            f"supports adapters; expected {', '.join(sorted(supported))}"
        )
    return targets
