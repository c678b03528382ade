"""All figures of one set of scores, with intervals, as one object.

Takes scores from anywhere (our own evaluation, another tool's file); knows no audio and no model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from speakernet.data.lists import TrialList, repeated_trials
from speakernet.evaluation import metrics
from speakernet.evaluation.bootstrap import BAND_FALSE_ACCEPTS, Band, SpeakerBootstrap, measure
from speakernet.evaluation.options import UNIT_COST, EvaluationOptions
from speakernet.evaluation.results import Results
from speakernet.evaluation.speakers import Speakers

ALWAYS_SHOWN_PRIORS = (0.01, 0.05)
"""The priors of the published figures on VoxCeleb: 0.01 in papers, 0.05 in its challenges."""


def figures(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    options: EvaluationOptions,
    seed: int,
    llrs: np.ndarray | None = None,
) -> Results:
    """Every figure that these scores support; `why_no_eer` where there can be no error rate.

    Args:
        trials: with labels, or without (then only the counts come back).
        scores: (trials,), higher means more alike.
        speakers: of the list's utterances.
        options: operating points and draws; 0.01 and 0.05 are always among the priors.
        seed: of the draws.
        llrs: (trials,) calibrated scores; adds the actual costs.

    Raises:
        ValueError: scores that are NaN or infinite.
    """
    metrics.refuse_rows(~np.isfinite(scores), "NaN or infinite")
    counts = Results(num_trials=len(trials), num_utterances=len(trials.names), why_no_eer=why_no_error_rate(trials))
    if trials.labels is not None:
        num_targets = int(np.count_nonzero(trials.labels))
        num_repeated, contradicting = repeated_trials(trials)
        counts = replace(
            counts,
            num_targets=num_targets,
            num_duplicate_trials=num_repeated,
            num_contradicting_trials=len(contradicting) or None,
        )
    if counts.why_no_eer:
        return counts
    assert trials.labels is not None
    # One sort serves all figures: 10 million scores take 1.9 s on one core.
    rates = metrics.error_rates(scores, trials.labels)
    points = operating_points([*ALWAYS_SHOWN_PRIORS, *options.dcf_target_priors], options.c_miss, options.c_fa)
    eer_point = metrics.equal_error_point(rates)
    measured = replace(
        counts,
        eer_percent=100 * eer_point.miss,
        eer_threshold=eer_point.threshold,
        eer_convex_hull_percent=metrics.hull_eer_percent(rates),
        eer_voxceleb_trainer_percent=metrics.voxceleb_trainer_eer_percent(rates),
        min_dcf={name: metrics.min_dcf_point(rates, *point)[0] for name, point in points.items()},
        dcf_costs={"c_miss": options.c_miss, "c_fa": options.c_fa},
        area_under_roc=metrics.area_under_roc(rates),
        min_cllr=metrics.min_cllr_of(rates),
        num_speakers=speakers.count,
        speaker_rule=speakers.rule,
    )
    if llrs is not None:
        measured = _with_costs_of_llrs(measured, llrs, trials.labels, points)
    if options.bootstrap_samples == 0:
        return measured
    return _with_intervals(measured, trials, scores, speakers, list(points.values()), options.bootstrap_samples, seed)


def _with_intervals(
    measured: Results,
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    points: Sequence[tuple[float, float, float]],
    wanted: int,
    seed: int,
) -> Results:
    """What drawing speakers says of the figures: intervals, and the band of the DET curve."""
    assert trials.labels is not None
    enrol, test = speakers.ids[trials.enrol], speakers.ids[trials.test]
    num_nontargets = len(trials) - int(np.count_nonzero(trials.labels))
    # Fewer false accepts than one in all: the list says nothing there.
    false_accepts = BAND_FALSE_ACCEPTS[BAND_FALSE_ACCEPTS * num_nontargets >= 1]
    prepared = SpeakerBootstrap(scores, trials.labels, enrol, test, points, false_accepts)
    drawn = measure(prepared, wanted, seed)
    return replace(
        measured,
        num_draws=drawn.num_draws,
        eer_interval_percent=drawn.eer_interval,
        min_dcf_interval=dict(zip(measured.min_dcf, drawn.min_dcf_intervals, strict=True)) if drawn.num_draws else None,
        interval_note=drawn.note,
        det_band=None if drawn.band is None else _band_in_percent(drawn.band),
    )


def _band_in_percent(band: Band) -> dict[str, list[float]]:
    """The band as results keep it; it is only drawn, so that five digits are enough."""
    named = {"false_accept_percent": band.false_accepts, "miss_low_percent": band.low, "miss_high_percent": band.high}
    return {name: [float(f"{100 * value:.5g}") for value in values] for name, values in named.items()}


def _with_costs_of_llrs(
    measured: Results, llrs: np.ndarray, labels: np.ndarray, points: Mapping[str, tuple[float, float, float]]
) -> Results:
    """Costs of log-likelihood ratios as they are: Cllr and the actual detection costs."""
    rates = metrics.error_rates(llrs, labels)
    costs = {name: metrics.act_dcf_of(rates, *point) for name, point in points.items()}
    cllr = metrics.cllr(llrs, labels)
    assert measured.min_cllr is not None
    return replace(measured, cllr=cllr, act_dcf=costs, calibration_loss=cllr - measured.min_cllr)


def operating_points(
    priors: Iterable[float], c_miss: float = UNIT_COST, c_fa: float = UNIT_COST
) -> dict[str, tuple[float, float, float]]:
    """Operating points by name: the prior, as it is written in `results.json`."""
    return {f"{prior:g}": (float(prior), c_miss, c_fa) for prior in priors}


def why_no_error_rate(trials: TrialList) -> str:
    """A sentence where a list supports no error rate; empty where it does."""
    if trials.labels is None:
        return f"{trials.source} is unlabelled; an error rate needs lines of `1 enrol test` and `0 enrol test`"
    num_targets = int(np.count_nonzero(trials.labels))
    if num_targets in (0, len(trials)):
        kind = "target" if num_targets == 0 else "non-target"
        return f"none of the {len(trials)} trials of {trials.source} is a {kind} trial; an error rate needs both kinds"
    return ""
