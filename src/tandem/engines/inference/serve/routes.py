"""The table of routes: the server, its documentation (`/openapi.json`) and its tests are all made from it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tandem import __version__
from tandem.engines.inference.serve import answers
from tandem.engines.inference.serve.access import Audience
from tandem.engines.inference.serve.answers import ERROR
from tandem.engines.inference.serve.control import DIGESTS, PARTS_SCHEMA, RUN, Control, of_run
from tandem.engines.inference.serve.generate import ANSWER as GENERATED
from tandem.engines.inference.serve.generate import VERSION, generate, request_schema
from tandem.engines.inference.serve.metrics import Metrics
from tandem.engines.inference.serve.questions import chat_schema, completion_schema
from tandem.engines.inference.serve.refusal import Refusal
from tandem.engines.inference.serve.schema import Schema, record, text
from tandem.engines.inference.serve.service import Service

REFUSALS = {
    "400": "the request is at fault",
    "401": "no token, or a wrong one",
    "403": "wrong Host or Origin, or a folder that is not allowed",
    "408": "the body came too slowly",
    "409": "the server belongs to another run, or its state forbids it",
    "413": "the body is too long",
    "415": "the body is not JSON by its Content-Type",
    "422": "weights that do not fit",
    "503": "the server cannot answer now",
    "504": "not done in time",
}


def document(routes: Sequence["Route"]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tandem serve", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "data": {"type": "http", "scheme": "bearer", "description": "The token, where the server has one."},
                "control": {"type": "http", "scheme": "bearer", "description": "The admin token."},
            },
            "schemas": {"Error": ERROR},
        },
    }


def _operation(route: "Route") -> dict[str, Any]:
    if route.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": route.answer}}
        if route.body is not None and "stream" in route.body.get("properties", {}):
            content["text/event-stream"] = {}  # events have no words in this version of OpenAPI
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_").replace(".", "_"),
        "security": [{route.audience: []}],
        "responses": {
            "200": {"description": "done", "content": content},
            **{status: {"description": why, "content": error} for status, why in REFUSALS.items()},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    return operation


Handler = Callable[[Service, dict[str, Any], web.Request], Awaitable[Any]]
"""Gets the checked body; returns the answer's JSON, or a whole response."""

_OBJECT: Schema = {"type": "object"}
_TIMES = record({"pause_s": {"type": "number"}, "recompute_s": {"type": "number"}, "version": VERSION})


@dataclass(frozen=True)
class Route:
    """One route: who may call it, what it takes and what it gives."""

    method: str
    path: str
    audience: Audience
    summary: str
    handler: Handler
    body: Schema | None = None
    answer: Schema | None = None
    """None: the answer is no JSON."""

    max_body_bytes: int = 0


async def health(service: Service, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    return service.identity()


async def ready(service: Service, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """`/ready`: 200, or 503 with the reasons."""
    reasons = await service.unready()
    if reasons:
        raise Refusal(503, "; ".join(reasons), code="not_ready")
    return {"ready": True, "token_age_s": service.token_age_s(), **service.identity()}


def table(service: Service, control: Control, metrics: Metrics) -> tuple[Route, ...]:
    limits = service.limits
    facts = service.name, service.vocab_size, limits
    routes: list[Route] = []

    async def openapi(service: Service, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return document(routes)

    def add(method: str, path: str, summary: str, handler: Handler, *, body: Any = None, answer: Any = _OBJECT) -> None:
        routes.append(Route(method, path, "data", summary, handler, body, answer, limits.max_body_bytes))

    add("GET", "/health", "Who this server is; answers while the process lives", health)
    add("GET", "/ready", "200 if it has current weights and generated a token recently, else 503", ready)
    add("GET", "/metrics", "Counters for Prometheus", metrics.page, answer=None)
    add("GET", "/openapi.json", "This table", openapi)
    add("GET", "/v1/models", "The model that is served", answers.models, answer=answers.MODELS)
    add(
        "POST",
        "/v1/completions",
        "Text in, text out",
        answers.completions,
        body=completion_schema(*facts),
        answer=answers.ANSWER,
    )
    add(
        "POST",
        "/v1/chat/completions",
        "Messages in, a message out",
        answers.chat_completions,
        body=chat_schema(*facts),
        answer=answers.ANSWER,
    )
    add(
        "POST",
        "/generate",
        "Token in, token out, with a log-probability and a version a token",
        generate,
        body=request_schema(limits.max_tokens, service.vocab_size),
        answer=GENERATED,
    )
    routes.extend(_control(control, limits.max_body_bytes, limits.max_weights_body_bytes))
    return tuple(routes)


def _control(control: Control, small: int, large: int) -> list[Route]:
    version = {"version": VERSION}
    folder = text(4096, 1, "Absolute path of a folder with *.safetensors, below one that --weights-root allows.")
    update = record({**version, "folder": folder, "digests": DIGESTS}, ("version", "folder", "digests"))
    parts = of_run({"parts": PARTS_SCHEMA}, ("parts",))

    def post(name: str, summary: str, act: Any, body: Schema, max_bytes: int = small, answer: Schema = _OBJECT) -> Route:
        return Route("POST", f"/control/{name}", "control", summary, _without_service(act), body, answer, max_bytes)

    return [
        post("attach", "Take the server for a run", control.attach, record({"run": RUN}, ("run",))),
        post("release", "Give the server back as it was found", control.release, of_run()),
        post("pause", "Stop between two steps", control.pause, of_run()),
        post("resume", "Go on", control.resume, of_run()),
        post("prepare", "Lay new weights beside the old ones", control.prepare, update, large),
        post("commit", "Switch to the prepared weights", control.commit, record(version, ("version",)), answer=_TIMES),
        post("discard", "Forget what is prepared", control.discard, of_run()),
        post("sleep", "Give memory back", control.sleep, parts),
        post("wake", "Take memory again", control.wake, parts),
        post("flush", "Share no prompt that was computed before", control.flush, of_run()),
        Route(
            "GET",
            "/control/statistics",
            "control",
            "Counters of the engine",
            _without_service(control.statistics),
            None,
            {"type": "object", "additionalProperties": {"type": "number"}},
        ),
    ]


def _without_service(act: Callable[[dict[str, Any], web.Request], Awaitable[Any]]) -> Handler:
    async def handle(service: Service, body: dict[str, Any], request: web.Request) -> Any:
        return await act(body, request)

    return handle
