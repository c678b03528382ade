"""List what a configuration can name: models, poolings, features, losses, optimizers, schedules, recipes.

With a kind, every part's own options are listed too; models with what they cost, the options of a family once for all
its sizes. Nothing is built, so the answer takes about a second.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from speakernet.config.loading import recipe_folder
from speakernet.config.schema import SECTIONS
from speakernet.frontend.options import FEATURES
from speakernet.losses.options import LOSSES
from speakernet.models.options import FAMILIES, MODELS, POOLINGS
from speakernet.options import Component, NamedOptions, default_of, description_of, summary
from speakernet.training.options import OPTIMIZERS
from speakernet.training.options.schedules import SCHEDULES

TABLES: dict[str, tuple[Mapping[str, Component], str, str]] = {
    "models": (MODELS, "model.options", ""),
    "poolings": (POOLINGS, "model.pooling_options", ""),
    "features": (FEATURES, "frontend", "frontend"),
    "losses": (LOSSES, "loss", "loss"),
    "optimizers": (OPTIMIZERS, "optimizer", "optimizer"),
    "schedules": (SCHEDULES, "schedule", "schedule"),
}
"""Kind -> table, where its options are given, and the section whose other options are common to all its parts."""
KINDS = (*TABLES, "recipes")
MODEL_ROW = "  {:<22}{:>12}{:>10}{:>11}{:>7}  {}"
WIDEST_DEFAULTS = 40
"""Letters that the defaults of a family's sizes may take in one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The kind of part; all of them where none is named."""
    parser.add_argument("kind", nargs="?", choices=KINDS, help="what to list; everything where it is left out")


def run(arguments: argparse.Namespace) -> int:
    """Print one line a part, and with a kind a line for each of its own options."""
    for kind in [arguments.kind] if arguments.kind else KINDS:
        if kind == "recipes":
            lines = _recipes()
        elif kind == "models" and arguments.kind:
            lines = _models()
        else:
            lines = _parts(kind, with_options=bool(arguments.kind))
        sys.stdout.write("\n".join([kind, *lines]) + "\n")
    return 0


def _models() -> Iterator[str]:
    """Every size of every family with what it costs, then the family's options."""
    yield "  as published; MACs are those of 2 seconds, from features to embedding"
    yield MODEL_ROW.format("name", "parameters", "MACs", "embedding", "mels", "paper")
    for sizes in FAMILIES.values():
        owners: list[Any] = [part.options for part in sizes.values()]
        yield summary(owners[0])
        for name, owner in zip(sizes, owners, strict=True):
            giga, mels = f"{owner.macs / 1e9:.2f} G", str(owner.published_mels or "raw")
            yield MODEL_ROW.format(name, f"{owner.parameters:,}", giga, owner.published_dim, mels, owner.paper)
        for field in owners[0].model_fields:
            values = list(dict.fromkeys(_shown(default_of(owner, field)) for owner in owners))
            shown = " or ".join(values)
            if len(values) > 1 and len(shown) > WIDEST_DEFAULTS:
                shown = "as of the size"
            yield f"      model.options.{field} = {shown}: {description_of(owners[0], field)}"


def _parts(kind: str, *, with_options: bool) -> Iterator[str]:
    table, place, section = TABLES[kind]
    common = SECTIONS[section].model_fields if section else []
    for name, part in table.items():
        yield f"  {name:<24} {part.summary}"
        for field in part.options.model_fields if with_options else []:
            if field not in common:
                meaning = description_of(part.options, field)
                yield f"      {place}.{field} = {_shown(default_of(part.options, field))}: {meaning}"


def _shown(value: object) -> str:
    if isinstance(value, NamedOptions):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def _recipes() -> Iterator[str]:
    folder = recipe_folder()
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    width = max(map(len, names), default=0)
    for name, path in names.items():
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        yield f"  {name:<{width}} {first.lstrip('# ').strip()}"
