"""What lies where in a packed corpus, and by what two copies of one are known for the same."""

import hashlib
from dataclasses import dataclass

import numpy as np

from speakernet.data.lists import StringTable


@dataclass(frozen=True)
class PackedIndex:
    """What lies where in a packed corpus.

    Attributes:
        sample_rate: Hz.
        names: every utterance, in the order of its samples.
        sample_offsets: first sample of each utterance and the end of the last, int64 (utterances + 1,).
        checksums: CRC-32 of each utterance's bytes, uint32 (utterances,).
        digest: SHA-256 of the file that all this is in.
    """

    sample_rate: int
    names: StringTable
    sample_offsets: np.ndarray
    checksums: np.ndarray
    digest: str

    @property
    def num_samples(self) -> int:
        """Samples of all utterances together."""
        return int(self.sample_offsets[-1])

    @property
    def content_digest(self) -> str:
        """SHA-256 of rate, names, lengths and the checksums of the samples: the same for the same content."""
        found = hashlib.sha256(str(self.sample_rate).encode())
        for column in (self.names.offsets, self.names.content, self.sample_offsets, self.checksums):
            found.update(column.tobytes())
        return found.hexdigest()
