"""Enrolment and identification: recordings of a person into a store, and who of the people there a recording is.

A recording is looked at before it is kept: too little speech, noise, clipping, a voice that is not like the person's
other ones are warned about, or refused. Weights are seconds of speech.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.decision import Decision
from speakernet.inference.people import TOP, PeopleStore, checked_name
from speakernet.inference.recordings import Audio, Quality, Recording, inspect_recording, refuse_unusable, usable
from speakernet.inference.verifier import SpeakerVerifier

MOST_SPEECH_SECONDS = 30.0
"""A recording weighs no more than one of so much speech: more of one session adds no other session."""
LEAST_WEIGHT_SECONDS = 0.1
SAME_COSINE = 0.99999
"""Embeddings of one recording in different batches are this close."""


@dataclass(frozen=True)
class Enrolment:
    """What came of an enrolment.

    Attributes:
        name: as it is kept.
        added: recordings that were added.
        total: recordings that the person has now.
        qualities: of each recording that was given.
        warnings: everything that is wrong, a sentence each, with the recording's name.
    """

    name: str
    added: int
    total: int
    qualities: tuple[Quality, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Identification:
    """Who a recording is.

    Attributes:
        name: of the person; None for a stranger.
        decision: about the nearest person; None where the store is empty.
        candidates: the nearest people with their scores, best first.
        num_people: in the store.
        stranger_rate: up to this share of strangers is taken for somebody, by the list that the threshold was fitted
            on; None where the threshold was given as a number.
    """

    name: str | None
    decision: Decision | None
    candidates: tuple[tuple[str, float], ...]
    num_people: int
    stranger_rate: float | None


def enroll(
    verifier: SpeakerVerifier,
    store: PeopleStore,
    name: str,
    recordings: Sequence[Audio],
    *,
    sample_rate: int | None = None,
    is_strict: bool = False,
) -> Enrolment:
    """Add recordings of somebody to a store; all of them, or none.

    Args:
        verifier: the store's model.
        store: open.
        name: of the person, who is new or was there before.
        recordings: files or arrays.
        sample_rate: Hz, of arrays.
        is_strict: refuse what is otherwise warned about.

    Raises:
        ValueError: audio that cannot be read or is silent, a name that none is; with `is_strict` whatever is wrong.
    """
    name = checked_name(name)
    if not len(recordings):
        raise AudioError(f"no recording of {name!r} was given; expected one or more")
    opened = [verifier.open(one, sample_rate) for one in recordings]
    qualities = [inspect_recording(one) for one in opened]
    warnings = [f"{one.name}: {text}" for one in qualities for text in one.warnings]
    for one in qualities:
        refuse_unusable(one)
    embeddings = np.asarray(verifier.embed(opened))
    recordings_kept = store.recordings(name)
    kept = np.array([one.embedding for one in recordings_kept]).reshape(-1, verifier.embedding_dim)
    known = {one.digest for one in recordings_kept}
    # Stores of 0.2.0 have no digests: there a recording is known by its embedding.
    old = mean_embeddings(kept[np.array([not one.digest for one in recordings_kept], dtype=bool)])
    is_new = []
    for quality, unit in zip(qualities, mean_embeddings(embeddings), strict=True):
        is_new.append(quality.digest not in known and not (old @ unit > SAME_COSINE).any())
        known.add(quality.digest)
    warnings += [
        f"{one.name}: enrolled before as {name!r}, left out"
        for one, fresh in zip(opened, is_new, strict=True)
        if not fresh
    ]
    warnings += _disagreements(verifier, [one.name for one in opened], embeddings, kept)
    warnings += _others_like_this(verifier, store, name, embeddings)
    if warnings and is_strict:
        raise AudioError(f"nothing was enrolled: {'; '.join(warnings)}")
    rows = np.flatnonzero(is_new)
    total = len(kept)
    if len(rows):
        weights = [min(max(qualities[row].speech_seconds, LEAST_WEIGHT_SECONDS), MOST_SPEECH_SECONDS) for row in rows]
        details = [_details(opened[row], qualities[row]) for row in rows]
        total = store.enroll(name, embeddings[rows], weights, details)
    return Enrolment(name, len(rows), total, tuple(qualities), tuple(warnings))


def identify(
    verifier: SpeakerVerifier,
    store: PeopleStore,
    audio: Audio,
    *,
    sample_rate: int | None = None,
    top: int = TOP,
    false_accept_rate: float | None = None,
    threshold: float | str | None = None,
) -> Identification:
    """Who of the people in a store a recording is, or a stranger.

    With N people a stranger is compared N times. `false_accept_rate` is meant for all of these together: of single
    comparisons at most its N-th part may be wrong. The lowest threshold of the model file that keeps this is used; if
    none does, the strictest one, and `stranger_rate` says what it keeps. Odds below 1 never name anybody, unless
    `threshold` is given.

    Args:
        verifier: the store's model.
        store: open.
        audio: a file or an array.
        sample_rate: Hz, of an array.
        top: candidates, at most.
        false_accept_rate: share of strangers that may be taken for somebody; 0.01 where left out.
        threshold: decide at this score instead, or at a named threshold.

    Raises:
        ValueError: audio that cannot be read, is silent or shorter than a syllable; `NotCalibratedError` where the
            model file holds no threshold.
    """
    num_people = len(store)
    has_threshold = threshold is not None
    if threshold is None:
        threshold = verifier.rule.threshold_of_many(num_people, false_accept_rate)
    elif false_accept_rate is not None:
        raise ValueError("false_accept_rate and threshold were both given; expected one of them")
    # Before anything is embedded, not after.
    rate = verifier.decide(0.0, threshold=threshold).false_accept_rate
    stranger_rate = None if rate is None else min(1.0, rate * num_people)
    embedding = verifier.embed(usable(verifier.open(audio, sample_rate)))
    candidates = tuple(store.identify(np.asarray(embedding), top=max(1, top)))
    if not candidates:
        return Identification(None, None, (), num_people, stranger_rate)
    decision = verifier.decide(candidates[0][1], threshold=threshold)
    # Odds against the nearest person name nobody, unless the caller has chosen the threshold.
    is_against = not has_threshold and (decision.log_likelihood_ratio or 0.0) < 0
    name = candidates[0][0] if decision.same_speaker and not is_against else None
    return Identification(name, decision, candidates, num_people, stranger_rate)


def _details(recording: Recording, quality: Quality) -> dict[str, object]:
    return {
        "source": "" if recording.file is None else str(recording.file.absolute()),
        "seconds": quality.seconds,
        "speech_seconds": quality.speech_seconds,
        "warnings": "; ".join(quality.warnings),
        "digest": quality.digest,
    }


def _disagreements(
    verifier: SpeakerVerifier, names: Sequence[str], embeddings: np.ndarray, kept: np.ndarray
) -> list[str]:
    """Recordings whose voice is not that of the person's other recordings, a sentence each."""
    everything = np.concatenate([embeddings, kept])
    limit = _limit(verifier)
    found = []
    for row, name in enumerate(names):
        others = [other for number, other in enumerate(everything) if number != row]
        scores = [verifier.compare(embeddings[row], other) for other in others]
        # The median: one wrong recording must not accuse all others.
        if scores and float(np.median(scores)) < limit:
            several = "recording" if len(others) == 1 else f"{len(others)} recordings"
            found.append(
                f"{name}: does not sound like the person's other {several} (score {np.median(scores):.4f}, "
                f"{limit:.4f} is wanted)"
            )
    return found


def _others_like_this(verifier: SpeakerVerifier, store: PeopleStore, name: str, embeddings: np.ndarray) -> list[str]:
    """Whether the voice is in the store under another name."""
    mean = embeddings.mean(axis=0)
    likest = [one for one in store.identify(mean, top=2) if one[0] != name][:1]
    if likest and likest[0][1] >= _limit(verifier):
        return [f"{name}: sounds like {likest[0][0]!r}, who is enrolled already (score {likest[0][1]:.2f})"]
    return []


def _limit(verifier: SpeakerVerifier) -> float:
    """The score that recordings of one person should reach: at the equal error rate, where there is one."""
    return verifier.decide(0.0, threshold="eer" if verifier.is_calibrated else "default").threshold
