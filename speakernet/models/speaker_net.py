"""SpeakerNet: front end, trunk, pooling and embedding layer in one module, the one way from audio to embedding.

Training, evaluation, export and verification call it. It describes itself in plain values (`spec`), from which a model
file builds it again (`from_spec`). Networks that are only used can have their batch norms merged (`folded`).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from speakernet.checkpoint import CheckpointError
from speakernet.frontend.options import FEATURES, FrontendOptions, SpecAugmentOptions
from speakernet.frontend.perturbation import SpecAugment
from speakernet.models.layers import (
    EMBEDDING_LAYERS,
    ChannelFloor,
    full_precision,
    is_safe_in_channels_last,
    mask_frames,
)
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import create, lookup, options_of
from speakernet.random import derive_seed

Net = TypeVar("Net", bound=nn.Module)
Layer = nn.Conv1d | nn.Conv2d | nn.Linear
SPEC_AUGMENT_PREFIX = "spec_augment."
WRAPPER_PREFIXES = ("_orig_mod.", "module.")
"""Of parameter names, by torch.compile and DistributedDataParallel."""
MOST_NAMES_SHOWN = 10
# Keys of the random streams of the network's own components, next to the run's seed.
SPEC_AUGMENT_STREAM = 101
DITHER_STREAM = 102
LONGEST_MINIMUM_SECONDS = 2
"""No network needs more than this for an embedding."""


class SpeakerNet(nn.Module):
    """A speaker-embedding network.

    Args:
        model: trunk, pooling and size of the embedding. A trunk may give a common name of a pooling its own meaning
            (`SAP` of ResNetSE34V2 is `ChannelSAP`).
        frontend: the features; `auto` follows the trunk's own definition. SpecAugment acts in training only and is not
            part of the spec.
        sample_rate: of the waveforms, in Hz.
        seed: of the run, from which dither and SpecAugment derive their draws.
    """

    def __init__(self, model: ModelOptions, frontend: FrontendOptions, sample_rate: int, seed: int = 0) -> None:
        super().__init__()
        trunk = model.options
        own = dict(trunk.front_end_defaults)
        name = own["name"] if frontend.name == "auto" else frontend.name
        if (name == "raw") != (own["name"] == "raw"):
            needed = "raw" if own["name"] == "raw" else "log_mel or fbank"
            raise ValueError(f"model {model.name} needs the front end {needed}, found {name}")
        for kind, options in ((model.name, trunk), (model.pooling, model.pooling_options)):
            if problem := next(iter(options.problems()), None):
                raise ValueError(f"{kind}: {problem[0]} is {problem[1]}")
        # The values of the published definition hold for its own front end only.
        frontend = frontend.resolved(own if name == own["name"] else {}).model_copy(update={"name": name})
        pooling = trunk.default_pooling if model.pooling == "auto" else model.pooling
        self._model = model.model_copy(update={"pooling": pooling})
        self._frontend = frontend
        self.sample_rate = sample_rate
        self.embedding_dim = model.embedding_dim
        # Never on the meta device, whose arithmetic loads torch's compiler: two seconds.
        with torch.device("cpu"):
            self.front_end = create(
                lookup(FEATURES, name, "front end"),
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
        # 2-D convolutions run up to a quarter faster with channels innermost on CPUs, more on tensor cores.
        if is_safe_in_channels_last(self.trunk):
            self.trunk.to(memory_format=torch.channels_last)
        pooling_part = POOLINGS[pooling_of(model.name, pooling)]
        self.pooling = create(pooling_part, model.pooling_options, channels=self.trunk.out_channels)
        self.norm: nn.Module = nn.BatchNorm1d(self.pooling.dim) if trunk.has_norm_after_pooling else nn.Identity()
        self.embedding = EMBEDDING_LAYERS[trunk.embedding_layer](self.pooling.dim, model.embedding_dim)

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
        """A network by the names of its components; the rest follows the model's published definition."""
        trunk = options_of(MODELS, model, model_options or {}, "model")
        kind = pooling_of(model, pooling or "auto")
        section = {"pooling": pooling, "embedding_dim": embedding_dim}
        own = dict(trunk.front_end_defaults)
        own_name = own.pop("name")
        name = own_name if front_end in (None, "auto") else front_end
        given = {**(own if name == own_name else {}), **(front_end_options or {})}
        return cls(
            ModelOptions(
                name=model,
                options=trunk,
                pooling_options=options_of(POOLINGS, kind, pooling_options or {}, "pooling"),
                **{field: value for field, value in section.items() if value is not None},  # type: ignore[arg-type]
            ),
            options_of(FEATURES, name, {"name": name, **given}, "front end"),
            sample_rate or trunk.published_rate,
        )

    @property
    def model_name(self) -> str:
        """The name in MODELS."""
        return self._model.name

    def forward(self, waveforms: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Embeddings of a batch, in float32.

        Args:
            waveforms: (batch, samples) in -1..1.
            lengths: (batch,) samples of each utterance if they differ, None when all are full. The embeddings are those
                of the utterances one by one.

        Returns:
            (batch, dim), not normalised.
        """
        frame_lengths = None
        if lengths is not None:
            lengths = lengths.to(waveforms.device)
            frame_lengths = self.front_end.num_frames(lengths)
        features = self.front_end(waveforms, lengths)  # (batch, mels, frames)
        if self.spec_augment is not None:
            features = self.spec_augment(features)
        return self.from_features(features, frame_lengths)

    def from_features(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Embeddings of features (batch, mels, frames), (batch, dim) float32, not normalised."""
        hidden, lengths = self.trunk(mask_frames(features, lengths), lengths)  # (batch, channels, frames)
        # Sums over hundreds of frames and the last projection lose too much in 16 bits.
        with full_precision(features):
            return self.embedding(self.norm(self.pooling(hidden.float(), lengths)))  # type: ignore[no-any-return]

    @property
    def min_samples(self) -> int:
        """Samples of the shortest waveform that can be embedded."""
        frames = self.front_end.num_frames(torch.arange(LONGEST_MINIMUM_SECONDS * self.sample_rate))
        return max(self.front_end.min_samples, int((frames >= self.trunk.min_frames).nonzero()[0]))

    def embed(self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int) -> Tensor:
        """`forward` in evaluation mode and without gradients; the training mode is restored afterwards.

        Args:
            waveforms: (batch, samples) in -1..1, one channel each.
            lengths: (batch,) samples of each utterance. Only a single row needs none: several rows without lengths
                could be the channels of one recording.
            sample_rate: of the waveforms, in Hz; another one than the network's is a ValueError.

        Returns:
            (batch, dim), not normalised.
        """
        self._check(waveforms, lengths, sample_rate)
        if lengths is not None and bool((lengths == waveforms.shape[1]).all()):
            # Nothing is padded, so nothing needs a mask.
            lengths = None
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                return self(waveforms, lengths)
        finally:
            self.train(was_training)

    def _check(self, waveforms: Tensor, lengths: Tensor | None, sample_rate: int) -> None:
        if sample_rate != self.sample_rate:
            raise ValueError(
                f"waveforms at {sample_rate} Hz, but this network was trained at {self.sample_rate} Hz; resample them "
                f"(data.sample_rate: {self.sample_rate})"
            )
        shape = tuple(waveforms.shape)
        if waveforms.ndim != 2 or not waveforms.is_floating_point():
            raise ValueError(
                f"waveforms of {waveforms.dtype} and shape {shape}; expected floating point in -1..1, (batch, samples)"
            )
        if lengths is None and shape[0] != 1:
            raise ValueError(
                f"waveforms of {shape[0]} rows and no lengths: mix the channels of a recording down "
                "(waveforms.mean(0, keepdim=True)), or give a length for each utterance"
            )
        if lengths is None or not len(lengths):
            return
        shortest, longest = int(lengths.min()), int(lengths.max())
        if tuple(lengths.shape) != shape[:1] or shortest < 1 or longest > shape[1]:
            raise ValueError(
                f"lengths of shape {tuple(lengths.shape)} from {shortest} to {longest}; expected {shape[:1]} from 1 to "
                f"{shape[1]}"
            )

    def spec(self) -> dict[str, Any]:
        """The network in plain values: `model` and `front_end` (name, options), `sample_rate`."""
        model = self._model
        sizes: dict[str, Any] = {"pooling": model.pooling, "embedding_dim": model.embedding_dim}
        if pooling_options := model.pooling_options.model_dump():
            sizes["pooling_options"] = pooling_options
        return {
            "model": {"name": model.name, "options": {**model.options.model_dump(), **sizes}},
            "front_end": {"name": self._frontend.name, "options": self._frontend.values()},
            "sample_rate": self.sample_rate,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> "SpeakerNet":
        """The network that `spec` describes, with fresh weights."""
        model_options = dict(spec["model"]["options"])
        return cls.named(
            model=spec["model"]["name"],
            pooling=model_options.pop("pooling"),
            embedding_dim=model_options.pop("embedding_dim"),
            pooling_options=model_options.pop("pooling_options", None),
            model_options=model_options,
            front_end=spec["front_end"]["name"],
            front_end_options=spec["front_end"]["options"],
            sample_rate=spec["sample_rate"],
        )

    def weights(self) -> dict[str, Tensor]:
        """The state dictionary without the state of SpecAugment, which only training needs."""
        state = self.state_dict()
        return {key: value for key, value in state.items() if not key.startswith(SPEC_AUGMENT_PREFIX)}


def fold_batch_norms(net: nn.Module) -> int:
    """Merge every batch norm into the layer that it directly follows, in place; the network can no longer be trained.

    In evaluation mode a norm multiplies and adds per channel, which the weights of the layer can do. A module names
    such pairs in `norm_behind` (layer, also `component.conv`, -> norm; lists pair member by member); in a sequence they
    are found. `norm_behind_relu` names those with a ReLU between (layer -> ReLU, norm, and the only layer that reads
    the norm): the layer takes the norm, and a floor for each channel replaces the ReLU.

    Returns:
        How many were merged.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> net[1].running_mean.fill_(3.0)
    tensor([3., 3.])
    >>> before = net(torch.ones(1, 2)).detach()
    >>> fold_batch_norms(net), torch.allclose(net(torch.ones(1, 2)), before)
    (1, True)
    """
    found = [pair for module in net.modules() for pair in _pairs(module)]
    for layer, holder, name in found:
        _rescale(layer, *_scale_and_shift(holder._modules[name]))  # type: ignore[arg-type]
        holder._modules[name] = nn.Identity()
    rectified = [(module, names) for module in net.modules() for names in _rectified(module)]
    for module, names in rectified:
        _merge_rectified(module, *names)
    return len(found) + len(rectified)


def folded(net: Net) -> Net:
    """A copy of a network in evaluation mode with its batch norms merged."""
    twin = copy.deepcopy(net).eval()
    fold_batch_norms(twin)
    return twin


def _pairs(module: nn.Module) -> Iterator[tuple[Layer, nn.Module, str]]:
    """Layers followed by a batch norm: the layer, the module that holds the norm, and the norm's name in it."""
    places: list[tuple[nn.Module, nn.Module, str]] = []
    if isinstance(module, nn.Sequential):
        names = list(module._modules)
        places += [(module[index], module, names[index + 1]) for index in range(len(names) - 1)]
    for layer_name, norm_name in getattr(module, "norm_behind", {}).items():
        layer, norm = module.get_submodule(layer_name), module.get_submodule(norm_name)
        if isinstance(layer, nn.ModuleList):
            places += [(one, norm, str(index)) for index, one in enumerate(layer)]
        else:
            places.append((layer, module, norm_name))
    for layer, holder, name in places:
        if isinstance(layer, Layer) and isinstance(holder._modules[name], nn.modules.batchnorm._BatchNorm):
            yield layer, holder, name


def _rectified(module: nn.Module) -> Iterator[tuple[str, str, str, str]]:
    """Names of a layer and of the ReLU, the batch norm and the layer that follow it."""
    for layer, (activation, norm, reader) in getattr(module, "norm_behind_relu", {}).items():
        if isinstance(module.get_submodule(norm), nn.modules.batchnorm._BatchNorm):
            yield layer, activation, norm, reader


def _merge_rectified(module: nn.Module, layer: str, activation: str, norm: str, reader_name: str) -> None:
    """Give the layer before a ReLU the weights of the norm after it."""
    scale, shift = _scale_and_shift(module.get_submodule(norm))  # type: ignore[arg-type]
    # A negative scale would need a ceiling: its channels change sign, and so do the weights that read them.
    signs = torch.where(scale < 0, -1.0, 1.0).double()
    _rescale(module.get_submodule(layer), scale * signs, shift * signs)  # type: ignore[arg-type]
    module._modules[activation] = ChannelFloor((shift * signs).float())
    module._modules[norm] = nn.Identity()
    reader = module.get_submodule(reader_name)
    assert isinstance(reader, Layer)
    turned = reader.weight.double() * signs.view(-1, *(1 for _ in reader.weight.shape[2:]))
    reader.weight = nn.Parameter(turned.float(), requires_grad=False)


def _scale_and_shift(norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """What a norm multiplies by and adds, (channels,) each, in float64: the weights are rounded once."""
    assert norm.running_mean is not None and norm.running_var is not None and not norm.training
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift + norm.bias.double() if norm.affine else shift


def _rescale(layer: Layer, scale: Tensor, shift: Tensor) -> None:
    """Multiply the layer's result by a scale and add a shift, both (channels,)."""
    if layer.bias is not None:
        shift = shift + layer.bias.double() * scale
    # Elementwise, so that the weights keep their order in memory.
    weight = layer.weight.double() * scale.view(-1, *(1 for _ in layer.weight.shape[1:]))
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    layer.bias = nn.Parameter(shift.float(), requires_grad=False)


def strip_wrappers(name: str) -> str:
    """A parameter's name without what compilation and data parallelism put before it.

    >>> strip_wrappers("module._orig_mod.trunk.conv1.weight")
    'trunk.conv1.weight'
    """
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def check_finite(weights: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights with NaN or infinity."""
    tensors = [(name, value) for name, value in weights.items() if isinstance(value, Tensor)]
    broken = [name for name, value in tensors if value.is_floating_point() and not bool(torch.isfinite(value).all())]
    if broken:
        raise CheckpointError(
            f"{path} has NaN or infinite values in {len(broken)} of {len(weights)} tensors: {_some(broken)}; "
            "its training had diverged, take an earlier checkpoint"
        )


def check_fits(found: Mapping[str, Tensor], expected: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights that are not exactly those of the network; the message lists names and shapes."""
    expected = {name: value for name, value in expected.items() if not name.startswith(SPEC_AUGMENT_PREFIX)}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unknown {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {tuple(found[name].shape)} in the file, {tuple(value.shape)} in the network"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit the network: {_some(problems)}")


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES_SHOWN
    return "; ".join(names[:MOST_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
