"""Identify an embedding as a person in a store or as a stranger; `identify` and `who` share this
rule.
"""

from dataclasses import dataclass

import numpy as np

from speakernet.inference.decision import Decision, DecisionRule
from speakernet.inference.people import TOP, PeopleStore


@dataclass(frozen=True)
class Identification:
    """The result of identifying a recording; `name` is None for a stranger."""

    name: str | None
    decision: Decision | None
    candidates: tuple[tuple[str, float], ...]
    num_people: int
    stranger_rate: float | None
    """Expected share of strangers that get a name; None if unknown."""


def open_set_threshold(
    rule: DecisionRule,
    num_people: int,
    false_accept_rate: float | None = None,
    threshold: float | str | None = None,
) -> float | str:
    """The threshold that scores are compared with, checked before anything is embedded.

    Raises:
        ValueError: both limits were given, or a number is out of range; `NotCalibratedError`
            without a threshold.
    """
    if threshold is None:
        return rule.threshold_of_many(num_people, false_accept_rate)
    rule.decide(0.0, false_accept_rate=false_accept_rate, threshold=threshold)
    return threshold


def identify_embedding(
    rule: DecisionRule,
    store: PeopleStore,
    embedding: np.ndarray,
    *,
    top: int = TOP,
    false_accept_rate: float | None = None,
    threshold: float | str | None = None,
    speech_seconds: float | None = None,
) -> Identification:
    """Compare an embedding with everybody in the store.

    Odds below 1 name nobody unless `threshold` is given, and neither does too little speech
    (`DecisionRule.decide`).
    """
    num_people = len(store)
    needs_odds = threshold is None
    limit = open_set_threshold(rule, num_people, false_accept_rate, threshold)
    rate = rule.decide(0.0, threshold=limit).false_accept_rate
    stranger_rate = None if rate is None else min(1.0, rate * num_people)
    candidates = tuple(store.identify(np.asarray(embedding), top=max(1, top)))
    if not candidates:
        return Identification(None, None, (), num_people, stranger_rate)
    decision = rule.decide(candidates[0][1], threshold=limit, speech_seconds=speech_seconds)
    is_somebody = decision.same_speaker and not (
        needs_odds and (decision.log_likelihood_ratio or 0.0) < 0
    )
    return Identification(
        candidates[0][0] if is_somebody else None, decision, candidates, num_people, stranger_rate
    )
