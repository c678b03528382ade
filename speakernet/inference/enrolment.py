"""Enrol a person: what is checked before recordings are added to a store of people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speakernet.data.audio import AudioError
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.decision import UNCALIBRATED_THRESHOLD
from speakernet.inference.people import PeopleStore, StoredRecording, checked_name
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

SAME_COSINE = 0.99999
"""Embeddings of the same recording in different batches are at least this close."""


@dataclass(frozen=True)
class Enrolment:
    """The result of an enrolment."""

    name: str
    added: int
    total: int
    qualities: tuple[Quality, ...]
    warnings: tuple[str, ...]


def enroll(
    verifier: Any,
    store: PeopleStore | Callable[[], PeopleStore],
    name: str,
    recordings: Sequence[Audio | Heard],
    *,
    sample_rate: int | None = None,
    is_strict: bool = False,
) -> Enrolment:
    """Add recordings of a person to a store, all of them or none.

    `store` may be a callable that creates one. It is called only when there is something to write,
    so that refused recordings leave no empty store.
    """
    existing = store if isinstance(store, PeopleStore) else None
    name = checked_name(name)
    if not len(recordings):
        raise AudioError(f"no recording of {name!r} was given; expected at least one")
    heard = [
        verifier.hear(recording, sample_rate, min_speech_seconds=MIN_ENROL_SECONDS)
        for recording in recordings
    ]
    opened = [recording.recording for recording in heard]
    qualities = [recording.quality for recording in heard]
    warnings = warnings_by_cause(qualities)
    embeddings = np.asarray(verifier.embed(opened))
    there = existing.recordings(name) if existing else []
    warnings += differing_channels(qualities, there)
    kept = np.array([recording.embedding for recording in there], dtype=np.float32).reshape(
        -1, verifier.embedding_dim
    )
    known = {recording.digest for recording in there}
    # Stores of version 0.2.0 have no digests, so recordings are recognised by their embeddings.
    old = mean_embeddings(kept[np.array([not recording.digest for recording in there], dtype=bool)])
    rows = []
    for row, (quality, unit) in enumerate(zip(qualities, mean_embeddings(embeddings), strict=True)):
        if quality.digest in known or (old @ unit > SAME_COSINE).any():
            warnings.append(f"{quality.name} is already enrolled as {name!r} and was skipped")
        else:
            rows.append(row)
        known.add(quality.digest)
    if rows:
        sources = [quality.name for quality in qualities]
        warnings += doubts_about_voice(verifier, existing, name, sources, embeddings, kept)
    if warnings and is_strict:
        raise AudioError(f"nothing was enrolled: {'; '.join(warnings)}")
    weights = [
        min(max(qualities[row].speech_seconds, MIN_WEIGHT_SECONDS), MAX_SPEECH_SECONDS)
        for row in rows
    ]
    details = [
        {
            # Of a file that holds other voices too, `reembed` must not read all channels.
            "source": str(file.absolute())
            if (file := opened[row].file) and not opened[row].is_of_one_channel
            else "",
            "seconds": qualities[row].seconds,
            "speech_seconds": qualities[row].speech_seconds,
            "warnings": "; ".join(
                [*qualities[row].warnings, *[BAND_LIMITED][: qualities[row].is_band_limited]]
            ),
            "digest": qualities[row].digest,
        }
        for row in rows
    ]
    written = store if isinstance(store, PeopleStore) else store()
    total = written.enroll(name, embeddings[rows], weights, details) if rows else len(kept)
    return Enrolment(name, len(rows), total, tuple(qualities), tuple(warnings))


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
    now, before = (
        ("is", "the enrolled recordings are not")
        if new.pop()
        else ("is not", "the enrolled recordings are")
    )
    return [
        f"{qualities[0].name} {now} {BAND_LIMITED}, as over a telephone, and {before}; use one "
        "kind of microphone"
    ]


def doubts_about_voice(
    verifier: Any,
    store: PeopleStore | None,
    name: str,
    sources: Sequence[str],
    embeddings: np.ndarray,
    kept: np.ndarray,
) -> list[str]:
    """Warnings about the voices that are to be enrolled under a name.

    Args:
        verifier: scores embeddings.
        store: a store that may hold the same voice under another name; None if there is none yet.
        name: the person.
        sources: where each embedding comes from, for the warnings.
        embeddings: (recordings, dim) of the new recordings.
        kept: (recordings, dim) of the person's earlier recordings.
    """
    # An uncalibrated PLDA score is still a log-likelihood ratio.
    uncalibrated = UNCALIBRATED_THRESHOLD if verifier.plda is None else 0.0
    limit = verifier.decide(
        0.0, threshold="eer" if verifier.is_calibrated else uncalibrated
    ).threshold
    doubts = []
    everything = np.concatenate([embeddings, kept])
    for row, source in enumerate(sources):
        scores = [
            verifier.compare(everything[row], other) for other in np.delete(everything, row, axis=0)
        ]
        # The median, so that one wrong recording does not cast doubt on all others.
        if scores and (score := float(np.median(scores))) < limit:
            doubts.append(
                f"{source}: does not sound like the person's other recordings (score {score:.4f}; "
                f"expected at least {limit:.4f})"
            )
    nearest = store.identify(embeddings.mean(axis=0), top=2) if store else []
    others = [(other, score) for other, score in nearest if other != name]
    if others and others[0][1] >= limit:
        doubts.append(
            f"{name}: sounds like {others[0][0]!r}, who is already enrolled (score "
            f"{others[0][1]:.2f})"
        )
    return doubts
