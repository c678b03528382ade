"""`speakernet serve`: a model over HTTP, for this machine or, with a token, for other machines.

`Service` has one method per route. Each request runs its method in a thread (except for health and
files), with the Python API. Only embedding differs: recordings of all requests go to one thread,
which embeds those waiting in a batch.

Any web page can make a browser send requests to this machine, but it cannot set the headers Host,
Origin and Sec-Fetch-Site, so these distinguish it from our own page.
"""

import argparse
import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import uvicorn
from fastapi import Body, Depends, FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.middleware.trustedhost import TrustedHostMiddleware
from torch import Tensor

import speakernet
from speakernet.data.audio import EXPECTED, AudioError, crop_of_file, open_audio_bytes
from speakernet.files import read_secret, reading
from speakernet.inference.channels import choose_of_file
from speakernet.inference.decision import (
    MIN_TEST_SECONDS,
    DecisionLimits,
    DecisionRule,
    NotCalibratedError,
)
from speakernet.inference.identification import Identification
from speakernet.inference.people import PeopleStore, checked_name, normal_name
from speakernet.inference.recordings import MIN_ENROL_SECONDS, Heard, Recording
from speakernet.inference.serve.batching import Batcher
from speakernet.inference.serve.limits import (
    DEADLINE,
    PAGE_PATHS,
    ApiError,
    Budget,
    Guard,
    Limits,
    TimedProtocol,
    busy,
    is_new,
    too_slow,
)
from speakernet.inference.streams import SpeakerStream
from speakernet.inference.verifier import SpeakerVerifier, enroll, identify, load

logger = logging.getLogger(__name__)

MAX_CLIPS = 10
MAX_TOP = 100
MAX_SAMPLES_PER_SECOND = 2 * 48_000
"""Maximum over all channels together; limits the size of a decoded clip."""
RATE_HELP = "decide at the model's threshold for this false-accept rate, such as 0.01"

Rate = Annotated[float | None, Form(gt=0, lt=1, allow_inf_nan=False, description=RATE_HELP)]
Threshold = Annotated[
    float | None, Form(allow_inf_nan=False, description="decide at this score instead")
]
Answer = dict[str, Any]
"""A JSON answer, described in docs/serve.md."""
Clips = Annotated[list[UploadFile], File(min_length=1, max_length=MAX_CLIPS)]
TOKEN_VARIABLE = "SPEAKERNET_TOKEN"
MIN_TOKEN_CHARACTERS = 16
STOP_SECONDS = 8
"""Time that running requests have to finish when the server stops."""
BACKLOG = 1024
"""Connections that the system queues until they are accepted."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "wasm": "application/wasm",
}

# Larger than any request, so that uploads stay in memory and are never written to a temporary file.
MultiPartParser.spool_max_size = 1 << 40


async def body_of(request: Request) -> bytes:
    """The raw body."""
    return await request.body()


@dataclass
class LiveStream:
    """A stream that a client feeds chunk by chunk."""

    stream: SpeakerStream
    last_used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Service:
    """The state of a running server: the model, the store of people (or None), streams and threads.

    With `files` (name -> content), the page runs the model in the browser, and no request accepts
    audio.
    """

    def __init__(
        self,
        verifier: SpeakerVerifier,
        store: PeopleStore | None,
        limits: Limits,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.batcher = Batcher(lambda recordings: np.asarray(verifier.embed(recordings)))
        self.verifier = verifier.embedding_by(self._embed_together)
        self.store = store
        self.files = files or {}
        self.limits = limits
        self.budget = Budget(limits.memory_bytes)
        self.streams: dict[str, LiveStream] = {}
        self._streams_lock = threading.Lock()

    async def health(self) -> Answer:
        """Describe the model, and how busy the server is."""
        verifier = self.verifier
        rule = self.verifier.rule
        fitted = next(iter(rule.thresholds), {})
        return {
            "status": "ok",
            "model": verifier.embedding_net.model_name,
            "sample_rate": verifier.sample_rate,
            "embedding_dim": verifier.embedding_dim,
            "fingerprint": verifier.fingerprint,
            "is_calibrated": verifier.is_calibrated,
            "calibration_trials": fitted.get("num_targets", 0) + fitted.get("num_nontargets", 0),
            "advice": verifier.caution or self._decide(0.0)["advice"] or rule.caution or None,
            "keeps_people": self.store is not None,
            "min_samples": verifier.min_samples,
            "in_browser": self._rule_for_page() if self.files else None,
            "waiting": self.batcher.waiting.qsize(),
            "clips": self.batcher.num_clips,
            "batches": self.batcher.num_batches,
        }

    def _rule_for_page(self) -> Answer:
        """What the page needs to decide as `DecisionRule` does; `decision` is that at score 0."""
        rule = self.verifier.rule
        fitted = rule.calibration
        calibration = fitted and {
            "weight": float(fitted.weights[0]),
            "offset": float(fitted.offset),
            "least": rule.bounds[0],
            "most": rule.bounds[1],
        }
        return {
            "decision": self._decide(0.0),
            "calibration": calibration,
            "durations": rule.described_durations(),
            "speech": rule.speech,
        }

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        name = request.url.path[1:] or "page.html"
        page = resources.files("speakernet.inference.serve") / "page" / name
        content = self.files.get(name) or page.read_bytes()
        return Response(content, media_type=MEDIA_TYPES.get(name.rpartition(".")[2]))

    def verify(
        self,
        first: UploadFile,
        second: Clips,
        false_accept_rate: Rate = None,
        threshold: Threshold = None,
    ) -> Answer:
        """Decide whether a clip is of the same person as one or several others, and how certain
        that is.
        """
        limits = DecisionLimits(false_accept_rate=false_accept_rate, threshold=threshold)
        # Checked first, so that no clip is decoded for nothing.
        self._decide(0.0, limits)
        with self._open_uploads([first, *second]) as (heard, clips):
            score, rule, seconds = self.verifier.score_heard(heard)
        return {**self._decide(score, limits, rule, seconds), "clips": clips}

    def embed(self, audio: UploadFile) -> Answer:
        """Embed the speech of a clip, for /compare."""
        with self._open_uploads([audio]) as (heard, clips):
            embedding = self.verifier.embed(heard[0].recording)[0]
        return {"embedding": embedding.tolist(), "clips": clips}

    def compare(
        self, first: Annotated[list[float], Body()], second: Annotated[list[float], Body()]
    ) -> Answer:
        """Compare two embeddings from /embed."""
        return self._decide(self.verifier.compare(np.array(first), np.array(second)))

    def people(self) -> Answer:
        """List the enrolled people."""
        people = self._store().people()
        return {
            "people": [{"name": person.name, "recordings": person.recordings} for person in people]
        }

    def enrol(self, name: Annotated[str, Form()], audio: Clips) -> Answer:
        """Enrol a person, or add clips of a person who is already enrolled."""
        store = self._store()
        name = checked_name(name)
        with self._open_uploads(audio, MIN_ENROL_SECONDS) as (heard, clips):
            done = enroll(self.verifier, store, name, heard)
        return {
            "name": done.name,
            "added": done.added,
            "recordings": done.total,
            "warnings": done.warnings,
            "clips": clips,
        }

    def remove(self, name: str) -> Answer:
        """Remove a person, overwriting their data in the store and its backups."""
        # Purged, not only removed: whoever deletes a voice over HTTP cannot look for backups.
        store = self._store()
        name = normal_name(name)
        num_recordings = len(store.recordings(name))
        if not num_recordings:
            raise ApiError(404, "unknown_person", f"nobody is enrolled as {name!r}")
        store.purge(name)
        return {"name": name, "recordings": num_recordings}

    def identify(
        self,
        audio: UploadFile,
        top: Annotated[int, Form(ge=1, le=MAX_TOP)] = 5,
        false_accept_rate: Rate = None,
        threshold: Threshold = None,
    ) -> Answer:
        """Identify a clip as one of the enrolled people or as a stranger."""
        store = self._store()
        advice = None
        with self._open_uploads([audio]) as (heard, clips):
            try:
                answer = identify(
                    self.verifier,
                    store,
                    heard[0],
                    top=top,
                    false_accept_rate=false_accept_rate,
                    threshold=threshold,
                )
            except NotCalibratedError as error:
                if false_accept_rate is not None:
                    raise
                # Without a calibration there is no name, but the nearest people are still worth
                # showing. A rate that was asked for cannot be met without one, so that stays an
                # error.
                advice = str(error)
                nearest = tuple(store.identify(self.verifier.embed(heard[0].recording), top))
                answer = Identification(None, None, nearest, len(store), None)
        decision = answer.decision
        candidates = []
        is_made = decision is not None and decision.is_made
        ratios = answer.ratios if is_made else [None] * len(answer.candidates)
        for (name, score), ratio in zip(answer.candidates, ratios, strict=True):
            candidates.append({"name": name, "score": score, "log_likelihood_ratio": ratio})
        return {
            "name": answer.name,
            "threshold": decision and decision.threshold,
            "stranger_rate": answer.stranger_rate,
            "is_calibrated": self.verifier.is_calibrated,
            "advice": advice,
            "candidates": candidates,
            "clips": clips,
        }

    def open_stream(
        self,
        reference: UploadFile,
        sample_rate: Annotated[int, Form()],
        threshold: Threshold = None,
    ) -> Answer:
        """Start comparing live speech with a clip."""
        with self._open_uploads([reference]) as (heard, _):
            stream = self.verifier.stream(sample_rate, heard[0], threshold=threshold)
        with self._streams_lock:
            self._close_idle()
            # Idle streams are closed first, so that abandoned ones do not count.
            if len(self.streams) >= self.limits.streams:
                raise busy(f"{len(self.streams)} streams are open")
            # Not guessable, since whoever knows the name can feed the stream or close it.
            identity = secrets.token_urlsafe(12)
            self.streams[identity] = LiveStream(stream)
        return {"id": identity}

    def feed_stream(self, identity: str, content: Annotated[bytes, Depends(body_of)]) -> Answer:
        """Add samples: 16 bits, little-endian, one channel."""
        live = self._stream(identity)
        stream = live.stream
        if len(content) % 2:
            raise ApiError(
                422, "bad_samples", f"{len(content)} bytes; expected whole 16-bit samples, mono"
            )
        limit = self.limits.chunk_seconds
        if len(content) > 2 * limit * stream.sample_rate:
            raise ApiError(
                413, "too_long", f"{len(content)} bytes; send at most {limit:g} s per request"
            )
        # Requests for one stream may run in parallel, but its samples have to be added one at a
        # time.
        with live.lock:
            states = stream.add(np.frombuffer(content, dtype="<i2").astype(np.int16))
            live.last_used = time.monotonic()
            state = None
            last = states[-1] if states else None
            if last is not None and last.score is not None:
                seconds = min(last.speech_seconds, stream.enrolled_seconds)
                rule = stream.rule_for(last.speech_seconds)
                decided = self._decide(last.score, stream.limits, rule, seconds)
                state = {"seconds": last.seconds, **decided}
            return {"seconds": stream.seconds, "state": state}

    def close_stream(self, identity: str) -> Answer:
        """Close a stream."""
        self._stream(identity)
        with self._streams_lock:
            self.streams.pop(identity, None)
        return {"id": identity}

    def _decide(
        self,
        score: float,
        limits: DecisionLimits | None = None,
        rule: DecisionRule | None = None,
        speech_seconds: float | None = None,
    ) -> Answer:
        """A decision; without a calibration or threshold, the score and advice."""
        limits = limits or {}
        rule = rule or self.verifier.rule
        try:
            decision = rule.decide(score, **limits, speech_seconds=speech_seconds)
            return {**vars(decision), "advice": None}
        except NotCalibratedError as error:
            if limits.get("false_accept_rate") is not None:
                raise
            return {
                "score": score,
                "log_likelihood_ratio": None,
                "same_speaker": None,
                "threshold": None,
                "false_accept_rate": None,
                "speech_seconds": speech_seconds,
                "advice": str(error),
            }

    # The verifier of a server is a copy whose embedding goes through the batcher, so that verify,
    # identify and enrol are the functions that the commands call: only where the network runs
    # differs, not what is decided.
    def _embed_together(self, recordings: Sequence[Recording]) -> Tensor:
        """Embeddings (recordings, dim), batched with those of other requests; stops at the
        request's deadline.
        """
        futures = [self.batcher.submit(recording) for recording in recordings]
        try:
            embeddings = [
                future.result(max(0.0, DEADLINE.get() - time.monotonic())) for future in futures
            ]
        except FutureTimeout:
            raise too_slow(self.limits) from None
        finally:
            for future in futures:
                future.cancel()
        return torch.from_numpy(np.stack(embeddings))

    @contextlib.contextmanager
    def _open_uploads(
        self, uploads: Sequence[UploadFile], min_speech_seconds: float = MIN_TEST_SECONDS
    ) -> Iterator[tuple[list[Heard], list[Answer]]]:
        """The speech of the files and facts about each; their memory counts against the budget
        during the block.
        """
        heard = []
        clips: list[Answer] = []
        with contextlib.ExitStack() as reserved:
            # All are decoded first, so that nothing is inspected for nothing.
            for recording in [self._decode_upload(upload, reserved) for upload in uploads]:
                heard.append(self.verifier.hear(recording, min_speech_seconds=min_speech_seconds))
                quality = heard[-1].quality
                clips.append(
                    {
                        "seconds": round(quality.seconds, 3),
                        "speech_seconds": round(quality.speech_seconds, 3),
                        "warnings": quality.warnings,
                    }
                )
            yield heard, clips

    def _decode_upload(self, upload: UploadFile, reserved: contextlib.ExitStack) -> Recording:
        # Made safe for messages: without folders, short and printable.
        name = (upload.filename or "clip").replace("\\", "/").rpartition("/")[2][:100]
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        limit = self.limits.clip_seconds
        rate = self.verifier.sample_rate
        file, info = open_audio_bytes(upload.file.read(), name, limit + 1)
        num_values = info.num_samples * info.num_channels
        if info.seconds > limit or num_values > limit * MAX_SAMPLES_PER_SECOND:
            raise ApiError(
                413,
                "too_long",
                f"{name}: {info.seconds:.0f} s, {info.num_channels} x {info.sample_rate:,} samples "
                f"per second; expected at most {limit:g} s, and {MAX_SAMPLES_PER_SECOND:,} samples "
                "per second in all channels",
            )
        reserved.enter_context(self.budget.hold(4 * info.num_samples_at(rate)))
        # Decoded blocks and their concatenation exist at the same time.
        with self.budget.hold(8 * num_values), reading(name, EXPECTED, AudioError):
            chosen = choose_of_file(file, info, name)
            samples = crop_of_file(file, info, name, 0, None, rate, channel=chosen.channel)
        # Also refuses clips shorter than the network needs.
        return self.verifier.open(
            Recording(
                name,
                rate,
                len(samples),
                samples=samples,
                is_cut_off=info.is_truncated,
                channel_warning=chosen.warning,
            )
        )

    def _store(self) -> PeopleStore:
        if self.store is None:
            raise ApiError(
                404,
                "no_store",
                "this server has no store of people; start it with --store people.db",
            )
        return self.store

    def _stream(self, identity: str) -> LiveStream:
        with self._streams_lock:
            self._close_idle()
            if identity not in self.streams:
                raise ApiError(
                    404,
                    "unknown_stream",
                    "no such stream; it was closed, or received no samples for too long",
                )
            return self.streams[identity]

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self.limits.stream_idle_seconds
        self.streams = {
            identity: live for identity, live in self.streams.items() if live.last_used >= oldest
        }


@dataclass(frozen=True)
class Address:
    """Where a server listens; port 0 takes any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """A listening socket."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OverflowError:
            raise ValueError(
                f"--port {self.port}: expected 0 to 65535; 0 picks a free one"
            ) from None
        except OSError as error:
            raise ValueError(
                f"{self.host} port {self.port}: "
                f"{(error.strerror or str(error)).partition(' (while')[0]}; choose another --port "
                "(0 picks a free one), or --host 127.0.0.1"
            ) from error


def read_token(address: Address, file: Path | None) -> str:
    """The token that requests need, from a file or the environment; if not given, a new one, or
    empty on loopback.
    """
    secret = read_secret(file, TOKEN_VARIABLE)
    if secret is None:
        return "" if address.is_loopback else secrets.token_urlsafe(24)
    token = secret.decode("latin-1").strip()
    # An empty variable is a mistake, such as a secret that was not mounted: it must not open the
    # server to everybody.
    if not (token.isascii() and token.isprintable()) or len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"the token ({file or TOKEN_VARIABLE}) has {len(secret)} bytes; expected at least "
            f"{MIN_TOKEN_CHARACTERS} printable ASCII characters"
        )
    return token


def make_app(service: Service, token: bytes, announcement: str) -> FastAPI:
    """The application; it prints the announcement when it is ready, and closes the service when it
    ends.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        print(announcement, end="", flush=True)
        yield
        service.batcher.close()

    # FastAPI's documentation pages load scripts from other servers.
    app = FastAPI(
        title="speakernet",
        version=speakernet.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Guard, limits=service.limits, budget=service.budget, token=token)
    for kind in (HTTPException, RequestValidationError, ValueError, Exception):
        app.add_exception_handler(kind, _refuse)
    app.get("/health")(service.health)
    for path in (*PAGE_PATHS, *(f"/{name}" for name in service.files)):
        app.get(path, include_in_schema=False)(service.file)
    if service.files:
        return app
    app.post("/verify")(service.verify)
    app.post("/embed")(service.embed)
    app.post("/compare")(service.compare)
    app.get("/people")(service.people)
    app.post("/people")(service.enrol)
    app.delete("/people/{name:path}")(service.remove)
    app.post("/identify")(service.identify)
    app.post("/streams")(service.open_stream)
    samples = {
        "requestBody": {
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            }
        }
    }
    app.post("/streams/{identity}", openapi_extra=samples)(service.feed_stream)
    app.delete("/streams/{identity}")(service.close_stream)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Return any error as JSON."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, HTTPException):
        path = request.url.path[:100]
        code = {404: "no_such_address", 405: "wrong_method"}.get(error.status_code, "bad_request")
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == 405:
            routes = [route for route in request.app.routes if route.path_regex.match(path)]
            methods = {method for route in routes for method in route.methods or ()}
            message += f"; it accepts {', '.join(sorted(methods))}"
        return ApiError(error.status_code, code, message, dict(error.headers or {})).response()
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(name)[:50] for name in first["loc"][1:4])
        return ApiError(422, "bad_request", f"{field}: {first['msg']}").response()
    if not isinstance(error, ValueError):
        # uvicorn logs the traceback.
        return ApiError(500, "failed", "internal server error; see the server's log").response()
    code = "refused"
    if isinstance(error, AudioError):
        code = "bad_audio"
    elif isinstance(error, NotCalibratedError):
        code = "no_threshold"
    return ApiError(422, code, str(error)).response()


def make_server(
    service: Service, address: Address, token: str, announcement: str = ""
) -> uvicorn.Server:
    """A server that is not yet running; start it with `run(sockets=[…])`."""
    app = make_app(service, token.encode(), announcement)
    if address.is_loopback:
        # Under a name that resolves to this machine, a foreign page's requests would look like our
        # own.
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


def serve(
    arguments: argparse.Namespace, key: bytes | None, files: Mapping[str, bytes] | None = None
) -> int:
    """Load the model, open the store, and answer requests until SIGTERM or Ctrl-C; running ones are
    finished.
    """
    if files and arguments.store is not None:
        raise ValueError(
            "--store and --in-browser cannot be combined: one keeps voices on the server, the "
            "other keeps them off it"
        )
    address = Address(arguments.host, arguments.port)
    token = read_token(address, arguments.token_file)
    verifier = load(arguments.model, arguments.device)
    if verifier.caution:
        logger.warning("%s: %s", verifier.name, verifier.caution)
    store = None
    if arguments.store is not None:
        if not arguments.store.exists():
            logger.info("%s does not exist; creating a new store of people", arguments.store)
        store = verifier.people(arguments.store, key)
    service = Service(verifier, store, Limits(), files)
    listener = address.listen()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    fragment = f"#token={token}" if token else ""
    server = make_server(service, address, token, f"ready: http://{shown}:{port}/{fragment}\n")
    # After stopping, uvicorn raises the signal again, which would end the process with a failure
    # status.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()
    logger.info("stopped")
    if threading.active_count() > 1:
        # Python would wait for a computation whose request has timed out.
        os._exit(0)
    return 0
