"""What a report is made of: the files of a run folder, and the few arrays that no other file holds.

`results.json`, `scores.txt`, `metrics.jsonl` and `config.yaml` are read; labels, log-likelihood ratios and the
embedding map are kept in `report_arrays.npz`, so that a report can be made again without the trial list, the audio or
the model.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import ListError, TrialList
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED
from speakernet.evaluation.metrics import missing_kind, refuse_rows
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import Decisions, find_scores, read_llrs, read_scores
from speakernet.files import FileError, atomic_write, open_text, read_arrays, read_yaml, reading
from speakernet.run_folder import CONFIG, DECISIONS, EVALUATIONS, METRICS, RESULTS, SCORES, SECOND_STAGE

logger = logging.getLogger(__name__)

ARRAYS_NAME = "report_arrays.npz"
ARRAYS_EXPECTED = "the arrays of a report; evaluate again to write them"
KEPT_ARRAYS = (
    ("labels", "iu", 1),
    ("llrs", "f", 1),
    ("map_points", "f", 2),
    ("map_speakers", "iu", 1),
    ("map_names", "U", 1),
    ("map_shares", "f", 1),
)
"""Name, kinds of numbers and dimensions of what `keep_arrays` writes."""
COUNTED = ("epoch", "step")
MAP_SPEAKERS = 12
MAP_UTTERANCES_EACH = 60


@dataclass(frozen=True)
class EmbeddingMap:
    """Utterances of some speakers in the plane of their two main axes."""

    points: np.ndarray
    """(utterances, 2) float32."""
    speakers: np.ndarray
    """Row of `names` of each utterance, int64 (utterances,)."""
    names: list[str]
    shares: list[float]
    """Of the variance of these utterances on each axis."""


@dataclass(frozen=True)
class RunData:
    """Everything that a page may show of one run; what is missing is None or empty."""

    folder: Path
    name: str
    """For pages of several runs."""
    results: Results | None
    """None before the first evaluation."""
    metrics: list[dict[str, Any]]
    """Lines of `metrics.jsonl`."""
    config: str
    """Text of `config.yaml`."""
    trials: TrialList | None = None
    scores: np.ndarray | None = None
    """(trials,) float64."""
    llrs: np.ndarray | None = None
    """Calibrated scores, (trials,)."""
    embedding_map: EmbeddingMap | None = None
    speakers: np.ndarray | None = None
    """Number of the speaker of each utterance, int (utterances,)."""
    speaker_names: Sequence[str] = ()
    """By number; empty if they are unknown."""
    durations: np.ndarray | None = None
    """Seconds of each utterance, (utterances,)."""

    @property
    def was_trained_here(self) -> bool:
        """Whether the folder is that of a training, and not of an evaluation alone."""
        return (self.folder / METRICS).is_file()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of the evaluations during training, in order."""
        return [one for one in self.metrics if one.get("kind") == "evaluation" and is_number(one.get("eer_percent"))]

    @property
    def decisions(self) -> Decisions | None:
        """Decisions on each trial of a list without an error rate."""
        if self.results is None or self.results.eer_percent is not None or self.trials is None or self.scores is None:
            return None
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    @property
    def labels(self) -> np.ndarray | None:
        """(trials,) if the scores have labels of both kinds."""
        labels = None if self.trials is None or self.scores is None else self.trials.labels
        return None if labels is None or missing_kind(labels) else labels

    @property
    def list_name(self) -> str:
        """The name of the list that was scored."""
        name = self.results.list_name() if self.results else ""
        return name or (Path(self.trials.source).name if self.trials is not None else "a list without a name")

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The run's sections, or the section evaluation of an evaluation alone."""
        section = (self.results.config if self.results else None) or {}
        found = read_yaml(self.config, str(self.folder / CONFIG)) if self.config else {"evaluation": section}
        return found if isinstance(found, Mapping) else {}

    @property
    def training_seconds(self) -> float:
        """Time spent on steps and evaluations, from the records of the run; interruptions do not count."""
        seconds, before = 0.0, 0
        for one in self.metrics:
            if one.get("kind") == "evaluation":
                seconds += float(one.get("evaluation_seconds", 0.0))
            elif one.get("kind") == "step":
                step = int(one.get("step", 0))
                # `step_seconds` is a mean over the steps since the record before.
                seconds += max(0, step - before) * float(one.get("step_seconds", 0.0))
                before = step
        return seconds


def read_run(folder: str | Path, name: str = "", given: tuple[TrialList, np.ndarray] | None = None) -> RunData:
    """Read a run folder, or the folder of an evaluation."""
    folder = Path(folder)
    results = read_results(folder / RESULTS)
    run_folder = folder
    if results is not None and results.checkpoint and not (folder / METRICS).is_file():
        # Of an evaluation alone: the run whose checkpoint was scored.
        run_folder = Path(results.checkpoint.get("path", "")).parent
    metrics = _read_stages(run_folder)
    if results is None and not metrics:
        raise FileError(f"{folder}: neither {RESULTS} nor {METRICS}; give the folder of a run or an evaluation")
    config_path = folder / CONFIG if (folder / CONFIG).is_file() else run_folder / CONFIG
    config = ""
    if config_path.is_file():
        with reading(config_path, "a configuration in UTF-8"), open_text(config_path) as file:
            config = file.read()
    if results is not None and results.training is None and run_folder != folder:
        trained = read_results(run_folder / RESULTS)
        results = replace(results, training=trained.training if trained else None)
    run = RunData(folder, name or folder.resolve().name, results, metrics, config)
    if given is not None:
        return replace(run, trials=given[0], scores=given[1])
    arrays = _read_kept(folder / ARRAYS_NAME)
    drawn = None
    if "map_points" in arrays:
        shown = [str(one) for one in arrays["map_names"]]
        drawn = EmbeddingMap(arrays["map_points"], arrays["map_speakers"], shown, arrays["map_shares"].tolist())
    run = replace(
        run,
        llrs=arrays.get("llrs"),
        embedding_map=drawn,
        speakers=arrays.get("speakers"),
        speaker_names=arrays.get("speaker_names", np.empty(0, dtype=np.str_)).tolist(),
        durations=arrays.get("durations"),
    )
    if (folder / SCORES).is_file():
        found = read_scores(folder / SCORES)
        refuse_rows(~np.isfinite(found.scores), f"of {folder / SCORES} NaN or infinite")
        labels = arrays.get("labels")
        if labels is None or labels.shape != found.scores.shape:
            labels = None
            if results is None or not results.why_no_eer or results.num_targets is not None:
                logger.warning("%s: no labels are kept: the report has no curves of errors", folder)
        run = replace(run, trials=replace(found.trials, labels=labels), scores=found.scores)
    return replace(run, llrs=read_llrs(folder / DECISIONS)) if (folder / DECISIONS).is_file() else run


def keep_arrays(run: RunData) -> None:
    """Write what no other file of the folder holds, so that `read_run` finds it later."""
    if run.trials is None or run.trials.labels is None:
        # Log-likelihood ratios are in decisions.csv, and speakers are unknown.
        return
    # Half the size for what is only drawn.
    llrs = None if run.llrs is None else run.llrs.astype(np.float32)
    arrays: dict[str, Any] = {"labels": run.trials.labels.astype(np.int8), "llrs": llrs}
    if run.embedding_map is not None:
        arrays |= {
            "map_points": run.embedding_map.points,
            "map_speakers": run.embedding_map.speakers,
            "map_names": np.array(run.embedding_map.names, dtype=np.str_),
            "map_shares": np.array(run.embedding_map.shares),
        }
    names = np.array(run.speaker_names, dtype=np.str_) if run.speaker_names else None
    arrays |= {"speakers": run.speakers, "durations": run.durations, "speaker_names": names}
    with atomic_write(run.folder / ARRAYS_NAME, "wb") as file:
        np.savez_compressed(file, **{name: array for name, array in arrays.items() if array is not None})


def embedding_map(embeddings: np.ndarray, speakers: np.ndarray, names: list[str]) -> EmbeddingMap | None:
    """The plane of the two main axes of some speakers' utterances; None with fewer than two speakers of two each.

    Principal components, not t-SNE or UMAP: they are linear and have no settings, so a gap in the picture is a gap in
    the embeddings, and the same embeddings give the same picture. The speakers with the most utterances are shown.
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
    left, spread, _ = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    total = float(np.square(spread).sum()) or 1.0
    points = (left[:, :2] * spread[:2]).astype(np.float32)
    if points.shape[1] < 2:
        return None
    # The sign of an axis is arbitrary: fixed, so that the same run gives the same picture.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)
    shown = []
    for number, one in enumerate(rows):
        # The last folder that all utterances of the speaker share, else a number.
        folders = zip(*(names[row].replace("\\", "/").split("/")[:-1] for row in one), strict=False)
        shared = ""
        for level in folders:
            if len(set(level)) > 1:
                break
            shared = level[0]
        shown.append(shared or f"speaker {number + 1}")
    return EmbeddingMap(points, labels, shown, [float(one**2 / total) for one in spread[:2]])


def list_in_common(paths: Sequence[Path]) -> TrialList:
    """The labelled list whose scores all these files and folders hold, from the labels kept in one of them."""
    refused: ListError | None = None
    for path in paths:
        for candidate in (path, *sorted((path / EVALUATIONS).glob("*/"))):
            file = candidate / SCORES if candidate.is_dir() else candidate
            if not file.is_file():
                continue
            trials: TrialList | None = read_scores(file).trials
            if candidate.is_dir():
                run = read_run(candidate)
                source = (run.results.list_name() if run.results else "") or str(file)
                trials = run.trials and replace(run.trials, source=source)
            if trials is None or trials.labels is None:
                continue
            try:
                for other in paths:
                    find_scores(other, trials)
                return trials
            except ListError as error:
                refused = error
    raise refused or ListError(f"{', '.join(map(str, paths))}: no labelled scores; give their list with --trials")


def chosen_on_reported(scores: Path) -> str:
    """The warning that a score file's model was selected on the same list, from the results beside it; else empty."""
    results = read_results(scores.with_name(RESULTS))
    warnings = (results.warnings if results else None) or []
    return next((one for one in warnings if one.startswith(CHOSEN_ON_REPORTED.partition(":")[0])), "")


def read_results(path: Path) -> Results | None:
    """What an evaluation wrote; None if there is no such file; FileError if it is damaged."""
    if not path.is_file():
        return None
    with reading(path, "the results of an evaluation; evaluate again to write them"), open_text(path) as file:
        return Results.from_dict(json.load(file))


def is_number(value: object) -> bool:
    """Whether a value of a record can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _read_stages(folder: Path) -> list[dict[str, Any]]:
    """The run's records and those of its large-margin stage, whose epochs and steps continue those of the run."""
    first, second = _read_metrics(folder / METRICS), _read_metrics(folder / SECOND_STAGE / METRICS)
    ends = {key: max((record.get(key, 0) for record in first), default=0) for key in COUNTED}
    for record in second:
        record |= {key: record.get(key, 0) + end for key, end in ends.items()}
        record["second_stage_from"] = ends
    return first + second


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    records = []
    with reading(path, "a line of JSON for each record"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                # A run that was killed leaves half a line; a report is read while training writes, too.
                logger.warning("%s, line %d: cut off, skipped", path, number)
                continue
            if isinstance(record, dict):
                records.append({key: value for key, value in record.items() if _is_usable(key, value)})
    return records


def _is_usable(key: str, value: Any) -> bool:
    if key in COUNTED or key.endswith("_seconds"):
        return is_number(value)
    return isinstance(value, list) if key == "eer_interval_percent" else key != "second_stage_from"


def _read_kept(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a report, checked: others would fail when they are drawn."""
    if not path.is_file():
        return {}
    arrays = read_arrays(path, ARRAYS_EXPECTED)
    for name, kinds, dimensions in KEPT_ARRAYS:
        if name in arrays and (arrays[name].dtype.kind not in kinds or arrays[name].ndim != dimensions):
            found = f"{arrays[name].dtype} of {arrays[name].ndim} dimensions"
            raise FileError(f"{path}: {name} is {found}; expected {ARRAYS_EXPECTED}")
    if "map_points" in arrays:
        with reading(path, ARRAYS_EXPECTED):
            points, speakers = arrays["map_points"], arrays["map_speakers"]
            is_whole = points.shape == (len(speakers), 2) and len(arrays["map_shares"]) == 2
            if not is_whole or not set(speakers.tolist()) <= set(range(len(arrays["map_names"]))):
                raise FileError(f"{path}: the map's arrays do not match; expected {ARRAYS_EXPECTED}")
    return arrays
