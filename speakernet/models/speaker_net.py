"""SpeakerNet: front end, trunk, pooling and embedding layer in one module, the one way from audio to embedding.

Whoever trains, evaluates, exports or verifies calls this. It can say what it is made of in plain values (`spec`) and be
made again from them (`from_spec`), which is how a model file describes itself. It knows no loss and no config.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speakernet.frontend import FEATURES, SpecAugment
from speakernet.models.embedding import EMBEDDING_LAYERS
from speakernet.models.layers import full_precision, is_safe_in_channels_last, mask_frames
from speakernet.models.pooling import Pooling
from speakernet.models.tables import MODELS, POOLINGS
from speakernet.registry import create, lookup

SPEC_AUGMENT_PREFIX = "spec_augment."


class SpeakerNet(nn.Module):
    """A speaker-embedding network.

    Args:
        model: name in MODELS.
        pooling: name in POOLINGS, or "auto" for the model's own. A model may give a common name a meaning of its own
            (`SAP` of ResNetSE34V2 is `ChannelSAP`).
        embedding_dim: numbers in an embedding.
        model_options: further options of the trunk.
        front_end: name in FEATURES, or "auto" for the model's own.
        front_end_options: options of the front end; what is left out follows the model's own definition.
        sample_rate: of the waveforms, in Hz.
        spec_augment: masking applied in training; it is no part of the spec.

    Raises:
        ValueError: an unknown name or option, or a front end that the model cannot work on.
    """

    def __init__(
        self,
        model: str = "ResNetSE34L",
        pooling: str = "auto",
        embedding_dim: int = 256,
        model_options: Mapping[str, Any] | None = None,
        front_end: str = "auto",
        front_end_options: Mapping[str, Any] | None = None,
        sample_rate: int = 16000,
        spec_augment: SpecAugment | None = None,
    ) -> None:
        super().__init__()
        lookup(MODELS, model, "model")
        trunk_class = MODELS[model]
        own: dict[str, Any] = dict(trunk_class.front_end_defaults)
        own_front_end = own.pop("name")
        if front_end == "auto":
            front_end = own_front_end
        if (front_end == "raw") != (own_front_end == "raw"):
            needed = "raw" if own_front_end == "raw" else "log_mel or fbank"
            raise ValueError(f"model {model} needs the front end {needed}, found {front_end}")
        options = {**(own if front_end == own_front_end else {}), **(front_end_options or {})}
        pooling = trunk_class.default_pooling if pooling == "auto" else pooling
        trunk_options = dict(model_options or {})
        self._model = {
            "name": model,
            "options": {**trunk_options, "pooling": pooling, "embedding_dim": embedding_dim},
        }
        self._front_end = {"name": front_end, "options": options}
        self.sample_rate = sample_rate
        self.embedding_dim = embedding_dim
        self.front_end = create(FEATURES, front_end, {"sample_rate": sample_rate, **options}, "front end")
        self.spec_augment = spec_augment
        facts = {
            "num_features": self.front_end.num_features,
            "embedding_dim": embedding_dim,
            "sample_rate": sample_rate,
        }
        declared = inspect.signature(trunk_class).parameters
        known = {name: value for name, value in facts.items() if name in declared}
        self.trunk = create(MODELS, model, {**known, **trunk_options}, "model")
        # 2-D convolutions run up to a quarter faster with channels innermost on CPUs, more on tensor cores.
        if is_safe_in_channels_last(self.trunk):
            self.trunk.to(memory_format=torch.channels_last)
        pooling_name = trunk_class.pooling_names.get(pooling, pooling)
        self.pooling = self._make_pooling(pooling_name)
        has_norm = self.trunk.has_norm_after_pooling
        self.norm: nn.Module = nn.BatchNorm1d(self.pooling.dim) if has_norm else nn.Identity()
        self.embedding = EMBEDDING_LAYERS[self.trunk.embedding_layer](self.pooling.dim, embedding_dim)

    def _make_pooling(self, name: str) -> Pooling:
        """The pooling of that name, with what the trunk says of it where it has such an option."""
        declared = inspect.signature(lookup(POOLINGS, name, "pooling")).parameters
        own = {key: value for key, value in self.trunk.pooling_options.items() if key in declared}
        made: Pooling = create(POOLINGS, name, {"channels": self.trunk.out_channels, **own}, "pooling")
        return made

    @property
    def model_name(self) -> str:
        """The name in MODELS."""
        return str(self._model["name"])

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

    def embed(self, waveforms: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`forward` in evaluation mode and without gradients; the mode of training is put back afterwards."""
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                return self(waveforms, lengths)
        finally:
            self.train(was_training)

    def spec(self) -> dict[str, Any]:
        """What the network is made of, in plain values: `model` and `front_end` (name, options), `sample_rate`."""
        return {
            "model": {"name": self._model["name"], "options": _plain(self._model["options"])},
            "front_end": {"name": self._front_end["name"], "options": _plain(self._front_end["options"])},
            "sample_rate": self.sample_rate,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> "SpeakerNet":
        """The network that `spec` describes, with fresh weights.

        Raises:
            ValueError: the spec names what this version does not know.
        """
        model_options = dict(spec["model"]["options"])
        return cls(
            model=spec["model"]["name"],
            pooling=model_options.pop("pooling"),
            embedding_dim=model_options.pop("embedding_dim"),
            model_options=model_options,
            front_end=spec["front_end"]["name"],
            front_end_options=spec["front_end"]["options"],
            sample_rate=spec["sample_rate"],
        )

    def weights(self) -> dict[str, Tensor]:
        """The state dictionary without what only training needs (SpecAugment's position in its draws)."""
        state = self.state_dict()
        return {key: value for key, value in state.items() if not key.startswith(SPEC_AUGMENT_PREFIX)}


def _plain(options: Any) -> Any:
    """Tuples become lists, mappings dictionaries: what YAML and `weights_only=True` both read back unchanged."""
    if isinstance(options, Mapping):
        return {key: _plain(value) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [_plain(value) for value in options]
    return options
