"""`speakernet serve`: an address, a token where others can reach it, and a stop that finishes what was begun."""

import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from speakernet.inference.serve.app import make_app
from speakernet.inference.serve.guarding import LOOPBACK, Guard
from speakernet.inference.serve.service import Service

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SPEAKERNET_TOKEN"
FEWEST_TOKEN_CHARACTERS = 16
STOP_SECONDS = 8
"""In which requests under way are finished when the server is stopped."""
BACKLOG = 1024
"""Connections that the system keeps until they are taken."""


class ServeError(ValueError):
    """A server that cannot be started as it was asked to be."""


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host: a name or number of this machine.
        port: 0 takes any that is free.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """A bound socket.

        Raises:
            ServeError: the port is taken, or the host is none of this machine's.
        """
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
    """The token that requests have to bring: from a file, the environment, or made now; empty on loopback without one.

    Raises:
        ServeError: one that can be guessed.
    """
    token = file.read_text(encoding="utf-8").strip() if file else os.environ.get(TOKEN_VARIABLE, "").strip()
    if token and len(token) < FEWEST_TOKEN_CHARACTERS:
        raise ServeError(f"a token of {len(token)} characters; expected {FEWEST_TOKEN_CHARACTERS} or more")
    if file and not token:
        raise ServeError(f"{file} is empty; expected a token of {FEWEST_TOKEN_CHARACTERS} characters or more")
    if not token and not address.is_loopback:
        return secrets.token_urlsafe(24)
    return token


def make_server(service: Service, address: Address, token: str, ready: Callable[[], None]) -> uvicorn.Server:
    """A server that is not running yet; `run(sockets=[…])` runs it until it is told to stop.

    Args:
        service: what it does.
        address: where it listens, for the check of whom requests are meant for.
        token: asked of every request; empty asks nothing.
        ready: called when requests are answered.
    """
    hosts = LOOPBACK if address.is_loopback else frozenset()
    guarded = Guard(make_app(service), service.limits, token=token, hosts=hosts)
    config = uvicorn.Config(
        guarded,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    return _Server(config, ready)


class _Server(uvicorn.Server):
    """Says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def serve(service: Service, address: Address, token: str) -> int:
    """Answer requests until SIGTERM or Ctrl-C; requests under way are finished first.

    Raises:
        ServeError: the address cannot be had.
    """
    listener = address.listen()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    page = f"http://{shown}:{port}/{f'#token={token}' if token else ''}"

    def ready() -> None:
        sys.stdout.write(f"ready: {page}\n")
        sys.stdout.flush()

    server = make_server(service, address, token, ready)
    # uvicorn sends itself the signal once more when it has stopped, which would end the process as if it had failed.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()
    logger.info("stopped")
    return 0
