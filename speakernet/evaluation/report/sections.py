"""The sections of a report, each made from the files of one run or of several."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from speakernet.data.audio import AudioError, flac_address
from speakernet.data.lists import identify_trials
from speakernet.data.sources import AudioSource
from speakernet.evaluation import plots
from speakernet.evaluation.calibration import (
    BY_QUALITY,
    EER_NAME,
    AffineCalibration,
    threshold_label,
    threshold_name,
)
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, cautions
from speakernet.evaluation.files import (
    LLR_COLUMN,
    Decisions,
    RunData,
    compare_runs,
    described,
    is_number,
)
from speakernet.evaluation.fitting import named_thresholds
from speakernet.evaluation.metrics import (
    ErrorRates,
    OperatingPoint,
    bayes_threshold,
    equal_error_point,
    error_rates,
    min_dcf_point,
    pooled_llrs,
)
from speakernet.evaluation.options import UNIT_COST
from speakernet.evaluation.report.page import MISSING, Card, Section, drawn
from speakernet.evaluation.results import FEW_TARGETS, GroupResult, Results, SweepResult, headline
from speakernet.evaluation.speakers import speakers_of
from speakernet.files import human_bytes
from speakernet.run_folder import DECISIONS, EVALUATIONS, SCORES
from speakernet.terminal import counted

CURVES = (
    ("evaluation", "eer_percent", "EER (%)", "Held-out EER"),
    ("step", "loss", "loss", "Training loss"),
    ("step", "accuracy_percent", "accuracy (%)", "Training accuracy"),
    ("step", "learning_rate", "learning rate", "Learning rate"),
    ("step", "margin", "margin", "Margin"),
    ("step", "utterances_per_second", "utterances per second", "Speed"),
    ("step", "data_wait_share", "waiting for data (% of time)", "Data wait"),
)
"""Record kind, key, axis label and heading of each training curve."""
CURVE_NOTES = {
    "eer_percent": (
        "Measured on the validation list, which chooses the best checkpoint unless the "
        "last one is kept."
    ),
    "accuracy_percent": "A margin lowers the accuracy by design; judge by the held-out EER.",
    "data_wait_share": (
        "Near 0 % the device is the bottleneck; well above 10 %, reading and augmentation are."
    ),
}
FACTS = (
    "model",
    "num_parameters",
    "front_end",
    "checkpoint",
    "precision",
    "backend",
    "calibration",
    "speaker_rule",
    "num_draws",
    "dcf_costs",
    "num_duplicate_trials",
    "timings_seconds",
    "seconds",
)
"""Results shown unchanged."""
HISTOGRAM_NOTE = "Each histogram has an area of 1; the line is the threshold at the EER."
NUM_HARDEST = 12
MAX_PLAYED_SECONDS = 20
"""Limit per recording: a page with an hour of speech would be too large to send."""
NUM_TRIALS_SHOWN = 100
ENOUGH_FOR_A_HISTOGRAM = 30
USUAL_RATE = 0.01
"""`verify` uses the threshold at this false-accept rate if the model file has it, otherwise the one
at the EER."""
VERIFYING = ("whole", "none")
"""How `verify` embeds, and its score normalisation."""
DRAW_SEED = 0
"""Fixed, so that the same runs always give the same intervals."""


def result_section(run: RunData) -> Section:
    """The EER with its interval and caveats, minDCF and Cllr, then all figures in one table."""
    results = run.results
    if results is None:
        return {"remarks": ["Not evaluated yet; the curves below show the training so far."]}
    numbers = {
        name: getattr(results, f"num_{name}")
        for name in ("trials", "targets", "utterances", "speakers")
    }
    facts = [
        (name.capitalize(), f"{value:,}") for name, value in numbers.items() if value is not None
    ]
    of_list = {"heading": "Trial list", "note": _list_sentence(run), "facts": facts}
    notes = [
        *(cautions(results) if results.warnings is None else results.warnings),
        results.interval_note,
    ]
    caveats = list(dict.fromkeys(filter(None, notes)))
    figures = {one.name: one for one in headline(results)}
    if not figures:
        return {
            "is_in_halves": True,
            "cards": [of_list],
            "warnings": [
                f"no error rates: {results.why_no_eer or 'the list lacks targets or non-targets'}",
                *caveats,
            ],
        }
    shown = ["EER", "minDCF(0.01)", "actual DCF(0.01)", "Cllr" if "Cllr" in figures else "min Cllr"]
    tiles: list[dict[str, Any]] = [
        {
            "name": name,
            "value": one.text,
            "note": f"95 %: {one.interval_text}" if one.interval_text else "",
        }
        for name, one in figures.items()
        if name in shown
    ]
    tiles[0]["name"] = "Equal error rate"
    if (kept := kept_threshold(run)) is not None:
        name, fitted_for, point = kept
        tiles.append(
            {
                "name": name.capitalize(),
                "value": f"{point.threshold:.4f}",
                "note": f"calibrated for {fitted_for}",
            }
        )
    rows = [[one.name, one.text, one.interval_text] for one in headline(results, further=True)]
    table = {"header": ["figure", "value", "95 % interval"], "rows": rows, "numbers": (1, 2)}
    cards = [{"heading": "All figures", "table": table}, of_list]
    if results.test_lists:
        cards.append(_lists_side_by_side(run.list_name, results, results.test_lists))
    return {"is_in_halves": True, "tiles": tiles, "cards": cards, "warnings": caveats}


def kept_threshold(run: RunData) -> tuple[str, str, OperatingPoint] | None:
    """The model's threshold for decisions: its name, what it was fitted for, and its errors on the
    run's list.
    """
    results = run.results or Results()
    kept = {one["name"]: one for one in results.thresholds or []}
    used = next(
        (kept[name] for name in (threshold_name(USUAL_RATE), EER_NAME) if name in kept), None
    )
    if used is None or run.scores is None or run.labels is None:
        return None
    # `verify` scores whole utterances without a cohort; other scorings have their own thresholds.
    way = results.backend or {}
    is_of_verify = (
        way.get("score") in ("cosine", "plda")
        and (way.get("embedding"), way.get("score_norm")) == VERIFYING
    )
    accepted = run.scores >= used["threshold"]
    errors = float(1 - accepted[run.labels == 1].mean()), float(accepted[run.labels == 0].mean())
    # With quality measures `verify` moves the threshold for each pair.
    moves = any(one.startswith(BY_QUALITY) for one in results.warnings or [])
    name = "threshold used by verify" if is_of_verify and not moves else "calibrated threshold"
    return name, described(used), OperatingPoint(used["threshold"], *errors)


def _lists_side_by_side(name: str, reported: Results, others: Mapping[str, GroupResult]) -> Card:
    """A column for each test list: first the reported one, then those with their own pages under
    eval/.
    """
    columns = {name: reported.as_row(name), **others}
    cells = []
    for one in columns.values():
        figures = headline(
            Results(0, None, one.eer_percent, one.eer_interval_percent, one.min_dcf or {})
        )
        column = {
            one.name: one.text + (f" ({one.interval_text})" if one.interval_text else "")
            for one in figures
        }
        cells.append(
            {**column, "trials": f"{one.num_trials or 0:,}", "targets": f"{one.num_targets or 0:,}"}
        )
    rows = [
        [key, *(column.get(key, MISSING) for column in cells)]
        for key in dict.fromkeys(itertools.chain(*cells))
    ]
    table = {"header": ["figure", *columns], "rows": rows}
    note = (
        f"In brackets: 95 % intervals. {EVALUATIONS}/ in the run folder has the reports on "
        f"{', '.join(others)}."
    )
    return {"heading": "Test lists", "note": note, "table": table, "is_wide": True}


def _list_sentence(run: RunData) -> str:
    """Names the trial list and the one it is often confused with; empty if there are no scores."""
    if run.trials is None:
        return ""
    return identify_trials(run.trials) or (
        f"{run.list_name}, {counted(len(run.trials), 'trial')}; not a known published list"
    )


def trials_section(decisions: Decisions, folder: Path) -> Section:
    """Unlabelled trials: a table of the first ones, and a histogram of all scores if there are
    enough.
    """
    total = len(decisions.trials)
    rows = [decisions.row(number) for number in range(min(NUM_TRIALS_SHOWN, total))]
    limits = {str(one["name"]): float(one["threshold"]) for one in decisions.thresholds}
    names = {
        "enrol": "enrolment",
        LLR_COLUMN: "log-likelihood ratio",
        **{name: f"{threshold_label(name)}: {limit:.4f}" for name, limit in limits.items()},
    }
    file = DECISIONS if decisions.says_more_than_scores else SCORES
    note = f"The first {len(rows)} of {total:,}; all are in {file}." if len(rows) < total else ""
    numbers = [
        column for column, name in enumerate(decisions.header) if name in ("score", LLR_COLUMN)
    ]
    table = {
        "header": [names.get(name, name) for name in decisions.header],
        "rows": rows,
        "numbers": numbers,
    }
    cards = [{"heading": "Scores and decisions", "note": note, "table": table, "is_wide": True}]
    if total >= ENOUGH_FOR_A_HISTOGRAM and np.ptp(decisions.scores) > 0:
        figure = plots.histogram_figure(decisions.scores, None, limits.get(EER_NAME, np.nan))
        cards.append(drawn(folder, "scores", "Scores", figure))
    return {"cards": cards}


def errors_section(runs: Sequence[RunData], folder: Path) -> Section:
    """The DET curve, then each run's histograms, errors by threshold, calibration and operating
    points.
    """
    rates = {}
    for run in runs:
        if run.labels is not None:
            assert run.scores is not None, "labels come with scores"
            rates[run.name] = error_rates(run.scores, run.labels)
    shown = [run for run in runs if run.name in rates]
    if not shown:
        return {}
    # Run -> target prior -> minDCF and its operating point, at the priors and costs that the run
    # reports.
    cheapest: dict[str, dict[float, tuple[float, OperatingPoint]]] = {}
    for run in shown:
        results = run.results or Results()
        priors = sorted(map(float, results.min_dcf)) or ALWAYS_SHOWN_PRIORS
        costs = results.dcf_costs or {}
        both = costs.get("c_miss", UNIT_COST), costs.get("c_fa", UNIT_COST)
        cheapest[run.name] = {
            prior: min_dcf_point(rates[run.name], prior, *both) for prior in priors
        }
    points: dict[str, OperatingPoint] = {}
    if len(shown) == 1:
        only = shown[0].name
        points = {
            "EER": equal_error_point(rates[only]),
            **{f"minDCF at {prior:g}": one for prior, (_, one) in cheapest[only].items()},
        }
    bands = {
        run.name: run.results.det_band
        for run in shown
        if run.results is not None and run.results.det_band
    }
    note = "Closer to the lower left is better; the EER is where a curve crosses the diagonal."
    note += " Bands: 95 % intervals of the miss rate, over speakers." if bands else ""
    cards = [
        drawn(
            folder, "det", "Detection error trade-off", plots.det_figure(rates, points, bands), note
        )
    ]
    tables = []
    for number, run in enumerate(shown, start=1):
        suffix, after = (f"_{number}", f": {run.name}") if len(runs) > 1 else ("", "")
        own = rates[run.name]
        threshold = equal_error_point(rates[run.name]).threshold
        assert run.scores is not None, "runs without scores are not shown"
        figure = plots.histogram_figure(run.scores, run.labels, threshold)
        cards.append(drawn(folder, f"scores{suffix}", f"Scores{after}", figure, HISTOGRAM_NOTE))
        note = (
            "A higher threshold accepts fewer different-speaker pairs and rejects more "
            "same-speaker pairs."
        )
        figure = plots.threshold_figure(own, threshold)
        cards.append(
            drawn(folder, f"thresholds{suffix}", f"Errors by threshold{after}", figure, note)
        )
        cards += _calibration(run, own, folder, suffix, after)
        tables.append(_operating_points(run, own, cheapest[run.name], after))
    if len(runs) == 1:
        return {"is_in_halves": True, "cards": [*cards, *tables]}
    # One row per kind of plot, one column per run.
    kinds = [card["heading"].partition(":")[0] for card in cards]
    order = sorted(range(1, len(cards)), key=lambda row: kinds.index(kinds[row]))
    return {
        "columns": len(runs),
        "cards": [cards[0] | {"is_wide": True}, *(cards[row] for row in order), *tables],
    }


def _operating_points(
    run: RunData, rates: ErrorRates, cheapest: dict[float, tuple[float, OperatingPoint]], after: str
) -> Card:
    """The model's threshold, and those at the EER, the lowest costs and the named false-accept
    rates, with errors.
    """
    found = [(threshold_label(EER_NAME), equal_error_point(rates), MISSING)]
    if (kept := kept_threshold(run)) is not None:
        found.insert(0, (f"{kept[0]}: {kept[1]}", kept[2], MISSING))
    found += [
        (f"lowest cost, target prior {prior:g}", point, f"{cost:.3f}")
        for prior, (cost, point) in reversed(cheapest.items())
    ]
    named, refused = named_thresholds(rates, {})
    # The first is the EER, which is already in the table.
    for one in named[1:]:
        point = OperatingPoint(one["threshold"], one["miss_rate"], one["false_accept_rate"])
        found.append((threshold_label(one["name"]), point, MISSING))
    rows = []
    for name, point, cost_text in found:
        threshold = f"{point.threshold:.4f}" if np.isfinite(point.threshold) else "reject all"
        rows.append(
            [
                name,
                threshold,
                f"{100 * point.miss:.2f} %",
                f"{100 * point.false_accept:.2f} %",
                cost_text,
            ]
        )
    note = (
        "A miss rejects a same-speaker pair, and a false accept accepts a different-speaker pair. "
        f"The thresholds {'below the first row ' if kept else ''}were chosen on this list; with "
        "other speakers their error rates differ."
    )
    note += f" {refused[0].capitalize()}." if refused else ""
    header = ["threshold", "value", "misses", "false accepts", "minDCF"]
    table = {"header": header, "rows": rows, "numbers": (1, 2, 3, 4)}
    return {"heading": f"Operating points{after}", "note": note, "table": table, "is_wide": True}


def _calibration(
    run: RunData, rates: ErrorRates, folder: Path, suffix: str, after: str
) -> list[Card]:
    """The list's own log-likelihood ratios against the calibrated or, without calibration, the raw
    scores.
    """
    assert run.scores is not None and run.labels is not None, "only labelled scores have errors"
    llrs = run.arrays.get("llrs")
    cards = []
    fit = run.results.calibration if run.results else None
    if llrs is None and fit is not None and len(fit["weights"]) == 1:
        llrs = AffineCalibration.from_dict(fit).apply(run.scores)
    name = "score"
    note = "Not calibrated. The curve shows the log-likelihood ratio of each score on this list."
    if llrs is not None:
        rates = error_rates(llrs, run.labels)
        name = "calibrated log-likelihood ratio"
        note = "On the dashed line, the log-likelihood ratios are perfectly calibrated."
        figure = plots.histogram_figure(
            llrs,
            run.labels,
            equal_error_point(rates).threshold,
            "log-likelihood ratio (natural log)",
        )
        text = (
            f"{HISTOGRAM_NOTE} Above {bayes_threshold(0.01):.1f}, accepting costs less than "
            "rejecting at a target prior of 0.01."
        )
        cards.append(drawn(folder, f"llrs{suffix}", f"Log-likelihood ratios{after}", figure, text))
    # Convex-hull edges with a finite ratio; each covers the scores from its first threshold to its
    # last.
    best = pooled_llrs(rates)[2]
    rows = rates.hull
    x = (rates.thresholds[rows[:-1]] + rates.thresholds[np.maximum(rows[1:] - 1, rows[:-1])]) / 2
    x = x[np.isfinite(best)]
    best = best[np.isfinite(best)]
    if len(x) < 2:
        lines = [
            "The scores of targets and non-targets do not overlap, so there is no calibration "
            "curve."
        ]
        return [*cards, {"heading": f"Calibration{after}", "lines": lines}]
    figure = plots.calibration_figure(x, best, name, is_llr=llrs is not None)
    return [*cards, drawn(folder, f"calibration{suffix}", f"Calibration{after}", figure, note)]


def data_section(run: RunData, amount: str) -> Section:
    """The training, validation and test lists, with the purpose of each."""
    results = run.results or Results()
    configured = run.configuration
    options = configured.get("data") or {}
    how = configured.get("training")
    is_watched = isinstance(how, Mapping) and how.get("final_model") == "last"
    purpose = "monitors training" if is_watched else "chooses the best checkpoint"
    eers = [
        one["eer_percent"]
        for one in run.metrics
        if one.get("kind") == "evaluation" and "eer_percent" in one
    ]
    found = f"best EER {min(eers):.2f} % in {counted(len(eers), 'evaluation')}" if eers else ""
    numbers = counted(results.num_trials, "trial")
    numbers += f", {counted(results.num_speakers, 'speaker')}" if results.num_speakers else ""
    lists = (
        ("training", "train_list", "trains the network", amount),
        ("validation", "validation_list", purpose, found),
        ("trials", "", "gives the results on this page", numbers),
    )
    rows = []
    for role, option, what, contents in lists:
        if listed := results.list_name(role) or str(options.get(option) or ""):
            rows.append(["Test" if role == "trials" else role.capitalize(), listed, what, contents])
    table = {"header": ["use", "list", "purpose", "contents"], "rows": rows}
    cards: list[Card] = [{"heading": "Lists", "table": table, "is_wide": True}] if rows else []
    drawn: Counter[str] = Counter()
    for one in run.metrics:
        drawn.update(
            {name: number for name, number in one.get("drawn", {}).items() if is_number(number)}
        )
    if total := drawn.total():
        shares = [
            [name, f"{number:,}", f"{100 * number / total:.1f} %"] for name, number in drawn.items()
        ]
        table = {"header": ["corpus", "utterances drawn over all epochs", "share"], "rows": shares}
        cards.append({"heading": "Corpora", "table": table})
    return {"cards": cards}


def training_section(runs: Sequence[RunData], folder: Path) -> Section:
    """A small plot of each recorded quantity that changed; a remark on those that did not."""
    cards: list[Card] = []
    constants: list[str] = []
    for kind, key, axis, heading in CURVES:
        is_evaluation = kind == "evaluation"
        where = "epoch" if is_evaluation else "step"
        scale = 100.0 if key.endswith("_share") else 1.0
        series = {}
        bands = {}
        begins = []
        note = CURVE_NOTES.get(key, "")
        for run in runs:
            records = [one for one in run.metrics if one.get("kind") == kind and key in one]
            if records:
                x = np.array([one.get(where, 0) for one in records], dtype=np.float64)
                series[run.name] = (x, scale * np.array([one[key] for one in records]))
                after = f" of {run.name}" if len(runs) > 1 else ""
                borders = {
                    one["begun"]["stage"]: one["begun"][where] for one in records if "begun" in one
                }
                for stage, begin in borders.items():
                    note += f" After {where} {begin}{after}: the {stage} stage."
                    begins.append(begin)
                # Each test list has its own curve, over the evaluations that included it.
                listed = [
                    (one.get(where, 0), one.get("test_lists", {}))
                    for one in records
                    if key == "eer_percent"
                ]
                for name in dict.fromkeys(itertools.chain(*(lists for _, lists in listed))):
                    found = ((at, lists.get(name)) for at, lists in listed)
                    points = [
                        (at, one[key])
                        for at, one in found
                        if isinstance(one, dict) and is_number(one.get(key))
                    ]
                    if points:
                        series[f"{run.name}, {name}" if len(runs) > 1 else name] = tuple(
                            np.array(points, float).T
                        )
            rows = [(one.get("epoch", 0), *one.get("eer_interval_percent", ())) for one in records]
            rows = [
                one
                for one in rows
                if key == "eer_percent" and len(one) == 3 and all(map(is_number, one))
            ]
            if rows:
                bands[run.name] = np.array(rows, dtype=np.float64).T
        values = np.concatenate([y for _, y in series.values()]) if series else np.empty(0)
        if len(values) and np.ptp(values) == 0:
            constants.append(f"{heading} {values[0]:.4g}{' %' if '%' in axis else ''}")
        elif len(values):
            note += " Bands: 95 % intervals over speakers, from few draws." if bands else ""
            how: dict[str, Any] = {
                "mark_lowest": key == "eer_percent",
                "has_ticks_at_points": is_evaluation,
                "borders": begins,
            }
            figure = plots.curve_figure(series, where, axis, bands, **how)
            cards.append(drawn(folder, f"training_{key}", heading, figure, note.strip()))
    remarks = (
        [f"Not plotted because constant or measured once: {', '.join(constants)}."]
        if constants
        else []
    )
    return {"cards": cards, "remarks": remarks}


def group_sections(runs: Sequence[RunData], folder: Path) -> dict[str, Section]:
    """A plot and a table for each slicing; the EER against the amount of each degradation."""
    cards = []
    undivided = []
    kinds: dict[str, dict[str, SweepResult]] = {}
    for number, run in enumerate(runs, start=1):
        suffix, after = (f"_{number}", f": {run.name}") if len(runs) > 1 else ("", "")
        results = run.results or Results()
        for place, one in enumerate(results.slices or [], start=1):
            if len(one.rows) == 1:
                undivided.append(
                    f"By {one.by}{after}: all trials are in one group, {one.rows[0].label}."
                )
                continue
            weak = [
                number
                for number, group in enumerate(one.rows)
                if group.num_targets is not None and group.num_targets < FEW_TARGETS
            ]
            notes = [
                one.note,
                f"Grey: fewer than {FEW_TARGETS} targets, too few to rely on." if weak else "",
            ]
            rated = (row for row in one.rows if row.note and row.eer_percent is not None)
            notes += [f"Slice {row.label!r}: {row.note}." for row in rated]
            cells = []
            for row in one.rows:
                eer = row.note or "no EER"
                if row.eer_percent is not None:
                    interval = row.eer_interval_percent
                    eer = f"{row.eer_percent:.2f} %" + (
                        f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
                    )
                cells.append(
                    [row.label, f"{row.num_trials or 0:,}", f"{row.num_targets or 0:,}", eer]
                )
            header = ["slice", "trials", "targets", "EER"]
            table = {"header": header, "rows": cells, "numbers": (1, 2, 3), "weak": weak}
            figure = plots.slices_figure(one.rows, weak)
            note = " ".join(filter(None, notes))
            cards.append(
                drawn(
                    folder,
                    f"slices_{place}{suffix}",
                    f"By {one.by}{after}",
                    figure,
                    note,
                    table=table,
                )
            )
        for swept in results.sweep or []:
            kinds.setdefault(swept.kind, {})[run.name] = swept
    sweeps = []
    for kind, by_run in kinds.items():
        first = next(iter(by_run.values()))
        figure = plots.sweep_figure(
            {name: one.rows for name, one in by_run.items()}, first.axis or kind
        )
        sweeps.append(drawn(folder, f"sweep_{kind}", kind.capitalize(), figure, first.note))
    sliced = {"is_in_halves": True, "cards": cards, "remarks": undivided}
    return {"slices": sliced, "robustness": {"is_in_halves": True, "cards": sweeps}}


def hardest_section(run: RunData, audio: AudioSource | None) -> Section:
    """The highest-scoring non-targets and the lowest-scoring targets, with their audio if it is
    given.
    """
    if run.labels is None or run.scores is None or run.trials is None:
        return {}
    cards = []
    arrays = run.arrays
    speakers, names, durations = (
        arrays.get(name) for name in ("speakers", "speaker_names", "durations")
    )
    for heading, label, sign in (
        ("False accepts: non-targets with the highest scores", 0, -1),
        ("Misses: targets with the lowest scores", 1, 1),
    ):
        rows = np.flatnonzero(run.labels == label)
        keys = sign * run.scores[rows]
        few = min(NUM_HARDEST, len(rows))
        # Partition first: sorting ten million trials to show twelve would be wasteful.
        nearest = np.argpartition(keys, few - 1)[:few]
        cells: list[list[Any]] = []
        for row in rows[nearest[np.lexsort((rows[nearest], keys[nearest]))]]:
            sides: list[Any] = []
            for one in (int(run.trials.enrol[row]), int(run.trials.test[row])):
                facts = []
                sound = ""
                if speakers is not None:
                    number = speakers[one]
                    name = number + 1
                    if names is not None and len(names):
                        name = names[number]
                    facts.append(f"speaker {name}")
                if durations is not None:
                    facts.append(f"{durations[one]:.1f} s")
                if audio is not None:
                    try:
                        waveform = audio.read(
                            run.trials.names[one], 0, MAX_PLAYED_SECONDS * audio.sample_rate
                        )
                    except AudioError as error:
                        advice = (
                            "give with --audio the folder that the list's paths start from "
                            f"({error})"
                        )
                        raise AudioError(
                            f"audio cannot be read from {audio.root}; {advice}"
                        ) from error
                    sound = flac_address(waveform, audio.sample_rate)
                sides.append(
                    {"text": run.trials.names[one], "note": ", ".join(facts), "audio": sound}
                )
            cells.append([*sides, f"{run.scores[row]:.4f}"])
        table = {"header": ["enrolment", "test", "score"], "rows": cells, "numbers": (2,)}
        cards.append({"heading": heading, "table": table})
    # Without the folder's name, so that a copy of the folder gives the same page.
    hint = (
        "To add their audio to this page: speakernet report FOLDER_OF_THIS_PAGE --audio "
        "FOLDER_OF_THE_AUDIO."
    )
    return {"is_in_halves": True, "cards": cards, "remarks": [hint] if audio is None else []}


def embeddings_section(runs: Sequence[RunData], folder: Path) -> Section:
    """The embeddings of some speakers, projected on a plane."""
    cards: list[Card] = []
    for run in (one for one in runs if "map_points" in one.arrays):
        points, speakers, names, shares = (
            run.arrays[f"map_{name}"] for name in ("points", "speakers", "names", "shares")
        )
        figure = plots.embedding_figure(points, speakers, names.tolist(), shares.tolist())
        note = (
            f"The {len(names)} speakers with the most utterances, on the first two principal "
            "components of their embeddings. Speakers that are apart here are apart in the "
            "embeddings; speakers that overlap here may be apart in other dimensions."
        )
        after = f": {run.name}" if len(runs) > 1 else ""
        cards.append(
            drawn(folder, f"embeddings_{len(cards) + 1}", f"Embeddings{after}", figure, note)
        )
    return {"is_in_halves": True, "cards": cards}


def facts_section(run: RunData) -> Section:
    """Everything needed to reproduce the figures."""
    results = run.results or Results()
    values = {
        **{name: getattr(results, name) for name in FACTS},
        "lists": [
            f"{one.get('role')}: {one.get('name')} ({one.get('sha256')})"
            for one in results.lists or []
        ],
        "kept_thresholds": [
            f"{one['threshold']:.4f}: {described(one)}" for one in results.thresholds or []
        ],
        "against_the_initial_model": (results.initial_model or {}).get("sentences"),
        **results.extra,
    }
    settings = yaml.safe_dump(results.config, sort_keys=False) if results.config else ""
    cards: list[Card] = [
        {"heading": "Command", "code": results.command},
        {"heading": "Evaluation", "facts": list(_flat(values).items())},
        {"heading": "Training", "facts": list(_flat(results.performance or {}).items())},
        {
            "heading": "Machine",
            "facts": list(_flat(results.machine or {"versions": results.versions}).items()),
        },
        {"heading": "Configuration", "code": run.config, "is_folded": True},
        {"heading": "Evaluation settings", "code": settings, "is_folded": True},
    ]
    return {
        "cards": [{**one, "is_wide": True} for one in cards if one.get("code") or one.get("facts")]
    }


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as `section.field` -> text; empty ones are omitted.

    >>> _flat({"cpu_cores": 16, "gpus": [{"memory_bytes": 2**33}], "amp": False, "note": None})
    {'cpu_cores': '16', 'gpus.1.memory_bytes': '8.0 GiB', 'amp': 'no'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
            value = dict(enumerate(value, start=1))
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value not in (None, "", []):
            flat[f"{prefix}{key}"] = (
                human_bytes(value)
                if str(key).endswith("_bytes") and is_number(value)
                else _text(value)
            )
    return flat


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
    )


def figures_side_by_side(runs: Sequence[RunData]) -> Card:
    columns = []
    values = []
    for run in runs:
        figures = headline(run.results) if run.results else []
        values.append({one.name: float(one.number) for one in figures})
        column = {
            one.name: one.text + (f" ({one.interval_text})" if one.interval_text else "")
            for one in figures
        }
        columns.append(column | ({"trials": f"{run.results.num_trials:,}"} if run.results else {}))
        columns[-1] |= {"trial list": _list_sentence(run) or MISSING, "folder": str(run.folder)}
    names = dict.fromkeys(name for column in columns for name in column)
    rows: list[list[Any]] = [
        [name, *(column.get(name, MISSING) for column in columns)] for name in names
    ]
    for row in rows:
        numbers = [numbers_of.get(row[0], np.inf) for numbers_of in values]
        if np.isfinite(min(numbers)):
            best = numbers.index(min(numbers)) + 1
            row[best] = {"text": row[best], "is_best": True}
    table = {"header": ["figure", *(run.name for run in runs)], "rows": rows}
    note = "Bold: lowest value. In brackets: 95 % intervals over speakers."
    return {"heading": "Figures", "note": note, "table": table, "is_wide": True}


def differences_section(runs: Sequence[RunData]) -> Section:
    """Paired comparisons of runs scored on the same trials, against the first run with labelled
    scores.
    """
    labelled = [(run, run.trials, run.scores) for run in runs if run.labels is not None]
    same = [one for one in labelled if one[1].checksum == labelled[0][1].checksum]  # type: ignore[union-attr]
    remarks = []
    if len(same) < len(labelled):
        remarks = [
            "Some runs were scored on different trial lists; their error rates must not be "
            "compared."
        ]
    if len(same) < 2:
        return {"remarks": remarks or ["Fewer than two runs have labelled scores."]}
    shown = [run for run, _, _ in same]
    trials = same[0][1]
    assert trials is not None, "runs with labels have trials"
    speakers = speakers_of(trials)
    lines = compare_runs(shown, speakers, DRAW_SEED).sentences([run.name for run in shown])
    note = f"All runs are measured on the same draws of speakers, taken from the {speakers.rule}."
    card = {
        "heading": f"Compared with {shown[0].name}",
        "note": note,
        "lines": lines,
        "is_wide": True,
    }
    return {"cards": [card], "remarks": remarks}


def settings_section(runs: Sequence[RunData]) -> Section:
    # A score file of another tool has no settings.
    own = {run.name: flat for run in runs if (flat := _flat(run.configuration))}
    tables = [*own.values()] if len(own) > 1 else []
    found = {key: [one.get(key, MISSING) for one in tables] for one in tables for key in one}
    rows = [[key, *values] for key, values in found.items() if len(set(values)) > 1]
    if not rows:
        return {"remarks": ["All runs have the same configuration."] if found else []}
    table = {"header": ["option", *own], "rows": rows}
    return {"cards": [{"heading": "Configuration", "table": table, "is_wide": True}]}
