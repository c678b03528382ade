"""What a request must pass before it is computed: sender, token, size, time, and room for it."""

import asyncio
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
# Windows has no sysconf.
DESCRIPTORS = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else 1024
MAX_WITHOUT_HEADERS = min(512, DESCRIPTORS // 2)
"""Maximum number of connections that wait for headers; beyond it, the one that has waited longest
is closed."""
GRAPH = "model.onnx"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""Files of onnxruntime-web."""
PAGE_PATHS = frozenset({"/", "/page.css", "/page.js", "/recorder.js", "/in_browser.js"})
OPEN_PATHS = PAGE_PATHS | {"/health", *(f"/{name}" for name in RUNTIME)}
"""Served without a token, since they contain no personal data."""
DEADLINE: ContextVar[float] = ContextVar("DEADLINE")
"""When the current request times out, on the clock of `time.monotonic`."""
SAFE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src "
        b"'self'; "
        b"media-src blob:; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors "
        b"'none'",
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

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Reserve this many bytes during the block, or refuse the request."""
        with self._lock:
            if size > self.left:
                raise busy("too much audio at once")
            self.left -= size
        try:
            yield
        finally:
            with self._lock:
                self.left += size


class Guard:
    """Middleware that checks sender, token, size and time; an empty token means that none is
    required.
    """

    def __init__(self, app: ASGIApp, limits: Limits, budget: Budget, token: bytes = b"") -> None:
        self.app = app
        self.limits = limits
        self.budget = budget
        self.token = token
        self.slots = asyncio.Semaphore(limits.requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limits = self.limits
        begun = time.monotonic()
        size = 0
        too_large = ApiError(
            413,
            "too_large",
            f"the request exceeds {limits.body_bytes:,} bytes; send fewer or shorter clips, or "
            "FLAC",
        )

        async def take() -> Message:
            nonlocal size
            left = begun + limits.receive_seconds - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left))
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    "too_slow",
                    f"the request did not arrive within {limits.receive_seconds:g} s",
                ) from None
            size += len(message.get("body", b""))
            if size > limits.body_bytes:
                raise too_large
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *SAFE_HEADERS]}
            await send(message)

        try:
            self._check_sender(scope, headers)
            length = (
                limits.body_bytes
                if "transfer-encoding" in headers
                else int(headers.get("content-length", 0))
            )
            if length > limits.body_bytes:
                raise too_large
            if self.slots.locked():
                raise busy(f"{limits.requests} requests are running")
            seconds = limits.receive_seconds + limits.answer_seconds
            DEADLINE.set(begun + seconds)
            with self.budget.hold(length):
                async with self.slots:
                    await asyncio.wait_for(self.app(scope, take, answer), seconds)
        except (ApiError, asyncio.TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else too_slow(limits)
            await refusal.response()(scope, receive, answer)

    def _check_sender(self, scope: Scope, headers: Headers) -> None:
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        is_foreign |= headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        # Links from other sites to our page are harmless.
        if is_foreign and (scope["method"], scope["path"], origin) != ("GET", "/", None):
            raise ApiError(403, "foreign_page", "pages from other sites may not use this server")
        if self.token and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode("latin-1"), self.token):
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

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_headers()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._stop_waiting()
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
    num_before = len(_logged)
    _logged.add(record.msg)
    return len(_logged) > num_before


def busy(reason: str) -> ApiError:
    """The refusal of a request for lack of capacity."""
    return ApiError(503, "busy", f"{reason}; try again in a moment", {"Retry-After": "1"})


def too_slow(limits: Limits) -> ApiError:
    """The refusal of a request that takes too long."""
    return ApiError(
        504, "too_slow", f"no answer within {limits.answer_seconds:g} s; try again later"
    )
