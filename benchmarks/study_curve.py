"""Error against training time in a study: a line for each variant, with the range over its seeds.

    python -m benchmarks.study_curve S --out curve.png
    python -m benchmarks.study_curve S --out curve.png --only "small data" "voxceleb_trainer"

Each evaluation is drawn at the training time before it, excluding evaluations and assuming that all
steps of a run take equally long. All seeds of a variant must have the same number of evaluations.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.study import RECORDS
from speakernet.cli import run_command
from speakernet.evaluation.plots import BAND, drawn_in_house_style, new_figure, save_figure
from speakernet.run_folder import METRICS

TICKS = (1.0, 2.0, 3.0, 5.0)
"""Tick positions in each decade of the axes."""
Curve = tuple[np.ndarray, np.ndarray]
"""Minutes of training, (evaluations,), and EERs in %, (seeds, evaluations)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("study", type=Path, help="folder of a study")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (PNG)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these variants")


def run(arguments: argparse.Namespace) -> int:
    """Draw the curves."""
    found = curves(arguments.study, arguments.only)
    save_figure(study_figure(found), arguments.out)
    for name, (minutes, eers) in found.items():
        sys.stdout.write(
            f"{name}: {len(eers)} seeds, {len(minutes)} evaluations in {minutes[-1]:.1f} min\n"
        )
    return 0


def curves(study: Path, only: Sequence[str] | None = None) -> dict[str, Curve]:
    """The curve of each trained variant.

    Raises:
        ValueError: no study, an unknown variant, or seeds with different numbers of evaluations.
    """
    path = study / RECORDS
    if not path.is_file():
        raise ValueError(f"there is no {path}; run the study first (python -m benchmarks.study)")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    trained = [one for one in records if one["training_seconds"] is not None]
    names = list(dict.fromkeys(one["variant"] for one in trained))
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: expected trained variants: {', '.join(names)}")
    return {
        name: _curve(study, [one for one in trained if one["variant"] == name])
        for name in only or names
    }


@drawn_in_house_style
def study_figure(found: Mapping[str, Curve]) -> Figure:
    """EER against minutes, both on logarithmic axes."""
    figure, axes = new_figure("minutes of training", "EER (%)")
    for number, (name, (minutes, eers)) in enumerate(found.items()):
        axes.plot(
            minutes, eers.mean(axis=0), color=f"C{number}", marker="o", markersize=2.5, label=name
        )
        axes.fill_between(minutes, eers.min(axis=0), eers.max(axis=0), color=f"C{number}", **BAND)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=TICKS))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    return figure


def _curve(study: Path, records: Sequence[Mapping[str, Any]]) -> Curve:
    minutes = []
    rows = []
    for one in records:
        metrics = (study / one["scores"]).parent / METRICS
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        evaluations = [line for line in lines if line["kind"] == "evaluation" and line["step"] > 0]
        steps = np.array([line["step"] for line in evaluations])
        minutes.append(one["training_seconds"] / 60 * steps / steps[-1])
        rows.append([line["eer_percent"] for line in evaluations])
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{records[0]['variant']}: seeds differ in evaluations: "
            f"{', '.join(str(len(row)) for row in rows)}"
        )
    return np.mean(minutes, axis=0), np.array(rows)


if __name__ == "__main__":
    sys.exit(
        run_command("benchmarks.study_curve", "python -m benchmarks.study_curve", sys.argv[1:])
    )
