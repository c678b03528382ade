"""The top of a report page: the header, the headline figures with their caveats, and all the rest in one table."""

import dataclasses
from pathlib import Path

import numpy as np

from speakernet.data.list_identity import list_identity
from speakernet.evaluation.cautions import cautions
from speakernet.evaluation.headline import HeadlineFigure, headline, threshold_text
from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.facts import count, duration, hours_of_speech
from speakernet.evaluation.report.page import Block, Card, Cards, Facts, Notice, Paragraph, Range, Table, Tile, Tiles
from speakernet.evaluation.results import Results

TILE_NAMES = {"EER": "Equal error rate"}


def subtitle(run: RunData) -> str:
    """Model, training, list and date in one line; what is not known is left out."""
    results = run.results or Results()
    training = results.training or {}
    size = f"{results.num_parameters / 1e6:.2f} million parameters" if results.num_parameters else ""
    speakers = f"{count(training['speakers'])} training speakers" if training.get("speakers") else ""
    hours = hours_of_speech(training["hours"]) if training.get("hours") else ""
    epochs = max((one.get("epoch", 0) for one in run.metrics if one.get("kind") == "epoch"), default=0)
    parts = [
        str((results.model or {}).get("name") or ""),
        size,
        ", ".join(one for one in (speakers, hours) if one),
        f"{epochs} epochs in about {duration(training_seconds(run))}" if epochs else "",
        f"{'tested on' if run.decisions is None else 'scored:'} {scored_list_name(run)}" if run.results else "",
        results.date,
    ]
    return " · ".join(part for part in parts if part)


def training_seconds(run: RunData) -> float:
    """Time spent on steps and evaluations, from the records of the run; interruptions do not count."""
    seconds, before = 0.0, 0
    for one in run.metrics:
        if one.get("kind") == "evaluation":
            seconds += float(one.get("evaluation_seconds", 0.0))
        elif one.get("kind") == "step":
            step = int(one.get("step", 0))
            # `step_seconds` is a mean over the steps since the record before.
            seconds += max(0, step - before) * float(one.get("step_seconds", 0.0))
            before = step
    return seconds


def lead(run: RunData) -> str:
    """The result in a sentence for people who do not know the field; empty without error rates."""
    results = run.results
    if run.decisions is not None:
        return " ".join(_as_sentence(one) for one in run.decisions.sentences())
    if results is None or results.eer_percent is None or results.eer_threshold is None:
        return ""
    share = f"{results.eer_percent:.1f} %"
    found = threshold_text(results.eer_threshold, np.empty(0) if run.scores is None else run.scores)
    return f"At threshold {found}, {share} of impostors pass and {share} of true pairs are refused."


def result_part(run: RunData) -> list[Block]:
    """The EER with its interval and caveats, minDCF and Cllr, then everything else in one table."""
    results = run.results
    if results is None:
        return [Paragraph("Not evaluated yet: the curves below are those of the training so far.")]
    figures, known = headline(results), list_sentence(run)
    caveats = _caveats(results)
    blocks: list[Block] = []
    if figures:
        first = figures[0]
        beside = [*_first_of(figures, "minDCF(0.01)"), *_first_of(figures, "Cllr", "min Cllr")]
        others = [_tile(one) for one in beside]
        main = dataclasses.replace(_tile(first), range=_range(first), caveats=caveats)
        blocks.append(Tiles([main, *others]))
        cards = [Card("All figures", [_table(results, figures)]), Card("Trial list", [Facts(_counts(results))], known)]
        blocks.append(Cards(cards, "halves"))
    else:
        why = results.why_no_eer or "the list has no labels of both kinds"
        blocks += [Notice(text) for text in [_as_sentence(f"No error rates: {why}"), *caveats]]
        blocks.append(Cards([Card("Trial list", [Facts(_counts(results))], known)], "halves"))
    return blocks


def _tile(figure: HeadlineFigure) -> Tile:
    between = f"95 %: {figure.interval_text}" if figure.interval else ""
    return Tile(TILE_NAMES.get(figure.name, figure.name), figure.text, between)


def _first_of(figures: list[HeadlineFigure], *names: str) -> list[HeadlineFigure]:
    """The first of these names that there is."""
    by_name = {one.name: one for one in figures}
    return next(([by_name[name]] for name in names if name in by_name), [])


def _range(figure: HeadlineFigure) -> Range | None:
    """The interval on a line that ends at a round number above it."""
    if figure.interval is None:
        return None
    low, high = figure.interval
    # Zero belongs to the line: the eye compares the interval with the whole rate.
    end = next((one for one in (0.5, 1, 2, 5, 10, 20, 30, 50) if one > 1.1 * high), 100)
    low, high, middle = (100 * min(1.0, one / end) for one in (low, high, figure.value))
    return Range(round(low, 2), round(high - low, 2), round(middle, 2), f"{end:g} %")


def _table(results: Results, figures: list[HeadlineFigure]) -> Table:
    rows = [[one.name, one.text, one.interval_text] for one in figures]
    more = (
        ("EER on the convex hull", results.eer_convex_hull_percent, "{:.2f} %"),
        ("EER as voxceleb_trainer counts it", results.eer_voxceleb_trainer_percent, "{:.2f} %"),
        ("Cllr lost by calibration", results.calibration_loss, "{:.3f} bits"),
        ("area under the ROC", results.area_under_roc, "{:.4f}"),
    )
    rows += [[name, form.format(value), ""] for name, value, form in more if value is not None]
    return Table(["figure", "value", "95 % interval"], rows, numbers=(1, 2))


def _counts(results: Results) -> list[tuple[str, str]]:
    named = (
        ("Trials", results.num_trials),
        ("of them targets", results.num_targets),
        ("Utterances", results.num_utterances),
        ("Speakers", results.num_speakers),
    )
    return [(name, count(value)) for name, value in named if value is not None]


def _caveats(results: Results) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = cautions(results) if results.warnings is None else list(results.warnings)
    if results.interval_note and results.interval_note not in notes:
        notes.append(results.interval_note)
    return [_as_sentence(note) for note in notes]


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def list_sentence(run: RunData) -> str:
    """Which trial list it was and what that is often confused with; empty where nobody knows."""
    if run.trials is None:
        return ""
    found = list_identity(run.trials)
    if not found.sentence:
        return f"{scored_list_name(run)}, {len(run.trials):,} trials, none of the published lists that are known here"
    return "; ".join(part for part in (found.sentence, found.confused_with) if part)


def scored_list_name(run: RunData) -> str:
    """The name of the list that was scored."""
    name = run.results.list_name() if run.results else ""
    return name or (Path(run.trials.source).name if run.trials is not None else "a list without a name")
