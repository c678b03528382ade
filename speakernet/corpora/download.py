"""Fetch files over HTTP so that nobody has to watch: resume, retry, verify, and say plainly what the user must do.

A file is fetched into `NAME.part`, verified by MD5 and only then renamed to `NAME`; whatever kills the process,
the next run goes on where the bytes end. Several files are fetched at once. What the files mean is known elsewhere.
"""

import contextlib
import errno
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speakernet.corpora import verified
from speakernet.corpora.catalogue import RemoteFile
from speakernet.corpora.http_client import (
    NETWORK_ERRORS,
    UNANSWERED,
    Credentials,
    RangeError,
    RefusedError,
    Reply,
    http_get,
    root_of,
    shown_url,
)
from speakernet.corpora.safe_paths import Folder
from speakernet.corpora.summary import StepSummary
from speakernet.files import FileError, human_bytes, in_place_of_a_file, md5_of, parallel_map
from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
#: Codes after which asking again is useless: the user has to do something.
FINAL_CODES = {400: "the request was refused", 401: "no or wrong credentials", 403: "access denied", 404: "not there",
               410: "gone"}  # fmt: skip
#: What a machine without a network answers, where a server would have refused or gone silent.
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


class DownloadError(FileError):
    """A file that could not be fetched; the message says what the user can do."""


class DiskFullError(DownloadError):
    """Not enough space for the files; nothing else is tried."""


@dataclass(frozen=True)
class DownloadOptions:
    """How patiently to fetch. `sleep` is handed in so that tests need not wait."""

    num_retries: int = 8
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    timeout_seconds: float = 60.0
    credentials: Credentials = field(default_factory=Credentials)
    sleep: Callable[[float], None] = time.sleep


def download_all(
    files: Iterable[RemoteFile], folder: str | Path, num_jobs: int, options: DownloadOptions, summary: StepSummary
) -> None:
    """Fetch what is missing, several at once; a file that is there with the right sum is left alone.

    Raises:
        DiskFullError: the disk cannot hold the files; what was fetched stays for the next run.
    """
    root = Folder(folder)
    missing = []
    for file, is_there in parallel_map(
        lambda file: (file, verified.has_md5(root.path(file.name), file.md5)), files, num_jobs
    ):
        if is_there:
            summary.add_skipped()
        else:
            missing.append(file)
    if not missing:
        return
    # Asked for beforehand: 115 GB that do not fit should not be noticed after a night.
    sizes = dict(zip((file.name for file in missing), _sizes(missing, num_jobs, options), strict=True))
    check_space(root.root, sum(max(0, size - _bytes_there(root, name)) for name, size in sizes.items()))
    known_total = sum(sizes.values()) if all(sizes.values()) else None
    with Bar("download", known_total, "B") as bar:
        progress = _Progress(bar)
        outcomes = parallel_map(
            lambda file: (file, _outcome(file, root, options, progress)), missing, num_jobs, unit="file"
        )
        for file, error in outcomes:
            if isinstance(error, DiskFullError):
                raise error
            if error is None:
                summary.add_made()
            else:
                summary.add_broken(file.name, str(error))


def download_file(
    file: RemoteFile, root: Folder, options: DownloadOptions, on_bytes: Callable[[int], object] = lambda count: None
) -> Path:
    """Fetch one file, verified, under its name in `root`; addresses are tried in order.

    Raises:
        DownloadError: no address gave the file; the message names each one's reason.
        DiskFullError: the disk is full.
    """
    target = root.path(file.name)
    if file.needs_key and any(url.endswith("key=") for url in file.urls):
        raise DownloadError(f"{file.name}: an access key is needed and none was given. {file.access}")
    if not file.urls:
        raise DownloadError(f"{file.name}: no address is known. {file.access}")
    reasons = []
    for url in file.urls:
        # A wrong sum may come from an old half file: one fresh start, then the next address.
        for _ in range(2):
            try:
                _fetch_part(url, root, file, options, on_bytes)
            except DiskFullError:
                raise
            except DownloadError as error:
                reasons.append(f"{shown_url(url)}: {error}")
                break
            part = _part_path(root, file.name)
            found = md5_of(part)
            if file.md5 is None or found == file.md5:
                part.replace(target)
                _notes_path(root, file.name).unlink(missing_ok=True)
                verified.remember(target, found)
                return target
            # Looked at before it is removed: a login page in place of the archive is the usual reason.
            with part.open("rb") as content:
                instead = in_place_of_a_file(content)
            part.unlink()
            _notes_path(root, file.name).unlink(missing_ok=True)
            told = f"; it is {instead}" if instead else ""
            reasons.append(f"{shown_url(url)}: MD5 is {found}, expected {file.md5}{told}")
    raise DownloadError(f"{file.name}: " + "; ".join(dict.fromkeys(reasons)) + f". {file.access}")


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        DiskFullError: free and needed space are said.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskFullError(
            f"{folder}: {human_bytes(num_bytes)} are needed and {human_bytes(free)} are free; "
            "free some space or choose another --save_path"
        )


class _Progress:
    """A byte counter for several threads."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bar.update(count)


def _outcome(file: RemoteFile, root: Folder, options: DownloadOptions, progress: _Progress) -> DownloadError | None:
    try:
        download_file(file, root, options, progress)
    except DownloadError as error:
        return error
    return None


def _sizes(files: Sequence[RemoteFile], num_jobs: int, options: DownloadOptions) -> list[int]:
    """Sizes as the servers tell them (0 where unknown): the space check comes before the first byte is kept."""

    def size(file: RemoteFile) -> int:
        if file.num_bytes is not None:
            return file.num_bytes
        for url in file.urls:
            with contextlib.suppress(*NETWORK_ERRORS, OSError, RangeError, RefusedError, ValueError):
                reply = http_get(url, credentials=options.credentials, timeout_seconds=options.timeout_seconds)
                with reply.body:
                    return reply.total or 0
        return 0

    return list(parallel_map(size, files, num_jobs))


def _fetch_part(
    url: str, root: Folder, file: RemoteFile, options: DownloadOptions, on_bytes: Callable[[int], object]
) -> None:
    """Bring `NAME.part` to its full length; waits and asks again while that can help.

    The count of failures begins anew whenever bytes arrived: a line that drops every minute still finishes.
    """
    failures = 0
    is_first = True
    while True:
        before = _bytes_there(root, file.name)
        wait: float | None = None
        try:
            if _fetch_once(url, root, file, options, on_bytes):
                return
            reason = "the connection was cut"
        except DownloadError:
            raise
        except RefusedError as error:
            if error.code in FINAL_CODES:
                raise DownloadError(f"{error} ({FINAL_CODES[error.code]})") from error
            reason = str(error)
            wait = error.wait_seconds
        except NETWORK_ERRORS as error:
            cause = root_of(error)
            reason = f"{type(cause).__name__}: {cause}"
            if is_first and _is_no_network(error):
                # Minutes of asking again help a line that drops, not a machine without one.
                raise DownloadError(
                    f"no way to the server ({reason}); is there a network, or a proxy to set?"
                ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(
                    f"the disk of {root.root} is full while fetching {file.name}; what was fetched is kept: "
                    "free some space and run this again"
                ) from error
            if isinstance(error, PermissionError):
                raise DownloadError(f"{root.root} is not writable: {error.strerror}") from error
            reason = f"{type(error).__name__}: {error}"
        except ValueError as error:
            raise DownloadError(str(error)) from error
        is_first = False
        # A line that drops every minute still finishes; one that gives nothing does not go on for ever.
        failures = 1 if _bytes_there(root, file.name) > before else failures + 1
        if failures > options.num_retries:
            raise DownloadError(f"given up after {options.num_retries} attempts in a row ({reason})")
        backoff = options.first_wait_seconds * 2 ** (failures - 1)
        wait = min(backoff if wait is None else wait, options.longest_wait_seconds)
        logger.info("%s: %s; asking again in %.0f s", file.name, reason, wait)
        options.sleep(wait)


def _is_no_network(error: Exception) -> bool:
    """Whether a first attempt failed as it does without a network, behind a firewall, or with a dead proxy."""
    cause = root_of(error)
    is_cut_off = isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) in UNREACHABLE
    return is_cut_off or isinstance(error, UNANSWERED)


def _fetch_once(
    url: str, root: Folder, file: RemoteFile, options: DownloadOptions, on_bytes: Callable[[int], object]
) -> bool:
    """One request, appended to `NAME.part`; True when the file has its full length."""
    part = _part_path(root, file.name)
    there = _bytes_there(root, file.name)
    notes = _read_notes(root, file.name)
    try:
        reply = http_get(
            url,
            start=there,
            validator=notes.get("validator") if notes.get("url") == shown_url(url) else None,
            credentials=options.credentials,
            timeout_seconds=options.timeout_seconds,
        )
    except RangeError as error:
        if error.total == there:
            return True
        part.unlink(missing_ok=True)
        return False
    with reply.body:
        if reply.start not in (0, there):
            raise OSError(f"the server sent bytes from {reply.start}, asked for {there}")
        if reply.start != there:
            # No ranges here, or another file by now: what is there is of no use.
            on_bytes(-there)
        # Other files arrive at the same time: what was free at the beginning may be taken by now.
        check_space(root.root, (reply.total or 0) - reply.start)
        _write_notes(root, file.name, {"url": shown_url(url), "validator": reply.validator})
        return _append_body(reply, part, on_bytes)


def _append_body(reply: Reply, part: Path, on_bytes: Callable[[int], object]) -> bool:
    with part.open("r+b" if part.exists() else "xb") as output:
        output.seek(reply.start)
        # What lies beyond the start of this body belongs to an older file.
        output.truncate()
        while block := reply.body.read(BLOCK_BYTES):
            output.write(block)
            on_bytes(len(block))
        num_bytes = output.tell()
    return reply.total is None or num_bytes >= reply.total


def _bytes_there(root: Folder, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return _part_path(root, name).stat().st_size
    return 0


def _part_path(root: Folder, name: str) -> Path:
    return root.path(name + ".part")


def _notes_path(root: Folder, name: str) -> Path:
    return root.path(f"{verified.NOTES_FOLDER}/{name}.part.json")


def _read_notes(root: Folder, name: str) -> dict[str, str]:
    try:
        notes = json.loads(_notes_path(root, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _write_notes(root: Folder, name: str, notes: dict[str, str | None]) -> None:
    _notes_path(root, name).write_text(json.dumps(notes), encoding="utf-8")
