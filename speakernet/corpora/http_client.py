"""One HTTP GET with an optional start offset, credentials and safe redirects; the loop around it is in download.py.

Credentials never leave for another host: they are sent to the server that the user named and dropped on a redirect
elsewhere. No address is logged whole, since a query may hold an access key.
"""

import base64
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

USER_AGENT = "speakernet-data-preparation"
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Credentials:
    """User and password for HTTP basic authentication; both empty means none. Never shown."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return "Credentials(hidden)"

    def header(self) -> str | None:
        """The value of the Authorization header, or None."""
        if not self.user and not self.password:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")


@dataclass(frozen=True)
class Reply:
    """A successful reply, its body not yet read. `start` is where the body begins; `total` the whole file's bytes."""

    body: http.client.HTTPResponse
    start: int
    total: int | None
    validator: str | None
    content_type: str


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
        urllib.error.HTTPError: the server's refusal, with its code.
        RangeError: nothing from `start` on.
        OSError: no connection, or cut.
        ValueError: neither http nor https.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"the address {shown_url(url)} is neither http nor https")
    request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"})
    authorization = credentials.header()
    if authorization is not None:
        request.add_unredirected_header("Authorization", authorization)
    if start:
        request.add_header("Range", f"bytes={start}-")
        if validator:
            request.add_header("If-Range", validator)
    opener = urllib.request.build_opener(_SafeRedirects)
    try:
        body = opener.open(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        if error.code == 416:
            raise RangeError(_total_of(error.headers.get("Content-Range", ""))) from error
        raise
    return _reply(body)


def _reply(body: http.client.HTTPResponse) -> Reply:
    headers = body.headers
    start = 0
    total: int | None = None
    if body.status == 206:
        match = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
        start = int(match.group(1)) if match else 0
        total = _total_of(headers.get("Content-Range", ""))
    elif headers.get("Content-Length", "").isdigit():
        total = int(headers["Content-Length"])
    etag = headers.get("ETag", "")
    # A weak ETag may not be used with If-Range (RFC 9110, 13.1.5).
    validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")
    return Reply(body, start, total, validator, headers.get_content_type())


def _total_of(content_range: str) -> int | None:
    match = re.search(r"/(\d+)$", content_range)
    return int(match.group(1)) if match else None


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects (308 too, which Python 3.10 does not) and keeps credentials on the same host only."""

    def http_error_308(self, req, fp, code, msg, headers):  # type: ignore[no-untyped-def]
        return self.http_error_302(req, fp, 302, msg, headers)

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        authorization = req.unredirected_hdrs.get("Authorization")
        if following is not None and authorization and _same_server(req.full_url, newurl):
            following.add_unredirected_header("Authorization", authorization)
        return following


def _same_server(left: str, right: str) -> bool:
    left_parts, right_parts = urllib.parse.urlsplit(left), urllib.parse.urlsplit(right)
    if left_parts.hostname != right_parts.hostname:
        return False
    left_port, right_port = (parts.port or DEFAULT_PORTS.get(parts.scheme) for parts in (left_parts, right_parts))
    if left_parts.scheme == right_parts.scheme:
        return left_port == right_port
    # http to https on the same host is an upgrade and keeps the credentials safe; the other way round it does not.
    return (left_port, right_port) == (DEFAULT_PORTS["http"], DEFAULT_PORTS["https"])
