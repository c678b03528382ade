"""The HTTP API and the page: one small function a route, errors as JSON, what is behind them in `service`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import speakernet
from speakernet.inference.serve import answers
from speakernet.inference.serve.errors import ApiError
from speakernet.inference.serve.forms import Form
from speakernet.inference.serve.service import Service

logger = logging.getLogger(__name__)

PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/recorder.js": ("recorder.js", "text/javascript; charset=utf-8"),
}
DEFAULT_TOP, MOST_TOP = 5, 100
FILE = {"type": "string", "format": "binary"}
RATE = {"type": "number", "description": "decide at the model's threshold of this false-accept rate, such as 0.01"}
THRESHOLD = {"type": "number", "description": "decide at this score instead"}
REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": answers.Refusal, "description": "what was asked cannot be done; the message says what to mend"},
    "503": {"model": answers.Refusal, "description": "too much at once; try again after a moment"},
}


def make_app(service: Service) -> FastAPI:
    """The application; it closes the service when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.close)

    # The usual page of documentation would be fetched from elsewhere.
    app = FastAPI(
        title="speakernet",
        version=speakernet.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=REFUSED,
    )
    _add_errors(app)
    _add_page(app)
    _add_answers(app, service)
    _add_people(app, service)
    _add_streams(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return Response(error.body(), error.status, error.headers, "application/json")

    async def refuse_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "no_such_address", 405: "wrong_method"}.get(error.status_code, "refused")
        return await refuse(
            request,
            ApiError(
                error.status_code, code, f"{request.method} {request.url.path[:100]}: {error.detail}", error.headers
            ),
        )

    async def refuse_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:4])
        return await refuse(request, ApiError(422, "bad_request", f"{where}: {first['msg']}"))

    async def fail(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await refuse(request, ApiError(500, "failed", "an error of the server's; its log has more"))

    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(Exception, fail)


def _add_page(app: FastAPI) -> None:
    folder = resources.files("speakernet.inference.serve") / "page"
    for address, (name, kind) in PAGE_FILES.items():
        content = (folder / name).read_bytes()

        async def send(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind)

        app.add_api_route(address, send, include_in_schema=False, response_class=Response)


def _form(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The description of a form with these fields."""
    schema = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _add_answers(app: FastAPI, service: Service) -> None:
    limits = service.limits

    @app.get("/health")
    async def health() -> answers.Health:
        """What is served, and how busy it is."""
        return answers.Health(**service.health())

    @app.post(
        "/verify",
        response_model=answers.Verification,
        openapi_extra=_form({"first": FILE, "second": FILE}, {"false_accept_rate": RATE, "threshold": THRESHOLD}),
    )
    async def verify(request: Request) -> JSONResponse:
        """Whether two clips are of one person, and how sure that is."""
        form = await Form.of(request, limits)
        given = *await form.files("first"), *await form.files("second")
        limits_given = form.number("false_accept_rate"), form.number("threshold")
        return JSONResponse(await service.run(service.verify, *given, *limits_given))

    @app.post("/embed", response_model=answers.Embedding, openapi_extra=_form({"audio": FILE}))
    async def embed(request: Request) -> JSONResponse:
        """The embedding of a clip."""
        form = await Form.of(request, limits)
        return JSONResponse(await service.run(service.embed, *await form.files("audio")))

    @app.post("/compare")
    async def compare(given: answers.Embeddings) -> answers.Answer:
        """What two embeddings of /embed say."""
        return answers.Answer(**await service.run(service.compare, given.first, given.second))


def _add_people(app: FastAPI, service: Service) -> None:
    limits = service.limits

    @app.get("/people")
    async def people() -> answers.People:
        """Everybody who is enrolled."""
        return answers.People([answers.Person(**one) for one in await service.run(service.people)])

    @app.post(
        "/people",
        response_model=answers.Enrolment,
        openapi_extra=_form({"name": {"type": "string"}, "audio": {"type": "array", "items": FILE}}),
    )
    async def enrol(request: Request) -> JSONResponse:
        """Enrol somebody, or add clips to somebody who is."""
        form = await Form.of(request, limits)
        files = await form.files("audio", at_most=limits.clips)
        return JSONResponse(await service.run(service.enrol, form.text("name"), files))

    @app.delete("/people/{name:path}")
    async def remove(name: str) -> answers.Person:
        """Forget somebody: the embeddings are overwritten."""
        return answers.Person(**await service.run(service.remove, name))

    @app.post(
        "/identify",
        response_model=answers.Identification,
        openapi_extra=_form(
            {"audio": FILE}, {"top": {"type": "integer"}, "false_accept_rate": RATE, "threshold": THRESHOLD}
        ),
    )
    async def identify(request: Request) -> JSONResponse:
        """Which of the enrolled people it is, or a stranger."""
        form = await Form.of(request, limits)
        top = form.number("top") or DEFAULT_TOP
        if top != int(top) or not 1 <= top <= MOST_TOP:
            raise ApiError(422, "bad_number", f"top is {top:g}; expected a whole number from 1 to {MOST_TOP}")
        limits_given = form.number("false_accept_rate"), form.number("threshold")
        found = service.run(service.identify, *await form.files("audio"), int(top), *limits_given)
        return JSONResponse(await found)


def _add_streams(app: FastAPI, service: Service) -> None:
    limits = service.limits

    @app.post(
        "/streams",
        response_model=answers.Stream,
        openapi_extra=_form({"reference": FILE, "sample_rate": {"type": "integer"}}, {"threshold": THRESHOLD}),
    )
    async def begin(request: Request) -> JSONResponse:
        """Begin to compare live speech with a clip."""
        form = await Form.of(request, limits)
        numbers = form.number("sample_rate"), form.number("threshold")
        return JSONResponse(await service.run(service.open_stream, *await form.files("reference"), *numbers))

    @app.post(
        "/streams/{identity}",
        response_model=answers.StreamProgress,
        openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": FILE}}}},
    )
    async def feed(identity: str, request: Request) -> JSONResponse:
        """Hear more samples: 16 bits, little-endian, one channel."""
        return JSONResponse(await service.run(service.feed_stream, identity, await request.body()))

    @app.delete("/streams/{identity}")
    async def end(identity: str) -> answers.Stream:
        """Forget a stream."""
        return answers.Stream(**service.close_stream(identity))
