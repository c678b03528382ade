"""Check lists, audio and machine before a run; the exit code says the worst (0 ok, 1 warnings, 2 errors).

    speakernet doctor --config my.yaml
    speakernet doctor --list train.txt --root wav --trials trials.txt
    speakernet doctor                                                   the machine only
    speakernet doctor --json                                            the same for an issue or a program
    speakernet doctor --config my.yaml --part 2/4 --part_folder found   a quarter of the files; the last part says all

Everything is read once; --fast reads headers only.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from speakernet.checks.findings import Finding, closing_line, exit_code, table, worst
from speakernet.checks.full import CheckRequest, CheckResult, full_check
from speakernet.cli.defaults import load_configuration
from speakernet.config import Config
from speakernet.data.lists import audio_folder_of
from speakernet.machine.facts import system_info, usable_cores
from speakernet.parts import WHOLE, add_part_argument, list_parts, parse_part

TAKES_CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check, and how thoroughly."""
    parser.add_argument("--list", type=Path, help="training list")
    parser.add_argument("--root", type=Path, help="folder or packed corpus that the lists' paths start from")
    parser.add_argument("--trials", type=Path, action="append", default=[], help="trial list (may be given again)")
    parser.add_argument("--trial_root", type=Path, help="root of the trial lists, if another")
    parser.add_argument("--fast", action="store_true", help="read headers only, no samples")
    shortest = CheckRequest.min_seconds
    parser.add_argument("--min_seconds", type=float, default=shortest, help="shorter files are named")
    parser.add_argument("--png", type=Path, help="also draw the histograms of durations into this file")
    parser.add_argument(
        "--json", action="store_true", help="print one object: versions, machine and all findings, paths as they are"
    )
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="files read at once")
    add_part_argument(parser, "the last to be done prints what all of them found")
    parser.add_argument("--part_folder", type=Path, help="with --part: where the parts leave what they found")


def run(arguments: argparse.Namespace) -> int:
    """Check, print the table, the histograms and what it all comes to, and return the worst level.

    Raises:
        ValueError: a part that there cannot be, or parts of something else in their folder.
    """
    part = parse_part(arguments.part) if arguments.part else WHOLE
    if bool(arguments.part) != bool(arguments.part_folder):
        raise ValueError("--part and --part_folder belong together: the parts leave there what they found")
    config = load_configuration(arguments.config_arguments).config if arguments.config_arguments else None
    # Late: --help and a mistyped option need neither torch nor matplotlib.
    from speakernet.assembly.checks import check_options
    from speakernet.checks.histograms import duration_histogram, write_duration_png

    result = full_check(_request(arguments, config), part, arguments.part_folder)
    if config is not None and not result.missing:
        result.findings += _corpus_to_come(config)
        result.findings += check_options(config)
    has_picture = arguments.png is not None and bool(result.durations)
    if has_picture:
        write_duration_png(arguments.png, result.durations)
    if arguments.json:
        sys.stdout.write(json.dumps(_as_object(result), indent=2) + "\n")
        return exit_code(result.findings)
    if result.missing:
        sys.stdout.write(f"part {part} is done; the parts {list_parts(result.missing)} are missing\n")
        return 0
    out = sys.stdout
    out.write(table(result.findings) + "\n")
    for title, seconds in result.durations.items():
        out.write(f"\n{title}, durations\n{duration_histogram(seconds)}\n")
    if has_picture:
        out.write(f"\nhistograms: {arguments.png}\n")
    out.write(f"\n{closing_line(result.findings)}\n")
    return exit_code(result.findings)


def _as_object(result: CheckResult) -> dict[str, Any]:
    """The answer of --json: what the table says, and what an issue needs to know of the machine."""
    return {
        "level": worst(result.findings),
        "findings": [dataclasses.asdict(finding) for finding in result.findings],
        "missing_parts": [str(part) for part in result.missing],
        "machine": system_info(),
    }


def _request(arguments: argparse.Namespace, config: Config | None) -> CheckRequest:
    thoroughness = {"min_seconds": arguments.min_seconds, "is_fast": arguments.fast, "num_jobs": arguments.jobs}
    root = arguments.trial_root or arguments.root
    given = tuple((path, root) for path in arguments.trials)
    if config is None:
        return CheckRequest(train_list=arguments.list, train_root=arguments.root, trials=given, **thoroughness)
    data = config.data
    lists = {
        (Path(path), Path(root or audio_folder_of(path)))
        for path, root in ((data.validation_list, data.validation_path), (data.test_list, data.test_path))
        if path
    }
    if _corpus_to_come(config):
        return CheckRequest(save_path=Path(config.training.save_path or "exps"), **thoroughness)
    return CheckRequest(
        train_list=Path(data.train_list) if data.train_list else None,
        train_root=Path(data.train_path or audio_folder_of(data.train_list)) if data.train_list else None,
        trials=tuple(sorted(lists, key=str)) + given,
        save_path=Path(config.training.save_path or "exps"),
        min_utterances=data.utterances_per_speaker,
        # As training judges missing files, so that what is fine here does not stop it.
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
        sample_rate=data.sample_rate,
        **thoroughness,
    )


def _corpus_to_come(config: Config) -> list[Finding]:
    """The finding that the corpus is made on first use, where that is so."""
    folder = config.data.synthetic_corpus
    if not folder or (Path(folder) / "complete.json").exists():
        return []
    return [Finding("ok", "lists", f"the synthetic corpus is made in {folder} on first use; nothing to check yet")]
