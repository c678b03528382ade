"""Find who speaks in a stream: read a pipe and print a line when a turn ends.

Speech is detected twice a second in the audio that belongs to no turn yet. When a pause or
`LONGEST_SECONDS` ends a stretch, its windows are embedded and clustered; each cluster goes to the
closest speaker so far, or to a new one. Lines are never revised.
"""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from speakernet.data.audio import audio_of_array
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.decision import DecisionLimits
from speakernet.inference.people import PeopleStore
from speakernet.inference.recordings import Recording, chunks_of, open_piped, open_recording
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.inference.who.clustering import centres, cluster
from speakernet.inference.who.conversation import (
    Turn,
    bound_of,
    cut_sections,
    embed_stretches,
    namer_of,
    speaker_of,
    warn_of_more,
    windows_of,
)
from speakernet.inference.who.speech import find_speech

STEP_SECONDS = 0.5
PAUSE_SECONDS = 0.5
"""Silence that ends a turn, which is therefore the minimum latency."""
# A speaker who never pauses gets a line after this time.
LONGEST_SECONDS = 20.0
SAME_SPEAKER = 0.45
"""A cluster with at least this cosine to an earlier speaker belongs to that speaker."""


class LiveSpeakers:
    """The turns of a stream, as they end; not thread-safe.

    Args:
        verifier: embeds windows and decides on names.
        sample_rate: sample rate of the chunks in Hz.
        store: a store of people; None names nobody.
        limits: of naming people, as for `SpeakerVerifier.who`.
        max_speakers: upper bound of the number of speakers.
    """

    def __init__(
        self,
        verifier: SpeakerVerifier,
        sample_rate: int,
        store: PeopleStore | None = None,
        limits: DecisionLimits | None = None,
        max_speakers: int | None = None,
    ) -> None:
        self.verifier = verifier
        self.sample_rate = sample_rate
        self.namer = namer_of(verifier, store, limits or {})
        self.max_speakers = bound_of(max_speakers)
        self._has_warned = False
        self.begin_seconds = 0.0
        """Start of the audio that is kept; earlier audio is finished."""
        self._chunks: list[np.ndarray] = []
        self._num_samples = self._num_seen = 0
        self._sums: list[np.ndarray] = []
        """Of each speaker so far: the sum of embedding times seconds, (dim,)."""
        self._seconds: list[float] = []

    def add(self, chunk: np.ndarray) -> list[Turn]:
        """Add (samples,) or (samples, channels); returns the turns that have ended."""
        samples = audio_of_array(chunk, self.sample_rate, self.sample_rate)
        self._chunks.append(samples)
        self._num_samples += len(samples)
        if self._num_samples - self._num_seen < STEP_SECONDS * self.sample_rate:
            return []
        return self._end_turns(is_last=False)

    def finish(self) -> list[Turn]:
        """End the stream; returns the remaining turns."""
        return self._end_turns(is_last=True)

    def _end_turns(self, *, is_last: bool) -> list[Turn]:
        if not self._num_samples:
            return []
        # All audio that belongs to no turn yet is searched again, because the end of a stretch is
        # only known once a pause follows it. What has ended is turned into lines and forgotten;
        # the memory of a voice is the mean of its embeddings so far. A line that was wrong stays
        # wrong: a program that reads the pipe may have acted on it.
        kept = np.concatenate(self._chunks)
        recording = open_recording(kept, self.sample_rate, self.verifier.sample_rate)
        speech, _, _ = find_speech(recording)
        # A stretch at the end of what has been read may continue in the next chunk.
        is_over = speech[:, 1] <= recording.seconds - PAUSE_SECONDS
        is_over |= is_last | (np.diff(speech)[:, 0] > LONGEST_SECONDS)
        # Stretches end in order: one that continues holds back those after it.
        num_ended = int(np.append(is_over, False).argmin())
        ended = speech[:num_ended]
        turns = []
        if num_ended and recording.num_samples >= self.verifier.min_samples:
            turns = list(self._turns(recording, ended))
        # Keep a second before speech that continues, so that its onset is detected again.
        begun = np.append(speech[num_ended:, 0], recording.seconds)[0] - 1.0
        cut = round(max(begun, ended.max(initial=0.0)) * self.sample_rate)
        self._chunks = [kept[cut:]]
        self._num_samples = self._num_seen = len(kept) - cut
        self.begin_seconds += cut / self.sample_rate
        return turns

    def _turns(self, recording: Recording, speech: np.ndarray) -> Iterator[Turn]:
        windows = windows_of(speech)
        embeddings = embed_stretches(self.verifier, recording, windows)
        units = mean_embeddings(embeddings, self.verifier.mean)
        lengths = np.diff(windows)[:, 0]
        labels, _ = cluster(units, max_speakers=self.max_speakers)
        # Two clusters of this stretch may go to one earlier speaker; the other way round, a cluster
        # with two voices in it moves the mean of one of them.
        rows = [self._row(centre) for centre in centres(units, labels, lengths)]
        for label, row in enumerate(rows):
            is_in = labels == label
            self._sums[row] += (embeddings[is_in] * lengths[is_in, None]).sum(axis=0)
            self._seconds[row] += float(lengths[is_in].sum())
        for start, stop, label in cut_sections(speech, windows, labels):
            row = rows[label]
            seconds = self._seconds[row]
            mean = self._sums[row] / seconds
            # Looked up for each line, because the decision gets more certain with more speech.
            speaker = speaker_of(mean[None], np.ones(1), seconds, row, self.namer)
            yield Turn(self.begin_seconds + start, self.begin_seconds + stop, speaker.name)

    def _row(self, unit: np.ndarray) -> int:
        """The row of the closest speaker so far, or of a new one."""
        if self._sums:
            sums = np.array(self._sums, dtype=np.float32)
            scores = mean_embeddings(sums, self.verifier.mean) @ unit
            is_known = scores.max() >= SAME_SPEAKER
            # With the most speakers allowed, a new voice is counted as the nearest one.
            if is_known or len(scores) >= self.max_speakers:
                if not is_known and not self._has_warned:
                    self._has_warned = True
                    warn_of_more(self.max_speakers)
                return int(scores.argmax())
        self._sums.append(np.zeros(self.verifier.embedding_dim))
        self._seconds.append(0.0)
        return len(self._seconds) - 1


def print_turns(
    verifier: SpeakerVerifier,
    file: BinaryIO,
    store: PeopleStore | None,
    limits: DecisionLimits,
    max_speakers: int | None,
) -> list[str]:
    """Print `begin end speaker` as each turn of a piped WAV ends; returns the last lines."""
    info, first_bytes = open_piped(file)
    live = LiveSpeakers(verifier, info.sample_rate, store, limits, max_speakers)
    for chunk in chunks_of(file, info, first_bytes):
        for turn in live.add(chunk):
            print(line_of(turn), flush=True)
    return [line_of(turn) for turn in live.finish()]


def line_of(turn: Turn) -> str:
    """Format a turn, in seconds from the beginning of the stream."""
    return f"{turn.start:.2f} {turn.stop:.2f} {turn.speaker}"
