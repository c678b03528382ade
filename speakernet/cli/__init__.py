"""The command line: one table of commands, one short file per command, imported only when it is called.

A command's module has `ARGUMENTS` (names of an option -> how argparse takes it; or a function `add_arguments(parser)`)
and `run(arguments)`, which returns the
lines to print or an exit status. With `TAKES_CONFIG = True` it also accepts `--config FILE` and every option of the
configuration; they arrive in `arguments.config_arguments`. With `main(arguments)` instead it parses its arguments
itself. With `ERROR_STATUS` it ends with that status after every error, because its status 1 is an answer.
"""

import argparse
import contextlib
import errno
import importlib
import importlib.metadata
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from speakernet.files import read_secret
from speakernet.machine.memory import HUGE_PAGES, is_out_of_memory
from speakernet.parallel.distributed import is_first, is_first_here
from speakernet.terminal import TerminalHandler

if TYPE_CHECKING:
    from speakernet.config import LoadedConfig
    from speakernet.inference.verifier import SpeakerVerifier

STORE_KEY_VARIABLE = "SPEAKERNET_STORE_KEY"

COMMANDS = {
    "train": "train a model or, with --eval, score a trial list with one",
    "evaluate": "compute error rates from scores, without a model",
    "compare": "compare systems that scored the same trials, with intervals for the differences",
    "report": "rebuild the report of a run folder from the results in it",
    "prepare": "prepare a corpus: download, verify, unpack, write lists",
    "pack": "pack a corpus into one memory-mapped file, or into shards for streaming",
    "doctor": "check lists, audio and machine before a run",
    "list": "list what a configuration can name: models, losses, recipes, …",
    "show-config": "print the fully resolved configuration, with every default",
    "find-batch-size": "find the fastest batch size that fits into memory",
    "benchmark": "measure the loader and the training step of a configuration",
    "import-weights": "convert another toolkit's checkpoint into a model file",
    "import-config": "convert a configuration of wespeaker into one of ours",
    "models": "list published models that can be used by name",
    "fetch": "fetch a published model and make it a model file",
    "push": "put a model file and a card about it on the Hugging Face hub",
    "export": "export a model for other programs: ONNX, TorchScript, …",
    "serve": "serve a model and a store of people over HTTP",
    "info": "show what a model file holds",
    "adapt": "adapt a model file to recordings of another domain",
    "calibrate": "fit calibration and thresholds and write them into a model file",
    "verify": "decide whether two recordings are of the same speaker",
    "embed": "embed recordings into one file",
    "enroll": "add recordings of a person to a store of people",
    "identify": "say which person in a store is speaking, or none of them",
    "who": "say who speaks when in a recording, with the names of people in a store",
    "der": "compute diarization error rates from RTTM",
    "people": "list, remove, purge, re-embed and export the people of a store",
}
"""Command -> what it does; its module has the same name with underscores (`list` is `list_components`)."""

COMPONENTS = "speakernet.components"
"""Group of entry points by which installed packages bring components."""
PLUGIN: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "FILE",
    "help": "Python file with components of your own (docs/components.md)",
}

INTERRUPTED = 130
BROKEN_PIPE = 141
EXIT_STATUSES = {
    0: "done",
    1: "failed; the message says what to do",
    2: "wrong usage",
    75: "a loader worker or another rank was lost; last.pt was written, and the same command resumes the run",
    129: "ended by SIGHUP (the terminal was closed); training wrote last.pt, and the same command resumes the run",
    INTERRUPTED: "interrupted by Ctrl-C (SIGINT); training wrote last.pt, and the same command resumes the run",
    BROKEN_PIPE: "the reader of the output closed it (`speakernet list | head`)",
    138: "ended by SIGUSR1 (the cluster is reclaiming the machine); otherwise the same as SIGTERM",
    143: "ended by SIGTERM; training wrote last.pt, and the same command resumes the run",
}

SYSTEM_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, then run the same command again",
    errno.EDQUOT: "your disk quota is used up: free some space, then run the same command again",
    errno.EROFS: "the disk is read-only: choose another place (--save_path for a run)",
    errno.EACCES: "you have no permission: choose another place (--save_path for a run), or change the permissions",
    errno.ENOTDIR: "part of that path is a file: choose another place (--save_path for a run)",
    errno.EIO: "the disk or the network has errors: look at the system's log",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}


EXTRAS = {
    **dict.fromkeys(("fastapi", "uvicorn", "multipart", "python_multipart"), "serve"),
    **dict.fromkeys(("transformers", "peft"), "ssl"),
    "huggingface_hub": "hub",
    "shtab": "shell",
    "pyannote": "who",
}
"""Library -> the extra that installs it, if it is another than `export`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that the user can fix are printed without a traceback.

    Returns:
        The exit status: one of `EXIT_STATUSES`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        return run_command("speakernet.cli.overview", "speakernet", given)
    return run_command(module_of(given[0]), f"speakernet {given[0]}", given[1:])


def module_of(command: str) -> str:
    """The module of a command; one called `list` would hide the builtin in this package."""
    return f"speakernet.cli.{'list_components' if command == 'list' else command.replace('-', '_')}"


def run_command(module_name: str, program: str, arguments: Sequence[str]) -> int:
    """Run the command that a module holds, as `main` does; scripts of the checkout beside the package use it.

    Returns:
        The exit status: one of `EXIT_STATUSES`.
    """
    _prepare_streams(module_name.partition(".")[0], is_quiet="--quiet" in arguments)
    if "torch" not in sys.modules:
        # torch reads both when it is imported; its profiler reports a machine without a GPU as an error.
        os.environ.setdefault(HUGE_PAGES, "1")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    module = importlib.import_module(module_name)
    failed = getattr(module, "ERROR_STATUS", None)
    try:
        done = module.main(arguments) if hasattr(module, "main") else module.run(_parse(module, program, arguments))
        if isinstance(done, list):
            sys.stdout.writelines(f"{line}\n" for line in done)
        sys.stdout.flush()
        return done if isinstance(done, int) else 0
    except KeyboardInterrupt as interrupt:
        if is_first_here(os.environ):
            sys.stderr.write("\ninterrupted\n")
        return getattr(interrupt, "exit_status", INTERRUPTED)
    except Exception as error:
        # A worker's or a converter's pipe is an error like others.
        is_pipe = isinstance(error, BrokenPipeError) and _has_no_reader()
        _discard_output()
        if is_pipe:
            return BROKEN_PIPE
        message = _message(error)
        if message is None or "--debug" in arguments:
            if failed is None:
                raise
            traceback.print_exc()
        # If several ranks fail for the same reason, one reports it; before they have met, the first of each machine.
        elif not getattr(error, "is_said", not is_first_here(os.environ)):
            sys.stderr.write(f"\n{program}: {message}\n")
        return getattr(error, "exit_status", 1) if failed is None else int(failed)


def _prepare_streams(package: str, *, is_quiet: bool) -> None:
    """Closed standard streams read and write nothing; what a terminal cannot show is escaped; logs go to stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Files that are opened later must not get its number.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # stays open
        elif mode == "w" and hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    # A notebook shows stderr in red.
    handler = TerminalHandler(sys.stdout if "ipykernel" in sys.modules else None)
    # What is only looked up when something is odd goes to the run's log.txt, which takes everything.
    handler.setLevel((logging.WARNING if is_quiet else logging.INFO) if is_first(os.environ) else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    if not logging.getLogger().handlers:
        # Python's warnings come as log lines: printed by themselves they would be glued onto a bar.
        logging.captureWarnings(True)
    # Does nothing where a host program (a notebook, pytest) has set up logging already.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in {"speakernet", package}:
        logging.getLogger(name).setLevel(logging.DEBUG)


def _has_no_reader() -> bool:
    """Whether the output goes into a pipe that was closed at its other end."""
    # There is no poll on Windows, and a stream of a host program has no number.
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    return False


def _discard_output() -> None:
    """Send what cannot be written nowhere: the interpreter flushes once more at its end, and would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(module: ModuleType, program: str) -> argparse.ArgumentParser:
    """The parser of a command's own options; those of the configuration are what it leaves over."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--quiet", action="store_true", help="log warnings and errors alone; results are printed")
    parser.add_argument("--plugin", **PLUGIN)
    if getattr(module, "TAKES_CONFIG", False):
        parser.usage = f"{program} --config FILE [--config FILE …] [--section.key VALUE …] [options below]"
    for names, how in getattr(module, "ARGUMENTS", {}).items():
        parser.add_argument(*names.split(), **how)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def _parse(module: ModuleType, program: str, rest: Sequence[str]) -> argparse.Namespace:
    takes_config = getattr(module, "TAKES_CONFIG", False)
    parser = build_parser(module, program)
    _add_components(rest)
    asked = next((number for number, one in enumerate(rest) if one in ("-h", "--help")), None)
    if takes_config and asked is not None:
        # Late: only a page of help needs the options of every part.
        from speakernet.config.reference import help_text

        topic = "".join(one for one in rest[asked + 1 : asked + 2] if not one.startswith("-"))
        statuses = (f"  {code:<5} {meaning}" for code, meaning in EXIT_STATUSES.items())
        parser.epilog = "\n".join([help_text(topic), "", "exit status:", *statuses])
    parsed, config_arguments = parser.parse_known_args(rest)
    if config_arguments and not takes_config:
        first = config_arguments[0]
        what = "unknown option" if first.startswith("-") else "unexpected argument:"
        parser.error(f"{what} {first!r}; see `{program} --help`")
    parsed.config_arguments = config_arguments
    return parsed


def _add_components(rest: Sequence[str]) -> None:
    """Add the components of installed packages and of `--plugin`, before the options of any component are read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", **PLUGIN)
    plugins, installed = parser.parse_known_args(rest)[0].plugin, importlib.metadata.entry_points(group=COMPONENTS)
    if plugins or installed:
        # Late: without components from outside a command reads the options of those alone that it uses.
        from speakernet.config import components

        with wrong_usage():
            components.add_installed(installed)
            for path in plugins:
                components.add_file(path)


@contextlib.contextmanager
def wrong_usage() -> Iterator[None]:
    """Bad input found in the block ends the command with status 2."""
    try:
        yield
    except ValueError as error:
        error.exit_status = 2  # type: ignore[attr-defined]
        raise


def _message(error: Exception) -> str | None:
    """Our own sentence, or the system's: which file, what it says of it, what to do; None if the error is a defect."""
    if is_out_of_memory(error):
        # torch adds lines of statistics.
        found = str(error).partition("\n")[0]
        return (
            f"out of memory ({found}); take a smaller batch (`speakernet find-batch-size` tries which fits, "
            "training.accumulation_steps keeps the recipe's), fewer workers or a machine with more"
        )
    library = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and library != "speakernet":
        extra = EXTRAS.get(library, "export")
        return f"this needs the library {library}, which is not installed: pip install 'speakernet[{extra}]'"
    if not isinstance(error, ValueError | OSError):
        return None
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    # The second name is that of a rename's target.
    where = error.filename2 or error.filename
    advice = SYSTEM_ADVICE.get(error.errno or 0, "fix that, then run the same command again")
    return f"{where}: {error.strerror}; {advice}" if where else f"{error.strerror}; {advice}"


# What several commands have in common.


def load_configuration(arguments: Sequence[str]) -> "LoadedConfig":
    """The configuration that files and command line mean; model files that they name say what they are."""
    # Late: a command that takes no configuration does not read the options of every component.
    from speakernet.config import load_config

    loaded = load_config(arguments, _is_classic_checkpoint, _settings_of_model)
    if given := loaded.config.training.initial_model:
        loaded.config.training.initial_model = model_path(given)
    return loaded


def _is_classic_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint of voxceleb_trainer; reading it runs no code from it."""
    if not path.is_file():
        return False
    # Late: only a command that scores a model without a configuration needs torch before its options are read.
    from speakernet.checkpoint import read_checkpoint
    from speakernet.models.importers import voxceleb_trainer

    return voxceleb_trainer.is_ours_to_read(read_checkpoint(path))


def _settings_of_model(path: Path) -> Mapping[str, Any]:
    """The network that a model file describes, as dotted keys of the configuration and values."""
    path = Path(model_path(path.as_posix()))
    if not path.is_file():
        return {}
    # Late: only a run that starts from a model needs torch before its options are read.
    from speakernet.assembly.fine_tuning import settings_of_file

    return settings_of_file(path)


def _threshold(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def model_path(name: str) -> str:
    """The file of a model that is given by its path, or by the name of a published one, which is fetched."""
    if Path(name).exists():
        return name
    # Late: only names need the table of published models, and what fetches and imports them.
    from speakernet.assembly.published import path_of

    with wrong_usage():
        return str(path_of(name))


class ModelFile(argparse.Action):
    """An argument that is a model file, or the name of a published model."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: Any = None) -> None:
        """Keep the file, which is fetched if it is not there."""
        setattr(namespace, self.dest, model_path(value))


MODEL_ARGUMENT: dict[str, Any] = {
    "action": ModelFile,
    "help": "a model file, such as exps/exp01/best.pt, or a name that `speakernet models` lists",
}
MODEL = {
    "--model": {**MODEL_ARGUMENT, "required": True},
    "--device": {"default": "auto", "help": "cpu, cuda, cuda:1; auto (the default) uses a GPU if there is one"},
}
FILE_TO_CHANGE = {"required": True, "help": "a model file; `speakernet fetch NAME --out FILE` writes a published one"}
"""For commands that write into a model file or beside it: what is in the cache stays as it was fetched."""
STORE = {
    "--store": {"type": Path, "required": True, "help": "the file of people, such as people.db"},
    "--key-file": {
        "type": Path,
        "help": f"file with the key that encrypts its embeddings (default: the variable {STORE_KEY_VARIABLE}, if set)",
    },
}
DECISION = {
    "--far": {
        "type": float,
        "metavar": "RATE",
        "help": "decide at the threshold that this share of different speakers passes (default 0.01, or EER)",
    },
    "--threshold": {
        "type": _threshold,
        "metavar": "SCORE",
        "help": "a score (0.4), or the name of a threshold in the model file (eer, far_1%%); `default` means 0.4",
    },
}


def limits_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `--far` and `--threshold` mean to a decision."""
    if arguments.far is not None and arguments.threshold is not None:
        raise ValueError("--far and --threshold both say where to decide; give one of them")
    return {"false_accept_rate": arguments.far, "threshold": arguments.threshold}


def load_verifier(arguments: argparse.Namespace, local_rank: int | None = None) -> "SpeakerVerifier":
    """The model that `--model` names; of several ranks on a machine each takes the GPU of its own number."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.inference.verifier import load

    return load(arguments.model, arguments.device, local_rank)


def store_key(arguments: argparse.Namespace) -> bytes | None:
    """The key of `--key-file`, else of the environment; None for none."""
    return read_secret(arguments.key_file, STORE_KEY_VARIABLE)


@contextlib.contextmanager
def answer_first(*, is_verbose: bool) -> Iterator[None]:
    """Nothing is logged in the block unless asked for, so that the answer is the first line on the screen."""
    before = logging.root.manager.disable
    logging.disable(before if is_verbose else logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
