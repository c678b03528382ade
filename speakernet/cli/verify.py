"""Say whether two recordings are of one speaker, and how sure that is.

    speakernet verify a.wav b.wav --model best.pt
    speakernet verify a.wav b.wav --model best.pt --far 0.001 --json

Exit status: 0 same speaker, 1 different speakers, 2 every error. The model file needs a calibration (`speakernet
calibrate`), unless --threshold is given. A replayed or synthetic voice is not detected.
"""

import argparse
import dataclasses
import json
import logging
import sys

from speakernet.cli.using import add_decision, add_model, answer_first, load_verifier

SAME, DIFFERENT, ERROR_STATUS = 0, 1, 2
MIN_SPEECH_SECONDS = 1.0

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two recordings, the model, where to decide."""
    parser.add_argument("first", help="a recording: any format, rate and number of channels")
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
    from speakernet.inference.decision import sentence
    from speakernet.inference.quality import inspect_recording, refuse_unusable

    with answer_first(is_verbose=arguments.verbose):
        verifier = load_verifier(arguments)
        # Before audio is read, not after.
        verifier.decide(0.0, false_accept_rate=arguments.far, threshold=arguments.threshold)
        recordings = [verifier.open(one) for one in (arguments.first, arguments.second)]
        qualities = [inspect_recording(one, min_speech_seconds=MIN_SPEECH_SECONDS) for one in recordings]
        for quality in qualities:
            refuse_unusable(quality)
        decision = verifier.verify(*recordings, false_accept_rate=arguments.far, threshold=arguments.threshold)
    text = json.dumps(dataclasses.asdict(decision)) if arguments.json else sentence(decision)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    for quality in qualities:
        for warning in quality.warnings:
            logger.warning("%s: %s", quality.name, warning)
    return SAME if decision.same_speaker else DIFFERENT
