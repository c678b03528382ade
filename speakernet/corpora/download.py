"""Fetch public corpora over HTTP: which files, from where (catalogue.yaml), resumed, retried, verified by MD5.

A file is fetched into `NAME.part`, verified and only then renamed to `NAME`; the next run resumes what a kill left.
Credentials never leave for another host: requests drops them on a redirect elsewhere. No address is logged whole, since
a query may hold an access key.
"""

import contextlib
import errno
import json
import logging
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import requests
import urllib3
from urllib3.util.retry import Retry

from speakernet.corpora.steps import DiskFullError, Folder, StepSummary, check_space
from speakernet.files import (
    MOST_YAML,
    FileError,
    atomic_write,
    digest_of,
    in_place_of_a_file,
    open_text,
    parallel_map,
    read_yaml,
    reading,
)
from speakernet.options import lookup
from speakernet.terminal import Bar

logger = logging.getLogger(__name__)

BYTES_PER_GIGABYTE = 1_000_000_000
EXPECTED = "a table of corpora, each with 'files' (see catalogue.yaml)"
NOTES_FOLDER = ".prepared"
"""Notes beside the files: MD5 sums of verified files, so that they are not read again; what a `.part` belongs to."""
BLOCK_BYTES = 1 << 20
#: Codes after which asking again is useless: the user has to do something.
FINAL_CODES = {400: "the request was refused", 401: "no or wrong credentials", 403: "access denied", 404: "not there",
               410: "gone"}  # fmt: skip
NETWORK_ERRORS = (requests.ConnectionError, requests.Timeout, requests.TooManyRedirects, urllib3.exceptions.HTTPError)
#: Nobody answered: a firewall that swallows everything, a proxy that is not there.
UNANSWERED = (requests.ConnectTimeout, requests.exceptions.ProxyError)
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


class DownloadError(FileError):
    """A file that could not be fetched; the message says what the user can do."""


class _RefusedError(Exception):
    """The server answered with an error code, and perhaps how long to wait."""

    def __init__(self, code: int, wait_seconds: float | None) -> None:
        super().__init__(f"the server answered {code}")
        self.code, self.wait_seconds = code, wait_seconds


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch. `urls` are tried in order; they may hold an access key, so they are never logged whole."""

    name: str
    urls: tuple[str, ...]
    md5: str | None
    num_bytes: int | None
    access: str
    needs_key: bool = False


@dataclass(frozen=True)
class JoinedArchive:
    """A whole archive that is published in pieces, in order."""

    name: str
    pieces: tuple[str, ...]
    md5: str | None


@dataclass(frozen=True)
class Corpus:
    """All files of one corpus, by name."""

    files: Mapping[str, RemoteFile]
    joined: Mapping[str, JoinedArchive]

    def md5(self, archive: str) -> str | None:
        """The published sum of a file or of a joined archive."""
        return self.joined[archive].md5 if archive in self.joined else self.files[archive].md5

    def pieces(self, archive: str) -> tuple[str, ...]:
        """The files that make an archive: its pieces, or itself."""
        return self.joined[archive].pieces if archive in self.joined else (archive,)


@dataclass(frozen=True)
class DownloadOptions:
    """How patiently to fetch, and as whom. Tests hand in `sleep`."""

    num_retries: int = 8
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    timeout_seconds: float = 60.0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    sleep: Callable[[float], None] = time.sleep


def load_catalogue(path: str | Path | None = None) -> dict[str, Any]:
    """The whole table: the shipped one, or a file of the same form."""
    if path is None:
        return dict(read_yaml(resources.files(__package__).joinpath("catalogue.yaml").read_text("utf-8"), "catalogue"))
    with reading(path, EXPECTED), open_text(path) as file:
        table = read_yaml(file.read(MOST_YAML + 1), str(path))
    if not isinstance(table, dict) or not all(isinstance(entry, dict) and "files" in entry for entry in table.values()):
        raise ValueError(f"{path}: expected {EXPECTED}")
    return table


def load_corpus(
    name: str, *, key: str = "", base_url: str | None = None, catalogue_path: str | Path | None = None
) -> Corpus:
    """The files of one corpus with their addresses filled in: `{name}` the file, `{key}` the access key.

    `base_url` is a mirror in place of the table's addresses, `catalogue_path` another table than the shipped one.
    """
    entry = lookup(load_catalogue(catalogue_path), name, "corpus")
    with reading(catalogue_path or "catalogue.yaml", EXPECTED):
        templates = [base_url] if base_url else entry.get("base_urls", [])
        templates = [one if "{name}" in one else one.rstrip("/") + "/{name}" for one in templates]
        files = {}
        for file_name, facts in entry["files"].items():
            # Names and keys become part of an address: a `&` or `#` in one would change what is asked for.
            quoted = {"{name}": urllib.parse.quote(file_name, safe=""), "{key}": urllib.parse.quote(key, safe="")}
            urls = tuple(one.replace("{name}", quoted["{name}"]).replace("{key}", quoted["{key}"]) for one in templates)
            size = facts.get("gigabytes")
            files[file_name] = RemoteFile(
                name=file_name,
                urls=urls,
                md5=facts.get("md5"),
                num_bytes=None if size is None else int(size * BYTES_PER_GIGABYTE),
                access=entry.get("access", ""),
                # Whether a mirror wants a key is not for this table to say.
                needs_key=bool(entry.get("needs_key")) and base_url is None,
            )
        joined = {
            whole: JoinedArchive(whole, tuple(facts["parts"]), facts.get("md5"))
            for whole, facts in entry.get("joined", {}).items()
        }
    return Corpus(files, joined)


def remember_md5(path: Path, md5: str) -> None:
    """Note that `path`, as it is now, has this sum."""
    status = path.stat()
    with atomic_write(_note_of(path)) as file:
        json.dump({"md5": md5, "num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}, file)


def has_md5(path: Path, md5: str | None) -> bool:
    """Whether the file is there with this sum; without a published sum (None) a file that is not empty counts.

    A sum is remembered while size and time stay the same: a second run would else read 115 GB of archives again.
    """
    if not path.is_file():
        return False
    status = path.stat()
    if md5 is None:
        return status.st_size > 0
    note = _read_note(_note_of(path))
    if note.get("num_bytes") == status.st_size and note.get("modified_ns") == status.st_mtime_ns:
        return note.get("md5") == md5
    found = digest_of(path, "md5")
    remember_md5(path, found)
    return found == md5


def _note_of(path: Path) -> Path:
    return path.parent / NOTES_FOLDER / f"{path.name}.json"


def _read_note(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def download_all(
    files: Iterable[RemoteFile], folder: str | Path, num_jobs: int, options: DownloadOptions, summary: StepSummary
) -> None:
    """Fetch what is missing, several at once; a file that is there with the right sum is left alone."""
    root = Folder(folder)
    listed = list(files)
    is_there = parallel_map(lambda file: has_md5(root.path(file.name), file.md5), listed, num_jobs)
    missing = [file for file, there in zip(listed, is_there, strict=True) if not there]
    summary.add(skipped=len(listed) - len(missing))
    if not missing:
        return
    # Checked beforehand: 115 GB that do not fit should not be noticed after a night.
    sizes = list(parallel_map(lambda file: file.num_bytes or _size_on_server(file, options), missing, num_jobs))
    left = [size - _num_bytes(_part_of(root, file.name)) for size, file in zip(sizes, missing, strict=True)]
    check_space(root.root, sum(max(0, one) for one in left))
    lock = threading.Lock()
    with Bar("download", sum(sizes) if all(sizes) else None, "B") as bar:

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

        for _ in parallel_map(outcome, missing, num_jobs):
            pass


def download_file(
    file: RemoteFile, root: Folder, options: DownloadOptions, on_bytes: Callable[[int], object] = lambda count: None
) -> Path:
    """Fetch one file, verified, under its name in `root`; addresses are tried in order."""
    target, part = root.path(file.name), _part_of(root, file.name)
    if file.needs_key and any(url.endswith("key=") for url in file.urls):
        raise DownloadError(f"{file.name}: an access key is needed and none was given. {file.access}")
    reasons = [] if file.urls else ["no address is known"]
    for url in file.urls:
        # A wrong sum may come from an old half file: one fresh start, then the next address.
        for _ in range(2):
            try:
                _fetch(url, file.name, part, options, on_bytes)
            except DownloadError as error:
                reasons.append(f"{shown_url(url)}: {error}")
                break
            _note_of(part).unlink(missing_ok=True)
            found = digest_of(part, "md5")
            if file.md5 in (None, found):
                part.replace(target)
                remember_md5(target, found)
                return target
            # Looked at before it is removed: a login page in place of the archive is the usual reason.
            with part.open("rb") as content:
                instead = in_place_of_a_file(content)
            part.unlink()
            reasons.append(
                f"{shown_url(url)}: MD5 is {found}, expected {file.md5}" + (f"; it is {instead}" if instead else "")
            )
    raise DownloadError(f"{file.name}: " + "; ".join(dict.fromkeys(reasons)) + f". {file.access}")


def shown_url(url: str) -> str:
    """The address without user, password and query, for logs.

    >>> shown_url("https://user:secret@host.org/a/b.zip?key=1234")
    'https://host.org/a/b.zip'
    """
    pieces = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((pieces.scheme, pieces.netloc.rsplit("@", 1)[-1], pieces.path, "", ""))


def _part_of(root: Folder, name: str) -> Path:
    return root.path(name + ".part")


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _size_on_server(file: RemoteFile, options: DownloadOptions) -> int:
    """The size that the first address gives; 0 if unknown."""
    for url in file.urls:
        with contextlib.suppress(*NETWORK_ERRORS, OSError, ValueError), _get(url, options) as reply:
            return _total(reply) or 0 if reply.ok else 0
    return 0


def _get(url: str, options: DownloadOptions, start: int = 0, validator: str | None = None) -> requests.Response:
    # Not unpacked on the way: offsets and sums are those of the file as it is published.
    headers = {"User-Agent": "speakernet-data-preparation", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if validator:
            headers["If-Range"] = validator
    auth = (options.user, options.password) if options.user or options.password else None
    return requests.get(url, headers=headers, auth=auth, stream=True, timeout=options.timeout_seconds)


def _total(reply: requests.Response) -> int | None:
    """Bytes of the whole file, by a reply to a request for all or for a range of it."""
    content_range = re.search(r"/(\d+)$", reply.headers.get("Content-Range", ""))
    if reply.status_code in (206, 416):
        return int(content_range[1]) if content_range else None
    length = reply.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _fetch(url: str, name: str, part: Path, options: DownloadOptions, on_bytes: Callable[[int], object]) -> None:
    """Bring `NAME.part` to its full length; wait and ask again while that can help."""
    failures, is_first = 0, True
    while True:
        before = _num_bytes(part)
        wait = None
        try:
            if _fetch_once(url, part, options, on_bytes):
                return
            reason = "the connection was cut"
        except FileError:
            raise
        except _RefusedError as error:
            if error.code in FINAL_CODES:
                raise DownloadError(f"{error} ({FINAL_CODES[error.code]})") from error
            reason, wait = str(error), error.wait_seconds
        except NETWORK_ERRORS as error:
            cause: BaseException = error
            # The error of the system below those of the libraries, whose texts hold the whole address.
            while (below := cause.__cause__ or cause.__context__) is not None:
                cause = below
            reason = f"{type(cause).__name__}: {cause}"
            is_cut_off = isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) in UNREACHABLE
            if is_first and (is_cut_off or isinstance(error, UNANSWERED)):
                # Minutes of asking again help a line that drops, not a machine without one.
                raise DownloadError(
                    f"no connection to the server ({reason}); is there a network, or a proxy to set?"
                ) from error
        except ValueError as error:
            # requests' InvalidSchema and the like.
            raise DownloadError(f"the address {shown_url(url)} is not a valid http or https address") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(
                    f"the disk of {part.parent} is full while fetching {name}; what was fetched is kept: "
                    "free some space and run this again"
                ) from error
            if isinstance(error, PermissionError):
                raise DownloadError(f"{part.parent} is not writable: {error.strerror}") from error
            reason = f"{type(error).__name__}: {error}"
        is_first = False
        # A line that drops every minute still finishes; one that gives nothing does not go on for ever.
        failures = 1 if _num_bytes(part) > before else failures + 1
        if failures > options.num_retries:
            raise DownloadError(f"given up after {options.num_retries} attempts in a row ({reason})")
        backoff = options.first_wait_seconds * 2 ** (failures - 1)
        wait = min(backoff if wait is None else wait, options.longest_wait_seconds)
        logger.info("%s: %s; asking again in %.0f s", name, reason, wait)
        options.sleep(wait)


def _fetch_once(url: str, part: Path, options: DownloadOptions, on_bytes: Callable[[int], object]) -> bool:
    """One request, appended to `NAME.part`; True when the file has its full length."""
    there, note = _num_bytes(part), _read_note(_note_of(part))
    validator = note.get("validator") if note.get("url") == shown_url(url) else None
    with _get(url, options, there, validator) as reply:
        total = _total(reply)
        if reply.status_code == 416:
            if total != there:
                part.unlink(missing_ok=True)
            return total == there
        if not reply.ok:
            raise _RefusedError(reply.status_code, _wanted_wait(reply.headers.get("Retry-After", "")))
        begins = re.match(r"bytes (\d+)-", reply.headers.get("Content-Range", ""))
        start = int(begins[1]) if reply.status_code == 206 and begins else 0
        if start not in (0, there):
            raise OSError(f"the server sent bytes from {start}, asked for {there}")
        if start != there:
            # No ranges here, or another file by now: what is there is of no use.
            on_bytes(-there)
        # Other files arrive at the same time: what was free at the beginning may be taken by now.
        check_space(part.parent, (total or 0) - start)
        etag = reply.headers.get("ETag", "")
        # A weak ETag may not be used with If-Range (RFC 9110, 13.1.5).
        validator = etag if etag and not etag.startswith("W/") else reply.headers.get("Last-Modified")
        with atomic_write(_note_of(part)) as file:
            json.dump({"url": shown_url(url), "validator": validator}, file)
        with part.open("r+b" if part.exists() else "xb") as output:
            output.seek(start)
            # What is beyond the start of this body belongs to an older file.
            output.truncate()
            # The raw body: requests would unpack what a server calls gzip, as some call every .tar.gz.
            while block := reply.raw.read(BLOCK_BYTES):
                output.write(block)
                on_bytes(len(block))
            return total is None or output.tell() >= total


def _wanted_wait(retry_after: str) -> float | None:
    """Seconds that the server asks to wait, which it gives as a number or as a date."""
    try:
        return Retry().parse_retry_after(retry_after)
    except urllib3.exceptions.InvalidHeader:
        return None


def _without_query(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(one.split("?")[0] if isinstance(one, str) else one for one in record.args)
    return True


# urllib3 logs each request with its query, which holds the access key.
logging.getLogger("urllib3.connectionpool").addFilter(_without_query)
