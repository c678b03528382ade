"""`report.html`: what one run, or several side by side, came to, as one file that opens anywhere.

Called at the end of an evaluation with the arrays that it has at hand, or later by `speakernet report` on the files
alone. It measures nothing anew: figures come from `results.json`, curves from `scores.txt` and `metrics.jsonl`. Of
`results.json` these keys have a place of their own, all optional: `eer_percent`, `eer_interval_percent`, `min_dcf`,
`min_dcf_interval`, `act_dcf`, `cllr`, `min_cllr`, `num_trials`, `num_targets`, `num_speakers`, `seconds`, `lists`,
`why_no_eer`, `interval_note`, `warnings` (sentences), `list_identity`, `slices`, `sweep`, `command`, `config`,
`machine`; the rest is listed as it is.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.list_identity import list_identity
from speakernet.data.lists import TrialList
from speakernet.evaluation.report import page, sections
from speakernet.evaluation.report.data import RunData, embedding_map, keep_arrays, read_run
from speakernet.files import atomic_write, human_bytes

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"
PLOTS_FOLDER = "plots"
PLACED = {
    *("eer_percent", "eer_interval_percent", "min_dcf", "min_dcf_interval", "act_dcf", "cllr", "min_cllr"),
    *("num_trials", "num_targets", "num_speakers", "seconds", "warnings", "why_no_eer", "interval_note", "slices"),
    *("sweep", "command", "machine", "config", "list_identity"),
}
"""Keys of results that stand somewhere else than in the list of all facts."""


def write_report(
    folder: str | Path,
    *,
    trials: TrialList | None = None,
    scores: np.ndarray | None = None,
    llrs: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
    speakers: np.ndarray | None = None,
) -> Path:
    """Write `report.html`, and its plots as PNGs under `plots/`, for the files of a run or evaluation folder.

    Args:
        folder: holds `results.json` and what else there is of `scores.txt`, `metrics.jsonl`, `config.yaml`.
        trials: of the scores; read from `scores.txt` where they are not handed in, with labels as they were kept.
        scores: (trials,).
        llrs: calibrated scores, (trials,), where there is a calibration.
        embeddings: (utterances, dim) of length 1, one for each name of the trials: for the map of speakers.
        speakers: number of the speaker of each utterance, (utterances,), for the same.

    Returns:
        The path of the page.

    Raises:
        ValueError: nothing to report in the folder, or a broken file.
    """
    given = None if trials is None or scores is None else (trials, np.asarray(scores, dtype=np.float64))
    run = read_run(folder, given=given)
    if llrs is not None:
        run = replace(run, llrs=np.asarray(llrs, dtype=np.float64))
    if embeddings is not None and speakers is not None and trials is not None:
        run = replace(run, embedding_map=embedding_map(embeddings, speakers, list(trials.names)))
    keep_arrays(run)
    drawings = sections.Drawings(run.folder / PLOTS_FOLDER)
    rates = sections.rates_of(run)
    parts = [
        ("result", "Result", _result_part(run)),
        ("training", "Training", sections.training_part([run], drawings)),
        ("errors", "Errors", sections.errors_part([run], {} if rates is None else {run.name: rates}, drawings)),
        ("slices", "Slices", sections.slices_part([run], drawings)),
        ("robustness", "Robustness", sections.sweep_part([run], drawings)),
        ("hardest", "Hardest trials", sections.hardest_part(run)),
        ("embeddings", "Embeddings", sections.map_part([run], drawings)),
        ("facts", "How it was made", _facts_part(run)),
    ]
    return write_page(run.folder / REPORT_NAME, run.name, _subtitle(run), parts)


def write_page(path: Path, title: str, subtitle: str, parts: Sequence[tuple[str, str, str]]) -> Path:
    """Write a page of those parts, (anchor, heading, HTML), that have something to show."""
    text = page.page(title, subtitle, [part for part in parts if part[2]])
    with atomic_write(path) as file:
        file.write(text)
    logger.info("report: %s", path)
    return path


def headline(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and small print of the figures that come first."""
    entries: list[tuple[str, str, str]] = []
    value = results.get("eer_percent")
    if value is not None:
        entries.append(("equal error rate", f"{value:.2f} %", interval_text(results.get("eer_interval_percent"), " %")))
    intervals = results.get("min_dcf_interval") or {}
    for prior, cost in (results.get("min_dcf") or {}).items():
        entries.append((f"minDCF, prior {prior}", f"{cost:.3f}", interval_text(intervals.get(prior), "", 3)))
    for prior, cost in (results.get("act_dcf") or {}).items():
        entries.append((f"actual DCF, prior {prior}", f"{cost:.3f}", ""))
    for key, name in (("cllr", "Cllr (bits)"), ("min_cllr", "min Cllr (bits)")):
        found = results.get(key)
        if isinstance(found, int | float):
            entries.append((name, f"{found:.3f}", ""))
    counts = (("num_trials", "trials"), ("num_targets", "of them targets"), ("num_speakers", "speakers"))
    entries += [(name, f"{results[key]:,}", "") for key, name in counts if isinstance(results.get(key), int)]
    if isinstance(results.get("seconds"), int | float):
        entries.append(("evaluation took", f"{results['seconds']:.1f} s", ""))
    return entries


def interval_text(interval: Sequence[float | None] | None, unit: str, digits: int = 2) -> str:
    """An interval in words; empty where none was asked for."""
    if not interval:
        return ""
    if interval[0] is None or interval[1] is None:
        return "no interval"
    return f"95 %: {interval[0]:.{digits}f} to {interval[1]:.{digits}f}{unit}"


def _result_part(run: RunData) -> str:
    if not run.results:
        return page.paragraph("Not evaluated yet: the curves below are those of the training so far.")
    parts = [page.tiles(headline(run.results))]
    parts += [page.warning(text) for text in _warnings(run.results)]
    known = list_sentence(run)
    if known:
        parts.append(page.paragraph(f"Trial list: {known}."))
    return "".join(parts)


def _warnings(results: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = [str(note) for note in results.get("warnings") or []]
    texts = []
    if results.get("eer_percent") is None:
        texts.append(f"No error rates: {results.get('why_no_eer') or 'the list has no labels of both kinds'}")
    if results.get("interval_note") and str(results["interval_note"]) not in notes:
        texts.append(str(results["interval_note"]))
    if results.get("num_duplicate_trials") and "warnings" not in results:
        texts.append(f"{results['num_duplicate_trials']:,} trials occur more than once in the list and count each time")
    return [text[:1].upper() + text[1:].rstrip(".") + "." for text in [*texts, *notes]]


def list_sentence(run: RunData) -> str:
    """Which trial list it was and what that is often confused with; empty where nobody knows."""
    entry = run.results.get("list_identity")
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, Mapping):
        return "; ".join(str(entry[key]) for key in ("sentence", "confused_with") if entry.get(key))
    if run.trials is None:
        return ""
    found = list_identity(run.trials)
    if not found.sentence:
        return f"{_list_name(run)}, {len(run.trials):,} trials, none of the published lists that are known here"
    return "; ".join(part for part in (found.sentence, found.confused_with) if part)


def _list_name(run: RunData) -> str:
    for entry in run.results.get("lists") or []:
        if entry.get("role") == "trials":
            return str(entry.get("name"))
    return Path(run.trials.source).name if run.trials is not None else "a list without a name"


def _subtitle(run: RunData) -> str:
    model = run.results.get("model")
    if isinstance(model, Mapping):
        model = model.get("name")
    parts = [str(model) if model else "", _list_name(run) if run.results else "", str(run.results.get("date") or "")]
    return " · ".join(part for part in parts if part)


def _facts_part(run: RunData) -> str:
    parts = []
    command = run.results.get("command")
    if command:
        text = command if isinstance(command, str) else " ".join(map(str, command))
        parts.append(page.card("Command", page.code(text)))
    rest = {key: value for key, value in run.results.items() if key not in PLACED}
    if rest:
        parts.append(page.card("Evaluation", page.facts((key, plain_text(value)) for key, value in rest.items())))
    machine = run.results.get("machine") or run.results.get("system")
    if isinstance(machine, Mapping):
        parts.append(page.card("Machine", page.facts(machine_facts(machine))))
    if run.config:
        parts.append(page.card("Configuration", page.code(run.config, "show the resolved configuration")))
    settings = run.results.get("config")
    if isinstance(settings, Mapping):
        text = "".join(f"{key}: {plain_text(value)}\n" for key, value in settings.items())
        parts.append(page.card("Settings of the evaluation", page.code(text, "show the settings of the evaluation")))
    return page.cards(parts, kind="wide") if parts else ""


def machine_facts(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """System facts with sizes as people write them."""
    entries = []
    for key, value in machine.items():
        name = key.removesuffix("_bytes").replace("_", " ")
        is_size = key.endswith("_bytes") and isinstance(value, int | float)
        entries.append((name, human_bytes(value) if is_size else plain_text(value)))
    return entries


def plain_text(value: Any) -> str:
    """A value of results as text of one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain_text(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(plain_text(one) for one in value) or "none"
    return "none" if value is None else str(value)
