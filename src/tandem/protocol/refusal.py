"""A request that is not served: its HTTP status, in the shape that OpenAI's clients read."""

from collections.abc import Mapping
from typing import Any

from tandem.protocol.schema import optional, record

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    503: "unavailable_error",
    504: "timeout_error",
}


_STRING = {"type": "string"}
ERROR = record(
    {"error": record({"message": _STRING, "type": _STRING, "param": optional(_STRING), "code": optional(_STRING)})},
    ("error",),
)
"""The body of a refusal."""


class Refusal(Exception):
    """Ends a request with a status and a message. Says what was wrong, the rule, and the value."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
