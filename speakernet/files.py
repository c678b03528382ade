"""What every room does with files: read without surprises, written whole or not at all, one process at a time, many at
once, sizes for people.

Knows nothing of audio, lists or checkpoints.
"""

import collections
import contextlib
import hashlib
import io
import itertools
import logging
import os
import re
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import yaml
from filelock import FileLock, Timeout

from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCK_NAME = ".preparing.lock"
RUNNING_NAME = ".preparing.running"
LONGEST_NAME_BYTES = 255  # of every file system in use
IN_FLIGHT_PER_WORKER = 4
OTHER_PLACE = "choose another place with --out"
BLOCK_BYTES = 1 << 20
# Of YAML texts; PyYAML reads about as many letters in a second, and some numbers take the square of their length.
MOST_YAML, MOST_YAML_LEVELS, MOST_YAML_ALIASES, MOST_DIGITS = 256 << 10, 20, 20, 100
#: A file that is summed in less than a second or so needs no progress bar.
SHOWN_BYTES = 512 << 20
#: The folder that holds trainSpeakerNet.py and data_prep/ where the package is used from a checkout.
CHECKOUT = Path(__file__).resolve().parents[1]

FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


IN_PLACE_OF_A_FILE = {
    b"version https://git-lfs": "a pointer of git-lfs, whose file `git lfs pull` fetches",
    b"<!doc": "an HTML page, as servers send in place of a file that needs a login",
    b"<html": "an HTML page, as servers send in place of a file that needs a login",
}
"""How files begin that came in place of others, and what they are."""


def in_place_of_a_file(file: IO[bytes]) -> str:
    """What came in place of the wanted file, by its first bytes, for messages; empty where it is none of what usually
    does.
    """
    start = file.read(64).lstrip().lower()
    return next((found for mark, found in IN_PLACE_OF_A_FILE.items() if start.startswith(mark)), "")


class FileError(ValueError):
    """A file that cannot be used; the message names it and says what was found, what was expected, what to do."""


@contextlib.contextmanager
def reading(path: object, expected: str, kind: type[FileError] = FileError) -> Iterator[None]:
    """Turn whatever goes wrong in the block into one error that names the file.

    Parsers answer a damaged or hostile file with any exception of theirs, from KeyError to MemoryError; every reader
    stands in such a block, so that none of them ends in a traceback. A `FileError` keeps its words.

    Args:
        path: of the file, for the message.
        expected: what the file should be and what to do, as the end of a sentence after "expected".
        kind: the error of the room.

    Raises:
        FileError: of that kind.
    """
    try:
        yield
    except FileError as error:
        if type(error) is not FileError:
            raise
        raise kind(str(error)) from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise kind(f"{path}: cannot be read ({reason}); expected {expected}") from error
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8 text (byte {error.start}); expected {expected}") from error
    except Exception as error:
        raise kind(f"{path}: damaged or of another kind ({error_line(error)}); expected {expected}") from error


@contextlib.contextmanager
def writing(path: object, advice: str) -> Iterator[None]:
    """Turn an error of the system in the block into one sentence: what cannot be written, why, what to do.

    Raises:
        FileError: ends in `advice`.
    """
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror or error}); {advice}") from error


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an error of the system in the block name a file: a write that fails names none, or a temporary one.

    Raises:
        OSError: as it was, with `path` as its file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)) and error.filename2 is None:
            error.filename = str(path)
        raise


def check_writable(path: str | Path) -> None:
    """See before long work that the file of `--out` can be written where it is to lie; nothing is made.

    Raises:
        FileError: it cannot.
    """
    there = next(folder for folder in Path(path).absolute().parents if folder.exists())
    with writing(path, OTHER_PLACE):
        tempfile.TemporaryFile(dir=there).close()


def open_regular(path: str | Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a file for reading bytes; what is no regular file is refused at once.

    A pipe would be waited for without end, and a device may have none.

    Raises:
        FileError: it is a folder, a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    file = open(path, "rb", buffering=buffering, opener=_without_waiting)  # noqa: SIM115  the caller closes it
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def check_regular(path: object, mode: int) -> None:
    """Refuse what is no regular file, by the mode that `os.stat` gave.

    Raises:
        FileError: saying what it is.
    """
    if not stat.S_ISREG(mode):
        kind = FILE_KINDS.get(stat.S_IFMT(mode), "something else")
        raise FileError(f"{path}: not a regular file but {kind}; give a file that lies on a disk")


def open_text(path: str | Path) -> IO[str]:
    """Open a regular file of UTF-8 text, with or without a byte-order mark; line ends are left as they are.

    Raises:
        FileError: it is a folder, a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    # Windows' editors write a mark, which would become part of the first word.
    return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")


def _without_waiting(path: str, flags: int) -> int:
    # Without the flag opening a pipe waits for a writer; on a regular file it does nothing, and Windows has none.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w", *, is_flushed: bool = True) -> Iterator[IO]:
    """Open a temporary file beside `path`; on success flush it to the disk and rename it, on failure remove it.

    Whoever reads `path` sees the old content or the whole new one. Text is UTF-8 with Unix line ends. Not flushed it is
    as safe from a kill, but not from a power cut.

    Raises:
        FileError: there is a folder, a pipe or a device at `path`.
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    path = Path(path)
    # Renaming would put a file in the place of a pipe or, as root, of /dev/null.
    with contextlib.suppress(FileNotFoundError):
        check_regular(path, path.stat().st_mode)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are private to their owner, and a run folder is often shared.
    temporary = temporary_beside(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        # Nobody knows the temporary name.
        with naming(path, temporary):
            with temporary.open(mode.replace("w", "x"), **text) as file:  # type: ignore[call-overload]
                yield file
                # Renamed without it, after a power cut the new name may stand over content that never reached the disk.
                if is_flushed:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def place(source: str | Path, target: str | Path, *, is_flushed: bool = True) -> None:
    """Give a file a second name, at once taking the place of what had it; a copy where the disk knows no links.

    A copy is flushed to the disk unless there are so many that the flushes would take hours.

    Raises:
        OSError: the folder is not writable, or a copy does not fit; what had the name is untouched.
    """
    target = Path(target)
    temporary = temporary_beside(target)
    try:
        temporary.hardlink_to(source)
    except OSError:
        copy_whole(source, target, is_flushed=is_flushed)
        return
    try:
        temporary.replace(target)
    finally:
        # Left behind where that failed; and of two names of one file renaming does nothing, and leaves both.
        temporary.unlink(missing_ok=True)


def copy_whole(source: str | Path, target: str | Path, *, is_flushed: bool = True) -> None:
    """Copy a file's content; like `atomic_write`, the target is the old or the whole new one.

    Raises:
        OSError: the folder is not writable, or the copy does not fit; the target is untouched.
    """
    with Path(source).open("rb") as content, atomic_write(target, "wb", is_flushed=is_flushed) as copy:
        shutil.copyfileobj(content, copy)


def temporary_beside(path: Path) -> Path:
    """A name in the same folder for a half-written file; `remove_leftovers` finds such names after a kill."""
    number = f"{os.getpid()}-{secrets.token_hex(4)}"
    name = f".{path.name}.{number}.tmp"
    # A name that already has the longest length cannot be made longer.
    return path.with_name(name if len(os.fsencode(name)) <= LONGEST_NAME_BYTES else f".{number}.tmp")


def remove_leftovers(root: Path) -> int:
    """Remove half-written files that a killed run left under `root`; the number removed.

    Only for a folder that no other process works in at this moment (`exclusive` calls it).
    """
    removed = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name.startswith(".") and name.endswith(".tmp"):
                Path(folder, name).unlink(missing_ok=True)
                removed += 1
    return removed


@contextlib.contextmanager
def hold_lock(path: str | Path, refusal: str, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; the system drops it when the process dies.

    Raises:
        ValueError: another process holds it, unless that is waited for; `refusal` is the sentence that says what to do.
    """
    try:
        lock = FileLock(path, timeout=-1 if waits else 0).acquire()
    except Timeout as error:
        raise ValueError(refusal) from error
    with lock:
        yield


@contextlib.contextmanager
def exclusive(folder: str | Path, *, waits: bool = False) -> Iterator[None]:
    """Prepare a folder as the only process that does: made if missing, half-written files of a killed run removed.

    A block that fails before it has written anything leaves no folder behind.

    Raises:
        ValueError: another process prepares data in the same folder now, and its end is not waited for.
    """
    folder = Path(folder)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # A file of its own: versions of filelock differ in whether they empty the lock file.
    running = folder / RUNNING_NAME
    refusal = f"another process is preparing data in {folder}; wait for it or end it, then run this again"
    try:
        with hold_lock(folder / LOCK_NAME, refusal, waits=waits):
            if running.exists():
                logger.info("the last run was killed; removed %d half-written files", remove_leftovers(folder))
            running.touch()
            try:
                yield
            finally:
                running.unlink(missing_ok=True)
    except BaseException:
        if made:
            (folder / LOCK_NAME).unlink(missing_ok=True)
        for one in made:
            try:
                one.rmdir()
            except OSError:
                # Something was written, which the next run goes on from.
                break
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
    """The results of `function` over `items` by `num_jobs` threads, in order; an error is raised at its item's place.

    Threads, because the work is files, decompression and other processes (ffmpeg), which leave the interpreter free.
    At most `IN_FLIGHT_PER_WORKER` items a thread are drawn ahead, so that memory does not grow with their number.

    Args:
        function: called from several threads.
        items: drawn one by one; may be an endless or slow iterator.
        num_jobs: threads.
        description: of the progress bar; empty shows none.
        total: units in all, where known.
        unit: what the bar counts.
        units_of: how many of these a result stands for.
    """
    waiting: collections.deque[Future[Result]] = collections.deque()
    limit = max(1, num_jobs) * IN_FLIGHT_PER_WORKER
    bar = Bar(description, total, unit, is_shown=bool(description))
    with ThreadPoolExecutor(max_workers=max(1, num_jobs)) as pool, bar:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= limit:
                    bar.update(units_of(result := waiting.popleft().result()))
                    yield result
            while waiting:
                bar.update(units_of(result := waiting.popleft().result()))
                yield result
        finally:
            # Also reached when the caller stops early or an item failed: what has not begun is not begun.
            for future in waiting:
                future.cancel()


def free_name(path: Path, word: str) -> Path:
    """The first free one of `<name>.<word>-1`, `<name>.<word>-2` … beside `path`."""
    numbers = itertools.count(1)
    return next(free for number in numbers if not (free := path.with_name(f"{path.name}.{word}-{number}")).exists())


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's content as lower-case hex: what our own results and files are known by."""
    return _hex_of(Path(path), hashlib.sha256())


def md5_of(path: str | Path) -> str:
    """MD5 of a file's content as lower-case hex: what corpora publish of their archives and lists."""
    return _hex_of(Path(path), hashlib.md5(usedforsecurity=False))


def _hex_of(path: Path, digest: "hashlib._Hash") -> str:
    num_bytes = path.stat().st_size
    with path.open("rb") as file, Bar(f"verify {path.name}", num_bytes, "B", is_shown=num_bytes >= SHOWN_BYTES) as bar:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


def own_command(command: str) -> str:
    """What the user types for `speakernet COMMAND`: the script that does the same, where this is a checkout.

    A wheel has neither trainSpeakerNet.py nor data_prep/, and a checkout may be used without being installed.
    """
    word, _, part = command.partition(" ")
    script = {"train": "trainSpeakerNet.py", "prepare": f"data_prep/{part}.py"}.get(word)
    if script is None or not (CHECKOUT / script).is_file():
        return f"speakernet {command}"
    is_here = Path.cwd() == CHECKOUT
    return f"python {script if is_here else shlex.quote(str(CHECKOUT / script))}"


def refuse_overwriting(outputs: Iterable[str | Path], inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is an input or another output, also by another name of the same file.

    Raises:
        FileError: naming it.
    """
    taken = [Path(one) for one in inputs]
    for output in map(Path, outputs):
        for other in taken:
            if output.resolve() == other.resolve() or (output.exists() and other.exists() and output.samefile(other)):
                raise FileError(f"{output}: the output would overwrite {other}; choose another name for the output")
        taken.append(output)


def human_bytes(num_bytes: float) -> str:
    """A size for people, in powers of 1024.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def error_line(error: BaseException) -> str:
    """An error in one line: its type and the beginning of its message, which may be empty."""
    line = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class GrowingFile:
    """Bytes appended to a file, each piece whole or not at all; what cannot be written is dropped.

    The first failure is said; later pieces are tried all the same, since the disk may have room again. The file, with
    its folder, is made with the first piece. Every piece reaches the system before `append` returns, so that a killed
    run keeps it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None
        self._has_failed = False

    def append(self, content: bytes) -> bool:
        """Write a piece at the end; returns whether it is there now."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)  # type: ignore[assignment]
            assert self._file is not None
            _write_whole(self._file, content)
        except OSError as error:
            self.close()
            if not self._has_failed:
                # Before it is said: what is said goes to the log, which may be this very file.
                self._has_failed = True
                reason = error.strerror or str(error)
                logger.warning(
                    "%s cannot be written (%s): what belongs there is dropped, the run goes on", self.path, reason
                )
            return False
        return True

    def close(self) -> None:
        """Let go of the file; another piece opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _write_whole(file: BinaryIO, content: bytes) -> None:
    """Write all of it, or leave the file as it was.

    Raises:
        OSError: the disk is full or broken.
    """
    before = os.fstat(file.fileno()).st_size
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        # Half a line would spoil the next one, half a record all that follow.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-3` is a number, as everybody expects."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def yaml_nodes(text: str, name: str, *, has_lines: bool = False) -> yaml.Node | None:
    """The nodes of a YAML or JSON text, each of which knows its line; None if it is empty.

    Refuses what would take for ever or overflow the stack: the parser's events come one by one, its composer recurses.
    """

    def place(mark: Any) -> str:
        return f"{name}:{mark.line + 1 if mark else 1}" if has_lines else name

    if len(text) > MOST_YAML:
        raise FileError(f"{name} has more than {MOST_YAML:,} letters, the most that is read")
    depth = aliases = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            is_number = isinstance(event, yaml.ScalarEvent) and not set(event.value) - set("+-0123456789_:.")
            is_long = is_number and len(event.value) > MOST_DIGITS
            if depth > MOST_YAML_LEVELS or aliases > MOST_YAML_ALIASES or is_long:
                limits = f"{MOST_YAML_LEVELS} levels, {MOST_YAML_ALIASES} aliases, {MOST_DIGITS} digits in a number"
                raise FileError(f"{place(event.start_mark)}: nested too deep or too long; at most {limits}")
        return yaml.compose(text, Loader=_YamlLoader)
    except yaml.YAMLError as error:
        raise FileError(f"{place(getattr(error, 'problem_mark', None))}: not valid YAML: {error}") from error


def yaml_value(node: yaml.Node | None, where: str) -> Any:
    """The plain value of a node; `where` names it in messages."""
    try:
        return None if node is None else _YamlLoader("").construct_object(node, deep=True)
    except (ValueError, OverflowError, AttributeError, LookupError, TypeError, yaml.YAMLError) as error:
        shown = f"{node.value[:60]!r} is not a value" if isinstance(node, yaml.ScalarNode) else "not a value"
        raise FileError(f"{where}: {shown}: {error}") from error


def read_yaml(text: str, where: str) -> Any:
    """The plain value of a YAML or JSON text, None if it is empty; `where` names it in messages.

    >>> read_yaml("{channels: 32, rates: [1e-3, 2]}", "here")
    {'channels': 32, 'rates': [0.001, 2]}
    """
    return yaml_value(yaml_nodes(text, where), where)
