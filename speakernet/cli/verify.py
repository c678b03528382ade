"""Say whether two recordings are of one speaker, and how sure that is.

    speakernet verify a.wav b.wav --model best.pt
    speakernet verify a.wav b.wav --model best.pt --far 0.001 --json
    arecord -f S16_LE -r 16000 -t wav | speakernet verify - enrolled.wav --model best.pt

With `-` the first recording is heard as it comes, and after each second a line on standard error says how sure it is
by now.
Exit status: 0 same speaker, 1 different speakers, 2 every error. The model file needs a calibration (`speakernet
calibrate`), unless --threshold is given. A replayed or synthetic voice is not detected.
"""

import argparse
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING

from speakernet.cli import add_decision, add_model, answer_first, load_verifier

if TYPE_CHECKING:
    from speakernet.inference.decision import Decision
    from speakernet.inference.recordings import Recording
    from speakernet.inference.verifier import SpeakerVerifier

STANDARD_INPUT = "-"
SAME, DIFFERENT, ERROR_STATUS = 0, 1, 2
MIN_SPEECH_SECONDS = 1.0

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two recordings, the model, where to decide."""
    parser.add_argument("first", help="a recording: any format, rate and number of channels; - is standard input")
    parser.add_argument("second", help="another one")
    add_model(parser)
    add_decision(parser, "decide where so many different speakers pass, such as 0.01 (the default where it is there)")
    parser.add_argument("--json", action="store_true", help="print one object instead of a sentence")
    parser.add_argument("--verbose", action="store_true", help="log before the answer too")


def run(arguments: argparse.Namespace) -> int:
    """Embed both, compare, decide.

    Raises:
        ValueError: audio or a model that cannot be used, no calibration.
    """
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.recordings import inspect_recording, refuse_unusable, usable

    limits = {"false_accept_rate": arguments.far, "threshold": arguments.threshold}
    with answer_first(is_verbose=arguments.verbose):
        verifier = load_verifier(arguments)
        # Before audio is read, not after.
        verifier.decide(0.0, **limits)
        if arguments.first == STANDARD_INPUT:
            return _verify_live(arguments, verifier, usable(verifier.open(arguments.second)))
        recordings = [verifier.open(one) for one in (arguments.first, arguments.second)]
        qualities = [inspect_recording(one, min_speech_seconds=MIN_SPEECH_SECONDS) for one in recordings]
        for quality in qualities:
            refuse_unusable(quality)
        decision = verifier.decide(verifier.compare(*map(verifier.embed, recordings)), **limits)
    _answer(arguments, decision)
    for quality in qualities:
        for warning in quality.warnings:
            logger.warning("%s: %s", quality.name, warning)
    _say_caution(verifier, decision)
    return SAME if decision.same_speaker else DIFFERENT


def _verify_live(arguments: argparse.Namespace, verifier: "SpeakerVerifier", enrolled: "Recording") -> int:
    """Hear standard input to its end, saying after each second what it is by now."""
    # Needs torch, as above.
    from speakernet.inference.recordings import chunks_of, open_piped

    info, begun = open_piped(sys.stdin.buffer)
    limits = {"false_accept_rate": arguments.far, "threshold": arguments.threshold}
    stream = verifier.stream(info.sample_rate, verifier.embed(enrolled), **limits)
    for chunk in chunks_of(sys.stdin.buffer, info, begun):
        for state in stream.add(chunk):
            assert state.decision is not None, "whether it can decide was asked before"
            sys.stderr.write(f"after {state.seconds:.0f} s: {state.decision.sentence}\n")
    decision = stream.finish().decision
    assert decision is not None
    _answer(arguments, decision)
    _say_caution(verifier, decision)
    return SAME if decision.same_speaker else DIFFERENT


def _say_caution(verifier: "SpeakerVerifier", decision: "Decision") -> None:
    if verifier.rule.caution and decision.log_likelihood_ratio is not None:
        logger.warning("%s: its calibration: %s", verifier.name, verifier.rule.caution)


def _answer(arguments: argparse.Namespace, decision: "Decision") -> None:
    text = json.dumps(dataclasses.asdict(decision)) if arguments.json else decision.sentence
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
