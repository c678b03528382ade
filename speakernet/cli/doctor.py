"""Check lists, audio and machine before a run; the exit status is 0 if training can start and 1 if
not.

    speakernet doctor --config my.yaml
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
from pathlib import Path

from speakernet.checks import Finding, closing_line, table, worst
from speakernet.checks.doctor import (
    CheckRequest,
    duration_histogram,
    full_check,
    write_duration_png,
)
from speakernet.cli import load_configuration
from speakernet.config import Config
from speakernet.corpora.listing import positive_int
from speakernet.data.lists import audio_folder_of
from speakernet.files import is_address
from speakernet.machine.facts import system_info, usable_cores

TAKES_CONFIG = True


ARGUMENTS = {
    "--list": {"type": Path, "help": "training list"},
    "--root": {
        "type": Path,
        "help": (
            "folder or packed corpus that the lists' paths are relative to (default: the "
            "list's own)"
        ),
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
    "--png": {"type": Path, "help": "also draw the duration histograms to this file"},
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
    """Check, print the table, the histograms and the conclusion."""
    config = (
        load_configuration(arguments.config_arguments).config
        if arguments.config_arguments
        else None
    )
    findings, durations = full_check(_request(arguments, config))
    if config is not None:
        # Late: torch takes two seconds to import, and a mistyped option should not wait for it.
        from speakernet.assembly.runs import check_options
        from speakernet.checks.augmentation import augmentation_findings

        findings += _pending_corpus(config)
        findings += augmentation_findings(
            config.augment, config.data.sample_rate, is_fast=arguments.fast
        )
        findings += check_options(config)
    if has_picture := arguments.png is not None and bool(durations):
        write_duration_png(arguments.png, durations)
    level = worst(findings)
    if arguments.json:
        shown = [dataclasses.asdict(finding) for finding in findings]
        lines = [
            json.dumps({"level": level, "findings": shown, "machine": system_info()}, indent=2)
        ]
    else:
        histograms = [
            f"\n{title}, durations\n{duration_histogram(one)}" for title, one in durations.items()
        ]
        picture = [f"\nhistograms: {arguments.png}"] if has_picture else []
        has_data = bool(config or arguments.list or arguments.trials)
        lines = [
            table(findings),
            *histograms,
            *picture,
            f"\n{closing_line(findings, has_data=has_data)}",
        ]
    sys.stdout.write("\n".join([*lines, ""]))
    return int(level == "error")


def _request(arguments: argparse.Namespace, config: Config | None) -> CheckRequest:
    if not arguments.min_seconds >= 0:
        raise ValueError(f"--min_seconds {arguments.min_seconds:g}; expected at least 0")
    thoroughness = {
        "min_seconds": arguments.min_seconds,
        "is_fast": arguments.fast,
        "num_jobs": arguments.jobs,
    }
    root = arguments.trial_root or arguments.root
    given = tuple((path, root or audio_folder_of(path)) for path in arguments.trials)
    if config is None:
        return CheckRequest(
            train_list=arguments.list,
            train_root=arguments.root
            or (audio_folder_of(arguments.list) if arguments.list else None),
            trials=given,
            **thoroughness,
        )
    data = config.data
    save_path = Path(config.training.save_path or "exps")
    if _pending_corpus(config):
        return CheckRequest(save_path=save_path, **thoroughness)
    lists = {
        (Path(path), _audio_of(root or audio_folder_of(path)))
        for path, root in (
            (data.validation_list, data.validation_path),
            (data.test_list, data.test_path),
        )
        if path
    }
    # Optional lists are checked when training starts.
    required = [one for one in data.test_lists.values() if not one.optional]
    lists |= {
        (Path(one.list), _audio_of(one.path or data.test_path or audio_folder_of(one.list)))
        for one in required
    }
    return CheckRequest(
        train_list=Path(data.train_list) if data.train_list else None,
        train_root=_audio_of(data.train_path or audio_folder_of(data.train_list))
        if data.train_list
        else None,
        corpora={
            name: (
                Path(one.train_list),
                _audio_of(one.train_path or audio_folder_of(one.train_list)),
            )
            for name, one in data.corpora.items()
        },
        trials=tuple(sorted(lists, key=str)) + given,
        save_path=save_path,
        min_utterances=data.utterances_per_speaker,
        # The same tolerance for missing files as in training.
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        sample_rate=data.sample_rate,
        **thoroughness,
    )


def _audio_of(root: str | Path) -> str | Path:
    return root if is_address(root) else Path(root)


def _pending_corpus(config: Config) -> list[Finding]:
    """A finding if the synthetic corpus is still to be made, on first use."""
    folder = config.data.synthetic_corpus
    if not folder or (Path(folder) / "complete.json").exists():
        return []
    return [
        Finding(
            "ok",
            "lists",
            f"nothing to check yet: the synthetic corpus is made in {folder} on first use",
        )
    ]
