"""Adapt a model to recordings of your own telephones, microphones or rooms.

    speakernet adapt --model best.pt --recordings calls/            no speaker labels needed
    speakernet adapt --model best.pt --recordings calls/ --labels folders     one per speaker
    speakernet adapt --model best.pt --recordings calls/ --labels who.csv --trials trials.txt

A back end (mean, whitening, LDA, WCCN or PLDA) is fitted to the recordings and written to a new
model file, which every command accepts; the network itself does not change. With labels, the best
back end is chosen on held-out speakers, and the new file is calibrated. People have to be enrolled
again, because a store belongs to one model.
"""

import argparse
from pathlib import Path

from speakernet.cli.shared import FILE_TO_CHANGE, MODEL, is_own, output_path
from speakernet.data.lists import read_trials
from speakernet.evaluation.options import ADAPTATIONS
from speakernet.terminal import counted

ARGUMENTS = {
    **MODEL,
    "--model": FILE_TO_CHANGE,
    "--recordings": {
        "nargs": "+",
        "required": True,
        "help": "recordings of the target domain: files, folders, lists, or a packed corpus",
    },
    "--labels": {
        "help": (
            "`folders` (one per speaker), a list with `speaker path` on each line, or a CSV "
            "with path and speaker"
        )
    },
    "--out": {"type": output_path, "help": "output file (default: MODEL.adapted.pt)"},
    "--method": {
        "choices": ADAPTATIONS,
        "default": "auto",
        "help": "what to fit (default: with labels the best, otherwise whitening, or mean if "
        "recordings are few)",
    },
    "--out-of-domain": {
        "metavar": "FOLDER",
        "help": "other recordings, one folder per speaker, for coral and plda",
    },
    "--plda": {
        "metavar": "FILE",
        "help": "import the PLDA of Kaldi (binary or text) or wespeaker (HDF5)",
    },
    "--mean": {
        "metavar": "FILE",
        "help": "with --plda: Kaldi's mean vector (default: the recordings' own mean)",
    },
    "--transform": {
        "metavar": "FILE",
        "help": "with --plda: Kaldi's matrix to apply first, such as an LDA",
    },
    "--trials": {
        "type": Path,
        "help": "labelled trial list of other people, on which both models are compared",
    },
    "--audio": {
        "type": Path,
        "help": "folder or packed corpus with the list's audio (default: beside the list)",
    },
}


def outputs(arguments: argparse.Namespace) -> dict[Path, bool]:
    """The adapted model file."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.adapt import adapted_path

    path = adapted_path(arguments.model, arguments.out)
    return {path: is_own(path)}


def run(arguments: argparse.Namespace) -> list[str]:
    """Fit, choose and write; return lines on what was tried and chosen."""
    # Kaldi's files hold a back end that is already fitted, so they exclude the options of a fit.
    if arguments.plda is None and (arguments.mean or arguments.transform):
        raise ValueError("--mean and --transform need --plda FILE")
    if arguments.plda is not None and (arguments.labels or arguments.method != "auto"):
        raise ValueError("--plda imports a fitted back end; leave out --labels and --method")
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference import adapt, decision

    method = arguments.method
    if arguments.plda:
        method = adapt.ForeignFiles(arguments.plda, arguments.mean, arguments.transform)
    comparison = None
    if arguments.trials:
        comparison = adapt.Comparison(read_trials(arguments.trials), arguments.audio)
    # Only a back end behind the network is fitted: a few hundred recordings are too few to train
    # on.
    adapted = adapt.adapt(
        arguments.model,
        arguments.recordings,
        labels=arguments.labels,
        out=arguments.out,
        method=method,
        out_of_domain=arguments.out_of_domain,
        comparison=comparison,
        device=arguments.device,
    )
    lines = []
    if adapted.tried:
        lines.append("EER on held-out speakers:")
        lines += [f"  {line}" for line in adapt.in_words(adapted.tried)]
    fitted = f"{adapted.method}, fitted on {counted(adapted.num_recordings, 'recording')}"
    if adapted.num_speakers:
        fitted += f" of {counted(adapted.num_speakers, 'speaker')}"
    lines += [fitted, *adapted.notes]
    # Without labels there are no trials to calibrate on, and the old calibration does not hold for
    # the new scores, so it was dropped.
    path = adapted.path
    if adapted.fit is None:
        command = f"speakernet calibrate --model {path} --trials LIST"
        lines.append(f"no calibration; fit one with: {command}")
    else:
        for threshold in adapted.fit.thresholds:
            lines.append(f"threshold {decision.described_threshold(threshold)}")
    return [*lines, f"{path} was written; {arguments.model} is unchanged"]
