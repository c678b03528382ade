"""The files of an evaluation: score files, decisions, results, and the data that a report is made
from.

Score files, from this toolkit or others, have lines `enrol test score` and are matched with a list
by pair. A report can be remade from the files of a run folder alone: `report_arrays.npz` keeps what
no other file holds (labels, log-likelihood ratios, the embedding map).
"""

import csv
import itertools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from speakernet.data.lists import (
    ListError,
    ListFile,
    NameIndex,
    StringTable,
    TrialList,
    numbers,
    split_row,
)
from speakernet.evaluation.calibration import threshold_label
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED, Comparison, compare_scores
from speakernet.evaluation.metrics import missing_kind, refuse_rows
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Results, headline_sentence
from speakernet.evaluation.speakers import Speakers
from speakernet.files import (
    FileError,
    atomic_write,
    open_text,
    read_arrays,
    read_yaml,
    read_yaml_file,
    reading,
    sha256_of,
)
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
from speakernet.terminal import MAX_NAMED, counted, plural, text_table

logger = logging.getLogger(__name__)

FORM = "'enrol test score', optionally with a fourth column target|nontarget"
KINDS = {b"target": 1, b"nontarget": 0}
SCORE_HEADINGS = {b"score", b"scores", b"llr"}
"""Headings of the column of scores in files of other toolkits and of NIST, in lower case."""
LARGEST_SCORE = 1e30
"""Larger scores overflow when squared; no scoring method produces them."""
SCORE_FORMAT = ".9g"
"""Of scores and ratios in files: nine significant digits give back the same float32."""
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
"""Name, dtype kinds and number of dimensions of each array kept for the report."""
COUNTED = ("epoch", "step")
NOT_NUMBERS: dict[str, Any] = {
    "kind": str,
    "eer_interval_percent": list,
    "begun": (),
    "test_lists": dict,
    "drawn": dict,
}
"""Keys of a record whose values are not numbers -> their type; no file has `begun`."""
MAP_SPEAKERS = 12
MAP_UTTERANCES_EACH = 60


def find_scores(path: Path, trials: TrialList) -> tuple[Path, np.ndarray]:
    """The score file for a list in a run or evaluation folder (or the file itself), and its
    scores.
    """
    if not path.is_dir():
        return path, scores_for(trials, path)
    found = sorted((path / EVALUATIONS).glob(f"*/{SCORES}"))
    own = path / SCORES
    named = evaluation_folder(path, trials.source) / SCORES
    names = ", ".join(one.parent.name for one in found)
    refused = ListError(
        f"{path}: no scores of {Path(trials.source).stem}, only of {names} in "
        f"{path}/{EVALUATIONS}; score the list with --eval, or give the folder of one of these"
        if found
        else f"{path} contains no scores; give a run or evaluation folder that has {SCORES}"
    )
    # If the folder is not named after the list, its results identify the list by checksum.
    known = ((one, read_results(one.with_name(RESULTS))) for one in found if len(found) > 1)
    digests = (
        (one, {row.get("sha256") for row in (read.lists if read else None) or []})
        for one, read in known
    )
    others = (one for one, sha256 in digests if trials.sha256 and trials.sha256 in sha256)
    for candidate in itertools.chain((own, named), found if len(found) == 1 else others):
        if candidate.is_file():
            try:
                return candidate, scores_for(trials, candidate)
            except ListError as error:
                # The run's own scores may belong to another list, and the wanted ones be under
                # eval/.
                refused = error
    raise refused


def read_scores(path: str | Path) -> tuple[TrialList, np.ndarray]:
    """Read lines `enrol test score`, split like those of a trial list; blank lines are skipped.

    Returns:
        The pairs, with labels if every line has the fourth column, and the scores (trials,)
        float64; higher means more alike.
    """
    file = ListFile(path, kind=f"a score file with lines {FORM}, or the folder of a run")
    rows = numbers()
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
            if number == 1 and not SCORE_HEADINGS.isdisjoint(line.lower().split()):
                file.refuse(
                    number, "a heading line, not a score; remove it (tail -n +2 FILE > NEW_FILE)"
                )
            file.expected(number, FORM, line)
        pairs += rows[fields[0]], rows[fields[1]]
    if not pairs:
        raise ListError(f"{path}: no scores; expected lines {FORM}")
    enrol, test = np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy()
    labels = np.array(kinds, dtype=np.int8) if len(kinds) == len(enrol) else None
    trials = TrialList(
        StringTable.from_bytes(rows), enrol, test, labels, str(path), sha256_of(path)
    )
    return trials, np.array(scores, dtype=np.float64)


def write_scores(path: str | Path, trials: TrialList, scores: np.ndarray) -> None:
    """Write one line per trial in list order, atomically; a line is tab-separated if a name
    contains a space.

    Nine digits keep float32 scores apart: early in training all lie within a thousandth of 1.
    """
    names = list(trials.names)
    with atomic_write(path) as file:
        for enrol, test, score in zip(
            trials.enrol.tolist(), trials.test.tolist(), scores.tolist(), strict=True
        ):
            gap = "\t" if " " in names[enrol] or " " in names[test] else " "
            file.write(f"{names[enrol]}{gap}{names[test]}{gap}{score:{SCORE_FORMAT}}\n")


def scores_for(trials: TrialList, path: str | Path) -> np.ndarray:
    """The scores of these trials, (trials,) float64, from a file that may list them in any
    order.
    """
    found, all_scores = read_scores(path)
    rows = _rows_of(trials, found)
    scores = all_scores[rows]
    # Not `>`, since NaN compares as false.
    if len(bad := np.sort(rows[~(np.abs(scores) <= LARGEST_SCORE)])):
        lines = ", ".join(str(_line_of(path, int(row))) for row in bad[:MAX_NAMED]) + " …" * (
            len(bad) > MAX_NAMED
        )
        what = f"NaN, infinite or beyond {LARGEST_SCORE:g}: {plural(len(bad), 'line')} {lines}"
        are = "is" if len(bad) == 1 else "are"
        raise ValueError(
            f"{path}: {len(bad):,} of {len(scores):,} scores {are} {what}; expected finite numbers"
        )
    if trials.labels is not None and found.labels is not None:
        other = np.flatnonzero(trials.labels != found.labels[rows])
        if len(other):
            raise ListError(
                f"{path}: {len(other):,} of {len(scores):,} labels differ from {trials.source}, "
                f"first at {_entry(found, int(rows[other[0]]))}; correct the wrong file"
            )
    return scores


def _rows_of(ours: TrialList, theirs: TrialList) -> np.ndarray:
    """The row in `theirs` of each trial of `ours`, int64; ListError unless both have the same pairs
    equally often.
    """
    # Both number names by first mention, so lists in the same order have equal tables and equal
    # rows.
    is_same = len(ours) == len(theirs) and ours.names == theirs.names
    if (
        is_same
        and np.array_equal(ours.enrol, theirs.enrol)
        and np.array_equal(ours.test, theirs.test)
    ):
        return np.arange(len(ours))
    known = NameIndex(ours.names).find(theirs.names)
    enrol = known[theirs.enrol]
    test = known[theirs.test]
    wanted = ours.enrol.astype(np.int64) * len(ours.names) + ours.test
    there = np.where((enrol >= 0) & (test >= 0), enrol * len(ours.names) + test, -1)
    order = np.argsort(wanted, kind="stable")
    their_order = np.argsort(there, kind="stable")
    if not np.array_equal(wanted[order], there[their_order]):
        total = f"{len(ours):,} trials of {ours.source}"
        found = []
        if len(alone := np.flatnonzero(~np.isin(wanted, there))):
            found.append(
                f"{theirs.source} has scores for {len(ours) - len(alone):,} of the {total}; the "
                f"first trial without a score is {_entry(ours, int(alone[0]))}"
            )
        if len(alone := np.flatnonzero(~np.isin(there, wanted))):
            share = f"{len(alone):,} of the {len(theirs):,} scores of {theirs.source}"
            found.append(
                f"{share} are of other pairs, the first in {_entry(theirs, int(alone[0]))}"
            )
        if not found:
            again = np.setdiff1d(np.arange(len(there)), np.unique(there, return_index=True)[1])
            first = "".join(f", first repeat {_entry(theirs, int(row))}" for row in again[:1])
            found = [
                f"{theirs.source} has {len(theirs):,} scores for the {total}: pairs are not "
                f"repeated alike{first}"
            ]
        raise ListError("; ".join(found) + "; expected the scores of exactly this list")
    rows = np.empty(len(ours), dtype=np.int64)
    rows[order] = their_order
    return rows


def _entry(trials: TrialList, row: int) -> str:
    names = trials.names
    pair = f"{names[int(trials.enrol[row])]} {names[int(trials.test[row])]}"
    return f"line {_line_of(trials.source, row)}: '{pair}'"


def _line_of(path: str | Path, row: int) -> int:
    """The line number of entry `row`, skipping blank lines; the entry's own number if the file no
    longer exists.
    """
    if not Path(path).is_file():
        return row + 1
    with Path(path).open("rb") as file:
        filled = (number for number, line in enumerate(file, start=1) if line.split())
        return next(itertools.islice(filled, row, None), row + 1)


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
        llr = [] if self.llrs is None else [LLR_COLUMN]
        return ["enrol", "test", "score", *llr, *(str(one["name"]) for one in self.thresholds)]

    def row(self, number: int) -> list[str]:
        """The columns of one trial."""
        trials = self.trials
        score = float(self.scores[number])
        pair = (trials.names[int(side[number])] for side in (trials.enrol, trials.test))
        llr = [] if self.llrs is None else [f"{self.llrs[number]:{SCORE_FORMAT}}"]
        return [
            *pair,
            f"{score:{SCORE_FORMAT}}",
            *llr,
            *("accept" if score >= one["threshold"] else "refuse" for one in self.thresholds),
        ]

    def sentences(self) -> list[str]:
        """How many trials each threshold accepts, and what decisions still need."""
        total = counted(len(self.trials), "pair")
        found = [
            f"{int(np.count_nonzero(self.scores >= one['threshold'])):,} of {total} accepted at "
            f"threshold {one['threshold']:.4f} ({described(one)})"
            for one in self.thresholds
        ]
        decisions = "no decisions: this scoring method has no threshold"
        ratios = "no log-likelihood ratios: this scoring method has no calibration"
        missing = [decisions] * (not self.thresholds) + [ratios] * (self.llrs is None)
        advice = (
            "fit them on labelled trials: with --eval --evaluation.calibration_list LIST, or "
            "`speakernet calibrate` for the model file; for score files with --fusion_scores and "
            "--fusion_trials"
        )
        return [*found, *missing, *([advice] if missing else [])]

    def lines(self) -> list[str]:
        """The first trials as a text table, then the sentences, for a terminal."""
        count = min(len(self.trials), NUM_IN_TERMINAL)
        rows = [self.header, *(self.row(number) for number in range(count))]
        more = [f"… and {len(self.trials) - count:,} more"] if count < len(self.trials) else []
        return [*text_table(rows), *more, *self.sentences()]

    def write(self, path: Path) -> None:
        """Write a CSV with a header and one line per trial in list order."""
        with atomic_write(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.header)
            writer.writerows(self.row(number) for number in range(len(self.trials)))


def described(threshold: Mapping[str, Any]) -> str:
    """What a threshold was chosen for and on which list."""
    fitted_on = f" on {threshold['list']}" if threshold.get("list") else ""
    return f"{threshold_label(str(threshold['name']))}{fitted_on}"


def read_llrs(path: Path) -> np.ndarray | None:
    """The log-likelihood ratios that `Decisions.write` wrote, (trials,); None if the file has
    none.
    """
    with reading(path, "decisions; score the list again"), open_text(path) as file:
        rows = list(csv.DictReader(file))
        return (
            np.array([float(row[LLR_COLUMN]) for row in rows])
            if rows and LLR_COLUMN in rows[0]
            else None
        )


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
        return Decisions(self.trials, self.scores, self.llrs, self.results.thresholds or ())

    def lines(self, digits: int = 2) -> list[str]:
        """The headline and, without error rates, the decisions, for a terminal."""
        others = [
            f"{name}: {headline_sentence(one.results, digits)}" for name, one in self.others.items()
        ]
        return [
            headline_sentence(self.results, digits),
            *others,
            *(self.decisions.lines() if self.decisions else ()),
        ]


@dataclass(frozen=True)
class RunData:
    """Everything that a page may show about a run; missing parts are None or empty."""

    folder: Path
    name: str
    """Its name on a page of several runs."""
    results: Results | None
    """None before the first evaluation."""
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
        results = self.results
        trials = self.trials
        scores = self.scores
        if results is None or results.eer_percent is not None or trials is None or scores is None:
            return None
        return Decisions(trials, scores, self.arrays.get("llrs"), results.thresholds or ())

    @property
    def labels(self) -> np.ndarray | None:
        """Labels (trials,) of the scores; None unless there are both targets and non-targets."""
        labels = None if self.trials is None or self.scores is None else self.trials.labels
        return None if labels is None or missing_kind(labels) else labels

    @property
    def list_name(self) -> str:
        """The name of the scored list."""
        name = self.results.list_name() if self.results else ""
        return name or (
            Path(self.trials.source).name if self.trials is not None else "a list without a name"
        )

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The sections of the run; only `evaluation` in an evaluation folder without a run."""
        section = (self.results.config if self.results else None) or {}
        found = (
            read_yaml(self.config, str(self.folder / CONFIG))
            if self.config
            else {"evaluation": section}
        )
        return found if isinstance(found, Mapping) else {}


def read_run(folder: str | Path, name: str = "", evaluation: Evaluation | None = None) -> RunData:
    """Read a run or evaluation folder; scores and arrays come from `evaluation` if it is given."""
    folder = Path(folder)
    results = read_results(folder / RESULTS) if evaluation is None else evaluation.results
    run_folder = folder
    if results is not None and results.checkpoint and not (folder / METRICS).is_file():
        # An evaluation folder: use the run whose checkpoint was scored.
        run_folder = Path(results.checkpoint.get("path", "")).parent
    metrics = _read_metrics(run_folder / METRICS)
    # Epochs and steps of a later stage continue those of the previous one.
    for stage, path in later_stages(run_folder).items():
        ends = {key: max((one.get(key, 0) for one in metrics), default=0) for key in COUNTED}
        for one in _read_metrics(path / METRICS):
            moved = {key: one.get(key, 0) + end for key, end in ends.items()}
            metrics.append({**one, **moved, "begun": {"stage": stage, **ends}})
    if results is None and not metrics:
        raise FileError(
            f"{folder} contains neither {RESULTS} nor {METRICS}; give the folder of a run or an "
            "evaluation"
        )
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
        trials = evaluation.trials
        scores = np.asarray(evaluation.scores, dtype=np.float64)
        speakers = evaluation.speakers
        units = evaluation.units
        found = {
            "labels": trials.labels,
            "llrs": evaluation.llrs,
            "durations": evaluation.durations,
        }
        if speakers is not None:
            found |= {
                "speakers": speakers.ids,
                "speaker_names": np.array(speakers.names, dtype=np.str_),
            }
            # Without labels, the speakers are a guess.
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
    refuse_rows(~np.isfinite(scores), f"NaN or infinite in {folder / SCORES}")
    labels = run.arrays.get("labels")
    if labels is None or labels.shape != scores.shape:
        labels = None
        if results is None or not results.why_no_eer or results.num_targets is not None:
            logger.warning("%s: no labels were kept, so the report has no error curves", folder)
    return replace(run, trials=replace(trials, labels=labels), scores=scores)


def embedding_map(
    embeddings: np.ndarray, speakers: np.ndarray, names: list[str]
) -> dict[str, np.ndarray]:
    """The speakers with the most utterances on two principal components; empty without two speakers
    of two utterances.

    Principal components rather than t-SNE or UMAP: they are linear and have no settings, so a gap
    in the plot is a gap in the embeddings, and the same embeddings always give the same plot.

    Returns:
        `map_points` (utterances, 2), `map_speakers` (utterances,) rows of `map_names`, and
        `map_shares` (2,), the shares of these utterances' variance on each axis.
    """
    # Speakers with a single utterance form no group.
    counts = np.bincount(speakers)
    chosen = [one for one in np.argsort(-counts, kind="stable")[:MAP_SPEAKERS] if counts[one] >= 2]
    if len(chosen) < 2 or embeddings.shape[1] < 2:
        return {}
    rows = [np.flatnonzero(speakers == speaker)[:MAP_UTTERANCES_EACH] for speaker in chosen]
    table = embeddings[np.concatenate(rows)].astype(np.float64)
    # The SVD of the centred table gives the principal components without a covariance matrix.
    left, spread, _ = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    points = (left[:, :2] * spread[:2]).astype(np.float32)
    # The sign of an axis is arbitrary; fix it, so that the same run gives the same plot.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)
    shown = []
    for number, one in enumerate(rows, start=1):
        # The last folder that all utterances of the speaker share, otherwise a number.
        folders = [PurePosixPath(names[row].replace("\\", "/").lstrip("/")).parent for row in one]
        shown.append(PurePosixPath(os.path.commonpath(folders)).name or f"speaker {number}")
    shares = np.square(spread) / (np.square(spread).sum() or 1.0)
    return {
        "map_points": points,
        "map_speakers": np.repeat(np.arange(len(rows)), [len(one) for one in rows]),
        "map_names": np.array(shown, dtype=np.str_),
        "map_shares": shares[:2],
    }


def list_in_common(paths: Sequence[Path]) -> TrialList:
    """The labelled list that all these files and folders have scores for, with the labels kept in
    one of them.
    """
    names = ", ".join(map(str, paths))
    refused = None
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
    raise refused or ListError(f"{names}: no labelled scores; give their list with --trials")


def common_costs(systems: Iterable[Results | None]) -> dict[str, float]:
    """The costs `c_miss` and `c_fa` that all results with costs share; empty if they differ or none
    is known.
    """
    known = [results.dcf_costs for results in systems if results is not None and results.dcf_costs]
    return dict(known[0]) if known and all(costs == known[0] for costs in known) else {}


def compare_runs(runs: Sequence[RunData], speakers: Speakers, seed: int) -> Comparison:
    """Compare runs that have scored the same labelled trials, with the costs of their
    evaluations.
    """
    trials = runs[0].trials
    scores = [run.scores for run in runs if run.scores is not None]
    assert trials is not None and len(scores) == len(runs), "the runs have scores"
    options = EvaluationOptions().model_copy(update=common_costs(run.results for run in runs))
    compared = compare_scores(
        trials, scores, speakers, num_draws=options.bootstrap_samples, seed=seed, options=options
    )
    first, *others = (run.configuration for run in runs)
    return compared.with_one_system([is_other_seed(first, other) for other in others])


def configuration_of(scores: Path) -> Mapping[str, Any]:
    """The sections of the run whose model gave a score file; empty if the run folder is not
    known.
    """
    results = read_results(scores.with_name(RESULTS))
    if results is None:
        return {}
    folders = scores.parent, Path((results.checkpoint or {}).get("path", "")).parent
    config = next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)
    values = read_yaml_file(config, "a configuration") if config else {}
    return values if isinstance(values, Mapping) else {}


def is_other_seed(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two configurations of runs differ in nothing but `runtime.seed`."""
    runtimes = [configuration.get("runtime") for configuration in (first, second)]
    if not all(isinstance(runtime, Mapping) for runtime in runtimes):
        return False
    without = [{**runtime, "seed": None} for runtime in runtimes if isinstance(runtime, Mapping)]
    return {**first, "runtime": without[0]} == {**second, "runtime": without[1]}


def chosen_on_reported(scores: Path) -> str:
    """The warning, from the results beside a score file, that its model was selected on the same
    list; else empty.
    """
    results = read_results(scores.with_name(RESULTS))
    warnings = (results.warnings if results else None) or []
    return next(
        (one for one in warnings if one.startswith(CHOSEN_ON_REPORTED.partition(" same list")[0])),
        "",
    )


def read_results(path: Path) -> Results | None:
    """The results of an evaluation; None if there is no such file; FileError if it is damaged."""
    if not path.is_file():
        return None
    with (
        reading(path, "the results of an evaluation; evaluate again to write them"),
        open_text(path) as file,
    ):
        return Results.from_dict(json.load(file))


def is_number(value: object) -> bool:
    """Whether a value in a record can be plotted."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
    )


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    with reading(path, "one JSON record per line"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                # A killed run leaves half a line, and so may a run that is still writing.
                logger.warning("%s, line %d: incomplete record skipped", path, number)
                continue
            if isinstance(record, dict):
                records.append(
                    {
                        key: one
                        for key, one in record.items()
                        if (
                            isinstance(one, NOT_NUMBERS[key])
                            if key in NOT_NUMBERS
                            else is_number(one)
                        )
                    }
                )
    return records


def _read_kept(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a report, checked so that drawing them cannot fail."""
    arrays = read_arrays(path, ARRAYS_EXPECTED) if path.is_file() else {}
    for name, kinds, dimensions in KEPT_ARRAYS:
        if name in arrays and (
            arrays[name].dtype.kind not in kinds or arrays[name].ndim != dimensions
        ):
            found = f"{arrays[name].dtype} of {arrays[name].ndim} dimensions"
            raise FileError(f"{path}: {name} is {found}; expected {ARRAYS_EXPECTED}")
    if "map_points" in arrays:
        with reading(path, ARRAYS_EXPECTED):
            points = arrays["map_points"]
            speakers = arrays["map_speakers"]
            is_whole = points.shape == (len(speakers), 2) and len(arrays["map_shares"]) == 2
            if not is_whole or not set(speakers.tolist()) <= set(range(len(arrays["map_names"]))):
                raise FileError(
                    f"{path}: the arrays of the embedding map do not match; expected "
                    f"{ARRAYS_EXPECTED}"
                )
    return arrays
