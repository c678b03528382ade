"""Every malformed row of a list, not only the first: line numbers and what is wrong with each.

What is malformed is what the list's own reader refuses (`speakernet.data.lists`), so that doctor and training agree.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speakernet.checks.findings import Finding
from speakernet.data.lists import ListError, MalformedRows

NUM_EXAMPLES = 10


def row_findings(path: str | Path, read: Callable[[str | Path, MalformedRows], Any], check: str) -> list[Finding]:
    """One finding with the number of malformed rows and the first ten, or none where all are fine.

    Args:
        path: of the list.
        read: `read_training_list` or `read_trials`.
        check: what the finding is called.
    """
    malformed = MalformedRows(NUM_EXAMPLES)
    # A list that is not there or holds no row at all: the quick check says it, with what to do.
    with contextlib.suppress(ListError):
        read(path, malformed)
    if not malformed.count:
        return []
    message = f"{malformed.count:,} malformed rows in {path}"
    return [Finding("error", check, message, "mend or remove them", tuple(malformed.first))]
