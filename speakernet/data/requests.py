"""What is asked of whoever makes batches, and what is answered: a few hundred bytes that travel between processes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch

from speakernet.data.sources import RowReader


@dataclass
class BatchRequest:
    """What one batch is to hold.

    Attributes:
        epoch: counted from 0.
        rows: rows of the training list, (batch,).
        speeds: index into the speed factors, (batch,).
        num_samples: length of the crops.
        batch: of the epoch, counted from 0.
        slot: where the result goes, for the loader's ring.
    """

    epoch: int
    rows: np.ndarray
    speeds: np.ndarray
    num_samples: int
    batch: int = 0
    slot: int = 0


@dataclass
class BatchReport:
    """What came of a request: the rows that were used in the end, and what went wrong."""

    rows: np.ndarray
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # As text: an exception would arrive from a worker with the worker's traceback around it.
    error: str = ""
    slot: int = 0
    read_seconds: float = 0.0


class CropMaker(Protocol):
    """Makes the crops of batches: in this process, in worker processes, or on the training device."""

    @property
    def reader(self) -> RowReader:
        """What the crops are read from."""

    @property
    def speeds(self) -> Sequence[Fraction]:
        """The speed factors that `BatchRequest.speeds` points into."""

    @property
    def augments(self) -> bool:
        """Whether the crops come disturbed already."""

    @property
    def changes_speed(self) -> bool:
        """Whether the crops come at their speeds; else each row holds the samples that its speed needs."""

    def run(self, requests: list[BatchRequest]) -> Iterator[tuple[BatchRequest, torch.Tensor, BatchReport]]:
        """Each request with its crops (batch, samples), which are valid until the next one, and report, in order."""

    def close(self) -> None:
        """Give back what is held between epochs."""
