"""`report.html`: the result of a run, or of several side by side, as one file that opens anywhere.

Written at the end of an evaluation with the arrays at hand, or later by `speakernet report` from the files alone. It
computes nothing again: figures come from `results.json`, curves from `scores.txt` and `metrics.jsonl`. A page is a list
of sections, each with cards; `templates/page.html.j2` turns them into HTML and escapes all text.
"""

import base64
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from speakernet.data.audio import SAMPLE_RATE, flac_bytes
from speakernet.data.lists import TrialList, identify_trials
from speakernet.data.opening import open_source
from speakernet.data.sources import AudioSource
from speakernet.evaluation import plots
from speakernet.evaluation.calibration import EER_NAME, AffineCalibration, named_thresholds, threshold_label
from speakernet.evaluation.figures import ALWAYS_SHOWN_PRIORS, cautions, compare_scores, short_names
from speakernet.evaluation.metrics import (
    ErrorRates,
    OperatingPoint,
    bayes_threshold,
    equal_error_point,
    error_rates,
    min_dcf_point,
    pooled_llrs,
)
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import (
    FEW_TARGETS,
    GroupResult,
    HeadlineFigure,
    Results,
    SweepResult,
    headline,
    threshold_text,
)
from speakernet.evaluation.run_data import RunData, embedding_map, is_number, keep_arrays, read_run
from speakernet.evaluation.score_files import LLR_COLUMN, described
from speakernet.evaluation.speakers import Speakers, speakers_of
from speakernet.files import atomic_write, human_bytes
from speakernet.options import default_of
from speakernet.run_folder import DECISIONS, PLOTS, REPORT, SCORES
from speakernet.terminal import counted, duration

logger = logging.getLogger(__name__)

CURVES = (
    ("evaluation", "eer_percent", "EER on held-out speakers (%)", "Held-out EER"),
    ("step", "loss", "loss", "Training loss"),
    ("step", "accuracy_percent", "accuracy (%)", "Training accuracy"),
    ("step", "learning_rate", "learning rate", "Learning rate"),
    ("step", "margin", "margin", "Margin"),
    ("step", "utterances_per_second", "utterances a second", "Speed"),
    ("step", "data_wait_share", "waiting for data (% of time)", "Data wait"),
)
"""Kind of record, key, axis, heading of every training curve."""
CURVE_NOTES = {
    "eer_percent": "On the validation list, which chooses the best checkpoint unless the last one is final.",
    "accuracy_percent": "With a margin, accuracy is low by design: look at the held-out EER.",
    "data_wait_share": "Near 0 % the device is the limit; well above 10 % reading and augmenting are.",
}
MORE_FIGURES = (
    ("EER on the convex hull", "eer_convex_hull_percent", "{:.2f} %"),
    ("EER as voxceleb_trainer counts it", "eer_voxceleb_trainer_percent", "{:.2f} %"),
    ("Cllr lost by calibration", "calibration_loss", "{:.3f} bits"),
    ("area under the ROC", "area_under_roc", "{:.4f}"),
)
FACTS = (
    *("model", "num_parameters", "front_end", "checkpoint", "precision", "backend", "calibration", "speaker_rule"),
    *("num_draws", "dcf_costs", "num_duplicate_trials", "timings_seconds", "seconds"),
)
"""Results that the page shows as they are."""
HISTOGRAM_NOTE = "Each kind has an area of one."
NUM_HARDEST = 12
MAX_PLAYED_SECONDS = 20
"""Of each recording: a page with an hour of speech would be too large to send."""
NUM_TRIALS_SHOWN = 100
ENOUGH_FOR_A_HISTOGRAM = 30
MISSING = "–"
DRAW_SEED = 0
"""Fixed, so that the same runs give the same intervals whenever a page is made."""
INVISIBLE = {
    code: f"\\u{code:04x}"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0x20))
    if chr(code) not in "\t\n\r"
}
"""Control characters and those that change the order of others are written out, so that no name looks like another."""


@dataclass(frozen=True)
class Table:
    """Cells are text, or mappings with `text`, `note` (small print) and `audio` (a `data:` address)."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | Mapping[str, str]]]
    numbers: Collection[int] = ()
    """Columns aligned to the right."""
    weak: Collection[int] = ()
    """Rows in grey."""


@dataclass(frozen=True)
class Card:
    """A framed part of a section; empty fields are not shown."""

    heading: str
    note: str = ""
    drawing: str = ""
    table: Table | None = None
    facts: Sequence[tuple[str, str]] = ()
    code: str = ""
    is_folded: bool = False
    """The code is shown on a click."""
    lines: Sequence[str] = ()
    is_wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page with an anchor and a heading; an empty one is omitted."""

    anchor: str
    heading: str
    cards: Sequence[Card] = ()
    is_in_halves: bool = False
    """Two cards in a line instead of three."""
    remarks: Sequence[str] = ()
    tiles: Sequence[Mapping[str, Any]] = ()
    """Headline numbers; the first one is large."""
    warnings: Sequence[str] = ()


def write_report(
    folder: str | Path,
    *,
    trials: TrialList | None = None,
    scores: np.ndarray | None = None,
    llrs: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
    speakers: Speakers | None = None,
    durations: np.ndarray | None = None,
    audio: str | Path | None = None,
) -> Path:
    """Write `report.html`, and its plots as PNGs under `plots/`, for the files of a run or evaluation folder.

    Returns:
        The path of the page.
    """
    given = None if trials is None or scores is None else (trials, np.asarray(scores, dtype=np.float64))
    run = read_run(folder, given=given)
    if llrs is not None:
        run = replace(run, llrs=np.asarray(llrs, dtype=np.float64))
    # Without labels, speakers are a guess.
    if embeddings is not None and speakers is not None and trials is not None and trials.labels is not None:
        run = replace(run, embedding_map=embedding_map(embeddings, speakers.ids, list(trials.names)))
    if speakers is not None:
        run = replace(run, speakers=speakers.ids, speaker_names=speakers.names)
    if durations is not None:
        run = replace(run, durations=durations.astype(np.float32))
    source = None
    if audio is not None:
        if run.labels is None:
            raise ValueError(f"{run.folder}: no labelled scores, so no hardest trials to play; leave out --audio")
        rate = (run.configuration.get("data") or {}).get("sample_rate", SAMPLE_RATE)
        source = open_source(audio, rate)
    # Before drawing: `speakernet report` must find them even if a plot fails.
    keep_arrays(run)
    pictures = run.folder / PLOTS
    # A page of unlabelled pairs is about them; how the model was trained is on its own page.
    trained = [] if run.decisions is not None and not run.was_trained_here else [run]
    sections = [
        _result(run),
        _trials(run, pictures),
        _errors([run], pictures),
        _data(run),
        _training(trained, pictures),
        *_groups([run], pictures),
        _hardest(run, source),
        _map([run], pictures),
        _facts(run),
    ]
    return _write_page(run.folder / REPORT, run.name, _subtitle(run), _lead(run), sections)


def write_side_by_side(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page for several folders of runs or evaluations, with its plots as PNGs in a folder beside it."""
    resolved = [Path(folder).resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"the same folder twice among {', '.join(map(str, folders))}; name each run once")
    path = Path(path)
    names = short_names([str(one) for one in resolved])
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    pictures = path.with_name(f"{path.stem}_plots")
    sections = [
        Section("result", "Result", [_figures_side_by_side(runs)]),
        _differences(runs),
        _errors(runs, pictures),
        _training(runs, pictures),
        *_groups(runs, pictures),
        _map(runs, pictures),
        _settings(runs),
    ]
    return _write_page(path, " · ".join(names), f"{len(runs)} runs side by side", "", sections)


def _drawn(folder: Path, name: str, heading: str, figure: Figure, note: str = "", table: Table | None = None) -> Card:
    """A card with the figure, which is also saved as `name`.png."""
    plots.save_png(figure, folder / f"{name}.png")
    # Made here from numbers; names in it went through matplotlib, which escapes them.
    return Card(heading, note, Markup(plots.figure_svg(figure, name, heading)), table)


def _write_page(path: Path, title: str, subtitle: str, lead: str, sections: Sequence[Section]) -> Path:
    shown = [one for one in sections if one.cards or one.remarks or one.warnings]
    palettes = [
        " ".join(f"--{name}: {colours[is_dark]};" for name, colours in plots.PALETTE.items())
        for is_dark in (False, True)
    ]
    # A name that the template misspells must not become an empty place on the page.
    environment = Environment(loader=PackageLoader(__package__ or ""), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("page.html.j2")
    text = page.render(title=title, subtitle=subtitle, lead=lead, sections=shown, light=palettes[0], dark=palettes[1])
    with atomic_write(path) as file:
        file.write(text.translate(INVISIBLE))
    logger.info("report: %s", path)
    return path


def _subtitle(run: RunData) -> str:
    """Model, training, list and date in one line; what is unknown is omitted."""
    results = run.results or Results()
    epochs = max((one.get("epoch", 0) for one in run.metrics if one.get("kind") == "epoch"), default=0)
    parts = [
        str((results.model or {}).get("name") or ""),
        f"{results.num_parameters / 1e6:.2f} million parameters" if results.num_parameters else "",
        _amount(results.training or {}, ("speakers", "hours")),
        f"{counted(epochs, 'epoch')} in {duration(run.training_seconds)}" if epochs else "",
        f"{'tested on' if run.decisions is None else 'scored:'} {run.list_name}" if run.results else "",
        results.date,
    ]
    return " · ".join(part for part in parts if part)


def _amount(training: Mapping[str, Any], names: Sequence[str]) -> str:
    """How much there was to learn from, in words; what is unknown is omitted."""
    found = []
    for name in names:
        value = training.get(name)
        if value and name == "hours":
            found.append(f"{value:,.1f} hours" if value >= 1 else f"{60 * value:.0f} min")
        elif value:
            found.append(counted(int(value), "training speaker" if name == "speakers" else name.removesuffix("s")))
    return ", ".join(found)


def _lead(run: RunData) -> str:
    """The result in a sentence for people who do not know the field; empty without error rates."""
    results = run.results
    if run.decisions is not None:
        return " ".join(map(_as_sentence, run.decisions.sentences()))
    if results is None or results.eer_percent is None or results.eer_threshold is None:
        return ""
    share = f"{results.eer_percent:.1f} %"
    found = threshold_text(results.eer_threshold, np.empty(0) if run.scores is None else run.scores)
    return f"At threshold {found}, {share} of impostors pass and {share} of true pairs are refused."


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _result(run: RunData) -> Section:
    """The EER with its interval and caveats, minDCF and Cllr, then everything else in one table."""
    section, results = Section("result", "Result", is_in_halves=True), run.results
    if results is None:
        return replace(section, remarks=["Not evaluated yet: the curves below are those of the training so far."])
    counts = (
        ("Trials", results.num_trials),
        ("Targets", results.num_targets),
        ("Utterances", results.num_utterances),
        ("Speakers", results.num_speakers),
    )
    facts = [(name, f"{value:,}") for name, value in counts if value is not None]
    of_list = Card("Trial list", _list_sentence(run), facts=facts)
    notes = cautions(results) if results.warnings is None else list(results.warnings)
    if results.interval_note and results.interval_note not in notes:
        notes.append(results.interval_note)
    caveats = [_as_sentence(note) for note in notes]
    figures = headline(results)
    if not figures:
        why = results.why_no_eer or "the list does not have labels of both kinds"
        return replace(section, cards=[of_list], warnings=[_as_sentence(f"No error rates: {why}"), *caveats])
    tiles = [_tile(figures[0], "Equal error rate") | {"range": _range(figures[0]), "caveats": caveats}]
    by_name = {one.name: one for one in figures}
    for names in (("minDCF(0.01)",), ("Cllr", "min Cllr")):
        tiles += [_tile(by_name[name], name) for name in names if name in by_name][:1]
    rows = [[one.name, one.text, one.interval_text] for one in figures]
    for name, key, form in MORE_FIGURES:
        if (value := getattr(results, key)) is not None:
            rows.append([name, form.format(value), ""])
    table = Card("All figures", table=Table(["figure", "value", "95 % interval"], rows, numbers=(1, 2)))
    return replace(section, tiles=tiles, cards=[table, of_list])


def _tile(figure: HeadlineFigure, name: str) -> dict[str, Any]:
    note = f"95 %: {figure.interval_text}" if figure.interval else ""
    return {"name": name, "value": figure.text, "note": note, "range": None, "caveats": ()}


def _range(figure: HeadlineFigure) -> dict[str, Any] | None:
    """The interval on a line from zero to a round number above it, in percent of the line."""
    if figure.interval is None:
        return None
    low, high = figure.interval
    # From zero: the eye compares the interval with the whole rate.
    end = next((one for one in (0.5, 1, 2, 5, 10, 20, 30, 50) if one > 1.1 * high), 100)
    low, high, middle = (round(100 * min(1.0, one / end), 2) for one in (low, high, figure.value))
    return {"low": low, "width": round(high - low, 2), "middle": middle, "end": f"{end:g} %"}


def _list_sentence(run: RunData) -> str:
    """Which trial list it was and what that is often confused with; empty if there are no scores."""
    if run.trials is None:
        return ""
    size = counted(len(run.trials), "trial")
    return identify_trials(run.trials) or f"{run.list_name}, {size}; not a published list that is known here"


def _trials(run: RunData, folder: Path) -> Section:
    """Unlabelled trials: a table of the first, and the histogram of all scores if there are enough."""
    section, decisions = Section("trials", "Trials"), run.decisions
    if decisions is None:
        return section
    total = len(decisions.trials)
    rows = [decisions.row(number) for number in range(min(NUM_TRIALS_SHOWN, total))]
    names = {"enrol": "enrolment", LLR_COLUMN: "log-likelihood ratio"}
    for one in decisions.thresholds:
        names[str(one["name"])] = f"{threshold_label(str(one['name']))}: {one['threshold']:.4f}"
    file = DECISIONS if decisions.says_more_than_scores else SCORES
    note = f"The first {len(rows)} of {total:,}; all are in {file}." if len(rows) < total else ""
    numbers = [column for column, name in enumerate(decisions.header) if name in ("score", LLR_COLUMN)]
    table = Table([names.get(name, name) for name in decisions.header], rows, numbers=numbers)
    cards = [Card("Scores and decisions", note, table=table, is_wide=True)]
    if total >= ENOUGH_FOR_A_HISTOGRAM and np.ptp(decisions.scores) > 0:
        at_eer = [one["threshold"] for one in decisions.thresholds if one["name"] == EER_NAME]
        figure = plots.histogram_figure(decisions.scores, None, at_eer[0] if at_eer else np.nan)
        cards.append(_drawn(folder, "scores", "Scores", figure))
    return replace(section, cards=cards)


def _errors(runs: Sequence[RunData], folder: Path) -> Section:
    """DET curve, then for each run histograms, error rates by threshold, calibration and operating points."""
    shown = [run for run in runs if run.labels is not None and run.scores is not None]
    section = Section("errors", "Errors")
    if not shown:
        return section
    rates = {run.name: error_rates(run.scores, run.labels) for run in shown}  # type: ignore[arg-type]
    points = {}
    if len(shown) == 1:
        only = rates[shown[0].name]
        points["EER"] = equal_error_point(only)
        for prior, (_, point) in _cheapest_points(shown[0], only).items():
            points[f"minDCF at {prior:g}"] = point
    bands = {run.name: run.results.det_band for run in shown if run.results is not None and run.results.det_band}
    note = "Lower left is better; the EER is where a curve meets the diagonal."
    note += " Bands: 95 % intervals of the misses, over speakers." if bands else ""
    cards = [_drawn(folder, "det", "Detection error trade-off", plots.det_figure(rates, points, bands), note)]
    tables = []
    for number, run in enumerate(shown):
        suffix, after = (f"_{number + 1}", f": {run.name}") if len(runs) > 1 else ("", "")
        threshold = equal_error_point(rates[run.name]).threshold
        assert run.scores is not None, "runs without scores are not shown"
        figure = plots.histogram_figure(run.scores, run.labels, threshold)
        cards.append(_drawn(folder, f"scores{suffix}", f"Scores{after}", figure, HISTOGRAM_NOTE))
        figure = plots.threshold_figure(rates[run.name], threshold)
        note = "A higher threshold lets fewer impostors pass and refuses more true pairs."
        cards.append(_drawn(folder, f"thresholds{suffix}", f"Errors by threshold{after}", figure, note))
        cards += _calibration(run, rates[run.name], folder, suffix, after)
        tables.append(_operating_points(run, rates[run.name], after))
    return replace(section, cards=[*cards, *tables])


def _cheapest_points(run: RunData, rates: ErrorRates) -> dict[float, tuple[float, OperatingPoint]]:
    """Target prior -> minDCF and its point, for the priors and costs that the run reports."""
    priors = sorted(map(float, run.results.min_dcf)) if run.results and run.results.min_dcf else ALWAYS_SHOWN_PRIORS
    costs = (run.results.dcf_costs if run.results else None) or {"c_miss": 1.0, "c_fa": 1.0}
    return {prior: min_dcf_point(rates, prior, costs["c_miss"], costs["c_fa"]) for prior in priors}


def _operating_points(run: RunData, rates: ErrorRates, after: str) -> Card:
    """What a threshold on the score does: at the EER, at the lowest costs, at named false-accept rates."""
    found: list[tuple[str, OperatingPoint, str]] = [(threshold_label(EER_NAME), equal_error_point(rates), MISSING)]
    for prior, (cost, point) in reversed(_cheapest_points(run, rates).items()):
        found.append((f"lowest cost, target prior {prior:g}", point, f"{cost:.3f}"))
    named, refused = named_thresholds(rates, {})
    # The first is the EER, which is there already.
    for one in named[1:]:
        point = OperatingPoint(one["threshold"], one["miss_rate"], one["false_accept_rate"])
        found.append((threshold_label(one["name"]), point, MISSING))
    rows = []
    for name, point, cost_text in found:
        threshold = f"{point.threshold:.4f}" if np.isfinite(point.threshold) else "refuse all"
        rows.append([name, threshold, f"{100 * point.miss:.2f} %", f"{100 * point.false_accept:.2f} %", cost_text])
    header = ["threshold chosen for", "threshold", "true pairs refused", "impostors accepted", "minDCF"]
    note = "Measured on this same list: with other speakers, the same threshold gives different rates."
    note += f" {_as_sentence(refused[0])}" if refused else ""
    table = Table(header, rows, numbers=(1, 2, 3, 4))
    return Card(f"Operating points{after}", note, table=table, is_wide=True)


def _calibration(run: RunData, rates: ErrorRates, folder: Path, suffix: str, after: str) -> list[Card]:
    """The log-likelihood ratio of the list itself against the calibrated score or, without calibration, the score."""
    assert run.scores is not None and run.labels is not None, "only labelled scores have errors"
    llrs, cards = run.llrs, []
    fit = run.results.calibration if run.results else None
    if llrs is None and fit is not None and len(fit["weights"]) == 1:
        llrs = AffineCalibration.from_dict(fit).apply(run.scores)
    name = "score"
    note = "Not calibrated: the curve shows the log-likelihood ratio of each score on this list."
    if llrs is not None:
        rates, name = error_rates(llrs, run.labels), "log-likelihood ratio as calibrated"
        note = "On the dashed line a log-likelihood ratio is right."
        threshold = equal_error_point(rates).threshold
        figure = plots.histogram_figure(llrs, run.labels, threshold, "log-likelihood ratio (natural)")
        cheaper = f"To the right of {bayes_threshold(0.01):.1f}, accepting is the cheaper decision"
        text = f"{HISTOGRAM_NOTE} {cheaper} at a target prior of 0.01."
        cards.append(_drawn(folder, f"llrs{suffix}", f"Log-likelihood ratios{after}", figure, text))
    # Edges of the convex hull with a finite ratio: each covers the scores from its first threshold to its last.
    best, rows = pooled_llrs(rates)[2], rates.hull
    x = (rates.thresholds[rows[:-1]] + rates.thresholds[np.maximum(rows[1:] - 1, rows[:-1])]) / 2
    x, best = x[np.isfinite(best)], best[np.isfinite(best)]
    if len(x) < 2:
        text = "The two kinds of trials do not overlap: nothing to calibrate on."
        return [*cards, Card(f"Calibration{after}", lines=[text])]
    figure = plots.calibration_figure(x, best, name, is_llr=llrs is not None)
    return [*cards, _drawn(folder, f"calibration{suffix}", f"Calibration{after}", figure, note)]


def _data(run: RunData) -> Section:
    """Training, validation and test lists by name, with what each was for."""
    results, configured = run.results or Results(), run.configuration
    options, how = configured.get("data") or {}, configured.get("training")
    is_watched = isinstance(how, Mapping) and how.get("final_model") == "last"
    evaluations = [float(one["eer_percent"]) for one in run.evaluations]
    learnt = _amount(results.training or {}, ("speakers", "utterances", "hours")).replace("training ", "")
    found = f"EER {min(evaluations):.2f} % at best, {counted(len(evaluations), 'evaluation')}" if evaluations else ""
    purpose = "is watched while training" if is_watched else "chooses the best checkpoint"
    rows = []
    for role, option, what, amount in (
        ("training", "train_list", "the network learns from it", learnt),
        ("validation", "validation_list", purpose, found),
    ):
        if listed := results.list_name(role) or str(options.get(option) or ""):
            rows.append([role.capitalize(), listed, what, amount])
    if results.list_name():
        numbers = counted(results.num_trials, "trial")
        numbers += f", {counted(results.num_speakers, 'speaker')}" if results.num_speakers else ""
        rows.append(["Test", results.list_name(), "what this page reports", numbers])
    table = Table(["", "list", "purpose", "contents"], rows)
    return Section("data", "Data", [Card("Lists", table=table, is_wide=True)] if rows else [])


def _training(runs: Sequence[RunData], folder: Path) -> Section:
    """One small plot for each quantity that was recorded and changed; a remark for those that did not."""
    cards: list[Card] = []
    constants: list[str] = []
    single: list[str] = []
    for kind, key, axis, heading in CURVES:
        is_evaluation = kind == "evaluation"
        where = "epoch" if is_evaluation else "step"
        scale = 100.0 if key.endswith("_share") else 1.0
        series, bands, note = {}, {}, CURVE_NOTES.get(key, "")
        for run in runs:
            records = [one for one in run.metrics if one.get("kind") == kind and is_number(one.get(key))]
            if records:
                x = np.array([one.get(where, 0) for one in records], dtype=np.float64)
                series[run.name] = (x, scale * np.array([one[key] for one in records]))
                begin, after = records[-1].get("second_stage_from"), f" of {run.name}" if len(runs) > 1 else ""
                note += f" After {where} {begin[where]}{after}: the large-margin stage." if begin else ""
            rows = [(one.get("epoch", 0), *(one.get("eer_interval_percent") or ())) for one in records]
            rows = [one for one in rows if key == "eer_percent" and len(one) == 3 and all(map(is_number, one))]
            if rows:
                bands[run.name] = np.array(rows, dtype=np.float64).T
        values = np.concatenate([y for _, y in series.values()]) if series else np.empty(0)
        if len(values) and np.ptp(values) == 0:
            names = constants if max(len(y) for _, y in series.values()) > 1 else single
            names.append(f"{heading} {values[0]:.4g}{' %' if '%' in axis else ''}")
        elif len(values):
            note += " Bands: 95 % intervals over speakers, from few draws." if bands else ""
            has_lowest = key == "eer_percent"
            figure = plots.curve_figure(
                series, where, axis, bands, mark_lowest=has_lowest, has_ticks_at_points=is_evaluation
            )
            cards.append(_drawn(folder, f"training_{key}", heading, figure, note.strip()))
    remarks = [f"Constant, and not drawn: {', '.join(constants)}."] if constants else []
    remarks += [f"Measured once: {', '.join(single)}."] if single else []
    return Section("training", "Training", cards, remarks=remarks)


def _groups(runs: Sequence[RunData], folder: Path) -> list[Section]:
    """Plot and table of each way the results were sliced; EER against the amount of each degradation."""
    cards, undivided = [], []
    kinds: dict[str, dict[str, SweepResult]] = {}
    for number, run in enumerate(runs):
        after = f": {run.name}" if len(runs) > 1 else ""
        for row, one in enumerate((run.results.slices if run.results else None) or []):
            if len(one.rows) == 1:
                undivided.append(f"By {one.by}{after}: all trials are in one group, {one.rows[0].label}.")
                continue
            weak = [place for place, group in enumerate(one.rows) if plots.is_weak(group)]
            notes = [one.note, f"Grey: fewer than {FEW_TARGETS} targets, too few to build on." if weak else ""]
            notes += [
                f"{group.label}: {group.note}." for group in one.rows if group.note and group.eer_percent is not None
            ]
            cells = [
                [group.label, f"{group.num_trials or 0:,}", f"{group.num_targets or 0:,}", _eer(group)]
                for group in one.rows
            ]
            table = Table(["slice", "trials", "targets", "EER"], cells, numbers=(1, 2, 3), weak=weak)
            name = f"slices_{row + 1}" + (f"_{number + 1}" if len(runs) > 1 else "")
            figure = plots.slices_figure(one.rows)
            note = " ".join(filter(None, notes))
            cards.append(_drawn(folder, name, f"By {one.by}{after}", figure, note, table=table))
        for swept in (run.results.sweep if run.results else None) or []:
            kinds.setdefault(swept.kind, {})[run.name] = swept
    sweeps = []
    for kind, by_run in kinds.items():
        first = next(iter(by_run.values()))
        figure = plots.sweep_figure({name: one.rows for name, one in by_run.items()}, first.axis or kind)
        sweeps.append(_drawn(folder, f"sweep_{kind}", kind.capitalize(), figure, first.note))
    return [Section("slices", "Slices", cards, remarks=undivided), Section("robustness", "Robustness", sweeps)]


def _eer(row: GroupResult) -> str:
    if row.eer_percent is None:
        return row.note or "no EER"
    if row.eer_interval_percent is None:
        return f"{row.eer_percent:.2f} %"
    low, high = row.eer_interval_percent
    return f"{row.eer_percent:.2f} % ({low:.2f}–{high:.2f})"


def _hardest(run: RunData, audio: AudioSource | None) -> Section:
    """The highest-scoring non-targets and the lowest-scoring targets, with their audio if there is any."""
    section = Section("hardest", "Hardest trials", is_in_halves=True)
    if run.labels is None or run.scores is None or run.trials is None:
        return section
    cards = []
    for heading, label, sign in (
        ("False accepts: non-targets with the highest scores", 0, -1),
        ("False rejects: targets with the lowest scores", 1, 1),
    ):
        rows = np.flatnonzero(run.labels == label)
        keys = sign * run.scores[rows]
        few = min(NUM_HARDEST, len(rows))
        # Ten million trials are not sorted for twelve of them.
        nearest = np.argpartition(keys, few - 1)[:few]
        rows = rows[nearest[np.lexsort((rows[nearest], keys[nearest]))]]
        cells: list[list[str | Mapping[str, str]]] = []
        for row in rows:
            sides = [_utterance(run, int(side[row]), audio) for side in (run.trials.enrol, run.trials.test)]
            cells.append([*sides, f"{run.scores[row]:.4f}"])
        cards.append(Card(heading, table=Table(["enrolment", "test", "score"], cells, numbers=(2,))))
    # Without the folder's name: a copy of the folder gives the same page.
    hint = "To listen to them: speakernet report FOLDER_OF_THIS_PAGE --audio FOLDER_OF_THE_AUDIO."
    return replace(section, cards=cards, remarks=[hint] if audio is None else [])


def _utterance(run: RunData, row: int, audio: AudioSource | None) -> dict[str, str]:
    """Name, speaker, length and perhaps the sound of one side of a trial."""
    assert run.trials is not None, "only trials have sides"
    name, facts, sound = run.trials.names[row], [], ""
    if run.speakers is not None:
        number = int(run.speakers[row])
        facts.append(f"speaker {run.speaker_names[number] if run.speaker_names else number + 1}")
    if run.durations is not None:
        facts.append(f"{run.durations[row]:.1f} s")
    if audio is not None:
        waveform = audio.read(name, 0, MAX_PLAYED_SECONDS * audio.sample_rate)
        content = base64.b64encode(flac_bytes(waveform, audio.sample_rate)).decode("ascii")
        sound = f"data:audio/flac;base64,{content}"
    return {"text": name, "note": ", ".join(facts), "audio": sound}


def _map(runs: Sequence[RunData], folder: Path) -> Section:
    """The embeddings of some speakers in the plane."""
    cards: list[Card] = []
    for run in runs:
        if (drawn := run.embedding_map) is not None:
            figure = plots.embedding_figure(drawn.points, drawn.speakers, drawn.names, drawn.shares)
            note = (
                f"The {len(drawn.names)} speakers with the most utterances, on the two main axes of their embeddings. "
                "Principal components are linear: what is apart here is apart in the embeddings; what overlaps here "
                "may be apart in the other dimensions."
            )
            after = f": {run.name}" if len(runs) > 1 else ""
            cards.append(_drawn(folder, f"embeddings_{len(cards) + 1}", f"Embeddings{after}", figure, note))
    return Section("embeddings", "Embeddings", cards)


def _facts(run: RunData) -> Section:
    """Everything that is needed to repeat the figures."""
    results = run.results or Results()
    values = {name: getattr(results, name) for name in FACTS if getattr(results, name)}
    values["lists"] = [f"{one.get('role')}: {one.get('name')} ({one.get('sha256')})" for one in results.lists or []]
    values["kept_thresholds"] = [f"{one['threshold']:.4f}: {described(one)}" for one in results.thresholds or []]
    values["against_the_initial_model"] = (results.initial_model or {}).get("sentences")
    settings = yaml.safe_dump(results.config, sort_keys=False) if results.config else ""
    cards = [
        Card("Command", code=results.command, is_wide=True),
        Card("Evaluation", facts=_named(values | results.extra), is_wide=True),
        Card("Training", facts=_named(results.performance or {}), is_wide=True),
        Card("Machine", facts=_named(results.machine or {"versions": results.versions}), is_wide=True),
        Card("Configuration", code=run.config, is_folded=True, is_wide=True),
        Card("Settings of the evaluation", code=settings, is_folded=True, is_wide=True),
    ]
    return Section("facts", "How it was made", [one for one in cards if one.code or one.facts])


def _named(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested values as rows of a table with names for people; empty ones are omitted."""
    flat = ((key.replace("_", " ").replace(".", ", "), text) for key, text in _flat(values).items() if text)
    return [(name[:1].upper() + name[1:], text) for name, text in flat]


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as `section.field` -> text; checksums are shortened.

    >>> _flat({"cpu_cores": 16, "gpus": [{"memory_bytes": 2**33}], "amp": False})
    {'cpu_cores': '16', 'gpus.1.memory': '8.0 GiB', 'amp': 'no'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
            value = dict(enumerate(value, start=1))
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif name.endswith("_bytes") and is_number(value):
            flat[name.removesuffix("_bytes")] = human_bytes(value)
        else:
            items = value if isinstance(value, list | tuple) else [value]
            flat[name] = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", "; ".join(map(_text, items)))
    return flat


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _figures_side_by_side(runs: Sequence[RunData]) -> Card:
    columns = []
    for run in runs:
        figures = headline(run.results) if run.results else []
        column = {one.name: f"{one.text} ({one.interval_text})" if one.interval else one.text for one in figures}
        columns.append(column | ({"trials": f"{run.results.num_trials:,}"} if run.results else {}))
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, MISSING) for column in columns)] for name in names]
    rows.append(["trial list", *(_list_sentence(run) or MISSING for run in runs)])
    rows.append(["folder", *(str(run.folder) for run in runs)])
    table = Table(["", *(run.name for run in runs)], rows)
    return Card("Figures", "In brackets: 95 % intervals over speakers.", table=table, is_wide=True)


def _differences(runs: Sequence[RunData]) -> Section:
    """Paired comparisons with the first run that has labelled scores, of those on the same trials."""
    labelled = [run for run in runs if run.labels is not None]
    checksums = [run.trials.checksum for run in labelled if run.trials is not None]
    same = [run for run, checksum in zip(labelled, checksums, strict=True) if checksum == checksums[0]]
    section = Section("difference", "Differences")
    if len(same) < len(labelled):
        remark = "Some were scored on different trial lists: their error rates must not be compared."
        section = replace(section, remarks=[remark])
    if len(same) < 2:
        return section if section.remarks else replace(section, remarks=["Fewer than two runs have labelled scores."])
    trials, num_draws = same[0].trials, default_of(EvaluationOptions, "bootstrap_samples")
    assert trials is not None, "runs with labels have trials"
    speakers, scores = speakers_of(trials), [run.scores for run in same if run.scores is not None]
    found = compare_scores(trials, scores, speakers, num_draws=num_draws, seed=DRAW_SEED)
    note = f"Same draws of speakers for all; speakers: {speakers.rule}."
    lines = found.sentences([run.name for run in same])
    return replace(section, cards=[Card(f"Against {same[0].name}", note, lines=lines, is_wide=True)])


def _settings(runs: Sequence[RunData]) -> Section:
    tables = [_flat(run.configuration) for run in runs]
    section = Section("settings", "Settings that differ")
    keys = list(dict.fromkeys(key for one in tables for key in one))
    differing = [key for key in keys if len({one.get(key, MISSING) for one in tables}) > 1]
    if not differing:
        return replace(section, remarks=["All have the same configuration."] if keys else [])
    rows = [[key, *(one.get(key, MISSING) for one in tables)] for key in differing]
    table = Table(["option", *(run.name for run in runs)], rows)
    return replace(section, cards=[Card("Configuration", table=table, is_wide=True)])
