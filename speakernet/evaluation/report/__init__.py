"""`report.html`: the results of one run, or of several side by side, in a single self-contained
file.
"""

from speakernet.evaluation.report.writing import (
    write_evaluation,
    write_report,
    write_side_by_side,
)

__all__ = ["write_evaluation", "write_report", "write_side_by_side"]
