"""List published models that `--model`, `--initial_model`, `fetch` and `speakernet.load` take by
name.

Error rates are the publishers' EERs in percent on the list in the column's name; this project
measured none of them. A name with a star is recommended. Each model's weights have their own
licence.
"""

import argparse

from speakernet.cli.shared import RECOMMENDED

LISTS = ("VoxCeleb1-O", "CN-Celeb")
ROW = "{:<34}{:>16}{:>13}{:>12}{:>9}  {:<13}{:<8}{}"


def run(arguments: argparse.Namespace) -> list[str]:
    """One line per model."""
    # Late: --help needs no torch.
    from speakernet.assembly.published import cache_path
    from speakernet.models.published import catalogue

    rates = [f"EER {trials}" for trials in LISTS]
    lines = [
        ROW.format("name", *rates, "parameters", "size", "licence", "cached", "trained on"),
    ]
    for name, entry in catalogue().items():
        rates = [entry.get("eer", {}).get(trials, "-") for trials in LISTS]
        parameters = entry.get("parameters", "-")
        # Computed from a number of millions such as "6.63 M", with weights of 4 bytes, so that the
        # list needs no network.
        size = f"{4 * float(parameters.split()[0]):.0f} MB" if "parameters" in entry else "-"
        facts = (
            parameters,
            size,
            entry.get("licence", "not given"),
            "yes" if cache_path(name).is_file() else "no",
            entry["trained_on"],
        )
        mark = " *" if name == RECOMMENDED else ""
        lines.append(ROW.format(name + mark, *rates, *facts))
    lines += [
        "",
        f"* recommended: speakernet verify a.wav b.wav --model {RECOMMENDED} --threshold default",
    ]
    return lines
