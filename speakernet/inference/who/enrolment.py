"""Enrol a voice of a conversation, after the checks of every enrolment."""

from dataclasses import replace

from speakernet.inference.enrolment import Enrolment, Store, enroll_voices, weight_of
from speakernet.inference.people import StoredRecording, checked_name
from speakernet.inference.recordings import MIN_ENROL_SECONDS
from speakernet.inference.verifier import SpeakerVerifier
from speakernet.inference.who.conversation import Conversation, Speaker


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
    verifier: SpeakerVerifier,
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
        digest=speaker.digest,
    )
    done = enroll_voices(verifier, store, [voice], [label])
    if not (problem and done.added):
        return done
    return replace(done, warnings=(f"{label}: {problem}", *done.warnings))
