"""Enrolment and identification: recordings of a person into a store, and who of the people there a recording is.

A recording is inspected before it is kept: little speech, noise, clipping, a voice unlike the person's other ones are
warned about, or refused. Weights are seconds of speech.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.decision import Decision
from speakernet.inference.people import TOP, PeopleStore, checked_name
from speakernet.inference.recordings import Audio, Quality, inspect_recording, usable
from speakernet.inference.verifier import SpeakerVerifier

MOST_SPEECH_SECONDS = 30.0
"""A recording weighs no more than one of so much speech: more of one session adds no other session."""
LEAST_WEIGHT_SECONDS = 0.1
SAME_COSINE = 0.99999
"""Embeddings of one recording in different batches are at least this close."""


@dataclass(frozen=True)
class Enrolment:
    """What came of an enrolment."""

    name: str
    added: int
    total: int
    qualities: tuple[Quality, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Identification:
    """Who a recording is."""

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
    """Add recordings of a person to a store; all of them, or none."""
    name = checked_name(name)
    if not len(recordings):
        raise AudioError(f"no recording of {name!r} was given; expected one or more")
    opened = [verifier.open(one, sample_rate) for one in recordings]
    qualities = [inspect_recording(one) for one in opened]
    warnings = [f"{one.name}: {text}" for one in qualities for text in one.warnings]
    embeddings = np.asarray(verifier.embed(opened))
    there = store.recordings(name)
    kept = np.array([one.embedding for one in there], dtype=np.float32).reshape(-1, verifier.embedding_dim)
    known = {one.digest for one in there}
    # Stores of 0.2.0 have no digests: there a recording is known by its embedding.
    old = mean_embeddings(kept[np.array([not one.digest for one in there], dtype=bool)])
    limit = verifier.decide(0.0, threshold="eer" if verifier.is_calibrated else "default").threshold
    everything, rows = np.concatenate([embeddings, kept]), []
    for row, (quality, unit) in enumerate(zip(qualities, mean_embeddings(embeddings), strict=True)):
        if quality.digest in known or (old @ unit > SAME_COSINE).any():
            warnings.append(f"{quality.name}: enrolled before as {name!r}, left out")
        else:
            rows.append(row)
        known.add(quality.digest)
        scores = [verifier.compare(everything[row], one) for one in np.delete(everything, row, axis=0)]
        # The median: one wrong recording must not accuse all others.
        if scores and (score := float(np.median(scores))) < limit:
            warnings.append(
                f"{quality.name}: does not sound like the person's other recordings (score {score:.4f}; expected "
                f"{limit:.4f} or more)"
            )
    for other, score in store.identify(embeddings.mean(axis=0), top=2):
        if other != name and score >= limit:
            warnings.append(f"{name}: sounds like {other!r}, who is enrolled already (score {score:.2f})")
            break
    if warnings and is_strict:
        raise AudioError(f"nothing was enrolled: {'; '.join(warnings)}")
    total = len(kept)
    if rows:
        weights = [min(max(qualities[row].speech_seconds, LEAST_WEIGHT_SECONDS), MOST_SPEECH_SECONDS) for row in rows]
        details = [
            {
                "source": str(file.absolute()) if (file := opened[row].file) else "",
                "seconds": qualities[row].seconds,
                "speech_seconds": qualities[row].speech_seconds,
                "warnings": "; ".join(qualities[row].warnings),
                "digest": qualities[row].digest,
            }
            for row in rows
        ]
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
    none does, the strictest one, and `stranger_rate` is what it keeps. Odds below 1 never name anybody, unless
    `threshold` is given.
    """
    num_people, needs_odds = len(store), threshold is None
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
    is_somebody = decision.same_speaker and not (needs_odds and (decision.log_likelihood_ratio or 0.0) < 0)
    return Identification(candidates[0][0] if is_somebody else None, decision, candidates, num_people, stranger_rate)
