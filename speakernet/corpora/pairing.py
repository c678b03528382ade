"""Trials from utterances: all pairs, a random number, balanced by speaker, or hard negatives from embeddings.

Pure functions of arrays and a seed; reading and writing lists is done by the callers. A pair stands once, whatever its
order, and no utterance is paired with itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from speakernet.corpora.utterances import UNKNOWN, Utterances
from speakernet.random import numpy_generator

BLOCK_ROWS = 1024
# Of drawing, before fewer pairs than asked for are given: rules may leave next to none to find.
MAX_ROUNDS = 50
DEFAULT_TARGETS_PER_SPEAKER = 50
DEFAULT_NONTARGETS_PER_TARGET = 5


@dataclass(frozen=True)
class PairRules:
    """Which pairs are allowed.

    Attributes:
        other_session: target pairs from one known session are left out (the room would give the answer away).
        same_gender: non-target pairs of speakers of different known gender are left out (too easy).
    """

    other_session: bool = True
    same_gender: bool = False


@dataclass(frozen=True)
class Pairs:
    """Trials as rows of the utterances: enrol, test int64 (trials,) and labels int8 (trials,), 1 for targets."""

    enrol: np.ndarray
    test: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, utterances: Utterances) -> Iterator[tuple[int, str, str]]:
        """(label, enrol, test) with names, ready for `write_trials`."""
        for label, enrol, test in zip(self.labels.tolist(), self.enrol.tolist(), self.test.tolist(), strict=True):
            yield label, utterances.names[enrol], utterances.names[test]


def allowed(utterances: Utterances, enrol: np.ndarray, test: np.ndarray, rules: PairRules) -> np.ndarray:
    """Which pairs the rules allow, bool of the pairs' shape."""
    left, right = utterances.labels[enrol], utterances.labels[test]
    is_target = left == right
    keep = enrol != test
    if rules.other_session:
        first, second = utterances.sessions[enrol], utterances.sessions[test]
        keep &= ~(is_target & (first == second) & (first != UNKNOWN))
    if rules.same_gender:
        first, second = utterances.genders[left], utterances.genders[right]
        keep &= is_target | (first == second) | (first == UNKNOWN) | (second == UNKNOWN)
    return keep


def all_pairs(utterances: Utterances, rows: np.ndarray, rules: PairRules) -> Pairs:
    """Every allowed pair among the rows, in order; n (n - 1) / 2 of them without rules."""
    enrol, test = [], []
    for start in range(0, len(rows), BLOCK_ROWS):
        left = np.arange(start, min(start + BLOCK_ROWS, len(rows)))[:, None]
        right = np.arange(len(rows))[None, :]
        # By blocks: all pairs of 100,000 utterances at once would take 10 GB a mask.
        keep = (left < right) & allowed(utterances, rows[left], rows[right], rules)
        found = np.nonzero(keep)
        enrol.append(rows[start + found[0]])
        test.append(rows[found[1]])
    return _pairs(utterances, np.concatenate(enrol or [rows[:0]]), np.concatenate(test or [rows[:0]]))


def random_pairs(utterances: Utterances, rows: np.ndarray, num_trials: int, rules: PairRules, seed: int) -> Pairs:
    """`num_trials` different pairs, drawn evenly from all allowed ones; fewer where there are no more."""
    possible = len(rows) * (len(rows) - 1) // 2
    # Near the end of what there is, drawing again and again would find little that is new.
    if num_trials * 4 >= possible:
        every = all_pairs(utterances, rows, rules)
        chosen = numpy_generator(seed).permutation(len(every))[:num_trials]
        return _take(every, np.sort(chosen))
    random = numpy_generator(seed)
    codes = np.empty(0, dtype=np.int64)
    for _ in range(MAX_ROUNDS):
        first, second = random.integers(0, len(rows), size=(2, 2 * num_trials))
        low, high = np.minimum(first, second), np.maximum(first, second)
        keep = allowed(utterances, rows[low], rows[high], rules)
        codes = _unique_in_order(np.concatenate([codes, low[keep] * len(rows) + high[keep]]))
        if len(codes) >= num_trials:
            break
    low, high = np.divmod(codes[:num_trials], len(rows))
    return _pairs(utterances, rows[low], rows[high])


def balanced_pairs(
    utterances: Utterances,
    rows: np.ndarray,
    rules: PairRules,
    seed: int,
    targets_per_speaker: int = DEFAULT_TARGETS_PER_SPEAKER,
    nontargets_per_target: int = DEFAULT_NONTARGETS_PER_TARGET,
) -> Pairs:
    """The same number of trials for every speaker, as far as his or her utterances reach.

    Each speaker gives up to `targets_per_speaker` target pairs, and for each of them `nontargets_per_target` pairs with
    an utterance of another speaker, the others drawn evenly.
    """
    labels = utterances.labels[rows]
    speakers = np.unique(labels)
    members = {int(speaker): rows[labels == speaker] for speaker in speakers}
    enrol, test = [], []
    seen: set[tuple[int, int]] = set()
    for speaker in speakers.tolist():
        own = members[speaker]
        # A generator for each speaker: one more speaker leaves the others' draws as they were.
        random = numpy_generator(seed, speaker)
        targets = _target_pairs(utterances, own, rules, targets_per_speaker, random)
        enrol += [targets[0]]
        test += [targets[1]]
        others = speakers[speakers != speaker]
        if rules.same_gender and utterances.genders[speaker] != UNKNOWN:
            kinds = utterances.genders[others]
            others = others[(kinds == utterances.genders[speaker]) | (kinds == UNKNOWN)]
        # A speaker without a target pair (one session, one utterance) still gives non-targets.
        wanted = max(1, len(targets[0])) * nontargets_per_target
        pairs = _nontarget_pairs(own, others, members, wanted, random, seen)
        enrol += [pairs[:, 0]]
        test += [pairs[:, 1]]
    return _pairs(utterances, np.concatenate(enrol), np.concatenate(test))


def hard_pairs(
    utterances: Utterances, rows: np.ndarray, embeddings: np.ndarray, rules: PairRules, nearest: int, seed: int
) -> Pairs:
    """The `nearest` most alike utterances of other speakers for every utterance, and the balanced targets.

    Args:
        utterances: all of them.
        rows: those to pair.
        embeddings: one for each of `rows`, float (rows, dim), any length.
        rules: which pairs are allowed.
        nearest: hard negatives for each utterance.
        seed: for the targets.
    """
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    # Half the memory of the scores; the ranks of neighbours do not need more digits.
    unit = unit.astype(np.float32)
    codes = []
    nearest = min(nearest, len(rows) - 1)
    for start in range(0, len(rows), BLOCK_ROWS):
        left = np.arange(start, min(start + BLOCK_ROWS, len(rows)))
        scores = unit[left] @ unit.T
        pair_rows = np.broadcast_arrays(rows[left][:, None], rows[None, :])
        keep = allowed(utterances, pair_rows[0], pair_rows[1], rules)
        keep &= utterances.labels[pair_rows[0]] != utterances.labels[pair_rows[1]]
        scores[~keep] = -np.inf
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
    return _pairs(utterances, enrol, test)


def _target_pairs(
    utterances: Utterances, own: np.ndarray, rules: PairRules, wanted: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    if len(own) > 200:
        # A speaker with thousands of utterances has millions of pairs; a sample of them serves as well.
        own = np.sort(random.permutation(own)[:200])
    low, high = np.triu_indices(len(own), k=1)
    keep = allowed(utterances, own[low], own[high], rules)
    low, high = low[keep], high[keep]
    chosen = np.sort(random.permutation(len(low))[:wanted])
    return own[low[chosen]], own[high[chosen]]


def _nontarget_pairs(
    own: np.ndarray,
    others: np.ndarray,
    members: dict[int, np.ndarray],
    wanted: int,
    random: np.random.Generator,
    seen: set[tuple[int, int]],
) -> np.ndarray:
    """Up to `wanted` new pairs of an own utterance and one of another speaker, int64 (pairs, 2); grows `seen`."""
    pairs: list[tuple[int, int]] = []
    for _ in range(MAX_ROUNDS if len(others) else 0):
        for left in random.choice(own, size=wanted).tolist():
            candidates = members[int(others[random.integers(len(others))])]
            right = int(candidates[random.integers(len(candidates))])
            pair = (min(left, right), max(left, right))
            # Two speakers may draw the same pair, each from their own side.
            if pair not in seen:
                seen.add(pair)
                pairs.append((left, right))
            if len(pairs) == wanted:
                return np.array(pairs, dtype=np.int64)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _pairs(utterances: Utterances, enrol: np.ndarray, test: np.ndarray) -> Pairs:
    labels = (utterances.labels[enrol] == utterances.labels[test]).astype(np.int8)
    return Pairs(enrol.astype(np.int64), test.astype(np.int64), labels)


def _take(pairs: Pairs, rows: np.ndarray) -> Pairs:
    return Pairs(pairs.enrol[rows], pairs.test[rows], pairs.labels[rows])


def _unique_in_order(codes: np.ndarray) -> np.ndarray:
    _, first = np.unique(codes, return_index=True)
    return codes[np.sort(first)]
