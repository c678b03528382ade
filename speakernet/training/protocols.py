"""What training asks of the parts it is given.

The real classes are in `data`, `losses`, `models` and `frontend`, which training does not import.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn


class PlainBatch(Protocol):
    """What a step needs from a batch whose draws were announced."""

    waveforms: Tensor
    """(batch, samples) float32."""
    labels: Tensor
    """(batch,) int64."""
    rank_sizes: tuple[int, ...]
    """Number of utterances of the whole batch on each rank."""


class Batch(PlainBatch, Protocol):
    """What a step needs from a batch; the real class is in `speakernet.data`."""

    indices: Tensor
    """(batch,) int64 on the CPU, rows of the training list."""
    draw_key: int
    """Keys the random draws of this epoch, together with `draw_rows`."""

    @property
    def draw_rows(self) -> np.ndarray:
        """(batch,) int64: key the random draws of each utterance; repeats in an epoch have
        different ones.
        """


class Loader(Protocol):
    """What the trainer needs from a loader; the real class is in `speakernet.data.loader`."""

    utterances_per_speaker: int
    """Neighbouring utterances in a batch that belong to one speaker."""

    @property
    def identity(self) -> Mapping[str, int]:
        """Checksums of what it loads."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) of the next iteration."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position inside the epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; ValueError if the batches of the epoch have changed."""

    def file_names(self, indices: Tensor) -> list[str]:
        """The files of some utterances."""

    def epoch_report(self) -> Mapping[str, Any]:
        """Statistics of the epoch: files skipped, cache hits …"""


class Loss(Protocol):
    """What training asks of a loss beyond any module; `losses.classification.SpeakerLoss` has it
    all.
    """

    is_metric: bool
    """Whether its input is (speakers, utterances, dim)."""
    sees_all_ranks: bool
    """Whether each rank computes the same loss from the embeddings of all ranks."""
    margin: Any
    """The margin, a number or a 0-d tensor; None if the loss has none."""

    def set_margin(self, margin: Any) -> None:
        """Change the margin before a step."""

    def __call__(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy in percent, both 0-d."""

    def train(self, mode: bool = True) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...


class TunedTrunk(Protocol):
    """What training asks of a network's `trunk`; the real class is `models.layers.Trunk`."""

    is_pretrained: bool
    """Whether it starts from published weights; it then takes random decisions in Python."""

    def begin_epoch(self, epoch: int) -> None:
        """Set what is trained in this epoch (from 0)."""

    def learning_rate_factors(self) -> Iterable[tuple[nn.Parameter, float]]:
        """Parameters that learn more slowly than the rest, each with its factor."""
