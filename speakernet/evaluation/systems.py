"""The systems of a comparison: the score files of a list below their folders, and what the results
and configurations beside these files say.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import ListError, TrialList
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED
from speakernet.evaluation.files import read_results, read_run
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import read_scores, scores_for
from speakernet.files import read_yaml_file
from speakernet.run_folder import CONFIG, EVALUATIONS, RESULTS, SCORES, evaluation_folder


def find_scores(path: Path, trials: TrialList) -> tuple[Path, np.ndarray]:
    """The score file for a list in a run or evaluation folder (or the file itself), and its
    scores.
    """
    if not path.is_dir():
        return path, scores_for(trials, path)
    evaluations = sorted((path / EVALUATIONS).glob(f"*/{SCORES}"))
    # A run folder has the scores of its own test list, and below eval/ those of other lists, in
    # folders named after them. Only matching the pairs shows which of them belong to this list.
    candidates = [path / SCORES, evaluation_folder(path, trials.source) / SCORES]
    # A list of data.test_lists has a folder with its name there; results identify it by checksum. A
    # folder without alternatives is tried in any case.
    for file in evaluations:
        lists = read_results(file.with_name(RESULTS)).lists or []
        is_of_list = any(listed.get("sha256") == trials.sha256 for listed in lists)
        if is_of_list or len(evaluations) == 1:
            candidates.append(file)
    refused = None
    for file in filter(Path.is_file, candidates):
        try:
            return file, scores_for(trials, file)
        except ListError as error:
            # Not an error yet, because a later candidate may be the right one.
            refused = error
    names = ", ".join(file.parent.name for file in evaluations) or "none"
    raise refused or ListError(
        f"{path} contains no scores of {Path(trials.source).stem} (lists in {EVALUATIONS}: "
        f"{names}); score it with --eval, or give the folder that has its {SCORES}"
    )


def list_in_common(paths: Sequence[Path]) -> TrialList:
    """The labelled list that all these files and folders have scores for, with the labels kept in
    one of them.
    """
    refused = None
    for path in paths:
        # Without --trials, the first labelled list that all systems have scored is used.
        for place in (path, *sorted((path / EVALUATIONS).glob("*/"))):
            trials = _scored_list(place)
            if trials is None or trials.labels is None:
                continue
            try:
                for other in paths:
                    find_scores(other, trials)
                return trials
            except ListError as error:
                refused = refused or error
    names = ", ".join(map(str, paths))
    raise refused or ListError(f"{names}: no labelled scores; give their list with --trials")


def _scored_list(place: Path) -> TrialList | None:
    """The list whose scores are in a file or folder, with the labels that were kept; None without
    scores.
    """
    if place.is_file():
        return read_scores(place)[0]
    if not (place / SCORES).is_file():
        return None
    run = read_run(place)
    return run.trials and replace(run.trials, source=run.list_name)


def common_costs(systems: Iterable[Results]) -> dict[str, Any]:
    """The costs `c_miss` and `c_fa` that all results with costs share; empty if they differ or none
    is known.
    """
    # If the costs differ, none of them suits all systems, and callers use the usual costs of 1.
    known = [results.dcf_costs for results in systems if results.dcf_costs]
    if not known or any(costs != known[0] for costs in known):
        return {}
    return dict(known[0])


def configuration_of(scores: Path) -> Mapping[str, Any]:
    """The sections of the run whose model gave a score file; empty if the run folder is not
    known.
    """
    results = read_results(scores.with_name(RESULTS))
    if results.is_empty:
        return {}
    folders = [scores.parent]
    if results.checkpoint:
        folders.append(Path(results.checkpoint.get("path", "")).parent)
    for folder in folders:
        config = folder / CONFIG
        if config.is_file():
            values = read_yaml_file(config, "a configuration")
            if not isinstance(values, Mapping):
                return {}
            # Another evaluation of the model may have other options than the run.
            return {**values, "evaluation": results.config or values.get("evaluation")}
    return {}


def is_other_seed(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two configurations of runs differ in nothing but `runtime.seed`."""
    values = []
    for configuration in (first, second):
        runtime = configuration.get("runtime")
        if not isinstance(runtime, Mapping):
            return False
        # Any other difference, such as the batch size, makes them two systems.
        values.append({**configuration, "runtime": {**runtime, "seed": None}})
    return values[0] == values[1]


def chosen_on_reported(scores: Path) -> str:
    """The warning, from the results beside a score file, that its model was selected on the same
    list; else empty.
    """
    # Earlier versions wrote "this very list".
    beginning = CHOSEN_ON_REPORTED.partition(" same list")[0]
    for warning in read_results(scores.with_name(RESULTS)).warnings or []:
        if warning.startswith(beginning):
            return warning
    return ""
