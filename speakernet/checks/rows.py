"""Every malformed row of a list, not only the first: line numbers and what is wrong with each."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from speakernet.checks.findings import Finding

NUM_EXAMPLES = 10
SHOWN_CHARACTERS = 80


def training_row_problem(line: str) -> str | None:
    """What is wrong with a row of a training list, or None; blank rows are fine.

    >>> training_row_problem("id1")
    "expected 'speaker path'"
    """
    return "expected 'speaker path'" if len(line.split(None, 1)) == 1 else None


def trial_row_problem(line: str) -> str | None:
    """What is wrong with a row of a trial list (any of its forms), or None; blank rows are fine."""
    fields = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
    if not line.strip() or len(fields) == 2:
        return None
    if len(fields) == 3 and (fields[0] in ("0", "1") or fields[2].strip() in ("target", "nontarget")):
        return None
    return "expected '1 enrol test', '0 enrol test', 'enrol test target|nontarget' or 'enrol test'"


def row_findings(path: str | Path, problem_of: Callable[[str], str | None], check: str) -> list[Finding]:
    """One finding with the number of malformed rows and the first ten, or none where all are fine."""
    try:
        bad = _bad_rows(Path(path), problem_of)
        examples = tuple(islice(bad, NUM_EXAMPLES))
        num_bad = len(examples) + sum(1 for _ in bad)
    except OSError:
        # The reader of the list says it better.
        return []
    if not examples:
        return []
    return [Finding("error", check, f"{num_bad:,} malformed rows in {path}", "mend or remove them", examples)]


def _bad_rows(path: Path, problem_of: Callable[[str], str | None]):  # type: ignore[no-untyped-def]
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            problem = problem_of(line)
            if problem is None and "\ufffd" in line:
                problem = "not UTF-8 text"
            if problem is not None:
                yield f"line {number}: {problem}, found {line.strip()[:SHOWN_CHARACTERS]!r}"
