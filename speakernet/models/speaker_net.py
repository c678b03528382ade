"""SpeakerNet: front end, trunk, pooling and embedding layer in one module, the only way from audio
to embedding.

Training, evaluation, export and verification all use it. It describes itself in plain values
(`spec`), from which `from_spec` rebuilds it. Networks that are no longer trained can have their
batch norms merged (`fold_network`).
"""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from speakernet.checkpoint import CheckpointError
from speakernet.frontend.features import Lengths
from speakernet.frontend.options import FEATURES, FrontendOptions, SpecAugmentOptions
from speakernet.frontend.perturbation import SpecAugment
from speakernet.models.layers import (
    ChannelFloor,
    Foldable,
    is_safe_in_channels_last,
    make_embedding,
    mask_frames,
)
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import (
    PLUGIN_MODULES,
    SAMPLE_RATE,
    create,
    lookup,
    options_of,
    plugin_digests,
)
from speakernet.random import derive_seed

Net = TypeVar("Net", bound=nn.Module)
Layer = nn.Conv1d | nn.Conv2d | nn.Linear
SPEC_AUGMENT_PREFIX = "spec_augment."
COUNTER_SUFFIX = ".num_batches_tracked"
MAX_NAMES_SHOWN = 10
SHORTEST_LENGTH = 1e-12
"""Of an embedding that an adaptation normalises."""
# Keys, in addition to the run's seed, of the random streams of the network's components.
SPEC_AUGMENT_STREAM = 101
DITHER_STREAM = 102
# Options of front ends added after the first release. A spec omits them at these defaults, so that
# fingerprints in existing stores stay valid.
LATER_OPTIONS = {"energy_floor_db": 0.0, "style": "kaldi"}
PREPARATIONS = ("speech", "repeat_seconds")
"""The entries of an adaptation that say what is done to a recording before it is embedded."""


class SpeakerNet(nn.Module):
    """A speaker-embedding network.

    Args:
        model: trunk, pooling and embedding size. A trunk may redefine a common pooling name (`SAP`
            of ResNetSE34V2 is `ChannelSAP`).
        frontend: the features; `auto` follows the trunk's definition. SpecAugment is only active in
            training and is not part of the spec.
        sample_rate: sample rate of the waveforms, in Hz.
        seed: seed of the run, from which dither and SpecAugment derive their draws.
    """

    def __init__(
        self, model: ModelOptions, frontend: FrontendOptions, sample_rate: int, seed: int = 0
    ) -> None:
        super().__init__()
        trunk = model.options
        frontend = _resolve_front_end(model, frontend)
        for kind, options in ((model.name, trunk), (model.pooling, model.pooling_options)):
            for option, problem in options.problems():
                raise ValueError(f"{kind}: {option} is {problem}")
        pooling = trunk.poolings[0] if model.pooling == "auto" else model.pooling
        self._frontend = frontend
        self.sample_rate = sample_rate
        self.embedding_dim = model.embedding_dim
        # Never on the meta device, where arithmetic loads torch's compiler, which takes two
        # seconds.
        with torch.device("cpu"):
            self.front_end = create(
                lookup(FEATURES, frontend.name, "front end"),
                frontend,
                sample_rate=sample_rate,
                seed=derive_seed(seed, DITHER_STREAM),
            )
        self.spec_augment: SpecAugment | None = None
        if isinstance(frontend, SpecAugmentOptions) and frontend.spec_augment:
            self.spec_augment = SpecAugment(frontend, derive_seed(seed, SPEC_AUGMENT_STREAM))
        self.trunk = create(
            lookup(MODELS, model.name, "model"),
            trunk,
            num_features=self.front_end.num_features,
            embedding_dim=model.embedding_dim,
            sample_rate=sample_rate,
        )
        completed = self.trunk.options or trunk
        self._model = model.model_copy(update={"pooling": pooling, "options": completed})
        # With channels innermost 2-D convolutions run up to a quarter faster on CPUs, and even
        # faster on tensor cores.
        if is_safe_in_channels_last(self.trunk):
            self.trunk.to(memory_format=torch.channels_last)
        component = POOLINGS[pooling_of(model.name, pooling)]
        sizes = {"channels": self.trunk.out_channels, "layers": self.trunk.num_states}
        self.pooling = create(component, model.pooling_options, **sizes)
        self.norm: nn.Module = nn.Identity()
        if trunk.has_norm_after_pooling:
            self.norm = nn.BatchNorm1d(self.pooling.dim)
        self.embedding = make_embedding(
            trunk.embedding_layer, self.pooling.dim, model.embedding_dim
        )
        self.adaptation: nn.Module = nn.Identity()
        self.adaptation_spec: dict[str, Any] = {}
        self.preparation: Mapping[str, Any] = {}
        """What is done to a whole recording before it is embedded: `speech` (whole or detected) and
        `repeat_seconds`; part of an adaptation, which only fits recordings that were prepared in
        the same way."""

    @classmethod
    def named(
        cls,
        model: str,
        pooling: str | None = None,
        embedding_dim: int | None = None,
        model_options: Mapping[str, Any] | None = None,
        front_end: str | None = None,
        front_end_options: Mapping[str, Any] | None = None,
        sample_rate: int | None = None,
        pooling_options: Mapping[str, Any] | None = None,
    ) -> "SpeakerNet":
        """A network from the names of its components; the rest follows the model's published
        definition.
        """
        # Whatever is not given stays at the defaults of the model's options, which are published
        # values.
        trunk = options_of(MODELS, model, model_options or {}, "model")
        section: dict[str, Any] = {"name": model, "options": trunk}
        kind = pooling_of(model, pooling or "auto")
        section["pooling_options"] = options_of(POOLINGS, kind, pooling_options or {}, "pooling")
        if pooling is not None:
            section["pooling"] = pooling
        if embedding_dim is not None:
            section["embedding_dim"] = embedding_dim
        features = {"name": front_end or "auto", **(front_end_options or {})}
        published = trunk.front_end_defaults
        if features["name"] in ("auto", published["name"]):
            features = {**published, **features, "name": published["name"]}
        frontend = options_of(FEATURES, features["name"], features, "front end")
        return cls(ModelOptions(**section), frontend, sample_rate or SAMPLE_RATE)

    @property
    def model_name(self) -> str:
        """The name in MODELS."""
        return self._model.name

    def forward(self, waveforms: Tensor, lengths: Lengths = None) -> Tensor:
        """Embeddings of a batch, in float32.

        Args:
            waveforms: (batch, samples) in -1..1.
            lengths: (batch,) samples of each utterance, or None if all rows are full. Each
                embedding equals that of the utterance alone.

        Returns:
            (batch, dim), not normalised.
        """
        # The whole way of a voice: samples become frames of a few dozen mel bands, the trunk turns
        # them into frames that know their surroundings, the pooling reduces all frames to one
        # vector, and a linear layer makes the embedding. Everything up to the pooling keeps time,
        # so rows of different lengths carry their number of valid frames along.
        frame_lengths = None
        if lengths is not None:
            # The front end gets the host's lengths: reading the shortest from a device would
            # synchronise with it.
            on_device = lengths.to(waveforms.device, non_blocking=True)
            frame_lengths = self.front_end.num_frames(on_device)
        features = self.front_end(waveforms, lengths)  # (batch, mels, frames)
        if self.spec_augment is not None:
            features = self.spec_augment(features)
        return self.from_features(features, frame_lengths)

    def from_features(self, features: Tensor, lengths: Lengths = None) -> Tensor:
        """Embeddings of features (batch, mels, frames), (batch, dim) float32, not normalised."""
        features = mask_frames(features, lengths)
        hidden, lengths = self.trunk(features, lengths)  # (batch, channels, frames)
        # Sums over hundreds of frames and the last projection lose too much precision in 16 bits.
        with torch.autocast(features.device.type, enabled=False):
            pooled = self.norm(self.pooling(hidden.float(), lengths))  # (batch, pooled dim)
            return self.adaptation(self.embedding(pooled))  # type: ignore[no-any-return]

    @property
    def min_samples(self) -> int:
        """Samples of the shortest waveform that can be embedded."""
        front_end = self.front_end
        min_frames = self.trunk.min_frames
        # Front ends count frames in different ways, so the shortest length is searched for.
        enough = min_frames * front_end.hop_samples + front_end.window_samples
        frames = front_end.num_frames(torch.arange(enough + 1))
        return max(front_end.min_samples, int((frames >= min_frames).nonzero()[0]))

    def embed(self, waveforms: Tensor, lengths: Lengths = None, *, sample_rate: int) -> Tensor:
        """`forward` in evaluation mode and without gradients; the training mode is restored
        afterwards.

        Args:
            waveforms: (batch, samples) in -1..1, one channel each.
            lengths: (batch,) samples of each utterance. Optional only for a single row: several
                rows without lengths could be the channels of one recording.
            sample_rate: sample rate of the waveforms, in Hz; ValueError if it is not the network's.

        Returns:
            (batch, dim), not normalised.
        """
        if sample_rate != self.sample_rate:
            raise ValueError(
                f"the waveforms are at {sample_rate} Hz, but this network was trained at "
                f"{self.sample_rate} Hz; resample them (data.sample_rate: {self.sample_rate})"
            )
        shape = tuple(waveforms.shape)
        if waveforms.ndim != 2 or not waveforms.is_floating_point():
            raise ValueError(
                f"waveforms are {waveforms.dtype} of shape {shape}; expected floating point in "
                "-1..1, (batch, samples)"
            )
        if lengths is None and shape[0] != 1:
            raise ValueError(
                f"waveforms have {shape[0]} rows but no lengths were given; mix the channels of a "
                "recording down (waveforms.mean(0, keepdim=True)), or give the length of each "
                "utterance"
            )
        if lengths is not None:
            if lengths.shape != shape[:1] or ((lengths < 1) | (lengths > shape[1])).any():
                raise ValueError(
                    f"lengths are {lengths.tolist()}; expected {shape[0]} values from 1 to "
                    f"{shape[1]}"
                )
            if bool((lengths == shape[1]).all()):
                # Without padding no mask is needed.
                lengths = None
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                return self(waveforms, lengths)
        finally:
            self.train(was_training)

    @property
    def num_parameters(self) -> int:
        """Parameters, frozen ones included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def spec(self) -> dict[str, Any]:
        """The network in plain values: `model` and `front_end` (name, options), `sample_rate`.

        If present, also `adaptation` and `components`, the external modules that it needs.
        """
        # What is needed to build the network again, and no more: options of training would make two
        # files of the same network differ.
        model = self._model
        options = model.options.model_dump(exclude=set(model.options.training_only))
        options["pooling"] = model.pooling
        options["embedding_dim"] = model.embedding_dim
        pooling_options = model.pooling_options.model_dump()
        if pooling_options:
            options["pooling_options"] = pooling_options
        # Without SpecAugment, which is only active in training.
        features = self._frontend.model_dump(
            exclude={*FrontendOptions.model_fields, *SpecAugmentOptions.model_fields}
        )
        for name, default in LATER_OPTIONS.items():
            if features.get(name) == default:
                del features[name]
        spec = {
            "model": {"name": model.name, "options": options},
            "front_end": {"name": self._frontend.name, "options": features},
            "sample_rate": self.sample_rate,
        }
        if self.adaptation_spec:
            spec["adaptation"] = self.adaptation_spec
        if PLUGIN_MODULES:
            pooling = POOLINGS[pooling_of(model.name, model.pooling)]
            parts = (MODELS[model.name], pooling, FEATURES[self._frontend.name])
            components = plugin_digests(parts)
            if components:
                spec["components"] = components
        return spec

    def adapt(self, spec: Mapping[str, Any]) -> None:
        """Append an adaptation, with fresh weights, to the embedding layer."""
        self.adaptation = Adaptation(spec)
        self.adaptation_spec = dict(spec)
        self.preparation = {name: spec[name] for name in PREPARATIONS if name in spec}
        self.embedding_dim = spec["maps"][-1][1]

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> "SpeakerNet":
        """The network described by `spec`, with fresh weights."""
        model_options = dict(spec["model"]["options"])
        net = cls.named(
            model=spec["model"]["name"],
            pooling=model_options.pop("pooling"),
            embedding_dim=model_options.pop("embedding_dim"),
            pooling_options=model_options.pop("pooling_options", None),
            model_options=model_options,
            front_end=spec["front_end"]["name"],
            front_end_options=spec["front_end"]["options"],
            sample_rate=spec["sample_rate"],
        )
        if spec.get("adaptation"):
            net.adapt(spec["adaptation"])
        return net

    def weights(self, *, without_fixed: bool = False) -> dict[str, Tensor]:
        """The state dictionary without the state of SpecAugment, which only training needs.

        `without_fixed` omits weights that are in the files of a pretrained backbone.
        """
        return without_spec_augment(
            self.trunk.plain_weights(self.state_dict(), without_fixed=without_fixed)
        )


class Adaptation(nn.Module):
    """The normalised affine maps, and PLDA's variances, that `speakernet adapt` appends to the
    embedding layer.

    Part of the network, so every command, the store of people and exports use it.
    `evaluation.adaptation` fits it; `evaluation.scoring` computes PLDA scores.

    Args:
        spec: plain values: `name`, which identifies it in thresholds and stores; `maps`, the
            numbers of inputs and outputs of each affine map; `score`, cosine or plda.

    >>> adaptation = Adaptation({"name": "example", "maps": [[2, 2], [2, 1]], "score": "cosine"})
    >>> adaptation(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = spec["maps"]
        for (_, outputs), (next_inputs, _) in itertools.pairwise(sizes):
            if outputs != next_inputs:
                raise ValueError(
                    f"adaptation maps have sizes {sizes}; expected each input to match the "
                    "previous output"
                )
        self.maps = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in sizes)
        if spec["score"] == "plda":
            # Between-speaker variances (within-speaker ones are 1), and the weights of the length
            # that PLDA normalises.
            self.register_buffer("between", torch.ones(sizes[-1][1]))
            self.register_buffer("weights", torch.ones(sizes[-1][1]))

    def forward(self, embeddings: Tensor) -> Tensor:
        """(batch, dim) from the network to (batch, dim) adapted, not normalised."""
        for index, affine_map in enumerate(self.maps):
            # Between two maps the length is normalised, as between LDA and PLDA; the first map
            # takes embeddings as the network gives them.
            if index > 0:
                embeddings = embeddings / embeddings.norm(dim=1, keepdim=True).clamp(
                    min=SHORTEST_LENGTH
                )
            embeddings = affine_map(embeddings)
        return embeddings


def _resolve_front_end(model: ModelOptions, frontend: FrontendOptions) -> FrontendOptions:
    """The front end's options without `auto`; ValueError if the model needs a different kind."""
    published = dict(model.options.front_end_defaults)
    name = published["name"] if frontend.name == "auto" else frontend.name
    if (name == "raw") != (published["name"] == "raw"):
        needed = "raw" if published["name"] == "raw" else "log_mel or fbank"
        raise ValueError(
            f"model {model.name} needs the front end {needed}, but the configuration has {name}"
        )
    # The published values only apply to the published front end.
    defaults = published if name == published["name"] else {}
    return frontend.resolve(defaults).model_copy(update={"name": name})  # type: ignore[no-any-return]


def fold_batch_norms(net: nn.Module) -> int:
    """Merge every batch norm into the layer that it directly follows, in place; the network can no
    longer be trained.

    In evaluation mode a norm scales and shifts each channel, which the layer's weights can do as
    well. A `Foldable` module lists such pairs; in an nn.Sequential they are detected. With a ReLU
    in between (`norm_behind_relu`) the layer absorbs the norm, and a floor for each channel
    replaces the ReLU.

    Returns:
        The number of merged norms.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> net[1].running_mean.fill_(3.0)
    tensor([3., 3.])
    >>> before = net(torch.ones(1, 2)).detach()
    >>> fold_batch_norms(net), torch.allclose(net(torch.ones(1, 2)), before)
    (1, True)
    """
    # A norm after training is y = a x + b for each channel. The layer before it is linear as well,
    # so a goes into its weights and b into its bias, and one pass over memory is saved for each
    # norm, which on a CPU counts more than the arithmetic.
    merged = 0
    for module in list(net.modules()):
        pairs: Mapping[str, str] = {}
        if isinstance(module, nn.Sequential):
            pairs = dict(itertools.pairwise(module._modules))
        elif isinstance(module, Foldable):
            pairs = module.norm_behind
            for layer, (relu, norm, reader) in module.norm_behind_relu.items():
                floors = _make_scale_positive(
                    module.get_submodule(norm), module.get_submodule(reader)
                )
                module.set_submodule(relu, ChannelFloor(floors))
                merged += _merge(module, layer, norm)
        for layer, norm in pairs.items():
            merged += _merge(module, layer, norm)
    return merged


def fold_network(net: Net) -> Net:
    """A copy of a network in evaluation mode, with its batch norms merged."""
    twin = copy.deepcopy(net).eval()
    fold_batch_norms(twin)
    return twin


def _merge(module: nn.Module, layer_name: str, norm_name: str) -> bool:
    """Merge a norm into the layer before it; returns whether both are of a supported kind."""
    layer = module.get_submodule(layer_name)
    norm = module.get_submodule(norm_name)
    if not isinstance(layer, Layer) or not isinstance(norm, _BatchNorm):
        return False
    assert norm.running_mean is not None and norm.running_var is not None and not norm.training
    norm.double()
    # In float64, so that the weights are rounded only once; elementwise, which preserves their
    # memory layout.
    bias = None if layer.bias is None else layer.bias.double()
    weight, bias = fuse_conv_bn_weights(
        layer.weight.double(),
        bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
    )
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    layer.bias = nn.Parameter(bias.float(), requires_grad=False)
    module.set_submodule(norm_name, nn.Identity())
    return True


def _make_scale_positive(norm: nn.Module, reader: nn.Module) -> Tensor:
    """A norm's output for zeros, (channels,), after flipping the sign of channels with a negative
    scale.

    Those would need a ceiling instead of a floor; the weights of the layer that reads the norm are
    flipped as well.
    """
    assert isinstance(norm, _BatchNorm) and isinstance(reader, Layer) and not norm.training
    signs = torch.where(norm.weight < 0, -1.0, 1.0)
    norm.weight.data.mul_(signs)
    norm.bias.data.mul_(signs)
    reader.weight.data.mul_(signs.view(1, -1, 1, 1))  # (channels, input channels, mels, frames)
    norm.double()
    zeros = torch.zeros_like(norm.weight)[None, :, None, None]  # (1, channels, 1, 1)
    return norm(zeros).detach().flatten().float()


def strip_wrappers(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and DistributedDataParallel.

    >>> strip_wrappers("module._orig_mod.trunk.conv1.weight")
    'trunk.conv1.weight'
    >>> strip_wrappers("layers.0.conv_module.weight")
    'layers.0.conv_module.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def check_finite(weights: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights with NaN or infinity."""
    broken = []
    for name, value in weights.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        # A finite sum has finite terms, and takes a third of the time; large terms may overflow.
        if not math.isfinite(float(value.sum())) and not bool(torch.isfinite(value).all()):
            broken.append(name)
    if broken:
        raise CheckpointError(
            f"{path} has NaN or infinite values in {len(broken)} of {len(weights)} tensors: "
            f"{_shorten(broken)}. Its training diverged; use an earlier checkpoint"
        )


def check_fits(
    weights: Mapping[str, Tensor], expected: Mapping[str, Any], path: str | Path
) -> None:
    """Refuse weights whose names, shapes or kinds of number differ from the network's."""
    expected = without_spec_augment(expected)
    # Old versions of torch and some conversions keep no counters of batches; torch's loader fills
    # them in, and without `momentum=None` they do not change any output.
    problems = [
        f"missing {name}"
        for name in expected
        if name not in weights and not name.endswith(COUNTER_SUFFIX)
    ]
    problems += [f"unknown {name}" for name in weights if name not in expected]
    for name, value in expected.items():
        if name in weights and weights[name].shape != value.shape:
            problems.append(
                f"{name} is {tuple(weights[name].shape)} in the file, {tuple(value.shape)} in the "
                "network"
            )
        # Loading would round or cast them without a word: whole numbers are not trained weights.
        if name in weights and weights[name].is_floating_point() != value.is_floating_point():
            problems.append(
                f"{name} is {str(weights[name].dtype).removeprefix('torch.')} in the file"
            )
    if problems:
        raise CheckpointError(f"{path} does not fit the network: {_shorten(problems)}")


def without_spec_augment(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights without the state of SpecAugment, which only training needs."""
    return {
        name: value for name, value in weights.items() if not name.startswith(SPEC_AUGMENT_PREFIX)
    }


def _shorten(names: Sequence[str]) -> str:
    shown = "; ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        shown += f" and {len(names) - MAX_NAMES_SHOWN} more"
    return shown
