"""All figures of one set of scores, with intervals and cautions, and the comparison of several systems.

Takes scores from anywhere (our own evaluation, another tool's file); knows no audio and no model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from speakernet.data.lists import TrialList, repeated_trials
from speakernet.evaluation import metrics
from speakernet.evaluation.bootstrap import BAND_FALSE_ACCEPTS, Difference, SpeakerBootstrap, mean_differences
from speakernet.evaluation.options import UNIT_COST, EvaluationOptions
from speakernet.evaluation.results import Results, headline
from speakernet.evaluation.speakers import Speakers

ALWAYS_SHOWN_PRIORS = (0.01, 0.05)
"""The priors of the published figures on VoxCeleb: 0.01 in papers, 0.05 in its challenges."""
CHOSEN_ON_REPORTED = "the best checkpoint was chosen on this very list: these error rates are optimistic"
WORSE_THAN_CHANCE = 50.0
"""EER in percent."""


def figures(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    options: EvaluationOptions,
    seed: int,
    llrs: np.ndarray | None = None,
) -> Results:
    """Every figure that these scores support; `why_no_eer` if there can be no error rate."""
    metrics.refuse_rows(~np.isfinite(scores), "NaN or infinite")
    found = Results(num_trials=len(trials), num_utterances=len(trials.names), why_no_eer=why_no_error_rate(trials))
    if trials.labels is not None:
        num_repeated, contradicting = repeated_trials(trials)
        found = replace(
            found,
            num_targets=int(np.count_nonzero(trials.labels)),
            num_duplicate_trials=num_repeated,
            num_contradicting_trials=len(contradicting) or None,
        )
    if trials.labels is None or found.why_no_eer:
        return found
    # One sort serves all figures: 10 million scores take 1.9 s on one core.
    rates = metrics.error_rates(scores, trials.labels)
    points = operating_points([*ALWAYS_SHOWN_PRIORS, *options.dcf_target_priors], options.c_miss, options.c_fa)
    equal = metrics.equal_error_point(rates)
    found = replace(
        found,
        eer_percent=100 * equal.miss,
        eer_threshold=equal.threshold,
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
        llr_rates, cllr = metrics.error_rates(llrs, trials.labels), metrics.cllr(llrs, trials.labels)
        costs = {name: metrics.act_dcf_of(llr_rates, *point) for name, point in points.items()}
        found = replace(found, cllr=cllr, act_dcf=costs, calibration_loss=cllr - (found.min_cllr or 0.0))
    if options.bootstrap_samples == 0:
        return found
    # With fewer false accepts than one in all the list gives no rate.
    false_accepts = BAND_FALSE_ACCEPTS[BAND_FALSE_ACCEPTS * rates.num_nontargets >= 1]
    prepared = _prepared(trials, scores, speakers, list(points.values()), false_accepts)
    drawn = prepared.measure(options.bootstrap_samples, seed)
    band = None
    if drawn.band is not None:
        names = ("false_accept_percent", "miss_low_percent", "miss_high_percent")
        # It is only drawn, so five digits are enough.
        band = {name: [float(f"{100 * one:.5g}") for one in row] for name, row in zip(names, drawn.band, strict=True)}
    return replace(
        found,
        num_draws=drawn.num_draws,
        eer_interval_percent=drawn.eer_interval,
        min_dcf_interval=dict(zip(points, drawn.min_dcf_intervals, strict=True)) if drawn.num_draws else None,
        interval_note=drawn.note,
        det_band=band,
    )


def _prepared(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    points: Sequence[tuple[float, float, float]],
    false_accepts: np.ndarray | None = None,
) -> SpeakerBootstrap:
    assert trials.labels is not None, "only labelled trials are measured"
    sides = speakers.ids[trials.enrol], speakers.ids[trials.test]
    return SpeakerBootstrap(scores, trials.labels, *sides, points, false_accepts)


def operating_points(
    priors: Iterable[float], c_miss: float = UNIT_COST, c_fa: float = UNIT_COST
) -> dict[str, tuple[float, float, float]]:
    """Operating points by name: the prior, as it is written in `results.json`."""
    return {f"{prior:g}": (float(prior), c_miss, c_fa) for prior in priors}


def why_no_error_rate(trials: TrialList) -> str:
    """Why a list supports no error rate; empty if it does."""
    if trials.labels is None:
        return f"{trials.source} is unlabelled; an error rate needs lines of `1 enrol test` and `0 enrol test`"
    kind = metrics.missing_kind(trials.labels)
    if not kind:
        return ""
    return f"none of the {len(trials)} trials of {trials.source} is a {kind} trial; an error rate needs both kinds"


def cautions(results: Results) -> list[str]:
    """What a reader must know before believing these figures, the gravest first."""
    found = []
    if (results.eer_percent or 0.0) > WORSE_THAN_CHANCE:
        found.append(
            "worse than chance: a higher score has to mean the same speaker; are these distances, or labels swapped?"
        )
    if results.num_contradicting_trials:
        found.append(f"{results.num_contradicting_trials:,} trials appear with both labels: one of the two is wrong")
    if results.num_duplicate_trials:
        found.append(f"{results.num_duplicate_trials:,} trials occur more than once in the list and count each time")
    if results.interval_note:
        found.append(results.interval_note)
    costs, num_nontargets = results.dcf_costs or {}, results.num_trials - (results.num_targets or 0)
    # One false accept costs c_fa x (1 - prior) / nontargets, accepting nobody c_miss x prior.
    few = [
        prior
        for prior in results.min_dcf
        if costs and costs["c_fa"] * (1 - float(prior)) >= num_nontargets * costs["c_miss"] * float(prior)
    ]
    if few:
        found.append(
            f"{num_nontargets:,} pairs of different speakers are too few for minDCF({', '.join(few)}): a single false "
            "accept costs as much there as accepting nobody"
        )
    return found


@dataclass(frozen=True)
class Comparison:
    """Several systems on one list: EER and minDCFs of each, and the differences of the others from the first."""

    systems: list[Results]
    differences: list[list[Difference]]
    """For every system but the first, one for each figure: EER, then the minDCFs; positive if the first is better."""

    def sentences(self, names: Sequence[str]) -> list[str]:
        """One sentence for each figure of each system but the first."""
        labels = [figure.label for figure in headline(self.systems[0])]
        return [
            difference.sentence(label, names[0], name)
            for name, found in zip(names[1:], self.differences, strict=True)
            for label, difference in zip(labels, found, strict=True)
        ]


def compare_scores(
    trials: TrialList,
    systems: Sequence[np.ndarray],
    speakers: Speakers,
    *,
    num_draws: int,
    seed: int,
    priors: Sequence[float] = ALWAYS_SHOWN_PRIORS,
) -> Comparison:
    """Compare systems by their scores of the same labelled trials, each with the first.

    All are measured on the same draws of speakers: what is common to them cancels in the differences.
    """
    if trials.labels is None:
        raise ValueError(f"{trials.source}: unlabelled trials have no error rates to compare; give a list with labels")
    points = operating_points(priors)
    prepared = [_prepared(trials, scores, speakers, list(points.values())) for scores in systems]
    results = []
    for one in prepared:
        found = one.figures()
        assert found is not None, "there are trials of both kinds"
        costs = dict(zip(points, found[1:].tolist(), strict=True))
        results.append(Results(len(trials), eer_percent=float(found[0]), min_dcf=costs))
    differences = [mean_differences(prepared[:1], [other], num_draws, seed) for other in prepared[1:]]
    return Comparison(results, differences)


def short_names(paths: Sequence[str]) -> list[str]:
    """Short names for paths: the last folder or file name in which all of them differ, else numbered.

    >>> short_names(["exps/a/scores.txt", "exps/b/scores.txt"])
    ['a', 'b']
    """
    split = [path.replace("\\", "/").rstrip("/").split("/") for path in paths]
    for depth in range(1, max(map(len, split)) + 1):
        names = [one[-depth] if depth <= len(one) else "" for one in split]
        if len(set(names)) == len(names):
            return [name or "." for name in names]
    return [f"{one[-1]} ({number})" for number, one in enumerate(split, start=1)]
