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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speakernet.cli.shared import (
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

if TYPE_CHECKING:
    from speakernet.evaluation.fitting import LengthFigures

NO_QUALITY = "none"
QUALITIES = ("duration", "magnitude", "snr", NO_QUALITY)
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
        "help": "with --trials: also calibrate on these measures of both recordings (default: "
        "duration if that lowers Cllr for recordings cut to 1 to 5 s; none: the score alone)",
    },
    "--out": {"type": output_path, "help": "write a new model file instead of changing this one"},
    "--prior": {
        "type": float,
        "default": default_of(EvaluationOptions, "calibration_prior"),
        "help": "target prior to calibrate for (default %(default)s)",
    },
}


# With labelled trials the threshold is for pairs of unknown people. With a store it is for the
# people in it: their own recordings are the targets, and the recordings of the others and of the
# cohort the non-targets.
def run(arguments: argparse.Namespace) -> list[str]:
    """Embed, score, fit and write; return the figures."""
    if (arguments.trials is None) == (arguments.store is None):
        raise ValueError("give either --trials LIST or, for your own people, --store people.db")
    if (arguments.trials and arguments.cohort) or (
        arguments.store and (arguments.audio or arguments.quality)
    ):
        raise ValueError("--audio and --quality need --trials; --cohort needs --store")
    quality = arguments.quality
    # Without the option, durations are tried and used if they help; `none` turns that off.
    if quality and NO_QUALITY in quality:
        if len(quality) > 1:
            raise ValueError(f"--quality {' '.join(quality)}: expected none alone, or measures")
        quality = []
    if not 0 < arguments.prior < 1:
        raise ValueError(f"--prior {arguments.prior}: expected a probability between 0 and 1")
    # Late: --help and a mistyped option need no torch.
    from speakernet.evaluation import durations
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
            quality,
        )
    else:
        cohort = None
        if arguments.cohort:
            cohort = recordings.audio_inputs(arguments.cohort, verifier.sample_rate, sys.stdin)
        with verifier.people(arguments.store, store_key(arguments), must_exist=True) as store:
            fit, results, backup = bulk.calibrate_on_people(
                verifier, store, cohort, arguments.prior, arguments.out
            )
    # Warnings come before the thresholds, where they are not overlooked.
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
    if fit.lengths:
        # Durations are the only measure that is compared; asked for, it is used in any case. The
        # table shows how much too certain a calibration from whole recordings is about short ones.
        lines += length_table(fit.lengths, is_used=bool(quality) or durations.helps(fit.lengths))
    thresholds = counted(len(fit.thresholds), "threshold")
    written = (
        f"{arguments.out or verifier.name} now has a calibration and {thresholds} for "
        f"{verifier.rule.scores} scores"
    )
    if backup:
        written += f" (old file: {backup})"
    return [*lines, *fit.refused, written]


def length_table(lengths: Sequence["LengthFigures"], *, is_used: bool) -> list[str]:
    """What seconds of speech change, one line for each length."""
    lines = [
        "by speech in the test, for speakers left out of the fit; score alone -> with durations;",
        "false accepts and misses at the threshold for 1 %:",
        "  test   trials         Cllr            DCF(0.01)       false accepts %   misses %",
    ]
    # Both columns are from the same trials, cut to these lengths.
    for length in lengths:
        cells = [f"{length.num_targets:,} + {length.num_nontargets:,}".ljust(14)]
        for values, digits in (
            (length.cllr, 3),
            (length.actual_dcf, 3),
            (length.false_accept_percent, 2),
            (length.miss_percent, 1),
        ):
            cells.append(" -> ".join(f"{value:.{digits}f}" for value in values).ljust(15))
        lines.append(f"  {length.label:<6} {' '.join(cells)}".rstrip())
    return [*lines, f"decisions use {'seconds of speech' if is_used else 'the score alone'}"]
