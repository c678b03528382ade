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
from speakernet.models.layers import is_safe_in_channels_last
from speakernet.models.tables import MODELS, POOLINGS
from speakernet.registry import create, lookup

SPEC_AUGMENT_PREFIX = "spec_augment."
LONGEST_MINIMUM_SECONDS = 2
"""No network needs more than this to give an embedding."""


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
        self.pooling = create(POOLINGS, pooling_name, {"channels": self.trunk.out_channels}, "pooling")
        has_norm = trunk_class.has_norm_after_pooling
        self.norm: nn.Module = nn.BatchNorm1d(self.pooling.dim) if has_norm else nn.Identity()
        self.embedding = nn.Linear(self.pooling.dim, embedding_dim)

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
        hidden, frame_lengths = self.trunk(features, frame_lengths)  # (batch, channels, frames)
        # Sums over hundreds of frames and the last projection lose too much in 16 bits.
        with torch.autocast(waveforms.device.type, enabled=False):
            return self.embedding(self.norm(self.pooling(hidden.float(), frame_lengths)))

    @property
    def min_samples(self) -> int:
        """Samples of the shortest waveform that can be embedded; what is shorter can be repeated from its start."""
        # Most trunks take a single frame.
        needed = getattr(self.trunk, "min_frames", 1)
        frames = self.front_end.num_frames(torch.arange(LONGEST_MINIMUM_SECONDS * self.sample_rate))
        return int((frames >= needed).nonzero()[0])

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
