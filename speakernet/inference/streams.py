"""Live audio: a state for each second of it, whose embedding is that of the speech so far."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from speakernet.data.audio import AudioError, audio_of_array
from speakernet.data.speech import find_speech
from speakernet.inference.decision import Decision, DecisionLimits, DecisionRule
from speakernet.inference.protocol import Verifier
from speakernet.inference.recordings import Array, array_of, open_recording

STEP_SECONDS = 1.0
"""Time between two states of a stream."""
WINDOW_SECONDS = 10.0
"""A stream embeds this much audio at a time; earlier audio is represented by its embedding."""


@dataclass(frozen=True)
class StreamState:
    """The state of a stream after some seconds.

    Attributes:
        seconds: audio received so far.
        embedding: (1, dim) of its speech, unnormalised; None as long as nobody has spoken.
        score: score against the enrolled embedding; None if nobody is enrolled or has spoken.
        decision: the decision on this score; None without a score, or without a calibration or
            threshold.
        speech_seconds: speech received so far.
    """

    seconds: float
    embedding: np.ndarray | None
    score: float | None = None
    decision: Decision | None = None
    speech_seconds: float = 0.0


class SpeakerStream:
    """A stream of audio, created by `SpeakerVerifier.stream`; not thread-safe.

    During the first ten seconds, the speech so far is embedded as one recording. After that, the
    embedding of each full ten-second window is kept, and embeddings are averaged by seconds of
    speech. Memory does not grow with the stream.
    """

    def __init__(
        self,
        verifier: Verifier,
        sample_rate: int,
        enrolled: Array | None,
        enrolled_seconds: float,
        limits: DecisionLimits,
    ) -> None:
        # Check the arguments now rather than after the first second.
        audio_of_array(np.zeros(1, dtype=np.float32), sample_rate, sample_rate)
        self.verifier = verifier
        self.sample_rate = int(sample_rate)
        self.enrolled = enrolled
        self.enrolled_seconds = enrolled_seconds
        """Speech in the enrolled recording."""
        self.limits = limits
        self.decides = verifier.is_calibrated or any(value is not None for value in limits.values())
        if enrolled is not None:
            verifier.compare(enrolled, enrolled)
        if self.decides:
            verifier.decide(0.0, **limits)
        self._chunks: list[np.ndarray] = []
        """Samples of the current window."""
        self._num_samples = 0
        self._closed_seconds = 0.0
        self._closed = 0.0, np.zeros((1, verifier.embedding_dim), dtype=np.float32)
        """Of the full windows: seconds of speech, and the sum of embedding times these seconds."""

    @property
    def seconds(self) -> float:
        """Seconds received so far."""
        return self._closed_seconds + self._num_samples / self.sample_rate

    def add(self, chunk: Any) -> list[StreamState]:
        """Add samples; returns a state for each full second.

        Args:
            chunk: (samples,) or (samples, channels) of any length, floating point in -1..1 or
                int16.

        Raises:
            AudioError: a wrong type or shape, NaN, or samples far beyond -1..1; the chunk is then
                ignored.
        """
        chunk = array_of(chunk)
        if not chunk.size:
            return []
        # Kept at its own rate: resampling chunk by chunk would click at every seam.
        samples = audio_of_array(chunk, self.sample_rate, self.sample_rate)
        # Chunks come in any size, from a word to minutes, but states come once a second. So the
        # chunk is split at full seconds. After each, all of the current window is embedded again:
        # up to ten seconds of audio for each new one, which is wasteful but needs no network that
        # can be continued. When the window is full, its embedding replaces its samples, weighted
        # by seconds of speech. The border of a window may cut a word in two; what that
        # costs has not been measured.
        states = []
        step = round(STEP_SECONDS * self.sample_rate)
        for part in np.split(samples, range(step - self._num_samples % step, len(samples), step)):
            self._chunks.append(part)
            self._num_samples += len(part)
            if self._num_samples % step == 0:
                so_far = self._speech_so_far()
                states.append(self._state(*so_far))
                if self._num_samples >= round(WINDOW_SECONDS * self.sample_rate):
                    # Keep the embedding of a full window instead of its samples.
                    self._closed_seconds = self.seconds
                    self._closed = so_far
                    self._chunks = []
                    self._num_samples = 0
        return states

    def finish(self) -> StreamState:
        """The state after everything received, including the last part of a second; AudioError
        without speech.
        """
        if not self.seconds:
            raise AudioError("the stream had no samples; is the microphone on, or the file empty?")
        state = self._state(*self._speech_so_far())
        if not state.speech_seconds:
            raise AudioError(
                f"the stream: no speech was found in {self.seconds:.2f} s of audio; is the "
                "microphone on?"
            )
        return state

    def rule_for(self, speech_seconds: float) -> DecisionRule:
        """The rule after this much speech."""
        return self.verifier.rule.for_seconds(speech_seconds, self.enrolled_seconds)

    def _speech_so_far(self) -> tuple[float, np.ndarray]:
        """Seconds of speech, and the sum of embedding times these seconds."""
        seconds, total = self._closed
        if not self._num_samples:
            return seconds, total
        chunks = np.concatenate(self._chunks)
        # Searched and cut exactly as a file is, so that the answer equals that of `verify`.
        window = open_recording(chunks, self.sample_rate, self.verifier.sample_rate)
        speech = find_speech(window.read(), window.sample_rate)
        if len(speech) and self.verifier.cuts_speech:
            window = window.cut_to(speech)
        # A word that has only begun may still be too short for the network.
        if not len(speech) or window.num_samples < self.verifier.min_samples:
            return seconds, total
        spoken = float(np.diff(speech).sum())
        return seconds + spoken, total + spoken * self.verifier.embed(window)

    def _state(self, speech_seconds: float, total: np.ndarray) -> StreamState:
        if not speech_seconds:
            return StreamState(self.seconds, None)
        embedding = total / speech_seconds
        score = None
        decision = None
        if self.enrolled is not None:
            score = self.verifier.compare(embedding, self.enrolled)
            if self.decides:
                decision = self.rule_for(speech_seconds).decide(
                    score, **self.limits, speech_seconds=min(speech_seconds, self.enrolled_seconds)
                )
        return StreamState(self.seconds, embedding, score, decision, speech_seconds)
