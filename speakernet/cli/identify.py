"""Identify which person in a store is speaking in a recording, or that it is a stranger.

    speakernet identify x.wav --model best.pt --store people.db

The first line is the answer, `NAME score …` or `unknown score …`, with threshold and odds; the
nearest people follow. A stranger is compared with everybody in the store, so --far is the share of
strangers that may be accepted as any of them. Replayed and synthetic voices are not detected.
"""

import argparse
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING

from speakernet.cli.shared import (
    CHANNEL,
    DECISION,
    MODEL,
    STORE,
    answer_first,
    limits_of,
    load_verifier,
    store_key,
    warn_of_model,
)
from speakernet.terminal import counted

if TYPE_CHECKING:
    from speakernet.inference.identification import Identification

DEFAULT_TOP = 5

ARGUMENTS = {
    "audio": {"help": "a recording: any format, rate and number of channels"},
    **MODEL,
    **STORE,
    **CHANNEL,
    "--top": {
        "type": int,
        "default": DEFAULT_TOP,
        "help": "number of nearest people to show (default %(default)s)",
    },
    **DECISION,
    "--far": {
        "type": float,
        "metavar": "RATE",
        "help": "share of strangers that may be accepted as anybody in the store (default 0.01)",
    },
    "--json": {"action": "store_true", "help": "print a JSON object instead of text"},
    "--verbose": {"action": "store_true", "help": "also show log messages before the answer"},
}

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Embed the recording, compare it with everybody, and answer."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.enrolment import differing_channels
    from speakernet.inference.identification import identify
    from speakernet.inference.recordings import warnings_by_cause

    if arguments.top < 1:
        raise ValueError(f"--top {arguments.top}: expected at least 1")
    # The answer comes first on the screen, then what may be wrong with it. Programs read --json,
    # where all of it is one object.
    with answer_first(is_verbose=arguments.verbose):
        verifier = load_verifier(arguments)
        heard = verifier.hear(verifier.open(arguments.audio, channel=arguments.channel))
        with verifier.people(arguments.store, store_key(arguments), must_exist=True) as store:
            identification = identify(
                verifier, store, heard, top=arguments.top, **limits_of(arguments)
            )
            # The nearest person's recordings show whether they came over another kind of channel, a
            # frequent reason for a low score.
            nearest = []
            if identification.candidates:
                nearest = store.recordings(identification.candidates[0][0])
        if arguments.json:
            lines = [json.dumps(dataclasses.asdict(identification), ensure_ascii=False)]
        else:
            lines = answer_lines(identification, arguments.far)
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
    for warning in warnings_by_cause([heard.quality]):
        logger.warning("%s", warning)
    for warning in differing_channels([heard.quality], nearest):
        logger.warning("%s", warning)
    warn_of_model(verifier)
    return 0


def answer_lines(answer: "Identification", requested_rate: float | None) -> list[str]:
    """The answer, the nearest people, and how far the answer can be trusted."""
    # Late: --help and a mistyped option need no numpy.
    from speakernet.inference.decision import told_apart

    decision = answer.decision
    if decision is None:
        return ["unknown", "nobody is enrolled in this store"]
    name = answer.name or "unknown"
    score, threshold = told_apart(decision.score, decision.threshold)
    line = f"{name} score {score} threshold {threshold}"
    if decision.log_likelihood_ratio is not None:
        line += f" log-likelihood-ratio {decision.log_likelihood_ratio:.2f}"
    lines = [line]
    for row, (candidate, similarity) in enumerate(answer.candidates, start=1):
        lines.append(f"  {row}. {similarity:.4f} {candidate}")
    if not decision.is_made:
        lines.append(decision.sentence)
    # Threshold and odds answer different questions and can disagree near the border, so both are
    # shown.
    if answer.name is None and decision.same_speaker:
        lines.append("the score reaches the threshold, but two speakers are more likely than one")
    # A stranger can be mistaken for every enrolled person, so the rate is at most that of a pair
    # times the number of people, and lower if their voices are alike: hence "up to".
    if answer.stranger_rate is not None and decision.false_accept_rate is not None:
        people = counted(answer.num_people, "person")
        line = (
            "on the list it was fitted on, the threshold accepts "
            f"{100 * decision.false_accept_rate:.3g} % of different-speaker pairs: with "
            f"{people} enrolled, up to {100 * answer.stranger_rate:.3g} % of strangers may be "
            "accepted as one of them"
        )
        if requested_rate is not None and answer.stranger_rate > requested_rate:
            line += (
                f", more than the {100 * requested_rate:.3g} % asked for; the model file has no "
                "stricter threshold"
            )
        lines.append(line)
    return lines
