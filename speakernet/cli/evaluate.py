"""Compute error rates of a trained model on a trial list, or of score files from any tool.

    speakernet evaluate --scores scores.txt --trials trials.txt --save_path results/
    speakernet evaluate --config exp01.yaml --initial_model exps/exp01/best.pt

The first form needs no model and no audio; without --trials, labels come from a run folder or the
fourth column of a score file (target or nontarget). The second is `speakernet train --eval`.
Several score files are fused with weights fitted on `--fusion_scores` (the same systems, in the
same order) and `--fusion_trials`.
"""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speakernet.cli import train
from speakernet.cli.shared import is_own, output_path
from speakernet.data.lists import read_trials
from speakernet.evaluation.calibration import AffineCalibration
from speakernet.evaluation.figures import MIN_DRAWS, cautions, figures
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.fitting import fit_calibration
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Results, headline
from speakernet.evaluation.speakers import speakers_of
from speakernet.evaluation.systems import chosen_on_reported, find_scores, list_in_common
from speakernet.files import refuse_overwriting, sha256_of
from speakernet.options import DEFAULT_SEED, default_of
from speakernet.run_folder import (
    BEST,
    DECISIONS,
    EVALUATION_FILES,
    LAST,
    METRICS,
    REPORT,
    SCORES,
)
from speakernet.terminal import counted

logger = logging.getLogger(__name__)

DIGITS = 3
"""Decimals of an EER in percent; score files are compared more closely than runs."""

TAKES_CONFIG = True


ARGUMENTS = {
    **train.ARGUMENTS,
    "--scores": {
        "type": Path,
        "nargs": "+",
        "help": "score files: `enrol test score` per line, in any order",
    },
    "--trials": {
        "type": Path,
        "help": "trial list of the scores (default: labels kept in their folders or files)",
    },
    "--fusion_scores": {
        "type": Path,
        "nargs": "+",
        "help": "scores of the same systems on --fusion_trials",
    },
    "--fusion_trials": {
        "type": Path,
        "help": "labelled trial list on which fusion weights are fitted",
    },
    "--prior": {
        "type": float,
        "default": default_of(EvaluationOptions, "calibration_prior"),
        "help": "target prior for calibration and fusion",
    },
    "--scores_are_llrs": {
        "action": "store_true",
        "help": "scores are log-likelihood ratios (natural log)",
    },
    "--priors": {
        "type": float,
        "nargs": "+",
        "default": default_of(EvaluationOptions, "dcf_target_priors"),
        "help": "target priors of the DCFs",
    },
    "--draws": {
        "type": int,
        "default": default_of(EvaluationOptions, "bootstrap_samples"),
        "help": "bootstrap draws of speakers for the intervals; 0 gives no intervals",
    },
    "--csv": {
        "type": Path,
        "help": "CSV with path and speaker, if file names do not show the speaker",
    },
    "--out --save_path": {
        "dest": "save_path",
        "type": output_path,
        "help": "folder for the results",
    },
}
"""Options for score files; all others are configuration options."""


def outputs(arguments: argparse.Namespace) -> dict[Path, bool]:
    """The files of an evaluation of score files; those of a folder with our report are ours."""
    folder = arguments.save_path
    if folder is None or not arguments.scores:
        return {}
    is_ours = is_own(folder / REPORT)
    paths = [folder / name for name in (*EVALUATION_FILES, DECISIONS)]
    # The scores of one system may be evaluated again in place.
    if is_ours and arguments.scores == [folder / SCORES]:
        paths.remove(folder / SCORES)
    return dict.fromkeys(paths, is_ours)


def run(arguments: argparse.Namespace) -> list[str] | int:
    """Evaluate the score files, or score the test list of the configuration."""
    # Without scores this is `train --eval`, under a name that is easier to find.
    folder = arguments.save_path
    if not arguments.scores:
        if folder:
            arguments.config_arguments += ["--save_path", str(folder)]
        arguments.config_arguments.append("--eval")
        return train.run(arguments)
    if arguments.config_arguments:
        raise ValueError(
            f"{arguments.config_arguments[0]} does not apply to --scores, which runs no model"
        )
    # The files of an evaluation are named like those of a run and would replace its results.
    if folder and any((folder / name).exists() for name in (METRICS, LAST, BEST)):
        raise ValueError(f"{folder} is the folder of a training run; give another one with --out")
    # Scores of any tool get the same figures and report as a run, so that baselines can be
    # compared.
    evaluation = evaluate_scores(arguments)
    lines = [*evaluation.lines(DIGITS), *_details(evaluation.results)]
    if arguments.json:
        lines = [json.dumps(evaluation.results.to_dict(), indent=2)]
    if folder:
        # Late: matplotlib takes a second to import.
        from speakernet.evaluation.report import write_evaluation

        written = write_evaluation(folder, evaluation)
        if not arguments.json:
            lines.append(train.written_line([folder / name for name in written]))
    return lines


def evaluate_scores(arguments: argparse.Namespace) -> Evaluation:
    """Evaluate one score file, or several fused ones."""
    if not all(0 < prior < 1 for prior in (arguments.prior, *arguments.priors)):
        raise ValueError(
            f"--prior {arguments.prior}, --priors {' '.join(map(str, arguments.priors))}: "
            "expected probabilities between 0 and 1"
        )
    if arguments.draws != 0 and arguments.draws < MIN_DRAWS:
        raise ValueError(
            f"--draws {arguments.draws}: expected 0 (no intervals) or at least {MIN_DRAWS}"
        )
    # The options of a configuration, so that both ways to evaluate compute the same figures.
    options = EvaluationOptions(
        dcf_target_priors=arguments.priors,
        bootstrap_samples=arguments.draws,
        calibration_prior=arguments.prior,
    )
    trials = read_trials(arguments.trials) if arguments.trials else list_in_common(arguments.scores)
    files, columns = zip(*(find_scores(path, trials) for path in arguments.scores), strict=True)
    if arguments.save_path and len(files) > 1:
        # The scores of one system are written back unchanged; fused scores would replace one of
        # their inputs.
        refuse_overwriting([arguments.save_path / name for name in EVALUATION_FILES], files)
    fit = _fit(arguments, len(columns))
    # A single system keeps its own scores; fused systems have only the ratios.
    scores = columns[0]
    llrs = scores if arguments.scores_are_llrs else None
    if fit is not None:
        llrs = fit.apply(np.stack(columns, axis=1))  # (trials, systems) -> (trials,)
        if len(columns) > 1:
            scores = llrs
    speakers = speakers_of(trials, arguments.csv)
    # With a fixed seed the same scores always get the same intervals.
    results = figures(trials, scores, speakers, options, DEFAULT_SEED, llrs)
    # With checksums, so that the lists can still be identified months later.
    lists = [("trials", arguments.trials), *(("scores", file) for file in files)]
    is_fitted_here = False
    if fit is not None:
        lists.append(("fusion trials", arguments.fusion_trials))
        is_fitted_here = sha256_of(arguments.fusion_trials) == trials.sha256
    results = dataclasses.replace(
        results,
        lists=[
            {"role": role, "name": path.name, "sha256": sha256_of(path)}
            for role, path in lists
            if path
        ],
        calibration=fit.to_dict() if fit else None,
        command=" ".join(sys.argv),
        warnings=_warnings(results, files, is_fitted_here=is_fitted_here),
    )
    return Evaluation(trials, scores, results, llrs, speakers=speakers)


def _warnings(results: Results, files: Sequence[Path], *, is_fitted_here: bool) -> list[str]:
    """The caveats of the figures, for the report; those not printed beside the figures are also
    logged.
    """
    caveats = cautions(results)
    # Only the run that made the scores knows whether its model was chosen on this list.
    for file in files:
        choice = chosen_on_reported(file)
        if choice:
            caveats.append(f"{file}: {choice}")
    if is_fitted_here:
        caveats.append(
            "weights were fitted on the reported list: error rates and costs are optimistic"
        )
    for caveat in caveats:
        # The interval note is printed beside the figures.
        if caveat != results.interval_note:
            logger.warning("%s", caveat)
    return caveats


def _fit(arguments: argparse.Namespace, num_systems: int) -> AffineCalibration | None:
    """The weights of the systems, fitted on another list; None for a single system without one."""
    paths = arguments.fusion_scores or []
    if not paths and num_systems == 1:
        return None
    # Weights fitted on the reported list are optimistic; that is allowed, but the report says so
    # (`_warnings`).
    if not arguments.fusion_trials or len(paths) != num_systems:
        raise ValueError(
            f"--fusion_scores has {counted(len(paths), 'file')} for {num_systems} in --scores; "
            "give the scores of the same systems in the same order, and their list with "
            "--fusion_trials"
        )
    trials = read_trials(arguments.fusion_trials)
    if trials.labels is None:
        raise ValueError(
            f"{arguments.fusion_trials} has no labels; fusion weights are fitted on a labelled list"
        )
    columns = [find_scores(path, trials)[1] for path in paths]
    names = [path.stem if path.stem != "scores" else path.parent.name for path in arguments.scores]
    return fit_calibration(np.stack(columns, axis=1), trials.labels, arguments.prior, names)


def _details(results: Results) -> list[str]:
    """The figures that the first line leaves out, one per line."""
    if results.eer_percent is None:
        return []
    # The first line names the EER and the minDCFs.
    further = headline(results, DIGITS, further=True)[1 + len(results.min_dcf) :]
    lines = [f"{figure.name}: {figure.text}" for figure in further]
    speakers = counted(results.num_speakers or 0, "speaker")
    lines.append(f"{speakers}, taken from the {results.speaker_rule}")
    if results.interval_note:
        lines.append(results.interval_note)
    return lines
