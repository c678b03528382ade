"""Speech as it comes: after each second what is known of the speaker by now.

What was heard so far is embedded as a whole, as a recording of it would be; of streams of more than ten seconds each
window of ten is embedded once, and the embeddings are averaged by their length. Memory does not grow with the stream.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from speakernet.data.audio import AudioError, audio_of_array
from speakernet.inference.decision import Decision

STEP_SECONDS = 1.0
"""How often there is something to say."""
WINDOW_SECONDS = 10.0
"""Heard at once; what lies before counts by its embedding."""


class Embedder(Protocol):
    """What a stream asks of a verifier."""

    @property
    def is_calibrated(self) -> bool:
        """Whether it decides without a threshold of the caller's."""

    def embed(self, audio: Any, *, sample_rate: int | None = None) -> Any:
        """Samples to (1, dim)."""

    def compare(self, first: Any, second: Any) -> float:
        """The score of two embeddings."""

    def decide(
        self, score: float, *, false_accept_rate: float | None = None, threshold: float | str | None = None
    ) -> Decision:
        """What a score says."""


@dataclass(frozen=True)
class StreamState:
    """What is known after so many seconds.

    Attributes:
        seconds: that were heard.
        embedding: (1, dim) of all of them, as the network gives it.
        score: cosine with the enrolled embedding; None where nobody is enrolled.
        decision: of that score. Its log-likelihood ratio is that of everything heard so far. None where nobody is
            enrolled, or the model file is not calibrated and no threshold was given.
    """

    seconds: float
    embedding: np.ndarray
    score: float | None = None
    decision: Decision | None = None


class SpeakerStream:
    """One stream of audio, from its first sample; `SpeakerVerifier.stream` makes it. Not for several threads.

    Args:
        verifier: embeds, compares and decides.
        sample_rate: Hz, of the chunks.
        enrolled: (dim,) or (1, dim) of the speaker that the stream is compared with; None only embeds.
        false_accept_rate: as `SpeakerVerifier.decide` takes it.
        threshold: likewise.

    Raises:
        ValueError: a rate that none is, or an embedding or threshold that the model does not have.
    """

    def __init__(
        self,
        verifier: Embedder,
        sample_rate: int,
        enrolled: np.ndarray | Tensor | None = None,
        *,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> None:
        # Refused now, not after the first second.
        audio_of_array(np.zeros(1, dtype=np.float32), sample_rate, sample_rate)
        self.verifier = verifier
        self.sample_rate = int(sample_rate)
        self.enrolled = enrolled
        self.limits: dict[str, Any] = {"false_accept_rate": false_accept_rate, "threshold": threshold}
        self.decides = verifier.is_calibrated or any(value is not None for value in self.limits.values())
        if enrolled is not None:
            verifier.compare(enrolled, enrolled)
        if self.decides:
            verifier.decide(0.0, **self.limits)
        self._chunks: list[np.ndarray] = []
        """Samples of the window that is not full."""
        self._held = 0
        self._closed_seconds = 0.0
        self._closed_sum: np.ndarray | None = None
        """Embeddings of full windows times their seconds."""

    @property
    def seconds(self) -> float:
        """That were heard."""
        return self._closed_seconds + self._held / self.sample_rate

    def add(self, chunk: Any) -> list[StreamState]:
        """Hear more; gives a state for each second that became full.

        Args:
            chunk: (samples,) or (samples, channels) of any length, floating point in -1..1 or int16.

        Raises:
            AudioError: another type or shape, NaN, or samples far beyond -1..1; the chunk is then not heard.
        """
        chunk = np.asarray(chunk)
        if chunk.size == 0:
            return []
        # At its own rate: resampled chunk by chunk, every seam would click.
        samples = audio_of_array(chunk, self.sample_rate, self.sample_rate)
        states = []
        step = round(STEP_SECONDS * self.sample_rate)
        while len(samples):
            missing = step - self._held % step
            self._chunks.append(samples[:missing])
            self._held += len(self._chunks[-1])
            samples = samples[missing:]
            if self._held % step == 0:
                states.append(self._state())
                if self._held >= round(WINDOW_SECONDS * self.sample_rate):
                    self._close_window(states[-1])
        return states

    def finish(self) -> StreamState:
        """The state after everything that was heard, also the last part of a second.

        Raises:
            AudioError: nothing was heard, or less than the network can hear.
        """
        if not self.seconds:
            raise AudioError("the stream held no samples; is the microphone on, or the file empty?")
        return self._state()

    def _state(self) -> StreamState:
        total, seconds = self._closed_sum, self._held / self.sample_rate
        if self._held:
            try:
                embedding = self.verifier.embed(np.concatenate(self._chunks), sample_rate=self.sample_rate)
            except AudioError:
                # Behind full windows the last moment may be too short to be heard by itself, and changes nothing.
                if total is None:
                    raise
                seconds = 0.0
            else:
                total = embedding * seconds if total is None else total + embedding * seconds
        assert total is not None
        embedding = total / (self._closed_seconds + seconds)
        if self.enrolled is None:
            return StreamState(self.seconds, embedding)
        score = self.verifier.compare(embedding, self.enrolled)
        decision = self.verifier.decide(score, **self.limits) if self.decides else None
        return StreamState(self.seconds, embedding, score, decision)

    def _close_window(self, state: StreamState) -> None:
        """Keep the window's embedding instead of its samples."""
        self._closed_seconds = self.seconds
        self._closed_sum = state.embedding * self._closed_seconds
        self._chunks, self._held = [], 0
