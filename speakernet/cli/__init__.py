"""The command line: one table of commands, one short file per command, imported only when it is
called.

`Command` is what a command's module declares. An option with the type `output_path` names what the
command writes: before it runs, its outputs are compared with all other arguments.
"""

import argparse
import contextlib
import dataclasses
import errno
import gc
import importlib.metadata
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from speakernet.distributed import CommandEnd, is_first, is_first_here, work
from speakernet.files import ZIP_MARK, FileError, read_secret, refuse_overwriting
from speakernet.machine.memory import HUGE_PAGES, is_out_of_memory
from speakernet.terminal import TerminalHandler

if TYPE_CHECKING:
    from speakernet.config import LoadedConfig
    from speakernet.inference.decision import DecisionLimits
    from speakernet.inference.verifier import SpeakerVerifier

logger = logging.getLogger(__name__)

STORE_KEY_VARIABLE = "SPEAKERNET_STORE_KEY"

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

COMPONENTS = "speakernet.components"
"""Entry-point group in which installed packages declare components."""
PLUGIN: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "FILE",
    "help": "Python file with your own components (docs/components.md)",
}

YOUNG_OBJECTS = 50_000
"""New objects between two runs of the garbage collector. With Python's 700, a command searches
all that torch and matplotlib define again and again while it imports them: 0.3 s."""
INTERRUPTED = 130
BROKEN_PIPE = 141
EXIT_STATUSES = {
    0: "done",
    1: "failed; the message says what to do",
    2: "wrong usage",
    75: (
        "a loader worker or another rank died or hung; the same command resumes the run from "
        "last.pt"
    ),
    129: (
        "ended by SIGHUP (the terminal was closed); training wrote last.pt, and the same command "
        "resumes the run"
    ),
    INTERRUPTED: (
        "interrupted by Ctrl-C (SIGINT); training wrote last.pt, and the same command "
        "resumes the run"
    ),
    138: "ended by SIGUSR1 (the cluster is reclaiming the machine); otherwise like SIGTERM",
    BROKEN_PIPE: "the reader closed the output (`speakernet list | head`)",
    143: "ended by SIGTERM; training wrote last.pt, and the same command resumes the run",
}

SYSTEM_ADVICE = {
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "free some space, then run the same command again",
    errno.EMFILE: "raise `ulimit -n`",
}
"""What to do about a system error; for all others it is to check the path and its permissions."""

MARK_BYTES = 1 << 16
"""How far from its start and end a file is searched for the mark of this program."""
MARKS_IN_ZIP = (b"format_version", b"fingerprint.npy", b"speakernet.json")
"""In a model file, in the embeddings of `embed` and `people export`, and in a torch.export
archive."""
MARKS_AT_START = (b'{\n "fingerprint": ', b'{\n "system": ', b"# From wespeaker's ")
"""Of `people export`, the figures of `benchmark`, and `import-config`."""
MARKS_BY_SUFFIX = {
    ".onnx": b"speakernet",
    ".safetensors": b'"speakernet"',
    ".html": b'<meta name="generator" content="speakernet">',
}

EXTRAS = {
    **dict.fromkeys(("fastapi", "uvicorn", "multipart", "python_multipart"), "serve"),
    **dict.fromkeys(("transformers", "peft"), "ssl"),
    "huggingface_hub": "hub",
    "shtab": "shell",
}
"""Library -> the extra that installs it; for all other libraries it is `export`."""


class Command(Protocol):
    """What the module of a command declares; only `run` has to be there."""

    ARGUMENTS: Mapping[str, dict[str, Any]]
    """Option names -> keyword arguments of `add_argument`."""
    ACTIONS: Mapping[str, tuple[str, dict[str, dict[str, Any]]]]
    """Of a corpus: name of an action -> what it does, and its arguments."""
    TAKES_CONFIG: bool
    """Whether it also accepts `--config FILE` and every configuration option, which arrive in
    `arguments.config_arguments`."""
    USAGE: str
    """What follows the program's name in --help of a command that takes a configuration."""
    PARSES_ITSELF: bool
    """Whether `run` takes the words as they were given."""
    ERROR_STATUS: int | None
    """Exit status after an error, for a command whose status 1 is an answer."""
    outputs: Callable[[argparse.Namespace], dict[Path, bool]] | None
    """The files that the parsed arguments mean, and whether each may be replaced; None: the paths
    of its options."""
    run: Callable[[Any], Any]
    """Takes the parsed arguments; returns the lines to print or an exit status."""


UNDECLARED = {
    "ARGUMENTS": {},
    "ACTIONS": {},
    "TAKES_CONFIG": False,
    "USAGE": "--config FILE [--config FILE …] [--section.key VALUE …] [options below]",
    "PARSES_ITSELF": False,
    "ERROR_STATUS": None,
    "outputs": None,
}
"""The values of what a module does not declare."""


def load_command(module_name: str) -> Command:
    """Import the module of a command."""
    module = importlib.import_module(module_name)
    return cast(Command, SimpleNamespace(**UNDECLARED | vars(module)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that the user can fix are printed without a traceback.

    Returns:
        The exit status: one of `EXIT_STATUSES`.
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
        The exit status: one of `EXIT_STATUSES`.
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
        parsed = arguments if command.PARSES_ITSELF else _parse(command, program, arguments)
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


def build_parser(command: Command, program: str) -> argparse.ArgumentParser:
    """The parser of a command's own options; configuration options are left for the caller."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=command.__doc__,
        # An abbreviation that is unique today may become ambiguous with the next option.
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="log only warnings and errors; results are still printed",
    )
    parser.add_argument("--plugin", **PLUGIN)
    if command.TAKES_CONFIG:
        parser.usage = f"{program} {command.USAGE}"
    for names, how in command.ARGUMENTS.items():
        parser.add_argument(*names.split(), **how)
    if _output_names(parser):
        parser.add_argument(
            "--force", action="store_true", help="replace existing files of other programs"
        )
    return parser


def _parse(command: Command, program: str, rest: Sequence[str]) -> argparse.Namespace:
    parser = build_parser(command, program)
    _add_components(rest)
    if command.TAKES_CONFIG:
        for place, word in enumerate(rest):
            if word in ("-h", "--help"):
                parser.epilog = _help_on_configuration(rest[place + 1 :])
        # The rest are options of the configuration, which `load_configuration` checks.
        parsed, config_arguments = parser.parse_known_args(rest)
        parsed.config_arguments = config_arguments
    else:
        _refuse_unknown_options(parser, rest)
        _recommend_model(parser, rest)
        parsed = parser.parse_args(rest)
    _check_outputs(command, parser, parsed)
    return parsed


def _help_on_configuration(words: Sequence[str]) -> str:
    """The options of the section or component in the first word after --help, and the exit
    statuses.
    """
    # Late: only --help needs the options of every component.
    from speakernet.config.reference import help_text

    topic = words[0] if words and not words[0].startswith("-") else ""
    statuses = (f"  {code:<5} {meaning}" for code, meaning in EXIT_STATUSES.items())
    return "\n".join([help_text(topic), "", "exit status:", *statuses])


def output_path(text: str) -> Path:
    """The type of an option that names what a command writes."""
    return Path(text)


def _output_names(parser: argparse.ArgumentParser) -> set[str]:
    """The names of the arguments that name what a command writes."""
    return {action.dest for action in parser._actions if action.type is output_path}


def _check_outputs(
    command: Command, parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> None:
    """Refuse outputs that would replace an input or each other, or without --force a file that this
    program did not write.
    """
    output_names = _output_names(parser)
    if not output_names:
        return
    inputs: list[str | Path] = []
    is_ours: dict[Path, bool] = {}
    for name, value in vars(parsed).items():
        if name not in output_names:
            for item in value if isinstance(value, list) else [value]:
                # Path.exists would raise for a person's name that is too long for a file.
                if isinstance(item, str | Path) and os.path.exists(item):  # noqa: PTH110
                    inputs.append(item)
        elif value is not None:
            is_ours[value] = is_own(value)
    # Some names only follow from several options together, which only the command knows.
    if command.outputs is not None:
        is_ours = command.outputs(parsed)
    refuse_overwriting(is_ours, inputs)
    for path in is_ours:
        if path.is_file() and path.stat().st_size and not is_ours[path] and not parsed.force:
            raise FileError(
                f"{path} exists, and is not a file that this command wrote; choose another name, "
                "or replace it with --force"
            )


def is_own(path: Path) -> bool:
    """Whether a file holds the mark of a file that this program writes with `--out`; False for a
    missing file.
    """
    if not path.is_file():
        return False
    # Both ends are read, because a zip has its table of members at the end, and ONNX its metadata.
    with path.open("rb") as file:
        content = file.read(MARK_BYTES)
        file.seek(max(file.tell(), path.stat().st_size - MARK_BYTES))
        content += file.read()
    if content.startswith(ZIP_MARK):
        return any(mark in content for mark in MARKS_IN_ZIP)
    mark = MARKS_BY_SUFFIX.get(path.suffix.lower())
    return content.startswith(MARKS_AT_START) or (mark is not None and mark in content)


def _refuse_unknown_options(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Report a mistyped option; argparse would first report the required option that it stands for
    as missing.
    """
    known = parser._option_string_actions
    for word in rest:
        option = word.partition("=")[0]
        if option == "--":
            return
        if option.startswith("--") and option not in known:
            # Late: only a mistyped option needs it.
            from speakernet.options import nearest

            names = nearest(option, known.keys() - {"--help"}, 1)
            meant = f"did you mean {names[0]}? " if names else ""
            parser.error(f"unknown option {option!r}; {meant}see `{parser.prog} --help`")


def _recommend_model(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Report a missing model file with the published model that can be used at once."""
    action = parser._option_string_actions.get("--model")
    options = {word.partition("=")[0] for word in rest}
    is_missing = not options & {"--model", "-h", "--help"}
    if isinstance(action, ModelFile) and action.required and is_missing:
        parser.error(
            "--model is missing; give a model file such as exps/exp01/best.pt, or a published "
            f"model by name: --model {RECOMMENDED} (`speakernet models` lists more)"
        )


def _add_components(rest: Sequence[str]) -> None:
    """Add the components of installed packages and of `--plugin`, before the options of any
    component are read.
    """
    # A parser of its own, because plug-ins add components that --help of the real one describes.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", **PLUGIN)
    plugins = parser.parse_known_args(rest)[0].plugin
    installed = importlib.metadata.entry_points(group=COMPONENTS)
    if plugins or installed:
        # Late: without external components, a command reads only the options of the components it
        # uses.
        from speakernet.config import components

        with wrong_usage():
            components.add_installed(installed)
            for path in plugins:
                components.add_file(path)


class WrongUsage(CommandEnd, ValueError):
    """What the user wrote is wrong, not what was done with it."""

    exit_status = 2


@contextlib.contextmanager
def wrong_usage() -> Iterator[None]:
    """A `ValueError` in the block ends the command with status 2."""
    try:
        yield
    except ValueError as error:
        raise WrongUsage(str(error)) from error


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


def load_configuration(arguments: Sequence[str]) -> "LoadedConfig":
    """The configuration from files and command line; a model file that it names sets the network's
    options.
    """
    # Late: a command that takes no configuration does not read the options of every component.
    from speakernet.config import load_config
    from speakernet.config.schema import with_options

    loaded = load_config(arguments, _is_classic_checkpoint, _settings_of_model)
    config = loaded.config
    if config.training.initial_model:
        path = model_path(config.training.initial_model)
        config = with_options(config, "training", initial_model=path)
    return dataclasses.replace(loaded, config=config)


def _is_classic_checkpoint(path: Path) -> bool:
    """Whether a file is a voxceleb_trainer checkpoint; reading it runs none of its code."""
    # Late: only a command that scores a model without a configuration needs torch before its
    # options are read.
    from speakernet.checkpoint import read_checkpoint
    from speakernet.models.importers import voxceleb_trainer

    return path.is_file() and voxceleb_trainer.is_ours_to_read(read_checkpoint(path))


def _settings_of_model(path: Path) -> Mapping[str, Any]:
    """The network described by a model file, as dotted configuration keys and their values."""
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
    """The path of a model file, given as a path or as the name of a published model, which is
    fetched.
    """
    if Path(name).exists():
        return name
    # Late: only names need the table of published models and the code that fetches and imports
    # them.
    from speakernet.assembly.published import path_of

    with wrong_usage():
        return str(path_of(name))


class ModelFile(argparse.Action):
    """An argument that is a model file or the name of a published model."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option: Any = None
    ) -> None:
        """Store the path of the file, fetching it if necessary."""
        setattr(namespace, self.dest, model_path(value))


RECOMMENDED = "3dspeaker/campplus-zh-en"
"""The published model for those who have none: of 200,000 speakers, small, fetched without an
account or further packages, and measured on telephone calls and microphones (docs/results.md)."""
MODEL_ARGUMENT: dict[str, Any] = {
    "action": ModelFile,
    "help": "a model file, such as exps/exp01/best.pt, or a name from `speakernet models`",
}
MODEL = {
    "--model": {**MODEL_ARGUMENT, "required": True},
    "--device": {
        "default": "auto",
        "help": "cpu, cuda, cuda:1; auto (the default) uses a GPU if there is one",
    },
}
FILE_TO_CHANGE = {
    "required": True,
    "help": "a model file; `speakernet fetch NAME --out FILE` writes a published one",
}
"""For commands that write to a model file or beside it: they must not change the cache of published
models."""
CHANNEL = {
    "--channel": {
        "metavar": "1|2|mix",
        "help": "channel of recordings with several (default: their mean; one channel if they "
        "cancel each other)",
    }
}
STORE = {
    "--store": {"type": Path, "required": True, "help": "the store of people, such as people.db"},
    "--key-file": {
        "type": Path,
        "help": "file with the key that encrypts its embeddings (default: the variable "
        f"{STORE_KEY_VARIABLE}, if set)",
    },
}
DECISION = {
    "--far": {
        "type": float,
        "metavar": "RATE",
        "help": "false-accept rate of the threshold to use (default 0.01, or the EER threshold if "
        "there is none)",
    },
    "--threshold": {
        "type": _threshold,
        "metavar": "SCORE",
        "help": "a score, or the name of a threshold in the model file (eer, far_1%%); `default` "
        "is a cosine of 0.4",
    },
}


def limits_of(arguments: argparse.Namespace) -> "DecisionLimits":
    """`--far` and `--threshold` as keyword arguments of a decision."""
    if arguments.far is not None and arguments.threshold is not None:
        raise ValueError("--far and --threshold both set the threshold; give only one of them")
    return {"false_accept_rate": arguments.far, "threshold": arguments.threshold}


def load_verifier(
    arguments: argparse.Namespace, local_rank: int | None = None
) -> "SpeakerVerifier":
    """Load the model given by `--model`; with several ranks on a machine, each uses the GPU with
    its local rank.
    """
    # Nothing that is imported and built here becomes garbage, so the collector does not search it:
    # that takes a fifth of a second. It is frozen below so as not to be searched afterwards either.
    gc.disable()
    try:
        # Late: --help and a mistyped option need no torch.
        from speakernet.inference.verifier import load

        return load(arguments.model, arguments.device, local_rank)
    finally:
        gc.freeze()
        gc.enable()


def warn_of_model(verifier: "SpeakerVerifier") -> None:
    """Log the cautions about a model; called after the answer, which comes first on the screen."""
    if verifier.caution:
        logger.warning("%s: %s", verifier.name, verifier.caution)


def store_key(arguments: argparse.Namespace) -> bytes | None:
    """The key from `--key-file` or the environment, or None."""
    return read_secret(arguments.key_file, STORE_KEY_VARIABLE)


class _HeldWarnings(logging.Filter):
    """Holds back a handler's warnings; drops what is less important, and warnings of other
    libraries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown now."""
        if record.levelno == logging.WARNING and record.name.startswith("speakernet"):
            self.records.append(record)
        return record.levelno > logging.WARNING


@contextlib.contextmanager
def answer_first(*, is_verbose: bool) -> Iterator[None]:
    """Show warnings after the block, which prints the answer, so that it is the first line on the
    screen.

    Other messages are shown only if verbose, and then at once.
    """
    filters = {}
    if not is_verbose:
        filters = {handler: _HeldWarnings() for handler in logging.root.handlers}
    for handler, held in filters.items():
        handler.addFilter(held)
    try:
        yield
    finally:
        for handler, held in filters.items():
            handler.removeFilter(held)
            for record in held.records:
                handler.handle(record)
