"""Calibrate on seconds of speech: a list's recordings are also cut short, as tests are in use.

The scores of short recordings vary more and say less. A calibration whose slope and offset depend
on the durations of both sides is fitted on whole and cut recordings, and kept if it lowers Cllr for
speakers left out of the fit, in comparison with the calibration of the score alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import (
    BY_DURATION,
    DURATION,
    SCORE_ONLY,
    quality_columns,
    threshold_way,
)
from speakernet.evaluation.embedding import Embedder
from speakernet.evaluation.fitting import Fit, LengthFigures, fit_calibration, named_thresholds
from speakernet.evaluation.metrics import (
    act_dcf,
    cllr,
    error_rates,
    missing_kind,
    point_at_false_accept_rate,
)
from speakernet.evaluation.scoring import Backend
from speakernet.evaluation.sweep import DegradedSource, Step
from speakernet.random import numpy_generator

CUT_SECONDS = (1.0, 2.0, 3.0, 5.0)
WHOLE = 0.0
ENROLMENT_TOO = -1.0
"""Instead of the seconds that the test side is cut to: nothing is cut, or the enrolment side is."""
MAX_CUTS = 400
"""Recordings cut to each length; more would take long and hardly change the fit."""
MAX_TRIALS = 20_000
"""Trials for each length and choice of sides."""
LONGEST_QUANTILE = 0.95
"""One very long recording must not extend the durations that the calibration holds for."""
MIN_SPEAKERS = 20
"""With same-speaker pairs; with fewer, whether durations help is a matter of luck."""
NUM_FOLDS = 5
NUM_DIVISIONS = 3
RATE = 0.01
"""Target prior of the cost and false-accept rate of the threshold that are compared."""
DURATIONS_STREAM = 6203
TOO_FEW_SPEAKERS = (
    "seconds of speech are not considered: to see whether they help, at least "
    f"{MIN_SPEAKERS} speakers need same-speaker pairs"
)


@dataclass(frozen=True)
class CutTrials:
    """A list's trials with whole and with cut recordings."""

    trials: TrialList
    recordings: np.ndarray
    """The recording that each name of `trials` is, or is cut from."""
    scores: np.ndarray
    """(trials,)."""
    columns: np.ndarray
    """(trials, inputs) of `BY_DURATION`."""
    test_seconds: np.ndarray
    """(trials,) what the test side alone is cut to; `WHOLE`, `ENROLMENT_TOO`."""
    seconds: tuple[float, float]
    """The shortest and the longest duration that a fit holds for."""


# In use the enrolment is often long and the test a few words, but calibration lists hold whole
# recordings. So copies of the list's recordings are cut to the lengths of tests, and each pair of
# the list is scored with the test cut, with the enrolment cut and with both. The fit uses all of
# these, but figures are reported by the length of the test side, since that is what varies in use.
def cut_trials(
    embedder: Embedder,
    backend: Backend,
    embeddings: np.ndarray,
    trials: TrialList,
    source: AudioSource,
) -> CutTrials:
    """Embed and score the list's recordings cut to `CUT_SECONDS`, on the test side, the enrolment
    side and both.

    Args:
        embedder: for whole utterances.
        backend: scores by cosine or PLDA.
        embeddings: (recordings, 1, dim) of the whole recordings.
        trials: of recordings, not models.
        source: of what is embedded; speech has been cut out.
    """
    assert trials.models is None and trials.labels is not None
    options = embedder.options.model_copy(update={"speech": "whole"})
    embedder = replace(embedder, options=options)
    random = numpy_generator(0, DURATIONS_STREAM)
    whole = source.lookup_table(trials.names).seconds
    everything = np.arange(len(whole))
    tables = [embeddings]
    seconds = [whole]
    recordings = [everything]
    pairs = [_some_pairs(random, trials, everything, everything, WHOLE)]
    for length in CUT_SECONDS:
        # Cutting does not change recordings that are no longer than this.
        rows = np.sort(random.permutation(np.flatnonzero(whole > length))[:MAX_CUTS])
        if not len(rows):
            continue
        names = trials.names.take(rows)
        cut_source = DegradedSource(source, names, Step("", kept_seconds=length))
        table, _ = embedder.embed(names, cut_source, "whole", f"cut to {length:g} s")
        # The row of each recording's cut in the joined tables, -1 without one.
        cut = np.full(len(whole), -1)
        cut[rows] = sum(map(len, tables)) + np.arange(len(rows))
        tables.append(table)
        seconds.append(np.full(len(rows), length))
        recordings.append(rows)
        pairs.append(_some_pairs(random, trials, everything, cut, length))
        pairs.append(_some_pairs(random, trials, cut, everything, ENROLMENT_TOO))
        pairs.append(_some_pairs(random, trials, cut, cut, ENROLMENT_TOO))
    enrol, test, labels, test_seconds = (
        np.concatenate(columns) for columns in zip(*pairs, strict=True)
    )
    rows = np.concatenate(recordings)
    joined = replace(
        trials,
        names=trials.names.take(rows),
        enrol=enrol.astype(np.int32),
        test=test.astype(np.int32),
        labels=labels,
    )
    scores, _, _ = backend.score(np.concatenate(tables), joined)
    # Outside these durations the fit has seen nothing, and the logarithm would change the slope
    # further and further, so other recordings count as the nearest length.
    limits = CUT_SECONDS[0], float(max(CUT_SECONDS[0], np.quantile(whole, LONGEST_QUANTILE)))
    values = {DURATION: np.concatenate(seconds)}
    columns = quality_columns(BY_DURATION, scores, values, enrol, test, limits)
    return CutTrials(joined, rows, scores, columns, test_seconds, limits)


def _some_pairs(
    random: np.random.Generator,
    trials: TrialList,
    enrol_rows: np.ndarray,
    test_rows: np.ndarray,
    test_seconds: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Enrolment, test, label and `test_seconds` of the trials both of whose recordings have a row;
    at most `MAX_TRIALS`.
    """
    assert trials.labels is not None
    enrol = enrol_rows[trials.enrol]
    test = test_rows[trials.test]
    kept = np.flatnonzero((enrol >= 0) & (test >= 0))
    if len(kept) > MAX_TRIALS:
        kept = np.sort(random.permutation(kept)[:MAX_TRIALS])
    return enrol[kept], test[kept], trials.labels[kept], np.full(len(kept), test_seconds)


def fit_durations(cut: CutTrials, of_scores: Fit, way: Mapping[str, Any]) -> Fit:
    """A calibration with durations, with the thresholds that the fit of the score alone has."""
    labels = cut.trials.labels
    assert labels is not None
    prior = of_scores.calibration.prior
    calibration = fit_calibration(cut.columns, labels, prior, BY_DURATION)
    rates = error_rates(calibration.apply(cut.columns), labels)
    # The same pairs at several lengths support no stricter threshold than at one length.
    names = {threshold["name"] for threshold in of_scores.thresholds}
    thresholds, _ = named_thresholds(rates, threshold_way(way, BY_DURATION))
    return replace(
        of_scores,
        calibration=replace(calibration, seconds=cut.seconds),
        thresholds=[threshold for threshold in thresholds if threshold["name"] in names],
        refused=[],
    )


def speakers_with_targets(trials: TrialList, speakers: np.ndarray) -> np.ndarray:
    """The speakers that have same-speaker pairs; `speakers` (names,) are those of the names."""
    assert trials.labels is not None
    return np.unique(speakers[trials.enrol[trials.labels == 1]])


def compare_left_out(
    cut: CutTrials, speakers: np.ndarray, prior: float
) -> list[LengthFigures] | None:
    """Figures with the score alone and with durations for speakers left out of the fit: for each
    length of the test side, then for all trials; None if too few pairs remain without some.

    Args:
        cut: the trials.
        speakers: (recordings,) numbers.
        prior: target prior of the fits.
    """
    labels = cut.trials.labels
    assert labels is not None
    # Whether durations help must be judged on speakers that the fit has not seen. A trial has two,
    # so it is tested if both are in the fold and fitted on if neither is; trials across the border
    # belong to neither, or the fit would have seen half of what it is tested on.
    of_names = speakers[cut.recordings]
    sides = np.stack([of_names[cut.trials.enrol], of_names[cut.trials.test]])
    with_targets = speakers_with_targets(cut.trials, of_names)
    divisions = []
    for division in range(NUM_DIVISIONS):
        random = numpy_generator(division, DURATIONS_STREAM)
        fold_of = random.permutation(speakers.max() + 1) % NUM_FOLDS
        # Every fold has its share of the speakers with targets.
        fold_of[with_targets] = random.permutation(len(with_targets)) % NUM_FOLDS
        figures = _compare_folds(cut, fold_of[sides], prior)
        if figures is None:
            return None
        divisions.append({row.label: row for row in figures})
    lengths = []
    for label in divisions[0]:
        rows = [division[label] for division in divisions if label in division]
        means = np.array([row[3:] for row in rows], dtype=np.float64).mean(axis=0)  # (figures, 2)
        lengths.append(LengthFigures(*rows[0][:3], *means))
    return lengths


def helps(lengths: Sequence[LengthFigures] | None) -> bool:
    """Whether durations lower Cllr over all lengths."""
    # Cllr and not the EER, because durations hardly change the order of pairs of equal length; they
    # change how much a score means.
    return lengths is not None and bool(lengths[-1].cllr[1] < lengths[-1].cllr[0])


def _compare_folds(cut: CutTrials, folds: np.ndarray, prior: float) -> list[LengthFigures] | None:
    """As `compare_left_out`, for one division; `folds` (2, trials) are those of both sides."""
    labels = cut.trials.labels
    assert labels is not None
    is_whole = cut.test_seconds == WHOLE
    ratios = np.full((2, len(labels)), np.nan)
    accepted = np.zeros((2, len(labels)), dtype=bool)
    for fold in range(NUM_FOLDS):
        is_tested = (folds == fold).all(axis=0)
        is_fitted = (folds != fold).all(axis=0)
        if missing_kind(labels[is_fitted & is_whole]):
            return None
        # Without durations a calibration is fitted on whole recordings only, so the score alone is
        # too. Both fits are tested on the same pairs.
        ways = [(1, SCORE_ONLY, is_fitted & is_whole), (len(BY_DURATION), BY_DURATION, is_fitted)]
        for way, (num_inputs, names, rows) in enumerate(ways):
            columns = cut.columns[:, :num_inputs]
            calibration = fit_calibration(columns[rows], labels[rows], prior, names)
            rates = error_rates(calibration.apply(columns[rows]), labels[rows])
            threshold = point_at_false_accept_rate(rates, RATE).threshold
            ratios[way, is_tested] = calibration.apply(columns[is_tested])
            accepted[way] = np.where(is_tested, ratios[way] >= threshold, accepted[way])
    is_tested = np.isfinite(ratios).all(axis=0)
    groups = {f"{length:g} s": cut.test_seconds == length for length in CUT_SECONDS}
    groups |= {"whole": is_whole, "all": np.ones(len(labels), dtype=bool)}
    figures = []
    for label, is_in in groups.items():
        rows = np.flatnonzero(is_in & is_tested)
        is_target = labels[rows] == 1
        if missing_kind(is_target):
            continue
        of_ways = []
        for way in range(2):
            llrs = ratios[way, rows]
            decided = accepted[way, rows]
            of_ways.append(
                [
                    cllr(llrs, is_target),
                    act_dcf(error_rates(llrs, is_target), RATE),
                    100 * decided[~is_target].mean(),
                    100 * (~decided[is_target]).mean(),
                ]
            )
        num_targets = int(is_target.sum())
        counts = num_targets, len(rows) - num_targets
        figures.append(LengthFigures(label, *counts, *np.array(of_ways).T))
    return figures
