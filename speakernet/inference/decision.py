"""From a score to a decision: same speaker or not, at which threshold, and how certain.

Thresholds and calibrations of a model file belong to one way of embedding and scoring. Only those
for the scoring of `SpeakerVerifier` (one embedding a recording; cosine, or PLDA after adaptation)
are used here: those fitted on detected speech, or those of files from before version 0.4.0, fitted
on whole recordings. No audio or network is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from speakernet.evaluation.calibration import (
    EER_NAME,
    FALSE_ACCEPT_RATES,
    MIN_NONTARGETS,
    SCORE_ONLY,
    AffineCalibration,
    false_accept_rate_of,
    quality_columns,
    threshold_label,
    threshold_name,
    threshold_way,
    too_few_nontargets,
)
from speakernet.evaluation.scoring import VERIFYING, WHOLE, verifying_backend
from speakernet.run_folder import BEST, LAST

DEFAULT_FALSE_ACCEPT_RATE = 0.01
"""The false-accept rate whose threshold is used by default."""
UNCALIBRATED_THRESHOLD = 0.4
"""A cosine that separates same from different speakers in most published networks; its error rate
is unknown."""
DEFAULT_THRESHOLD_NAME = "default"
ADVICE = (
    "fit one with `speakernet calibrate --model {} --trials LIST --audio FOLDER`, or give a "
    "threshold (`--threshold 0.5`, in Python `threshold=0.5`{})"
)
MIN_TEST_SECONDS = 1.0
"""Speech needed in a test; with less, scores vary so much that neither odds nor a name are
given."""
RECALIBRATE = (
    "calibrated on whole recordings by a version before 0.4.0, so pauses and noise count as the "
    "voice; `speakernet calibrate` fits it on detected speech"
)


class NotCalibratedError(ValueError):
    """The model file lacks the threshold that a decision needs; the message says how to fit one."""


@dataclass(frozen=True)
class Decision:
    """The decision about two recordings.

    Attributes:
        score: cosine of the two embeddings, or their PLDA score; higher means more alike.
        log_likelihood_ratio: natural logarithm of how many times as likely the score is from one
            speaker as from two; None without a calibration, or with too little speech.
        same_speaker: whether the score reaches the threshold; False with too little speech.
        threshold: the score from which the answer is `same_speaker`.
        false_accept_rate: the rate in the threshold's name, or the rate measured on its list
            (`eer`); None for `default` and for a threshold given as a number.
        speech_seconds: speech in the recording with less of it; None if unknown.
        is_at_bound: whether the ratio is the largest that the number of pairs behind the
            calibration supports.

    >>> Decision(0.71, 3.2, True, 0.4512, 0.01).sentence.partition("; ")[2]
    'the score is 24.5 times as likely from one speaker as from two'
    """

    score: float
    log_likelihood_ratio: float | None
    same_speaker: bool
    threshold: float
    false_accept_rate: float | None
    speech_seconds: float | None = None
    is_at_bound: bool = False

    @property
    def is_made(self) -> bool:
        """Whether there is enough speech to decide."""
        return self.speech_seconds is None or self.speech_seconds >= MIN_TEST_SECONDS

    @property
    def sentence(self) -> str:
        """The decision in words."""
        if not self.is_made:
            return (
                f"undecided: only {self.speech_seconds:.2f} s of speech was detected, expected at "
                f"least {MIN_TEST_SECONDS:g} s (score {self.score:.4f}, threshold "
                f"{self.threshold:.4f})"
            )
        answer, verb = (
            ("same speaker", "reaches") if self.same_speaker else ("different speakers", "is below")
        )
        rate = self.false_accept_rate
        errors = "error rate unknown" if rate is None else f"false accepts {100 * rate:.3g} %"
        words = (
            f"{answer}: score {self.score:.4f} {verb} the threshold {self.threshold:.4f} ({errors})"
        )
        ratio = self.log_likelihood_ratio
        if ratio is None:
            return words
        odds = (
            f"{'more than ' if self.is_at_bound else ''}{float(f'{math.exp(abs(ratio)):.3g}'):,.7g}"
        )
        sides = "one speaker as from two" if ratio >= 0 else "two speakers as from one"
        # Odds may favour one speaker below a strict threshold.
        of = (
            "for this threshold"
            if rate is None
            else f"to keep false accepts at or below {100 * rate:.3g} %"
        )
        short = f", which is too weak {of}" if ratio >= 0 and not self.same_speaker else ""
        return f"{words}; the score is {odds} times as likely from {sides}{short}"


@dataclass(frozen=True)
class DecisionRule:
    """The thresholds and the calibration in a model file that apply to verification.

    Attributes:
        calibration: maps a score to its log-likelihood ratio; None without one.
        thresholds: as the model file holds them.
        advice: what to do if thresholds are missing.
        caution: a warning if the calibration was fitted on too few pairs, or on whole recordings.

    >>> rule = DecisionRule(None, ({"name": "far_1%", "threshold": 0.3},), "calibrate")
    >>> rule.decide(0.5).same_speaker, rule.decide(0.5, threshold=0.6).same_speaker
    (True, False)
    """

    calibration: AffineCalibration | None
    thresholds: Sequence[Mapping[str, Any]]
    advice: str
    caution: str = ""
    quality: tuple[AffineCalibration, Sequence[Mapping[str, Any]]] | None = None
    """A calibration with quality measures, and thresholds on its log-likelihood ratios."""
    scores: str = "cosine"
    """Kind of score: `cosine`, or `PLDA` for a file adapted by PLDA."""
    speech: str = VERIFYING.speech
    """What is embedded: `detected` speech, or the `whole` recording."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The smallest and the largest log-likelihood ratio that the calibration's number of pairs
    supports."""

    @classmethod
    def of_model_file(
        cls, contents: Mapping[str, Any], *, subtracts_mean: bool, name: str
    ) -> "DecisionRule":
        """The rule in the model file of this name, for scoring with or without its mean embedding
        subtracted.
        """
        fits = (contents.get("calibration") or {}).get("fits", [])
        limits = contents.get("thresholds") or ()
        backend = verifying_backend(contents)
        ways = [
            backend.describe(options) | {"subtract_mean": subtracts_mean}
            for options in (VERIFYING, WHOLE)
        ]
        # A file that was never calibrated has nothing that detected speech could contradict.
        way = next(
            (way for way in ways if any(known["backend"] == way for known in (*fits, *limits))),
            ways[0],
        )
        fitted = [fit for fit in fits if fit["backend"] == way and list(fit["inputs"]) == ["score"]]
        thresholds = [limit for limit in limits if limit["backend"] == way]
        speech = way.get("speech", WHOLE.speech)
        mean = " with its mean embedding subtracted" if subtracts_mean else ""
        scores = "PLDA" if way["score"] == "plda" else "cosine"
        default = (
            f"; `{DEFAULT_THRESHOLD_NAME}` means {UNCALIBRATED_THRESHOLD}"
            if scores == "cosine"
            else ""
        )
        advice = f"{name} has no calibration for {scores} scores{mean}; "
        advice += f"{BEST} beside it may have one; " if name.endswith(LAST) else ""
        advice += ADVICE.format(name, default)
        if not fitted:
            return cls(None, thresholds, advice, scores=scores, speech=speech)
        # Older files do not record the number of pairs.
        counts = [
            fitted[-1].get(kind, MIN_NONTARGETS) for kind in ("num_targets", "num_nontargets")
        ]
        cautions = [too_few_nontargets(counts[1]), RECALIBRATE if speech == WHOLE.speech else ""]
        caution = "; ".join(filter(None, cautions))
        quality = None
        for fit in fits:
            of_pairs = threshold_way(way, fit["inputs"])
            own = [limit for limit in limits if limit["backend"] == of_pairs]
            if fit["backend"] == way and own:
                quality = AffineCalibration.from_dict(fit), own
        calibration = AffineCalibration.from_dict(fitted[-1])
        bounds = (-largest_ratio(counts[0]), largest_ratio(counts[1]))
        return cls(calibration, thresholds, advice, caution, quality, scores, speech, bounds)

    def for_pair(self, values: Mapping[str, np.ndarray]) -> "DecisionRule":
        """The rule for two recordings with these quality measures, (2,) each."""
        assert self.quality is not None, "the model file has such a calibration"
        calibration, limits = self.quality
        row = quality_columns(calibration.inputs, np.zeros(1), values, np.array([0]), np.array([1]))
        # Turn each threshold on the ratio into the score that reaches it with these measures.
        weight = float(calibration.weights[0])
        offset = float(calibration.apply(row)[0])
        thresholds = [
            {**limit, "threshold": (limit["threshold"] - offset) / weight} for limit in limits
        ]
        of_score = AffineCalibration(np.array([weight]), offset, SCORE_ONLY, calibration.prior)
        return replace(self, calibration=of_score, thresholds=thresholds)

    def log_likelihood_ratio(self, score: float) -> float | None:
        """The calibrated score, within what the number of pairs supports; None without a
        calibration.
        """
        if self.calibration is None:
            return None
        ratio = float(self.calibration.apply(np.array([score]))[0])
        # `decide` refuses a ratio that is not finite, so the bounds must not hide it.
        return float(np.clip(ratio, *self.bounds)) if math.isfinite(ratio) else ratio

    def decide(
        self,
        score: float,
        *,
        false_accept_rate: float | None = None,
        threshold: float | str | None = None,
        speech_seconds: float | None = None,
    ) -> Decision:
        """Compare a score with a threshold.

        Args:
            score: cosine or PLDA score, as the model file scores.
            false_accept_rate: use the threshold for this rate, such as 0.01; if neither this nor
                `threshold` is given, the one at 0.01, or at the equal error rate if the file has
                none at 0.01.
            threshold: use this score instead, or a named threshold: `eer`, `far_1%`, or `default`,
                a cosine that needs no calibration and has no known error rate.
            speech_seconds: speech in the recording with less of it; with too little there are no
                odds.

        Raises:
            NotCalibratedError: the file has no such threshold; the message names the command that
                fits it.
            ValueError: both limits were given, a number is out of range, or `default` was given for
                PLDA scores.
        """
        if false_accept_rate is not None and threshold is not None:
            raise ValueError(
                "false_accept_rate and threshold were both given; expected only one of them"
            )
        known = {str(threshold["name"]): threshold for threshold in self.thresholds}
        if threshold is None:
            usual = threshold_name(_checked_rate(false_accept_rate))
            threshold = usual if usual in known or false_accept_rate is not None else EER_NAME
        rate = None
        if threshold == DEFAULT_THRESHOLD_NAME:
            if self.scores != "cosine":
                raise ValueError(
                    f"the threshold `default` is a cosine, but this model file gives {self.scores} "
                    f"scores; use {', '.join(known) or 'speakernet calibrate'}, or a number"
                )
            limit = UNCALIBRATED_THRESHOLD
        elif isinstance(threshold, str):
            if threshold not in known:
                rates = ", ".join(f"{100 * rate:g}" for rate in FALSE_ACCEPT_RATES)
                wanted = (
                    repr(threshold)
                    if false_accept_rate is None
                    else f"for {100 * false_accept_rate:g} % false accepts"
                )
                raise NotCalibratedError(
                    f"the model file has no threshold {wanted}; it has {', '.join(known)}. "
                    f"`speakernet calibrate` adds those for {rates} % if the trial list is long "
                    "enough; or give a score with `--threshold NUMBER`"
                    if known
                    else self.advice
                )
            limit = float(known[threshold]["threshold"])
            rate = _rate(known[threshold])
        else:
            limit = float(threshold)
        ratio = self.log_likelihood_ratio(score)
        if not all(map(math.isfinite, (score, limit, ratio or 0.0))):
            raise ValueError(
                f"score {score}, threshold {limit}, log-likelihood ratio {ratio}; expected finite "
                "numbers"
            )
        decision = Decision(
            score, ratio, score >= limit, limit, rate, speech_seconds, ratio in self.bounds
        )
        if decision.is_made:
            return decision
        return replace(decision, log_likelihood_ratio=None, same_speaker=False, is_at_bound=False)

    def threshold_of_many(self, num_people: int, false_accept_rate: float | None = None) -> str:
        """The name of the threshold at which at most this share of strangers (default 1 %) is
        accepted as any person.

        This is the lowest one whose false-accept rate times `num_people` is within the share, else
        the strictest one.
        """
        allowed_rate = _checked_rate(false_accept_rate)
        if not self.thresholds:
            raise NotCalibratedError(self.advice)
        value = itemgetter("threshold")
        keeping = [
            threshold
            for threshold in self.thresholds
            if (_rate(threshold) or 1.0) * max(1, num_people) <= allowed_rate
        ]
        return str(min(keeping, key=value, default=max(self.thresholds, key=value))["name"])


def largest_ratio(num_pairs: int) -> float:
    """The largest log-likelihood ratio that this many pairs of the other kind support: a power of
    ten up to them.

    One pair of 6,000 that scored by chance like the other kind would already limit the odds to
    6,000.

    >>> round(math.exp(largest_ratio(6000)))
    1000
    """
    return math.log(10) * math.floor(math.log10(max(1, num_pairs)))


def _checked_rate(rate: float | None) -> float:
    target_rate = DEFAULT_FALSE_ACCEPT_RATE if rate is None else rate
    if not 0 < target_rate < 1:
        raise ValueError(
            f"the false-accept rate (--far) is {target_rate:g}; expected a share between 0 and 1, "
            "such as 0.01"
        )
    return target_rate


def _rate(threshold: Mapping[str, Any]) -> float | None:
    """The false-accept rate in a threshold's name, otherwise the measured one."""
    rate = false_accept_rate_of(str(threshold["name"]))
    return threshold.get("false_accept_rate") if rate is None else rate


def described_threshold(threshold: Mapping[str, Any]) -> str:
    """A threshold of a model file in words: its value, what it is for, and the list it was fitted
    on.
    """
    fitted_on = f", fitted on {threshold['list']}" if threshold.get("list") else ""
    rates = ""
    if threshold.get("miss_rate") is not None and threshold.get("false_accept_rate") is not None:
        rates = (
            f": misses {100 * threshold['miss_rate']:.3g} %, false accepts "
            f"{100 * threshold['false_accept_rate']:.3g} %"
        )
    of = " on the log-likelihood ratio" if threshold["backend"].get("inputs") else ""
    return (
        f"{threshold['threshold']:.4f}{of} "
        f"({threshold_label(str(threshold['name']))}{rates}{fitted_on})"
    )
