"""Checks before the work: lists, audio, machine. Training runs `quick_check` at its start, `speakernet doctor` all."""

from speakernet.checks.findings import Finding, Level, worst
from speakernet.checks.quick import quick_check

__all__ = ["Finding", "Level", "quick_check", "worst"]
