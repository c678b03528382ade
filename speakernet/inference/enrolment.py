"""Enrol a person: what is checked before recordings are added to a store of people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.inference.decision import UNCALIBRATED_THRESHOLD
from speakernet.inference.people import PeopleStore, StoredRecording, checked_name
from speakernet.inference.protocol import Verifier
from speakernet.inference.recordings import (
    BAND_LIMITED,
    MAX_SPEECH_SECONDS,
    MIN_ENROL_SECONDS,
    MIN_WEIGHT_SECONDS,
    Audio,
    Heard,
    Quality,
    warnings_by_cause,
)

Store: TypeAlias = PeopleStore | Callable[[], PeopleStore]
"""A store, or what creates one. It is called only if there is something to write, so that refused
recordings leave no empty store."""


@dataclass(frozen=True)
class Enrolment:
    """The result of an enrolment."""

    name: str
    added: int
    total: int
    qualities: tuple[Quality, ...]
    warnings: tuple[str, ...]


def enroll(
    verifier: Verifier,
    store: Store,
    name: str,
    recordings: Sequence[Audio | Heard],
    *,
    sample_rate: int | None = None,
    is_strict: bool = False,
) -> Enrolment:
    """Add recordings of a person to a store, all of them or none."""
    name = checked_name(name)
    if not len(recordings):
        raise AudioError(f"no recording of {name!r} was given; expected at least one")
    heard = [
        verifier.hear(recording, sample_rate, min_speech_seconds=MIN_ENROL_SECONDS)
        for recording in recordings
    ]
    # All at once, since recordings of similar length share a batch.
    embeddings = verifier.embed([recording for recording, _ in heard])
    voices = []
    for (recording, quality), embedding in zip(heard, embeddings, strict=True):
        problems = [*quality.warnings]
        if quality.is_band_limited:
            problems.append(BAND_LIMITED)
        source = ""
        # Of a file that holds other voices too, `reembed` must not read all channels.
        if recording.file and not recording.is_channel_requested:
            source = str(recording.file.absolute())
        voices.append(
            StoredRecording(
                name,
                embedding,
                weight_of(quality.speech_seconds),
                source,
                quality.seconds,
                quality.speech_seconds,
                "; ".join(problems),
                digest=quality.digest,
            )
        )
    qualities = [quality for _, quality in heard]
    labels = [quality.name for quality in qualities]
    return enroll_voices(verifier, store, voices, labels, qualities, is_strict=is_strict)


def enroll_voices(
    verifier: Verifier,
    store: Store,
    voices: Sequence[StoredRecording],
    labels: Sequence[str],
    qualities: Sequence[Quality] = (),
    *,
    is_strict: bool = False,
) -> Enrolment:
    """Add the voices of one person that the store does not have yet; `labels` name them in
    warnings.
    """
    # Enrolment is where mistakes are expensive: a wrong recording under a name is used in every
    # later decision. So duplicates are skipped, and a voice that is unlike the person's other
    # recordings or like somebody else's causes a warning, but is added unless the caller is strict:
    # the same person with a cold sounds as different as a stranger does.
    name = voices[0].name
    existing = store if isinstance(store, PeopleStore) else None
    enrolled = existing.recordings(name) if existing else []
    warnings = warnings_by_cause(qualities) + differing_channels(qualities, enrolled)
    known = {recording.digest for recording in enrolled}
    new = []
    for voice, label in zip(voices, labels, strict=True):
        if voice.digest in known:
            warnings.append(f"{label} is already enrolled as {name!r} and was skipped")
        else:
            new.append(voice)
        known.add(voice.digest)
    if new:
        warnings += doubts_about_voice(verifier, existing, voices, labels, enrolled)
    if warnings and is_strict:
        raise AudioError(f"nothing was enrolled: {'; '.join(warnings)}")
    total = len(enrolled)
    if new:
        opened = store if isinstance(store, PeopleStore) else store()
        total = opened.add(new)
    return Enrolment(name, len(new), total, tuple(qualities), tuple(warnings))


def weight_of(speech_seconds: float) -> float:
    """The weight of a recording in its person's mean."""
    return min(max(speech_seconds, MIN_WEIGHT_SECONDS), MAX_SPEECH_SECONDS)


def differing_channels(
    qualities: Sequence[Quality], enrolled: Sequence[StoredRecording]
) -> list[str]:
    """A warning if recordings are from a telephone and all those of an enrolled person are not, or
    the reverse.
    """
    new = {quality.is_band_limited for quality in qualities}
    old = {BAND_LIMITED in recording.warnings for recording in enrolled}
    if len(new) != 1 or len(old) != 1 or new == old:
        return []
    verbs = ("is", "are not") if new == {True} else ("is not", "are")
    return [
        f"{qualities[0].name} {verbs[0]} {BAND_LIMITED}, as over a telephone, and the enrolled "
        f"recordings {verbs[1]}; use one kind of microphone"
    ]


def doubts_about_voice(
    verifier: Verifier,
    store: PeopleStore | None,
    voices: Sequence[StoredRecording],
    labels: Sequence[str],
    enrolled: Sequence[StoredRecording],
) -> list[str]:
    """Warnings about voices that are to be enrolled: unlike the person's other recordings, or like
    another person's.

    Args:
        verifier: scores embeddings.
        store: a store that may hold the same voice under another name; None if there is none yet.
        voices: the new recordings of one person.
        labels: what the warnings call them.
        enrolled: the person's earlier recordings.
    """
    if verifier.is_calibrated:
        # At the equal error rate a needless warning is as likely as a missing one.
        limit = verifier.decide(0.0, threshold="eer").threshold
    else:
        # An uncalibrated PLDA score is still a log-likelihood ratio.
        limit = UNCALIBRATED_THRESHOLD if verifier.plda is None else 0.0
    doubts = []
    rows = [recording.embedding for recording in (*voices, *enrolled)]
    everything = np.array(rows, dtype=np.float32)  # (recordings, dim)
    for row, label in enumerate(labels):
        rest = np.delete(everything, row, axis=0)
        if not len(rest):
            continue
        # The median, so that one wrong recording does not cast doubt on all others.
        score = float(np.median([verifier.compare(everything[row], other) for other in rest]))
        if score < limit:
            doubts.append(
                f"{label}: does not sound like the person's other recordings (score {score:.4f}; "
                f"expected at least {limit:.4f})"
            )
    name = voices[0].name
    # Only the new recordings: averaged with the person's earlier ones, a wrong voice would go
    # unnoticed.
    mean = everything[: len(voices)].mean(axis=0)
    # Two, because the nearest may be the person itself.
    for other, score in store.identify(mean, top=2) if store else []:
        if other != name:
            if score >= limit:
                doubts.append(
                    f"{name}: sounds like {other!r}, who is already enrolled (score {score:.2f})"
                )
            break
    return doubts
