"""Compute diarization error rates against a reference of who speaks when.

    speakernet der reference/ hypothesis/ --collar 0.25
    speakernet der reference.rttm ours.rttm theirs.rttm --uem all.uem

Files or folders of RTTM (or CTM with speakers). With several hypotheses, each is compared with the
first on the same bootstrap draws of recordings; a difference is significant if its 95 % interval
excludes zero. Fewer than five recordings give no interval.
"""

import argparse
import logging
from pathlib import Path

from speakernet.terminal import MAX_NAMED, counted

ARGUMENTS = {
    "reference": {"type": Path, "help": "an RTTM file or a folder of them"},
    "hypothesis": {"type": Path, "nargs": "+", "help": "the same, from each system to score"},
    "--uem": {"type": Path, "help": "regions to score, with `file channel begin end` on each line"},
    "--collar": {
        "type": float,
        "default": 0.0,
        "metavar": "SECONDS",
        "help": (
            "leave out this many seconds on each side of every reference boundary (default "
            "%(default)s)"
        ),
    },
    "--skip-overlap": {
        "action": "store_true",
        "help": "do not score regions in which two people speak",
    },
    "--each": {"action": "store_true", "help": "also print a line for each recording"},
    "--draws": {
        "type": int,
        "default": 1000,
        "help": "bootstrap draws of recordings (default %(default)s)",
    },
    "--seed": {"type": int, "default": 0, "help": "seed of the draws"},
}
HEAD = f"{'':<24}{'DER %':>8}{'missed':>9}{'false':>8}{'confused':>10}{'JER %':>8}"

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> list[str]:
    """Read and compare; return a table, and a sentence for each difference."""
    # Late: --help and a mistyped option need no NumPy.
    import numpy as np

    # Late: pyannote.metrics comes with an extra and takes a second to import.
    from speakernet.evaluation.figures import MIN_SPEAKERS
    from speakernet.inference.who.errors import diarization_errors, read_turns, read_uem

    if arguments.draws < 1 or not arguments.collar >= 0:
        raise ValueError(
            f"--draws {arguments.draws}: expected at least 1"
            if arguments.draws < 1
            else f"--collar {arguments.collar:g}: expected 0 or more seconds"
        )
    reference = read_turns(arguments.reference)
    scored = read_uem(arguments.uem) if arguments.uem else None
    given = [read_turns(path) for path in arguments.hypothesis]
    for path, turns in zip(arguments.hypothesis, given, strict=True):
        if not reference.keys() & turns.keys():
            raise ValueError(
                f"{path} {'has' if any(turns.values()) else 'is empty and is named after'} none of "
                f"the recordings in {arguments.reference}, such as {next(iter(reference), '')!r}"
            )
        if unlike := sorted(reference.keys() ^ turns.keys()):
            shown = ", ".join(unlike[:MAX_NAMED])
            logger.warning(
                "only one of %s and the reference has %s; a missing recording counts as silence",
                path,
                shown,
            )
    how = {"collar": arguments.collar, "skips_overlap": arguments.skip_overlap}
    systems = [diarization_errors(reference, turns, scored, **how) for turns in given]
    too_few = (
        f"no interval: too few recordings ({len(reference)}, at least {MIN_SPEAKERS} are needed)"
        if len(reference) < MIN_SPEAKERS
        else ""
    )
    lines = [HEAD]
    drawn = [one.draws(arguments.draws, arguments.seed)[:, 0] for one in systems]
    for path, one, draws in zip(arguments.hypothesis, systems, drawn, strict=True):
        rows = [(str(path)[-23:], one.rates())]
        if arguments.each:
            rows += [
                (f"  {name[-20:]}", one.rates(slice(row, row + 1)))
                for row, name in enumerate(one.names)
            ]
        lines += [
            f"{name:<24}{r[0]:>8.2f}{r[1]:>9.2f}{r[2]:>8.2f}{r[3]:>10.2f}{r[4]:>8.2f}"
            for name, r in rows
        ]
        low, high = np.percentile(draws, [2.5, 97.5])
        right = (
            f"the number of speakers is correct in {one.num_right} of "
            f"{counted(len(one.names), 'recording')}"
        )
        lines.append(
            f"  {too_few or f'DER 95 % interval {low:.2f} to {high:.2f}, bootstrap over recordings'}; {right}"
        )
    for path, one, draws in list(zip(arguments.hypothesis, systems, drawn, strict=True))[1:]:
        low, high = np.percentile(draws - drawn[0], [2.5, 97.5])
        difference = one.rates()[0] - systems[0].rates()[0]
        word = "not significant" if low <= 0 <= high else "significant"
        lines.append(
            f"{path} against {arguments.hypothesis[0]}: DER {difference:+.2f}, "
            f"{too_few or f'interval {low:+.2f} to {high:+.2f}: {word}'}"
        )
    return lines
