"""Fit calibration and thresholds and write them into a model file, so that `verify` can decide.

    speakernet calibrate --model best.pt --trials trials.txt
                                                         labelled trials of any speakers
    speakernet calibrate --model best.pt --store people.db --cohort others/
                                                         your own people against strangers

Both apply to cosine scores of whole utterances, or to PLDA scores if the file scores by PLDA, as
`verify` and `identify` do. The first time, the old model file is kept next to the new one.
"""

import argparse
import sys
from pathlib import Path

from speakernet.cli import (
    FILE_TO_CHANGE,
    MODEL,
    STORE,
    load_verifier,
    output_path,
    store_key,
    warn_of_model,
)
from speakernet.evaluation.figures import cautions
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import FEW_TARGETS, headline_sentence
from speakernet.options import default_of
from speakernet.terminal import counted

QUALITIES = ("duration", "magnitude", "snr")
"""Measures that a recording alone determines."""

ARGUMENTS = {
    **MODEL,
    "--model": FILE_TO_CHANGE,
    "--trials": {
        "type": Path,
        "help": "labelled trial list with `1 enrol test` or `0 enrol test` on each line",
    },
    "--audio": {
        "type": Path,
        "help": "folder or packed corpus with the list's audio (default: beside the list)",
    },
    **STORE,
    "--store": {"type": Path, "help": "the store of people, such as people.db"},
    "--cohort": {
        "nargs": "+",
        "help": "with --store: recordings of strangers (files, folders, lists)",
    },
    "--quality": {
        "nargs": "+",
        "choices": QUALITIES,
        "default": [],
        "help": "with --trials: also calibrate on these measures of both recordings",
    },
    "--out": {"type": output_path, "help": "write a new model file instead of changing this one"},
    "--prior": {
        "type": float,
        "default": default_of(EvaluationOptions, "calibration_prior"),
        "help": "target prior to calibrate for (default %(default)s)",
    },
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Embed, score, fit and write; return the figures."""
    if (arguments.trials is None) == (arguments.store is None):
        raise ValueError("give either --trials LIST or, for your own people, --store people.db")
    if (arguments.trials and arguments.cohort) or (
        arguments.store and (arguments.audio or arguments.quality)
    ):
        raise ValueError("--audio and --quality need --trials; --cohort needs --store")
    if not 0 < arguments.prior < 1:
        raise ValueError(f"--prior {arguments.prior}: expected a probability between 0 and 1")
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference import bulk, decision, recordings

    verifier = load_verifier(arguments)
    warn_of_model(verifier)
    if arguments.store is None:
        fit, results, backup = bulk.calibrate_on_trials(
            verifier,
            arguments.trials,
            arguments.audio,
            arguments.prior,
            arguments.out,
            arguments.quality,
        )
    else:
        cohort = None
        if arguments.cohort:
            cohort = recordings.audio_inputs(arguments.cohort, verifier.sample_rate, sys.stdin)
        with verifier.people(arguments.store, store_key(arguments), must_exist=True) as store:
            fit, results, backup = bulk.calibrate_on_people(
                verifier, store, cohort, arguments.prior, arguments.out
            )
    notes = cautions(results)
    if arguments.cohort:
        notes.append(
            "each cohort recording counts as one speaker; if a person has several, the interval is "
            "too narrow"
        )
    num_targets = results.num_targets or 0
    if num_targets < FEW_TARGETS:
        notes.append(
            f"{num_targets} same-speaker pairs are too few to rely on; use {FEW_TARGETS} or more, "
            "from more people"
        )
    lines = [headline_sentence(results), *notes]
    for threshold in fit.thresholds:
        lines.append(f"threshold {decision.described_threshold(threshold)}")
    thresholds = counted(len(fit.thresholds), "threshold")
    written = (
        f"{arguments.out or verifier.name} now has a calibration and {thresholds} for "
        f"{verifier.rule.scores} scores of whole utterances"
    )
    if backup:
        written += f" (old file: {backup})"
    return [*lines, *fit.refused, written]
