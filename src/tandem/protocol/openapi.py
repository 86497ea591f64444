"""`/openapi.json`: the table of routes in OpenAPI's words."""

from collections.abc import Sequence
from typing import Any

from tandem import __version__
from tandem.protocol.refusal import ERROR
from tandem.protocol.server import Route

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


def document(title: str, routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "data": {"type": "http", "scheme": "bearer", "description": "The token, where the server has one."},
                "control": {"type": "http", "scheme": "bearer", "description": "The admin token."},
            },
            "schemas": {"Error": ERROR},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
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
