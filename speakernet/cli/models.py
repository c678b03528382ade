"""List published models that `--model`, `--initial_model`, `fetch` and `speakernet.load` take by
name.

Error rates (percent) and sizes are the publishers' figures; this project measured none of them.
Each model's weights have their own licence.
"""

import argparse
from typing import Any

ROW = "{:<34}{:>12}{:>10}{:>12}  {:<13}{:<8}{}"

ARGUMENTS: dict[str, Any] = {}


def run(arguments: argparse.Namespace) -> list[str]:
    """One line per model."""
    # Late: --help needs no torch.
    from speakernet.assembly.published import cached, catalogue

    lines = [
        ROW.format(
            "name", "VoxCeleb1-O", "CN-Celeb", "parameters", "licence", "cached", "trained on"
        )
    ]
    for name, entry in catalogue().items():
        rates = [entry.get("eer", {}).get(trials, "-") for trials in ("VoxCeleb1-O", "CN-Celeb")]
        is_here = "yes" if cached(name).is_file() else "no"
        facts = (
            entry.get("parameters", "-"),
            entry.get("licence", "not given"),
            is_here,
            entry["trained_on"],
        )
        lines.append(ROW.format(name, *rates, *facts))
    return lines
