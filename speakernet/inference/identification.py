"""Identify a voice as a person in a store or as a stranger, as `identify` and `who` do."""

import functools
from dataclasses import dataclass

import numpy as np

from speakernet.inference.decision import Decision, DecisionLimits, DecisionRule
from speakernet.inference.people import TOP, PeopleStore
from speakernet.inference.protocol import Verifier
from speakernet.inference.recordings import Audio, Heard


@dataclass(frozen=True)
class Identification:
    """The result of identifying a recording; `name` is None for a stranger."""

    name: str | None
    decision: Decision | None
    candidates: tuple[tuple[str, float], ...]
    num_people: int
    stranger_rate: float | None
    """Expected share of strangers that get a name; None if unknown."""
    ratios: tuple[float | None, ...] = ()
    """The log-likelihood ratio of each candidate; None without a calibration."""


@dataclass(frozen=True)
class Namer:
    """Names voices by the people in a store."""

    rule: DecisionRule
    store: PeopleStore
    limits: DecisionLimits

    @functools.cached_property
    def person_seconds(self) -> dict[str, float]:
        """Seconds of speech that each person is enrolled with, for a calibration with durations."""
        # A query that most calibrations do not need.
        if not self.rule.knows_durations:
            return {}
        return {person.name: person.speech_seconds for person in self.store.people()}

    def threshold(self) -> float | str:
        """The threshold that scores are compared with: a score or the name of one. Call it before
        anything is embedded, for its errors.

        Raises:
            ValueError: both limits were given, or a number is out of range; `NotCalibratedError`
                without a threshold.
        """
        threshold = self.limits.get("threshold")
        if threshold is None:
            return self.rule.threshold_of_many(
                len(self.store), self.limits.get("false_accept_rate")
            )
        # Only for its errors, which do not depend on the score.
        self.rule.decide(0.0, **self.limits)
        return threshold

    def rule_for(self, name: str, speech_seconds: float | None) -> DecisionRule:
        """The rule for a person and a voice with this much speech."""
        return self.rule.for_seconds(self.person_seconds.get(name, 0.0), speech_seconds or 0.0)

    def identify(
        self, embedding: np.ndarray, *, top: int = TOP, speech_seconds: float | None = None
    ) -> Identification:
        """Compare an embedding with everybody in the store.

        Odds below 1 name nobody unless a threshold is given, and neither does too little speech
        (`DecisionRule.decide`).
        """
        # Everybody is scored, and only the nearest person can be the answer. With N people a
        # stranger has N chances to reach the threshold by accident, so the threshold is stricter
        # the more people there are (`threshold_of_many`). Its rate was measured on pairs of the
        # calibration list, whose strangers may be less alike than the people here.
        num_people = len(self.store)
        threshold = self.threshold()
        # The rate does not depend on the score either.
        rate = self.rule.decide(0.0, threshold=threshold).false_accept_rate
        stranger_rate = None if rate is None else min(1.0, rate * num_people)
        candidates = tuple(self.store.identify(embedding, max(1, top)))
        if not candidates:
            return Identification(
                name=None,
                decision=None,
                candidates=(),
                num_people=num_people,
                stranger_rate=stranger_rate,
            )
        ratios = []
        for person, similarity in candidates:
            rule = self.rule_for(person, speech_seconds)
            ratios.append(rule.log_likelihood_ratio(similarity))
        name, score = candidates[0]
        rule = self.rule_for(name, speech_seconds)
        decision = rule.decide(score, threshold=threshold, speech_seconds=speech_seconds)
        # After a short calibration list the threshold may be so low that a stranger is more likely
        # than the person. A user who names a threshold has accepted that.
        needs_odds = self.limits.get("threshold") is None
        ratio = decision.log_likelihood_ratio
        is_unlikely = needs_odds and ratio is not None and ratio < 0
        answer = name if decision.same_speaker and not is_unlikely else None
        return Identification(
            answer, decision, candidates, num_people, stranger_rate, tuple(ratios)
        )


def identify(
    verifier: Verifier,
    store: PeopleStore,
    audio: Audio | Heard,
    *,
    sample_rate: int | None = None,
    top: int = TOP,
    false_accept_rate: float | None = None,
    threshold: float | str | None = None,
) -> Identification:
    """Identify a recording as a person in a store or as a stranger.

    With N people, a stranger is compared N times. `false_accept_rate` applies to all of these
    together, so each comparison gets only 1/N of it. The model file's lowest threshold within this
    limit is used, or the strictest one if there is none; `stranger_rate` is the rate that results.
    Odds below 1 name nobody unless `threshold` is given.
    """
    limits = DecisionLimits(false_accept_rate=false_accept_rate, threshold=threshold)
    namer = Namer(verifier.rule, store, limits)
    # Checked before anything is embedded.
    namer.threshold()
    recording, quality = verifier.hear(audio, sample_rate)
    embedding = verifier.embed(recording)
    return namer.identify(embedding, top=top, speech_seconds=quality.speech_seconds)
