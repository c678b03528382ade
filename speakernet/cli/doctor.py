"""Check lists, audio and machine before a run; the exit status is 0 if training can start and 1 if
not.

    speakernet doctor my.yaml                                           or --config my.yaml
    speakernet doctor --list train.txt --root wav --trials trials.txt
    speakernet doctor                                                   the machine only
    speakernet doctor --json                                            as JSON, for a bug report or
    a program

Every file is read once; with --fast, only its header.
"""

import argparse
import dataclasses
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speakernet.checks import Finding, worst
from speakernet.checks.doctor import CheckRequest, augmentation_findings, full_check
from speakernet.cli.shared import load_configuration
from speakernet.config import Config
from speakernet.corpora.listing import positive_int
from speakernet.data.lists import audio_folder_of
from speakernet.files import is_address
from speakernet.machine.facts import system_info, usable_cores
from speakernet.terminal import counted

TAKES_CONFIG = True
TABLE_WIDTH = 118


ARGUMENTS = {
    "--list": {"type": Path, "help": "training list"},
    "--root": {
        "type": Path,
        "help": "folder or packed corpus that the lists' paths are relative to (default: the "
        "list's own)",
    },
    "--trials": {
        "type": Path,
        "action": "append",
        "default": [],
        "help": "trial list (repeatable)",
    },
    "--trial_root": {"type": Path, "help": "root of the trial lists, if it differs from --root"},
    "--fast": {"action": "store_true", "help": "read headers only, no samples"},
    "--min_seconds": {
        "type": float,
        "default": CheckRequest.min_seconds,
        "help": "report files shorter than this many seconds",
    },
    "--json": {
        "action": "store_true",
        "help": "print a JSON object with versions, machine and all findings",
    },
    "--jobs": {
        "type": positive_int,
        "default": usable_cores(),
        "help": "number of files to read at once",
    },
}


def run(arguments: argparse.Namespace) -> int:
    """Check, print the table and the conclusion."""
    config = None
    if arguments.config_arguments:
        config = load_configuration(arguments.config_arguments).config
    # All problems are collected, so that one run of the doctor is enough to repair a list.
    findings = full_check(_request(arguments, config))
    # Without a configuration there are only lists and the machine to check.
    if config is not None:
        # Late: torch takes two seconds to import, and a mistyped option should not wait for it.
        from speakernet.assembly.runs import check_options

        if _is_corpus_pending(config):
            folder = config.data.synthetic_corpus
            message = f"nothing to check yet: the synthetic corpus is made in {folder} on first use"
            findings.append(Finding("ok", "lists", message))
        findings += augmentation_findings(
            config.augment, config.data.sample_rate, is_fast=arguments.fast
        )
        findings += check_options(config)
    level = worst(findings)
    if arguments.json:
        shown = [dataclasses.asdict(finding) for finding in findings]
        report = {"level": level, "findings": shown, "machine": system_info()}
        text = json.dumps(report, indent=2)
    else:
        has_data = bool(config or arguments.list or arguments.trials)
        text = f"{table(findings)}\n\n{closing_line(findings, has_data=has_data)}"
    sys.stdout.write(f"{text}\n")
    return int(level == "error")


def closing_line(findings: Iterable[Finding], *, has_data: bool) -> str:
    """The conclusion in one line; without data it concerns only the machine.

    >>> closing_line([Finding("warning", "balance", "odd"), Finding("ok", "a", "b")], has_data=True)
    '1 warning: you can train'
    """
    # Many read only the last line, so it must not promise more than was checked.
    levels = Counter(finding.level for finding in findings)
    counts = [counted(levels[level], level) for level in ("error", "warning") if levels[level]]
    conclusion = "you can train"
    if levels["error"]:
        conclusion = "fix the errors before you train"
    elif not has_data:
        conclusion = "you can train on this machine; add --config or --list to check data"
    return f"{', '.join(counts) or 'no problems'}: {conclusion}"


def table(findings: Iterable[Finding]) -> str:
    """The findings as text: level, check and message, with examples and advice on separate
    lines.
    """
    # Examples and advice get lines of their own, because paths do not fit into columns.
    findings = list(findings)
    width = max([len(finding.check) for finding in findings] + [5])
    indent = " " * (width + 10)
    lines = [f"{'level':<8} {'check':<{width}} found"]
    for finding in findings:
        lines += _wrap(f"{finding.level:<8} {finding.check:<{width}} ", finding.message)
        for example in finding.examples:
            lines += _wrap(f"{indent}- ", example)
        if finding.advice:
            lines += _wrap(f"{indent}-> ", finding.advice)
    return "\n".join(lines)


def _wrap(start: str, text: str) -> list[str]:
    """The lines of a text that begins after `start`, where its further lines are indented to."""
    # Long words are mostly paths, which people copy, so they are not broken.
    wrapper = textwrap.TextWrapper(
        TABLE_WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text) or [start]


def _request(arguments: argparse.Namespace, config: Config | None) -> CheckRequest:
    # "Not at least", because a NaN is not below 0 either.
    if not arguments.min_seconds >= 0:
        raise ValueError(f"--min_seconds {arguments.min_seconds:g}; expected at least 0")
    # The most specific comes first: --trial_root, the root of all lists, the list's own folder.
    root = arguments.trial_root or arguments.root
    named = tuple((path, root or audio_folder_of(path)) for path in arguments.trials)
    request: dict[str, Any] = {
        "trials": named,
        "min_seconds": arguments.min_seconds,
        "is_fast": arguments.fast,
        "num_jobs": arguments.jobs,
    }
    if config is None:
        if arguments.list:
            request["train_list"] = arguments.list
            request["train_root"] = arguments.root or audio_folder_of(arguments.list)
        return CheckRequest(**request)
    request["save_path"] = config.run_folder
    # The first run makes the lists of a synthetic corpus; until then they would be reported as
    # missing.
    if _is_corpus_pending(config):
        return CheckRequest(**request | {"trials": ()})
    data = config.data
    trials = [(data.validation_list, data.validation_path), (data.test_list, data.test_path)]
    # Optional lists are checked when training starts.
    for test_list in data.test_lists.values():
        if not test_list.optional:
            trials.append((test_list.list, test_list.path or data.test_path))
    # A set, because validation and test are often the same list.
    trial_lists = {_locate_list(path, audio) for path, audio in trials if path}
    corpora = {}
    for name, corpus in data.corpora.items():
        corpora[name] = _locate_list(corpus.train_list, corpus.train_path)
    if data.train_list:
        listed = _locate_list(data.train_list, data.train_path)
        request["train_list"], request["train_root"] = listed
    for option in ("cohort_list", "calibration_list"):
        if path := getattr(config.evaluation, option):
            request[option] = Path(path)
    request |= {
        "corpora": corpora,
        "trials": (*sorted(trial_lists, key=str), *named),
        "enrolment": data.enrolment_list,
        "min_utterances": data.utterances_per_speaker,
        # The same tolerance for missing files as in training.
        "max_bad_share": data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        "sample_rate": data.sample_rate,
    }
    return CheckRequest(**request)


def _locate_list(path: str, audio: str) -> tuple[Path, str | Path]:
    """A list and the folder or packed corpus of its audio, which may be at an address."""
    if is_address(audio):
        return Path(path), audio
    return Path(path), Path(audio or audio_folder_of(path))


def _is_corpus_pending(config: Config) -> bool:
    """Whether the synthetic corpus is still to be made, on first use."""
    folder = config.data.synthetic_corpus
    return bool(folder) and not (Path(folder) / "complete.json").exists()
