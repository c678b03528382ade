"""What the trainer needs of the parts that other rooms make: a batch and a loader. Described, not imported."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch


class BatchLike(Protocol):
    """What a step needs of a batch; `speakernet.data` has the real one."""

    waveforms: torch.Tensor
    """(batch, samples) float32."""
    labels: torch.Tensor
    """(batch,) int64."""
    indices: torch.Tensor
    """(batch,) int64 on the CPU, rows of the training list."""
    shares: tuple[int, ...]
    """Utterances that each process has of the whole batch, in the order of the processes."""
    draw_key: int
    """Of the random draws in this epoch, together with the rows."""

    @property
    def warps(self) -> np.ndarray:
        """(batch,) int64: with which vocal tract each utterance is heard (`HasVocalTracts`)."""


@runtime_checkable
class DrawsByRow(Protocol):
    """A part of the network whose random draws are keyed by utterance; `speakernet.frontend` has the real ones."""

    def key_draws(self, key: int, rows: np.ndarray) -> None:
        """Say which utterances the next forward pass is over."""

    def room(self) -> tuple[torch.Tensor, ...]:
        """Tensors like those that the last pass drew; none where it drew nothing."""

    def take_from(self, room: tuple[torch.Tensor, ...]) -> None:
        """Let the next pass find its draws there."""

    def draw_into(self, room: tuple[torch.Tensor, ...]) -> None:
        """Draw for the utterances that were announced, as the last pass did, into tensors that stay where they are."""


@runtime_checkable
class HasVocalTracts(Protocol):
    """A part of the network that hears utterances with other vocal tracts; `speakernet.frontend` has the real one."""

    def take_warps(self, warps: np.ndarray) -> None:
        """Say with which the next forward pass hears each utterance, (batch,)."""


class Loader(Protocol):
    """What the trainer needs of a loader; `speakernet.data.loader` has the real one."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) that the next iteration gives."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position inside the epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ValueError: the epoch's batches are not those any more in which the position was taken.
        """

    def put_back(self, count: int) -> None:
        """Go back by so many of the batches that were handed out; the next iteration begins with them."""

    def stand_in(self) -> Any:
        """NaN in place of this process's share of the next batch, which could not be made: the step is undone by it."""

    def file_names(self, indices: torch.Tensor) -> list[str]:
        """The files of some utterances."""

    def epoch_report(self) -> Mapping[str, Any]:
        """What happened in the epoch: files skipped, cache hits …"""
