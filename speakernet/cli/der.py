"""Compute diarization error rates: who speaks when, against a reference.

    speakernet der reference/ hypothesis/ --collar 0.25
    speakernet der reference.rttm ours.rttm theirs.rttm --uem all.uem

Files or folders of RTTM (or CTM with speakers). With several hypotheses each is compared with the first under the same
draws of recordings; a difference is significant if its 95 % interval does not include zero.
"""

import argparse
import logging
from pathlib import Path

from speakernet.terminal import MAX_NAMED, counted

ARGUMENTS = {
    "reference": {"type": Path, "help": "RTTM, or a folder of such files"},
    "hypothesis": {"type": Path, "nargs": "+", "help": "of one or more systems"},
    "--uem": {"type": Path, "help": "regions that are scored: `file channel begin end` a line"},
    "--collar": {
        "type": float,
        "default": 0.0,
        "metavar": "SECONDS",
        "help": "seconds before and after each boundary of the reference that are not scored (%(default)s)",
    },
    "--skip-overlap": {"action": "store_true", "help": "do not score regions in which two people speak"},
    "--each": {"action": "store_true", "help": "a line for each recording too"},
    "--draws": {"type": int, "default": 1000, "help": "draws of recordings, for intervals (%(default)s)"},
    "--seed": {"type": int, "default": 0, "help": "of the draws"},
}
HEAD = f"{'':<24}{'DER %':>8}{'missed':>9}{'false':>8}{'confused':>10}{'JER %':>8}"

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> list[str]:
    """Read and compare: a table, and a sentence for each difference."""
    # Late: pyannote.metrics is an extra, and takes a second.
    import numpy as np

    # Late: the same.
    from speakernet.inference.who.errors import diarization_errors, read_turns, read_uem

    if arguments.draws < 1 or not arguments.collar >= 0:
        raise ValueError(
            f"--draws {arguments.draws} --collar {arguments.collar}: expected at least 1 draw, and 0 s or more"
        )
    reference, scored = read_turns(arguments.reference), read_uem(arguments.uem) if arguments.uem else None
    given = [read_turns(path) for path in arguments.hypothesis]
    for path, turns in zip(arguments.hypothesis, given, strict=True):
        if not reference.keys() & turns.keys():
            raise ValueError(
                f"{path} names no recording of {arguments.reference}, such as {next(iter(reference), '')!r}"
            )
        if unlike := sorted(reference.keys() ^ turns.keys()):
            shown = ", ".join(unlike[:MAX_NAMED])
            logger.warning(
                "%s and the reference do not both have %s; a missing recording counts as silence", path, shown
            )
    how = {"collar": arguments.collar, "skips_overlap": arguments.skip_overlap}
    systems = [diarization_errors(reference, turns, scored, **how) for turns in given]
    lines, drawn = [HEAD], [one.draws(arguments.draws, arguments.seed)[:, 0] for one in systems]
    for path, one, draws in zip(arguments.hypothesis, systems, drawn, strict=True):
        rows = [(str(path)[-23:], one.rates())]
        if arguments.each:
            rows += [(f"  {name[-20:]}", one.rates(slice(row, row + 1))) for row, name in enumerate(one.names)]
        lines += [f"{name:<24}{r[0]:>8.2f}{r[1]:>9.2f}{r[2]:>8.2f}{r[3]:>10.2f}{r[4]:>8.2f}" for name, r in rows]
        low, high = np.percentile(draws, [2.5, 97.5])
        right = f"the number of speakers is right in {one.num_right} of {counted(len(one.names), 'recording')}"
        lines.append(f"  DER 95 % interval {low:.2f} to {high:.2f}, bootstrap over recordings; {right}")
    for path, one, draws in list(zip(arguments.hypothesis, systems, drawn, strict=True))[1:]:
        low, high = np.percentile(draws - drawn[0], [2.5, 97.5])
        difference = one.rates()[0] - systems[0].rates()[0]
        word = "not significant" if low <= 0 <= high else "significant"
        lines.append(
            f"{path} against {arguments.hypothesis[0]}: DER {difference:+.2f} ({low:+.2f} to {high:+.2f}), {word}"
        )
    return lines
