"""What a result was made of and with: lists, model, scoring, machine, command, in words a person would use."""

import re
from collections.abc import Mapping
from typing import Any

from speakernet.evaluation.decisions import described
from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.page import Block, Card, Cards, Code, Facts, Table
from speakernet.evaluation.results import EMBEDDING, KEPT_EMBEDDINGS, Results
from speakernet.files import human_bytes, read_yaml

ROLES = (("training", "Training", "train_list"), ("validation", "Validation", "validation_list"))
"""Role in `lists`, name on the page, option of the section data."""
LABELS = {
    "platform": "System",
    "cpu": "Processor",
    "cpu_cores": "Processor cores",
    "gpus": "GPUs",
    "cuda": "CUDA",
    "eval_frames": "frames of 10 ms a crop",
    "num_crops": "crops an utterance",
    "subtract_mean": "mean subtracted",
    "score_norm": "score normalisation",
    "is_normalised": "unit length",
    "cohort_size": "nearest of the cohort",
    "num_mels": "mel bands",
    "low_hz": "lowest frequency in Hz",
    "high_hz": "highest frequency in Hz",
    "embedding_dim": "dimensions",
}
"""Names of results that do not say what they are once their underscores are gone."""


def data_part(run: RunData) -> list[Block]:
    """Training, validation and test by name and apart, with what each was for."""
    results = run.results or Results()
    training, configured = results.training or {}, configuration(run)
    options, how = configured.get("data") or {}, configured.get("training")
    is_watched = isinstance(how, Mapping) and how.get("final_model") == "last"
    evaluations = [float(one["eer_percent"]) for one in run.evaluations]
    what = {
        "training": (
            "the network learns from it",
            ", ".join(
                text
                for key, text in (
                    ("speakers", f"{count(training.get('speakers'))} speakers"),
                    ("utterances", f"{count(training.get('utterances'))} utterances"),
                    ("hours", hours_of_speech(training.get("hours", 0.0))),
                )
                if training.get(key)
            ),
        ),
        "validation": (
            "is watched while training" if is_watched else "chooses the best checkpoint",
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
    checkpoint, costs = results.checkpoint or {}, results.dcf_costs or {}
    # The machine's facts hold the versions too.
    versions = None if (results.machine or {}).get("versions") else results.versions
    named = {
        "Model": results.model,
        "Parameters": results.num_parameters,
        "Front end": results.front_end,
        "Checkpoint": _with_checksum(checkpoint.get("path"), checkpoint.get("sha256")),
        "Lists": [
            f"{one.get('role')}: {_with_checksum(one.get('name'), one.get('sha256'))}" for one in results.lists or []
        ],
        "Against the initial model": (results.initial_model or {}).get("sentences"),
        "Scoring": results.backend,
        "Calibration": results.calibration,
        "Kept thresholds": [f"{one['threshold']:.4f}: {described(one)}" for one in results.thresholds or []],
        "Speakers told by": results.speaker_rule,
        "Draws of speakers": results.num_draws,
        "Costs": {"of a miss": costs["c_miss"], "of a false accept": costs["c_fa"]} if costs else None,
        "Trials that occur again": results.num_duplicate_trials,
        "Time": _time(results),
        "Versions": versions,
        **results.extra,
    }
    return [(label(name), in_words(value)) for name, value in named.items() if value not in (None, "", {}, [])]


def _time(results: Results) -> str:
    """How long the evaluation took; embeddings that were only read say nothing of the network's speed."""
    times = results.timings_seconds or {}
    parts = []
    for name, seconds in times.items():
        if name == KEPT_EMBEDDINGS:
            parts.append("embeddings kept from before, not made anew")
            continue
        # Less than a second would be a rate of the start, not of the work.
        has_rate = name == EMBEDDING and seconds >= 1 and results.num_utterances and KEPT_EMBEDDINGS not in times
        rate = f" ({results.num_utterances / seconds:.3g} utterances/s)" if has_rate and results.num_utterances else ""
        parts.append(f"{label(name).lower()} {seconds:.3g} s{rate}")
    if results.seconds is not None and KEPT_EMBEDDINGS not in times:
        parts.append(f"in all {results.seconds:.3g} s")
    return ", ".join(parts)


def _with_checksum(name: str | None, checksum: str | None) -> str:
    return f"{name} ({shortened(checksum)})" if name and checksum else name or ""


def _machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """System facts with sizes as people write them."""
    return [(label(key), in_words(value, key)) for key, value in machine.items()]


def configuration(run: RunData) -> Mapping[str, Any]:
    """The run's sections, or the section evaluation of what was scored on its own.

    Raises:
        ValueError: a config.yaml that is none.
    """
    section = (run.results.config if run.results else None) or {}
    found = read_yaml(run.config, str(run.folder / "config.yaml")) if run.config else {"evaluation": section}
    return found if isinstance(found, Mapping) else {}


def plain_text(value: Any) -> str:
    """A value of a configuration as text of one line; checksums are shortened."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain_text(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(plain_text(one) for one in value) or "none"
    return "none" if value is None else shortened(str(value))


def in_words(value: Any, name: str = "") -> str:
    """A value of results as a person would write it.

    >>> in_words({"name": "ResNet", "options": {"num_mels": 64, "log_input": True}})
    'ResNet (mel bands 64, log input yes)'
    >>> in_words([{"name": "a GPU", "memory_bytes": 2**33}])
    'name a GPU, memory 8.0 GiB'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return human_bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        if {"name", "options"} == set(value):
            return f"{value['name']} ({in_words(value['options'])})" if value["options"] else str(value["name"])
        # Within a line labels are no headings.
        named = ((_lower(label(str(key))), in_words(one, str(key))) for key, one in value.items())
        return ", ".join(f"{key} {one}" for key, one in named) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(in_words(one) for one in value) or "none"
    return plain_text(value)


def label(key: str) -> str:
    """A name of `results.json` as a heading for people.

    >>> label("cpu_cores"), label("Kept thresholds"), label("memory_bytes")
    ('Processor cores', 'Kept thresholds', 'Memory')
    """
    if key in LABELS:
        return LABELS[key]
    words = key.removesuffix("_bytes").replace("_", " ")
    return words[:1].upper() + words[1:]


def _lower(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def shortened(text: str) -> str:
    """The text with twelve letters of each SHA-256."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)


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


def hours_of_speech(hours: float) -> str:
    """An amount of speech.

    >>> hours_of_speech(2690.25), hours_of_speech(0.25)
    ('2,690.2 hours', '15 min')
    """
    return f"{hours:,.1f} hours" if hours >= 1 else duration(3600 * hours)
