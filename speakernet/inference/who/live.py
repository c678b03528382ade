"""Find who speaks in a stream: read a pipe and print a line when a turn ends.

Speech is detected twice a second in the audio that belongs to no turn yet. When a pause or
`LONGEST_SECONDS` ends a stretch, its windows are embedded and clustered; each cluster goes to the
closest speaker so far, or to a new one. Lines are never revised.
"""

import logging
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from speakernet.data.audio import audio_of_array
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.people import PeopleStore
from speakernet.inference.recordings import chunks_of, open_piped, open_recording
from speakernet.inference.who.clustering import centres, cluster
from speakernet.inference.who.conversation import (
    Turn,
    bound_of,
    embed_stretches,
    limits_of_strangers,
    sections,
    speaker_of,
    windows_of,
)
from speakernet.inference.who.speech import find_speech

STEP_SECONDS = 0.5
PAUSE_SECONDS = 0.5
"""Silence that ends a turn, which is therefore the minimum latency."""
LONGEST_SECONDS = 20.0
SAME_SPEAKER = 0.45
"""A cluster with at least this cosine to an earlier speaker belongs to that speaker."""

logger = logging.getLogger(__name__)


class LiveSpeakers:
    """The turns of a stream, as they end; not thread-safe.

    Args:
        verifier: embeds windows and decides on names.
        sample_rate: sample rate of the chunks in Hz.
        store: a store of people; None names nobody.
        max_speakers: upper bound of the number of speakers.
        false_accept_rate: as for `who_speaks`.
        threshold: as for `who_speaks`.
    """

    def __init__(
        self,
        verifier: Any,
        sample_rate: int,
        store: PeopleStore | None = None,
        *,
        max_speakers: int | None = None,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
    ) -> None:
        self.verifier = verifier
        self.sample_rate = sample_rate
        self.store = store
        self.limits = limits_of_strangers(false_accept_rate, threshold)
        self.max_speakers = bound_of(max_speakers)
        self._has_warned = False
        self.begin_seconds = 0.0
        """Start of the audio that is kept; earlier audio is finished."""
        self._chunks: list[np.ndarray] = []
        self._num_samples = self._num_seen = 0
        self._sums = np.zeros((0, verifier.embedding_dim))
        self._seconds: list[float] = []

    def add(self, chunk: np.ndarray) -> list[Turn]:
        """Add (samples,) or (samples, channels); returns the turns that have ended."""
        samples = audio_of_array(chunk, self.sample_rate, self.sample_rate)
        self._chunks.append(samples)
        self._num_samples += len(samples)
        if self._num_samples - self._num_seen < STEP_SECONDS * self.sample_rate:
            return []
        return self._ended(is_last=False)

    def finish(self) -> list[Turn]:
        """End the stream; returns the remaining turns."""
        return self._ended(is_last=True)

    def _ended(self, *, is_last: bool) -> list[Turn]:
        if not self._num_samples:
            return []
        kept = np.concatenate(self._chunks)
        recording = open_recording(kept, self.sample_rate, self.verifier.sample_rate)
        speech, _ = find_speech(recording)
        is_over = (
            (speech[:, 1] <= recording.seconds - PAUSE_SECONDS)
            | is_last
            | (np.diff(speech)[:, 0] > LONGEST_SECONDS)
        )
        # Stretches end in order: one that continues holds back those after it.
        ended = speech[: len(speech) if is_over.all() else int(is_over.argmin())]
        least = self.verifier.net.min_samples
        turns = (
            list(self._turns(recording, ended))
            if len(ended) and recording.num_samples >= least
            else []
        )
        # Keep a second before speech that continues, so that its onset is detected again.
        begun = speech[len(ended), 0] - 1.0 if len(ended) < len(speech) else recording.seconds - 1.0
        cut = round(max(begun, ended[-1, 1] if len(ended) else 0.0, 0.0) * self.sample_rate)
        self._chunks = [kept[cut:]]
        self._num_samples = len(kept) - cut
        self._num_seen, self.begin_seconds = (
            self._num_samples,
            self.begin_seconds + cut / self.sample_rate,
        )
        return turns

    def _turns(self, recording: Any, speech: np.ndarray) -> Iterator[Turn]:
        windows = windows_of(speech)
        embeddings = embed_stretches(self.verifier, recording, windows)
        units = mean_embeddings(embeddings, self.verifier.mean)
        lengths = np.diff(windows)[:, 0]
        labels = cluster(units, max_speakers=self.max_speakers)
        rows = [self._row(centre) for centre in centres(units, labels, lengths)]
        for label, row in enumerate(rows):
            weighted = embeddings[labels == label] * lengths[labels == label, None]
            self._sums[row] += weighted.sum(axis=0)
            self._seconds[row] += float(lengths[labels == label].sum())
        for start, stop, label in sections(speech, windows, labels):
            row = rows[label]
            mean = self._sums[row] / self._seconds[row]
            seconds = np.array([self._seconds[row]])
            name = speaker_of(
                mean[None], seconds, row, self.store, self.verifier.rule, self.limits
            ).name
            yield Turn(self.begin_seconds + start, self.begin_seconds + stop, name)

    def _row(self, unit: np.ndarray) -> int:
        """The row of the closest speaker so far, or of a new one."""
        scores = (
            mean_embeddings(self._sums.astype(np.float32), self.verifier.mean) @ unit
            if len(self._sums)
            else []
        )
        is_known = len(scores) > 0 and max(scores) >= SAME_SPEAKER
        if is_known or len(scores) >= self.max_speakers:
            if not is_known and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "more than %d people seem to speak, so some share a name; raise --max-speakers",
                    self.max_speakers,
                )
            return int(np.argmax(scores))
        self._sums = np.concatenate([self._sums, np.zeros((1, self._sums.shape[1]))])
        self._seconds.append(0.0)
        return len(self._seconds) - 1


def print_turns(verifier: Any, file: BinaryIO, store: PeopleStore | None, **how: Any) -> list[str]:
    """Print `begin end speaker` as each turn of a piped WAV ends; returns the last lines."""
    info, begun = open_piped(file)
    live = LiveSpeakers(verifier, info.sample_rate, store, **how)
    for chunk in chunks_of(file, info, begun):
        for turn in live.add(chunk):
            print(line_of(turn), flush=True)
    return [line_of(turn) for turn in live.finish()]


def line_of(turn: Turn) -> str:
    """Format a turn, in seconds from the beginning of the stream."""
    return f"{turn.start:.2f} {turn.stop:.2f} {turn.speaker}"
