"""`report.html`: the results of a run in a single self-contained file."""

from speakernet.evaluation.report.writing import write_evaluation, write_report

__all__ = ["write_evaluation", "write_report"]
