"""Fetch files over HTTP: resumed, retried, verified by MD5.

A file is fetched to `NAME.part`, verified and only then renamed to `NAME`; the next run resumes
after a kill. Credentials are never sent to another host: requests drops them on a redirect.
Addresses are never logged in full, because a query may contain an access key.
"""

import contextlib
import json
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import urllib3

from speakernet.corpora.steps import DiskFullError, Folder, StepSummary, check_space
from speakernet.files import (
    FileError,
    atomic_write,
    digest_of,
    in_place_of_a_file,
    parallel_map,
)
from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

NOTES_FOLDER = ".prepared"
"""Folder beside verified files with their MD5 sums, so that they are not read again."""
BLOCK_BYTES = 1 << 20
#: Worth retrying: a dropped connection, a busy server.
RETRIED_CODES = (408, 429, 500, 502, 503, 504)
RETRIED = (
    requests.ConnectionError,
    requests.Timeout,
    requests.HTTPError,
    urllib3.exceptions.HTTPError,
)
UNANSWERED = (requests.ConnectTimeout, requests.exceptions.ProxyError)
"""A firewall that drops everything, a proxy that does not exist."""


class DownloadError(FileError):
    """A file could not be fetched; the message says what the user can do."""


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch. `urls` are tried in order; they may contain a key, so they are never
    logged in full.
    """

    name: str
    urls: tuple[str, ...]
    md5: str | None
    num_bytes: int
    """0 if unknown."""
    access: str
    """What the user can do if no address works."""


@dataclass(frozen=True)
class DownloadOptions:
    """Retries, timeout and credentials. Tests pass in `sleep`."""

    num_retries: int = 8
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    timeout_seconds: float = 60.0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    sleep: Callable[[float], None] = time.sleep


def remember_md5(path: Path, md5: str) -> None:
    """Record that `path`, as it is now, has this sum."""
    note, facts = _note(path, md5)
    with atomic_write(note) as file:
        json.dump(facts, file)


def has_md5(path: Path, md5: str | None) -> bool:
    """Whether the file exists with this sum; without a published sum (None), any non-empty file
    counts.

    A sum is remembered while size and time are unchanged; otherwise a second run would read 115 GB
    of archives again.
    """
    if not path.is_file():
        return False
    if md5 is None:
        return path.stat().st_size > 0
    note, facts = _note(path, md5)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(note.read_text("utf-8")) == facts:
            return True
    real_md5 = digest_of(path, "md5")
    remember_md5(path, real_md5)
    return real_md5 == md5


def _note(path: Path, md5: str) -> tuple[Path, dict[str, Any]]:
    """The file in which a sum is recorded, and its content."""
    status = path.stat()
    facts = {"md5": md5, "num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    return path.parent / NOTES_FOLDER / f"{path.name}.json", facts


def download_all(
    files: Iterable[RemoteFile],
    folder: str | Path,
    num_jobs: int,
    options: DownloadOptions,
    summary: StepSummary,
) -> None:
    """Fetch missing files, several at once; a file with the right sum is left alone."""
    # Names may come from the user's own table; `Folder` refuses those that lead outside.
    root = Folder(folder)
    listed = list(files)
    is_there = parallel_map(lambda file: has_md5(root.path(file.name), file.md5), listed, num_jobs)
    missing = [file for file, there in zip(listed, is_there, strict=True) if not there]
    summary.add(skipped=len(listed) - len(missing))
    sizes = [file.num_bytes for file in missing]
    fetched_bytes = sum(_num_bytes(_part_of(root, file.name)) for file in missing)
    # Checked first, so that a lack of space for 115 GB does not show only after a night of
    # downloading.
    check_space(root.root, sum(sizes) - fetched_bytes)
    lock = threading.Lock()
    with Bar("download", sum(sizes) if all(sizes) else None, "B", is_shown=bool(missing)) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        def outcome(file: RemoteFile) -> None:
            try:
                download_file(file, root, options, advance)
            except DownloadError as error:
                summary.add_broken(file.name, str(error))
            else:
                summary.add(made=1)

        list(parallel_map(outcome, missing, num_jobs))


def download_file(
    file: RemoteFile,
    root: Folder,
    options: DownloadOptions,
    on_bytes: Callable[[int], object],
) -> Path:
    """Fetch and verify one file, named as in the table, in `root`; addresses are tried in order."""
    target = root.path(file.name)
    part = _part_of(root, file.name)
    if any(url.endswith("key=") for url in file.urls):
        raise DownloadError(f"{file.name}: needs an access key, but none was given. {file.access}")
    reasons = [] if file.urls else ["no address is known"]
    for url in file.urls:
        # A wrong sum may come from an old partial file, so it is fetched from the beginning once
        # more before the next address is tried.
        for _ in range(2):
            try:
                _fetch(url, part, options, on_bytes)
            except DownloadError as error:
                reasons.append(f"{shown_url(url)}: {error}")
                break
            _note_of(part).unlink(missing_ok=True)
            md5 = digest_of(part, "md5")
            if file.md5 in (None, md5):
                part.replace(target)
                remember_md5(target, md5)
                return target
            # Inspected before it is removed: the usual reason is a login page in place of the
            # archive.
            with part.open("rb") as content:
                instead = in_place_of_a_file(content) or "a different file"
            part.unlink()
            reasons.append(
                f"{shown_url(url)}: MD5 sum {md5} instead of {file.md5}; the server sent {instead}"
            )
    raise DownloadError(f"{file.name}: " + "; ".join(dict.fromkeys(reasons)) + f". {file.access}")


def shown_url(url: str) -> str:
    """The address without user, password and query, for logs.

    >>> shown_url("https://user:secret@host.org/a/b.zip?key=1234")
    'https://host.org/a/b.zip'
    """
    pieces = urllib.parse.urlsplit(url)
    return pieces._replace(netloc=pieces.netloc.rsplit("@", 1)[-1], query="", fragment="").geturl()


def _part_of(root: Folder, name: str) -> Path:
    return root.path(name + ".part")


def _note_of(part: Path) -> Path:
    """The file that records the version of a partial file: the address and the server's version
    tag.
    """
    return part.with_name(part.name + ".version")


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# How a large file arrives. It grows as NAME.part, and every attempt asks the server only for what
# is missing. Beside it, NAME.part.version keeps the address and the server's version of the file,
# sent along as If-Range: a server whose file has changed since answers with the whole of it. A
# dropped connection costs nothing but the wait, which doubles up to a minute; only attempts that
# bring no byte count against --retries. The published MD5 decides in the end, so a server that lies
# about ranges costs a second download, never a damaged corpus.
def _fetch(
    url: str, part: Path, options: DownloadOptions, on_bytes: Callable[[int], object]
) -> None:
    """Complete `NAME.part`, waiting and retrying while that can help."""
    failures = 0
    while True:
        before = _num_bytes(part)
        try:
            if _fetch_once(url, part, options, on_bytes):
                return
            reason = "the connection was closed early"
        except RETRIED as error:
            cause = _root_cause(error)
            reason = f"{type(cause).__name__}: {cause}"
            is_unanswered = isinstance(error, UNANSWERED) or isinstance(cause, socket.gaierror)
            if is_unanswered and not failures:
                # Retrying for minutes helps if a connection drops, but not if there is none.
                raise DownloadError(
                    f"no connection to the server ({reason}); check the network and the proxy "
                    "settings"
                ) from error
        except requests.RequestException as error:
            reason = f"{type(error).__name__}; expected an http or https address of a file"
            raise DownloadError(reason) from error
        except OSError as error:
            raise DiskFullError(
                f"{part} cannot be written ({error.strerror or error}); the fetched part is kept: "
                "free some space and run this again"
            ) from error
        # A connection that drops every minute still finishes; one that delivers nothing is given
        # up.
        if _num_bytes(part) > before:
            failures = 0
        failures += 1
        if failures > options.num_retries:
            raise DownloadError(
                f"gave up after {options.num_retries} consecutive attempts ({reason})"
            )
        wait = min(options.first_wait_seconds * 2 ** (failures - 1), options.longest_wait_seconds)
        logger.info("%s: %s; retrying in %.0f s", part.stem, reason, wait)
        options.sleep(wait)


def _root_cause(error: BaseException) -> BaseException:
    """The underlying system error, because the libraries' messages contain the full address."""
    below = error.__cause__ or error.__context__
    return error if below is None else _root_cause(below)


def _fetch_once(
    url: str, part: Path, options: DownloadOptions, on_bytes: Callable[[int], object]
) -> bool:
    """Make one request and append to `NAME.part`; True once the file has its full length."""
    there = _num_bytes(part)
    note = _note_of(part)
    # No compression in transit: offsets and sums are those of the published file.
    headers = {"User-Agent": "speakernet-data-preparation", "Accept-Encoding": "identity"}
    if there:
        headers["Range"] = f"bytes={there}-"
        if note.exists():
            address, _, version = note.read_text("utf-8", "replace").partition("\n")
            if version and address == shown_url(url):
                headers["If-Range"] = version
    auth = (options.user, options.password) if options.user or options.password else None
    with requests.get(
        url, headers=headers, auth=auth, stream=True, timeout=options.timeout_seconds
    ) as reply:
        # The partial file is at least as long as the file: either it is complete, or it is part of
        # another version.
        if reply.status_code == 416:
            is_whole = reply.headers.get("Content-Range", "").endswith(f"/{there}")
            if not is_whole:
                part.unlink(missing_ok=True)
            return is_whole
        if reply.status_code in RETRIED_CODES:
            raise requests.HTTPError(f"the server answered {reply.status_code}")
        if not reply.ok:
            raise DownloadError(f"the server answered {reply.status_code} ({reply.reason})")
        # If the server ignores ranges or has a new version, the partial file is useless.
        start = there if reply.status_code == 206 else 0
        on_bytes(start - there)
        length = int(reply.headers.get("Content-Length") or 0)
        # Other files arrive at the same time, so space that was free at the start may be taken by
        # now.
        check_space(part.parent, length)
        version = reply.headers.get("ETag", "W/")
        # A weak ETag may not be used with If-Range (RFC 9110, 13.1.5).
        if version.startswith("W/"):
            version = reply.headers.get("Last-Modified", "")
        # Truncated first: if the server sends a new version of the whole file, the rest of the old
        # one must not stay behind it.
        with part.open("r+b" if part.exists() else "xb") as output:
            output.seek(start)
            output.truncate()
            note.write_text(f"{shown_url(url)}\n{version}", "utf-8")
            # The raw body: requests would unpack a reply labelled gzip, as which some servers send
            # every .tar.gz.
            while block := reply.raw.read(BLOCK_BYTES):
                output.write(block)
                on_bytes(len(block))
            return output.tell() >= start + length


# urllib3 logs each request with its query, which holds the access key.
logging.getLogger("urllib3.connectionpool").setLevel(logging.INFO)
