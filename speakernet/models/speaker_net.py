"""SpeakerNet: front end, trunk, pooling and embedding layer in one module, the one way from audio to embedding.

Training, evaluation, export and verification call it. It describes itself in plain values (`spec`), from which a model
file builds it again (`from_spec`). Networks that are only used can have their batch norms merged (`folded`).
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from speakernet.checkpoint import CheckpointError
from speakernet.frontend.options import FEATURES, FrontendOptions, SpecAugmentOptions
from speakernet.frontend.perturbation import SpecAugment
from speakernet.models.layers import ChannelFloor, is_safe_in_channels_last, make_embedding, mask_frames
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import OUTSIDE, SAMPLE_RATE, create, lookup, needs_outside, options_of
from speakernet.random import derive_seed

Net = TypeVar("Net", bound=nn.Module)
Layer = nn.Conv1d | nn.Conv2d | nn.Linear
SPEC_AUGMENT_PREFIX = "spec_augment."
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
        pooling = trunk.poolings[0] if model.pooling == "auto" else model.pooling
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
        self.spec_augment = (
            SpecAugment(frontend, derive_seed(seed, SPEC_AUGMENT_STREAM))
            if isinstance(frontend, SpecAugmentOptions) and frontend.spec_augment
            else None
        )
        self.trunk = create(
            lookup(MODELS, model.name, "model"),
            trunk,
            num_features=self.front_end.num_features,
            embedding_dim=model.embedding_dim,
            sample_rate=sample_rate,
        )
        # What the trunk has found out, such as the configuration of a pretrained backbone.
        found = getattr(self.trunk, "options", trunk)
        self._model = model.model_copy(update={"pooling": pooling, "options": found})
        # 2-D convolutions run up to a quarter faster with channels innermost on CPUs, more on tensor cores.
        if is_safe_in_channels_last(self.trunk):
            self.trunk.to(memory_format=torch.channels_last)
        component = POOLINGS[pooling_of(model.name, pooling)]
        sizes = {"channels": self.trunk.out_channels, "layers": self.trunk.num_states}
        self.pooling = create(component, model.pooling_options, **sizes)
        self.norm: nn.Module = nn.BatchNorm1d(self.pooling.dim) if trunk.has_norm_after_pooling else nn.Identity()
        self.embedding = make_embedding(trunk.embedding_layer, self.pooling.dim, model.embedding_dim)
        self.adaptation: nn.Module = nn.Identity()
        self.adaptation_spec: dict[str, Any] = {}

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
        given = {"name": front_end or "auto", **(front_end_options or {})}
        if given["name"] in ("auto", trunk.front_end_defaults["name"]):
            given = {**trunk.front_end_defaults, **given, "name": trunk.front_end_defaults["name"]}
        return cls(
            ModelOptions(
                name=model,
                options=trunk,
                pooling_options=options_of(POOLINGS, kind, pooling_options or {}, "pooling"),
                **{field: value for field, value in section.items() if value is not None},  # type: ignore[arg-type]
            ),
            options_of(FEATURES, given["name"], given, "front end"),
            sample_rate or SAMPLE_RATE,
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
            # The front end is given them as they are: asking a device for the shortest would wait for it.
            frame_lengths = self.front_end.num_frames(lengths.to(waveforms.device, non_blocking=True))
        features = self.front_end(waveforms, lengths)  # (batch, mels, frames)
        if self.spec_augment is not None:
            features = self.spec_augment(features)
        return self.from_features(features, frame_lengths)

    def from_features(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Embeddings of features (batch, mels, frames), (batch, dim) float32, not normalised."""
        hidden, lengths = self.trunk(mask_frames(features, lengths), lengths)  # (batch, channels, frames)
        # Sums over hundreds of frames and the last projection lose too much in 16 bits.
        with torch.autocast(features.device.type, enabled=False):
            return self.adaptation(self.embedding(self.norm(self.pooling(hidden.float(), lengths))))  # type: ignore[no-any-return]

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
        if lengths is not None and (lengths.shape != shape[:1] or ((lengths < 1) | (lengths > shape[1])).any()):
            raise ValueError(f"lengths {lengths.tolist()}; expected {shape[0]} from 1 to {shape[1]}")
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

    def spec(self) -> dict[str, Any]:
        """The network in plain values: `model` and `front_end` (name, options), `sample_rate`.

        And, if there are any, `adaptation` and `components`, the modules from outside that it needs.
        """
        model = self._model
        sizes = {"pooling": model.pooling, "embedding_dim": model.embedding_dim}
        pooling_options = model.pooling_options.model_dump()
        sizes |= {"pooling_options": pooling_options} if pooling_options else {}
        # What describes the features: not SpecAugment, which acts in training only.
        features = self._frontend.model_dump(exclude={*FrontendOptions.model_fields, *SpecAugmentOptions.model_fields})
        # At the defaults of later options a network keeps the fingerprint that it has in stores of people.
        later = {"energy_floor_db": 0.0, "style": "kaldi"}
        features = {name: value for name, value in features.items() if name not in later or value != later[name]}
        outside = {}
        if OUTSIDE:
            pooling = POOLINGS[pooling_of(model.name, model.pooling)]
            outside = needs_outside((MODELS[model.name], pooling, FEATURES[self._frontend.name]))
        return {
            "model": {
                "name": model.name,
                "options": {**model.options.model_dump(exclude=set(model.options.training_only)), **sizes},
            },
            "front_end": {"name": self._frontend.name, "options": features},
            "sample_rate": self.sample_rate,
            **({"adaptation": self.adaptation_spec} if self.adaptation_spec else {}),
            **({"components": outside} if outside else {}),
        }

    def adapt(self, spec: Mapping[str, Any]) -> None:
        """Put an adaptation of this description, with fresh weights, behind the embedding layer."""
        # Late: most networks are as they were trained.
        from speakernet.models.adaptation import Adaptation

        self.adaptation, self.adaptation_spec = Adaptation(spec), dict(spec)
        self.embedding_dim = spec["maps"][-1][1]

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> "SpeakerNet":
        """The network that `spec` describes, with fresh weights."""
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

        `without_fixed` leaves out what the files of a pretrained backbone hold.
        """
        named = self.state_dict()
        if hasattr(self.trunk, "plain_weights"):
            named = self.trunk.plain_weights(named, without_fixed=without_fixed)
        return {name: value for name, value in named.items() if not name.startswith(SPEC_AUGMENT_PREFIX)}


def fold_batch_norms(net: nn.Module) -> int:
    """Merge every batch norm into the layer that it directly follows, in place; the network can no longer be trained.

    In evaluation mode a norm multiplies and adds per channel, which the weights of the layer can do. A module names
    such pairs in `norm_behind` (layer -> norm, also in a component); in a sequence they are found. `norm_behind_relu`
    names those with a ReLU between (layer -> ReLU, norm, and the only layer that reads the norm): the layer takes the
    norm, and a floor for each channel replaces the ReLU.

    Returns:
        How many were merged.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> net[1].running_mean.fill_(3.0)
    tensor([3., 3.])
    >>> before = net(torch.ones(1, 2)).detach()
    >>> fold_batch_norms(net), torch.allclose(net(torch.ones(1, 2)), before)
    (1, True)
    """
    merged = 0
    for module in list(net.modules()):
        for layer, (relu, norm, reader) in getattr(module, "norm_behind_relu", {}).items():
            floors = _with_positive_scale(module.get_submodule(norm), module.get_submodule(reader))
            module.set_submodule(relu, ChannelFloor(floors))
            merged += _merge(module, layer, norm)
        in_sequence = dict(itertools.pairwise(module._modules)) if isinstance(module, nn.Sequential) else {}
        for layer, norm in getattr(module, "norm_behind", in_sequence).items():
            merged += _merge(module, layer, norm)
    return merged


def folded(net: Net) -> Net:
    """A copy of a network in evaluation mode with its batch norms merged."""
    twin = copy.deepcopy(net).eval()
    fold_batch_norms(twin)
    return twin


def _merge(module: nn.Module, layer_name: str, norm_name: str) -> bool:
    """Give a layer the norm behind it, if they are a layer and a norm."""
    layer, norm = module.get_submodule(layer_name), module.get_submodule(norm_name)
    if not isinstance(layer, Layer) or not isinstance(norm, _BatchNorm):
        return False
    assert norm.running_mean is not None and norm.running_var is not None and not norm.training
    norm.double()
    # In float64, so that the weights are rounded once; elementwise, so that they keep their order in memory.
    bias = None if layer.bias is None else layer.bias.double()
    fused = fuse_conv_bn_weights(
        layer.weight.double(), bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    layer.weight, layer.bias = (nn.Parameter(one.float(), requires_grad=False) for one in fused)
    module.set_submodule(norm_name, nn.Identity())
    return True


def _with_positive_scale(norm: nn.Module, reader: nn.Module) -> Tensor:
    """What a norm makes of zeros, (channels,), after its channels of negative scale have changed their sign.

    Those would need a ceiling in place of a floor; the layer that reads the norm changes its weights for them.
    """
    assert isinstance(norm, _BatchNorm) and isinstance(reader, Layer) and not norm.training
    signs = torch.where(norm.weight < 0, -1.0, 1.0)
    for values, shape in ((norm.weight, (-1,)), (norm.bias, (-1,)), (reader.weight, (1, -1, 1, 1))):
        values.data.mul_(signs.view(shape))
    norm.double()
    return norm(torch.zeros_like(norm.weight)[None, :, None, None]).detach().flatten().float()


def strip_wrappers(name: str) -> str:
    """A parameter's name without what torch.compile and DistributedDataParallel put before it.

    >>> strip_wrappers("module._orig_mod.trunk.conv1.weight")
    'trunk.conv1.weight'
    >>> strip_wrappers("layers.0.conv_module.weight")
    'layers.0.conv_module.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def check_finite(weights: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights with NaN or infinity."""
    tensors = [(name, value) for name, value in weights.items() if isinstance(value, Tensor)]
    broken = [name for name, value in tensors if value.is_floating_point() and not bool(torch.isfinite(value).all())]
    if broken:
        raise CheckpointError(
            f"{path} has NaN or infinite values in {len(broken)} of {len(weights)} tensors: {_some(broken)}; "
            "its training had diverged; use an earlier checkpoint"
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
