"""What several commands share: their options, and how the model, configuration or store that an
option names is loaded.
"""

import argparse
import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakernet.distributed import CommandEnd
from speakernet.files import ZIP_MARK, read_secret

if TYPE_CHECKING:
    from speakernet.config import LoadedConfig
    from speakernet.inference.decision import DecisionLimits
    from speakernet.inference.verifier import SpeakerVerifier

logger = logging.getLogger(__name__)

STORE_KEY_VARIABLE = "SPEAKERNET_STORE_KEY"

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


def _threshold(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def output_path(text: str) -> Path:
    """The type of an option that names what a command writes."""
    return Path(text)


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
