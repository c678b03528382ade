"""What enrolment, identification, streams and conversations need of a verifier.

`SpeakerVerifier` has all of it and imports these files; they must not import it in turn.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from speakernet.evaluation.scoring import Plda
from speakernet.inference.decision import Decision, DecisionRule
from speakernet.inference.recordings import Array, Audio, Heard, Recording


class Verifier(Protocol):
    """See the attributes and methods of `SpeakerVerifier`."""

    min_samples: int
    rule: DecisionRule
    mean: np.ndarray | None
    plda: Plda | None
    embedding_dim: int
    sample_rate: int
    is_calibrated: bool
    cuts_speech: bool

    def hear(
        self,
        audio: Audio | Heard,
        sample_rate: int | None = None,
        *,
        min_speech_seconds: float = ...,
    ) -> Heard:
        """Open a recording for a decision."""
        ...

    def embed(self, audio: Audio | Sequence[Audio]) -> Any:
        """Embed one recording or several, (recordings, dim)."""
        ...

    def embed_windows(
        self, recording: Recording, edges: np.ndarray, description: str = ""
    ) -> np.ndarray:
        """Embed windows of a recording, (windows, dim)."""
        ...

    def compare(self, first: Array, second: Array) -> float:
        """Score two embeddings."""
        ...

    def decide(self, score: float, **limits: Any) -> Decision:
        """Decide on a score."""
        ...
