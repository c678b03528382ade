"""The sections of a report, each made from the files of a run.

A section is data: figures become rows of tables and drawings here, and `page.py` renders them.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from speakernet.data.audio import AudioError, flac_address
from speakernet.data.levels import SILENT_DB
from speakernet.data.lists import TrialList, identify_trials
from speakernet.data.names import original_name
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
    describe_threshold,
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
)
from speakernet.evaluation.options import UNIT_COST
from speakernet.evaluation.report.page import MISSING, Card, Cell, Section, Table, Tile
from speakernet.evaluation.results import (
    FEW_TARGETS,
    Costs,
    GroupResult,
    Results,
    SliceResult,
    headline,
)
from speakernet.evaluation.shortcuts import MEANING
from speakernet.run_folder import DECISIONS, EVALUATIONS, SCORES
from speakernet.terminal import counted


class Curve(NamedTuple):
    """A recorded quantity that is plotted over training."""

    kind: str
    """The kind of records in metrics.jsonl that have it."""
    key: str
    """Its name in them."""
    axis: str
    heading: str
    note: str = ""


Draw = Callable[[str, str, Figure, str], Card]
"""`page.draw_card` for the folder of the page: name, heading, figure, note."""
HELD_OUT_EER = "eer_percent"
CURVES = (
    Curve(
        "evaluation",
        HELD_OUT_EER,
        "EER (%)",
        "Held-out EER",
        "Measured on the validation list, which chooses the best checkpoint unless the last one is "
        "kept.",
    ),
    Curve("step", "loss", "loss", "Training loss"),
    Curve(
        "step",
        "accuracy_percent",
        "accuracy (%)",
        "Training accuracy",
        "A margin lowers the accuracy by design; judge by the held-out EER.",
    ),
    Curve("step", "learning_rate", "learning rate", "Learning rate"),
    Curve("step", "margin", "margin", "Margin"),
    Curve("step", "utterances_per_second", "utterances per second", "Speed"),
    Curve(
        "step",
        "data_wait_share",
        "waiting for data (% of time)",
        "Data wait",
        "Near 0 % the device is the bottleneck; well above 10 %, reading and augmentation are.",
    ),
)
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
    "lists",
    "thresholds",
    "initial_model",
)
"""Results shown unchanged."""
HISTOGRAM_NOTE = "Each histogram has an area of 1; the line is the threshold at the EER."
NUM_HARDEST = 12
MAX_PLAYED_SECONDS = 20
"""Limit per recording: a page with an hour of speech would be too large to send."""
NUM_TRIALS_SHOWN = 100
USUAL_RATE = 0.01
"""`verify` uses the threshold at this false-accept rate if the model file has it, otherwise the one
at the EER."""


def result_section(run: RunData) -> Section:
    """The EER with its interval and caveats, minDCF and Cllr, then all figures in one table."""
    results = run.results
    if results.is_empty:
        return Section(remarks=["Not evaluated yet; the curves below show the training so far."])
    amounts = {
        "Trials": results.num_trials,
        "Targets": results.num_targets,
        "Utterances": results.num_utterances,
        "Speakers": results.num_speakers,
    }
    facts = [(name, f"{amount:,}") for name, amount in amounts.items() if amount is not None]
    list_card = Card("Trial list", _list_sentence(run), facts=facts)
    # Shown above all figures, so that nobody copies the EER without seeing them.
    notes = cautions(results) if results.warnings is None else results.warnings
    caveats = [note for note in dict.fromkeys([*notes, results.interval_note]) if note]
    # Without error rates the page still names the list and says why there are none.
    figures = headline(results)
    if not figures:
        reason = results.why_no_eer or "the list lacks targets or non-targets"
        return Section([list_card], warnings=[f"no error rates: {reason}", *caveats])
    # Large figures only for what papers report; the table below has the others.
    cllr = "min Cllr" if results.cllr is None else "Cllr"
    tiles = []
    for figure in figures:
        if figure.name in ("EER", "minDCF(0.01)", "actual DCF(0.01)", cllr):
            name = "Equal error rate" if figure.name == "EER" else figure.name
            note = f"95 %: {figure.interval_text}" if figure.interval_text else ""
            tiles.append(Tile(name, figure.text, note))
    if limit := model_threshold(run):
        note = f"calibrated for {limit.fitted_for}"
        tiles.append(Tile(limit.name.capitalize(), f"{limit.point.threshold:.4f}", note))
    rows = [
        [figure.name, figure.text, figure.interval_text]
        for figure in headline(results, further=True)
    ]
    table = Table(["figure", "value", "95 % interval"], rows, (1, 2))
    cards = [Card("All figures", table=table), list_card]
    if results.shortcuts:
        rows = [[row.label, row.note, row.eer_text] for row in results.shortcuts]
        table = Table(["quantity", "is", "EER"], rows, (2,))
        cards.append(Card("The list without the voices", MEANING, table))
    if results.test_lists:
        cards.append(_test_lists(run.list_name, results, results.test_lists))
    return Section(cards, tiles, caveats)


class DecisionThreshold(NamedTuple):
    """The model's threshold for decisions."""

    name: str
    fitted_for: str
    point: OperatingPoint
    """Its value, and its error rates on the list of this run."""


def model_threshold(run: RunData) -> DecisionThreshold | None:
    """The threshold that the model file holds for this scoring; None if it has none."""
    results = run.results
    # `verify` uses the threshold for 1 % false accepts if the list supported one, otherwise that at
    # the EER; the page shows the same one.
    limits = {limit["name"]: limit for limit in results.thresholds or []}
    used = limits.get(threshold_name(USUAL_RATE)) or limits.get(EER_NAME)
    if used is None or run.scores is None or run.labels is None:
        return None
    # Errors are counted at the model's own threshold, which decisions use, not at the best one for
    # this list. They differ if the list is unlike the one that the threshold was fitted on, and
    # that difference is what this shows.
    accepted = run.scores >= used["threshold"]
    misses = float(1 - accepted[run.labels == 1].mean())
    false_accepts = float(accepted[run.labels == 0].mean())
    # `verify` scores whole utterances without a cohort; other scorings have their own thresholds.
    # With quality measures it moves the threshold for each pair.
    backend = results.backend or {}
    is_of_verify = (
        backend.get("score") in ("cosine", "plda")
        and backend.get("embedding") == "whole"
        and backend.get("score_norm") == "none"
        and not any(warning.startswith(BY_QUALITY) for warning in results.warnings or [])
    )
    name = "threshold used by verify" if is_of_verify else "calibrated threshold"
    point = OperatingPoint(used["threshold"], misses, false_accepts)
    return DecisionThreshold(name, describe_threshold(used), point)


def _test_lists(name: str, reported: Results, others: Mapping[str, GroupResult]) -> Card:
    """A row for each test list: first the reported one, then those with their own pages under
    eval/.
    """
    rows = []
    for list_name, row in {name: reported.as_row(name), **others}.items():
        figures = Results(
            eer_percent=row.eer_percent,
            eer_interval_percent=row.eer_interval_percent,
            min_dcf=row.min_dcf or {},
        )
        texts = ", ".join(f"{figure.name} {figure.with_interval}" for figure in headline(figures))
        amounts = f"{row.num_trials or 0:,}", f"{row.num_targets or 0:,}"
        rows.append([list_name, texts or row.note, *amounts])
    note = (
        f"In brackets: 95 % intervals. {EVALUATIONS}/ in the run folder has the reports on "
        f"{', '.join(others)}."
    )
    table = Table(["list", "figures", "trials", "targets"], rows, (2, 3))
    return Card("Test lists", note, table, is_wide=True)


def _list_sentence(run: RunData) -> str:
    """Names the trial list and the one it is often confused with; empty if there are no scores."""
    if run.trials is None:
        return ""
    # Several published lists of VoxCeleb1 have nearly the same name but other error rates.
    number = counted(len(run.trials), "trial")
    return identify_trials(run.trials) or f"{run.list_name}, {number}; not a known published list"


def trials_section(decisions: Decisions) -> Section:
    """Unlabelled trials: a table of the first ones."""
    # All trials may be millions of rows, too many for a page.
    total = len(decisions.trials)
    rows = [decisions.row(number) for number in range(min(NUM_TRIALS_SHOWN, total))]
    names = {"enrol": "enrolment", LLR_COLUMN: "log-likelihood ratio"}
    for limit in decisions.thresholds:
        names[limit["name"]] = f"{threshold_label(limit['name'])}: {limit['threshold']:.4f}"
    header = decisions.header
    numeric = [header.index(name) for name in ("score", LLR_COLUMN) if name in header]
    table = Table([names.get(name, name) for name in header], rows, numeric)
    # There is no decisions.csv if it would only repeat scores.txt.
    file = DECISIONS if decisions.says_more_than_scores else SCORES
    note = f"The first {len(rows)} of {total:,}; all are in {file}." if len(rows) < total else ""
    return Section([Card("Scores and decisions", note, table, is_wide=True)])


def errors_section(run: RunData, draw: Draw) -> Section:
    """The DET curve, histograms, and operating points; empty without labelled scores."""
    if run.scores is None or run.labels is None:
        return Section()
    rates = error_rates(run.scores, run.labels)
    results = run.results
    equal = equal_error_point(rates)
    costs = results.dcf_costs or Costs(c_miss=UNIT_COST, c_fa=UNIT_COST)
    # Computed from the scores again, because results.json has the lowest costs without their
    # thresholds.
    cheapest = {}
    points = {"EER": equal}
    for prior in sorted(map(float, results.min_dcf)) or ALWAYS_SHOWN_PRIORS:
        cheapest[prior] = min_dcf_point(rates, prior, **costs)
        points[f"minDCF at {prior:g}"] = cheapest[prior][1]
    note = "Closer to the lower left is better; the EER is where the curve crosses the diagonal."
    note += " Band: 95 % interval of the miss rate, over speakers." if results.det_band else ""
    det = plots.det_figure(rates, points, results.det_band)
    histogram = plots.histogram_figure(run.scores, run.labels, equal.threshold)
    cards = [
        draw("det", "Detection error trade-off", det, note),
        draw("scores", "Scores", histogram, HISTOGRAM_NOTE),
    ]
    llrs = run.arrays.get("llrs")
    fit = results.calibration
    # For a single score file no ratios are stored, but its results have the calibration. The scores
    # of fused files (several weights) are ratios already.
    if llrs is None and fit is not None and len(fit["weights"]) == 1:
        llrs = AffineCalibration.from_dict(fit).apply(run.scores)
    if llrs is not None:
        at_eer = equal_error_point(error_rates(llrs, run.labels)).threshold
        axis = "log-likelihood ratio (natural log)"
        histogram = plots.histogram_figure(llrs, run.labels, at_eer, axis)
        note = (
            f"{HISTOGRAM_NOTE} Above {bayes_threshold(0.01):.1f}, accepting costs less than "
            "rejecting at a target prior of 0.01."
        )
        cards.append(draw("llrs", "Log-likelihood ratios", histogram, note))
    return Section([*cards, _operating_points(run, rates, cheapest)])


def _operating_points(
    run: RunData, rates: ErrorRates, cheapest: dict[float, tuple[float, OperatingPoint]]
) -> Card:
    """The model's threshold, and those at the EER, the lowest costs and the named false-accept
    rates, with errors; `cheapest` has minDCF and its point by target prior.
    """
    points = []
    note = (
        "A miss rejects a same-speaker pair, and a false accept accepts a different-speaker pair. "
        "The thresholds "
    )
    if limit := model_threshold(run):
        note += "below the first row "
        # First, because decisions use this threshold; the others are chosen on the test list
        # itself.
        points.append((f"{limit.name}: {limit.fitted_for}", limit.point, MISSING))
    note += "were chosen on this list; with other speakers their error rates differ."
    points.append((threshold_label(EER_NAME), equal_error_point(rates), MISSING))
    for prior, (cost, point) in reversed(cheapest.items()):
        points.append((f"lowest cost, target prior {prior:g}", point, f"{cost:.3f}"))
    # Rates that the list is too small for have no row.
    thresholds, _ = named_thresholds(rates, {})
    # The first is the EER, which is already in the table.
    for entry in thresholds[1:]:
        point = OperatingPoint(entry["threshold"], entry["miss_rate"], entry["false_accept_rate"])
        points.append((threshold_label(entry["name"]), point, MISSING))
    rows = []
    for name, point, cost_text in points:
        threshold = f"{point.threshold:.4f}" if np.isfinite(point.threshold) else "reject all"
        errors = f"{100 * point.miss:.2f} %", f"{100 * point.false_accept:.2f} %"
        rows.append([name, threshold, *errors, cost_text])
    header = ["threshold", "value", "misses", "false accepts", "minDCF"]
    return Card("Operating points", note, Table(header, rows, (1, 2, 3, 4)), is_wide=True)


def data_section(run: RunData, amount: str) -> Section:
    """The training, validation and test lists, with the purpose of each."""
    results = run.results
    configured = run.configuration
    options = configured.get("data") or {}
    training = configured.get("training")
    # With `final_model: last` nothing is chosen, so validation figures are not optimistic.
    keeps_last = isinstance(training, Mapping) and training.get("final_model") == "last"
    of_validation = "monitors training" if keeps_last else "chooses the best checkpoint"
    numbers = counted(results.num_trials, "trial")
    numbers += f", {counted(results.num_speakers, 'speaker')}" if results.num_speakers else ""
    # Twelve digits are enough to tell lists apart, and fit into the table.
    digests = {listed["role"]: listed.get("sha256", "")[:12] for listed in results.lists or []}
    rows = []
    for use, role, option, purpose, contents in (
        ("Training", "training", "train_list", "trains the network", amount),
        ("Validation", "validation", "validation_list", of_validation, ""),
        ("Test", "trials", "", "gives the results on this page", numbers),
    ):
        # Results of earlier versions do not name the lists, so the configuration has to.
        if name := results.list_name(role) or str(options.get(option) or ""):
            rows.append([use, name, purpose, contents, digests.get(role) or MISSING])
    cards = []
    if rows:
        table = Table(["use", "list", "purpose", "contents", "SHA-256"], rows)
        cards.append(Card("Lists", table=table, is_wide=True))
    drawn: Counter[str] = Counter()
    for record in run.metrics:
        for name, number in record.get("drawn", {}).items():
            drawn[name] += number if is_number(number) else 0
    if total := drawn.total():
        shares = [
            [name, f"{number:,}", f"{100 * number / total:.2f} %"] for name, number in drawn.items()
        ]
        table = Table(["corpus", "utterances drawn over all epochs", "share"], shares)
        cards.append(Card("Corpora", table=table))
    return Section(cards)


def training_section(run: RunData, draw: Draw) -> Section:
    """A small plot of each recorded quantity that changed; a remark on those that did not."""
    cards = []
    for curve in CURVES:
        # Evaluations happen between epochs, everything else is recorded at steps.
        position = "epoch" if curve.kind == "evaluation" else "step"
        records = [
            record
            for record in run.metrics
            if record.get("kind") == curve.kind and curve.key in record
        ]
        series = _points(records, position, curve.key)
        # A margin without a schedule, for example, never changes.
        if not series or np.ptp(np.concatenate([y for _, y in series.values()])) == 0:
            continue
        figure = plots.curve_figure(
            series,
            position,
            curve.axis,
            mark_lowest=curve.key == HELD_OUT_EER,
            has_ticks_at_points=position == "epoch",
        )
        cards.append(draw(f"training_{curve.key}", curve.heading, figure, curve.note))
    return Section(cards)


def _points(
    records: Sequence[Mapping[str, Any]], position: str, key: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """List -> positions in training, and the values of a quantity there."""
    # Shares are recorded from 0 to 1, but the axis is in percent.
    scale = 100.0 if key.endswith("_share") else 1.0
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        x = record.get(position, 0)
        points.setdefault("validation list", []).append((x, scale * record[key]))
        for name, figures in record.get("test_lists", {}).items():
            if key == HELD_OUT_EER and isinstance(figures, dict) and is_number(figures.get(key)):
                points.setdefault(name, []).append((x, figures[key]))
    return {name: tuple(np.array(pairs, dtype=np.float64).T) for name, pairs in points.items()}


def slices_section(run: RunData, draw: Draw) -> Section:
    """A plot and a table for each slicing."""
    cards = []
    for place, sliced in enumerate(run.results.slices or [], start=1):
        table, note = _slices_table(sliced)
        figure = plots.slices_figure(sliced.rows, table.weak)
        card = draw(f"slices_{place}", f"By {sliced.by}", figure, note)
        cards.append(replace(card, table=table))
    return Section(cards)


def _slices_table(sliced: SliceResult) -> tuple[Table, str]:
    """One row per slice, and a note."""
    # With few targets a single trial changes the error rate by percents. Such rows are grey and not
    # left out, because the list does have these trials.
    weak = []
    rows = []
    notes = [sliced.note] if sliced.note else []
    notes_of_rows = []
    for number, row in enumerate(sliced.rows):
        if row.num_targets is not None and row.num_targets < FEW_TARGETS:
            weak.append(number)
        eer = row.note or "no EER"
        if row.eer_percent is not None:
            eer = row.eer_text
            if row.note:
                notes_of_rows.append(f"Slice {row.label!r}: {row.note}.")
        rows.append([row.label, f"{row.num_trials or 0:,}", f"{row.num_targets or 0:,}", eer])
    if weak:
        notes.append(f"Grey: fewer than {FEW_TARGETS} targets, too few to rely on.")
    table = Table(["slice", "trials", "targets", "EER"], rows, (1, 2, 3), weak)
    return table, " ".join([*notes, *notes_of_rows])


def robustness_section(run: RunData, draw: Draw) -> Section:
    """The EER against the amount of each degradation."""
    cards = []
    for swept in run.results.sweep or []:
        figure = plots.sweep_figure(swept.rows, swept.axis)
        cards.append(draw(f"sweep_{swept.kind}", swept.kind.capitalize(), figure, swept.note))
    return Section(cards)


def hardest_section(run: RunData, audio: AudioSource | None) -> Section:
    """The highest-scoring non-targets and the lowest-scoring targets, with their audio if it is
    given.
    """
    if run.labels is None or run.scores is None or run.trials is None:
        return Section()
    cards = []
    for heading, label, sign in (
        ("False accepts: non-targets with the highest scores", 0, -1),
        ("Misses: targets with the lowest scores", 1, 1),
    ):
        trials = np.flatnonzero(run.labels == label)
        keys = sign * run.scores[trials]
        count = min(NUM_HARDEST, len(trials))
        # Partition first: sorting ten million trials to show twelve would be wasteful.
        hardest = np.argpartition(keys, count - 1)[:count]
        # Equal scores stay in the order of the list.
        hardest = hardest[np.lexsort((trials[hardest], keys[hardest]))]
        rows: list[list[str | Cell]] = []
        for trial in trials[hardest]:
            enrol = _utterance_cell(run, run.trials, int(run.trials.enrol[trial]), audio)
            test = _utterance_cell(run, run.trials, int(run.trials.test[trial]), audio)
            rows.append([enrol, test, f"{run.scores[trial]:.4f}"])
        cards.append(Card(heading, table=Table(["enrolment", "test", "score"], rows, (2,))))
    # Without the folder's name, so that a copy of the folder gives the same page.
    hint = (
        "To add their audio to this page: speakernet report FOLDER_OF_THIS_PAGE --audio "
        "FOLDER_OF_THE_AUDIO."
    )
    remarks = [hint] if audio is None else []
    return Section(cards, remarks=remarks, is_open=audio is not None)


def _utterance_cell(
    run: RunData, trials: TrialList, utterance: int, audio: AudioSource | None
) -> Cell:
    """The name of an utterance, its speaker and length, and its sound."""
    # Speaker, length and sound often show why a trial is hard.
    facts = []
    name = trials.names[utterance]
    if "speakers" in run.arrays:
        number = int(run.arrays["speakers"][utterance])
        names = run.arrays.get("speaker_names", ())
        speaker = names[number] if len(names) else number + 1
        facts.append(f"speaker {speaker}")
    if "durations" in run.arrays:
        facts.append(f"{run.arrays['durations'][utterance]:.1f} s")
    sound = ""
    num_recordings = 0
    if "num_recordings" in run.arrays:
        num_recordings = int(run.arrays["num_recordings"][utterance])
    if num_recordings:
        facts.append(counted(num_recordings, "recording"))
    elif audio is not None:
        try:
            waveform = audio.read(name, 0, MAX_PLAYED_SECONDS * audio.sample_rate)
        except AudioError as error:
            raise AudioError(
                f"audio cannot be read from {audio.root}; give with --audio the folder that the "
                f"list's paths start from ({error})"
            ) from error
        # Inside the page, so that it stays a single file. FLAC is smaller than WAV, and browsers
        # play it.
        sound = flac_address(waveform, audio.sample_rate)
        if np.square(waveform).mean() < 10 ** (SILENT_DB / 10):
            num_spoilt = np.count_nonzero((trials.enrol == utterance) | (trials.test == utterance))
            facts.append(f"silent: {counted(int(num_spoilt), 'trial')} with it should be left out")
    return Cell(original_name(name), ", ".join(facts), sound)


def embeddings_section(run: RunData, draw: Draw) -> Section:
    """The embeddings of some speakers, projected on a plane."""
    if "map_points" not in run.arrays:
        return Section()
    # Projected when the list was scored, because a page is made without embeddings.
    names = run.arrays["map_names"].tolist()
    shares = run.arrays["map_shares"].tolist()
    figure = plots.embedding_figure(
        run.arrays["map_points"], run.arrays["map_speakers"], names, shares
    )
    note = (
        f"The {len(names)} speakers with the most utterances, on the first two principal "
        "components of their embeddings. Speakers that are apart here are apart in the "
        "embeddings; speakers that overlap here may be apart in other dimensions."
    )
    return Section([draw("embeddings", "Embeddings", figure, note)])


def facts_section(run: RunData) -> Section:
    """Everything needed to reproduce the figures."""
    # Names and values are those of results.json, so that programs and readers find the same things.
    values = run.results.to_dict()
    contents = {
        "Evaluation": {name: values[name] for name in FACTS if name in values} | run.results.extra,
        "Training": values.get("performance"),
        # Earlier versions recorded versions of packages alone.
        "Machine": values.get("machine") or values.get("versions"),
        # An evaluation may have had other options than the training, whose configuration follows.
        "Evaluation settings": values.get("config"),
    }
    codes = {"Command": run.results.command}
    for heading, content in contents.items():
        codes[heading] = json.dumps(content, indent=2, ensure_ascii=False) if content else ""
    codes["Configuration"] = run.config
    return Section([Card(name, code=code, is_wide=True) for name, code in codes.items() if code])
