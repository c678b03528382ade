"""Decide whether two recordings are of the same speaker, and how certain that is.

    speakernet verify a.wav b.wav --model best.pt
    speakernet verify a.wav anna1.wav anna2.wav --model best.pt      several recordings of a person
    speakernet verify a.wav b.wav --model best.pt --far 0.001 --json
    arecord -f S16_LE -r 16000 -t wav | speakernet verify - enrolled.wav --model best.pt

With `-` the first recording is read as it arrives, and an interim answer goes to standard error
after each second. Exit status: 0 same speaker, 1 different speakers, 2 no decision: an error, no
speech, or less than a second of it. The model file needs a calibration (`speakernet calibrate`)
unless --threshold is given. Replayed and synthetic voices are not detected.
"""

import argparse
import dataclasses
import json
import logging
import sys

from speakernet.cli.shared import (
    CHANNEL,
    DECISION,
    MODEL,
    answer_first,
    limits_of,
    load_verifier,
    warn_of_model,
)

SAME = 0
DIFFERENT = 1
ERROR_STATUS = 2
"""The last one also if there is too little speech to decide."""

ARGUMENTS = {
    "first": {
        "help": "a recording, in any format, rate and number of channels; - is standard input"
    },
    "second": {
        "nargs": "+",
        "help": "the recording to compare it with, or several of one person",
    },
    **MODEL,
    **DECISION,
    **CHANNEL,
    "--json": {"action": "store_true", "help": "print a JSON object instead of a sentence"},
    "--verbose": {"action": "store_true", "help": "also show log messages before the answer"},
}

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Embed both recordings, compare and decide."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference import recordings

    limits = limits_of(arguments)
    qualities = []
    enrolled_files = arguments.second
    if recordings.STANDARD_INPUT in enrolled_files:
        raise ValueError(
            "only the first recording can be -, which is standard input; give a file as the second "
            "one"
        )
    if arguments.first == recordings.STANDARD_INPUT and len(enrolled_files) > 1:
        raise ValueError("a pipe is compared with one recording; save it to a file first")
    if arguments.first == recordings.STANDARD_INPUT and arguments.channel:
        raise ValueError("--channel needs whole recordings, not a pipe; save it to a file first")
    # A pipe is read while somebody speaks, so there are several answers; files get one. Both end
    # with the same decision, and with its exit status: a script that opens a door must not take "no
    # decision" for "same".
    with answer_first(is_verbose=arguments.verbose):
        verifier = load_verifier(arguments)
        # Refuse impossible limits before audio is read.
        verifier.decide(0.0, **limits)
        if arguments.first == recordings.STANDARD_INPUT:
            enrolled = verifier.hear(verifier.open(enrolled_files[0], channel=arguments.channel))
            info, begun = recordings.open_piped(sys.stdin.buffer)
            stream = verifier.stream(info.sample_rate, enrolled, **limits)
            for chunk in recordings.chunks_of(sys.stdin.buffer, info, begun):
                for state in stream.add(chunk):
                    interim = state.decision.sentence if state.decision else "no speech yet"
                    sys.stderr.write(f"after {state.seconds:.0f} s: {interim}\n")
            decision = stream.finish().decision
            assert decision is not None, "there is a threshold, and speech"
        else:
            first, *enrolled_heard = [
                verifier.hear(verifier.open(audio, channel=arguments.channel))
                for audio in (arguments.first, *enrolled_files)
            ]
            # A pipe has no warnings, because its sound is not kept.
            qualities = [heard.quality for heard in (first, *enrolled_heard)]
            decision = verifier.verify(first, enrolled_heard, **limits)
        answer = decision.sentence
        if arguments.json:
            answer = json.dumps(dataclasses.asdict(decision))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for warning in recordings.warnings_by_cause(qualities):
        logger.warning("%s", warning)
    warn_of_model(verifier)
    if verifier.rule.caution and decision.log_likelihood_ratio is not None:
        logger.warning("calibration of %s: %s", verifier.name, verifier.rule.caution)
    if not decision.is_made:
        return ERROR_STATUS
    return SAME if decision.same_speaker else DIFFERENT
