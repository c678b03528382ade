"""Find who speaks when: detect speech, embed windows, cluster them, refine borders, build turns,
name speakers.

A recording is read piece by piece; only one embedding per 0.75 s of speech stays in memory. Names
come from a store of people, decided as in `identify`; only `enroll_speaker` adds anybody to it.
"""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.levels import FRAME_SECONDS, frame_powers
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.identification import (
    Identification,
    identify_embedding,
    open_set_threshold,
)
from speakernet.inference.people import PeopleStore
from speakernet.inference.recordings import Recording
from speakernet.inference.who.clustering import MAX_SPEAKERS, centres, cluster_up_to, runs
from speakernet.inference.who.speech import find_speech
from speakernet.terminal import Bar

WINDOW_SECONDS = 1.5
HOP_SECONDS = 0.75
MIN_WINDOW_SECONDS = 0.5
"""Shorter speech is embedded together with the audio around it."""
SAME_TURN_SECONDS = 0.3
"""A shorter pause does not end a turn."""
BORDER_SECONDS = 0.6
BORDER_WINDOW_SECONDS = 0.8
BORDER_STEP_SECONDS = 0.2
"""How far a border may move, how much is embedded around each candidate, and how far apart the
candidates are."""
STRANGERS_NAMED = 0.05
"""Default share of strangers that may get a name; higher than in `identify`, whose recordings are
cleaner."""
OVERLAP_SECONDS = 0.2
"""How far each voice continues beyond a border at which both speak."""
NEAR_SECONDS = 0.3
TURN_SECONDS = 3.0
LOUDER = 1.26
"""Both speak if the median power within NEAR_SECONDS of a border exceeds LOUDER times (1 dB) that
within TURN_SECONDS; if speech detection bridged a pause there, the power near it is lower."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """One speaker talking, from `start` to `stop` in seconds."""

    start: float
    stop: float
    speaker: str


@dataclass(frozen=True)
class Speaker:
    """One voice of a recording.

    Attributes:
        name: the person in the store, or `speaker 1`, `speaker 2`, … in the order in which they
            first speak.
        label: `speaker N`, even if the voice has a name.
        seconds: how long the voice speaks.
        posterior: probability of being that person, if everybody in the store and a stranger are
            equally likely beforehand; None without a name or a calibration.
        score: score of the closest person; None without a store or people in it.
        embedding: (dim,) mean of the network's output over the voice's windows.
        digest: SHA-256 of the embedding, by which the store recognises a duplicate.
    """

    name: str
    label: str
    seconds: float
    posterior: float | None
    score: float | None
    embedding: np.ndarray
    digest: str


@dataclass(frozen=True)
class Conversation:
    """Who speaks when in a recording.

    Attributes:
        recording: name of the recording.
        seconds: its duration.
        detector: how speech was detected, `silero-vad` or `energy`.
        speakers: in the order in which they first speak.
        turns: sorted by start; turns of different speakers may overlap.
        exclusive: the turns with one speaker at a time.
    """

    recording: str
    seconds: float
    detector: str
    speakers: tuple[Speaker, ...]
    turns: tuple[Turn, ...]
    exclusive: tuple[Turn, ...]

    @property
    def speech_seconds(self) -> float:
        """Seconds in which anybody speaks."""
        return sum(turn.stop - turn.start for turn in self.exclusive)


def who_speaks(
    verifier: Any,
    recording: Recording,
    store: PeopleStore | None = None,
    *,
    num_speakers: int | None = None,
    max_speakers: int | None = None,
    false_accept_rate: float | None = None,
    threshold: float | str | None = None,
) -> Conversation:
    """Implement `SpeakerVerifier.who`."""
    max_speakers = bound_of(max_speakers, num_speakers)
    limits = limits_of_strangers(false_accept_rate, threshold)
    if store is not None:
        # Fail before embedding, which takes a long time.
        open_set_threshold(verifier.rule, len(store), **limits)
    speech, detector = find_speech(recording)
    windows = windows_of(speech)
    if len(windows) < (num_speakers or 0):
        raise AudioError(
            f"{recording.name}: {num_speakers} speakers were requested, but "
            f"{np.diff(speech).sum():.1f} s of speech give only {len(windows)} windows; give fewer "
            "speakers, or no number"
        )
    if not len(windows):
        return Conversation(recording.name, recording.seconds, detector, (), (), ())
    embeddings = embed_stretches(verifier, recording, windows, "embedding")
    units = mean_embeddings(embeddings, verifier.mean)
    lengths = np.diff(windows)[:, 0]
    labels, has_more = cluster_up_to(units, num_speakers=num_speakers, max_speakers=max_speakers)
    if has_more:
        logger.warning(
            "%s: more than %d people seem to speak, so some share a name; raise --max-speakers "
            "(max_speakers in Python), or give --speakers",
            recording.name,
            max_speakers,
        )
    found = _named_once(
        [
            speaker_of(
                embeddings[labels == row], lengths[labels == row], row, store, verifier.rule, limits
            )
            for row in range(labels.max() + 1)
        ]
    )
    middle = centres(units, labels, lengths)
    single = _refined(verifier, recording, middle, sections(speech, windows, labels))
    names = [speaker.name for speaker in found]
    exclusive = joined([Turn(start, stop, names[row]) for start, stop, row in single])
    turns = _with_overlaps(recording, exclusive)
    seconds = [
        sum(turn.stop - turn.start for turn in turns if turn.speaker == name) for name in names
    ]
    speakers = tuple(
        replace(speaker, seconds=spoken) for speaker, spoken in zip(found, seconds, strict=True)
    )
    return Conversation(
        recording.name, recording.seconds, detector, speakers, tuple(turns), tuple(exclusive)
    )


def bound_of(max_speakers: int | None, num_speakers: int | None = None) -> int:
    """The upper bound of the number of speakers, after checking both numbers."""
    bound = MAX_SPEAKERS if max_speakers is None else max_speakers
    for option, number in (("--max-speakers", bound), ("--speakers", num_speakers)):
        if number is not None and number < 1:
            raise ValueError(f"{option} is {number}; expected at least 1")
    return bound


def limits_of_strangers(
    false_accept_rate: float | None, threshold: float | str | None
) -> dict[str, Any]:
    """The limits of naming people, as keyword arguments of `identify_embedding`."""
    if false_accept_rate is None and threshold is None:
        return {"false_accept_rate": STRANGERS_NAMED}
    return {"false_accept_rate": false_accept_rate, "threshold": threshold}


def _named_once(speakers: Sequence[Speaker]) -> list[Speaker]:
    """Keep each name only for its highest-scoring voice: a second one is more often a similar
    stranger.
    """
    best = {
        speaker.name: speaker
        for speaker in sorted(speakers, key=lambda speaker: speaker.score or 0.0)
    }
    return [
        speaker
        if best[speaker.name] is speaker
        else replace(speaker, name=speaker.label, posterior=None)
        for speaker in speakers
    ]


def windows_of(speech: np.ndarray) -> np.ndarray:
    """Evenly spaced windows in each stretch of speech, (windows, 2) seconds; a short stretch is one
    window.

    >>> windows_of(np.array([[0.0, 1.0], [2.0, 4.25]])).tolist()
    [[0.0, 1.0], [2.0, 3.5], [2.75, 4.25]]
    """
    found = []
    for start, stop in speech:
        last = max(start, stop - WINDOW_SECONDS)
        starts = np.linspace(start, last, int(np.ceil((last - start) / HOP_SECONDS)) + 1)
        found.append(np.stack([starts, np.minimum(starts + WINDOW_SECONDS, stop)], axis=1))
    return np.concatenate(found) if found else np.zeros((0, 2))


def embed_stretches(
    verifier: Any, recording: Recording, windows: np.ndarray, description: str = ""
) -> np.ndarray:
    """Embed windows, (windows, dim); those too short for the network or for a voice are widened."""
    rate = recording.sample_rate
    num_samples = recording.num_samples
    least = min(max(round(MIN_WINDOW_SECONDS * rate), verifier.net.min_samples), num_samples)
    edges = np.round(windows * rate).astype(np.int64)
    missing = np.maximum(least - (edges[:, 1] - edges[:, 0]), 0)
    starts = np.clip(edges[:, 0] - missing // 2, 0, num_samples - least)
    stops = np.clip(edges[:, 1], starts + least, num_samples)
    with Bar(description, len(windows), "window", is_shown=bool(description)) as bar:
        given = bar.over(zip(starts.tolist(), stops.tolist(), strict=True))
        return np.asarray(verifier.embed_windows(recording, given, len(windows)))


def sections(
    speech: np.ndarray, windows: np.ndarray, labels: np.ndarray
) -> list[tuple[float, float, int]]:
    """Start, stop and label of each section; the voice changes halfway between the middles of two
    windows.
    """
    found = []
    middles = windows.mean(axis=1)
    of_stretch = np.searchsorted(speech[:, 0], windows[:, 0], side="right") - 1
    for first, last in runs(of_stretch):
        start, stop = speech[of_stretch[first]]
        changes = runs(labels[first:last])
        borders = [
            (middles[first + begin - 1] + middles[first + begin]) / 2 for begin, _ in changes[1:]
        ]
        edges = [start, *borders, stop]
        found += [
            (float(edges[i]), float(edges[i + 1]), int(labels[first + b]))
            for i, (b, _) in enumerate(changes)
        ]
    return found


def _refined(
    verifier: Any, recording: Recording, middle: np.ndarray, single: list[tuple[float, float, int]]
) -> list[tuple[float, float, int]]:
    """Move each border to where short windows around it change from one voice to the other."""
    edges = np.array([(start, stop) for start, stop, _ in single])
    changes = np.flatnonzero(edges[1:, 0] == edges[:-1, 1])
    around = np.arange(
        -BORDER_SECONDS, BORDER_SECONDS + BORDER_STEP_SECONDS / 2, BORDER_STEP_SECONDS
    )
    times = edges[changes, 1, None] + around
    half = BORDER_WINDOW_SECONDS / 2
    windows = np.stack([times.ravel() - half, times.ravel() + half], axis=1)
    units = mean_embeddings(embed_stretches(verifier, recording, windows, "borders"), verifier.mean)
    cosines = (units @ middle.T).reshape(*times.shape, len(middle))
    for row, change in enumerate(changes.tolist()):
        before, after = (cosines[row, :, single[number][2]] for number in (change, change + 1))
        # The place that best separates the first voice before it from the second after it.
        place = int(np.cumsum(before - after).argmax())
        border = times[row, place] + BORDER_STEP_SECONDS / 2
        edges[change, 1] = edges[change + 1, 0] = np.clip(
            border, edges[change, 0], edges[change + 1, 1]
        )
    return [
        (float(start), float(stop), label)
        for (start, stop), (_, _, label) in zip(edges, single, strict=True)
    ]


def _with_overlaps(recording: Recording, exclusive: Sequence[Turn]) -> list[Turn]:
    """The turns, extended beyond each border at which both voices speak."""
    turns = list(exclusive)
    rate = recording.sample_rate
    for row, (before, after) in enumerate(itertools.pairwise(exclusive)):
        border = before.stop
        if not before.start < border == after.start < after.stop:
            continue
        start = max(before.start, border - TURN_SECONDS)
        stop = min(after.stop, border + TURN_SECONDS)
        powers = frame_powers(
            recording.read(round(start * rate), round((stop - start) * rate)), rate
        )
        distances = np.abs(start + FRAME_SECONDS * (np.arange(len(powers)) + 0.5) - border)
        if np.median(powers[distances < NEAR_SECONDS]) > LOUDER * np.median(powers):
            turns[row] = replace(turns[row], stop=min(border + OVERLAP_SECONDS, after.stop))
            turns[row + 1] = replace(after, start=max(border - OVERLAP_SECONDS, before.start))
    return turns


def joined(turns: Sequence[Turn]) -> list[Turn]:
    """Sort turns by start and join those of one speaker across short pauses.

    >>> joined([Turn(0.0, 1.0, "Ada"), Turn(1.1, 2.0, "Ada"), Turn(1.5, 3.0, "Bo")])
    [Turn(start=0.0, stop=2.0, speaker='Ada'), Turn(start=1.5, stop=3.0, speaker='Bo')]
    """
    found: list[Turn] = []
    latest: dict[str, int] = {}
    for turn in sorted(turns, key=lambda turn: (turn.start, turn.stop)):
        row = latest.get(turn.speaker)
        if row is not None and turn.start - found[row].stop <= SAME_TURN_SECONDS:
            found[row] = replace(found[row], stop=max(found[row].stop, turn.stop))
        else:
            latest[turn.speaker] = len(found)
            found.append(turn)
    return found


def speaker_of(
    embeddings: np.ndarray,
    seconds: np.ndarray,
    row: int,
    store: PeopleStore | None,
    rule: Any,
    limits: dict[str, Any],
) -> Speaker:
    """Describe one cluster and look up its name in the store."""
    mean = np.average(embeddings, axis=0, weights=seconds).astype(np.float32)
    label = f"speaker {row + 1}"
    digest = hashlib.sha256(mean.tobytes()).hexdigest()
    name = label
    posterior = None
    score = None
    if store is not None and len(store):
        found: Identification = identify_embedding(rule, store, mean, top=len(store), **limits)
        assert found.decision is not None, "the store is not empty"
        score = found.decision.score
        if found.name is not None:
            name = found.name
            ratios = [rule.log_likelihood_ratio(score) for _, score in found.candidates]
            if None not in ratios:
                posterior = float(
                    1.0
                    / np.exp(np.array([-ratios[0], *(ratio - ratios[0] for ratio in ratios)])).sum()
                )
    return Speaker(name, label, float(seconds.sum()), posterior, score, mean, digest)
