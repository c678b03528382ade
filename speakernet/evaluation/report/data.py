"""What a report is made of: the files of a run folder, and the few arrays that no other file holds.

`results.json`, `scores.txt`, `metrics.jsonl` and `config.yaml` are read as they lie there; labels, log-likelihood
ratios and the embedding map are kept in `report_arrays.npz`, so that a report can be made again without the trial list,
the audio or the model.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import ListError, TrialList
from speakernet.evaluation.cautions import CHOSEN_ON_REPORTED
from speakernet.evaluation.decisions import Decisions, read_llrs
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import find_scores, read_scores
from speakernet.files import FileError, atomic_write, open_text, read_arrays, reading
from speakernet.run_folder import DECISIONS, EVALUATIONS, METRICS, RESULTS, SCORES

logger = logging.getLogger(__name__)

ARRAYS_NAME = "report_arrays.npz"
ARRAYS_EXPECTED = "the arrays of a report; evaluate again to write them anew"
KEPT_ARRAYS = (
    ("labels", "iu", 1),
    ("llrs", "f", 1),
    ("map_points", "f", 2),
    ("map_speakers", "iu", 1),
    ("map_names", "U", 1),
    ("map_shares", "f", 1),
)
"""Name, kinds of numbers and dimensions of what `keep_arrays` writes."""
SECOND_STAGE = "large_margin"
COUNTED = ("epoch", "step")
"""Folder of a run's large-margin stage, within the run folder."""
MAP_SPEAKERS = 12
MAP_UTTERANCES_EACH = 60


@dataclass(frozen=True)
class EmbeddingMap:
    """Utterances of some speakers in the plane of their two main axes.

    Attributes:
        points: (utterances, 2) float32.
        speakers: row of `names` of each utterance, int64 (utterances,).
        names: of the speakers.
        shares: of the variance of these utterances on each axis.
    """

    points: np.ndarray
    speakers: np.ndarray
    names: list[str]
    shares: list[float]


@dataclass(frozen=True)
class RunData:
    """Everything that a page may show of one run; what is missing is None or empty.

    Attributes:
        folder: where it lies.
        name: how it is called beside others.
        results: of `results.json`; None where nothing was evaluated yet.
        metrics: lines of `metrics.jsonl`.
        config: text of `config.yaml`.
        trials: with labels where they are known.
        scores: (trials,) float64.
        llrs: calibrated scores, (trials,).
        embedding_map: of some speakers.
        speakers: number of the speaker of each utterance, int (utterances,).
        speaker_names: by number; empty where nobody knows them.
        durations: seconds of each utterance, (utterances,).
    """

    folder: Path
    name: str
    results: Results | None
    metrics: list[dict[str, Any]]
    config: str
    trials: TrialList | None = None
    scores: np.ndarray | None = None
    llrs: np.ndarray | None = None
    embedding_map: EmbeddingMap | None = None
    speakers: np.ndarray | None = None
    speaker_names: Sequence[str] = ()
    durations: np.ndarray | None = None

    @property
    def was_trained_here(self) -> bool:
        """Whether the folder is that of a training, and not of an evaluation of its own."""
        return (self.folder / METRICS).is_file()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of the evaluations during training, in order."""
        return [one for one in self.metrics if one.get("kind") == "evaluation" and is_number(one.get("eer_percent"))]

    @property
    def decisions(self) -> Decisions | None:
        """What can be said of each trial where a list was scored that has no error rate."""
        if self.results is None or self.results.eer_percent is not None or self.trials is None or self.scores is None:
            return None
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    @property
    def labels(self) -> np.ndarray | None:
        """(trials,) where the scores have labels of both kinds, else None."""
        labels = None if self.trials is None or self.scores is None else self.trials.labels
        if labels is None or not 0 < np.count_nonzero(labels) < len(labels):
            return None
        return labels


def read_run(folder: str | Path, name: str = "", given: tuple[TrialList, np.ndarray] | None = None) -> RunData:
    """Read what lies in a run folder (or in the folder of an evaluation).

    Args:
        folder: to read.
        name: how to call the run; its folder's name where empty.
        given: trials and scores, where the caller has them; else `scores.txt` is read.

    Raises:
        ValueError: it holds neither results nor metrics, or one of the files is broken.
    """
    folder = Path(folder)
    results = read_results(folder / "results.json")
    run_folder = _run_folder(folder, results)
    metrics = _read_stages(run_folder)
    if results is None and not metrics:
        raise ValueError(f"{folder}: neither results.json nor metrics.jsonl; give the folder of a run or an evaluation")
    config_path = folder / "config.yaml"
    if not config_path.is_file():
        config_path = run_folder / "config.yaml"
    config = ""
    if config_path.is_file():
        with reading(config_path, "a configuration in UTF-8"), open_text(config_path) as file:
            config = file.read()
    if results is not None and results.training is None and run_folder != folder:
        # An evaluation of its own knows nothing of the training; the run that it scored does.
        trained = read_results(run_folder / "results.json")
        results = replace(results, training=trained.training if trained else None)
    run = RunData(folder, name or folder.resolve().name, results, metrics, config)
    if given is not None:
        return replace(run, trials=given[0], scores=given[1])
    run = _with_arrays(run)
    if (folder / "scores.txt").is_file():
        found = read_scores(folder / "scores.txt")
        run = replace(run, trials=replace(found.trials, labels=_labels(run, len(found.scores))), scores=found.scores)
    if (folder / DECISIONS).is_file():
        run = replace(run, llrs=read_llrs(folder / DECISIONS))
    return run


def keep_arrays(run: RunData) -> None:
    """Write what only the caller had, so that `read_run` finds it later."""
    arrays: dict[str, Any] = {}
    if run.trials is not None and run.trials.labels is None:
        # Log-likelihood ratios are in decisions.csv, and nobody knows who speaks.
        return
    if run.trials is not None and run.trials.labels is not None:
        arrays["labels"] = run.trials.labels.astype(np.int8)
    if run.llrs is not None:
        # Half the size; a curve is drawn from it, no figure is computed.
        arrays["llrs"] = run.llrs.astype(np.float32)
    if run.embedding_map is not None:
        arrays["map_points"] = run.embedding_map.points
        arrays["map_speakers"] = run.embedding_map.speakers
        arrays["map_names"] = np.array(run.embedding_map.names, dtype=np.str_)
        arrays["map_shares"] = np.array(run.embedding_map.shares)
    for name in ("speakers", "durations"):
        if (array := getattr(run, name)) is not None:
            arrays[name] = array
    if run.speaker_names:
        arrays["speaker_names"] = np.array(run.speaker_names, dtype=np.str_)
    if arrays:
        with atomic_write(run.folder / ARRAYS_NAME, "wb") as file:
            np.savez_compressed(file, **arrays)


def embedding_map(embeddings: np.ndarray, speakers: np.ndarray, names: list[str]) -> EmbeddingMap | None:
    """The plane of the two main axes of some speakers' utterances; None with fewer than two speakers of two each.

    Principal components, not t-SNE or UMAP: they are linear and have no settings, so a gap in the picture is a gap in
    the embeddings, and the same embeddings give the same picture. The speakers with the most utterances are shown.

    Args:
        embeddings: (utterances, dim), of length 1.
        speakers: number of each utterance's speaker, (utterances,).
        names: of the utterances.
    """
    # Speakers with one utterance would be single points among groups.
    counts = np.bincount(speakers)
    chosen = np.argsort(-counts, kind="stable")[:MAP_SPEAKERS]
    chosen = chosen[counts[chosen] >= 2]
    if len(chosen) < 2:
        return None
    rows = [np.flatnonzero(speakers == speaker)[:MAP_UTTERANCES_EACH] for speaker in chosen]
    labels = np.repeat(np.arange(len(chosen)), [len(one) for one in rows])
    table = embeddings[np.concatenate(rows)].astype(np.float64)
    # SVD of the centred table is the principal components, without a covariance matrix.
    centred = table - table.mean(axis=0)
    left, spread, _ = np.linalg.svd(centred, full_matrices=False)
    total = float(np.square(spread).sum()) or 1.0
    points = (left[:, :2] * spread[:2]).astype(np.float32)
    if points.shape[1] < 2:
        return None
    # The sign of an axis is arbitrary: fixed, so that the same run gives the same picture.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)
    shown = [_speaker_name([names[row] for row in one], number) for number, one in enumerate(rows)]
    return EmbeddingMap(points, labels, shown, [float(one**2 / total) for one in spread[:2]])


def _speaker_name(utterances: list[str], number: int) -> str:
    """The last folder that all utterances of a speaker share, else a number."""
    shared = ""
    for parts in zip(*(name.replace("\\", "/").split("/")[:-1] for name in utterances), strict=False):
        if len(set(parts)) > 1:
            break
        shared = parts[0]
    return shared or f"speaker {number + 1}"


def _with_arrays(run: RunData) -> RunData:
    path = run.folder / ARRAYS_NAME
    if not path.is_file():
        return run
    with reading(path, ARRAYS_EXPECTED):
        arrays = read_arrays(path, ARRAYS_EXPECTED)
        _check_arrays(arrays, path)
    drawn = None
    if "map_points" in arrays:
        shown = [str(one) for one in arrays["map_names"]]
        drawn = EmbeddingMap(arrays["map_points"], arrays["map_speakers"], shown, arrays["map_shares"].tolist())
    return replace(
        run,
        llrs=arrays.get("llrs"),
        embedding_map=drawn,
        speakers=arrays.get("speakers"),
        speaker_names=arrays.get("speaker_names", np.empty(0, dtype=np.str_)).tolist(),
        durations=arrays.get("durations"),
    )


def _labels(run: RunData, num_scores: int) -> np.ndarray | None:
    """Labels of the scores, from the arrays beside them."""
    path = run.folder / ARRAYS_NAME
    if run.results is not None and run.results.why_no_eer and run.results.num_targets is None:
        return None
    if path.is_file():
        labels = read_arrays(path, ARRAYS_EXPECTED).get("labels")
        if labels is not None and labels.shape == (num_scores,):
            return labels
    logger.warning("%s: no labels are kept: the report has no curves of errors", run.folder)
    return None


def list_in_common(paths: Sequence[Path]) -> TrialList:
    """The labelled list whose scores all these files and folders hold, from the labels kept in one of them.

    Raises:
        ListError: no labels are kept, or there is no such list.
    """
    refused: ListError | None = None
    for path in paths:
        for candidate in (path, *sorted((path / EVALUATIONS).glob("*/"))):
            file = candidate / SCORES if candidate.is_dir() else candidate
            if not file.is_file():
                continue
            trials = read_scores(file).trials
            if candidate.is_dir():
                run = read_run(candidate)
                trials = replace(run.trials, source=run.results.list_name() if run.results else str(file))
            if trials.labels is None:
                continue
            try:
                for other in paths:
                    find_scores(other, trials)
                return trials
            except ListError as error:
                refused = error
    if refused:
        raise refused
    raise ListError(f"{', '.join(map(str, paths))}: no labelled scores; give their list with --trials")


def chosen_on_reported(scores: Path) -> str:
    """The warning that a score file's model was selected on the same list, from the results beside it; else empty."""
    results = read_results(scores.with_name(RESULTS))
    warnings = (results.warnings if results else None) or []
    return next((one for one in warnings if one.startswith(CHOSEN_ON_REPORTED.partition(":")[0])), "")


def is_number(value: object) -> bool:
    """Whether a value of a record can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _run_folder(folder: Path, results: Results | None) -> Path:
    """The folder itself where something was trained in it, else that of the checkpoint that was evaluated."""
    path = (results.checkpoint or {}).get("path") if results else None
    return Path(path).parent if path and not (folder / "metrics.jsonl").is_file() else folder


def _read_stages(folder: Path) -> list[dict[str, Any]]:
    """The run's records, and behind them those of its large-margin stage, whose epochs and steps go on counting."""
    first, second = _read_metrics(folder), _read_metrics(folder / SECOND_STAGE)
    # The second stage counts its own epochs and steps from one.
    ends = {key: max((_count(record, key) for record in first), default=0) for key in ("epoch", "step")}
    for record in second:
        record |= {key: _count(record, key) + end for key, end in ends.items()}
        record["second_stage_from"] = ends
    return first + second


def _count(record: dict[str, Any], key: str) -> float:
    return record[key] if is_number(record.get(key)) else 0


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    records = []
    with reading(path, "a line of JSON for each record"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                # A run that was killed leaves half a line; a report is read while training writes, too.
                logger.warning("%s, line %d: cut off, left out", path, number)
                continue
            if isinstance(record, dict):
                records.append({key: value for key, value in record.items() if _is_drawable(key, value)})
    return records


def _is_drawable(key: str, value: Any) -> bool:
    """Whether a value of a record is what a page makes of it; what is not is left out."""
    if key in COUNTED or key.endswith("_seconds"):
        return is_number(value)
    if key == "eer_interval_percent":
        return isinstance(value, list)
    # Added here, behind the records of a first stage.
    return key != "second_stage_from"


def read_results(path: Path) -> Results | None:
    """What an evaluation wrote; None where there is no such file.

    Raises:
        FileError: damaged, or no results.
    """
    if not path.is_file():
        return None
    with reading(path, "the results of an evaluation; evaluate again to write them anew"), open_text(path) as file:
        return Results.from_dict(json.load(file))


def _check_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Refuse arrays that are not those of a report: they would fail where they are drawn."""
    for name, kinds, dimensions in KEPT_ARRAYS:
        if name in arrays and (arrays[name].dtype.kind not in kinds or arrays[name].ndim != dimensions):
            found = f"{arrays[name].dtype} of {arrays[name].ndim} dimensions"
            raise FileError(f"{path}: {name} is {found}; expected {ARRAYS_EXPECTED}")
    if "map_points" in arrays:
        points, speakers = arrays["map_points"], arrays["map_speakers"]
        is_whole = points.shape == (len(speakers), 2) and len(arrays["map_shares"]) == 2
        if not is_whole or not set(speakers.tolist()) <= set(range(len(arrays["map_names"]))):
            raise FileError(f"{path}: the map's parts do not fit one another; expected {ARRAYS_EXPECTED}")
