"""The command line: one table of commands, one short file per command, imported only when it is called."""

import argparse
import ast
import errno
import importlib
import importlib.util
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import speakernet
from speakernet.machine.memory import HUGE_PAGES, is_out_of_memory
from speakernet.options import suggestion
from speakernet.parallel.distributed import is_first, is_first_here
from speakernet.terminal import TerminalHandler

COMMANDS = {
    "train": "train",
    "evaluate": "evaluate",
    "compare": "compare",
    "report": "report",
    "prepare": "prepare",
    "pack": "pack",
    "doctor": "doctor",
    "list": "list_parts",
    "show-config": "show_config",
    "find-batch-size": "find_batch_size",
    "benchmark": "benchmark",
    "import-weights": "import_weights",
    "export": "export",
    "serve": "serve",
    "info": "info",
    "calibrate": "calibrate",
    "verify": "verify",
    "embed": "embed",
    "enroll": "enroll",
    "identify": "identify",
    "people": "people",
}
"""Command name -> module in this room, with `add_arguments(parser)` and `run(arguments) -> exit status`.

A module with `TAKES_CONFIG = True` also accepts `--config FILE` and every option of the configuration; they arrive in
`arguments.config_arguments` for `speakernet.config.load_config`. A command of several parts has `main(arguments)`
instead and parses what follows its name itself. One with `ERROR_STATUS` ends with it after every error, also
one of ours: its status 1 is an answer.
"""

INTERRUPTED = 130
BROKEN_PIPE = 141
EXIT_STATUSES = {
    0: "done",
    1: "failed; the message says what to mend",
    2: "wrong usage",
    75: "a loader worker was killed, crashed or hung, and last.pt is written; or another process of the run was lost, "
    "and last.pt is that of the last save; the same command goes on",
    129: "ended by SIGHUP (the terminal was closed); training has written last.pt, the same command goes on",
    INTERRUPTED: "interrupted by Ctrl-C (SIGINT); training has written last.pt, the same command goes on",
    BROKEN_PIPE: "whoever read the output closed it (`speakernet list | head`)",
    138: "ended by SIGUSR1, by which a cluster takes its machine back; as SIGTERM",
    143: "ended by SIGTERM; training has written last.pt, the same command goes on",
}
"""What a command's exit status means; `speakernet doctor` says in its help what its own 1 and 2 mean."""


SYSTEM_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, then give the same command again",
    errno.EDQUOT: "your share of the disk is used up: free some space, then give the same command again",
    errno.EROFS: "the disk can only be read: choose another place (--save_path for a run)",
    errno.EACCES: "you may not write or read there: choose another place (--save_path for a run), or mend the rights",
    errno.ENOTDIR: "part of that path is a file: choose another place (--save_path for a run)",
    errno.EIO: "the disk or the network gives errors: look at the system's log",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}
"""What to do where the system refuses, by its number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that the user can mend are printed without a traceback.

    Returns:
        The exit status: one of `EXIT_STATUSES`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return _to_a_reader(lambda: _dispatch(given))


def _dispatch(arguments: list[str]) -> int:
    """Find the command and run it, or say what there is."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        sys.stdout.write(f"speakernet {speakernet.__version__}\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        sys.stderr.write(f"speakernet: unknown command {name!r}; {suggestion(name, COMMANDS)}\n")
        return 2
    return run_command(f"speakernet.cli.{COMMANDS[name]}", f"speakernet {name}", rest)


def run_command(module_name: str, program: str, arguments: Sequence[str]) -> int:
    """Run the command that a module holds, as `main` does; the door for scripts of the checkout beside the package.

    Args:
        module_name: as `import` takes it; `COMMANDS` says what such a module has.
        program: what the command is called, for its help and its messages.
        arguments: what follows that name on the command line.

    Returns:
        The exit status: one of `EXIT_STATUSES`.
    """
    return _to_a_reader(lambda: _run(module_name, program, arguments))


def _to_a_reader(work: Callable[[], int]) -> int:
    """Do work that prints; where its reader has closed the pipe nothing more is said."""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _has_no_reader() -> bool:
    """Whether the output goes into a pipe that was closed at its other end."""
    if not hasattr(select, "poll"):
        return True
    watch = select.poll()
    try:
        watch.register(sys.stdout.fileno(), 0)
    except io.UnsupportedOperation:
        # A host program has put something else in its place.
        return False
    return any(event & select.POLLERR for _, event in watch.poll(0))


def _run(module_name: str, program: str, arguments: Sequence[str]) -> int:
    _log_to_the_terminal(module_name.partition(".")[0])
    if "torch" not in sys.modules:
        # torch reads both once, when it is imported.
        os.environ.setdefault(HUGE_PAGES, "1")
        # Of its profiler: beyond errors. It calls a machine without a GPU one.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    module = importlib.import_module(module_name)
    try:
        if hasattr(module, "main"):
            return module.main(arguments)
        status = module.run(_parse(module, program, arguments)) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as interrupt:
        if is_first_here(os.environ):
            sys.stderr.write("\ninterrupted\n")
        return getattr(interrupt, "exit_status", INTERRUPTED)
    except Exception as error:
        failed = getattr(module, "ERROR_STATUS", None)
        is_known = isinstance(error, ValueError | OSError) or is_out_of_memory(error)
        if not is_known or "--debug" in arguments:
            if failed is None:
                raise
            traceback.print_exc()
            return int(failed)
        # A worker's or a converter's pipe is an error like others.
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            raise
        # Of several processes that fail for one reason one says it; before they have met, the first of each machine.
        if not getattr(error, "is_said", not is_first_here(os.environ)):
            sys.stderr.write(f"\n{program}: {_message(error)}\n")
        return getattr(error, "exit_status", 1) if failed is None else int(failed)


def build_parser(module: ModuleType, program: str) -> argparse.ArgumentParser:
    """The parser of a command's own options; those of the configuration are what it leaves over.

    Args:
        module: as `COMMANDS` says.
        program: what the command is called.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if getattr(module, "TAKES_CONFIG", False):
        parser.usage = f"{program} --config FILE [--config FILE …] [--section.key VALUE …] [options below]"
    module.add_arguments(parser)
    return parser


def _parse(module: ModuleType, program: str, rest: Sequence[str]) -> argparse.Namespace:
    takes_config = getattr(module, "TAKES_CONFIG", False)
    parser = build_parser(module, program)
    asked = [one for one in rest if one in ("-h", "--help")]
    if takes_config and asked:
        # Late: only a page of help needs the options of every part.
        from speakernet.config.reference import help_text

        topic = rest[rest.index(asked[0]) + 1 :][:1]
        options = help_text(topic[0] if topic and not topic[0].startswith("-") else "")
        parser.epilog = options + _exit_statuses()
    parsed, config_arguments = parser.parse_known_args(rest)
    if config_arguments and not takes_config:
        first = config_arguments[0]
        what = "unknown option" if first.startswith("-") else "one word too many:"
        parser.error(f"{what} {first!r}; see `{program} --help`")
    parsed.config_arguments = config_arguments
    return parsed


def _exit_statuses() -> str:
    return "\n".join(["", "", "exit status:", *(f"  {code:<5} {meaning}" for code, meaning in EXIT_STATUSES.items())])


def _message(error: Exception) -> str:
    """Our own sentence, or the system's: which file, what it says of it, what to do."""
    if is_out_of_memory(error):
        # torch adds lines of statistics.
        found = str(error).partition("\n")[0]
        return (
            f"out of memory ({found}); take a smaller batch (`speakernet find-batch-size` tries which fits, "
            "training.accumulation_steps keeps the recipe's), fewer workers or a machine with more"
        )
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    # The second name is that of a rename's target.
    where = error.filename2 or error.filename
    advice = SYSTEM_ADVICE.get(error.errno or 0, "see to that, then give the same command again")
    return f"{where}: {error.strerror}; {advice}" if where else f"{error.strerror}; {advice}"


def _overview() -> str:
    lines = ["speakernet: train, score and use speaker-verification models", "", "commands:"]
    for name, module_name in COMMANDS.items():
        lines.append(f"  {name:<16} {_first_line(module_name)}")
    return "\n".join([*lines, "", "`speakernet COMMAND --help` tells the rest.", ""])


def _first_line(module_name: str) -> str:
    # Read, not imported: importing torch for a help page would take seconds.
    specification = importlib.util.find_spec(f"speakernet.cli.{module_name}")
    if specification is None or specification.origin is None:
        return ""
    tree = ast.parse(Path(specification.origin).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n", 1)[0]


def _log_to_the_terminal(*packages: str) -> None:
    handler = TerminalHandler()
    # What is only looked up when something is odd goes to the run's log.txt, which takes everything.
    handler.setLevel(logging.INFO if is_first(os.environ) else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    if not logging.getLogger().handlers:
        # Python's warnings come as log lines: printed by themselves they would be glued onto a bar.
        logging.captureWarnings(True)
    # Does nothing where a host program (a notebook, pytest) has set up logging already.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in {"speakernet", *packages}:
        logging.getLogger(package).setLevel(logging.DEBUG)
