"""What a result was made of and with: lists, model, scoring, machine, command, in words a person would use."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.page import Block, Card, Cards, Code, Facts, Table
from speakernet.evaluation.results import Results
from speakernet.files import human_bytes

ROLES = (("training", "Training", "train_list"), ("validation", "Validation", "validation_list"))
"""Role in `lists`, name on the page, option of the section data."""


def data_part(run: RunData) -> list[Block]:
    """Training, validation and test by name and apart, with what each was for."""
    results = run.results or Results()
    training, options = results.training or {}, configuration(run).get("data") or {}
    evaluations = [float(one["eer_percent"]) for one in run.evaluations]
    what = {
        "training": (
            "the network learns from it",
            ", ".join(
                text
                for key, text in (
                    ("speakers", f"{count(training.get('speakers'))} speakers"),
                    ("utterances", f"{count(training.get('utterances'))} utterances"),
                    ("hours", f"{training.get('hours', 0.0):.1f} hours"),
                )
                if training.get(key)
            ),
        ),
        "validation": (
            "chooses the best checkpoint",
            f"EER {min(evaluations):.2f} % at best, {len(evaluations)} evaluations" if evaluations else "",
        ),
    }
    rows = []
    for role, name, option in ROLES:
        listed = results.list_name(role) or str(options.get(option) or "")
        if listed:
            rows.append([name, listed, *what[role]])
    if run.results is not None and results.list_name():
        numbers = f"{results.num_trials:,} trials"
        numbers += f", {results.num_speakers:,} speakers" if results.num_speakers else ""
        rows.append(["Test", results.list_name(), "what this page reports", numbers])
    if not rows:
        return []
    return [Cards([Card("Lists", [Table(["", "list", "what for", "what it holds"], rows)])], "wide")]


def facts_part(run: RunData) -> list[Block]:
    """Everything that is needed to make the figures again."""
    results, cards = run.results or Results(), []
    if results.command:
        cards.append(Card("Command", [Code(results.command)]))
    entries = _entries(results)
    if entries:
        cards.append(Card("Evaluation", [Facts(entries)]))
    if results.machine:
        cards.append(Card("Machine", [Facts(_machine(results.machine))]))
    if run.config:
        cards.append(Card("Configuration", [Code(run.config, "show the resolved configuration")]))
    if results.config:
        text = "".join(f"{key}: {plain_text(value)}\n" for key, value in results.config.items())
        cards.append(Card("Settings of the evaluation", [Code(text, "show the settings of the evaluation")]))
    return [Cards(cards, "wide")] if cards else []


def _entries(results: Results) -> list[tuple[str, str]]:
    times = results.timings_seconds or {}
    named = {
        "Model": results.model,
        "Parameters": results.num_parameters,
        "Front end": results.front_end,
        "Checkpoint": results.checkpoint,
        "Lists": [f"{one.get('role')}: {one.get('name')} {one.get('sha256', '')}" for one in results.lists or []],
        "Scoring": results.backend,
        "Calibration": results.calibration,
        "Kept thresholds": [f"{one['name']} at {one['threshold']:.4f}" for one in results.thresholds or []],
        "Speakers told by": results.speaker_rule,
        "Draws of speakers": results.num_draws,
        "Costs of a miss and of a false accept": results.dcf_costs,
        "Trials that occur again": results.num_duplicate_trials,
        # Embeddings that were kept are read in no time: that says nothing of the network's speed.
        "Seconds (kept embeddings are only read)": {**times, **({"all": results.seconds} if results.seconds else {})},
        "Versions": results.versions,
        **results.extra,
    }
    return [(name, plain_text(value)) for name, value in named.items() if value not in (None, "", {}, [])]


def _machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """System facts with sizes as people write them."""
    entries = []
    for key, value in machine.items():
        name = key.removesuffix("_bytes").replace("_", " ")
        is_size = key.endswith("_bytes") and isinstance(value, int | float)
        entries.append((name, human_bytes(value) if is_size else plain_text(value)))
    return entries


def configuration(run: RunData) -> Mapping[str, Any]:
    """The run's sections, or the section evaluation of what was scored on its own.

    Raises:
        ValueError: a config.yaml that is none.
    """
    section = (run.results.config if run.results else None) or {}
    try:
        # safe_load: a configuration is data, it may come from anyone.
        found = yaml.safe_load(run.config) if run.config else {"evaluation": section}
    except yaml.YAMLError as error:
        raise ValueError(f"{run.folder / 'config.yaml'}: not YAML ({error})") from error
    return found if isinstance(found, Mapping) else {}


def plain_text(value: Any) -> str:
    """A value of results as text of one line; checksums are shortened."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')}: {plain_text(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(plain_text(one) for one in value) or "none"
    return "none" if value is None else re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", str(value))


def count(value: Any) -> str:
    """A number of things with its thousands apart; empty where it is not known."""
    return f"{value:,}" if isinstance(value, int) else ""


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(59), duration(170), duration(7300)
    ('59 s', '3 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
