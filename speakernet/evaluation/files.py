"""The data that a report is made from: an evaluation in memory, its decisions, and a run as read
from its folder.

A report can be remade from the files of a run folder alone: `report_arrays.npz` keeps what no other
file holds (labels, log-likelihood ratios, the embedding map).
"""

import csv
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from speakernet.data.lists import (
    TrialList,
)
from speakernet.evaluation.calibration import threshold_label
from speakernet.evaluation.metrics import missing_kind
from speakernet.evaluation.results import Results, headline_sentence
from speakernet.evaluation.score_files import SCORE_FORMAT, read_scores
from speakernet.evaluation.speakers import Speakers
from speakernet.files import (
    FileError,
    atomic_write,
    open_text,
    read_arrays,
    read_yaml,
    reading,
    sha256_of,
)
from speakernet.run_folder import (
    BEST,
    CONFIG,
    DECISIONS,
    METRICS,
    RESULTS,
    SCORES,
    evaluation_folder,
    later_stages,
)
from speakernet.terminal import counted, text_table

logger = logging.getLogger(__name__)

LLR_COLUMN = "llr"
NUM_TRIALS_SHOWN = 10
ARRAYS_NAME = "report_arrays.npz"
ARRAYS_EXPECTED = "the arrays of a report; evaluate again to write them"
KEPT_ARRAYS = (
    ("labels", "iu", 1),
    ("llrs", "f", 1),
    ("map_points", "f", 2),
    ("map_speakers", "iu", 1),
    ("map_names", "U", 1),
    ("map_shares", "f", 1),
    ("speakers", "iu", 1),
    ("speaker_names", "U", 1),
    ("durations", "f", 1),
)
"""Name, dtype kinds and number of dimensions of each array kept for the report."""
RUNNING_COUNTS = ("epoch", "step")
"""Keys of a record that each stage counts from 0."""
NOT_NUMBERS: dict[str, Any] = {
    "kind": str,
    "eer_interval_percent": list,
    "test_lists": dict,
    "drawn": dict,
}
"""Keys of a record whose values are not numbers -> their type."""
MAP_SPEAKERS = 12
MAP_UTTERANCES_EACH = 60


@dataclass(frozen=True)
class Decisions:
    """Unlabelled trials with their scores, log-likelihood ratios if calibrated, and a decision per
    threshold.

    A trial is accepted if its score reaches the threshold.
    """

    trials: TrialList
    scores: np.ndarray
    """(trials,)."""
    llrs: np.ndarray | None = None
    """Natural logarithms, (trials,)."""
    thresholds: Sequence[Mapping[str, Any]] = ()
    """Those for this scoring, as a model file holds them."""

    @property
    def says_more_than_scores(self) -> bool:
        """Whether it holds more than `scores.txt`."""
        return self.llrs is not None or bool(self.thresholds)

    @property
    def header(self) -> list[str]:
        """Machine-readable column names."""
        names = ["enrol", "test", "score"]
        if self.llrs is not None:
            names.append(LLR_COLUMN)
        for limit in self.thresholds:
            names.append(str(limit["name"]))
        return names

    def row(self, number: int) -> list[str]:
        """The columns of one trial."""
        score = float(self.scores[number])
        columns = [*self.trials.pair(number), f"{score:{SCORE_FORMAT}}"]
        if self.llrs is not None:
            columns.append(f"{self.llrs[number]:{SCORE_FORMAT}}")
        # Words, because 0 and 1 do not show which of them accepts.
        for limit in self.thresholds:
            columns.append("accept" if score >= limit["threshold"] else "refuse")
        return columns

    def sentences(self) -> list[str]:
        """How many trials each threshold accepts, and what decisions still need."""
        total = counted(len(self.trials), "pair")
        sentences = []
        for limit in self.thresholds:
            number = int(np.count_nonzero(self.scores >= limit["threshold"]))
            sentences.append(
                f"{number:,} of {total} accepted at threshold {limit['threshold']:.4f} "
                f"({describe_threshold(limit)})"
            )
        if not self.thresholds:
            sentences.append("no decisions: this scoring method has no threshold")
        if self.llrs is None:
            sentences.append("no log-likelihood ratios: this scoring method has no calibration")
        if not self.thresholds or self.llrs is None:
            sentences.append(
                "fit them on labelled trials: with --eval --evaluation.calibration_list LIST, or "
                "`speakernet calibrate` for the model file; for score files with --fusion_scores "
                "and --fusion_trials"
            )
        return sentences

    def lines(self) -> list[str]:
        """The first trials as a text table, then the sentences, for a terminal."""
        count = min(len(self.trials), NUM_TRIALS_SHOWN)
        rows = [self.header]
        for number in range(count):
            rows.append(self.row(number))
        lines = text_table(rows)
        if count < len(self.trials):
            lines.append(f"… and {len(self.trials) - count:,} more")
        return lines + self.sentences()

    def write(self, path: Path) -> None:
        """Write a CSV with a header and one line per trial in list order."""
        with atomic_write(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.header)
            writer.writerows(self.row(number) for number in range(len(self.trials)))


def describe_threshold(threshold: Mapping[str, Any]) -> str:
    """What a threshold was chosen for and on which list."""
    fitted_on = f" on {threshold['list']}" if threshold.get("list") else ""
    return f"{threshold_label(str(threshold['name']))}{fitted_on}"


def read_llrs(path: Path) -> np.ndarray | None:
    """The log-likelihood ratios that `Decisions.write` wrote, (trials,); None if the file has
    none.
    """
    with reading(path, "decisions; score the list again"), open_text(path) as file:
        rows = list(csv.DictReader(file))
        if not rows or LLR_COLUMN not in rows[0]:
            return None
        return np.array([float(row[LLR_COLUMN]) for row in rows])


@dataclass(frozen=True)
class Evaluation:
    """The scores of a list, in list order, and their figures."""

    trials: TrialList
    scores: np.ndarray
    results: Results
    llrs: np.ndarray | None = None
    """Calibrated scores, (trials,)."""
    units: np.ndarray | None = None
    """Unit-length embeddings (utterances, dim); None for score files."""
    speakers: Speakers | None = None
    durations: np.ndarray | None = None
    """Seconds of each utterance, (utterances,); None without audio."""
    others: Mapping[str, "Evaluation"] = field(default_factory=dict)
    """Evaluations of the other test lists, by name."""

    @property
    def decisions(self) -> Decisions | None:
        """Decisions on each trial; None if there are error rates."""
        if self.results.eer_percent is not None:
            return None
        # Without labels, or with those of one kind, there are no error rates, so each decision is
        # shown instead.
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    def lines(self, digits: int = 2) -> list[str]:
        """The headline and, without error rates, the decisions, for a terminal."""
        lines = [headline_sentence(self.results, digits)]
        for name, other in self.others.items():
            lines.append(f"{name}: {headline_sentence(other.results, digits)}")
        if self.decisions:
            lines += self.decisions.lines()
        return lines


@dataclass(frozen=True)
class RunData:
    """Everything that a page may show about a run; missing parts are None or empty."""

    folder: Path
    name: str
    """The title of its page."""
    results: Results
    """Empty before the first evaluation."""
    metrics: list[dict[str, Any]]
    """Records of `metrics.jsonl`."""
    config: str
    """Text of `config.yaml`."""
    trials: TrialList | None = None
    scores: np.ndarray | None = None
    """(trials,) float64."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """The `KEPT_ARRAYS` that exist."""

    @property
    def decisions(self) -> Decisions | None:
        """Decisions on each trial; None if there are error rates or no scores."""
        if self.results.is_empty or self.trials is None or self.scores is None:
            return None
        # Through `Evaluation`, so that a page rebuilt from files shows the same decisions.
        llrs = self.arrays.get("llrs")
        return Evaluation(self.trials, self.scores, self.results, llrs).decisions

    @property
    def labels(self) -> np.ndarray | None:
        """Labels (trials,) of the scores; None unless there are both targets and non-targets."""
        if self.trials is None or self.scores is None or self.trials.labels is None:
            return None
        return None if missing_kind(self.trials.labels) else self.trials.labels

    @property
    def list_name(self) -> str:
        """The name of the scored list."""
        # Results of earlier versions do not name the list.
        name = self.results.list_name()
        if not name and self.trials is not None:
            name = Path(self.trials.source).name
        return name or "a list without a name"

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The sections of the run; only `evaluation` in an evaluation folder without a run."""
        if not self.config:
            return {"evaluation": self.results.config or {}}
        values = read_yaml(self.config, str(self.folder / CONFIG))
        return values if isinstance(values, Mapping) else {}


def read_run(folder: str | Path, evaluation: Evaluation | None = None) -> RunData:
    """Read a run or evaluation folder; scores and arrays come from `evaluation` if it is given."""
    folder = Path(folder)
    # A run folder holds the training and the results of its test list. The folder of another list,
    # below eval/ or anywhere else, holds results alone, and they name the checkpoint that was
    # scored. Curves, options and the amount of training speech are therefore looked up beside that
    # checkpoint; if it has moved, the page is shorter but still correct.
    results = evaluation.results if evaluation else read_results(folder / RESULTS)
    run_folder = folder
    if results.checkpoint and not (folder / METRICS).is_file():
        # An evaluation folder: use the run whose checkpoint was scored.
        run_folder = Path(results.checkpoint.get("path", "")).parent
    metrics = metrics_of_stages(run_folder)
    if results.is_empty and not metrics:
        raise FileError(
            f"{folder} contains neither {RESULTS} nor {METRICS}; give the folder of a run or an "
            "evaluation"
        )
    config = ""
    # The folder's own configuration is read last and so replaces that of the run.
    for path in (run_folder / CONFIG, folder / CONFIG):
        if path.is_file():
            with reading(path, "a configuration in UTF-8"), open_text(path) as file:
                config = file.read()
    run = RunData(folder, folder.resolve().name, results, metrics, config)
    return _with_arrays(run, evaluation) if evaluation else _with_kept_arrays(run)


def _with_arrays(run: RunData, evaluation: Evaluation) -> RunData:
    """Add the arrays of an evaluation in memory."""
    trials = evaluation.trials
    arrays = {}
    if trials.labels is not None:
        arrays["labels"] = trials.labels
    if evaluation.llrs is not None:
        arrays["llrs"] = evaluation.llrs
    if evaluation.durations is not None:
        arrays["durations"] = evaluation.durations
    if trials.models is not None:
        # The report's hardest trials show how many recordings a person is enrolled with. A test is
        # one recording, for which nothing is shown.
        counts = trials.models.counts
        counts[trials.test] = 0
        arrays["num_recordings"] = counts
    if evaluation.speakers is not None:
        arrays["speakers"] = evaluation.speakers.ids
        arrays["speaker_names"] = np.array(evaluation.speakers.names, dtype=np.str_)
        # Without labels, the speakers are a guess.
        if evaluation.units is not None and trials.labels is not None:
            arrays |= embedding_map(evaluation.units, evaluation.speakers)
    scores = np.asarray(evaluation.scores, dtype=np.float64)
    return replace(run, trials=trials, scores=scores, arrays=arrays)


def _with_kept_arrays(run: RunData) -> RunData:
    """Add the arrays in the folder's files."""
    folder = run.folder
    arrays = _read_kept(folder / ARRAYS_NAME)
    if (folder / DECISIONS).is_file():
        llrs = read_llrs(folder / DECISIONS)
        if llrs is not None:
            arrays["llrs"] = llrs
    run = replace(run, arrays=arrays)
    if not (folder / SCORES).is_file():
        return run
    trials, scores = read_scores(folder / SCORES)
    # Our score files have no labels; those are in the arrays, which belong to other scores if their
    # number differs.
    labels = arrays.get("labels")
    if labels is None or labels.shape != scores.shape:
        labels = None
        # An unlabelled list has a reason and no count.
        if not run.results.why_no_eer or run.results.num_targets is not None:
            logger.warning("%s: no labels were kept, so the report has no error curves", folder)
    return replace(run, trials=replace(trials, labels=labels), scores=scores)


def metrics_of_stages(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; epochs and steps of a later stage continue those of the previous
    one.
    """
    # Each stage counts from 0 in a file of its own, but a report shows the whole training as one
    # curve.
    metrics = _read_metrics(folder / METRICS)
    for path in later_stages(folder).values():
        ends = dict.fromkeys(RUNNING_COUNTS, 0)
        for record in metrics:
            for key, end in ends.items():
                ends[key] = max(end, record.get(key, 0))
        for record in _read_metrics(path / METRICS):
            for key, end in ends.items():
                record[key] = record.get(key, 0) + end
            metrics.append(record)
    return metrics


def seconds_of_steps(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that the records of a run spent on steps, without evaluations and interruptions."""
    seconds = 0.0
    steps_before = 0
    for record in metrics:
        if record.get("kind") == "epoch":
            # A mean over the steps of the epoch.
            step = record.get("step", 0)
            seconds += max(0, step - steps_before) * record.get("step_seconds", 0.0)
            steps_before = step
    return seconds


def embedding_map(embeddings: np.ndarray, speakers: Speakers) -> dict[str, np.ndarray]:
    """The speakers with the most utterances on two principal components; empty without two speakers
    of two utterances.

    Principal components rather than t-SNE or UMAP: they are linear and have no settings, so a gap
    in the plot is a gap in the embeddings, and the same embeddings always give the same plot.

    Returns:
        `map_points` (utterances, 2), `map_speakers` (utterances,) rows of `map_names`, and
        `map_shares` (2,), the shares of these utterances' variance on each axis.
    """
    # A small plot with more speakers or utterances would be illegible.
    counts = np.bincount(speakers.ids)
    most = np.argsort(-counts, kind="stable")[:MAP_SPEAKERS]
    # Speakers with a single utterance form no group.
    chosen = most[counts[most] >= 2]
    if len(chosen) < 2 or embeddings.shape[1] < 2:
        return {}
    rows = [np.flatnonzero(speakers.ids == speaker)[:MAP_UTTERANCES_EACH] for speaker in chosen]
    table = embeddings[np.concatenate(rows)].astype(np.float64)
    # The SVD of the centred table gives the principal components without a covariance matrix.
    left, spread, _ = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    points = (left[:, :2] * spread[:2]).astype(np.float32)
    # The sign of an axis is arbitrary; that of its farthest point becomes positive, so that the
    # same run gives the same plot.
    farthest = np.abs(points).argmax(axis=0)  # (2,)
    points *= np.where(points[farthest, [0, 1]] < 0, -1, 1)
    # Speakers that are only groups of connected trials have no names.
    names = speakers.names or [f"speaker {number}" for number in range(1, 1 + len(counts))]
    shares = np.square(spread) / (np.square(spread).sum() or 1.0)
    return {
        "map_points": points,
        "map_speakers": np.repeat(np.arange(len(rows)), [len(of_speaker) for of_speaker in rows]),
        "map_names": np.array([names[speaker] for speaker in chosen], dtype=np.str_),
        "map_shares": shares[:2],
    }


def read_results(path: Path) -> Results:
    """The results of an evaluation, empty if there is no such file; FileError if it is damaged."""
    if not path.is_file():
        return Results()
    with (
        reading(path, "the results of an evaluation; evaluate again to write them"),
        open_text(path) as file,
    ):
        return Results.from_dict(json.load(file))


def is_number(value: object) -> bool:
    """Whether a value in a record can be plotted."""
    # In Python, True is an int.
    is_boolean = isinstance(value, bool)
    return isinstance(value, int | float) and not is_boolean and bool(np.isfinite(value))


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    with reading(path, "one JSON record per line"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            # Deeply nested brackets in a damaged line exceed the recursion limit.
            except (json.JSONDecodeError, RecursionError):
                # A killed run leaves half a line, and so may a run that is still writing.
                logger.warning("%s, line %d: incomplete record skipped", path, number)
                continue
            if isinstance(record, dict):
                records.append({key: value for key, value in record.items() if _fits(key, value)})
    return records


def _fits(key: str, value: object) -> bool:
    """Whether a value in a record has the type that its key needs."""
    return isinstance(value, NOT_NUMBERS[key]) if key in NOT_NUMBERS else is_number(value)


def _read_kept(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a report, checked so that drawing them cannot fail."""
    if not path.is_file():
        return {}
    # A wrong shape would otherwise fail inside matplotlib, with a message that does not name the
    # file.
    arrays = read_arrays(path, ARRAYS_EXPECTED)
    with reading(path, ARRAYS_EXPECTED):
        for name, kinds, dimensions in KEPT_ARRAYS:
            if name not in arrays:
                continue
            array = arrays[name]
            if array.dtype.kind not in kinds or array.ndim != dimensions:
                raise FileError(f"{path}: {name}: found {array.dtype} of shape {array.shape}")
        if "map_points" in arrays:
            speakers = arrays["map_speakers"]
            numbers_of_names = np.arange(len(arrays["map_names"]))
            if (
                arrays["map_points"].shape != (len(speakers), 2)
                or len(arrays["map_shares"]) != 2
                or not np.isin(speakers, numbers_of_names).all()
            ):
                raise FileError(f"{path}: the arrays of the embedding map do not match")
    return arrays


def earlier_report(
    run_folder: Path, now: Mapping[str, str], beside: Mapping[str, str]
) -> tuple[Results, list[tuple[str, str]]]:
    """The report of the run's best model, if there is one, and role and name of the lists whose
    contents have changed since.

    `now` has the current SHA-256 by role, `beside` that of the other test lists by name.
    """
    earlier = read_results(run_folder / RESULTS)
    changed = _changed_lists(earlier, now)
    for name, sha256 in beside.items():
        other = read_results(evaluation_folder(run_folder, name) / RESULTS)
        changed += _changed_lists(other, {"trials": sha256})
    # A report that was followed by more training is older than the model; dates would not show this
    # in a copied folder.
    best = run_folder / BEST
    reported = (earlier.checkpoint or {}).get("sha256")
    if changed and best.is_file() and sha256_of(best) == reported:
        return earlier, changed
    return Results(), []


def _changed_lists(results: Results, now: Mapping[str, str]) -> list[tuple[str, str]]:
    """Role and name of the lists of a report whose SHA-256 differs from the current one."""
    changed = []
    for listed in results.lists or []:
        role = listed["role"]
        if role in now and listed["sha256"] != now[role]:
            changed.append((role, listed["name"]))
    return changed
