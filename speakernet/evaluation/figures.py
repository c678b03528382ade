"""All figures of one set of scores, with intervals, as plain values for `results.json`.

Takes scores from anywhere (our own evaluation, another tool's file); knows no audio and no model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.evaluation import metrics
from speakernet.evaluation.bootstrap import SpeakerBootstrap, bootstrap, interval_of
from speakernet.evaluation.speakers import Speakers, speakers_of

ALWAYS_SHOWN_PRIORS = (0.01, 0.05)


def figures(
    trials: TrialList,
    scores: np.ndarray,
    *,
    llrs: np.ndarray | None = None,
    priors: Sequence[float] = ALWAYS_SHOWN_PRIORS,
    c_miss: float = 1.0,
    c_fa: float = 1.0,
    bootstrap_samples: int = 1000,
    speaker_table: Mapping[str, str] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Every figure that these scores support, as plain values; `why_no_eer` where there can be no error rate.

    Args:
        trials: with labels, or without (then only the counts come back).
        scores: (trials,), higher means more alike.
        llrs: (trials,) calibrated scores; adds the actual costs.
        priors: target priors of the detection costs, beside 0.01 and 0.05.
        c_miss: cost of a missed target; 0.01 and 0.05 are always at costs 1 and 1 as well.
        c_fa: cost of a false accept.
        bootstrap_samples: draws of speakers; 0 gives no intervals.
        speaker_table: path -> speaker.
        seed: of the draws.

    Raises:
        ValueError: NaN scores, or utterances that the speaker table lacks.
    """
    result: dict[str, Any] = {
        "num_trials": len(trials),
        "num_utterances": len(trials.names),
        "eer_percent": None,
        "eer_interval_percent": [None, None],
        "min_dcf": {},
    }
    metrics.check_no_nan(np.asarray(scores, dtype=np.float64))
    reason = why_no_error_rate(trials)
    if trials.labels is not None:
        result["num_targets"] = int(np.count_nonzero(trials.labels))
        result["num_duplicate_trials"] = num_duplicates(trials)
    if reason:
        return {**result, "why_no_eer": reason}
    assert trials.labels is not None
    rates = metrics.error_rates(scores, trials.labels)
    points = operating_points(priors, c_miss, c_fa)
    eer_point = metrics.equal_error_point(rates)
    result["eer_percent"] = 100 * eer_point.miss
    result["eer_threshold"] = eer_point.threshold
    result["eer_convex_hull_percent"] = metrics.hull_eer_percent(rates)
    result["eer_voxceleb_trainer_percent"] = metrics.voxceleb_trainer_eer_percent(rates)
    result["min_dcf"] = {name: metrics.min_dcf_point(rates, *point)[0] for name, point in points.items()}
    result["dcf_costs"] = {"c_miss": c_miss, "c_fa": c_fa}
    result["area_under_roc"] = metrics.area_under_roc(rates)
    result["min_cllr"] = metrics.min_cllr_of(rates)
    if llrs is not None:
        result |= calibration_figures(llrs, trials.labels, points)
        result["calibration_loss"] = result["cllr"] - result["min_cllr"]
    speakers = speakers_of(trials, speaker_table)
    result["num_speakers"], result["speaker_rule"] = speakers.count, speakers.rule
    result |= _intervals(trials, scores, speakers, points, bootstrap_samples, seed)
    return result


def calibration_figures(
    llrs: np.ndarray, labels: np.ndarray, points: Mapping[str, tuple[float, float, float]]
) -> dict[str, Any]:
    """Costs of log-likelihood ratios as they are: Cllr and the actual detection costs."""
    rates = metrics.error_rates(llrs, labels)
    costs = {name: metrics.act_dcf_of(rates, *point) for name, point in points.items()}
    return {"cllr": metrics.cllr(llrs, labels), "act_dcf": costs}


def operating_points(priors: Sequence[float], c_miss: float, c_fa: float) -> dict[str, tuple[float, float, float]]:
    """Operating points by name: the prior, as it is written in `results.json`."""
    every = dict.fromkeys([*ALWAYS_SHOWN_PRIORS, *priors])
    return {f"{prior:g}": (float(prior), c_miss, c_fa) for prior in every}


def why_no_error_rate(trials: TrialList) -> str:
    """A sentence where a list supports no error rate; empty where it does."""
    if trials.labels is None:
        return f"{trials.source} is unlabelled: it was scored, an error rate needs labels"
    num_targets = int(np.count_nonzero(trials.labels))
    if num_targets in (0, len(trials)):
        kind = "target" if num_targets == 0 else "non-target"
        return f"none of the {len(trials)} trials of {trials.source} is a {kind} trial; an error rate needs both kinds"
    return ""


def num_duplicates(trials: TrialList) -> int:
    """Trials whose ordered pair occurred before in the list."""
    pairs = trials.enrol.astype(np.int64) * len(trials.names) + trials.test
    return len(pairs) - len(np.unique(pairs))


def _intervals(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    points: Mapping[str, tuple[float, float, float]],
    samples: int,
    seed: int,
) -> dict[str, Any]:
    if samples == 0:
        return {}
    assert trials.labels is not None
    enrol, test = speakers.ids[trials.enrol], speakers.ids[trials.test]
    prepared = SpeakerBootstrap(scores, trials.labels, enrol, test, list(points.values()))
    draws = bootstrap(prepared, len(trials), speakers.count, samples, seed)
    result: dict[str, Any] = {"num_draws": len(draws.eer_percent)}
    result["eer_interval_percent"] = interval_of(draws.eer_percent).as_list()
    if len(draws.eer_percent):
        intervals = {name: interval_of(draws.min_dcf[:, row]).as_list() for row, name in enumerate(points)}
        result["min_dcf_interval"] = intervals
    if draws.note:
        result["interval_note"] = draws.note
    return result
