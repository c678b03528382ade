"""Splits and trials: counted by hand, without overlap, reproducible by seed."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speakernet.corpora.pairs import (
    PairRules,
    all_pairs,
    balanced_pairs,
    hard_pairs,
    random_pairs,
)
from speakernet.corpora.utterances import Row, Utterances, split_speakers

ANY = PairRules(other_session=False)


def corpus(speakers, utterances, sessions=0):
    return Utterances.from_rows(
        Row(f"s{s:03}", f"s{s:03}/{u}.wav", str(u % sessions) if sessions else "", "fm"[s % 2])
        for s in range(speakers)
        for u in range(utterances)
    )


def labelled(pairs):
    """Each pair, in any order, with its label."""
    first, second = np.sort([pairs.enrol, pairs.test], axis=0)
    return list(zip(first.tolist(), second.tolist(), pairs.labels.tolist(), strict=True))


def every_row(utterances):
    return np.arange(len(utterances))


def test_all_pairs():
    utterances = corpus(2, 2)
    pairs = all_pairs(utterances, every_row(utterances), ANY)
    names = ["s000/0.wav", "s000/1.wav", "s001/0.wav", "s001/1.wav"]
    assert [(a, b) for _, a, b in pairs.rows(utterances)] == list(itertools.combinations(names, 2))
    assert pairs.labels.tolist() == [1, 0, 0, 0, 0, 1]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 8),
    st.integers(1, 6),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_rules(speakers, count, sessions, other_session, same_gender, seed):
    utterances = corpus(speakers, count, sessions)
    rows = every_row(utterances)
    rules = PairRules(other_session=other_session, same_gender=same_gender)
    embeddings = np.random.default_rng(seed).standard_normal((len(rows), 4))
    possible = all_pairs(utterances, rows, rules)
    is_target = utterances.labels[possible.enrol] == utterances.labels[possible.test]
    assert (possible.labels == is_target).all()
    is_other = utterances.sessions[possible.enrol] != utterances.sessions[possible.test]
    assert not (other_session and sessions) or is_other[is_target].all()
    for pairs in (
        first := random_pairs(utterances, rows, 7, rules, seed),
        balanced_pairs(utterances, rows, rules, seed, 3, 2),
        hard_pairs(utterances, rows, embeddings, rules, 2, seed),
    ):
        made = labelled(pairs)
        assert len(set(made)) == len(made), "no pair twice, in either order"
        assert set(made) <= set(labelled(possible))
    assert len(first) <= 7
    assert np.array_equal(first.enrol, random_pairs(utterances, rows, 7, rules, seed).enrol)


def test_balanced_trials():
    utterances = corpus(10, 6)
    pairs = balanced_pairs(
        utterances, every_row(utterances), ANY, 1, targets_per_speaker=4, nontargets_per_target=3
    )
    targets = Counter(utterances.labels[pairs.enrol[pairs.labels == 1]].tolist())
    nontargets = Counter(utterances.labels[pairs.enrol[pairs.labels == 0]].tolist())
    assert targets == dict.fromkeys(range(10), 4)
    assert nontargets == dict.fromkeys(range(10), 12)


def test_hard_negatives():
    utterances = corpus(3, 2)
    angles = np.radians([0, 1, 2, 90, 91, 180])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    pairs = hard_pairs(utterances, every_row(utterances), embeddings, ANY, nearest=1, seed=1)
    is_hard = pairs.labels == 0
    made = np.sort([pairs.enrol[is_hard], pairs.test[is_hard]], axis=0).T.tolist()
    assert sorted(made) == [[0, 2], [1, 2], [3, 4], [3, 5]]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.integers(1, 7), st.integers(0, 5))
def test_split(speakers, count, seed):
    utterances = corpus(speakers, count)
    try:
        split = split_speakers(utterances, seed)
    except ValueError as error:
        assert speakers < 4 or count < 2, str(error)
        return
    rows = [split.train, split.validation, split.test]
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(utterances)))
    if speakers >= 4:
        parts = [set(utterances.labels[part].tolist()) for part in rows]
        assert sum(map(len, parts)) == len(set.union(*parts))
        assert len(parts[0]) >= 2
        assert len(parts[1]) >= 2


def test_seed_and_genders_of_a_split():
    utterances = corpus(100, 3)
    split = split_speakers(utterances, 1)
    assert np.array_equal(split.validation, split_speakers(utterances, 1).validation)
    assert not np.array_equal(split.validation, split_speakers(utterances, 2).validation)
    speakers = np.unique(utterances.labels[split.validation])
    assert len(speakers) == 10
    assert abs(int((utterances.genders[speakers] == ord("f")).sum()) - 5) <= 1


def test_impossible_splits():
    with pytest.raises(ValueError, match="at least two"):
        split_speakers(corpus(1, 5), 1)
    with pytest.raises(ValueError, match="add up to less than 1"):
        split_speakers(corpus(20, 5), 1, 0.5, 0.5)
