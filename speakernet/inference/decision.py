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
from typing_extensions import TypedDict

from speakernet.evaluation.calibration import (
    ANY_SECONDS,
    DURATION,
    EER_NAME,
    FALSE_ACCEPT_RATES,
    MIN_NONTARGETS,
    SCORE_ONLY,
    TIMES_SCORE,
    AffineCalibration,
    false_accept_rate_of,
    quality_columns,
    threshold_label,
    threshold_name,
    threshold_way,
    too_few_nontargets,
)
from speakernet.evaluation.scoring import VERIFYING, WHOLE, verifying_backend
from speakernet.evaluation.several import NOT_STRETCHED, SeveralRecordings

DEFAULT_FALSE_ACCEPT_RATE = 0.01
"""The false-accept rate whose threshold is used by default."""
UNCALIBRATED_THRESHOLD = 0.4
"""A cosine that separates same from different speakers in most published networks; its error rate
is unknown."""
DEFAULT_THRESHOLD_NAME = "default"
LONGEST_SECONDS = 1e9
"""JSON has no infinity."""
MIN_TEST_SECONDS = 1.0
"""Speech needed in a test; with less, scores vary so much that neither odds nor a name are
given."""
RECALIBRATE = (
    "calibrated on whole recordings by a version before 0.4.0, so pauses and noise count as the "
    "voice; `speakernet calibrate` fits it on detected speech"
)


class DecisionLimits(TypedDict, total=False):
    """What a score is compared with, as keyword arguments of everything that decides."""

    false_accept_rate: float | None
    """Decide at the model file's threshold for this rate, such as 0.01."""
    threshold: float | str | None
    """Decide at this score, or at a named threshold: `eer`, `far_1%`, or `default`, a cosine that
    needs no calibration and has no known error rate."""


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
        threshold_ratio: the log-likelihood ratio at the threshold; known for PLDA scores, whose own
            values say less than their calibrated ratios.

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
    threshold_ratio: float | None = None

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
        rate = self.false_accept_rate
        errors = "error rate unknown" if rate is None else f"false accepts {100 * rate:.3g} %"
        # With few digits, a score just below the threshold would be printed as equal to it.
        score, threshold = told_apart(self.score, self.threshold)
        score = f"score {score}"
        ratio = self.log_likelihood_ratio
        if ratio is not None and self.threshold_ratio is not None:
            number, threshold = told_apart(ratio, self.threshold_ratio)
            bound = ""
            if self.is_at_bound:
                bound = "more than " if ratio > 0 else "less than "
            score = f"log-likelihood ratio {bound}{number}"
        if self.same_speaker:
            sentence = f"same speaker: {score} reaches the threshold {threshold} ({errors})"
        elif ratio is not None and ratio > 0:
            # Odds may favour one speaker below a strict threshold.
            purpose = "this threshold" if rate is None else f"{100 * rate:.3g} % false accepts"
            sentence = (
                f"not accepted: the voices are similar, but not enough for {purpose} ({score}, "
                f"threshold {threshold})"
            )
        else:
            sentence = f"different speakers: {score} is below the threshold {threshold} ({errors})"
        if ratio is None:
            return sentence
        odds = f"{float(f'{math.exp(abs(ratio)):.3g}'):,.7g}"
        if self.is_at_bound:
            odds = f"more than {odds}"
        if ratio < 0:
            return f"{sentence}; the score is {odds} times as likely from two speakers as from one"
        return f"{sentence}; the score is {odds} times as likely from one speaker as from two"


def told_apart(score: float, threshold: float) -> tuple[str, str]:
    """Both numbers with four decimals, or with as many as show which one is larger.

    >>> told_apart(0.47698, 0.47702), told_apart(0.5, 0.5)
    (('0.47698', '0.47702'), ('0.5000', '0.5000'))
    """
    digits = 4
    while score != threshold and digits < 9 and f"{score:.{digits}f}" == f"{threshold:.{digits}f}":
        digits += 1
    return f"{score:.{digits}f}", f"{threshold:.{digits}f}"


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
    several: SeveralRecordings = NOT_STRETCHED
    """How scores against several recordings of a person are compared with the thresholds."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The smallest and the largest log-likelihood ratio that the calibration's number of pairs
    supports."""

    @classmethod
    def of_model_file(cls, contents: Mapping[str, Any], name: str) -> "DecisionRule":
        """The rule in the contents of the model file of this name."""
        # A file may hold several calibrations and thresholds, each for one way of embedding and
        # scoring: those of its training, of `speakernet calibrate`, of an old version. Only those
        # for what a decision does now may be used, or a threshold would be compared with scores of
        # another kind.
        fits = (contents.get("calibration") or {}).get("fits", [])
        thresholds = contents.get("thresholds") or ()
        backend = verifying_backend(contents)
        # A file that was never calibrated has nothing that detected speech could contradict.
        way = backend.describe(VERIFYING)
        known = [entry["backend"] for entry in (*fits, *thresholds)]
        if way not in known and backend.describe(WHOLE) in known:
            way = backend.describe(WHOLE)
        rule = cls(
            None,
            [threshold for threshold in thresholds if threshold["backend"] == way],
            _advice(name, way),
            scores="PLDA" if way["score"] == "plda" else "cosine",
            speech=way.get("speech", WHOLE.speech),
        )
        of_scores = None
        quality = None
        for fit in fits:
            if fit["backend"] != way:
                continue
            if list(fit["inputs"]) == ["score"]:
                of_scores = fit
            # A fit with quality measures has thresholds on its log-likelihood ratio, not on the
            # score.
            of_pairs = threshold_way(way, fit["inputs"])
            limits = [threshold for threshold in thresholds if threshold["backend"] == of_pairs]
            if limits:
                quality = AffineCalibration.from_dict(fit), limits
        if of_scores is None:
            return rule
        # Older files do not record the number of pairs.
        num_targets = of_scores.get("num_targets", MIN_NONTARGETS)
        num_nontargets = of_scores.get("num_nontargets", MIN_NONTARGETS)
        cautions = [too_few_nontargets(num_nontargets)]
        if rule.speech == WHOLE.speech:
            cautions.append(RECALIBRATE)
        return replace(
            rule,
            calibration=AffineCalibration.from_dict(of_scores),
            caution="; ".join(filter(None, cautions)),
            quality=quality,
            several=SeveralRecordings(**of_scores.get("several_recordings", {})),
            bounds=(-largest_ratio(num_targets), largest_ratio(num_nontargets)),
        )

    def for_pair(self, values: Mapping[str, np.ndarray]) -> "DecisionRule":
        """The rule for two recordings with these quality measures, (2,) each."""
        assert self.quality is not None, "the model file has such a calibration"
        calibration, limits = self.quality
        # The ratio is an affine function of the score with these measures.
        sides = np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.int64)
        columns = quality_columns(
            calibration.inputs, np.array([0.0, 1.0]), values, *sides, calibration.seconds
        )
        offset, at_one = calibration.apply(columns).tolist()
        weight = at_one - offset
        if weight <= 0:
            # Such a fit says nothing about these measures.
            return self
        # `decide` compares scores. The measures of a pair are fixed, so each threshold on the ratio
        # corresponds to one score.
        thresholds = [
            {**limit, "threshold": (limit["threshold"] - offset) / weight} for limit in limits
        ]
        of_score = AffineCalibration(np.array([weight]), offset, SCORE_ONLY, calibration.prior)
        return replace(self, calibration=of_score, thresholds=thresholds)

    @property
    def knows_durations(self) -> bool:
        """Whether there is a calibration on the score and the seconds of speech alone."""
        if self.quality is None or self.speech != VERIFYING.speech:
            return False
        measures = (name.removeprefix(TIMES_SCORE) for name in self.quality[0].inputs)
        return {name.partition(" ")[0] for name in measures} == {*SCORE_ONLY, DURATION}

    def for_seconds(self, first: float, second: float) -> "DecisionRule":
        """The rule for two sides with this much speech; unchanged if one is unknown (0 or infinite)
        or `knows_durations` is false.
        """
        seconds = np.array([first, second])
        if not (self.knows_durations and np.isfinite(seconds).all() and seconds.all()):
            return self
        if self.quality is not None and self.quality[0].seconds == ANY_SECONDS:
            # A difference that the list of such a calibration does not have, as between a minute of
            # enrolment and a word, would count for more than the score.
            seconds[:] = seconds.min()
        return self.for_pair({DURATION: seconds})

    def described_durations(self) -> dict[str, Any] | None:
        """The calibration with durations and its threshold for a decision without limits, as plain
        values; None without one.
        """
        if self.quality is None or not self.knows_durations:
            return None
        calibration, limits = self.quality
        by_name = {str(limit["name"]): limit["threshold"] for limit in limits}
        # The page of `serve` gets this as JSON.
        longest = min(calibration.seconds[1], LONGEST_SECONDS)
        return {
            **calibration.to_dict(),
            "seconds": [calibration.seconds[0], longest],
            "threshold": by_name[self._default_name],
        }

    def score_of_several(self, scores: np.ndarray, units: np.ndarray, weights: np.ndarray) -> float:
        """One score, for the same thresholds, from those with several recordings of a person.

        Args:
            scores: (recordings,).
            units: (recordings, dim), their embeddings at unit length.
            weights: (recordings,).
        """
        shares = weights / weights.sum()
        # The mean of unit vectors is the shorter the more they differ, and the scale of a score
        # against several recordings depends on its length.
        squared_length = np.square(shares @ units).sum()
        score = float(self.several.as_one(scores @ shares, squared_length))
        return min(score, 1.0) if self.scores == "cosine" else score

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
        # A recording arrives here as one number: its speech was found, cut out, embedded and scored
        # against the other side (`SpeakerVerifier.score_heard`). What is left is to read that
        # number. The calibration turns it into odds, one affine map fitted on pairs whose answer is
        # known. The odds are bounded, because a list of a thousand pairs cannot show odds of a
        # million, however far the line is extended. The decision itself compares the score with a
        # threshold, which was measured, not derived from the odds: the two may disagree near the
        # threshold, and then the sentence says so. Both are only as good as the list was like
        # today's recordings, which nobody checks here.
        if threshold is None:
            # Thresholds are named after their rates, so a rate is looked up by name.
            name = self._default_name
            if false_accept_rate is not None:
                name = threshold_name(_checked_rate(false_accept_rate))
            limit, rate = self._named(name)
        elif isinstance(threshold, str):
            limit, rate = self._named(threshold)
        else:
            limit, rate = float(threshold), None
        ratio = self.log_likelihood_ratio(score)
        if not all(map(math.isfinite, (score, limit, ratio or 0.0))):
            raise ValueError(
                f"score {score}, threshold {limit}, log-likelihood ratio {ratio}; expected finite "
                "numbers"
            )
        is_at_bound = ratio in self.bounds
        decision = Decision(score, ratio, score >= limit, limit, rate, speech_seconds, is_at_bound)
        if self.scores == "PLDA" and self.calibration is not None:
            # A PLDA score has no familiar scale, so the sentence gives its calibrated ratio.
            at_threshold = float(self.calibration.apply(np.array([limit]))[0])
            decision = replace(decision, threshold_ratio=at_threshold)
        if decision.is_made:
            return decision
        return replace(decision, log_likelihood_ratio=None, same_speaker=False, is_at_bound=False)

    @property
    def _default_name(self) -> str:
        name = threshold_name(DEFAULT_FALSE_ACCEPT_RATE)
        return name if name in self._by_name else EER_NAME

    @property
    def _by_name(self) -> dict[str, Mapping[str, Any]]:
        return {str(threshold["name"]): threshold for threshold in self.thresholds}

    def _named(self, name: str) -> tuple[float, float | None]:
        """The threshold of this name, and its false-accept rate."""
        if name == DEFAULT_THRESHOLD_NAME and self.scores == "cosine":
            return UNCALIBRATED_THRESHOLD, None
        known = self._by_name
        if name in known:
            return float(known[name]["threshold"]), _rate(known[name])
        if not known:
            raise NotCalibratedError(self.advice)
        rates = ", ".join(f"{100 * rate:g}" for rate in FALSE_ACCEPT_RATES)
        raise NotCalibratedError(
            f"the model file has no threshold {name!r} for {self.scores} scores; it has "
            f"{', '.join(known)}. `speakernet calibrate` adds those for {rates} % if the trial "
            "list is long enough; or give a score with `--threshold NUMBER`"
        )

    def threshold_of_many(self, num_people: int, false_accept_rate: float | None = None) -> str:
        """The name of the threshold at which at most this share of strangers (default 1 %) is
        accepted as any person.

        This is the lowest one whose false-accept rate times `num_people` is within the share, else
        the strictest one.
        """
        allowed_rate = _checked_rate(false_accept_rate)
        if not self.thresholds:
            raise NotCalibratedError(self.advice)
        # The lowest threshold that suffices rejects the fewest enrolled people.
        by_height = sorted(self.thresholds, key=itemgetter("threshold"))
        for threshold in by_height:
            # A measured rate of 0 is unknown, not 0: the list was too short to see an error.
            if (_rate(threshold) or 1.0) * max(1, num_people) <= allowed_rate:
                return str(threshold["name"])
        return str(by_height[-1]["name"])


def largest_ratio(num_pairs: int) -> float:
    """The largest log-likelihood ratio that this many pairs of the other kind support: a power of
    ten up to them.

    One pair of 6,000 that scored by chance like the other kind would already limit the odds to
    6,000.

    >>> round(math.exp(largest_ratio(6000)))
    1000
    """
    # Rounded down to a power of ten, since the bound is itself a guess and should not look exact.
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


def _advice(name: str, way: Mapping[str, Any]) -> str:
    """What to do about a file without thresholds for this way of embedding and scoring."""
    kind = "PLDA" if way["score"] == "plda" else "cosine"
    # A log-likelihood ratio of 0 speaks for neither answer.
    default = "`--threshold 0`, in Python `threshold=0.0`"
    if kind == "cosine":
        default = (
            f"`--threshold {UNCALIBRATED_THRESHOLD}`, in Python "
            f"`threshold={UNCALIBRATED_THRESHOLD}`, also called `{DEFAULT_THRESHOLD_NAME}`"
        )
    return (
        f"{name} has no calibration for {kind} scores; fit one with `speakernet calibrate --model "
        f"{name} --trials LIST --audio FOLDER`, or give a threshold ({default})"
    )


def described_threshold(threshold: Mapping[str, Any]) -> str:
    """A threshold of a model file in words: its value, what it is for, and the list it was fitted
    on.
    """
    kind = " on the log-likelihood ratio" if threshold["backend"].get("inputs") else ""
    purpose = threshold_label(str(threshold["name"]))
    if threshold.get("miss_rate") is not None and threshold.get("false_accept_rate") is not None:
        purpose += (
            f": misses {100 * threshold['miss_rate']:.3g} %, false accepts "
            f"{100 * threshold['false_accept_rate']:.3g} %"
        )
    if threshold.get("list"):
        purpose += f", fitted on {threshold['list']}"
    return f"{threshold['threshold']:.4f}{kind} ({purpose})"
