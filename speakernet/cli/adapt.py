"""Adapt a model to recordings of your own telephones, microphones or rooms.

    speakernet adapt --model best.pt --recordings calls/                      nobody's name is needed
    speakernet adapt --model best.pt --recordings calls/ --labels folders     one folder a speaker, calls below it
    speakernet adapt --model best.pt --recordings calls/ --labels who.csv --trials trials.txt

A back end (mean, whitening, LDA, WCCN or PLDA) is fitted on them and written into another model file, which every
command uses as the first; the model itself stays as it is. With labels the best one is chosen on speakers that are left
out of its fit, and the file gets a calibration. People have to be enrolled again: their stores belong to one model.
"""

import argparse
from pathlib import Path

from speakernet.cli import FILE_TO_CHANGE, MODEL
from speakernet.evaluation.options import ADAPTATIONS
from speakernet.terminal import counted

ARGUMENTS = {
    **MODEL,
    "--model": FILE_TO_CHANGE,
    "--recordings": {
        "nargs": "+",
        "required": True,
        "help": "recordings of the target domain: files, folders, lists, a packed corpus, or the .npz of `embed`",
    },
    "--labels": {
        "help": "`folders` (one a speaker), a list with `speaker path` a line, or a CSV with path and speaker"
    },
    "--out": {"type": Path, "help": "the file to write (default: MODEL.adapted.pt)"},
    "--method": {"choices": ADAPTATIONS, "default": "auto", "help": "what is fitted (default: the best, or whitening)"},
    "--out-of-domain": {"metavar": "FOLDER", "help": "other recordings, a folder a speaker, for coral and plda"},
    "--plda": {"metavar": "FILE", "help": "import the PLDA of Kaldi (binary or text) or wespeaker (HDF5)"},
    "--mean": {"metavar": "FILE", "help": "with --plda: Kaldi's mean vector (default: the recordings' own mean)"},
    "--transform": {"metavar": "FILE", "help": "with --plda: Kaldi's matrix that is applied before it, such as an LDA"},
    "--trials": {"type": Path, "help": "labelled trial list of other people, to compare both models on"},
    "--audio": {"type": Path, "help": "folder or packed corpus of its audio; default: beside the list"},
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Fit, choose, write; what was tried and chosen."""
    if arguments.plda is None and (arguments.mean or arguments.transform):
        raise ValueError("--mean and --transform go with --plda FILE")
    if arguments.plda is not None and (arguments.labels or arguments.method != "auto"):
        raise ValueError("--plda imports what was fitted elsewhere; leave out --labels and --method")
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference import adapt, decision

    foreign = adapt.ForeignFiles(arguments.plda, arguments.mean, arguments.transform) if arguments.plda else None
    found = adapt.adapt(
        arguments.model,
        arguments.recordings,
        labels=arguments.labels,
        out=arguments.out,
        method=arguments.method,
        out_of_domain=arguments.out_of_domain,
        foreign=foreign,
        trials=arguments.trials,
        audio=arguments.audio,
        device=arguments.device,
    )
    tried = f"EER of speakers that were left out of the fit: {adapt.in_words(found.tried)}"
    people = f" of {counted(found.num_speakers, 'speaker')}" if found.num_speakers else ""
    fitted = f"{found.method}, fitted on {counted(found.num_recordings, 'recording')}{people}"
    thresholds = [f"no calibration: speakernet calibrate --model {found.path} --trials LIST fits one"]
    if found.fit is not None:
        thresholds = [f"threshold {decision.described_threshold(one)}" for one in found.fit.thresholds]
    written = f"{found.path} was written; {arguments.model} is unchanged"
    return [*([tried] if found.tried else []), fitted, *found.notes, *thresholds, written]
