"""Several runs side by side on one page: figures, paired comparisons, shared plots, and the settings that differ.

The same parts as a single report, made of the same files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from speakernet.evaluation.comparison import compare_scores, short_names
from speakernet.evaluation.report import page, sections
from speakernet.evaluation.report.data import RunData, read_run
from speakernet.evaluation.report.report import headline, list_sentence, plain_text, write_page

MISSING = "–"


def write_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
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
    found = {run.name: sections.rates_of(run) for run in runs}
    rates = {name: one for name, one in found.items() if one is not None}
    parts = [
        ("result", "Result", _figures_table(runs)),
        ("difference", "Differences", _differences_part(runs)),
        ("training", "Training", sections.training_part(runs, drawings)),
        ("errors", "Errors", sections.errors_part(runs, rates, drawings)),
        ("slices", "Slices", sections.slices_part(runs, drawings)),
        ("robustness", "Robustness", sections.sweep_part(runs, drawings)),
        ("embeddings", "Embeddings", sections.map_part(runs, drawings)),
        ("settings", "Settings that differ", _settings_part(runs)),
    ]
    return write_page(path, " · ".join(names), f"{len(runs)} runs side by side", parts)


def _figures_table(runs: Sequence[RunData]) -> str:
    columns = [
        {name: f"{value} ({note})" if note else value for name, value, note in headline(r.results)} for r in runs
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, MISSING) for column in columns)] for name in names]
    rows.append(["trial list", *(list_sentence(run) or MISSING for run in runs)])
    rows.append(["folder", *(str(run.folder) for run in runs)])
    return page.card("Figures", page.table(["", *(run.name for run in runs)], rows))


def _differences_part(runs: Sequence[RunData]) -> str:
    """Paired comparisons with the first run that has labelled scores; why there is none where there is none."""
    with_labels = [run for run in runs if run.labels is not None]
    if len(with_labels) < 2:
        return page.paragraph("No two of these runs have labelled scores to compare.", is_quiet=True)
    first, parts = with_labels[0], []
    for other in with_labels[1:]:
        heading = f"{first.name} and {other.name}"
        if not _has_same_trials(first, other):
            text = "Scored on different trial lists: their error rates must not be compared."
            parts.append(page.card(heading, page.paragraph(text)))
            continue
        assert first.trials is not None and first.scores is not None and other.scores is not None
        result = compare_scores(first.trials, first.scores, other.scores)
        text = "".join(page.paragraph(sentence) for sentence in result.sentences(first.name, other.name))
        parts.append(page.card(heading, text, f"Same draws of speakers for both; speakers: {result.speaker_rule}."))
    return page.cards(parts, kind="wide")


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


def _settings_part(runs: Sequence[RunData]) -> str:
    tables = [_flat(_configuration(run)) for run in runs]
    if not any(tables):
        return ""
    keys = list(dict.fromkeys(key for one in tables for key in one))
    differing = [key for key in keys if len({one.get(key, MISSING) for one in tables}) > 1]
    if not differing:
        return page.paragraph("All were configured alike.", is_quiet=True)
    rows = [[key, *(one.get(key, MISSING) for one in tables)] for key in differing]
    return page.card("Configuration", page.table(["option", *(run.name for run in runs)], rows))


def _configuration(run: RunData) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(run.config) if run.config else {"evaluation": run.results.get("config") or {}}
    except yaml.YAMLError as error:
        raise ValueError(f"{run.folder / 'config.yaml'}: not YAML ({error})") from error
    return found if isinstance(found, Mapping) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as `section.field` -> text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = plain_text(value)
    return flat
