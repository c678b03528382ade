"""Check lists, audio and machine before a run; the exit code says the worst (0 ok, 1 warnings, 2 errors).

    speakernet doctor --config my.yaml
    speakernet doctor --list train.txt --root wav --trials trials.txt
    speakernet doctor                                                   the machine only
    speakernet doctor --config my.yaml --part 2/4 --part_folder found   a quarter of the files; the last part says all

Everything is read once; --fast reads headers only.
"""

import argparse
import sys
from pathlib import Path

from speakernet.checks.findings import Finding, closing_line, exit_code, table
from speakernet.checks.full import CheckRequest, full_check
from speakernet.cli.defaults import load_configuration
from speakernet.config import Config
from speakernet.data.lists import audio_folder_of
from speakernet.machine.limits import usable_cores
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
    if result.missing:
        sys.stdout.write(f"part {part} is done; the parts {list_parts(result.missing)} are missing\n")
        return 0
    if config is not None:
        result.findings += _corpus_to_come(config)
        result.findings += check_options(config)
    out = sys.stdout
    out.write(table(result.findings) + "\n")
    for title, seconds in result.durations.items():
        out.write(f"\n{title}, durations\n{duration_histogram(seconds)}\n")
    if arguments.png is not None and result.durations:
        write_duration_png(arguments.png, result.durations)
        out.write(f"\nhistograms: {arguments.png}\n")
    out.write(f"\n{closing_line(result.findings)}\n")
    return exit_code(result.findings)


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
