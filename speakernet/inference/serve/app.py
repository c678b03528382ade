"""The HTTP API and the page: one small function a route, and errors as JSON; `service` does the work."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

from fastapi import Body, FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser

import speakernet
from speakernet.data.audio import AudioError
from speakernet.inference.decision import NotCalibratedError
from speakernet.inference.serve.guard import ApiError, Guard
from speakernet.inference.serve.service import Service, Upload

logger = logging.getLogger(__name__)

# Uploads stay in memory, never in a temporary file; requests are smaller.
MultiPartParser.spool_max_size = 1 << 40
MOST_CLIPS, MOST_TOP = 10, 100
PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/recorder.js": ("recorder.js", "text/javascript; charset=utf-8"),
}
RATE_HELP = "decide at the model's threshold of this false-accept rate, such as 0.01"
Rate = Annotated[float | None, Form(gt=0, lt=1, allow_inf_nan=False, description=RATE_HELP)]
Threshold = Annotated[float | None, Form(allow_inf_nan=False, description="decide at this score instead")]
Clips = Annotated[list[UploadFile], File(min_length=1, max_length=MOST_CLIPS)]


@dataclass
class Heard:
    """What is known of a clip."""

    seconds: float
    speech_seconds: float
    warnings: list[str]


@dataclass
class Answer:
    """A score and its meaning; everything but the score is null if the model is not calibrated."""

    score: float
    log_likelihood_ratio: float | None
    same_speaker: bool | None
    threshold: float | None
    false_accept_rate: float | None
    advice: str | None


@dataclass
class Verification(Answer):
    """An answer about two clips."""

    clips: list[Heard]


@dataclass
class Embedding:
    """The network's output for a clip: not of unit length, no mean subtracted."""

    embedding: list[float]
    clips: list[Heard]


@dataclass
class Person:
    """Somebody who is enrolled."""

    name: str
    recordings: int


@dataclass
class Enrolment(Person):
    """Somebody with new recordings, and what was odd about them."""

    warnings: list[str]
    clips: list[Heard]


@dataclass
class Candidate:
    """Somebody whom a clip was compared with."""

    name: str
    score: float
    log_likelihood_ratio: float | None


@dataclass
class Identification:
    """A name, or null for a stranger (and if the model is not calibrated)."""

    name: str | None
    threshold: float | None
    is_calibrated: bool
    advice: str | None
    candidates: list[Candidate]
    clips: list[Heard]


@dataclass
class StreamAnswer(Answer):
    """The answer after so many seconds of a stream."""

    seconds: float


@dataclass
class StreamProgress:
    """The seconds that a stream holds, and the newest answer if another second is complete."""

    seconds: float
    state: StreamAnswer | None


def make_app(service: Service, token: bytes = b"") -> FastAPI:
    """The application, which closes the service when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.close)

    # The usual pages of documentation load scripts from other servers.
    app = FastAPI(title="speakernet", version=speakernet.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=service.limits, budget=service.budget, token=token)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_fields)
    app.add_exception_handler(ValueError, _refuse_values)
    app.add_exception_handler(Exception, _fail)
    _add_page(app)
    _add_answers(app, service)
    _add_people(app, service)
    _add_streams(app, service)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        code = {404: "no_such_address", 405: "wrong_method"}.get(error.status_code, "bad_request")
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        error = ApiError(error.status_code, code, message, dict(error.headers or {}))
    return error.response()


async def _refuse_fields(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(name)[:50] for name in first["loc"][1:4])
    return ApiError(422, "bad_request", f"{field}: {first['msg']}").response()


async def _refuse_values(_: Request, error: Exception) -> Response:
    codes = {AudioError: "bad_audio", NotCalibratedError: "no_threshold"}
    code = next((code for kind, code in codes.items() if isinstance(error, kind)), "refused")
    return ApiError(422, code, str(error)).response()


async def _fail(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "failed", "internal server error; see the server's log").response()


async def _upload(file: UploadFile) -> Upload:
    """Name and content; the name as it may appear in a message: without folders, and short."""
    name = (file.filename or "clip").replace("\\", "/").rpartition("/")[2][:100]
    return "".join(letter if letter.isprintable() else "?" for letter in name), await file.read()


def _add_page(app: FastAPI) -> None:
    folder = resources.files("speakernet.inference.serve") / "page"
    for address, (name, kind) in PAGE_FILES.items():
        content = (folder / name).read_bytes()

        async def send(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind)

        app.add_api_route(address, send, include_in_schema=False, response_class=Response)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """What is served, and how busy it is."""
        return service.health()

    @app.post("/verify", response_model=Verification)
    async def verify(
        first: UploadFile, second: UploadFile, false_accept_rate: Rate = None, threshold: Threshold = None
    ) -> Any:
        """Whether two clips are of one person, and how sure that is."""
        uploads = await _upload(first), await _upload(second)
        return await service.run(service.verify, *uploads, false_accept_rate, threshold)

    @app.post("/embed", response_model=Embedding)
    async def embed(audio: UploadFile) -> Any:
        """The embedding of a clip."""
        return await service.run(service.embed, await _upload(audio))

    @app.post("/compare", response_model=Answer)
    async def compare(first: Annotated[list[float], Body()], second: Annotated[list[float], Body()]) -> Any:
        """The answer about two embeddings of /embed."""
        return await service.run(service.compare, first, second)


def _add_people(app: FastAPI, service: Service) -> None:
    @app.get("/people")
    async def people() -> dict[str, list[Person]]:
        """Everybody who is enrolled."""
        return {"people": [Person(**one) for one in await service.run(service.people)]}

    @app.post("/people", response_model=Enrolment)
    async def enrol(name: Annotated[str, Form()], audio: Clips) -> Any:
        """Enrol somebody, or add clips of somebody who is enrolled."""
        return await service.run(service.enrol, name.strip(), [await _upload(one) for one in audio])

    @app.delete("/people/{name:path}", response_model=Person)
    async def remove(name: str) -> Any:
        """Remove somebody: the embeddings are overwritten."""
        return await service.run(service.remove, name)

    @app.post("/identify", response_model=Identification)
    async def identify(
        audio: UploadFile,
        top: Annotated[int, Form(ge=1, le=MOST_TOP)] = 5,
        false_accept_rate: Rate = None,
        threshold: Threshold = None,
    ) -> Any:
        """Which of the enrolled people it is, or a stranger."""
        return await service.run(service.identify, await _upload(audio), top, false_accept_rate, threshold)


def _add_streams(app: FastAPI, service: Service) -> None:
    @app.post("/streams")
    async def begin(
        reference: UploadFile, sample_rate: Annotated[int, Form()], threshold: Threshold = None
    ) -> dict[str, str]:
        """Start comparing live speech with a clip."""
        return await service.run(service.open_stream, await _upload(reference), sample_rate, threshold)

    samples = {"schema": {"type": "string", "format": "binary"}}

    @app.post(
        "/streams/{identity}",
        response_model=StreamProgress,
        openapi_extra={"requestBody": {"content": {"application/octet-stream": samples}}},
    )
    async def feed(identity: str, request: Request) -> Any:
        """Add samples: 16 bits, little-endian, one channel."""
        return await service.run(service.feed_stream, identity, await request.body())

    @app.delete("/streams/{identity}")
    async def end(identity: str) -> dict[str, str]:
        """Close a stream."""
        return service.close_stream(identity)
