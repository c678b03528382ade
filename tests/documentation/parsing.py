"""Commands of the pages before the parsers that take them: argparse and the configuration's loader, no data."""

import argparse
import contextlib
import importlib
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.run import get_args_parser

from benchmarks import cold_corpus, gpu, sharded_head, study_curve
from speakernet.cli import COMMANDS, build_parser
from speakernet.cli import prepare as prepare_command
from speakernet.config import load_config
from speakernet.config.help import help_text
from tests.documentation.pages import ROOT
from tests.documentation.shell import Command

SCRIPTS = {"trainSpeakerNet.py": ("train",), "benchmark_performance.py": ("benchmarks.command",)}
SCRIPTS |= {f"data_prep/{path.name}": ("prepare", path.stem) for path in (ROOT / "data_prep").glob("*.py")}
OWN_PARSERS = {
    "benchmarks.sharded_head": sharded_head.add_arguments,
    "benchmarks.cold_corpus": cold_corpus.add_arguments,
    "benchmarks.gpu": gpu.add_arguments,
    "benchmarks.study_curve": study_curve.add_arguments,
}
"""Programs of the checkout that are no commands: module -> what it takes."""
STUDY = "benchmarks.study"

LAUNCHERS = ("torchrun", "srun")
FOREIGN_CONFIGURATIONS = {"ResNetSE34L_AP.yaml": "of voxceleb_trainer"}
"""Files that pages name and that come from elsewhere -> whose they are."""
OTHERS = {
    "curl": "needs a server that runs; tests/inference/serve/test_api.py sends the same requests",
    "rsync": "copies between machines",
    "scp": "copies between machines",
    "arecord": "needs a microphone",
    "ffmpeg": "a program of its own",
    "export": "sets a variable of the shell",
    "cd": "changes the folder",
    "mkdir": "makes a folder",
    "ls": "lists a folder",
    "cp": "copies a file",
    "mv": "moves a folder",
    "cat": "shows a file",
    "head": "shows the first lines of a file",
    "df": "shows free space",
    "du": "shows used space",
    "nvidia-smi": "needs a GPU",
    "tensorboard": "a server of its own",
    "git": "needs a network, or a checkout to change",
    "source": "a virtual environment of the reader",
    "apt": "needs a network and the rights of root",
    "brew": "needs a network",
    "sbatch": "needs a cluster; tests/test_scaling.py reads the script",
    "kubectl": "needs a cluster; tests/test_scaling.py reads the manifest",
    "scancel": "needs a cluster",
    "docker": "needs a network",
    "ruff": "make lint",
    "mypy": "make types",
    "pre-commit": "needs a network for its hooks",
    "mkdocs": "needs the extra `docs`; tests/documentation/test_site.py reads its configuration",
    "jupyter": "tests of the notebook run it without a browser",
}
"""Programs of others -> why a test does not run them; of ours that they start, the words are parsed all the same."""


class PageError(AssertionError):
    """A command of a page that its parser refuses."""


def check(command: Command, folder: Path) -> None:
    """Hand a command to its parser.

    Args:
        command: of a page.
        folder: an empty one, the working directory; the reader's configurations are made in it.

    Raises:
        PageError: unknown program, option, value or recipe.
    """
    words = list(command.words)
    started = next((place for place, word in enumerate(words) if word in SCRIPTS), None)
    try:
        if words[0] in LAUNCHERS:
            if started is not None:
                if words[0] == "torchrun":
                    _parse(get_args_parser(), words[1 : started + 1], command)
                _check_ours(SCRIPTS[words[started]], words[started + 1 :], command, folder)
            elif not command.is_partial:
                raise PageError(f"{words[0]} starts nothing of ours")
        elif words[0] == "speakernet":
            _check_ours(words[1:2], words[2:], command, folder)
        elif words[0] in ("python", "python3"):
            _check_python(words[1:], command, folder)
        elif words[0] == "pip":
            _check_pip(words[1:])
        elif words[0] == "make":
            _check_make(words[1:])
        elif words[0] == "pytest":
            _check_paths([word for word in words[1:] if word.endswith(".py") or word.startswith("tests")])
        elif words[0] not in OTHERS:
            raise PageError(f"no test knows the program {words[0]!r}; add it to OTHERS, or fence the block as text")
    except (PageError, ValueError) as error:
        raise PageError(f"{command.where}: `{command.text}`: {error}") from error


def _check_ours(name: Sequence[str], words: list[str], command: Command, folder: Path) -> None:
    if not name or name[0] in ("--help", "--version", "-h") or (name[0].isupper() and command.is_partial):
        return
    if name[0] == "prepare":
        if len(name) == 1:
            name, words = (*name, *words[:1]), words[1:]
        if len(name) > 1 and name[1] in prepare_command.PARTS:
            _parse(prepare_command.build_parser(name[1]), words, command)
        elif not (command.is_partial and (len(name) == 1 or name[1].isupper() or name[1].startswith("-"))):
            raise PageError(f"nothing is prepared under the name {' '.join(name[1:])!r}")
        return
    if name[0] not in COMMANDS and "." not in name[0]:
        raise PageError(f"no command {name[0]!r}")
    module = importlib.import_module(name[0] if "." in name[0] else f"speakernet.cli.{COMMANDS[name[0]]}")
    takes_config = getattr(module, "TAKES_CONFIG", False)
    if takes_config and any(word in ("--help", "-h") for word in words):
        help_text(*words[words.index("--help") + 1 :][:1])
        return
    rest = _parse(build_parser(module, " ".join(name)), words, command, takes_more=takes_config)
    if rest:
        if command.is_partial:
            rest = _without_open_ends(rest)
        _make_configurations(rest, folder)
        load_config(rest)


def _check_python(words: list[str], command: Command, folder: Path) -> None:
    name = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    rest = words[2:] if words[0] == "-m" else words[1:]
    if words[0] in SCRIPTS:
        _check_ours(SCRIPTS[words[0]], rest, command, folder)
    elif name == "speakernet":
        _check_ours(rest[:1], rest[1:], command, folder)
    elif name in OWN_PARSERS:
        parser = argparse.ArgumentParser()
        OWN_PARSERS[name](parser)
        _parse(parser, rest, command)
    elif name == STUDY:
        _check_ours((STUDY,), rest, command, folder)
    elif words[0] != "-m":
        if not (command.is_partial and Path(words[0]).stem.isupper()):
            _check_paths(words[:1])
    elif name not in ("venv", "build", "pytest"):
        raise PageError(f"no test knows the module {name!r}")


def _parse(
    parser: argparse.ArgumentParser, words: Sequence[str], command: Command, *, takes_more: bool = False
) -> list[str]:
    """What the parser leaves over; of a partial command what is required may be missing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            _, rest = parser.parse_known_args(words)
    except SystemExit as end:
        message = said.getvalue().strip().rpartition("error: ")[2]
        if end.code == 0:
            return []
        if not command.is_partial or not re.search(r"required|expected (at least )?one argument", message):
            raise PageError(message) from None
        known = set(re.findall(r"--?[\w-]+", parser.format_help()))
        given = [word for word in words if word.startswith("--")]
        rest = [] if takes_more else [word for word in given if word.partition("=")[0] not in known]
    if rest and not takes_more:
        raise PageError(f"it does not take {rest[0]!r}")
    return rest


def _without_open_ends(words: Sequence[str]) -> list[str]:
    """The words without a `--config` whose file the page leaves out."""
    following = [*words[1:], "--"]
    return [
        word for word, after in zip(words, following, strict=True) if word != "--config" or not after.startswith("--")
    ]


def _make_configurations(words: Sequence[str], folder: Path) -> None:
    """What the reader has, or an earlier command has written: configurations that set nothing."""
    for option, name in itertools.pairwise(words):
        is_made = name.startswith(("my", "data/", "exps/")) or name.isupper() or name in FOREIGN_CONFIGURATIONS
        if option == "--config" and is_made:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("# the reader's\n", encoding="utf-8")


def _check_pip(words: Sequence[str]) -> None:
    extras = re.findall(r"(?:speakernet|\.)\[([\w,]+)\]", " ".join(words))
    known = re.findall(r'^    "(\w+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    unknown = [name for found in extras for name in found.split(",") if name not in known]
    if unknown:
        raise PageError(f"setup.py has no extra {unknown[0]!r}")


def _check_make(words: Sequence[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    unknown = [word for word in words if "=" not in word and word not in targets]
    if unknown:
        raise PageError(f"the Makefile has no target {unknown[0]!r}")


def _check_paths(names: Sequence[str]) -> None:
    missing = [name for name in names if not (ROOT / name.partition("::")[0]).exists()]
    if missing:
        raise PageError(f"{missing[0]} does not exist")
