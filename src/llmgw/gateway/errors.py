"""Answers the gateway gives itself, errors in OpenAI's shape: clients map them to their own exceptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from attrs import frozen

from llmgw.domain.routing import RouteModel
from llmgw.errors import LlmgwError

NO_RETRY = (("x-should-retry", "false"),)
"""The public clients obey Retry-After in silence, twice, however long it is; with this they say at once why."""

_BUSY_MOST_S = 30.0
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@frozen
class Answer:
    """A whole answer. `close` ends the connection after it."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False


class RequestRefused(LlmgwError):
    """The request is answered by the gateway itself and goes nowhere."""

    code = "request-refused"

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"answered {answer.status}")
        self.answer = answer


def status_line(status: int) -> bytes:
    """The first line of an answer, CRLF included."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def error_object(
    message: str, kind: str, code: str, param: str | None = None, extra: Mapping[str, Any] | None = None
) -> bytes:
    """OpenAI's error object as JSON, with `extra` keys beside `error`."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error, **(extra or {})})


def refuse(
    status: int,
    message: str,
    *,
    code: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    retry_after_s: float | None = None,
    extra: Mapping[str, Any] | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    close: bool = False,
) -> Answer:
    """An error answer in OpenAI's shape; `retry_after_s` becomes a Retry-After header of at least one second."""
    if retry_after_s is not None:
        headers = (*headers, ("Retry-After", str(max(1, math.ceil(retry_after_s)))))
    return Answer(status, error_object(message, kind, code, param, extra), headers=headers, close=close)


class _Coded(msgspec.Struct):
    code: str | None = None


class _Body(msgspec.Struct):
    error: _Coded


def code_of(answer: Answer) -> str | None:
    """The code in an error answer's body."""
    return msgspec.json.decode(answer.body, type=_Body).error.code


def malformed(why: str, status: int = 400, code: str = "malformed_request") -> RequestRefused:
    """The bytes are not a request this gateway is willing to read; where the next one begins is anybody's guess."""
    return RequestRefused(refuse(status, why, code=code, close=True))


def model_not_found(name: str, known: Iterable[str]) -> Answer:
    """404 that names the models there are."""
    names = ", ".join(f"`{each}`" for each in sorted(known))
    there = f"there are: {names}" if names else "no model is deployed"
    return refuse(404, f"the model `{name[:128]}` does not exist; {there}", code="model_not_found", param="model")


def _state(model: RouteModel) -> dict[str, Any]:
    return {"state": model.state, "refusal": list(model.refusal)}


def refusal_words(model: RouteModel) -> str:
    """The control process's sentence about a model and its refusal's lines, letter for letter, none twice."""
    words = model.words
    missing = [line for line in model.refusal if line not in words]
    return "\n".join([words, *missing] if words else missing)


def not_ready(model: RouteModel, waited_s: float | None = None) -> Answer:
    """503: no replica of the model can answer now; the message is the control process's own sentence."""
    words = refusal_words(model) or f"the model `{model.name}` has no ready replica and nobody said why"
    if waited_s is not None:
        words = f"{words} (waited {waited_s:.0f} s)"
    loading = model.state == "loading"
    refused = model.state in ("refused", "off")
    return refuse(
        503,
        words,
        kind="server_error",
        code="model_loading" if loading else "model_not_ready",
        retry_after_s=30 if refused else 5,
        extra=_state(model),
        headers=NO_RETRY if refused else (),
    )


def queue_full(model: RouteModel, waiting: int, wait_s: float) -> Answer:
    """429: as many requests wait for the model as may wait; `wait_s`: how long the last of them will.

    The public clients ask twice more and give up, so it is of no use to tell them to come back while it is still full.
    """
    words = f"the model `{model.name}` is busy: {waiting} requests already wait for a slot"
    return refuse(
        429,
        words,
        kind="rate_limit_error",
        code="queue_full",
        retry_after_s=min(_BUSY_MOST_S, wait_s),
        extra={**_state(model), "words": words},
    )


def queue_deadline(model: RouteModel, waited_s: float) -> Answer:
    """503: the queue's deadline passed before a slot came free."""
    slots = sum(max(1, replica.slots) for replica in model.replicas if replica.ready)
    words = f"the model `{model.name}` is busy: no slot of {slots} came free within {waited_s:.0f} s"
    return refuse(503, words, kind="server_error", code="queue_timeout", retry_after_s=5, extra=_state(model))


def no_routes() -> Answer:
    """503: this gateway has not had a routing snapshot since its start."""
    return refuse(
        503,
        "this gateway does not know any route yet: the control process has not sent one",
        kind="server_error",
        code="no_routes",
        retry_after_s=1,
        extra={"state": "unknown", "refusal": []},
    )


def own_fault() -> Answer:
    """500: a fault of the gateway's own."""
    return refuse(500, "the gateway failed; its log says why", kind="server_error", code="internal")


def upstream_failed(message: str, status: int = 502, code: str = "upstream_failed") -> Answer:
    """502 or 504: the engine broke off, or did not answer in time."""
    return refuse(status, message, kind="server_error", code=code)
