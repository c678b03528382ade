"""Divide speakers into training, validation and test, so that no speaker is in two of them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from speakernet.corpora.utterances import NUM_EXAMPLES, UNKNOWN, Utterances
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

PARTS = ("train", "validation", "test")
DEFAULT_SHARE = 0.1
MIN_HELD_OUT_SPEAKERS = 2
#: Least held-out speakers for trials within a gender: two of each.
MIN_FOR_SAME_GENDER = 4
#: Below this many speakers a test set of its own would leave too few to train on.
MIN_SPEAKERS_FOR_TEST = 8
MIN_SPEAKERS_FOR_VALIDATION = 4


@dataclass(frozen=True)
class Split:
    """Rows of the utterances of each part, int64, ascending; `test` may be empty.

    `is_speaker_disjoint` is False where there were too few speakers and validation holds out utterances instead.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    is_speaker_disjoint: bool


def split_speakers(
    utterances: Utterances,
    seed: int,
    validation_share: float = DEFAULT_SHARE,
    test_share: float = DEFAULT_SHARE,
    min_held_out: int = MIN_HELD_OUT_SPEAKERS,
) -> Split:
    """Speaker-disjoint split, the genders spread evenly; the same for the same speakers and seed.

    Speakers with a single utterance can make no target trial and stay in training. With fewer than eight speakers there
    is no test part, with fewer than four the validation part is made of held-out utterances of the training speakers.

    `min_held_out` is the least number of speakers in a held-out part: trials within a gender need two of each.

    Raises:
        ValueError: fewer than two speakers, or shares that leave none for training.
    """
    num_speakers = len(utterances.speakers)
    if num_speakers < 2:
        raise ValueError(f"found {num_speakers} speaker(s); at least two are needed to train and test on")
    if validation_share < 0 or test_share < 0 or validation_share + test_share >= 1:
        raise ValueError(
            f"validation {validation_share:g} and test {test_share:g} of the speakers leave none for training; "
            "expected shares that add up to less than 1"
        )
    counts = utterances.counts()
    usable = np.flatnonzero(counts >= 2)
    if num_speakers < MIN_SPEAKERS_FOR_VALIDATION or len(usable) < MIN_HELD_OUT_SPEAKERS:
        return _split_utterances(utterances, seed)
    # Genders spread evenly: a held-out part of one gender has harder trials than the next.
    order = _interleaved(usable, utterances.genders[usable], seed)
    wants_test = num_speakers >= MIN_SPEAKERS_FOR_TEST and test_share > 0
    num_validation = _held_out(num_speakers, validation_share, len(order), min_held_out)
    num_test = _held_out(num_speakers, test_share, len(order) - num_validation, min_held_out) if wants_test else 0
    if not wants_test and test_share > 0:
        logger.warning("%d speakers are too few for a test part of its own; the validation trials serve", num_speakers)
    validation = order[:num_validation]
    test = order[num_validation : num_validation + num_test]
    train = np.setdiff1d(np.arange(num_speakers), np.concatenate([validation, test]))
    if len(train) < 2:
        raise ValueError(
            f"{num_speakers} speakers leave {len(train)} for training; lower --validation_share or --test_share"
        )
    rows = [utterances.of_speakers(part) for part in (train, validation, test)]
    return Split(rows[0], rows[1], rows[2], is_speaker_disjoint=True)


def split_by_parts(utterances: Utterances, part_of: Callable[[str], str]) -> Split | None:
    """The corpus's own parts; None (so that a split is drawn) where only one of them is on disk.

    Raises:
        ValueError: a speaker stands in the training part and in another one.
    """
    parts = np.array([PARTS.index(part_of(name)) for name in utterances.names])
    rows = [np.flatnonzero(parts == part) for part in range(len(PARTS))]
    if not len(rows[0]) or not (len(rows[1]) or len(rows[2])):
        logger.warning("only one of the corpus's parts is here: the speakers are split anew")
        return None
    if not len(rows[1]):
        # Without a part to choose the best checkpoint by, the test part serves, and the report says so.
        rows[1], rows[2] = rows[2], rows[1]
    train = set(utterances.labels[rows[0]].tolist())
    shared = train & set(utterances.labels[np.concatenate(rows[1:])].tolist())
    if shared:
        names = ", ".join(utterances.speakers[label] for label in sorted(shared)[:NUM_EXAMPLES])
        raise ValueError(
            f"{len(shared)} speakers stand in the training and in another part (first: {names}): error rates over them "
            "say nothing about new speakers. Is the corpus whole? With folders of your own, --layout pooled takes the "
            "parts together and splits the speakers anew"
        )
    return Split(rows[0], rows[1], rows[2], is_speaker_disjoint=True)


def _held_out(num_speakers: int, share: float, available: int, fewest: int) -> int:
    if share == 0:
        return 0
    return min(max(fewest, round(num_speakers * share)), max(0, available))


def _interleaved(speakers: np.ndarray, genders: np.ndarray, seed: int) -> np.ndarray:
    """The speakers shuffled, so that every stretch has the genders in the proportion of the whole."""
    shuffled = numpy_generator(seed).permutation(len(speakers))
    speakers, genders = speakers[shuffled], genders[shuffled]
    position = np.empty(len(speakers))
    for gender in np.unique(genders):
        members = np.flatnonzero(genders == gender)
        # The k-th of n members belongs at (k + 1/2) / n of the way.
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return speakers[np.argsort(position, kind="stable")]


def _split_utterances(utterances: Utterances, seed: int) -> Split:
    """A third of each speaker's utterances, two at least, for validation; whole sessions first where they are known."""
    logger.warning(
        "%d speakers are too few for a speaker-disjoint validation: utterances of the training speakers are held out, "
        "so the error rate will look better than it is for new speakers",
        len(utterances.speakers),
    )
    held = []
    for speaker in range(len(utterances.speakers)):
        rows = np.flatnonzero(utterances.labels == speaker)
        # Two are held out, for a target trial, and two are left to train on.
        if len(rows) < 4:
            continue
        # A draw for each speaker, so that one more recording of another changes nothing here.
        order = numpy_generator(seed, speaker).permutation(rows)
        sessions = utterances.sessions[order]
        if (sessions != UNKNOWN).all() and len(np.unique(sessions)) > 1:
            order = order[np.argsort(sessions, kind="stable")]
        held.append(order[: max(2, len(order) // 3)])
    if len(held) < 2:
        raise ValueError(
            "too little to hold anything out for validation: "
            f"{len(held)} of {len(utterances.speakers)} speakers have four utterances or more, at least two must"
        )
    validation = np.sort(np.concatenate(held))
    train = np.setdiff1d(np.arange(len(utterances)), validation)
    return Split(train, validation, np.empty(0, dtype=np.int64), is_speaker_disjoint=False)
