"""What stands before every request: who may ask, from which page, how much, and how many at once.

A page of any web site can make a browser send requests to this machine. It can neither choose the headers Host and
Origin nor leave Origin out, so these tell it from our own page.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from speakernet.inference.serve.errors import ApiError
from speakernet.inference.serve.limits import Limits

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATHS = frozenset({"/", "/page.css", "/page.js", "/recorder.js", "/health"})
"""Answered without a token: nothing of anybody is in them."""
DRAINED_BYTES = 1 << 29
"""Of a request that is too large: so much is read and dropped, for a client that is cut off never sees the answer."""
SAFE_HEADERS = (
    # Everything from this server, nothing from elsewhere, in nobody's frame.
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src blob:; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """The application behind its checks; a request reaches it whole, with its body in memory.

    Args:
        app: answers requests.
        limits: of all kinds.
        token: asked of every request but those of `OPEN_PATHS`; empty asks nothing.
        hosts: names that the server may be called by; empty allows any, for a token protects it then.
    """

    def __init__(self, app: App, limits: Limits, *, token: str = "", hosts: frozenset[str] = frozenset()) -> None:
        self.app = app
        self.limits = limits
        self.token = token
        self.hosts = hosts
        self.num_requests = 0
        self.waiting_bytes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answer = _Answer(send)
        is_counted, held = False, _Held(self)
        try:
            self._check_caller(scope, headers)
            if self.num_requests >= self.limits.requests:
                raise _busy(f"{self.num_requests} requests are being worked on")
            self.num_requests += 1
            is_counted = True
            body = await self._received(receive, held)
            work = self.app(scope, _replayed(body, receive), answer)
            await asyncio.wait_for(work, self.limits.answer_seconds)
        except ApiError as error:
            await answer.refuse(error)
        except asyncio.TimeoutError:
            seconds = self.limits.answer_seconds
            await answer.refuse(ApiError(504, "too_slow", f"no answer within {seconds:g} s; try again later"))
        finally:
            self.num_requests -= is_counted
            held.release()

    def _check_caller(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if self.hosts and _name_of(host) not in self.hosts:
            raise ApiError(
                421, "wrong_host", f"the request is for {host!r:.80}; this server is {', '.join(sorted(self.hosts))}"
            )
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if is_foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            is_link = scope["method"] == "GET" and scope["path"] == "/" and origin is None
            # A link on another page to ours is no harm.
            if not is_link:
                raise ApiError(403, "foreign_page", "a page of another site may not ask this server")
        if self.token and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                raise ApiError(
                    401,
                    "token_needed",
                    "the header `Authorization: Bearer TOKEN` is missing or wrong; the server's owner has the token",
                    {"WWW-Authenticate": "Bearer"},
                )

    async def _received(self, receive: Receive, held: "_Held") -> bytes:
        """The whole body, or an error when it has come to its end or its time is over."""
        seconds = self.limits.receive_seconds
        try:
            return await asyncio.wait_for(self._read(receive, held), seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, "too_slow", f"the request did not arrive within {seconds:g} s") from None

    async def _read(self, receive: Receive, held: "_Held") -> bytes:
        limit = self.limits.body_bytes
        parts: list[bytes] = []
        size, more = 0, True
        refusal: ApiError | None = None
        while more and size <= DRAINED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "cut_off", "the request was not sent to its end")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size > limit:
                refusal = ApiError(
                    413,
                    "too_large",
                    f"more than {limit:,} bytes, which is what this server takes in one request; send fewer or shorter "
                    "clips, or a compressed format such as FLAC",
                )
            elif refusal is None and self.waiting_bytes + len(chunk) > self.limits.waiting_bytes:
                refusal = _busy("too much audio is waiting")
            if refusal is None:
                parts.append(chunk)
                held.take(len(chunk))
            else:
                # Read to the end all the same: an answer before it is lost on clients that are still sending.
                parts.clear()
                held.release()
        if refusal is not None:
            raise refusal
        return b"".join(parts)


class _Held:
    """Bytes of one request among those that wait."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.size = 0

    def take(self, size: int) -> None:
        self.size += size
        self.guard.waiting_bytes += size

    def release(self) -> None:
        self.guard.waiting_bytes -= self.size
        self.size = 0


class _Answer:
    """Sends what the application answers, with the headers that all answers have, or a refusal in its place."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            message = {**message, "headers": [*message.get("headers", ()), *SAFE_HEADERS]}
        await self.send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer is under way."""
        if self.has_begun:
            return
        body = error.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self({"type": "http.response.body", "body": body})


def _busy(why: str) -> ApiError:
    return ApiError(503, "busy", f"{why}; try again in a moment", {"Retry-After": "1"})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then what the server says."""
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _name_of(host: str) -> str:
    """The name in a header Host, without its port.

    >>> _name_of("localhost:8000"), _name_of("[::1]:8000"), _name_of("[::1]")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
