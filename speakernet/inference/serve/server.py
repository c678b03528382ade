"""`speakernet serve`: an address, a token if others can reach it, and a stop that finishes running requests.

The application has one line a route, the page, and errors as JSON; `service` does the work.
"""

import argparse
import ipaddress
import logging
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.middleware.trustedhost import TrustedHostMiddleware

import speakernet
from speakernet.data.audio import AudioError
from speakernet.inference.decision import NotCalibratedError
from speakernet.inference.keys import STORE_KEY_VARIABLE, read_secret
from speakernet.inference.serve.guard import OPEN_PATHS, ApiError, Guard, Limits, TimedProtocol, is_new
from speakernet.inference.serve.service import Service
from speakernet.inference.verifier import load

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SPEAKERNET_TOKEN"
FEWEST_TOKEN_CHARACTERS = 16
STOP_SECONDS = 8
"""In which running requests are finished when the server is stopped."""
BACKLOG = 1024
"""Connections that the system keeps until they are accepted."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
SAMPLES = {"schema": {"type": "string", "format": "binary"}}

# Uploads stay in memory, never in a temporary file; requests are smaller.
MultiPartParser.spool_max_size = 1 << 40


class ServeError(ValueError):
    """A server that cannot be started."""


@dataclass(frozen=True)
class Address:
    """Where a server listens; port 0 takes any that is free."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """A listening socket."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            raise ServeError(
                f"{self.host} port {self.port}: {error}; choose another --port (0: any), or --host 127.0.0.1"
            ) from error


def read_token(address: Address, file: Path | None) -> str:
    """The token of requests: from a file, the environment, or new; empty on loopback without one."""
    given = read_secret(file, TOKEN_VARIABLE)
    if not given:
        return "" if address.is_loopback else secrets.token_urlsafe(24)
    try:
        token = given.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token.isprintable() or len(token) < FEWEST_TOKEN_CHARACTERS:
        raise ServeError(
            f"a token of {len(given)} bytes; expected {FEWEST_TOKEN_CHARACTERS} or more printable ASCII characters"
        )
    return token


def make_app(service: Service, token: bytes = b"", announcement: str = "") -> FastAPI:
    """The application, which announces that it answers, and closes the service when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sys.stdout.write(announcement)
        sys.stdout.flush()
        yield
        service.batcher.close()

    # The usual pages of documentation load scripts from other servers.
    app = FastAPI(title="speakernet", version=speakernet.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=service.limits, budget=service.budget, token=token)
    for kind in (HTTPException, RequestValidationError, ValueError, Exception):
        app.add_exception_handler(kind, _refuse)
    app.get("/health")(service.health)
    app.post("/verify")(service.verify)
    app.post("/embed")(service.embed)
    app.post("/compare")(service.compare)
    app.get("/people")(service.people)
    app.post("/people")(service.enrol)
    app.delete("/people/{name:path}")(service.remove)
    app.post("/identify")(service.identify)
    app.post("/streams")(service.open_stream)
    samples = {"requestBody": {"content": {"application/octet-stream": SAMPLES}}}
    app.post("/streams/{identity}", openapi_extra=samples)(service.feed_stream)
    app.delete("/streams/{identity}")(service.close_stream)
    for path in OPEN_PATHS - {"/health"}:
        app.get(path, include_in_schema=False)(_page)
    return app


async def _page(request: Request) -> Response:
    name = request.url.path[1:] or "page.html"
    content = (resources.files("speakernet.inference.serve") / "page" / name).read_bytes()
    return Response(content, media_type=MEDIA_TYPES[name.rpartition(".")[2]])


async def _refuse(request: Request, error: Exception) -> Response:
    """Any error as JSON."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, HTTPException):
        code = {404: "no_such_address", 405: "wrong_method"}.get(error.status_code, "bad_request")
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        return ApiError(error.status_code, code, message, dict(error.headers or {})).response()
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(name)[:50] for name in first["loc"][1:4])
        return ApiError(422, "bad_request", f"{field}: {first['msg']}").response()
    if not isinstance(error, ValueError):
        # uvicorn logs it.
        return ApiError(500, "failed", "internal server error; see the server's log").response()
    codes = {AudioError: "bad_audio", NotCalibratedError: "no_threshold"}
    return ApiError(422, codes.get(type(error), "refused"), str(error)).response()


def make_server(service: Service, address: Address, token: str, announcement: str = "") -> uvicorn.Server:
    """A server that does not run yet; `run(sockets=[…])` runs it."""
    app = make_app(service, token.encode(), announcement)
    if address.is_loopback:
        # A name that resolves to this machine makes a foreign page's requests look like our own.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, address.host])
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(is_new)
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    return uvicorn.Server(config)


def serve(service: Service, address: Address, token: str) -> int:
    """Answer requests until SIGTERM or Ctrl-C; running requests are finished first."""
    listener = address.listen()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = make_server(
        service, address, token, f"ready: http://{shown}:{port}/{f'#token={token}' if token else ''}\n"
    )
    # uvicorn sends itself the signal again after it has stopped, which would end the process with a failure.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()
    logger.info("stopped")
    return 0


def start(arguments: argparse.Namespace) -> int:
    """Load the model, open the store, and serve."""
    address = Address(arguments.host, arguments.port)
    token = read_token(address, arguments.token_file)
    verifier = load(arguments.model, arguments.device)
    if arguments.store is None:
        return serve(Service(verifier, None, Limits()), address, token)
    with verifier.people(arguments.store, read_secret(arguments.key_file, STORE_KEY_VARIABLE)) as store:
        return serve(Service(verifier, store, Limits()), address, token)
