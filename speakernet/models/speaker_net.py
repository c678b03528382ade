"""SpeakerNet: front end, trunk, pooling and embedding layer in one module, the one way from audio to embedding.

Whoever trains, evaluates, exports or verifies calls this. It can say what it is made of in plain values (`spec`) and be
made again from them (`from_spec`), which is how a model file describes itself. It knows no loss and no config.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speakernet.frontend.options import FEATURES, FrontendOptions, SpecAugmentOptions
from speakernet.frontend.perturbation import SpecAugment
from speakernet.models.layers import EMBEDDING_LAYERS, full_precision, is_safe_in_channels_last, mask_frames
from speakernet.models.options import MODELS, POOLINGS, ModelOptions, pooling_of
from speakernet.options import create, lookup, options_of
from speakernet.random import derive_seed

SPEC_AUGMENT_PREFIX = "spec_augment."
# Keys of the random streams that the network's own parts draw from, beside the run's seed.
SPEC_AUGMENT_STREAM = 101
DITHER_STREAM = 102
LONGEST_MINIMUM_SECONDS = 2
"""No network needs more than this to give an embedding."""


class SpeakerNet(nn.Module):
    """A speaker-embedding network.

    Args:
        model: trunk, pooling and size of the embedding. A trunk may give a common name of a pooling a meaning of its
            own (`SAP` of ResNetSE34V2 is `ChannelSAP`).
        frontend: the features; what is `auto` follows the trunk's own definition. Its SpecAugment acts in training only
            and is no part of the spec.
        sample_rate: of the waveforms, in Hz.
        seed: of the run, from which dither and SpecAugment derive their draws.

    Raises:
        ValueError: an unknown name, or a front end that the trunk cannot work on.
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
        # The published definition's values hold for its own front end only.
        frontend = frontend.resolved(own if name == own["name"] else {}).model_copy(update={"name": name})
        pooling = trunk.default_pooling if model.pooling == "auto" else model.pooling
        self._model = model.model_copy(update={"pooling": pooling})
        self._frontend = frontend
        self.sample_rate = sample_rate
        self.embedding_dim = model.embedding_dim
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
        """A network by the names of its parts; what is left out follows the model's published definition.

        Raises:
            ValueError: an unknown name or option, or a front end that the model cannot work on.
        """
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
            lengths: (batch,) samples of each utterance where they differ; the embeddings are then those that the
                utterances give one by one. None when all are full.

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
        """Embeddings of what a front end gave, in float32.

        Args:
            features: (batch, mels, frames).
            lengths: (batch,) valid frames where they differ, None when all are full.

        Returns:
            (batch, dim), not normalised.
        """
        hidden, lengths = self.trunk(mask_frames(features, lengths), lengths)  # (batch, channels, frames)
        # Sums over hundreds of frames and the last projection lose too much in 16 bits.
        with full_precision(features):
            return self.embedding(self.norm(self.pooling(hidden.float(), lengths)))  # type: ignore[no-any-return]

    @property
    def min_samples(self) -> int:
        """Samples of the shortest waveform that can be embedded; what is shorter can be repeated from its start."""
        frames = self.front_end.num_frames(torch.arange(LONGEST_MINIMUM_SECONDS * self.sample_rate))
        return max(self.front_end.min_samples, int((frames >= self.trunk.min_frames).nonzero()[0]))

    def embed(self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int) -> Tensor:
        """`forward` in evaluation mode and without gradients; the mode of training is put back afterwards.

        Args:
            waveforms: (batch, samples) in -1..1. A recording of several channels is no batch: mix it down first.
            lengths: (batch,) samples of each utterance. One row needs none; several rows do, for they may as well be
                the channels of one recording.
            sample_rate: of the waveforms, in Hz.

        Returns:
            (batch, dim), not normalised.

        Raises:
            ValueError: another sample rate than the network's, another shape, or integers.
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
        if waveforms.ndim != 2:
            raise ValueError(f"waveforms of shape {shape}; expected (batch, samples), one channel each")
        if not waveforms.is_floating_point():
            raise ValueError(f"waveforms of {waveforms.dtype}; expected floating point in -1..1")
        if lengths is None:
            if shape[0] != 1:
                raise ValueError(
                    f"waveforms of {shape[0]} rows and no lengths: if these are the channels of one recording, mix "
                    "them down (waveforms.mean(0, keepdim=True)); if they are utterances, give lengths, one each"
                )
        elif tuple(lengths.shape) != shape[:1]:
            raise ValueError(f"lengths of shape {tuple(lengths.shape)}; expected {shape[:1]}, one for each waveform")
        elif len(lengths) and not (int(lengths.min()) >= 1 and int(lengths.max()) <= shape[1]):
            raise ValueError(f"lengths from {int(lengths.min())} to {int(lengths.max())}; expected 1 to {shape[1]}")

    def spec(self) -> dict[str, Any]:
        """What the network is made of, in plain values: `model` and `front_end` (name, options), `sample_rate`."""
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
        """The network that `spec` describes, with fresh weights.

        Raises:
            ValueError: the spec names what this version does not know.
        """
        model_options = dict(spec["model"]["options"])
        # Files of before 0.2 also hold the seed of the dither, which describes no feature.
        front_end_options = {key: value for key, value in spec["front_end"]["options"].items() if key != "seed"}
        return cls.named(
            model=spec["model"]["name"],
            pooling=model_options.pop("pooling"),
            embedding_dim=model_options.pop("embedding_dim"),
            # Files of before 0.2 have none.
            pooling_options=model_options.pop("pooling_options", None),
            model_options=model_options,
            front_end=spec["front_end"]["name"],
            front_end_options=front_end_options,
            sample_rate=spec["sample_rate"],
        )

    def weights(self) -> dict[str, Tensor]:
        """The state dictionary without what only training needs (SpecAugment's position in its draws)."""
        state = self.state_dict()
        return {key: value for key, value in state.items() if not key.startswith(SPEC_AUGMENT_PREFIX)}
