"""All figures of a set of scores with intervals over speakers, cautions, and comparisons of several
systems.

The scores may come from this toolkit or from another tool's file; no audio and no model are needed.

Trials of one speaker are correlated, so drawing trials would make the intervals too narrow. Instead
speakers are drawn with replacement, as many as there are. A target trial counts as often as its
speaker was drawn, a trial between two speakers as often as the product of their draws. Scores are
sorted once; a draw costs a few passes over the trials.

Source: Poh and Bengio, Estimating the confidence interval of expected performance curve in
biometric authentication using joint bootstrap, 2007 (drawing users); percentile intervals.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from speakernet.data.lists import TrialList, repeated_trials
from speakernet.evaluation import metrics
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Band, GroupResult, Interval, Results, headline
from speakernet.evaluation.speakers import Speakers
from speakernet.options import DEFAULT_SEED
from speakernet.random import numpy_generator
from speakernet.terminal import Bar, counted

ALWAYS_SHOWN_PRIORS = (0.01, 0.05)
"""The priors of published VoxCeleb figures: 0.01 in papers, 0.05 in the challenges."""
USUAL = EvaluationOptions()
CHOSEN_ON_REPORTED = (
    "the best checkpoint was chosen on this same list: these error rates are optimistic"
)
WORSE_THAN_CHANCE = 50.0
"""EER in percent."""
MIN_SPEAKERS = 5
"""With fewer speakers, no interval is given."""
ROUGH_SPEAKERS = 20
"""With fewer speakers, the interval is called rough."""
MIN_TARGETS = 10
"""With fewer targets, a group gets a note."""
MAX_WORK = 2_000_000_000
"""Product of trials and draws above which fewer draws are made (their number is reported)."""
SHOWN_WORK = 100_000_000
"""Product of trials and draws above which a progress bar is shown (it takes seconds)."""
MIN_DRAWS = 100
STREAM = 6101
LEVEL_PERCENT = 95.0
OperatingPoint = tuple[float, float, float]
"""Target prior, cost of a miss and cost of a false accept."""
MAX_GROUP_DRAWS = 200
"""Draws for the interval of each slice and sweep step, of which there are many."""
BAND_FALSE_ACCEPTS = ndtr(np.linspace(ndtri(1e-5), ndtri(0.98), 50))
"""False-accept rates at which a DET curve gets its interval: evenly spaced on its normal-deviate
axis."""


# What a list supports depends on its labels: none (only counts), of one kind (no error rate), or of
# both. Each step below returns as soon as nothing further can be computed.
def figures(
    trials: TrialList,
    scores: np.ndarray,
    speakers: Speakers,
    options: EvaluationOptions = USUAL,
    seed: int = DEFAULT_SEED,
    llrs: np.ndarray | None = None,
) -> Results:
    """Every figure that these scores support; `why_no_eer` is set if there can be no error rate."""
    metrics.refuse_rows(~np.isfinite(scores), "NaN or infinite")
    labels = trials.labels
    values: dict[str, Any] = {
        "num_trials": len(trials),
        "num_utterances": len(trials.names),
        "why_no_eer": why_no_error_rate(trials),
    }
    if labels is None:
        return Results(**values)
    # Properties of the list that make its error rates doubtful; `cautions` turns them into
    # sentences.
    num_repeated, contradicting = repeated_trials(trials)
    values["num_targets"] = int(np.count_nonzero(labels))
    values["num_duplicate_trials"] = num_repeated
    values["num_contradicting_trials"] = len(contradicting) or None
    values["num_self_trials"] = int(np.count_nonzero(trials.enrol == trials.test)) or None
    if speakers.sessions is not None:
        is_same = speakers.sessions[trials.enrol] == speakers.sessions[trials.test]
        values["num_same_session_targets"] = int(np.count_nonzero(is_same & (labels == 1)))
    if values["why_no_eer"]:
        return Results(**values)
    # One sort serves all figures: 10 million scores take 1.9 s on one core.
    rates = metrics.error_rates(scores, labels)
    points = operating_points([*ALWAYS_SHOWN_PRIORS, *options.dcf_target_priors], options)
    equal = metrics.equal_error_point(rates)
    values |= {
        "eer_percent": 100 * equal.miss,
        "eer_threshold": equal.threshold,
        "eer_convex_hull_percent": metrics.hull_eer_percent(rates),
        "eer_voxceleb_trainer_percent": metrics.voxceleb_trainer_eer_percent(rates),
        "min_dcf": {
            name: metrics.min_dcf_point(rates, *point)[0] for name, point in points.items()
        },
        "dcf_costs": {"c_miss": options.c_miss, "c_fa": options.c_fa},
        "area_under_roc": metrics.area_under_roc(rates),
        "min_cllr": metrics.min_cllr(rates),
        "num_speakers": speakers.count,
        "num_speakers_of_half_the_targets": speakers_of_half_the_targets(trials, speakers),
        "speaker_rule": speakers.rule,
    }
    if llrs is not None:
        # From the ratios, not the scores: with quality measures they rank the trials differently.
        llr_rates = metrics.error_rates(llrs, labels)
        cllr = metrics.cllr(llrs, labels)
        min_cllr = metrics.min_cllr(llr_rates)
        values |= {
            "min_cllr": min_cllr,
            "cllr": cllr,
            "act_dcf": {name: metrics.act_dcf(llr_rates, *point) for name, point in points.items()},
            "calibration_loss": cllr - min_cllr,
        }
    if options.bootstrap_samples:
        # A rate below one false accept in the whole list cannot be measured.
        false_accepts = BAND_FALSE_ACCEPTS[BAND_FALSE_ACCEPTS * rates.num_nontargets >= 1]
        sides = speakers.ids[trials.enrol], speakers.ids[trials.test]
        bootstrap = SpeakerBootstrap(scores, labels, *sides, points, false_accepts)
        drawn = bootstrap.measure(options.bootstrap_samples, seed)
        return replace(drawn, **values)
    return Results(**values)


def operating_points(
    priors: Sequence[float], options: EvaluationOptions
) -> dict[str, OperatingPoint]:
    """The operating points of the minDCFs at these target priors, with the costs of the options.

    They are named by the prior, as in `results.json`.
    """
    return {f"{prior:g}": (float(prior), options.c_miss, options.c_fa) for prior in priors}


def speakers_of_half_the_targets(trials: TrialList, speakers: Speakers) -> int:
    """The smallest number of speakers who have at least half of a list's target trials."""
    assert trials.labels is not None, "only labelled trials have targets"
    counts = np.bincount(speakers.ids[trials.enrol[trials.labels == 1]])
    of_most = np.cumsum(np.sort(counts)[::-1])
    return 1 + int(np.searchsorted(of_most, of_most[-1] / 2))


def few_speakers_note(num_speakers: int | None, num_targets: int) -> str:
    """A sentence if so few speakers have half of the targets; empty if they are enough."""
    # Of equally frequent speakers, half have half of the targets.
    if num_speakers is None or 2 * num_speakers >= ROUGH_SPEAKERS:
        return ""
    return (
        f"half of the {counted(num_targets, 'target trial')} are of "
        f"{counted(num_speakers, 'speaker')}, who dominate the error rate"
    )


def why_no_error_rate(trials: TrialList) -> str:
    """Why a list supports no error rate; empty if it does."""
    if trials.labels is None:
        return (
            f"{trials.source} is unlabelled; an error rate needs lines `1 enrol test` and `0 "
            "enrol test`"
        )
    kind = metrics.missing_kind(trials.labels)
    if not kind:
        return ""
    return (
        f"none of the {len(trials):,} trials of {trials.source} is a {kind} trial; an error "
        "rate needs both kinds"
    )


def cautions(results: Results) -> list[str]:
    """What a reader must know before trusting these figures, the most serious first."""
    sentences = []
    num_targets = results.num_targets or 0
    num_nontargets = results.num_trials - num_targets
    if (results.eer_percent or 0.0) > WORSE_THAN_CHANCE:
        sentences.append(
            "the scores are worse than chance; higher scores must mean the same speaker: check for "
            "distances or swapped labels"
        )
    if number := results.num_contradicting_trials:
        sentences.append(f"{number:,} trials appear with both labels; one of the labels is wrong")
    if number := results.num_duplicate_trials:
        sentences.append(f"{number:,} trials occur more than once in the list and count each time")
    if number := results.num_self_trials:
        sentences.append(
            f"{counted(number, 'trial')} compare an utterance with itself, which makes the error "
            "rate optimistic"
        )
    if number := results.num_same_session_targets:
        sentences.append(
            f"{number:,} of {num_targets:,} target trials pair recordings of one session, whose "
            "shared microphone and room make the error rate optimistic"
        )
    # Unknown is not zero: most trial lists do not name sessions.
    if num_targets and results.num_same_session_targets is None:
        sentences.append(
            "the list does not show which recordings share a session; if same-speaker pairs come "
            "from one session, the error rate is optimistic"
        )
    if results.interval_note:
        sentences.append(results.interval_note)
    elif note := few_speakers_note(results.num_speakers_of_half_the_targets, num_targets):
        sentences.append(note)
    if few := _priors_of_few_nontargets(results, num_nontargets):
        sentences.append(
            f"{num_nontargets:,} different-speaker pairs are too few for minDCF({', '.join(few)}): "
            "a single false accept costs as much as rejecting every trial"
        )
    return sentences


def _priors_of_few_nontargets(results: Results, num_nontargets: int) -> list[str]:
    """The priors at which one false accept costs as much as rejecting everybody."""
    costs = results.dcf_costs
    if not costs:
        return []
    priors = []
    for prior in results.min_dcf:
        # One false accept costs c_fa x (1 - prior) / nontargets, rejecting everybody c_miss x
        # prior.
        of_false_accepts = costs["c_fa"] * (1 - float(prior))
        if of_false_accepts >= num_nontargets * costs["c_miss"] * float(prior):
            priors.append(prior)
    return priors


def group_draws(options: EvaluationOptions) -> int:
    """Draws of speakers for the interval of a group of trials."""
    return min(MAX_GROUP_DRAWS, options.bootstrap_samples)


class SpeakerBootstrap:
    """The scores of one system, prepared for drawing: sorted once, then evaluated by `figures` for
    each draw.
    """

    def __init__(
        self,
        scores: np.ndarray,
        labels: np.ndarray,
        enrol_speakers: np.ndarray,
        test_speakers: np.ndarray,
        points: Mapping[str, OperatingPoint],
        false_accepts: np.ndarray | None = None,
    ) -> None:
        scores, labels = metrics.check_trials(scores, labels)
        # Speakers are drawn because they are what the list is a sample of: the same people recorded
        # again would give nearly the same errors, other people would not. That one hard voice takes
        # part in a thousand trials makes those trials one observation, not a thousand.
        # Only speakers with a trial are drawn; a slice may not have all of them.
        present, numbers = np.unique(
            np.concatenate([enrol_speakers, test_speakers]), return_inverse=True
        )
        enrol = numbers[: len(labels)]
        test = numbers[len(labels) :]
        # Sorted once: a draw only changes how often each trial counts.
        order = np.argsort(scores, kind="stable")
        # Equal scores are accepted or rejected together, so rates exist only at the ends of their
        # groups.
        self._ends = np.append(metrics.group_starts(scores[order])[1:], len(labels)) - 1
        self._labels = labels[order]
        self._first = enrol[order].astype(np.int64)
        # A target trial counts its speaker once: its second side points to a dummy speaker that is
        # drawn exactly once.
        is_within = labels | (enrol == test)
        self._second = np.where(is_within, len(present), test)[order].astype(np.int64)
        self._points = points
        self._false_accepts = np.empty(0) if false_accepts is None else false_accepts
        self.num_trials = len(labels)
        self.num_speakers = len(present)

    def figures(self, counts: np.ndarray | None = None) -> np.ndarray | None:
        """EER in percent, minDCFs and miss rates, (figures,), when speaker s is drawn `counts[s]`
        times (None: once).

        None if the draw has no targets or no non-targets.
        """
        counts = np.append(
            np.ones(self.num_speakers, dtype=np.int64) if counts is None else counts, 1
        )
        weights = counts[self._first] * counts[self._second]
        all_below = np.cumsum(weights)
        targets_below = np.cumsum(weights * self._labels)
        num_targets = int(targets_below[-1])
        num_all = int(all_below[-1])
        if num_targets in (0, num_all):
            return None
        miss = np.concatenate([[0.0], targets_below[self._ends] / num_targets])
        rejected = np.concatenate(
            [[0.0], (all_below - targets_below)[self._ends] / (num_all - num_targets)]
        )
        false_accept = 1 - rejected
        costs = [
            metrics.detection_cost(miss, false_accept, *point) for point in self._points.values()
        ]
        # The lowest threshold within the wanted false-accept rate, with a tolerance for rounding.
        rows = np.searchsorted(rejected, 1 - self._false_accepts - 1e-12)
        # Normalised by the better blind decision: accept all, as in the first row, or none, as in
        # the last.
        least = [cost.min() / min(cost[0], cost[-1]) for cost in costs]
        return np.array([100 * metrics.crossing(miss, false_accept)[1], *least, *miss[rows]])

    def measure(self, num_draws: int, seed: int) -> Results:
        """EER and minDCFs with 95 % intervals from at most `num_draws` draws, or a note saying why
        there are none.
        """
        plain = self.figures()
        assert plain is not None, "there are trials of both kinds"
        # (figures, draws): the EER, the minDCFs, and the miss rates of the DET curve.
        drawn = _draw([self], num_draws, seed)[0].T
        num_draws = drawn.shape[1]
        end = 1 + len(self._points)
        # Scores without errors have none in any draw either, and equal draws give no interval.
        intervals = [
            interval_of(values) if num_draws and np.ptp(values) > 0 else None
            for values in drawn[:end]
        ]
        note = speakers_note(self.num_speakers)
        if num_draws and intervals[0] is None:
            note = "no interval: every draw of speakers gives the same error rate"
        return Results(
            self.num_trials,
            eer_percent=float(plain[0]),
            eer_interval_percent=intervals[0],
            min_dcf=dict(zip(self._points, plain[1:end].tolist(), strict=True)),
            num_draws=num_draws,
            min_dcf_interval=dict(zip(self._points, intervals[1:], strict=True))
            if num_draws
            else None,
            interval_note=note,
            det_band=self._det_band(drawn[end:]),
        )

    def _det_band(self, drawn: np.ndarray) -> Band | None:
        """The intervals of miss rates (false-accept rates, draws), as a report shows them."""
        if not drawn.size:
            return None
        tail = (100 - LEVEL_PERCENT) / 2
        low, high = np.percentile(drawn, [tail, 100 - tail], axis=1)
        return {
            "false_accept_percent": _percent(self._false_accepts),
            "miss_low_percent": _percent(low),
            "miss_high_percent": _percent(high),
        }


def _percent(rates: np.ndarray) -> list[float]:
    """Rates as percentages with five digits, which are enough for a plot."""
    return [float(f"{100 * rate:.5g}") for rate in rates]


def group_result(
    label: str, prepared: SpeakerBootstrap, num_targets: int | None, num_draws: int, seed: int
) -> GroupResult:
    """The figures of a group of trials as a table row; without a number of targets and priors, the
    EER alone.
    """
    results = prepared.measure(num_draws, seed)
    notes = [results.interval_note] if results.interval_note else []
    if num_targets is not None and num_targets < MIN_TARGETS:
        notes.insert(0, f"only {num_targets} targets")
    return GroupResult(
        label,
        results.eer_percent,
        results.eer_interval_percent,
        "; ".join(notes),
        None if num_targets is None else results.num_trials,
        num_targets,
        results.min_dcf or None,
    )


def _draw(systems: Sequence[SpeakerBootstrap], num_draws: int, seed: int) -> np.ndarray:
    """Figures of systems under the same draws, (systems, draws, figures).

    Draws that lack targets or non-targets are omitted; with too few speakers there are no draws.
    """
    plain = systems[0].figures()
    num_speakers = systems[0].num_speakers
    assert plain is not None, "there are trials of both kinds"
    num_trials = len(systems) * systems[0].num_trials
    num_draws = min(num_draws, max(MIN_DRAWS, MAX_WORK // num_trials))
    if num_speakers < MIN_SPEAKERS:
        num_draws = 0
    rows = []
    with Bar("intervals", num_draws, "draw", is_shown=num_draws * num_trials > SHOWN_WORK) as bar:
        for draw in bar.over(range(num_draws)):
            # Keyed by the draw: all systems get the same speakers, and more draws extend fewer.
            # As many speakers as the list has, with replacement, as the bootstrap requires.
            chosen = numpy_generator(seed, STREAM, draw).integers(0, num_speakers, num_speakers)
            counts = np.bincount(chosen, minlength=num_speakers)
            figures = [system.figures(counts) for system in systems]
            if all(values is not None for values in figures):
                rows.append(figures)
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(systems), len(plain))
    return table.transpose(1, 0, 2)


def speakers_note(num_speakers: int) -> str:
    """A note on an interval over few speakers; empty if there are enough."""
    if num_speakers < MIN_SPEAKERS:
        return f"no interval: too few speakers ({num_speakers}, at least {MIN_SPEAKERS} are needed)"
    if num_speakers < ROUGH_SPEAKERS:
        return f"there are only {num_speakers} speakers, so the interval is rough"
    return ""


def interval_of(values: np.ndarray) -> Interval:
    """The middle 95 % of the draws; None without draws."""
    if not len(values):
        return None
    tail = (100 - LEVEL_PERCENT) / 2
    low, high = np.percentile(values, [tail, 100 - tail]).tolist()
    return low, high


@dataclass(frozen=True)
class Difference:
    """The difference between two systems in one figure: B minus A, so a positive value means that A
    is better.
    """

    value: float
    interval: Interval
    """95 % interval of the difference under the same draws of speakers."""
    note: str = ""
    seeds_interval: Interval = None
    """95 % interval over the seeds of the training; None unless both systems have several runs."""
    p_value: float = 1.0
    """Two-sided, over speakers; with several runs of both systems, the larger of that and the one
    over seeds."""
    num_compared: int = 1
    """Number of systems compared with the first; the p-value is corrected for it."""

    @property
    def is_significant(self) -> bool:
        """Whether other speakers, and other seeds if there are several, would hardly turn the
        difference round.
        """
        # In percent: 1 - 0.95 is a little more than 0.05.
        return 100 * self.p_value < 100 - LEVEL_PERCENT

    def sentence(
        self, figure: str, first: str, second: str, *, is_of_one_system: bool = False
    ) -> str:
        """The result in words; of two trainings of one system with other seeds, neither can be
        better.
        """
        better, worse = (first, second) if self.value >= 0 else (second, first)
        text = f"{figure}: {better} is better than {worse} by {abs(self.value):.3f}"
        if not self.value:
            text = f"{figure}: {first} and {second} are equal"
        if self.interval is not None:
            verdict = "which is significant" if self.is_significant else "which is not significant"
            if self.num_compared > 1:
                verdict += f" (Holm's correction for {self.num_compared} systems)"
            if is_of_one_system:
                verdict = "the spread between two trainings of one system"
            ends = self._ends(self.interval)
            if self.seeds_interval is not None:
                ends += f" over speakers, {self._ends(self.seeds_interval)} over seeds"
            text += f" ({LEVEL_PERCENT:g} % interval {ends}), {verdict}"
        return f"{text}; {self.note}" if self.note else text

    def _ends(self, interval: tuple[float, float]) -> str:
        """An interval of how much better the better system is."""
        low, high = interval if self.value >= 0 else (-interval[1], -interval[0])
        return f"{low:.3f} to {high:.3f}"


def over_seeds(first: np.ndarray, second: np.ndarray, *, is_paired: bool) -> tuple[Interval, float]:
    """95 % interval over seeds of mean(second) - mean(first), and its two-sided p-value.

    Args:
        first: a figure of each training run of one system, (runs,).
        second: the same of another system, (runs,).
        is_paired: whether run i of both has the same seed; then Student's t of the differences,
            otherwise Welch's.

    Returns:
        None and 0, which excludes nothing, if a system has a single run.

    Source: Welch, The generalization of "Student's" problem when several different population
    variances are involved, 1947.

    >>> interval, p_value = over_seeds(np.array([8, 10]), np.array([6, 9]), is_paired=True)
    >>> [round(end, 3) for end in interval], round(p_value, 4)
    ([-7.853, 4.853], 0.2048)
    """
    if min(len(first), len(second)) < 2:
        return None, 0.0
    samples = [second - first] if is_paired else [first, second]
    if not any(map(np.ptp, samples)):
        # Without any spread the test statistic is 0 / 0.
        difference = float(second.mean() - first.mean())
        return (difference, difference), float(difference == 0)
    # Late: it takes over a second to import, and few comparisons have several runs.
    from scipy.stats import ttest_ind, ttest_rel

    # Welch's test, because two configurations need not vary equally from seed to seed.
    test = ttest_rel(second, first) if is_paired else ttest_ind(second, first, equal_var=False)
    low, high = test.confidence_interval(LEVEL_PERCENT / 100)
    return (float(low), float(high)), float(test.pvalue)


def p_value_of(draws: np.ndarray) -> float:
    """Two-sided p-value of a difference, from the share of its bootstrap draws (draws,) on either
    side of zero; 1 without draws.

    >>> p_value_of(np.array([-1.0, 2.0, 3.0, 4.0]))
    0.5
    """
    if not len(draws):
        return 1.0
    # Draws of exactly zero count on both sides, so that equal systems have a p-value of 1.
    return min(1.0, 2 * float(min(np.mean(draws <= 0), np.mean(draws >= 0))))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order.

    Source: Holm, A simple sequentially rejective multiple test procedure, 1979.

    >>> holm([0.0625, 0.5, 0.125])
    [0.1875, 0.5, 0.25]
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values)
    # The smallest is multiplied by their number, the next by one less; none falls below a smaller.
    factors = np.arange(len(values), 0, -1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * values[order]))
    return [float(value) for value in corrected]


@dataclass(frozen=True)
class Comparison:
    """Several systems on one list: EER and minDCFs of each, and the differences of the others from
    the first.
    """

    systems: list[Results]
    differences: list[list[Difference]]
    """For each system but the first, one per figure: EER, then the minDCFs; positive if the first
    is better. Each figure's p-values are corrected for the number of systems (`holm`)."""

    def sentences(self, names: Sequence[str], same: Collection[str] = ()) -> list[str]:
        """A sentence for each figure of each system but the first; those named in `same` differ
        from the first in the seed of their training alone.
        """
        labels = [figure.label for figure in headline(self.systems[0])]
        sentences = []
        for name, differences in zip(names[1:], self.differences, strict=True):
            for label, difference in zip(labels, differences, strict=True):
                sentences.append(
                    difference.sentence(label, names[0], name, is_of_one_system=name in same)
                )
        return sentences


def compare_scores(
    trials: TrialList,
    systems: Sequence[np.ndarray],
    speakers: Speakers,
    *,
    num_draws: int,
    seed: int,
    options: EvaluationOptions = USUAL,
    priors: Sequence[float] = ALWAYS_SHOWN_PRIORS,
    is_paired: bool = False,
) -> Comparison:
    """Compare each system with the first by their scores on the same labelled trials.

    The minDCFs at `priors` have the costs of `options` (default: 1 and 1).

    A system is given by its scores, (trials,), or by those of its training runs, (runs, trials),
    whose figures are averaged. If they are paired, row i of all systems is a run with the same
    seed.
    """
    if trials.labels is None:
        raise ValueError(
            f"{trials.source}: unlabelled trials have no error rates to compare; give a labelled "
            "list"
        )
    # Each draw measures all systems on the same speakers, so a hard speaker counts against each of
    # them and cancels. That is why systems whose intervals overlap may differ significantly.
    sides = speakers.ids[trials.enrol], speakers.ids[trials.test]
    points = operating_points(priors, options)
    runs: list[SpeakerBootstrap] = []
    ends = []
    for scores in systems:
        for run in np.atleast_2d(scores):
            runs.append(SpeakerBootstrap(run, trials.labels, *sides, points))
        ends.append(len(runs))
    figures_of = np.split(np.array([run.figures() for run in runs]), ends[:-1])  # (runs, figures)
    drawn = np.split(_draw(runs, num_draws, seed), ends[:-1])  # (runs, draws, figures)
    note = speakers_note(runs[0].num_speakers)
    differences = []
    for of_runs, of_draws in zip(figures_of[1:], drawn[1:], strict=True):
        values = of_runs.mean(axis=0) - figures_of[0].mean(axis=0)
        draws = of_draws.mean(axis=0) - drawn[0].mean(axis=0)
        row = []
        for number, value in enumerate(values.tolist()):
            before, after = figures_of[0][:, number], of_runs[:, number]
            of_seeds, p_value = over_seeds(before, after, is_paired=is_paired)
            # The larger, because a difference has to be significant both over seeds and over
            # speakers.
            p_value = max(p_value, p_value_of(draws[:, number]))
            interval = interval_of(draws[:, number])
            row.append(Difference(value, interval, note, of_seeds, p_value, len(systems) - 1))
        differences.append(row)
    # The more systems are compared, the more likely one of them seems better by chance.
    for number in range(1 + len(points)):
        p_values = holm([row[number].p_value for row in differences])
        for row, p_value in zip(differences, p_values, strict=True):
            row[number] = replace(row[number], p_value=p_value)
    results = []
    for of_runs in figures_of:
        eer_percent, *costs = of_runs.mean(axis=0).tolist()
        min_dcf = dict(zip(points, costs, strict=True))
        results.append(Results(len(trials), eer_percent=eer_percent, min_dcf=min_dcf))
    return Comparison(results, differences)


def short_names(paths: Sequence[str]) -> list[str]:
    """Short names for paths: as few of their last parts as distinguish them, without the parts in
    which all end.

    >>> short_names(["exps/a/scores.txt", "exps/b/scores.txt"])
    ['a', 'b']
    >>> short_names(["exps/a/1/scores.txt", "exps/a/2/scores.txt", "exps/b/1/scores.txt"])
    ['a/1', 'a/2', 'b/1']
    """
    heads = [path.replace("\\", "/").rstrip("/").split("/") for path in paths]
    while all(heads) and len({parts[-1] for parts in heads}) == 1:
        heads = [parts[:-1] for parts in heads]
    # As few parts as possible: one tells `exps/a` from `exps/b`, runs of several seeds need two.
    for depth in range(1, max(map(len, heads)) + 1):
        names = ["/".join(parts[-depth:]) or "." for parts in heads]
        if len(set(names)) == len(names):
            return names
    return list(paths)
