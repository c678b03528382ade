"""What evaluations leave on the disk: score files, decisions, results, and what a report is made of.

Score files are `enrol test score` a line, our own and those of other tools; matching them with a list goes by the
pairs. A report is made again from the files of a run folder alone: `report_arrays.npz` keeps what no other file holds
(labels, log-likelihood ratios, the embedding map).
"""

import csv
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from speakernet.data.lists import ListError, ListFile, StringTable, TrialList, numbers, split_row
from speakernet.evaluation.calibration import threshold_label
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED
from speakernet.evaluation.metrics import missing_kind, refuse_rows
from speakernet.evaluation.results import Results, headline_sentence
from speakernet.evaluation.speakers import Speakers
from speakernet.files import FileError, atomic_write, open_text, read_arrays, read_yaml, reading, sha256_of
from speakernet.run_folder import (
    CONFIG,
    DECISIONS,
    EVALUATIONS,
    METRICS,
    RESULTS,
    SCORES,
    evaluation_folder,
    later_stages,
)
from speakernet.terminal import MAX_NAMED, counted

logger = logging.getLogger(__name__)

FORM = "'enrol test score', optionally with a fourth column target|nontarget"
KINDS = {b"target": 1, b"nontarget": 0}
LARGEST_SCORE = 1e30
"""Larger ones overflow when scores are squared; no scoring gives any."""
LLR_COLUMN = "llr"
NUM_IN_TERMINAL = 10
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
"""Name, kinds of numbers and dimensions of what the report keeps."""
COUNTED = ("epoch", "step")
MAP_SPEAKERS = 12
MAP_UTTERANCES_EACH = 60


def find_scores(path: Path, trials: TrialList) -> tuple[Path, np.ndarray]:
    """The score file of a list in the folder of a run or an evaluation (or the file itself), and its scores."""
    if not path.is_dir():
        return path, scores_for(trials, path)
    found = sorted((path / EVALUATIONS).glob(f"*/{SCORES}"))
    own, named = path / SCORES, evaluation_folder(path, trials.source) / SCORES
    names = ", ".join(one.parent.name for one in found) or "no folder with scores"
    refused = ListError(
        f"{path}: no {SCORES} of {Path(trials.source).stem}; {path}/{EVALUATIONS} holds {names}; score the list with "
        "--eval, or name the folder of one of them"
    )
    # Of a list with a name of its own, the results know which it was.
    known = ((one, read_results(one.with_name(RESULTS))) for one in found if len(found) > 1)
    digests = ((one, {row.get("sha256") for row in (read.lists if read else None) or []}) for one, read in known)
    others = (one for one, sha256 in digests if trials.sha256 and trials.sha256 in sha256)
    for candidate in itertools.chain((own, named), found if len(found) == 1 else others):
        if candidate.is_file():
            try:
                return candidate, scores_for(trials, candidate)
            except ListError as error:
                # The run's own scores may be those of another list, with the wanted ones under eval/.
                refused = error
    raise refused


def read_scores(path: str | Path) -> tuple[TrialList, np.ndarray]:
    """Read `enrol test score` lines, split as a trial list is; blank lines are skipped.

    Returns:
        The pairs, with labels if every line has the fourth column; and the scores (trials,) float64, higher means more
        alike.
    """
    file, rows = ListFile(path, kind=f"a score file with lines {FORM}, or the folder of a run"), numbers()
    pairs: list[int] = []
    scores: list[float] = []
    kinds: list[int] = []
    for number, line in file:
        fields = split_row(line)
        try:
            if len(fields) not in (3, 4) or not all(fields):
                raise ValueError(len(fields))
            scores.append(float(fields[2]))
            kinds.extend(KINDS[kind] for kind in fields[3:])
        except (ValueError, KeyError):
            file.expected(number, FORM, line)
        pairs += rows[fields[0]], rows[fields[1]]
    if not pairs:
        raise ListError(f"{path}: no scores; expected lines {FORM}")
    enrol, test = np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy()
    labels = np.array(kinds, dtype=np.int8) if len(kinds) == len(enrol) else None
    trials = TrialList(StringTable.from_bytes(rows), enrol, test, labels, str(path), sha256_of(path))
    return trials, np.array(scores, dtype=np.float64)


def write_scores(path: str | Path, trials: TrialList, scores: np.ndarray) -> None:
    """Write one line a trial in the order of the list, atomically; names with spaces make a line tab-separated."""
    names = list(trials.names)
    with atomic_write(path) as file:
        for enrol, test, score in zip(trials.enrol.tolist(), trials.test.tolist(), scores.tolist(), strict=True):
            # A name with a space would otherwise be read as two.
            gap = "\t" if " " in names[enrol] or " " in names[test] else " "
            file.write(f"{names[enrol]}{gap}{names[test]}{gap}{score:.6f}\n")


def scores_for(trials: TrialList, path: str | Path) -> np.ndarray:
    """The score of each of these trials, (trials,) float64, from a file that may have them in any order."""
    found, all_scores = read_scores(path)
    rows = _rows_of(trials, found)
    scores = all_scores[rows]
    # Not `>`: NaN compares as false.
    if len(bad := np.sort(rows[~(np.abs(scores) <= LARGEST_SCORE)])):
        lines = ", ".join(str(_line_of(path, int(row))) for row in bad[:MAX_NAMED]) + " …" * (len(bad) > MAX_NAMED)
        what = f"{len(bad)} of {len(scores)} scores are NaN, infinite or beyond {LARGEST_SCORE:g}"
        raise ValueError(f"{path}: {what}: lines {lines}")
    if trials.labels is not None and found.labels is not None:
        other = np.flatnonzero(trials.labels != found.labels[rows])
        if len(other):
            raise ListError(
                f"{path}: {len(other):,} of {len(scores):,} lines have another label than {trials.source}, first "
                f"{_entry(found, int(rows[other[0]]))}; one of the two is wrong"
            )
    return scores


def _rows_of(ours: TrialList, theirs: TrialList) -> np.ndarray:
    """The row in `theirs` of each trial of `ours`, int64; ListError if they are not the same pairs, each as often."""
    # Rows of names count by first mention in both, so lists in one order have equal tables and equal rows.
    is_same = len(ours) == len(theirs) and ours.names == theirs.names
    if is_same and np.array_equal(ours.enrol, theirs.enrol) and np.array_equal(ours.test, theirs.test):
        return np.arange(len(ours))
    row_of = {name: row for row, name in enumerate(ours.names)}
    known = np.array([row_of.get(name, -1) for name in theirs.names], dtype=np.int64)
    enrol, test = known[theirs.enrol], known[theirs.test]
    wanted = ours.enrol.astype(np.int64) * len(row_of) + ours.test
    there = np.where((enrol >= 0) & (test >= 0), enrol * len(row_of) + test, -1)
    order, their_order = np.argsort(wanted, kind="stable"), np.argsort(there, kind="stable")
    if not np.array_equal(wanted[order], there[their_order]):
        found = [f"{theirs.source} has {len(theirs):,} scores, {ours.source} has {len(ours):,} trials"]
        for trials, keys, others in ((ours, wanted, there), (theirs, there, wanted)):
            alone = np.flatnonzero(~np.isin(keys, others))
            if len(alone):
                found.append(f"{len(alone):,} are in {trials.source} only, first {_entry(trials, int(alone[0]))}")
        if len(found) == 1:
            again = np.setdiff1d(np.arange(len(there)), np.unique(there, return_index=True)[1])
            found += [f"not each pair as often, first {_entry(theirs, int(row))}" for row in again[:1]]
        raise ListError("; ".join(found) + "; expected the scores of this very list")
    rows = np.empty(len(ours), dtype=np.int64)
    rows[order] = their_order
    return rows


def _entry(trials: TrialList, row: int) -> str:
    names = trials.names
    pair = f"{names[int(trials.enrol[row])]} {names[int(trials.test[row])]}"
    return f"line {_line_of(trials.source, row)}: '{pair}'"


def _line_of(path: str | Path, row: int) -> int:
    """The line number of entry `row` (blank lines do not count); its own number if the file is gone."""
    if not Path(path).is_file():
        return row + 1
    with Path(path).open("rb") as file:
        filled = (number for number, line in enumerate(file, start=1) if line.split())
        return next(itertools.islice(filled, row, None), row + 1)


@dataclass(frozen=True)
class Decisions:
    """Unlabelled trials: their scores, log-likelihood ratios if there is a calibration, and a decision per threshold.

    A trial is accepted if its score reaches the threshold.
    """

    trials: TrialList
    scores: np.ndarray
    """(trials,)."""
    llrs: np.ndarray | None = None
    """Natural, (trials,)."""
    thresholds: Sequence[Mapping[str, Any]] = ()
    """Of this way of scoring, as a model file keeps them."""

    @property
    def says_more_than_scores(self) -> bool:
        """Whether there is anything that `scores.txt` does not hold."""
        return self.llrs is not None or bool(self.thresholds)

    @property
    def header(self) -> list[str]:
        """Names of the columns, for scripts."""
        llr = [] if self.llrs is None else [LLR_COLUMN]
        return ["enrol", "test", "score", *llr, *(str(one["name"]) for one in self.thresholds)]

    def row(self, number: int) -> list[str]:
        """The columns of one trial."""
        trials, score = self.trials, float(self.scores[number])
        pair = (trials.names[int(side[number])] for side in (trials.enrol, trials.test))
        llr = [] if self.llrs is None else [f"{self.llrs[number]:.4f}"]
        return [
            *pair,
            f"{score:.6f}",
            *llr,
            *("accept" if score >= one["threshold"] else "refuse" for one in self.thresholds),
        ]

    def sentences(self) -> list[str]:
        """How many trials each threshold accepts, and what is missing for decisions."""
        total = counted(len(self.trials), "pair")
        found = [
            f"{int(np.count_nonzero(self.scores >= one['threshold'])):,} of {total} accepted at threshold "
            f"{one['threshold']:.4f} ({described(one)})"
            for one in self.thresholds
        ]
        decisions = "no decisions: there is no threshold for this scoring method"
        ratios = "no log-likelihood ratios: there is no calibration for this scoring method"
        missing = [decisions] * (not self.thresholds) + [ratios] * (self.llrs is None)
        advice = (
            "to fit them on labelled trials: --evaluation.calibration_list LIST with --eval, or `speakernet calibrate` "
            "for the model file; for score files --fusion_scores and --fusion_trials"
        )
        return [*found, *missing, *([advice] if missing else [])]

    def lines(self) -> list[str]:
        """The first trials as a table of text, then the sentences; for a terminal."""
        count = min(len(self.trials), NUM_IN_TERMINAL)
        rows = [self.header, *(self.row(number) for number in range(count))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = [f"… and {len(self.trials) - count:,} more"] if count < len(self.trials) else []
        return [*table, *more, *self.sentences()]

    def write(self, path: Path) -> None:
        """Write a CSV: header, then a trial a line in the order of the list."""
        with atomic_write(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.header)
            writer.writerows(self.row(number) for number in range(len(self.trials)))


def described(threshold: Mapping[str, Any]) -> str:
    """What a threshold was chosen for, and on which list."""
    fitted_on = f" on {threshold['list']}" if threshold.get("list") else ""
    return f"{threshold_label(str(threshold['name']))}{fitted_on}"


def read_llrs(path: Path) -> np.ndarray | None:
    """The log-likelihood ratios that `Decisions.write` wrote, (trials,); None if the file has none."""
    with reading(path, "decisions; score the list again"), open_text(path) as file:
        rows = list(csv.DictReader(file))
        return np.array([float(row[LLR_COLUMN]) for row in rows]) if rows and LLR_COLUMN in rows[0] else None


@dataclass(frozen=True)
class Evaluation:
    """Scores in list order and their figures."""

    trials: TrialList
    scores: np.ndarray
    results: Results
    llrs: np.ndarray | None = None
    """Calibrated scores, (trials,)."""
    units: np.ndarray | None = None
    """(utterances, dim) of length 1, if something was embedded."""
    speakers: Speakers | None = None
    durations: np.ndarray | None = None
    """Seconds of each utterance, (utterances,), if there was audio."""
    others: Mapping[str, "Evaluation"] = field(default_factory=dict)
    """Of the other test lists, by name."""

    @property
    def decisions(self) -> Decisions | None:
        """Decisions on each trial; None if there are error rates."""
        if self.results.eer_percent is not None:
            return None
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    def lines(self, digits: int = 2) -> list[str]:
        """The headline and, without error rates, the decisions; for a terminal."""
        others = [f"{name}: {headline_sentence(one.results, digits)}" for name, one in self.others.items()]
        return [headline_sentence(self.results, digits), *others, *(self.decisions.lines() if self.decisions else ())]


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
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Those of `KEPT_ARRAYS` that there are."""

    @property
    def decisions(self) -> Decisions | None:
        """Decisions on each trial of a list without an error rate."""
        results, trials, scores = self.results, self.trials, self.scores
        if results is None or results.eer_percent is not None or trials is None or scores is None:
            return None
        return Decisions(trials, scores, self.arrays.get("llrs"), results.thresholds or ())

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


def read_run(folder: str | Path, name: str = "", evaluation: Evaluation | None = None) -> RunData:
    """Read a run folder, or the folder of an evaluation, whose scores and arrays may be at hand."""
    folder = Path(folder)
    results = read_results(folder / RESULTS) if evaluation is None else evaluation.results
    run_folder = folder
    if results is not None and results.checkpoint and not (folder / METRICS).is_file():
        # Of an evaluation alone: the run whose checkpoint was scored.
        run_folder = Path(results.checkpoint.get("path", "")).parent
    metrics = _read_metrics(run_folder / METRICS)
    # Epochs and steps of a later stage continue those of the one before.
    for stage, path in later_stages(run_folder).items():
        ends = {key: max((one.get(key, 0) for one in metrics), default=0) for key in COUNTED}
        for one in _read_metrics(path / METRICS):
            moved = {key: one.get(key, 0) + end for key, end in ends.items()}
            metrics.append({**one, **moved, "begun": {"stage": stage, **ends}})
    if results is None and not metrics:
        raise FileError(f"{folder}: neither {RESULTS} nor {METRICS}; give the folder of a run or an evaluation")
    config = ""
    for path in (run_folder / CONFIG, folder / CONFIG):
        if path.is_file():
            with reading(path, "a configuration in UTF-8"), open_text(path) as file:
                config = file.read()
    if results is not None and results.training is None and run_folder != folder:
        trained = read_results(run_folder / RESULTS)
        results = replace(results, training=trained.training if trained else None)
    run = RunData(folder, name or folder.resolve().name, results, metrics, config)
    if evaluation is not None:
        trials, scores = evaluation.trials, np.asarray(evaluation.scores, dtype=np.float64)
        speakers, units = evaluation.speakers, evaluation.units
        found = {"labels": trials.labels, "llrs": evaluation.llrs, "durations": evaluation.durations}
        if speakers is not None:
            found |= {"speakers": speakers.ids, "speaker_names": np.array(speakers.names, dtype=np.str_)}
            # Without labels, speakers are a guess.
            if units is not None and trials.labels is not None:
                found |= embedding_map(units, speakers.ids, list(trials.names))
        known = {name: array for name, array in found.items() if array is not None}
        return replace(run, trials=trials, scores=scores, arrays=known)
    run = replace(run, arrays=_read_kept(folder / ARRAYS_NAME))
    if (folder / DECISIONS).is_file() and (llrs := read_llrs(folder / DECISIONS)) is not None:
        run.arrays["llrs"] = llrs
    if not (folder / SCORES).is_file():
        return run
    trials, scores = read_scores(folder / SCORES)
    refuse_rows(~np.isfinite(scores), f"of {folder / SCORES} NaN or infinite")
    labels = run.arrays.get("labels")
    if labels is None or labels.shape != scores.shape:
        labels = None
        if results is None or not results.why_no_eer or results.num_targets is not None:
            logger.warning("%s: no labels are kept: the report has no curves of errors", folder)
    return replace(run, trials=replace(trials, labels=labels), scores=scores)


def embedding_map(embeddings: np.ndarray, speakers: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """The plane of the two main axes of some speakers' utterances; empty with fewer than two speakers of two each.

    Principal components, not t-SNE or UMAP: they are linear and have no settings, so a gap in the picture is a gap in
    the embeddings, and the same embeddings give the same picture. The speakers with the most utterances are shown.

    Returns:
        `map_points` (utterances, 2), `map_speakers` (utterances,) rows of `map_names`, and `map_shares` (2,) of the
        variance of these utterances on each axis.
    """
    # Speakers with one utterance would be single points among groups.
    counts = np.bincount(speakers)
    chosen = [one for one in np.argsort(-counts, kind="stable")[:MAP_SPEAKERS] if counts[one] >= 2]
    if len(chosen) < 2 or embeddings.shape[1] < 2:
        return {}
    rows = [np.flatnonzero(speakers == speaker)[:MAP_UTTERANCES_EACH] for speaker in chosen]
    table = embeddings[np.concatenate(rows)].astype(np.float64)
    # SVD of the centred table is the principal components, without a covariance matrix.
    left, spread, _ = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    points = (left[:, :2] * spread[:2]).astype(np.float32)
    # The sign of an axis is arbitrary: fixed, so that the same run gives the same picture.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)
    shown = []
    for number, one in enumerate(rows, start=1):
        # The last folder that all utterances of the speaker share, else a number.
        folders = [PurePosixPath(names[row].replace("\\", "/").lstrip("/")).parent for row in one]
        shown.append(PurePosixPath(os.path.commonpath(folders)).name or f"speaker {number}")
    shares = np.square(spread) / (np.square(spread).sum() or 1.0)
    labels = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    found = {"map_speakers": labels, "map_names": np.array(shown, dtype=np.str_), "map_shares": shares[:2]}
    return {"map_points": points, **found}


def list_in_common(paths: Sequence[Path]) -> TrialList:
    """The labelled list whose scores all these files and folders hold, from the labels kept in one of them."""
    names, refused = ", ".join(map(str, paths)), None
    for path in paths:
        for place in (path, *sorted((path / EVALUATIONS).glob("*/"))):
            file = place / SCORES if place.is_dir() else place
            if not file.is_file():
                continue
            run = read_run(place) if place.is_dir() else None
            trials = run.trials if run is not None else read_scores(file)[0]
            if trials is None or trials.labels is None:
                continue
            try:
                for other in paths:
                    find_scores(other, trials)
                return trials if run is None else replace(trials, source=run.list_name)
            except ListError as error:
                refused = refused or error
    if refused is None:
        raise ListError(f"{names}: no labelled scores; give their list with --trials")
    raise ListError(f"{names}: expected scores of one trial list; {refused}") from refused


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


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    with reading(path, "a line of JSON for each record"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                # A run that was killed leaves half a line; a report is read while training writes, too.
                logger.warning("%s, line %d: cut off, skipped", path, number)
                continue
            if isinstance(record, dict):
                # What is drawn; the kind and the interval are no numbers.
                kinds: dict[str, Any] = {"kind": str, "eer_interval_percent": list, "begun": ()}
                kinds |= {"test_lists": dict, "drawn": dict}
                usable = (key for key, one in record.items() if isinstance(one, kinds.get(key, int | float)))
                records.append({key: record[key] for key in usable if key in kinds or is_number(record[key])})
    return records


def _read_kept(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a report, checked: others would fail when they are drawn."""
    arrays = read_arrays(path, ARRAYS_EXPECTED) if path.is_file() else {}
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
