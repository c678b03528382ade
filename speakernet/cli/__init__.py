"""The command line: one table of commands, one short file per command, imported only when it is
called.

This file runs a command and shows its result or its error. `parsing` turns the words into its
arguments, `shared` has what several commands need.
"""

import contextlib
import errno
import gc
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from speakernet.cli.parsing import BROKEN_PIPE, INTERRUPTED, load_command, parse
from speakernet.distributed import CommandEnd, is_first, is_first_here, work
from speakernet.machine.memory import HUGE_PAGES, is_out_of_memory
from speakernet.terminal import TerminalHandler

logger = logging.getLogger(__name__)

COMMANDS = {
    "train": "train a model or, with --eval, score a trial list with one",
    "evaluate": "compute error rates from score files, or from a model as train --eval does",
    "compare": "compare systems that scored the same trials, with intervals for the differences",
    "study": "train variants of a recipe with several seeds, and compare them",
    "report": "rebuild the report of a run folder from the results in it",
    "prepare": "prepare a corpus: download, verify, unpack, write lists",
    "pack": "pack a corpus into one memory-mapped file, or into shards for streaming",
    "doctor": "check lists, audio and machine before a run",
    "list": "list available components and recipes: models, losses, …",
    "show-config": "print the fully resolved configuration, with every default",
    "find-batch-size": "find the fastest batch size that fits into memory",
    "benchmark": "measure the loader and the training step of a configuration",
    "import-weights": "convert another toolkit's checkpoint into a model file",
    "import-config": "convert a wespeaker configuration",
    "models": "list published models that can be used by name",
    "fetch": "fetch a published model and convert it to a model file",
    "push": "upload a model file and a model card to the Hugging Face hub",
    "export": "export a model for other programs: ONNX, torch.export, safetensors",
    "serve": "serve a model and a store of people over HTTP",
    "info": "show the contents of a model file",
    "adapt": "adapt a model file to recordings of another domain",
    "calibrate": "fit calibration and thresholds and write them into a model file",
    "verify": "decide whether two recordings are of the same speaker",
    "embed": "embed recordings into one file",
    "enroll": "add recordings of a person to a store of people",
    "identify": "identify which person in a store is speaking, if any",
    "who": "find who speaks when in a recording, naming the people in a store",
    "der": "compute diarization error rates from RTTM",
    "people": "list, remove, purge, re-embed and export the people of a store",
}
"""Command -> description; its module has the same name with underscores (`list` is
`list_components`)."""

YOUNG_OBJECTS = 50_000
"""New objects between two runs of the garbage collector. With Python's 700, a command searches
all that torch and matplotlib define again and again while it imports them: 0.3 s."""
SYSTEM_ADVICE = {
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "free some space, then run the same command again",
    errno.EMFILE: "raise `ulimit -n`",
}
"""What to do about a system error; for all others it is to check the path and its permissions."""

EXTRAS = {
    **dict.fromkeys(("fastapi", "uvicorn", "multipart", "python_multipart"), "serve"),
    **dict.fromkeys(("transformers", "peft"), "ssl"),
    "huggingface_hub": "hub",
    "shtab": "shell",
}
"""Library -> the extra that installs it; for all other libraries it is `export`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that the user can fix are printed without a traceback.

    Returns:
        The exit status: one of `parsing.EXIT_STATUSES`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    command = words[0]
    if command not in COMMANDS:
        return run_command("speakernet.cli.overview", "speakernet", words)
    return run_command(module_of(command), f"speakernet {command}", words[1:])


def run_script(*command: str) -> NoReturn:
    """Run a command with the arguments of this process, and exit with its status."""
    sys.exit(main([*command, *sys.argv[1:]]))


def module_of(command: str) -> str:
    """The module of a command; one named `list` would shadow the builtin in this package."""
    name = "list_components" if command == "list" else command.replace("-", "_")
    return f"speakernet.cli.{name}"


# What a user sees of a command: its answer on standard output and nothing else there; its log on
# standard error, one line at a time, beside a progress bar; one sentence if the user can mend what
# is wrong, and a traceback only if we have to; never Python's own message about a broken pipe, a
# full disk or Ctrl-C. All of that happens here once, so a command's module only returns its lines
# or raises.
def run_command(module_name: str, program: str, arguments: Sequence[str]) -> int:
    """Run a command module as `main` does; scripts of the checkout outside the package use it too.

    Returns:
        The exit status: one of `parsing.EXIT_STATUSES`.
    """
    _prepare_streams(module_name.partition(".")[0], is_quiet="--quiet" in arguments)
    if "torch" not in sys.modules:
        # torch reads both on import; without the second, its profiler reports a missing GPU as an
        # error.
        os.environ.setdefault(HUGE_PAGES, "1")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # pydantic searches every installed package for plugins, of which a command uses none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Restored at the end, since a notebook may run several commands in one process.
    generations = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *generations[1:])
    command = load_command(module_name)
    try:
        parsed = arguments if command.PARSES_ITSELF else parse(command, program, arguments)
        result = command.run(parsed)
        # Written only once the command has succeeded, so that a failed one prints no half answer.
        if isinstance(result, list):
            sys.stdout.writelines(f"{line}\n" for line in result)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt as interrupt:
        if is_first_here(os.environ):
            sys.stderr.write("\ninterrupted\n")
        return interrupt.exit_status if isinstance(interrupt, CommandEnd) else INTERRUPTED
    except Exception as error:
        # A broken pipe to a worker or a converter is an ordinary error.
        is_pipe = isinstance(error, BrokenPipeError) and _has_no_reader()
        _discard_output()
        if is_pipe:
            return BROKEN_PIPE
        message = _message(error)
        # If several ranks fail alike, one reports it; before they are connected, the first rank of
        # each machine.
        reports = is_first_here(os.environ) if work.reports is None else work.reports
        if message is None or "--debug" in arguments:
            # Python prints the traceback too, but its exit status would be 1.
            if command.ERROR_STATUS is None:
                raise
            traceback.print_exc()
        elif reports:
            sys.stderr.write(f"\n{program}: {message}\n")
        if command.ERROR_STATUS is not None:
            return command.ERROR_STATUS
        return error.exit_status if isinstance(error, CommandEnd) else 1
    finally:
        gc.set_threshold(*generations)


def _prepare_streams(package: str, *, is_quiet: bool) -> None:
    """Replace closed standard streams, escape what the terminal cannot show, and send logs to
    stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise the next file opened would get its descriptor.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # stays open
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # A notebook shows stderr in red.
    handler = TerminalHandler(sys.stdout if "ipykernel" in sys.modules else None)
    # DEBUG is for diagnosis and goes to the run's log.txt only.
    level = logging.WARNING if is_quiet else logging.INFO
    handler.setLevel(level if is_first(os.environ) else logging.ERROR)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    )
    if not logging.getLogger().handlers:
        # Printed directly, Python's warnings would land on the line of a progress bar.
        logging.captureWarnings(True)
    # Does nothing if a host program (a notebook, pytest) has already set up logging.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in {"speakernet", package}:
        logging.getLogger(name).setLevel(logging.DEBUG)


def _has_no_reader() -> bool:
    """Whether standard output is a pipe whose reader has closed it."""
    # Windows has no poll, and a host program's stream may have no descriptor.
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    return False


def _discard_output() -> None:
    """Send unwritable output to the null device, because the interpreter flushes again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception) -> str | None:
    """The message for the user (for a system error, with file and advice), or None if the error is
    a bug.
    """
    if is_out_of_memory(error):
        # torch adds lines of statistics.
        reason = str(error).partition("\n")[0]
        return (
            f"out of memory ({reason}); use a smaller batch (`speakernet find-batch-size` finds "
            "one that fits, training.accumulation_steps keeps the recipe's size), fewer workers or "
            "a machine with more memory"
        )
    if isinstance(error, ModuleNotFoundError):
        library = (error.name or "").partition(".")[0]
        if library == "speakernet":
            return None
        extra = EXTRAS.get(library, "export")
        return (
            f"this needs the library {library}, which is not installed: pip install "
            f"'speakernet[{extra}]'"
        )
    if isinstance(error, OSError) and error.strerror:
        # filename2 is the target of a rename.
        path = error.filename2 or error.filename
        advice = SYSTEM_ADVICE.get(error.errno or 0, "check the path and its permissions")
        message = f"{error.strerror}; {advice}"
        return f"{path}: {message}" if path else message
    if isinstance(error, ValueError | OSError):
        return str(error) or type(error).__name__
    return None
