"""What is answered where: the paths under /v1, the gateway's own answers, and the rest for the control process."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from llmgw.domain.routing import RouteKey, RouteModel
from llmgw.gateway import errors
from llmgw.gateway.errors import Answer, RequestRefused, refuse
from llmgw.gateway.forms import FORM_PATHS, boundary_of
from llmgw.gateway.head import RequestHead, header_lines
from llmgw.gateway.keys import forbidden, may_use
from llmgw.gateway.stats import prometheus

if TYPE_CHECKING:
    from llmgw.gateway.plane import Plane

_ALLOWED_HEADERS = b"authorization, content-type, x-api-key, x-request-id, anthropic-version"
_NAMES = re.compile(rb"[A-Za-z0-9_-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9_-]{1,64}){0,63}")
# the control process would ask these clients for its admin token
_OLLAMA = frozenset(f"/api/{name}" for name in "chat embed embeddings generate ps show tags version".split())
CORE = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class Goal(Enum):
    """Where a request goes once its body is here."""

    MODEL = "model"
    ADMIN = "admin"


def aim(plane: Plane, head: RequestHead) -> tuple[Goal | Answer, RouteKey | None]:
    """Decide by the head alone: an answer of our own, or where the request goes; and whose key it carries.

    Raises:
        RequestRefused: 400 (a form without a valid boundary), 401, 404, 405.
    """
    path = head.path
    if path.startswith("/v1/") or path == "/v1":
        if head.method == "OPTIONS" and plane.cors:
            return _preflight(head), None
        key = plane.keys.check(head)
        if path == "/v1/models":
            _only_get(head)
            return _models(plane, key), key
        if path.startswith("/v1/models/") and path != "/v1/models/":
            _only_get(head)
            return _one_model(plane, key, unquote(path[len("/v1/models/") :])), key
        if path in CORE or path in plane.balance.paths:
            if head.method != "POST":
                raise _method(head, "POST")
            if path in FORM_PATHS:
                head.boundary = boundary_of(head.content_type)
            return Goal.MODEL, key
        raise RequestRefused(_unknown_path(plane, head, _meant(plane, path)))
    if path == "/healthz":
        _only_get(head)
        return Answer(200, b'{"status":"ok"}'), None
    if path == "/readyz":
        _only_get(head)
        return _ready(plane), None
    if path == "/metrics":
        _only_get(head)
        plane.ledger.settle()
        text = prometheus(plane.stats, plane.balance, len(plane.clients))
        return Answer(200, text, "text/plain; version=0.0.4; charset=utf-8"), None
    if path in _OLLAMA:
        words = f"{path} is of Ollama's API, not spoken here; connect as to OpenAI, with a base URL ending in `/v1`"
        raise RequestRefused(refuse(404, words, code="unknown_path"))
    meant = _meant(plane, path)
    if meant:
        raise RequestRefused(_unknown_path(plane, head, meant))
    return Goal.ADMIN, None


def model_problem(plane: Plane, path: str, name: str, key: RouteKey | None) -> Answer | None:
    """Why this request cannot go to the model `name`; None when it can."""
    if plane.balance.table is None:
        return errors.no_routes()
    model = plane.balance.find(name)
    if model is None:
        return errors.model_not_found(name, _visible(plane, key))
    if key is not None and not may_use(key, model.name):
        return forbidden(key, model.name)
    if model.endpoints and path not in model.endpoints:
        answers = ", ".join(model.endpoints)
        words = f"the engine `{model.engine}` of the model `{model.name}` does not answer {path}; it answers: {answers}"
        return refuse(404, words, code="endpoint_not_supported", param="model")
    if not model.endpoints and path not in CORE:
        words = f"it is not known whether the engine `{model.engine}` of the model `{model.name}` answers {path}"
        return refuse(404, words, code="endpoint_not_supported", param="model")
    return None


def _visible(plane: Plane, key: RouteKey | None) -> list[str]:
    return [name for name in plane.balance.names() if may_use(key, name)]


def _models(plane: Plane, key: RouteKey | None) -> Answer:
    table = plane.balance.table
    if table is None:
        return errors.no_routes()
    data = [_card(model) for model in table.models if may_use(key, model.name)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return Answer(200, msgspec.json.encode({"object": "list", "data": data, "has_more": False, **ends}))


def _one_model(plane: Plane, key: RouteKey | None, name: str) -> Answer:
    if plane.balance.table is None:
        return errors.no_routes()
    model = plane.balance.find(name)
    if model is None or not may_use(key, model.name):
        return errors.model_not_found(name, _visible(plane, key))
    return Answer(200, msgspec.json.encode(_card(model)))


def _card(model: RouteModel) -> dict[str, Any]:
    # `type`, `display_name` and `created_at` are the names of Anthropic's API
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.engine,
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "state": model.state,
        "words": errors.refusal_words(model),
        "context": model.context,
        "aliases": model.aliases,
        "endpoints": model.endpoints,
        "replicas_ready": sum(replica.ready for replica in model.replicas),
    }


def _ready(plane: Plane) -> Answer:
    control = "connected" if plane.control_connected else "away"
    if plane.draining:
        ready, words = False, "draining: open answers are finished, new requests are not taken"
    elif plane.balance.table is None:
        ready, words = False, "no routing snapshot yet: the control process has not sent one"
    elif control == "away":
        ready, words = True, "serving by the last routing snapshot; the control process is away"
    else:
        ready, words = True, "serving"
    seq = plane.balance.table.seq if plane.balance.table else None
    body = msgspec.json.encode({"ready": ready, "words": words, "control": control, "routes_seq": seq})
    return Answer(200 if ready else 503, body)


def _preflight(head: RequestHead) -> Answer:
    """What a page may send: the headers it asks for, since every client library sends some of its own."""
    asked = [value for name, value in header_lines(head.fields) if name == b"access-control-request-headers"]
    allowed = asked[0] if len(asked) == 1 and _NAMES.fullmatch(asked[0]) else _ALLOWED_HEADERS
    headers = (
        ("access-control-allow-methods", "GET, HEAD, POST, OPTIONS"),
        ("access-control-allow-headers", allowed.decode("ascii")),
        ("access-control-max-age", "600"),
    )
    return Answer(204, b"", headers=headers)


def _meant(plane: Plane, path: str) -> str:
    """The path of the API that a client with a wrong base URL was after, "" for none."""
    if path.startswith("/api/"):
        return ""
    plain = "/" + "/".join(part for part in path.split("/") if part)
    for there in (plain[max(0, plain.rfind("/v1/")) :], "/v1" + plain):
        if there != path and (there == "/v1/models" or there in CORE or there in plane.balance.paths):
            return there
    return ""


def _unknown_path(plane: Plane, head: RequestHead, meant: str) -> Answer:
    if meant:
        base = "a base URL ends in `/v1` for OpenAI's clients, before it for Anthropic's"
        words = f"there is no {head.path[:128]}; the path is {meant}: {base}"
        return refuse(404, words, code="unknown_path")
    there = ", ".join(sorted({*CORE, "/v1/models", *plane.balance.paths}))
    return refuse(404, f"there is no {head.method} {head.path[:128]}; there are: {there}", code="unknown_path")


def _only_get(head: RequestHead) -> None:
    if head.method not in ("GET", "HEAD"):
        raise _method(head, "GET, HEAD")


def _method(head: RequestHead, allowed: str) -> RequestRefused:
    words = f"{head.path[:128]} does not take {head.method}; it takes: {allowed}"
    return RequestRefused(refuse(405, words, code="method_not_allowed", headers=(("Allow", allowed),)))
