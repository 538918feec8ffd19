"""What differs where a client speaks another API than OpenAI's older ones: errors, and the name of the request id."""

from __future__ import annotations

from typing import Any

import msgspec

from llmgw.gateway.asking import Asking
from llmgw.gateway.errors import Answer
from llmgw.gateway.serve import Serve

_MESSAGES = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether clients of this path expect errors in Anthropic's shape."""
    return path.startswith(_MESSAGES)


def anthropic_error(status: int, body: bytes, request_id: bytes) -> bytes:
    """An error object of Anthropic's API made from one of OpenAI's; nothing in it is lost. Others stay as they are.

    Args:
        status: decides on `type`, which has other values there.
        body: the answer's whole body, ours or an engine's.
    """
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    error = said.get("error") if isinstance(said, dict) and said.get("type") != "error" else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return body
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    code = error.get("code")
    details = {"error_code": code if isinstance(code, str) else error.get("type")}
    shaped = {**error, "type": kind, "details": details}
    return msgspec.json.encode({**said, "type": "error", "error": shaped, "request_id": request_id.decode("ascii")})


class Messages(Serve):
    """A request in Anthropic's API; what an engine answers passes as it is, but for the shape of an error."""

    on_whole = Asking.on_whole  # the quick one of `Serve` has no room for another line

    def _lines(self) -> bytes:
        return b"%brequest-id: %b\r\n" % (super()._lines(), self.request_id)

    def _whole(self, data: bytes) -> None:
        super()._whole(anthropic_error(self.status, data, self.request_id) if self.status >= 400 else data)

    def _event(self, answer: Answer) -> bytes:
        return b"event: error\ndata: " + anthropic_error(answer.status, answer.body, self.request_id) + b"\n\n"


class Responses(Serve):
    """A request in OpenAI's newer API, whose streams have events with names."""

    def _event(self, answer: Answer) -> bytes:
        error = msgspec.json.decode(answer.body)["error"]
        # `type`, `code`, `message` and `param` are of its event; clients that raise exceptions look for `error`
        body = msgspec.json.encode({**error, "type": "error", "error": error})
        return b"event: error\ndata: " + body + b"\n\n"


def serve_class(path: str) -> type[Serve]:
    """Who serves a request for a model on this path."""
    if is_anthropic(path):
        return Messages
    return Responses if path.startswith("/v1/responses") else Serve
