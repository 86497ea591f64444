"""An engine as the application of a server. Its table of routes makes the server, its documentation and its tests."""

from functools import partial
from typing import Any

from aiohttp import web

from tandem.engines.inference.remote.tandem_server import INSTANCE_HEADER
from tandem.engines.inference.serve import answers
from tandem.engines.inference.serve.control import DIGESTS, PARTS_SCHEMA, RUN, ServiceControl, of_run
from tandem.engines.inference.serve.generate import ANSWER as GENERATED
from tandem.engines.inference.serve.generate import (
    MEDIUM_ANSWER,
    VERSION,
    generate,
    keep_medium,
    medium_schema,
    request_schema,
)
from tandem.engines.inference.serve.metrics import Metrics
from tandem.engines.inference.serve.questions import chat_schema, completion_schema, turn_schema
from tandem.engines.inference.serve.service import EngineService
from tandem.engines.inference.serve.token_route import ANSWER as TOKENS_GENERATED
from tandem.engines.inference.serve.token_route import request_schema as token_route_schema
from tandem.engines.inference.serve.token_route import token_route
from tandem.engines.inference.serve.turns import answer_turn, count_tokens
from tandem.protocol.dialects import DIALECTS
from tandem.protocol.openapi import document
from tandem.protocol.refusal import Refusal
from tandem.protocol.schema import Schema, record, text
from tandem.protocol.server import Application, Handler, Route

_OBJECT: Schema = {"type": "object"}
_TIMES = record({"pause_s": {"type": "number"}, "recompute_s": {"type": "number"}, "version": VERSION})


async def health(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    return service.identity()


async def ready(service: EngineService, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """`/ready`: 200, or 503 with the reasons."""
    reasons = await service.unready()
    if reasons:
        raise Refusal(503, "; ".join(reasons), code="not_ready")
    return {"ready": True, "token_age_s": service.token_age_s(), **service.identity()}


class ServedEngine(Application):
    """Completions, tokens and control of one engine."""

    def __init__(self, service: EngineService):
        self._service, self.control, self._metrics = service, ServiceControl(service), Metrics()
        self.limits = service.limits
        self.routes = table(service, self.control, self._metrics)

    def headers(self) -> dict[str, str]:
        """The process that answers: a client notices that another one is behind the address."""
        return {INSTANCE_HEADER: self._service.instance}

    def busy(self) -> bool:
        """True while completions are under way, and the engine lives."""
        return self._service.under_way > 0 and self._service.died is None

    def drain(self) -> None:
        """Refuses new completions."""
        self._service.draining = True

    def count(self, route: Route, status: int, seconds: float) -> None:
        """Counts the answer for `/metrics`."""
        self._metrics.count(route.path, status, seconds)

    async def watch(self) -> None:
        """Notices the end of the engine."""
        await self._service.watch()

    async def close(self) -> None:
        """Waits for a control request that is under way."""
        await self.control.close()


def table(service: EngineService, control: ServiceControl, metrics: Metrics) -> tuple[Route, ...]:
    limits, media = service.limits, service.tokenizers.media
    large = limits.max_media_body_bytes if media else limits.max_body_bytes
    facts = service.name, service.vocab_size, limits
    routes: list[Route] = []

    async def openapi(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return document("tandem serve", routes)

    def add(
        method: str,
        path: str,
        summary: str,
        handler: Handler,
        *,
        body: Any = None,
        answer: Any = _OBJECT,
        max_bytes: int = limits.max_body_bytes,
    ) -> None:
        routes.append(Route(method, path, "data", summary, handler, body, answer, max_bytes))

    add("GET", "/health", "Who this server is; answers while the process lives", partial(health, service))
    add("GET", "/ready", "200 if it has current weights and generated a token recently, else 503", partial(ready, service))
    add("GET", "/metrics", "Counters for Prometheus", partial(metrics.page, service), answer=None)
    add("GET", "/openapi.json", "This table", openapi)
    add("GET", "/v1/models", "The model that is served", partial(answers.models, service), answer=answers.MODELS)
    add(
        "POST",
        "/v1/completions",
        "Text in, text out",
        partial(answers.completions, service),
        body=completion_schema(*facts),
        answer=answers.ANSWER,
    )
    add(
        "POST",
        "/v1/chat/completions",
        "Messages in, a message out",
        partial(answers.chat_completions, service),
        body=chat_schema(*facts, media),
        answer=answers.ANSWER,
        max_bytes=large,
    )
    routes += _dialects(service, large)
    add(
        "POST",
        "/generate",
        "Token in, token out, with a log-probability and a version a token",
        partial(generate, service),
        body=request_schema(limits.max_tokens, service.vocab_size, bool(media)),
        answer=GENERATED,
    )
    add(
        "POST",
        "/inference/v1/generate",
        "vLLM's token route: token in, token out",
        partial(token_route, service),
        body=token_route_schema(service.name, service.vocab_size, limits.max_tokens),
        answer=TOKENS_GENERATED,
    )
    if media:
        told = "An image or sound for `/generate`, which names it by the number in the answer"
        keep, taken = partial(keep_medium, service), medium_schema(media)
        add("POST", "/media", told, keep, body=taken, answer=MEDIUM_ANSWER, max_bytes=large)
    routes.extend(_control(control, limits.max_body_bytes, limits.max_weights_body_bytes))
    return tuple(routes)


def _dialects(service: EngineService, size: int) -> list[Route]:
    """Those of the dialects beside chat completions, which have a route of their own. ``size``: most bytes of a body."""
    routes, body = [], turn_schema(service.name)
    for dialect in DIALECTS[1:]:
        for act, path, summary in (
            (answer_turn, dialect.path, f"{dialect.summary}: a turn in, a turn out"),
            (count_tokens, dialect.count_path or "", "Tokens of such a turn's prompt"),
        ):
            handler = partial(act, service, dialect)
            routes.append(Route("POST", path, "data", summary, handler, body, _OBJECT, size, dialect.refused))
    return routes


def _control(control: ServiceControl, small: int, large: int) -> list[Route]:
    version = {"version": VERSION}
    folder = text(4096, 1, "Absolute path of a folder with *.safetensors, below one that --weights-root allows.")
    update = record({**version, "folder": folder, "digests": DIGESTS}, ("version", "folder", "digests"))
    parts = of_run({"parts": PARTS_SCHEMA}, ("parts",))

    def post(name: str, summary: str, act: Any, body: Schema, max_bytes: int = small, answer: Schema = _OBJECT) -> Route:
        return Route("POST", f"/control/{name}", "control", summary, act, body, answer, max_bytes)

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
            control.statistics,
            None,
            {"type": "object", "additionalProperties": {"type": "number"}},
        ),
    ]
