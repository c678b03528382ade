"""Compute diarization error rates against a reference of who speaks when.

    speakernet der reference/ hypothesis/ --collar 0.25
    speakernet der reference.rttm ours.rttm theirs.rttm --uem all.uem

Files or folders of RTTM (or CTM with speakers); in a folder, `X.exclusive.rttm` beside `X.rttm` is
left out. With several hypotheses, each is compared with the first on the same bootstrap draws of
recordings; a difference is significant if its 95 % interval excludes zero. Fewer than five
recordings give no interval.
"""

import argparse
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.terminal import MAX_NAMED, counted

if TYPE_CHECKING:
    from speakernet.inference.who.errors import DiarizationErrors
    from speakernet.inference.who.rttm import Channel, SpeakerTurns

ARGUMENTS = {
    "reference": {"type": Path, "help": "an RTTM file or a folder of them"},
    "hypothesis": {"type": Path, "nargs": "+", "help": "the same, from each system to score"},
    "--uem": {"type": Path, "help": "regions to score, with `file channel begin end` on each line"},
    "--collar": {
        "type": float,
        "default": 0.0,
        "metavar": "SECONDS",
        "help": "leave out this many seconds on each side of every reference boundary (default "
        "%(default)s)",
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
NO_SPEECH = "no speech in the reference"

logger = logging.getLogger(__name__)


# DER is the share of speech time that is missed, false or given to the wrong speaker, after the
# best mapping of the hypothesis's speakers to those of the reference. Everything is summed over
# recordings before it is divided, as in md-eval: a mean of shares would give a short recording the
# weight of a long one.
def run(arguments: argparse.Namespace) -> list[str]:
    """Read and compare; return a table, and a sentence for each difference."""
    # Late: --help and a mistyped option need neither NumPy nor SciPy.
    from speakernet.evaluation.figures import MIN_SPEAKERS
    from speakernet.inference.who.errors import diarization_errors, interval
    from speakernet.inference.who.rttm import read_regions, read_turns, with_channels_of

    if arguments.draws < 1:
        raise ValueError(f"--draws {arguments.draws}: expected at least 1")
    if not arguments.collar >= 0:
        raise ValueError(f"--collar {arguments.collar:g}: expected 0 or more seconds")
    reference = read_turns(arguments.reference)
    scored = None
    if arguments.uem:
        scored = with_channels_of(reference, read_regions(arguments.uem))
    systems = []
    draws = []
    for path in arguments.hypothesis:
        turns = with_channels_of(reference, read_turns(path))
        _compare_recordings(arguments.reference, reference, path, turns)
        errors = diarization_errors(
            reference, turns, scored, collar=arguments.collar, skips_overlap=arguments.skip_overlap
        )
        systems.append(errors)
        # Recordings are drawn rather than seconds, because errors within a recording depend on each
        # other.
        draws.append(errors.draws(arguments.draws, arguments.seed)[:, 0])
    no_interval = ""
    if not any(reference.values()):
        no_interval = f"no interval: {NO_SPEECH}"
    elif len(reference) < MIN_SPEAKERS:
        no_interval = (
            f"no interval: too few recordings ({len(reference)}, at least "
            f"{MIN_SPEAKERS} are needed)"
        )
    lines = [HEAD]
    for path, errors, drawn in zip(arguments.hypothesis, systems, draws, strict=True):
        lines.append(_row(str(path)[-23:], errors, slice(None)))
        if arguments.each:
            for row, name in enumerate(errors.names):
                lines.append(_row(f"  {name[-20:]}", errors, slice(row, row + 1)))
        low, high = interval(drawn)
        certainty = f"DER 95 % interval {low:.2f} to {high:.2f}, bootstrap over recordings"
        num_right = f"{errors.num_right} of {counted(len(errors.names), 'recording')}"
        lines.append(
            f"  {no_interval or certainty}; the number of speakers is correct in {num_right}"
        )
    first = arguments.hypothesis[0]
    for path, errors, drawn in zip(arguments.hypothesis[1:], systems[1:], draws[1:], strict=True):
        # All systems get the same draws (one seed), so that hard recordings count equally on both
        # sides.
        low, high = interval(drawn - draws[0])
        word = "not significant" if low <= 0 <= high else "significant"
        certainty = f"interval {low:+.2f} to {high:+.2f}: {word}"
        difference = errors.rates()[0] - systems[0].rates()[0]
        shown = "undefined" if math.isnan(difference) else f"{difference:+.2f}"
        lines.append(f"{path} against {first}: DER {shown}, {no_interval or certainty}")
    return lines


def _compare_recordings(
    reference_path: Path,
    reference: "dict[Channel, SpeakerTurns]",
    path: Path,
    turns: "dict[Channel, SpeakerTurns]",
) -> None:
    """Refuse a hypothesis without a recording of the reference, and name what only one of them
    has.
    """
    # Late: --help and a mistyped option need no NumPy.
    from speakernet.inference.who.rttm import describe_channels

    if not reference.keys() & turns.keys():
        what = "has" if any(turns.values()) else "is empty and is named after"
        first = next(iter(describe_channels(reference)), "")
        raise ValueError(
            f"{path} {what} none of the recordings in {reference_path}, such as {first!r}"
        )
    # Some tools leave out files without speech, so a missing recording is scored as silence. It may
    # also be a mistyped name, so it is reported.
    unlike = reference.keys() ^ turns.keys()
    if unlike:
        channels = list({**reference, **turns})
        names = dict(zip(channels, describe_channels(channels), strict=True))
        logger.warning(
            "only one of %s and the reference has %s; a missing recording counts as silence",
            path,
            ", ".join(names[channel] for channel in sorted(unlike)[:MAX_NAMED]),
        )


def _row(name: str, errors: "DiarizationErrors", rows: slice) -> str:
    """A line of the table; without speech in the reference it says so, and how long the false
    alarms are.
    """
    der, missed, false, confused, jer = errors.rates(rows).tolist()
    if math.isnan(der):
        seconds = errors.false_alarm_seconds(rows)
        return f"{name:<24}undefined: {NO_SPEECH}, {seconds:.2f} s of false alarms"
    return f"{name:<24}{der:>8.2f}{missed:>9.2f}{false:>8.2f}{confused:>10.2f}{jer:>8.2f}"
