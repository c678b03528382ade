"""The checks that a request passes before it is computed: sender, token, size, time, capacity."""

import asyncio
import collections
import contextlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MEBIBYTE = 1 << 20
HEADER_SECONDS = 10.0
"""Time limit for the headers of a request."""
# Files and connections that this process may have open; Windows has no sysconf.
MAX_OPEN = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else 1024
MAX_WITHOUT_HEADERS = min(512, MAX_OPEN // 2)
"""Maximum number of connections that wait for headers; beyond it, the one that has waited longest
is closed."""
GRAPH = "model.onnx"
"""The network, which the page runs in the browser."""
DETECTOR = "speech.onnx"
"""Likewise silero-vad, which finds speech."""
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""Files of onnxruntime-web, with which the page runs both."""
PAGE_PATHS = frozenset(
    {"/", "/page.css", "/page.js", "/recorder.js", "/in_browser.js", "/speech.js"}
)
OPEN_PATHS = PAGE_PATHS | {"/health", *(f"/{name}" for name in RUNTIME_FILES)}
"""Served without a token, since they contain no personal data."""
DEADLINE: ContextVar[float] = ContextVar("DEADLINE")
"""When the current request times out, on the clock of `time.monotonic`."""
SAFE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
        b"connect-src 'self'; media-src blob:; img-src data:; base-uri 'none'; "
        b"form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a request is refused."""

    body_bytes: int = 32 * MEBIBYTE
    """Body of one request; about three minutes of stereo at 48 kHz."""
    memory_bytes: int = 1024 * MEBIBYTE
    """Uploads and decoded audio of all requests together."""
    requests: int = 512
    """Simultaneous requests."""
    clip_seconds: float = 600.0
    """Length of one recording."""
    chunk_seconds: float = 10.0
    """Length of the audio that one request may add to a stream."""
    receive_seconds: float = 30.0
    """Time for a request to arrive."""
    idle_seconds: float = 5.0
    """Time between two pieces of a request."""
    arriving: int = 512
    """Requests whose body is still arriving; beyond it, the one that has waited longest is
    refused."""
    answer_seconds: float = 60.0
    """Time for a request to be answered before it times out."""
    streams: int = 64
    """Simultaneous live streams."""
    stream_idle_seconds: float = 60.0
    """Time after which a stream without new samples is closed."""


class ApiError(HTTPException):
    """A refusal, with a status, a code for programs, and a message for people."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code

    def response(self) -> JSONResponse:
        """The JSON response for it."""
        error = {"code": self.code, "message": self.detail}
        return JSONResponse({"error": error}, self.status_code, self.headers)


class Budget:
    """A number of bytes shared by all requests."""

    def __init__(self, total: int) -> None:
        self.left = total
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Reserve this many bytes, or refuse the request; a negative number releases them."""
        with self._lock:
            # Refused rather than made to wait: requests that wait for each other's memory would
            # never end.
            if size > self.left:
                raise busy("too much audio at once")
            self.left -= size

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Reserve this many bytes during the block, or refuse the request."""
        self.take(size)
        try:
            yield
        finally:
            self.take(-size)


class _Body:
    """The body of a request: collected from the network, then handed to the application."""

    def __init__(self, receive: Receive, limits: Limits, budget: Budget) -> None:
        self._receive_from_network = receive
        self._limits = limits
        self._budget = budget
        self._messages: collections.deque[Message] = collections.deque()
        self.num_bytes = 0
        """Bytes that have arrived and are reserved in the budget."""

    async def collect(self) -> None:
        """Receive the whole body, or refuse it if it is too slow, too large or does not fit."""
        limits = self._limits
        deadline = time.monotonic() + limits.receive_seconds
        is_complete = False
        while not is_complete:
            seconds = min(limits.idle_seconds, deadline - time.monotonic())
            try:
                message = await asyncio.wait_for(self._receive_from_network(), max(0.0, seconds))
            except asyncio.TimeoutError:
                raise not_received(limits) from None
            size = len(message.get("body", b""))
            if self.num_bytes + size > limits.body_bytes:
                raise too_large(limits)
            self._budget.take(size)
            self.num_bytes += size
            self._messages.append(message)
            # The message about a lost connection has no `more_body`: it is the last one, and the
            # application handles it.
            is_complete = not message.get("more_body", False)

    async def receive(self) -> Message:
        """The next piece, as an ASGI application expects it."""
        # Each piece is dropped when it is handed over: the application makes its own copy.
        return self._messages.popleft() if self._messages else await self._receive_from_network()


class Guard:
    """Middleware that checks sender, token, size and time; an empty token means that none is
    required.

    A request passes in two steps. First its body arrives, piece by piece. Meanwhile it occupies
    only the memory of the pieces that are there, so that clients who send nothing, whatever size
    they announce, keep nobody out. Only then does it take one of the slots for requests that are
    computed.
    """

    def __init__(self, app: ASGIApp, limits: Limits, budget: Budget, token: bytes = b"") -> None:
        self.app = app
        self.limits = limits
        self.budget = budget
        self.token = token
        self.slots = asyncio.Semaphore(limits.requests)
        self._arriving: dict[asyncio.Task[None], None] = {}
        """Bodies that are still arriving; the one that began first comes first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limits = self.limits
        body = _Body(receive, limits, self.budget)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *SAFE_HEADERS]}
            await send(message)

        try:
            headers = Headers(scope=scope)
            # Checked before the body is received, so that a refused one costs no memory.
            self._check_sender(scope, headers)
            if int(headers.get("content-length", 0)) > limits.body_bytes:
                raise too_large(limits)
            await self._await_body(body)
            # Refused at once rather than queued without a limit; the client can try again.
            if self.slots.locked():
                raise busy(f"{limits.requests} requests are running")
            DEADLINE.set(time.monotonic() + limits.answer_seconds)
            async with self.slots:
                await asyncio.wait_for(self.app(scope, body.receive, answer), limits.answer_seconds)
        # Through `answer`, so that a refusal has the safe headers too.
        except ApiError as refusal:
            await refusal.response()(scope, receive, answer)
        except asyncio.TimeoutError:
            await too_slow(limits).response()(scope, receive, answer)
        finally:
            self.budget.take(-body.num_bytes)

    async def _await_body(self, body: "_Body") -> None:
        """Wait until the body is complete; it is refused if too many others wait for theirs."""
        arrival = asyncio.ensure_future(body.collect())
        self._arriving[arrival] = None
        if len(self._arriving) > self.limits.arriving:
            oldest = next(iter(self._arriving))
            oldest.cancel()
        try:
            # A later request may cancel the arrival. Awaiting the arrival itself would then raise
            # CancelledError, as if this request were cancelled.
            await asyncio.wait({arrival})
            if arrival.cancelled():
                raise not_received(self.limits)
            arrival.result()
        finally:
            arrival.cancel()
            del self._arriving[arrival]

    def _check_sender(self, scope: Scope, headers: Headers) -> None:
        # A browser adds these headers for the page that sends the request; other programs do not.
        origin = headers.get("origin")
        has_other_origin = origin is not None and origin.partition("://")[2] != headers.get("host")
        is_cross_site = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        # Links from other sites to our page are harmless; browsers send no origin for them.
        is_link = origin is None and (scope["method"], scope["path"]) == ("GET", "/")
        if (has_other_origin or is_cross_site) and not is_link:
            raise ApiError(403, "foreign_page", "pages from other sites may not use this server")
        if self.token and scope["path"] not in OPEN_PATHS:
            sent_token = headers.get("authorization", "").removeprefix("Bearer ").strip()
            # In constant time, or the time of an answer would reveal how much of a token is right.
            if not hmac.compare_digest(sent_token.encode("latin-1"), self.token):
                raise ApiError(
                    401,
                    "token_needed",
                    "the header `Authorization: Bearer TOKEN` is missing or wrong; ask the "
                    "server's owner for a token",
                    {"WWW-Authenticate": "Bearer"},
                )


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a time limit on the headers of each request."""

    waiting: ClassVar[dict[H11Protocol, asyncio.TimerHandle]] = {}
    """Connections that wait for headers, oldest first, with the timer that closes each."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_headers()

    def handle_events(self) -> None:
        super().handle_events()
        # uvicorn begins a cycle of request and response when the headers are complete.
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._stop_waiting()
        # uvicorn itself waits for the headers of a request without a limit.
        self.waiting[self] = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        if len(self.waiting) > MAX_WITHOUT_HEADERS:
            oldest = next(iter(self.waiting))
            self.waiting.pop(oldest).cancel()
            oldest.transport.abort()

    def _stop_waiting(self) -> None:
        if timer := self.waiting.pop(self, None):
            timer.cancel()


_logged: set[str] = set()


def is_new(record: logging.LogRecord) -> bool:
    """Filter out messages logged before, since a client can trigger the same one any number of
    times.
    """
    if record.msg in _logged:
        return False
    _logged.add(record.msg)
    return True


def busy(reason: str) -> ApiError:
    """The refusal of a request for lack of capacity."""
    return ApiError(503, "busy", f"{reason}; try again in a moment", {"Retry-After": "1"})


def too_large(limits: Limits) -> ApiError:
    """The refusal of a body that is too large."""
    return ApiError(
        413,
        "too_large",
        f"the request exceeds {limits.body_bytes:,} bytes; send fewer or shorter clips, or FLAC",
    )


def not_received(limits: Limits) -> ApiError:
    """The refusal of a request whose body does not arrive."""
    return ApiError(
        408,
        "too_slow",
        f"the request did not arrive within {limits.receive_seconds:g} s, or paused for "
        f"{limits.idle_seconds:g} s; send it again",
    )


def too_slow(limits: Limits) -> ApiError:
    """The refusal of a request that takes too long."""
    return ApiError(
        504, "too_slow", f"no answer within {limits.answer_seconds:g} s; try again later"
    )
