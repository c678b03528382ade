"""Files of any kind: reading with clear errors, atomic writing, locks, work in threads."""

import collections
import contextlib
import hashlib
import io
import itertools
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import yaml

from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCK_NAME = ".preparing.lock"
RUNNING_NAME = ".preparing.running"
IN_FLIGHT_PER_WORKER = 4
OTHER_PLACE = "choose another place with --out"
BLOCK_BYTES = 1 << 20
# Limits on YAML texts: PyYAML reads about MAX_YAML characters a second, and some numbers take
# quadratic time.
IN_TEXT = '"<unicode string>", '
MAX_YAML = 256 << 10
MAX_YAML_LEVELS = 20
MAX_YAML_ALIASES = 20
MAX_DIGITS = 100
SHOWN_BYTES = 512 << 20
"""Smaller files are checked within about a second and need no progress bar."""
CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder with trainSpeakerNet.py and data_prep/ if the package is used from a checkout."""
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
LONGEST_SECRET = 4096  # bytes
DEFLATE_LIMIT = 1033  # the largest compression ratio of deflate
ZIP_MARK = b"PK\x03\x04"
IN_PLACE_OF_A_FILE = {
    b"version https://git-lfs": "a git-lfs pointer; `git lfs pull` fetches the file",
    b"<!doc": "an HTML page, which servers send instead of a file that needs a login",
    b"<html": "an HTML page, which servers send instead of a file that needs a login",
}
"""First bytes of something downloaded by mistake instead of the file -> its description."""


def in_place_of_a_file(file: IO[bytes]) -> str:
    """A description of what was downloaded instead of the file, judging by the first bytes; empty
    if unknown.
    """
    start = file.read(64).lstrip().lower()
    for mark, description in IN_PLACE_OF_A_FILE.items():
        if start.startswith(mark):
            return description
    return ""


class FileError(ValueError):
    """An unusable file; the message names it and says what was found, what was expected and what to
    do.
    """


@contextlib.contextmanager
def reading(path: object, expected: str, kind: type[FileError] = FileError) -> Iterator[None]:
    """Turn every error of the block into one of `kind` that names the file and what was `expected`.

    Every reader runs in such a block, because parsers raise anything from KeyError to MemoryError
    on a damaged or hostile file. A `FileError` keeps its message.
    """
    try:
        yield
    except FileError as error:
        if type(error) is not FileError:
            raise
        raise kind(str(error)) from error
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error_line(error)})"
        if isinstance(error, FileNotFoundError):
            problem = "there is no such file"
        raise kind(f"{path}: {problem}; expected {expected}") from error
    except Exception as error:
        problem = "damaged or of the wrong kind"
        if isinstance(error, UnicodeDecodeError):
            problem = "not UTF-8 text"
        # The text of these errors is about our code, not about the file.
        if not isinstance(error, LookupError | TypeError | AttributeError | EOFError):
            problem += f" ({error_line(error).partition(': ')[2] or type(error).__name__})"
        raise kind(f"{path}: {problem}; expected {expected}") from error


@contextlib.contextmanager
def writing(path: object, advice: str) -> Iterator[None]:
    """Turn a system error of the block into a `FileError`: what cannot be written, why, and what to
    do.
    """
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written ({error.strerror or error}); {advice}"
        ) from error


def check_writable(path: str | Path) -> None:
    """Check before long work that the file of `--out` can be written; leave nothing behind."""
    there = next(folder for folder in Path(path).absolute().parents if folder.exists())
    with writing(path, OTHER_PLACE):
        tempfile.TemporaryFile(dir=there).close()


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading bytes; a pipe could block forever, and a device may be
    endless.
    """
    check_regular(path)
    return open(path, "rb")  # noqa: PTH123  for every utterance


def read_secret(file: Path | None, variable: str) -> bytes | None:
    """The key or token in a file, without the line end, or in an environment variable; None without
    either.
    """
    if file is None:
        secret_text = os.environ.get(variable)
        return None if secret_text is None else os.fsencode(secret_text)
    expected = (
        f"a regular file that holds the key or token in one line, up to {LONGEST_SECRET} bytes"
    )
    with reading(file, expected), open_regular(file) as content:
        # Editors add a line end; it must not be part of the secret.
        secret = content.read(LONGEST_SECRET + 1).rstrip(b"\r\n")
    if not secret or len(secret) > LONGEST_SECRET:
        raise FileError(f"{file}: {len(secret)} bytes; expected {expected}")
    return secret


def check_regular(path: str | Path) -> None:
    """Refuse anything that exists but is not a regular file."""
    mode = os.stat(path).st_mode  # noqa: PTH116  for every utterance
    if not stat.S_ISREG(mode):
        raise FileError(
            f"{path} is a {'folder' if stat.S_ISDIR(mode) else 'pipe or device'}; expected a file"
        )


def open_text(path: str | Path) -> IO[str]:
    """Open a regular file of UTF-8 text, with or without a byte-order mark; line ends are kept."""
    # Windows editors write a byte-order mark, which would become part of the first word.
    return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w", *, is_flushed: bool = True) -> Iterator[IO]:
    """Open a temporary file next to `path`; on success flush it to disk and rename it, on failure
    remove it.

    Readers of `path` see either the old content or the complete new content. Text is UTF-8 with
    Unix line ends. An unflushed file survives a kill, but not a power cut.
    """
    # Readers must never see half a file, even if the machine stops between two lines of this
    # function. Only a rename within one folder is atomic, so the content is written under another
    # name. It is flushed before the rename, because some file systems rename a file whose content
    # is not on the disk yet.
    path = Path(path)
    # Renaming would replace a pipe or, as root, /dev/null with a file.
    with contextlib.suppress(FileNotFoundError):
        check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are private to their owner, and a run folder is often shared.
    temporary = temporary_beside(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(mode.replace("w", "x"), **text) as file:  # type: ignore[call-overload]
            yield file
            # Without fsync, the file may be empty after a power cut.
            if is_flushed:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A failed write names no file, or the temporary one.
        if (
            isinstance(error, OSError)
            and error.errno is not None
            and error.filename in (None, str(temporary))
        ):
            error.filename = str(path)
            error.filename2 = None
        raise


def place(source: str | Path, target: str | Path, *, is_flushed: bool = True) -> None:
    """Hard-link a file to another name, replacing any file there; copies on disks without links."""
    target = Path(target)
    temporary = temporary_beside(target)
    try:
        temporary.hardlink_to(source)
        temporary.replace(target)
    except OSError:
        with (
            Path(source).open("rb") as content,
            atomic_write(target, "wb", is_flushed=is_flushed) as copy,
        ):
            shutil.copyfileobj(content, copy)
    finally:
        # Renaming failed, or did nothing because both names are the same file.
        temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A temporary name in the same folder; `remove_leftovers` finds such files after a kill."""
    # Cut, because names have a maximum length.
    return path.with_name(f".{path.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(root: Path) -> int:
    """Remove half-written files of a killed run below `root`, which no other process may use;
    return their number.
    """
    leftovers = [path for path in root.rglob(".*.tmp") if path.is_file()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def hold_lock(
    path: str | Path, refusal: str, *, waits: bool = False
) -> contextlib.AbstractContextManager:
    """Hold the lock file `path` until the block ends; the system releases it when the process
    dies.
    """
    # Imported late: `verify` starts without it.
    from filelock import FileLock, Timeout

    try:
        return FileLock(path, timeout=-1 if waits else 0).acquire()
    except Timeout as error:
        raise ValueError(refusal) from error


@contextlib.contextmanager
def exclusive(folder: str | Path, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder, creating it if necessary and removing half-written files of a killed run.

    If the block fails before it has written anything, new folders are removed again.
    """
    folder = Path(folder)
    # A running process holds the lock, which the system releases when the process ends in any way.
    # A killed one leaves the file `running`, and only then are half-written files removed.
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # A separate file, because some versions of filelock empty the lock file.
    running = folder / RUNNING_NAME
    try:
        refusal = (
            f"another process is preparing data in {folder}; wait for it or stop it, then "
            "run this again"
        )
        with hold_lock(folder / LOCK_NAME, refusal, waits=waits):
            if running.exists():
                logger.info(
                    "removed half-written files of a killed run: %d", remove_leftovers(folder)
                )
            running.touch()
            try:
                yield
            finally:
                running.unlink(missing_ok=True)
    except BaseException:
        if made:
            (folder / LOCK_NAME).unlink(missing_ok=True)
        # A folder with files is kept, because the next run continues from them.
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_jobs: int,
    description: str = "",
    *,
    total: int | None = None,
    unit: str = "file",
    units_of: Callable[[Result], int] = lambda result: 1,
) -> Iterator[Result]:
    """Map `function` over `items` with `num_jobs` threads, in order; an error is raised in place of
    its item's result.

    Threads suffice, because files, decompression and other processes (ffmpeg) release the
    interpreter. At most `IN_FLIGHT_PER_WORKER` items per thread are in flight, so memory does not
    grow with their number. The bar, hidden by an empty description, counts `units_of` each result,
    out of `total`.
    """
    # Not `Executor.map`, which reads all items first: a million names, or a generator that lists a
    # slow disk, would delay the first result.
    waiting: collections.deque[Future[Result]] = collections.deque()
    source = iter(items)
    limit = max(1, num_jobs) * IN_FLIGHT_PER_WORKER
    bar = Bar(description, total, unit, is_shown=bool(description))
    with ThreadPoolExecutor(max_workers=max(1, num_jobs)) as pool, bar:
        try:
            while True:
                for item in itertools.islice(source, limit - len(waiting)):
                    waiting.append(pool.submit(function, item))
                if not waiting:
                    break
                result = waiting.popleft().result()
                bar.update(units_of(result))
                yield result
        finally:
            # Also reached if the caller stops early or an item fails.
            pool.shutdown(cancel_futures=True)


def free_name(path: Path, word: str) -> Path:
    """The first free name of `<name>.<word>-1`, `<name>.<word>-2` … next to `path`."""
    number = 1
    while (free := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    return free


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's content in lower-case hex, which identifies lists and models."""
    return digest_of(path, "sha256")


def digest_of(path: str | Path, algorithm: str) -> str:
    """A file's checksum in lower-case hex; corpora publish "md5" of their archives and lists."""
    path = Path(path)
    digest = hashlib.new(algorithm, usedforsecurity=False)
    num_bytes = path.stat().st_size
    with (
        path.open("rb") as file,
        Bar(f"verify {path.name}", num_bytes, "B", is_shown=num_bytes >= SHOWN_BYTES) as bar,
    ):
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


def own_command(command: str) -> str:
    """The command that a user types for `speakernet COMMAND`: in a checkout, which need not be
    installed, a script.
    """
    # Commands in messages are meant to be copied. A checkout that is not installed has no
    # `speakernet` command, so they name the script.
    word, _, part = command.partition(" ")
    script = {"train": "trainSpeakerNet.py", "prepare": f"data_prep/{part}.py"}.get(word)
    if script is None or not (CHECKOUT / script).is_file():
        return f"speakernet {command}"
    called = Path(sys.argv[0])
    if called.resolve() == CHECKOUT / script:
        return f"python {shlex.quote(str(called))}"
    is_here = Path.cwd() == CHECKOUT
    return f"python {script if is_here else shlex.quote(str(CHECKOUT / script))}"


def refuse_overwriting(outputs: Iterable[str | Path], inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is an input or another output, even under another name."""
    taken = list(map(Path, inputs))
    for output in map(Path, outputs):
        for other in taken:
            if output.resolve() == other.resolve() or (
                output.exists() and other.exists() and output.samefile(other)
            ):
                raise FileError(
                    f"{output}: the output would overwrite {other}; choose another name for the "
                    "output"
                )
        taken.append(output)


def is_address(path: object) -> bool:
    """Whether a path is an fsspec address, such as s3://bucket/vox2."""
    return "://" in str(path)


def human_bytes(num_bytes: float) -> str:
    """A readable size, in powers of 1024.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    power = min(len(BYTE_UNITS) - 1, max(0, int(abs(num_bytes)).bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {BYTE_UNITS[power]}"


def error_line(error: BaseException) -> str:
    """An error in one line: its type and the start of its message, if any."""
    line = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's YAML 1.1, except that `1e-3` is a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; one that its type does not allow is named."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, AttributeError, LookupError, TypeError) as error:
            shown = node.value[:60] if isinstance(node, yaml.ScalarNode) else "a collection"
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown!r} is not a valid {kind}; quote it if it is text"
            ) from error


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def yaml_nodes(text: str, name: str, *, has_lines: bool = False) -> yaml.Node | None:
    """The nodes of a YAML or JSON text, with their lines; None if the text is empty.

    Refuses text that would take forever or overflow the stack: limits are checked on the parser's
    events, before the composer recurses.
    """

    def place(mark: Any) -> str:
        if not has_lines:
            return name
        return f"{name}:{mark.line + 1 if mark else 1}"

    # A configuration may come from anybody. Deep nesting overflows the composer's stack, aliases
    # expand exponentially, and a long number takes quadratic time; the events, which cost linear
    # time, show all three.
    if len(text) > MAX_YAML:
        raise FileError(f"{name} is too long; expected at most {MAX_YAML:,} characters")
    # The anchors of the collections that are open, by level.
    anchors: list[str | None] = []
    aliases = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            problem = ""
            if isinstance(event, yaml.CollectionStartEvent):
                anchors.append(event.anchor)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchors.pop()
            elif isinstance(event, yaml.AliasEvent):
                aliases += 1
                if event.anchor in anchors:
                    problem = f"*{event.anchor} is inside &{event.anchor}, which would be endless"
            elif isinstance(event, yaml.ScalarEvent):
                problem = _problem_of_scalar(event)
            if len(anchors) > MAX_YAML_LEVELS or aliases > MAX_YAML_ALIASES:
                problem = (
                    f"nested too deeply or too long; expected at most {MAX_YAML_LEVELS} levels "
                    f"and {MAX_YAML_ALIASES} aliases"
                )
            if problem:
                raise FileError(f"{place(event.start_mark)}: {problem}")
        return yaml.compose(text, Loader=_YamlLoader)
    except yaml.YAMLError as error:
        raise FileError(
            f"{place(getattr(error, 'problem_mark', None))}: not valid YAML: "
            f"{str(error).replace(IN_TEXT, '')}"
        ) from error


def _problem_of_scalar(event: yaml.ScalarEvent) -> str:
    """Why a scalar is refused; empty if it is not."""
    text = event.value
    if len(text) > MAX_DIGITS and not set(text) - set("+-0123456789_:."):
        return f"a number of {len(text):,} digits; expected at most {MAX_DIGITS}"
    # YAML 1.1 reads 010 as 8, which hardly anybody means.
    if event.implicit[0] and LEADING_ZERO.fullmatch(text):
        return f"{text} has a leading zero; write the number without it, or quote it as text"
    # It reads 1:30 as 90, also where somebody forgot a line break or meant a slice.
    if event.implicit[0] and BASE_60.fullmatch(text):
        return f"{text} would be a number to base 60; write a plain number, or quote it as text"
    return ""


def yaml_value(node: yaml.Node | None, where: str) -> Any:
    """The plain value of a node; `where` names it in messages."""
    try:
        return None if node is None else _YamlLoader("").construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise FileError(f"{where}: {str(error).replace(IN_TEXT, '')}") from error


def read_yaml(text: str, where: str) -> Any:
    """The plain value of a YAML or JSON text, None if it is empty; `where` names it in messages.

    >>> read_yaml("{channels: 32, rates: [1e-3, 2]}", "here")
    {'channels': 32, 'rates': [0.001, 2]}
    """
    return yaml_value(yaml_nodes(text, where), where)


def read_yaml_file(path: str | Path, expected: str) -> Any:
    """The plain value of a YAML or JSON file, None if it is empty; errors as in `reading`."""
    with reading(path, expected), open_text(path) as file:
        return read_yaml(file.read(MAX_YAML + 1), str(path))


def read_arrays(
    path: str | Path, expected: str, kind: type[FileError] = FileError
) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file by name; errors as in `reading`.

    Sizes are checked against the file before memory is allocated, and pickled objects are never
    read.
    """
    with (
        reading(path, expected, kind),
        open_regular(path) as file,
        zipfile.ZipFile(file) as archive,
    ):
        num_bytes = os.fstat(file.fileno()).st_size
        return {
            member.filename.removesuffix(".npy"): _read_array(archive, member, num_bytes)
            for member in archive.infolist()
        }


def _read_array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, archive_bytes: int
) -> np.ndarray:
    # A header can claim any size, and numpy would allocate it before reading a byte. Deflate cannot
    # shrink data more than 1,033-fold, so a larger claim is false.
    if member.file_size > DEFLATE_LIMIT * (min(member.compress_size, archive_bytes) + 1):
        raise ValueError(
            f"{member.filename} claims {member.file_size:,} bytes, more than the file can hold"
        )
    with archive.open(member) as stream:
        is_first = np.lib.format.read_magic(stream) == (1, 0)
        read_header = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(stream)
        claimed = math.prod(shape) * dtype.itemsize
        held = member.file_size - stream.tell()
    if claimed != held:
        raise ValueError(f"{member.filename} claims {claimed:,} bytes and has {held:,}")
    with archive.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        # The checksum of a member is only compared at its end.
        stream.read(1)
    return array
