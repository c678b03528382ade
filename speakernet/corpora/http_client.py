"""One HTTP GET with an optional start offset, credentials and safe redirects; the loop around it is in download.py.

Credentials never leave for another host: requests sends them to the server that the user named and drops them on a
redirect elsewhere. No address is logged whole, since a query may hold an access key.
"""

import logging
import re
import urllib.parse
from dataclasses import dataclass

import requests
import urllib3
from urllib3.util.retry import Retry

USER_AGENT = "speakernet-data-preparation"
#: What goes wrong on the way; an address that nobody can ask (`InvalidSchema` …) is a ValueError and not among them.
NETWORK_ERRORS = (requests.ConnectionError, requests.Timeout, requests.TooManyRedirects, urllib3.exceptions.HTTPError)
#: Those where nobody took the call: a firewall that swallows everything, a proxy that is not there.
UNANSWERED = (requests.ConnectTimeout, requests.exceptions.ProxyError)


@dataclass(frozen=True)
class Credentials:
    """User and password for HTTP basic authentication; both empty means none. Never shown."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return "Credentials(hidden)"


@dataclass(frozen=True)
class Reply:
    """A successful reply, its body not yet read. `start` is where the body begins; `total` the whole file's bytes."""

    body: urllib3.response.BaseHTTPResponse
    start: int
    total: int | None
    validator: str | None


class RefusedError(Exception):
    """The server answered, with a code that is no success."""

    def __init__(self, code: int, wait_seconds: float | None) -> None:
        super().__init__(f"the server answered {code}")
        self.code = code
        self.wait_seconds = wait_seconds


class RangeError(Exception):
    """The server says that the file has no bytes from the wanted offset; `total` is its size where told."""

    def __init__(self, total: int | None) -> None:
        super().__init__("range not satisfiable")
        self.total = total


def shown_url(url: str) -> str:
    """The address without user, password and query, for logs.

    >>> shown_url("https://user:secret@host.org/a/b.zip?key=1234")
    'https://host.org/a/b.zip'
    """
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rsplit("@", 1)[-1], parts.path, "", ""))


def root_of(error: BaseException) -> BaseException:
    """The error of the system below those of the libraries, whose texts hold the whole address."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def http_get(
    url: str, *, start: int = 0, validator: str | None = None, credentials: Credentials, timeout_seconds: float
) -> Reply:
    """Ask for `url` from byte `start` on; the reply begins at 0 where ranges are unknown or the file changed.

    Args:
        url: http or https only.
        start: bytes already there.
        validator: ETag or date of the file that those bytes belong to.
        credentials: for basic authentication.
        timeout_seconds: longest silence of the server.

    Raises:
        RefusedError: the server's refusal, with its code.
        RangeError: nothing from `start` on.
        NETWORK_ERRORS: no connection, or cut.
        ValueError: neither http nor https.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"the address {shown_url(url)} is neither http nor https")
    # Not unpacked on the way: offsets and sums are those of the file as it is published.
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if validator:
            headers["If-Range"] = validator
    auth = (credentials.user, credentials.password) if credentials.user or credentials.password else None
    try:
        reply = requests.get(url, headers=headers, auth=auth, stream=True, timeout=timeout_seconds)
    except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL) as error:
        raise ValueError(f"the address {shown_url(url)} leads to one that is neither http nor https") from error
    if reply.ok:
        return _reply(reply)
    reply.close()
    if reply.status_code == 416:
        raise RangeError(_total_of(reply.headers.get("Content-Range", "")))
    raise RefusedError(reply.status_code, _wanted_wait(reply.headers.get("Retry-After", "")))


def _reply(reply: requests.Response) -> Reply:
    headers = reply.headers
    start = 0
    total: int | None = None
    if reply.status_code == 206:
        match = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
        start = int(match.group(1)) if match else 0
        total = _total_of(headers.get("Content-Range", ""))
    elif headers.get("Content-Length", "").isdigit():
        total = int(headers["Content-Length"])
    etag = headers.get("ETag", "")
    # A weak ETag may not be used with If-Range (RFC 9110, 13.1.5).
    validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")
    # The raw body: requests would unpack what a server calls gzip, as some call every .tar.gz.
    return Reply(reply.raw, start, total, validator)


def _total_of(content_range: str) -> int | None:
    match = re.search(r"/(\d+)$", content_range)
    return int(match.group(1)) if match else None


def _wanted_wait(retry_after: str) -> float | None:
    """Seconds that the server asks to be left alone, which it gives as a number or as a date."""
    try:
        # For this alone: urllib3's Retry cannot resume a body that was cut, begins at once and logs whole addresses.
        return Retry().parse_retry_after(retry_after)
    except urllib3.exceptions.InvalidHeader:
        return None


def _without_query(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(one.split("?")[0] if isinstance(one, str) else one for one in record.args)
    return True


# urllib3 logs each request with its query, where the access key stands.
logging.getLogger("urllib3.connectionpool").addFilter(_without_query)
