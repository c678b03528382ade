"""List what a configuration can name: models, poolings, features, losses, optimizers, schedules, recipes.

Asked for models alone, it says what each costs as well.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

KINDS = ("models", "poolings", "features", "losses", "optimizers", "schedules", "recipes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The kind of part; all of them where none is named."""
    parser.add_argument("kind", nargs="?", choices=KINDS, help="what to list; everything where it is left out")


def run(arguments: argparse.Namespace) -> int:
    """Print one line a part: its name and what it is."""
    if arguments.kind == "models":
        _list_models()
        return 0
    for kind in [arguments.kind] if arguments.kind else KINDS:
        sys.stdout.write(f"{kind}\n")
        for name, meaning in _parts(kind).items():
            sys.stdout.write(f"  {name:<24} {meaning}\n")
    return 0


def _list_models() -> None:
    """A row for every model, with what it costs; each is counted when its turn comes, which takes some seconds."""
    from speakernet.models import MODELS
    from speakernet.models.sizes import size_of

    row = "  {:<22}{:>12}{:>10}{:>11}{:>7}  {}\n"
    sys.stdout.write("models as published; MACs are those of 2 seconds, from features to embedding\n")
    sys.stdout.write(row.format("name", "parameters", "MACs", "embedding", "mels", "paper"))
    for name in MODELS:
        size = size_of(name)
        giga = f"{size.macs / 1e9:.2f} G"
        mels = str(size.num_mels or "raw")
        sys.stdout.write(row.format(name, f"{size.parameters:,}", giga, size.embedding_dim, mels, size.paper))
        sys.stdout.flush()


def _parts(kind: str) -> dict[str, str]:
    if kind == "recipes":
        return _recipes()
    from speakernet.frontend import FEATURES
    from speakernet.losses import LOSSES
    from speakernet.models import MODELS, POOLINGS
    from speakernet.training import OPTIMIZERS, SCHEDULES

    tables: dict[str, Mapping[str, Callable[..., Any]]] = {
        "models": MODELS,
        "poolings": POOLINGS,
        "features": FEATURES,
        "losses": LOSSES,
        "optimizers": OPTIMIZERS,
        "schedules": SCHEDULES,
    }
    return {name: _first_line(part) for name, part in tables[kind].items()}


def _first_line(part: Callable[..., Any]) -> str:
    return (inspect.getdoc(part) or "").split("\n", 1)[0]


def _recipes() -> dict[str, str]:
    from speakernet.config.loading import recipe_folder

    folder = recipe_folder()
    recipes = {}
    for path in sorted(folder.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        recipes[path.relative_to(folder).as_posix()] = first.lstrip("# ").strip()
    return recipes
