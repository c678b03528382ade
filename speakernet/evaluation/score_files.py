"""Score files: `enrol test score` a line, in the order of the trial list; our own and those of other tools.

Reading gives the pairs as a `TrialList` without labels and the scores beside it; matching them with a labelled list
names the first line that differs.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakernet.data.lists import ListError, StringTable, TrialList
from speakernet.files import atomic_write, open_text, reading
from speakernet.run_folder import EVALUATIONS, SCORES, evaluation_folder
from speakernet.terminal import MAX_NAMED

LONGEST_LINE = 64 << 10
FORM = "'enrol test score' (a fourth column target|nontarget is left aside)"


@dataclass(frozen=True)
class ScoreFile:
    """What a score file holds.

    Attributes:
        trials: the pairs, without labels.
        scores: (trials,) float64; higher means more alike.
    """

    trials: TrialList
    scores: np.ndarray


def find_scores(path: Path, trials: TrialList) -> tuple[Path, np.ndarray]:
    """The score file of a list in a folder of a run or an evaluation (a file is itself), and its scores.

    Args:
        path: a score file or a folder; a run keeps the scores of its test list itself, others under `eval/`.
        trials: the list that the scores are of: its name tells evaluations of one run apart.

    Raises:
        ListError: no scores in the folder, or those of other lists.
        ValueError: NaN scores.
    """
    if not path.is_dir():
        return path, scores_for(trials, read_scores(path))
    found = sorted((path / EVALUATIONS).glob(f"*/{SCORES}"))
    own, named = path / SCORES, evaluation_folder(path, trials.source) / SCORES
    refused: ListError | None = None
    for candidate in (own, named, *(found if len(found) == 1 else ())):
        if not candidate.is_file():
            continue
        try:
            return candidate, scores_for(trials, read_scores(candidate))
        except ListError as error:
            # The run's own scores may be those of its test list, and the list's own lie under eval/.
            refused = refused or error
    if refused:
        raise refused
    if not found:
        raise ListError(f"{path}: no {SCORES}, nor one in {path}/{EVALUATIONS}/*/; score the list first, with --eval")
    names, other = ", ".join(one.parent.name for one in found), Path(trials.source).stem
    raise ListError(f"{path}/{EVALUATIONS} holds scores of {names}, none of {other}; name the folder of one of them")


def read_scores(path: str | Path) -> ScoreFile:
    """Read `enrol test score` lines; blank lines are skipped, a line with tabs is split at tabs only.

    Raises:
        ListError: missing, empty, not UTF-8, or a malformed line (named with its number).
    """
    rows: dict[str, int] = {}
    pairs: list[int] = []
    scores: list[float] = []
    for number, fields in _lines(path):
        try:
            if len(fields) not in (3, 4):
                raise ValueError(len(fields))
            scores.append(float(fields[2]))
        except ValueError as error:
            raise ListError(f"{path}, line {number}: expected {FORM}, found {' '.join(fields)[:120]!r}") from error
        pairs.append(rows.setdefault(fields[0], len(rows)))
        pairs.append(rows.setdefault(fields[1], len(rows)))
    if not pairs:
        raise ListError(f"{path}: no scores; expected lines {FORM}")
    both = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    trials = TrialList(StringTable.from_strings(rows), both[:, 0].copy(), both[:, 1].copy(), None, str(path))
    return ScoreFile(trials, np.array(scores, dtype=np.float64))


def write_scores(path: str | Path, trials: TrialList, scores: np.ndarray) -> None:
    """Write one line a trial in the order of the list, atomically; names with spaces make a line tab-separated."""
    names = list(trials.names)
    with atomic_write(path) as file:
        for enrol, test, score in zip(trials.enrol.tolist(), trials.test.tolist(), scores.tolist(), strict=True):
            # A name with a space would otherwise be read as two.
            gap = "\t" if " " in names[enrol] or " " in names[test] else " "
            file.write(f"{names[enrol]}{gap}{names[test]}{gap}{score:.6f}\n")


def scores_for(trials: TrialList, found: ScoreFile) -> np.ndarray:
    """The scores of `found`, once it is sure that they belong to these trials in this order.

    Raises:
        ListError: another number of trials or another order (the first difference, with both line numbers).
        ValueError: scores that are NaN or infinite (the first ten lines are named).
    """
    ours, theirs = trials, found.trials
    # Rows of names count by first mention in both, so equal lists have equal tables and equal rows.
    is_same = len(ours) == len(theirs) and ours.names == theirs.names
    if not (is_same and np.array_equal(ours.enrol, theirs.enrol) and np.array_equal(ours.test, theirs.test)):
        raise ListError(_first_difference(ours, theirs))
    bad = np.flatnonzero(~np.isfinite(found.scores))
    if len(bad):
        lines = ", ".join(str(_line_of(theirs.source, int(row))) for row in bad[:MAX_NAMED])
        more = " …" if len(bad) > MAX_NAMED else ""
        raise ValueError(
            f"{theirs.source}: {len(bad)} of {len(theirs)} scores are NaN or infinite: lines {lines}{more}"
        )
    return found.scores


def _lines(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of each line that is not blank."""
    with reading(path, f"a score file with lines {FORM}", ListError), open_text(path) as file:
        # Every way to end a line counts, also a carriage return alone.
        file.reconfigure(newline=None)  # type: ignore[attr-defined]
        for number in itertools.count(start=1):
            line = file.readline(LONGEST_LINE)
            if not line:
                return
            if len(line) == LONGEST_LINE:
                raise ListError(f"{path}, line {number}: longer than {LONGEST_LINE:,} characters; expected {FORM}")
            fields = line.strip().split("\t") if "\t" in line.strip() else line.split()
            if fields:
                yield number, fields


def _first_difference(ours: TrialList, theirs: TrialList) -> str:
    for row in range(min(len(ours), len(theirs))):
        wanted = (ours.names[int(ours.enrol[row])], ours.names[int(ours.test[row])])
        seen = (theirs.names[int(theirs.enrol[row])], theirs.names[int(theirs.test[row])])
        if wanted != seen:
            return (
                f"{theirs.source}, line {_line_of(theirs.source, row)}: scores {' '.join(seen)!r}, but line "
                f"{_line_of(ours.source, row)} of {ours.source} is {' '.join(wanted)!r}; give the scores of this very "
                "list, in its order"
            )
    return (
        f"{theirs.source} has {len(theirs)} scores, {ours.source} has {len(ours)} trials (equal up to the shorter "
        "one's end); give the scores of this very list"
    )


def _line_of(path: str, row: int) -> int:
    """The line that entry `row` stands on (blank lines do not count); the row itself where the file is gone."""
    if not Path(path).is_file():
        return row + 1
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        filled = (number for number, line in enumerate(file, start=1) if line.strip())
        return next(itertools.islice(filled, row, None), row + 1)
