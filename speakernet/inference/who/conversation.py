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
from pathlib import Path

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.data.levels import FRAME_SECONDS, frame_powers
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.decision import DecisionLimits
from speakernet.inference.enrolment import Enrolment, Store, enroll_voices, weight_of
from speakernet.inference.identification import Namer
from speakernet.inference.people import PeopleStore, StoredRecording, checked_name
from speakernet.inference.protocol import Verifier
from speakernet.inference.recordings import MIN_ENROL_SECONDS, Recording
from speakernet.inference.who.clustering import MAX_SPEAKERS, centres, cluster, runs
from speakernet.inference.who.segmentation import Section, segment
from speakernet.inference.who.speech import find_speech, within

# A longer window gives a better embedding of one person but more often holds two: in rooms, 3 s
# gave 10 % confusion instead of 5.
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
    """

    name: str
    label: str
    seconds: float
    posterior: float | None
    score: float | None
    embedding: np.ndarray


@dataclass(frozen=True)
class Conversation:
    """Who speaks when in a recording.

    Attributes:
        recording: name of the recording.
        seconds: its duration.
        detector: `silero-vad` or `energy`, and the segmentation model if there is one.
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
    verifier: Verifier,
    recording: Recording,
    store: PeopleStore | None,
    limits: DecisionLimits,
    *,
    num_speakers: int | None = None,
    max_speakers: int | None = None,
    segmentation: str | Path | None = None,
    overlap: bool = True,
) -> Conversation:
    """Implement `SpeakerVerifier.who`."""
    # A conversation is found in five steps. Speech is detected, more willingly than for a decision,
    # since a missed word costs as much as a noise. Every stretch of it is cut into windows of 1.5
    # s, short enough to hold one voice and long enough to recognise it, and each window is
    # embedded. Windows are clustered: a cluster is a voice, and nobody says how many there are.
    # Borders between voices lie on the grid of windows at first, so each is moved to where shorter
    # windows change from one voice to the other, and two voices at a border may overlap. Last, the
    # mean of a voice is compared with the people in the store. Two people with similar voices may
    # still end up as one cluster, and whoever says only a few words may end up in somebody else's.
    # A segmentation model helps at the end: where words begin and end, and who else speaks in an
    # overlap. The voices and their names are the same with and without it.
    max_speakers = bound_of(max_speakers, num_speakers)
    namer = namer_of(verifier, store, limits)
    if namer is not None:
        # Fail before embedding, which takes a long time.
        namer.threshold()
    # Both models pass over the whole recording before anything is embedded. They read it piece by
    # piece, and only their answers for each frame stay in memory.
    segmented = segment(recording, segmentation)
    speech, spoken, detector = find_speech(recording, segmented)
    windows = windows_of(speech)
    if len(windows) < (num_speakers or 0):
        raise AudioError(
            f"{recording.name}: {num_speakers} speakers were requested, but "
            f"{np.diff(speech).sum():.1f} s of speech give only {len(windows)} windows; give fewer "
            "speakers, or no number"
        )
    if not len(windows):
        return Conversation(recording.name, recording.seconds, detector, (), (), ())
    # The slowest part: every second of speech lies in two windows.
    embeddings = embed_stretches(verifier, recording, windows, "embedding")
    units = mean_embeddings(embeddings, verifier.mean)
    lengths = np.diff(windows)[:, 0]
    labels, has_more = cluster(units, num_speakers=num_speakers, max_speakers=max_speakers)
    if has_more:
        warn_of_more(max_speakers)
    # From here on there are sections, pieces of speech of one voice, instead of windows.
    coarse = cut_sections(speech, windows, labels)
    heard_seconds = np.bincount(
        [row for *_, row in coarse], weights=[stop - start for start, stop, _ in coarse]
    )
    speakers = []
    for row, seconds in enumerate(heard_seconds.tolist()):
        is_in = labels == row
        speakers.append(speaker_of(embeddings[is_in], lengths[is_in], seconds, row, namer))
    # Of two voices with the same name, the second is the same person, split in two, or a stranger.
    # More often it is a stranger (docs/experiments.md), and a wrong name is worse than none.
    speakers = _name_once(speakers)
    single = _refine_borders(verifier, recording, centres(units, labels, lengths), coarse)
    # Voices were found in stretches that include short pauses; turns must not include them.
    heard = within(single, spoken)
    exclusive = _turns_of(heard, speakers)
    if not overlap:
        turns = exclusive
    elif segmented is None:
        turns = _add_overlaps(recording, exclusive)
    else:
        # The numbers of the model's people only hold within one window of 10 s. Which voice each is
        # follows from the clusters of our windows in which that person speaks alone.
        counts = segmented.people_of(windows) @ np.eye(len(speakers))[labels]
        turns = _turns_of([*heard, *segmented.second_voices(single, counts)], speakers)
    return Conversation(
        recording.name,
        recording.seconds,
        detector,
        tuple(_with_seconds(speaker, turns) for speaker in speakers),
        tuple(turns),
        tuple(exclusive),
    )


def speaker_called(conversation: Conversation, label: str) -> Speaker:
    """The voice with this name or label, spelled as on the page or as in RTTM.

    Raises:
        ValueError: no voice has it.
    """
    known: dict[str, Speaker] = {}
    for voice in conversation.speakers:
        known |= {voice.label: voice, voice.name: voice}
    # RTTM has `speaker_3` for `speaker 3`.
    speaker = known.get(label) or known.get(label.replace("_", " "))
    if speaker is None:
        names = ", ".join(repr(voice.name) for voice in conversation.speakers)
        names = names or "none, as no speech was found"
        raise ValueError(
            f"{conversation.recording} has no speaker {label!r}; its speakers are: {names}"
        )
    return speaker


def enroll_speaker(
    verifier: Verifier,
    store: Store,
    conversation: Conversation,
    speaker: Speaker,
    name: str,
) -> Enrolment:
    """Enrol a voice of a recording under a name, after the checks of every enrolment.

    Raises:
        StoreError: the name is not allowed, or the store cannot be written.
    """
    # A voice with little speech is enrolled with a warning, as a short recording is.
    label = f"{conversation.recording}, {speaker.label}"
    problem = ""
    if speaker.seconds < MIN_ENROL_SECONDS:
        problem = (
            f"too short: {speaker.seconds:.2f} s of speech; expected at least "
            f"{MIN_ENROL_SECONDS:g} s"
        )
    # No `source`: the file holds other people too, so `reembed` must not use it.
    voice = StoredRecording(
        checked_name(name),
        speaker.embedding,
        weight_of(speaker.seconds),
        seconds=conversation.seconds,
        speech_seconds=speaker.seconds,
        warnings=problem,
        # By which the store recognises a voice that was enrolled before.
        digest=hashlib.sha256(speaker.embedding.tobytes()).hexdigest(),
    )
    done = enroll_voices(verifier, store, [voice], [label])
    if not (problem and done.added):
        return done
    return replace(done, warnings=(f"{label}: {problem}", *done.warnings))


def _with_seconds(speaker: Speaker, turns: Sequence[Turn]) -> Speaker:
    """The speaker with the seconds of all their turns."""
    seconds = sum(turn.stop - turn.start for turn in turns if turn.speaker == speaker.name)
    return replace(speaker, seconds=seconds)


def bound_of(max_speakers: int | None, num_speakers: int | None = None) -> int:
    """The upper bound of the number of speakers, after checking both numbers."""
    bound = MAX_SPEAKERS if max_speakers is None else max_speakers
    for option, number in (("--max-speakers", bound), ("--speakers", num_speakers)):
        if number is not None and number < 1:
            raise ValueError(f"{option} is {number}; expected at least 1")
    return bound


def namer_of(verifier: Verifier, store: PeopleStore | None, limits: DecisionLimits) -> Namer | None:
    """Names voices by the people in a store; None without one."""
    if store is None:
        return None
    # A limit for the whole store, not for each person: with 10, 40 and 150 strangers in it, 1 to 5
    # % of the voices got a name (docs/results.md).
    if limits.get("false_accept_rate") is None and limits.get("threshold") is None:
        limits = {"false_accept_rate": STRANGERS_NAMED}
    return Namer(verifier.rule, store, limits)


def warn_of_more(max_speakers: int) -> None:
    """Warn that the bound of the number of speakers is too low."""
    logger.warning(
        "more than %d people seem to speak, so some share a name; raise --max-speakers "
        "(max_speakers in Python), or give --speakers",
        max_speakers,
    )


def _name_once(speakers: Sequence[Speaker]) -> list[Speaker]:
    """Keep each name only for its highest-scoring voice: a second one is more often a similar
    stranger.
    """
    best: dict[str, Speaker] = {}
    for speaker in speakers:
        rival = best.setdefault(speaker.name, speaker)
        if (speaker.score or 0.0) >= (rival.score or 0.0):
            best[speaker.name] = speaker
    named = []
    for speaker in speakers:
        if best[speaker.name] is not speaker:
            speaker = replace(speaker, name=speaker.label, posterior=None)
        named.append(speaker)
    return named


def windows_of(speech: np.ndarray) -> np.ndarray:
    """Evenly spaced windows in each stretch of speech, (windows, 2) seconds; a short stretch is one
    window.

    >>> windows_of(np.array([[0.0, 1.0], [2.0, 4.25]])).tolist()
    [[0.0, 1.0], [2.0, 3.5], [2.75, 4.25]]
    """
    windows = [np.zeros((0, 2))]
    for start, stop in speech:
        # Spread evenly, so that the end of a stretch is covered like the rest of it.
        last = max(start, stop - WINDOW_SECONDS)
        starts = np.linspace(start, last, int(np.ceil((last - start) / HOP_SECONDS)) + 1)
        windows.append(np.stack([starts, np.minimum(starts + WINDOW_SECONDS, stop)], axis=1))
    return np.concatenate(windows)


def embed_stretches(
    verifier: Verifier, recording: Recording, windows: np.ndarray, description: str = ""
) -> np.ndarray:
    """Embed windows, (windows, dim); those too short for the network or for a voice are widened."""
    rate = recording.sample_rate
    num_samples = recording.num_samples
    least = min(max(round(MIN_WINDOW_SECONDS * rate), verifier.min_samples), num_samples)
    starts, stops = np.round(windows * rate).astype(np.int64).T
    # Short windows are widened on both sides, or at the ends of the recording on one.
    missing = np.maximum(least - (stops - starts), 0)
    starts = np.clip(starts - missing // 2, 0, num_samples - least)
    stops = np.clip(stops, starts + least, num_samples)
    return verifier.embed_windows(recording, np.stack([starts, stops], axis=1), description)


def cut_sections(
    speech: np.ndarray, windows: np.ndarray, labels: np.ndarray
) -> list[tuple[float, float, int]]:
    """Start, stop and label of each section; the voice changes halfway between the middles of two
    windows.
    """
    parts: list[tuple[float, float, int]] = []
    middles = windows.mean(axis=1)
    # A window belongs to the stretch in which it begins, since no window crosses a pause.
    of_stretch = np.searchsorted(speech[:, 0], windows[:, 0], side="right") - 1
    for first, last in runs(of_stretch):
        start, stop = speech[of_stretch[first]].tolist()
        for begin, end in runs(labels[first:last]):
            border = stop
            if first + end < last:
                border = float(middles[first + end - 1 : first + end + 1].mean())
            parts.append((start, border, int(labels[first + begin])))
            start = border
    return parts


def _refine_borders(
    verifier: Verifier,
    recording: Recording,
    middle: np.ndarray,
    single: list[tuple[float, float, int]],
) -> list[tuple[float, float, int]]:
    """Move each border to where short windows around it change from one voice to the other."""
    edges = np.array([(start, stop) for start, stop, _ in single])
    # Only where sections meet without a pause; at a pause the border is exact already.
    changes = np.flatnonzero(edges[1:, 0] == edges[:-1, 1])
    around = np.arange(
        -BORDER_SECONDS, BORDER_SECONDS + BORDER_STEP_SECONDS / 2, BORDER_STEP_SECONDS
    )
    times = edges[changes, 1, None] + around
    half = BORDER_WINDOW_SECONDS / 2
    windows = np.stack([times.ravel() - half, times.ravel() + half], axis=1)
    # One short window is unreliable, but seven around each border are enough to choose between two
    # known voices.
    units = mean_embeddings(embed_stretches(verifier, recording, windows, "borders"), verifier.mean)
    cosines = (units @ middle.T).reshape(*times.shape, len(middle))
    for row, change in enumerate(changes.tolist()):
        before = cosines[row, :, single[change][2]]
        after = cosines[row, :, single[change + 1][2]]
        # The place that best separates the first voice before it from the second after it.
        place = int(np.cumsum(before - after).argmax())
        border = times[row, place] + BORDER_STEP_SECONDS / 2
        # Kept within the two sections, or a short answer between two people could vanish.
        edges[change, 1] = edges[change + 1, 0] = np.clip(
            border, edges[change, 0], edges[change + 1, 1]
        )
    return [
        (start, stop, label)
        for (start, stop), (_, _, label) in zip(edges.tolist(), single, strict=True)
    ]


def _add_overlaps(recording: Recording, exclusive: Sequence[Turn]) -> list[Turn]:
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
        # Two people at once are louder than one. The sign is weak if one of them is much louder
        # than the other, so only a fifth of a second is added on each side.
        distances = np.abs(start + FRAME_SECONDS * (np.arange(len(powers)) + 0.5) - border)
        if np.median(powers[distances < NEAR_SECONDS]) > LOUDER * np.median(powers):
            turns[row] = replace(turns[row], stop=min(border + OVERLAP_SECONDS, after.stop))
            turns[row + 1] = replace(after, start=max(border - OVERLAP_SECONDS, before.start))
    return turns


def _turns_of(sections: Sequence[Section], speakers: Sequence[Speaker]) -> list[Turn]:
    return join_turns([Turn(start, stop, speakers[row].name) for start, stop, row in sections])


def join_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Sort turns by start and join those of one speaker across short pauses.

    >>> join_turns([Turn(0.0, 1.0, "Ada"), Turn(1.1, 2.0, "Ada"), Turn(1.5, 3.0, "Bo")])
    [Turn(start=0.0, stop=2.0, speaker='Ada'), Turn(start=1.5, stop=3.0, speaker='Bo')]
    """
    all_turns: list[Turn] = []
    latest: dict[str, int] = {}
    for turn in sorted(turns, key=lambda turn: (turn.start, turn.stop)):
        row = latest.get(turn.speaker)
        if row is not None and turn.start - all_turns[row].stop <= SAME_TURN_SECONDS:
            stop = max(all_turns[row].stop, turn.stop)
            all_turns[row] = replace(all_turns[row], stop=stop)
        else:
            latest[turn.speaker] = len(all_turns)
            all_turns.append(turn)
    return all_turns


def speaker_of(
    embeddings: np.ndarray, weights: np.ndarray, seconds: float, row: int, namer: Namer | None
) -> Speaker:
    """Describe one cluster, heard for `seconds`, and look up its name in the store."""
    # The mean over all windows, as for a person with several recordings.
    mean = np.average(embeddings, axis=0, weights=weights).astype(np.float32)
    label = f"speaker {row + 1}"
    speaker = Speaker(label, label, seconds, None, None, mean)
    num_people = 0 if namer is None else len(namer.store)
    if namer is None or not num_people:
        return speaker
    answer = namer.identify(mean, top=num_people, speech_seconds=seconds)
    assert answer.decision is not None, "the store is not empty"
    speaker = replace(speaker, score=answer.decision.score)
    if answer.name is None:
        return speaker
    posterior = None
    if namer.rule.calibration is not None:
        # Everybody in the store, and a stranger with a ratio of 0, relative to the nearest person.
        logits = np.array([0.0, *answer.ratios], dtype=np.float64)
        posterior = float(1.0 / np.exp(logits - logits[1]).sum())
    return replace(speaker, name=answer.name, posterior=posterior)
