"""Enrol a voice of a conversation, after the checks of every enrolment."""

from collections.abc import Callable

import numpy as np

from speakernet.inference.people import PeopleStore, checked_name
from speakernet.inference.recordings import (
    MAX_SPEECH_SECONDS,
    MIN_ENROL_SECONDS,
    MIN_WEIGHT_SECONDS,
)
from speakernet.inference.verifier import Enrolment, SpeakerVerifier, doubts_about_voice
from speakernet.inference.who.conversation import Conversation, Speaker


def speaker_called(conversation: Conversation, label: str) -> Speaker:
    """The voice with this name or label.

    Raises:
        ValueError: no voice has it.
    """
    known = {
        text: speaker for speaker in conversation.speakers for text in (speaker.label, speaker.name)
    }
    if label not in known:
        names = ", ".join(map(repr, known)) or "none, as no speech was found"
        raise ValueError(
            f"{conversation.recording} has no speaker {label!r}; its speakers are: {names}"
        )
    return known[label]


def enroll_speaker(
    verifier: SpeakerVerifier,
    store: PeopleStore | Callable[[], PeopleStore],
    conversation: Conversation,
    speaker: Speaker,
    name: str,
) -> Enrolment:
    """Enrol a voice of a recording under a name; `store` may be a callable that creates one.

    As in `enroll`, little speech, a voice unlike the person's other recordings and a voice that is
    known under another name cause warnings.

    Raises:
        StoreError: the name is not allowed, or the store cannot be written.
    """
    name = checked_name(name)
    existing = store if isinstance(store, PeopleStore) else None
    source = f"{conversation.recording}, {speaker.label}"
    recordings = existing.recordings(name) if existing is not None else []
    if speaker.digest in {recording.digest for recording in recordings}:
        warning = f"{source} is already enrolled as {name!r} and was skipped"
        return Enrolment(name, 0, len(recordings), (), (warning,))
    quality = ""
    if speaker.seconds < MIN_ENROL_SECONDS:
        quality = (
            f"too short: {speaker.seconds:.2f} s of speech; expected at least "
            f"{MIN_ENROL_SECONDS:g} s"
        )
    warnings = [f"{source}: {quality}"] if quality else []
    kept = np.array([recording.embedding for recording in recordings], dtype=np.float32)
    warnings += doubts_about_voice(
        verifier,
        existing,
        name,
        [source],
        speaker.embedding[None],
        kept.reshape(-1, verifier.embedding_dim),
    )
    details = {
        # No `source`: the file holds other people too, so `reembed` must not use it.
        "seconds": conversation.seconds,
        "speech_seconds": speaker.seconds,
        "warnings": quality,
        "digest": speaker.digest,
    }
    weight = min(max(speaker.seconds, MIN_WEIGHT_SECONDS), MAX_SPEECH_SECONDS)
    people = store if isinstance(store, PeopleStore) else store()
    total = people.enroll(name, speaker.embedding[None], [weight], [details])
    return Enrolment(name, 1, total, (), tuple(warnings))
