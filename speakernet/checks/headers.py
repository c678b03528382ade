"""What the headers of a list's files say: unreadable ones, rates, channels, durations. No samples are read."""

import numpy as np

from speakernet.checks.findings import Finding
from speakernet.data.lists import StringTable
from speakernet.data.lookup import LookupTable
from speakernet.terminal import MAX_NAMED


def header_findings(
    names: StringTable,
    lookup: LookupTable,
    check: str,
    *,
    min_seconds: float,
    known_missing: np.ndarray | None = None,
    tolerated_share: float = 0.0,
) -> list[Finding]:
    """Findings about rates, channels and durations of the files of one list.

    Args:
        names: the files.
        lookup: their headers, row for row.
        check: what the list is, as "training audio".
        min_seconds: shorter utterances are named.
        known_missing: rows that were reported already.
        tolerated_share: share of unreadable files up to which they are a warning only.
    """
    findings = []
    # A file that is not there has no header either: it is told once, as missing.
    reported = set() if known_missing is None else set(known_missing.tolist())
    bad = sorted(set(lookup.problems) - reported)
    if bad:
        findings.append(
            Finding(
                "warning" if len(bad) <= tolerated_share * len(names) else "error",
                check,
                f"{len(bad):,} of {len(names):,} files cannot be read",
                "replace them, or take them off the list (speakernet doctor shows more of them); training can "
                "also leave a few out: --data.on_bad_audio skip",
                tuple(lookup.problems[row] for row in bad[:MAX_NAMED]),
            )
        )
    is_good = np.ones(len(names), dtype=bool)
    is_good[list(lookup.problems)] = False
    if not is_good.any():
        return findings
    findings += _format_findings(lookup, is_good, check)
    seconds = lookup.seconds
    hours = seconds[is_good].sum() / 3600
    middle = np.median(seconds[is_good])
    total = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    message = f"{total}; {seconds[is_good].min():.2f} to {seconds[is_good].max():.1f} s, median {middle:.1f} s"
    findings.append(Finding("ok", f"{check}: length", message))
    # Broken files have 0 seconds and were named above.
    short = np.flatnonzero(is_good & (seconds < min_seconds))
    if len(short):
        findings.append(
            Finding(
                "warning",
                f"{check}: short",
                f"{len(short):,} files are shorter than {min_seconds:g} s",
                "they are repeated to fill a crop and teach little; leave them out with data.min_seconds",
                tuple(f"{names[int(row)]} ({seconds[row]:.2f} s)" for row in short[:MAX_NAMED]),
            )
        )
    return findings


def _format_findings(lookup: LookupTable, is_good: np.ndarray, check: str) -> list[Finding]:
    rates, rate_counts = np.unique(lookup.sample_rates[is_good], return_counts=True)
    shown = ", ".join(f"{rate} Hz ({count:,})" for rate, count in zip(rates, rate_counts, strict=True))
    num_other = int(rate_counts[rates != lookup.sample_rate].sum())
    findings = []
    if not num_other:
        findings.append(Finding("ok", f"{check}: rate", shown))
    else:
        low = rates.min() < lookup.sample_rate
        advice = "they are resampled on every read, which is slow: convert or pack them once (speakernet pack)"
        # Telephone and studio differ above 4 kHz: a network takes the microphone for the voice.
        if low:
            advice += "; lower rates lack the upper band, and a network learns to tell speakers by that"
        findings.append(Finding("warning", f"{check}: rate", shown, advice))
    # A conversation may have a speaker on each side, whose mixture is neither.
    num_wide = int(np.count_nonzero(lookup.num_channels[is_good] > 1))
    if num_wide:
        message = f"{num_wide:,} files have up to {lookup.num_channels[is_good].max()} channels; they are mixed down"
        advice = "fine if the channels are copies; if each holds another speaker, split them first"
        findings.append(Finding("warning", f"{check}: channels", message, advice))
    return findings
