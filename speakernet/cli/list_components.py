"""List the available models, poolings, features, losses, optimizers, schedules and recipes.

With a kind, also lists the options of its components (all sizes of a model family share theirs) and
the cost of models. Nothing is built, so this takes less than a second.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from speakernet.config.loading import RECIPES
from speakernet.config.reference import rows
from speakernet.config.schema import CHOICES, SECTIONS
from speakernet.models.options import FAMILIES
from speakernet.options import summary

HOLDERS = {
    "models": "model.options",
    "poolings": "model.pooling_options",
    "features": "frontend",
    "losses": "loss",
    "optimizers": "optimizer",
    "schedules": "schedule",
}
"""Kind -> the part of the configuration that chooses its components."""
KINDS = (*HOLDERS, "recipes")
MODEL_ROW = "  {:<22}{:>12}{:>10}{:>11}{:>7}  {}"


ARGUMENTS = {"kind": {"nargs": "?", "choices": KINDS, "help": "what to list (default: everything)"}}


def run(arguments: argparse.Namespace) -> list[str]:
    """One line per component and, with a kind, the options that not all of its components share."""
    lines = []
    for kind in [arguments.kind] if arguments.kind else KINDS:
        lines.append(kind)
        if kind == "recipes":
            lines += _recipes()
        else:
            holder = HOLDERS[kind]
            lines += _models() if arguments.kind == "models" else _names(holder)
            if arguments.kind:
                lines += _options(holder)
    return lines


def _names(holder: str) -> Iterator[str]:
    for name, component in CHOICES[holder].table.items():
        yield f"  {name:<24} {component.summary}"


def _models() -> Iterator[str]:
    """Every size of every family and its cost."""
    yield "  as published; MACs for 2 seconds of audio, from features to embedding"
    yield MODEL_ROW.format("name", "parameters", "MACs", "embedding", "mels", "paper")
    # Grouped by family, because the choice is mostly among sizes of one family.
    for sizes in FAMILIES.values():
        yield summary(next(iter(sizes.values())).options)
        for name, component in sizes.items():
            facts: Any = component.options.published
            cost = (f"{facts.parameters:,}", f"{facts.macs / 1e9:.2f} G")
            yield MODEL_ROW.format(name, *cost, facts.dim, str(facts.mels or "raw"), facts.paper)


def _options(holder: str) -> Iterator[str]:
    # Options that all components of a section share would hide the differences.
    common = SECTIONS[holder].model_fields if holder in SECTIONS else {}
    for row in rows(holder):
        if row.key.rpartition(".")[2] not in common:
            takers = f" ({row.components})" if row.components else ""
            yield f"      {row.key} = {row.default}{takers}: {row.text}"


def _recipes() -> Iterator[str]:
    for path in sorted(RECIPES.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        yield f"  {path.relative_to(RECIPES).as_posix():<30} {first.lstrip('# ').strip()}"
