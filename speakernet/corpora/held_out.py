"""Some speakers of a training list held out of it, with trials among them: to choose a model or an option by."""

import hashlib
from typing import NamedTuple

import numpy as np

from speakernet.corpora.pairing import (
    DEFAULT_NONTARGETS_PER_TARGET,
    DEFAULT_TARGETS_PER_SPEAKER,
    PairRules,
    balanced_pairs,
)
from speakernet.corpora.utterances import UNKNOWN, Utterances
from speakernet.data.lists import ListError, TrainingList, TrialList
from speakernet.random import numpy_generator

SPEAKER_STREAM = 7301
FEWEST = 2
"""Speakers on either side: trials need two, and so does training."""


class HeldOut(NamedTuple):
    """A training list without some of its speakers, and the trials among those."""

    training: TrainingList
    trials: TrialList


def hold_out(
    training: TrainingList, num_speakers: int, seed: int, nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET
) -> HeldOut:
    """Hold out so many speakers, drawn among those with two utterances or more, and pair their utterances.

    Every held-out speaker gives up to 50 target trials, and for each of these some with an utterance of another one.
    The same list, number and seed give the same speakers and trials. Sessions are not known here: a list whose speakers
    have several is better split by `data_prep/folder.py`.

    Raises:
        ListError: fewer than two speakers would be left on either side.
    """
    counts = np.bincount(training.labels, minlength=len(training.speakers))
    usable = np.flatnonzero(counts >= 2)
    most = min(len(usable), len(counts) - FEWEST)
    if not FEWEST <= num_speakers <= most:
        raise ListError(
            f"{training.source}: {num_speakers} speakers to be held out of {len(counts)}, of whom {len(usable)} have "
            f"two utterances or more; expected {FEWEST} to {max(most, 0)}"
        )
    chosen = np.sort(numpy_generator(seed, SPEAKER_STREAM).permutation(usable)[:num_speakers])
    is_held_out = np.isin(training.labels, chosen)
    return HeldOut(
        _of_rows(training, np.flatnonzero(~is_held_out)),
        _trials(training, np.flatnonzero(is_held_out), num_speakers, seed, nontargets_per_target),
    )


def _of_rows(training: TrainingList, rows: np.ndarray) -> TrainingList:
    """The list of some rows, its speakers numbered anew."""
    kept, labels = np.unique(training.labels[rows], return_inverse=True)
    return TrainingList(
        training.paths.take(rows),
        labels.astype(np.int32),
        training.speakers.take(kept),
        training.source,
        training.sha256,
    )


def _trials(
    training: TrainingList, rows: np.ndarray, num_speakers: int, seed: int, nontargets_per_target: int
) -> TrialList:
    utterances = Utterances(
        names=training.paths,
        labels=training.labels,
        speakers=training.speakers,
        sessions=np.full(len(training), UNKNOWN, dtype=np.int32),
        genders=np.full(len(training.speakers), UNKNOWN, dtype=np.int32),
    )
    rules, most = PairRules(), DEFAULT_TARGETS_PER_SPEAKER
    pairs = balanced_pairs(utterances, rows, rules, seed, most, nontargets_per_target)
    used, numbers = np.unique(np.concatenate([pairs.enrol, pairs.test]), return_inverse=True)
    enrol, test = numbers[: len(pairs)].astype(np.int32), numbers[len(pairs) :].astype(np.int32)
    source = f"{training.source}: {num_speakers} held-out speakers"
    names = training.paths.take(used)
    digest = hashlib.sha256()
    for part in (names.content, names.offsets, enrol, test, pairs.labels):
        digest.update(part.tobytes())
    return TrialList(names, enrol, test, pairs.labels, source, digest.hexdigest())
