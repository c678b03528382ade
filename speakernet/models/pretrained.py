"""A large pretrained speech model as a trunk that outputs the states of all its layers, and its
fine-tuning.

transformers provides the architecture, `backbones` the weights. Rows of different lengths run one
by one: several backbones normalise over time, so padding would change their output. `tune` selects
what a stage trains: before it and after `merge` the network has plain weights, so model files
depend neither on peft nor on what a stage froze.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from speakernet.checkpoint import CheckpointError
from speakernet.files import reading
from speakernet.frontend.features import Lengths
from speakernet.frontend.kaldi import KaldiFbank
from speakernet.frontend.options import KaldiFbankOptions
from speakernet.models.backbones import (
    BACKBONE_PREFIX,
    CONFIG,
    OPTION,
    PLAIN,
    SAMPLE_RATE_KEY,
    Backbone,
    checksum,
    complete,
    find_backbone,
    merge_adapters,
    refuse_other_files,
    refuse_other_weights,
)
from speakernet.models.layers import Trunk, check_frames
from speakernet.models.options.pretrained import PretrainedOptions
from speakernet.options import Component
from speakernet.terminal import counted

logger = logging.getLogger(__name__)

FAMILIES = ("wav2vec2", "hubert", "wavlm", "data2vec-audio", "wav2vec2-bert")
# Always off: features are masked by our front end, a dropped layer has no state, and adapters
# change the frames.
FIXED = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "add_adapter": False,
    "num_labels": 2,
}
# What reading the backbone adds to the options.
READ_OPTIONS = ("config", "source", "normalize")
BERT = "wav2vec2-bert"
# peft is needed only while adapters are trained.
LORA = Component(PretrainedOptions, "speakernet.models.lora:add_adapters")
LORA_LAYERS = Component(PretrainedOptions, "speakernet.models.lora:layers_to_adapt")
VARIANCE_FLOOR = 1e-7
RATE = 16_000

_states: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("states of the layers")


class Pretrained(Trunk):
    """A transformers backbone; outputs the input of its first layer and the output of each layer,
    (batch, layers, …).

    The norm after the last layer of large models is left out, as in the layer results of fairseq
    and BUT.
    """

    complete = staticmethod(complete)
    is_pretrained = True
    options: PretrainedOptions

    def __init__(self, options: PretrainedOptions, sample_rate: int) -> None:
        super().__init__()
        for option, problem in options.problems():
            raise ValueError(f"model.options.{option}: {problem}")
        # A network built from a model file has the configuration in its options, and gets its
        # weights from that file.
        backbone = None
        if not options.config:
            backbone = find_backbone(options)
            options = _complete_options(options, backbone, sample_rate)
        self.options = options
        kind = options.config.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(
                f"{OPTION}: {options.backbone} has model_type {kind}; expected one of "
                f"{', '.join(FAMILIES)}"
            )
        with reading(
            f"{OPTION}: {options.backbone}, {CONFIG}",
            "a configuration of transformers",
            CheckpointError,
        ):
            config = transformers.AutoConfig.for_model(**{**options.config, **FIXED})
            # Not `from_pretrained`: on the meta device it would require weights.
            self.backbone = transformers.AutoModel.from_config(config, dtype=torch.float32)
        self.is_bert = kind == BERT
        if self.is_bert:
            bands = config.feature_projection_input_dim // 2
            self.fbank = KaldiFbank(
                KaldiFbankOptions(num_mels=bands, window="povey", normalize="none"), sample_rate
            )
        self.out_channels = config.hidden_size
        self.num_states = config.num_hidden_layers + 1
        self.min_frames = self._fewest_samples(config)
        layers = self.backbone.encoder.layers
        layers[0].register_forward_pre_hook(_note_input)
        for layer in layers:
            layer.register_forward_hook(_note_output)
        # CRC-32 of each tensor as loaded: last.pt omits tensors that still match.
        self.checksums: dict[str, int] = {}
        if backbone is not None:
            self._load(backbone.weights, backbone.source)
        self.backbone.requires_grad_(False)
        self.fixed: dict[str, int] = {}

    def forward(self, features: Tensor, lengths: Lengths = None) -> tuple[Tensor, Lengths]:
        """(batch, 1, samples) to (batch, layers, channels, frames), and the valid frames of
        each.
        """
        # The last layer of such a model is about words; what it knows about the speaker is spread
        # over the layers below. So all of them are handed to the pooling, which learns which ones
        # to listen to.
        check_frames(features, lengths, self.min_frames, "Pretrained", "samples")
        waveforms = features.squeeze(1)  # (batch, samples)
        if lengths is None:
            return self._run(waveforms), None
        rows = []
        for waveform, length in zip(waveforms, lengths.tolist(), strict=True):
            states = self._run(waveform[None, :length])
            rows.append(states[0])  # (layers, channels, frames)
        num_frames = [row.shape[-1] for row in rows]
        longest = max(num_frames)
        padded = [functional.pad(row, (0, longest - row.shape[-1])) for row in rows]
        return torch.stack(padded), torch.tensor(num_frames, device=features.device)

    def _run(self, waveforms: Tensor) -> Tensor:
        """(batch, samples) to (batch, layers, channels, frames)."""
        with torch.autocast(waveforms.device.type, enabled=False):
            inputs = self._features(waveforms.float())
        # Hooks on the layers append their states, because transformers' own list contains the norm
        # after the last layer.
        states: list[Tensor] = []  # (batch, frames, channels) each
        token = _states.set(states)
        try:
            self.backbone(inputs)
        finally:
            _states.reset(token)
        stacked = torch.stack(states, dim=1).transpose(2, 3)  # (batch, layers, channels, frames)
        factor = self.options.gradient_factor
        if factor != 1.0 and stacked.requires_grad:
            stacked.register_hook(functools.partial(torch.mul, other=torch.tensor(factor)))
        return stacked

    def _features(self, waveforms: Tensor) -> Tensor:
        """The backbone's input: samples, normalised if needed, or pairs of normalised frames of 80
        bands.
        """
        if not self.is_bert:
            if self.options.normalize != "on":
                return waveforms
            variance, mean = torch.var_mean(waveforms, dim=1, keepdim=True, correction=0)
            return (waveforms - mean) / (variance + VARIANCE_FLOOR).sqrt()
        bands = self.fbank(waveforms).transpose(1, 2)  # (batch, frames, bands)
        variance, mean = torch.var_mean(bands, dim=1, keepdim=True)
        bands = (bands - mean) / (variance + VARIANCE_FLOOR).sqrt()
        # Drop an odd last frame.
        bands = bands[:, : bands.shape[1] // 2 * 2]
        return bands.reshape(bands.shape[0], -1, 2 * bands.shape[2])  # (batch, pairs, 2 bands)

    def _fewest_samples(self, config: Any) -> int:
        """The minimum number of samples that gives one frame of the backbone."""
        if self.is_bert:
            return self.fbank.window_samples + self.fbank.hop_samples
        # From one frame of the last convolution back to the samples that it sees.
        samples = 1
        layers = zip(config.conv_kernel, config.conv_stride, strict=True)
        for kernel, stride in reversed(list(layers)):
            samples = (samples - 1) * stride + kernel
        return int(samples)

    def _load(self, weights: Mapping[str, Tensor], source: Mapping[str, Any]) -> None:
        """Load the weights, all or none."""
        expected = self.backbone.state_dict()
        problems = [f"missing {name}" for name in expected if name not in weights]
        for name, value in weights.items():
            if name in expected and value.shape != expected[name].shape:
                shape = tuple(expected[name].shape)
                problems.append(f"{name} of shape {tuple(value.shape)}, expected {shape}")
        if problems:
            raise CheckpointError(
                f"{OPTION}: {source['name']} does not fit its configuration: {problems[0]}"
            )
        # A file with more layers than its configuration says would load without a word.
        if unused := sorted(weights.keys() - expected.keys()):
            tensors = counted(len(unused), "tensor")
            logger.warning(
                "%s: %s of %s not used, first: %s", OPTION, tensors, source["name"], unused[0]
            )
        self.backbone.load_state_dict({name: weights[name].float() for name in expected})
        for name, value in self.backbone.state_dict().items():
            self.checksums[name] = checksum(value)

    def refuse_impossible(self, options: PretrainedOptions) -> None:
        """ValueError if a stage's options name layers that the backbone lacks or that cannot have
        adapters.
        """
        if options.trained_layers >= self.num_states:
            raise ValueError(
                f"model.options.trained_layers: {options.trained_layers}, but this backbone has "
                f"{counted(self.num_states - 1, 'layer')}; 0 trains all layers and everything below"
            )
        if options.trained == "lora":
            LORA_LAYERS.load()(self.backbone, options)

    def tune(self, options: PretrainedOptions, net: nn.Module) -> "FixedOutside":
        """Prepare a stage's training, after merging the adapters of an earlier stage.

        Returns the object with the network's state for last.pt.
        """
        self.merge()
        read = {name: getattr(self.options, name) for name in READ_OPTIONS}
        self.options = options.model_copy(update=read)
        self.backbone.requires_grad_(False)
        if options.trained == "lora":
            LORA.load()(self.backbone, options)
        # As in the last epoch: what is frozen then is frozen throughout.
        self.begin_epoch(10**9)
        num_trained = 0
        num_frozen = 0
        self.fixed = {}
        for name, parameter in self.backbone.named_parameters():
            if parameter.requires_grad:
                num_trained += parameter.numel()
                continue
            num_frozen += parameter.numel()
            digest = checksum(parameter)
            if digest == self.checksums.get(name.replace(*PLAIN)):
                self.fixed[name] = digest
        logger.info(
            "backbone, model.options.trained: %s: %s parameters trained, %s frozen",
            options.trained,
            f"{num_trained:,}",
            f"{num_frozen:,}",
        )
        return FixedOutside(net, self)

    @property
    def refers_to_files(self) -> bool:  # type: ignore[override]
        """As set by `reference`."""
        return self.options.reference

    @property
    def scale(self) -> float:
        """Factor on the product of the adapters' matrices; 1 without adapters."""
        if not self.options.has_adapters:
            return 1.0
        return self.options.lora_alpha / self.options.lora_rank

    def begin_epoch(self, epoch: int) -> None:
        """Set what is trained in this epoch (from 0), for gradual unfreezing."""
        options = self.options
        layers = self.backbone.encoder.layers
        if options.trained != "all":
            return
        count = options.trained_layers or len(layers) + 1
        if options.unfreeze_epochs:
            count = min(count, epoch // options.unfreeze_epochs)
        self.backbone.requires_grad_(count > len(layers))
        for layer in layers[max(0, len(layers) - count) :]:
            layer.requires_grad_(count > 0)
        # The output of the norm after the last layer is not used.
        unused = getattr(self.backbone.encoder, "layer_norm", None)
        if unused is not None and getattr(self.backbone.config, "do_stable_layer_norm", False):
            unused.requires_grad_(False)

    def learning_rate_factors(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Each parameter with its factor, `layer_decay` to the power of its depth, which is 1 in
        the top layer.
        """
        layers = self.backbone.encoder.layers
        decay = self.options.layer_decay
        depth = {}
        for number, layer in enumerate(layers):
            for parameter in layer.parameters():
                depth[id(parameter)] = len(layers) - number
        for parameter in self.backbone.parameters():
            yield parameter, decay ** depth.get(id(parameter), len(layers) + 1)

    def train(self, mode: bool = True) -> "Pretrained":
        """Set training mode; in a backbone with frozen weights only the adapters use dropout."""
        super().train(mode)
        if self.options.trained != "all":
            self.backbone.eval()
            for name, module in self.backbone.named_modules():
                if ".lora_dropout" in name:
                    module.train(mode)
        return self

    def merge(self) -> None:
        """Merge adapters into their base weights."""
        for name, module in list(self.backbone.named_modules()):
            # peft's layers have no base class that could be named without loading peft.
            if hasattr(module, "lora_A"):
                module.merge()
                self.backbone.set_submodule(name, module.get_base_layer())

    def plain_weights(
        self, weights: Mapping[str, Tensor], *, without_fixed: bool
    ) -> dict[str, Tensor]:
        """A state dictionary of the network with adapters merged; if weights are left out,
        `complete` merges them.
        """
        omitted = self.fixed if without_fixed else {}
        plain = {}
        for name, value in weights.items():
            if name.removeprefix(BACKBONE_PREFIX) not in omitted:
                plain[name.replace(*PLAIN)] = value * self.scale if ".lora_B." in name else value
        return plain if omitted else merge_adapters(plain)


def _complete_options(
    options: PretrainedOptions, backbone: Backbone, sample_rate: int
) -> PretrainedOptions:
    """The options with what the backbone's files say; ValueError for a different sample rate."""
    rate = backbone.preprocessor.get(SAMPLE_RATE_KEY, RATE)
    if rate != sample_rate:
        raise ValueError(
            f"{OPTION}: {options.backbone} was trained at {rate} Hz, but data.sample_rate "
            f"is {sample_rate}; set data.sample_rate: {rate}"
        )
    normalize = options.normalize
    if normalize == "auto":
        normalize = "on" if backbone.preprocessor.get("do_normalize", True) else "off"
    values = (backbone.config, backbone.source, normalize)
    return options.model_copy(update=dict(zip(READ_OPTIONS, values, strict=True)))


class FixedOutside:
    """The network's state for last.pt, without weights that are unchanged from the backbone's
    files.
    """

    def __init__(self, net: nn.Module, trunk: Pretrained) -> None:
        self.net = net
        self.trunk = trunk

    def state_dict(self) -> dict[str, Any]:
        """The other tensors, facts about the backbone's files, and checksums of the omitted
        weights.
        """
        state = self.net.state_dict()
        for name in self.trunk.fixed:
            state.pop(BACKBONE_PREFIX + name, None)
        return {
            **state,
            "source": dict(self.trunk.options.source),
            "fixed": dict(self.trunk.fixed),
            "scale": self.trunk.scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors; the rest must have been read from the same files."""
        source = state.get("source", {})
        fixed = state.get("fixed", {})
        scale = state.get("scale", self.trunk.scale)
        if fixed:
            refuse_other_files(source, self.trunk.options.source, "this run")
            refuse_other_weights(fixed, self.trunk.checksums, "this run")
        elif source:
            # Every weight is in the checkpoint, whatever files were read now. In place: the
            # network's spec shares it.
            self.trunk.options.source.clear()
            self.trunk.options.source.update(source)
        weights = dict(state)
        for entry in ("source", "fixed", "scale"):
            weights.pop(entry, None)
        missing, unknown = self.net.load_state_dict(weights, strict=False)
        if unknown or {name.removeprefix(BACKBONE_PREFIX) for name in missing} - fixed.keys():
            raise ValueError(
                f"{[*unknown, *missing][0]} is in the network or in the checkpoint, but not in both"
            )
        if scale != self.trunk.scale:
            raise CheckpointError(
                f"model.options.lora_alpha: adapters are scaled by {self.trunk.scale:g} "
                f"(lora_alpha / lora_rank), but this run trained them at {scale:g}; change it "
                "back, or choose a different --save_path"
            )
        # A tensor in the checkpoint no longer equals the one that was read from the files.
        for name in self.trunk.fixed.keys() - fixed.keys():
            del self.trunk.fixed[name]


def _note_input(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    # Nobody collects states if the backbone is called from elsewhere.
    with contextlib.suppress(LookupError):
        _states.get().append(inputs[0])


def _note_output(_layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
    with contextlib.suppress(LookupError):
        _states.get().append(output[0] if isinstance(output, tuple) else output)
