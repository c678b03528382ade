"""Several runs side by side on one page: figures, paired comparisons, shared plots, and the settings that differ.

The same parts as a single report, made of the same files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from speakernet.evaluation.comparison import compare_scores, short_names
from speakernet.evaluation.headline import headline
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.report import error_sections, sections
from speakernet.evaluation.report.data import RunData, read_run
from speakernet.evaluation.report.facts import configuration, plain_text
from speakernet.evaluation.report.page import Block, Card, Cards, Paragraph, Section, Table
from speakernet.evaluation.report.report import write_page
from speakernet.evaluation.report.result_section import list_sentence
from speakernet.evaluation.speakers import speakers_of
from speakernet.options import default_of

# Fixed, so that the same runs give the same intervals whenever the page is made.
DRAW_SEED = 0
MISSING = "–"


def write_side_by_side(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page for several run folders, with its plots as PNGs in a folder beside it.

    Args:
        folders: of runs or evaluations; the first is what the others are compared with.
        path: of the page.

    Raises:
        ValueError: a folder named twice or with nothing to report.
    """
    resolved = [Path(folder).resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"the same folder twice among {', '.join(map(str, folders))}; name each run once")
    path = Path(path)
    names = short_names([str(one) for one in resolved])
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    drawings = sections.Drawings(path.with_name(f"{path.stem}_plots"))
    # Runs without labels stand in the tables and are left out of the plots.
    found = {run.name: error_sections.rates_of(run) for run in runs}
    rates = {name: one for name, one in found.items() if one is not None}
    parts = [
        Section("result", "Result", _figures_table(runs)),
        Section("difference", "Differences", _differences_part(runs)),
        Section("errors", "Errors", error_sections.errors_part(runs, rates, drawings)),
        Section("training", "Training", sections.training_part(runs, drawings)),
        Section("slices", "Slices", sections.slices_part(runs, drawings)),
        Section("robustness", "Robustness", sections.sweep_part(runs, drawings)),
        Section("embeddings", "Embeddings", sections.map_part(runs, drawings)),
        Section("settings", "Settings that differ", _settings_part(runs)),
    ]
    return write_page(path, " · ".join(names), f"{len(runs)} runs side by side", "", parts)


def _figures_table(runs: Sequence[RunData]) -> list[Block]:
    columns = []
    for run in runs:
        figures = headline(run.results) if run.results else []
        column = {one.name: f"{one.text} ({one.interval_text})" if one.interval else one.text for one in figures}
        columns.append({**column, "trials": f"{run.results.num_trials:,}"} if run.results else column)
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, MISSING) for column in columns)] for name in names]
    rows.append(["trial list", *(list_sentence(run) or MISSING for run in runs)])
    rows.append(["folder", *(str(run.folder) for run in runs)])
    note = "In brackets: 95 % intervals over speakers."
    return [Card("Figures", [Table(["", *(run.name for run in runs)], rows)], note)]


def _differences_part(runs: Sequence[RunData]) -> list[Block]:
    """Paired comparisons with the first run that has labelled scores; why there is none where there is none."""
    with_labels = [run for run in runs if run.labels is not None]
    if len(with_labels) < 2:
        return [Paragraph("No two of these runs have labelled scores to compare.", is_quiet=True)]
    first, cards = with_labels[0], []
    assert first.trials is not None and first.scores is not None
    speakers, num_draws = speakers_of(first.trials), default_of(EvaluationOptions, "bootstrap_samples")
    for other in with_labels[1:]:
        heading = f"{first.name} and {other.name}"
        if not _has_same_trials(first, other):
            text = "Scored on different trial lists: their error rates must not be compared."
            cards.append(Card(heading, [Paragraph(text)]))
            continue
        assert other.scores is not None
        both = [first.scores, other.scores]
        result = compare_scores(first.trials, both, speakers, num_draws=num_draws, seed=DRAW_SEED)
        text = f"Same draws of speakers for both; speakers: {speakers.rule}."
        cards.append(Card(heading, [Paragraph(one) for one in result.sentences([first.name, other.name])], text))
    return [Cards(cards, "wide")]


def _has_same_trials(first: RunData, second: RunData) -> bool:
    assert first.trials is not None and second.trials is not None
    one, other = first.trials, second.trials
    assert one.labels is not None and other.labels is not None
    return (
        len(one) == len(other)
        and one.names == other.names
        and all(
            np.array_equal(left, right)
            for left, right in ((one.enrol, other.enrol), (one.test, other.test), (one.labels, other.labels))
        )
    )


def _settings_part(runs: Sequence[RunData]) -> list[Block]:
    tables = [_flat(configuration(run)) for run in runs]
    if not any(tables):
        return []
    keys = list(dict.fromkeys(key for one in tables for key in one))
    differing = [key for key in keys if len({one.get(key, MISSING) for one in tables}) > 1]
    if not differing:
        return [Paragraph("All were configured alike.", is_quiet=True)]
    rows = [[key, *(one.get(key, MISSING) for one in tables)] for key in differing]
    return [Card("Configuration", [Table(["option", *(run.name for run in runs)], rows)])]


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested sections as `section.field` -> text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = plain_text(value)
    return flat
