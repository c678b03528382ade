"""`speakernet serve`: an address, a token if others can reach it, and a stop that finishes running requests."""

import argparse
import ipaddress
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware

from speakernet.inference.keys import STORE_KEY_VARIABLE, read_secret
from speakernet.inference.serve.app import make_app
from speakernet.inference.serve.guard import Limits, LogOnce, TimedProtocol
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
        if not 0 <= self.port <= 65535:
            raise ServeError(f"--port {self.port}; expected 0 to 65535 (0 takes any that is free)")
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
        except OSError as error:
            raise ServeError(
                f"{self.host} port {self.port}: {error.strerror or error}; choose another --port (0: any), or --host "
                "127.0.0.1"
            ) from error
        listener.listen(BACKLOG)
        return listener


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


class _Server(uvicorn.Server):
    """Reports when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def make_server(service: Service, address: Address, token: str, ready: Callable[[], None]) -> uvicorn.Server:
    """A server that does not run yet; `run(sockets=[…])` runs it, and `ready` is called when it answers."""
    app = make_app(service, token.encode())
    if address.is_loopback:
        # A name that resolves to this machine makes a foreign page's requests look like our own.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, address.host])
    once = LogOnce()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(once)
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
    return _Server(config, ready)


def serve(service: Service, address: Address, token: str) -> int:
    """Answer requests until SIGTERM or Ctrl-C; running requests are finished first."""
    listener = address.listen()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    page = f"http://{shown}:{port}/{f'#token={token}' if token else ''}"

    def ready() -> None:
        sys.stdout.write(f"ready: {page}\n")
        sys.stdout.flush()

    server = make_server(service, address, token, ready)
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
    store = None
    if arguments.store is not None:
        store = verifier.people(arguments.store, read_secret(arguments.key_file, STORE_KEY_VARIABLE))
    try:
        return serve(Service(verifier, store, Limits()), address, token)
    finally:
        if store is not None:
            store.close()
