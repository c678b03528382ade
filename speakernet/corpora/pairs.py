"""Trials from utterances: all, random, balanced or hard pairs, trials to calibrate on, held-out
speakers.

A pair occurs only once, in one of its orders, and no utterance is paired with itself. Every draw
comes from the seed and, where speakers are drawn for, from the speaker's number, so that a new
speaker does not change the trials of the others.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from speakernet.corpora.utterances import UNKNOWN, Utterances
from speakernet.data.lists import ListError, TrainingList, TrialList, repeated_rows
from speakernet.random import numpy_generator

BLOCK_ROWS = 1024
# Rounds of drawing before fewer pairs than requested are returned: rules may allow next to none.
MAX_ROUNDS = 50
DEFAULT_TARGETS_PER_SPEAKER = 50
DEFAULT_NONTARGETS_PER_TARGET = 5
#: A speaker with thousands of utterances has millions of pairs; a sample is just as good.
MAX_PAIRED = 200
FEW_PAIRS = 20_000
"""Up to this many, all pairs are taken: they are scored in no time, and a threshold at 0.1 % false
accepts needs 10,000 pairs of different speakers."""
HELD_OUT_STREAM = 7301
CALIBRATION_STREAM = 7302
CALIBRATION_UTTERANCES = 6
"""Per speaker, for calibration trials: further utterances of one speaker add little."""
CALIBRATION_SPEAKERS = 1000
"""At most this many, and half of a list with as many, calibrate: the others remain for a cohort."""


@dataclass(frozen=True)
class PairRules:
    """Which pairs are allowed."""

    other_session: bool = True
    same_gender: bool = False


@dataclass(frozen=True)
class Pairs:
    """Trials as rows of the utterances: enrol, test int64 (trials,) and labels int8 (trials,), 1
    for targets.
    """

    enrol: ndarray
    test: ndarray
    labels: ndarray

    @classmethod
    def of(cls, utterances: Utterances, enrol: ndarray, test: ndarray) -> "Pairs":
        labels = (utterances.labels[enrol] == utterances.labels[test]).astype(np.int8)
        return cls(enrol.astype(np.int64), test.astype(np.int64), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, utterances: Utterances) -> Iterator[tuple[int, str, str]]:
        """(label, enrol, test) with names, ready for `write_trials`."""
        columns = (self.labels.tolist(), self.enrol.tolist(), self.test.tolist())
        for label, enrol, test in zip(*columns, strict=True):
            yield label, utterances.names[enrol], utterances.names[test]


def find_allowed(
    utterances: Utterances, enrol: ndarray, test: ndarray, rules: PairRules
) -> ndarray:
    """Which pairs the rules allow, bool with the shape of the pairs."""
    left = utterances.labels[enrol]
    right = utterances.labels[test]
    is_target = left == right
    keep = enrol != test
    if rules.other_session:
        first = utterances.sessions[enrol]
        keep &= ~(is_target & (first == utterances.sessions[test]) & (first != UNKNOWN))
    if rules.same_gender:
        first = utterances.genders[left]
        second = utterances.genders[right]
        keep &= is_target | (first == second) | (first == UNKNOWN) | (second == UNKNOWN)
    return keep


def all_pairs(utterances: Utterances, rows: ndarray, rules: PairRules) -> Pairs:
    """Every allowed pair among the rows, in order; n (n - 1) / 2 pairs without rules."""
    # Empty arrays first, because `concatenate` needs at least one.
    enrol = [rows[:0]]
    test = [rows[:0]]
    right = np.arange(len(rows))[None, :]
    for start in range(0, len(rows), BLOCK_ROWS):
        # In blocks: all pairs of 100,000 utterances at once would take 10 GB per mask.
        left = np.arange(start, min(start + BLOCK_ROWS, len(rows)))[:, None]
        is_pair = (left < right) & find_allowed(utterances, rows[left], rows[right], rules)
        first, second = np.nonzero(is_pair)
        enrol.append(rows[start + first])
        test.append(rows[second])
    return Pairs.of(utterances, np.concatenate(enrol), np.concatenate(test))


def random_pairs(
    utterances: Utterances, rows: ndarray, num_trials: int, rules: PairRules, seed: int
) -> Pairs:
    """`num_trials` distinct pairs, drawn uniformly from all allowed ones; fewer if there are not
    that many.
    """
    random = numpy_generator(seed)
    # If a large share of all pairs is wanted, repeated draws would find little that is new.
    if num_trials * 4 >= len(rows) * (len(rows) - 1) // 2:
        every = all_pairs(utterances, rows, rules)
        chosen = np.sort(random.permutation(len(every))[:num_trials])
        return Pairs(every.enrol[chosen], every.test[chosen], every.labels[chosen])
    # A pair is one number, low * n + high, so that `unique` finds repetitions. The order of the
    # draws is kept: of sorted pairs, the first `num_trials` would all be of the first rows.
    codes = np.empty(0, dtype=np.int64)
    for _ in range(MAX_ROUNDS):
        first, second = random.integers(0, len(rows), size=(2, 2 * num_trials))
        low = np.minimum(first, second)
        high = np.maximum(first, second)
        keep = find_allowed(utterances, rows[low], rows[high], rules)
        codes = np.concatenate([codes, low[keep] * len(rows) + high[keep]])
        codes = codes[np.sort(np.unique(codes, return_index=True)[1])]
        if len(codes) >= num_trials:
            break
    low, high = np.divmod(codes[:num_trials], len(rows))
    return Pairs.of(utterances, rows[low], rows[high])


def fair_pairs(
    utterances: Utterances,
    rows: ndarray,
    rules: PairRules,
    seed: int,
    targets_per_speaker: int,
) -> Pairs:
    """All pairs if they are few and no speaker has more than `targets_per_speaker` target pairs,
    else balanced ones.
    """
    counts = np.bincount(utterances.labels[rows])
    most_targets = int((counts * (counts - 1) // 2).max(initial=0))
    if len(rows) * (len(rows) - 1) // 2 <= FEW_PAIRS and most_targets <= targets_per_speaker:
        return all_pairs(utterances, rows, rules)
    return balanced_pairs(utterances, rows, rules, seed, targets_per_speaker)


# Why balanced. A speaker with n utterances has n (n - 1) / 2 target pairs, so among all pairs, or
# random ones, a few talkative speakers decide the error rate. Here each speaker gives the same
# number as far as possible. Non-targets are drawn by speaker first, then by utterance, for the same
# reason. Fifty targets and five non-targets for each are round figures: more trials of the same
# speakers narrow the interval little, because it is the speakers that are drawn.
def balanced_pairs(
    utterances: Utterances,
    rows: ndarray,
    rules: PairRules,
    seed: int,
    targets_per_speaker: int = DEFAULT_TARGETS_PER_SPEAKER,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> Pairs:
    """The same number of trials for every speaker, as far as the utterances allow.

    Each speaker gives up to `targets_per_speaker` target pairs and, for each of these,
    `nontargets_per_target` pairs with an utterance of another speaker, drawn uniformly.
    """
    labels = utterances.labels[rows]
    speakers = np.unique(labels)
    members = {speaker: rows[labels == speaker] for speaker in speakers.tolist()}
    enrol = []
    test = []
    seen: set[tuple[int, int]] = set()
    for speaker, utterances_of_speaker in members.items():
        # One generator per speaker, so that another speaker does not change these draws.
        random = numpy_generator(seed, speaker)
        paired = utterances_of_speaker
        if len(paired) > MAX_PAIRED:
            paired = np.sort(random.permutation(paired)[:MAX_PAIRED])
        low, high = np.triu_indices(len(paired), k=1)
        keep = np.flatnonzero(find_allowed(utterances, paired[low], paired[high], rules))
        keep = keep[np.sort(random.permutation(len(keep))[:targets_per_speaker])]
        strangers = speakers[speakers != speaker]
        gender = utterances.genders[speaker]
        if rules.same_gender and gender != UNKNOWN:
            strangers = strangers[np.isin(utterances.genders[strangers], (gender, UNKNOWN))]
        # A speaker without a target pair (one session, one utterance) still gives non-targets.
        num_nontargets = max(1, len(keep)) * nontargets_per_target
        nontargets = _draw_nontargets(
            utterances_of_speaker,
            [members[stranger] for stranger in strangers.tolist()],
            num_nontargets,
            random,
            seen,
        )
        enrol += [paired[low[keep]], nontargets[:, 0]]
        test += [paired[high[keep]], nontargets[:, 1]]
    return Pairs.of(utterances, np.concatenate(enrol), np.concatenate(test))


def _draw_nontargets(
    utterances_of_speaker: ndarray,
    utterances_of_strangers: list[ndarray],
    num_pairs: int,
    random: np.random.Generator,
    seen: set[tuple[int, int]],
) -> ndarray:
    """Up to `num_pairs` new pairs of a speaker's utterances with those of strangers, int64 (pairs,
    2); updates `seen`.
    """
    pairs: list[tuple[int, int]] = []
    for _ in range(MAX_ROUNDS if utterances_of_strangers else 0):
        for left in random.choice(utterances_of_speaker, size=num_pairs).tolist():
            candidates = utterances_of_strangers[random.integers(len(utterances_of_strangers))]
            right = int(candidates[random.integers(len(candidates))])
            pair = (min(left, right), max(left, right))
            # Two speakers may draw the same pair, each from its own side.
            if pair not in seen:
                seen.add(pair)
                pairs.append((left, right))
            if len(pairs) == num_pairs:
                return np.array(pairs, dtype=np.int64)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


# What calibration needs is not more trials but trials like those to come. A score means less the
# shorter a recording is, so durations are drawn from those in use, and each speaker gives the
# utterances nearest to the drawn ones, from different sessions as far as there are any. Speakers
# count, not utterances: a thousand are plenty, and the cohort needs some that were not used here.
def calibration_pairs(
    utterances: Utterances,
    seconds: ndarray,
    seconds_in_use: ndarray,
    rules: PairRules,
    seed: int,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> tuple[Utterances, Pairs]:
    """Balanced pairs among a few utterances of each speaker, with durations drawn from those in
    use.

    A speaker's utterances come from as many sessions as possible; those of a single session are
    paired within it. Of many speakers, only `CALIBRATION_SPEAKERS` are used, since score
    normalisation needs a cohort of other speakers.

    Args:
        utterances: for example those of a training list.
        seconds: (utterances,) their durations.
        seconds_in_use: any number of durations of recordings in use.
        rules: which pairs are allowed.
        seed: seed of every draw.
        nontargets_per_target: see `balanced_pairs`.

    Returns:
        The chosen utterances, and pairs of their rows.
    """
    chosen = []
    logs = np.log(np.maximum(seconds, 1e-3))
    speakers = np.arange(len(utterances.speakers))
    if len(speakers) >= CALIBRATION_SPEAKERS:
        most = min(CALIBRATION_SPEAKERS, len(speakers) // 2)
        speakers = np.sort(numpy_generator(seed, CALIBRATION_STREAM).permutation(speakers)[:most])
    for speaker in speakers.tolist():
        rows = np.flatnonzero(utterances.labels == speaker)
        random = numpy_generator(seed, CALIBRATION_STREAM, speaker)
        sessions = utterances.sessions[rows]
        times_used = np.zeros(len(rows))
        drawn = random.choice(seconds_in_use, min(CALIBRATION_UTTERANCES, len(rows)))
        for log_seconds in np.log(drawn):
            # The utterance with the nearest duration, from the least used sessions.
            nearest = np.lexsort((np.abs(logs[rows] - log_seconds), times_used))[0]
            times_used[sessions == sessions[nearest]] += 1
            times_used[nearest] = np.inf
            chosen.append(rows[nearest])
    few = utterances.take(np.sort(chosen))
    # A speaker with one session has no pair between sessions. Rather than lose this speaker, the
    # session counts as unknown, which allows pairs within it.
    for speaker in range(len(few.speakers)):
        is_of_speaker = few.labels == speaker
        if len(np.unique(few.sessions[is_of_speaker])) == 1:
            few.sessions[is_of_speaker] = UNKNOWN
    every_row = np.arange(len(few))
    return few, balanced_pairs(
        few, every_row, rules, seed, nontargets_per_target=nontargets_per_target
    )


def hard_pairs(
    utterances: Utterances,
    rows: ndarray,
    embeddings: ndarray,
    rules: PairRules,
    nearest: int,
    seed: int,
) -> Pairs:
    """The `nearest` most similar utterances of other speakers for every utterance, and the balanced
    targets.

    `embeddings` has one of any norm for each of `rows`, float (rows, dim); the seed is for the
    targets.
    """
    # In float32 the scores take half the memory; ranking neighbours does not need more digits.
    # Ranked by cosine, as in scoring, so that the pairs are hard for the model that is tested.
    norms = np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    unit = (embeddings / norms).astype(np.float32)
    codes = []
    nearest = min(nearest, len(rows) - 1)
    for start in range(0, len(rows), BLOCK_ROWS):
        left = np.arange(start, min(start + BLOCK_ROWS, len(rows)))
        scores = unit[left] @ unit.T  # (block, rows)
        enrol = rows[left][:, None]
        is_nontarget = utterances.labels[enrol] != utterances.labels[rows]
        scores[~(is_nontarget & find_allowed(utterances, enrol, rows, rules))] = -np.inf
        best = np.argpartition(-scores, nearest - 1, axis=1)[:, :nearest]
        is_real = np.isfinite(np.take_along_axis(scores, best, axis=1))
        low = np.minimum(left[:, None], best)[is_real]
        high = np.maximum(left[:, None], best)[is_real]
        codes.append(low * len(rows) + high)
    low, high = np.divmod(np.unique(np.concatenate(codes)), len(rows))
    balanced = balanced_pairs(utterances, rows, rules, seed)
    is_target = balanced.labels == 1
    enrol = np.concatenate([balanced.enrol[is_target], rows[low]])
    test = np.concatenate([balanced.test[is_target], rows[high]])
    return Pairs.of(utterances, enrol, test)


class HeldOut(NamedTuple):
    """A training list without the held-out speakers, and trials among the held-out speakers."""

    training: TrainingList
    trials: TrialList


def hold_out(
    training: TrainingList,
    num_speakers: int,
    seed: int,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> HeldOut:
    """Hold out `num_speakers` speakers, drawn from those with at least two utterances, and pair
    their utterances.

    Every held-out speaker gives up to 50 target trials and several non-target trials for each of
    these. The same list, number and seed give the same speakers and trials. Sessions are unknown
    here: if speakers have several, use `prepare folder` for a better split.
    """
    utterances = Utterances.from_list(training)
    counts = utterances.counts()
    usable = np.flatnonzero(counts >= 2)
    # Trials need two speakers, and so does training.
    most = max(0, min(len(usable), len(counts) - 2))
    if not 2 <= num_speakers <= most:
        raise ListError(
            f"--speakers {num_speakers}: {training.source} has {len(counts):,} speakers, "
            f"{len(usable):,} of them with at least two utterances; expected 2 to {most}"
        )
    chosen = numpy_generator(seed, HELD_OUT_STREAM).permutation(usable)[:num_speakers]
    is_held_out = np.isin(training.labels, chosen)
    rest = utterances.take(np.flatnonzero(~is_held_out))
    rows = np.flatnonzero(is_held_out)
    # A recording that is listed twice must not be paired with itself.
    rows = np.delete(rows, repeated_rows(training.paths.take(rows)))
    pairs = balanced_pairs(
        utterances, rows, PairRules(), seed, nontargets_per_target=nontargets_per_target
    )
    # Only names that occur in a pair, because scoring embeds every name of a trial list.
    used, numbers = np.unique(np.concatenate([pairs.enrol, pairs.test]), return_inverse=True)
    enrol, test = numbers.reshape(2, -1).astype(np.int32)
    names = training.paths.take(used)
    digest = hashlib.sha256()
    for array in (names.content, names.offsets, enrol, test, pairs.labels):
        digest.update(array.tobytes())
    source = f"{training.source}: {num_speakers} held-out speakers"
    return HeldOut(
        TrainingList(rest.names, rest.labels, rest.speakers, training.source, training.sha256),
        TrialList(names, enrol, test, pairs.labels, source, digest.hexdigest()),
    )
