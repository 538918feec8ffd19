"""The admin API under /api/v1: JSON in, JSON out, every error in one shape, never a traceback."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from attrs import frozen
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmgw import __version__
from llmgw.config import profile_from_json, profile_to_json
from llmgw.domain.ids import check_model_name
from llmgw.domain.replicas import ReplicaStatus
from llmgw.domain.routing import RouteKey
from llmgw.domain.standing import Standing, drain_words
from llmgw.errors import ApiError, ConfigError, LinkError, LlmgwError, NameInvalid, UsageError
from llmgw.server import answers
from llmgw.server.auth import BODY_LIMIT, error_body, too_large
from llmgw.server.control import Control
from llmgw.server.deploy import Deploy, Outlook
from llmgw.server.events import KEPT as EVENTS_KEPT
from llmgw.server.fleet import Fleet, no_node
from llmgw.server.keys import read_fields
from llmgw.server.own_certificates import OwnCertificate
from llmgw.server.state import State
from llmgw.system.clock import Clock
from llmgw.wire.shapes import to_full_json

log = logging.getLogger(__name__)

_LOG_LINES = 200
_LOG_LINES_MAX = 10_000
_ASK_S = 10.0
_EVENTS_WAIT_S = 20
_REPLICAS_MAX = 10_000
_STATUSES = (
    ("name-taken", 409),
    ("join-refused", 409),
    ("not-found", 404),
    ("node-away", 503),
    ("body-too-large", 413),
    ("node-answered-error", 502),
)

Handler = Callable[[Request], Awaitable[Response]]


@frozen
class Parts:
    """What the API looks at and acts on. `started` is seconds since the epoch; `own`: the server's certificates now."""

    state: State
    fleet: Fleet
    deploy: Deploy
    control: Control
    clock: Clock
    started: float
    own: Callable[[], tuple[OwnCertificate, ...]] = tuple


class Admin:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def routes(self) -> list[Route]:
        """Every path of the API."""
        base = "/api/v1"
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/status", self._status),
            ("GET", "/nodes", self._nodes),
            ("GET", "/nodes/{node_id}", self._node),
            ("DELETE", "/nodes/{node_id}", self._forget),
            ("POST", "/nodes/{node_id}/drain", self._drain),
            ("POST", "/nodes/{node_id}/undrain", self._undrain),
            ("POST", "/nodes/{node_id}/recheck", self._recheck),
            ("GET", "/events", self._events),
            ("GET", "/engines", self._engines),
            ("GET", "/profiles", self._profiles),
            ("POST", "/profiles/{name:path}/scale", self._scale),
            ("GET", "/profiles/{name:path}", self._profile),
            ("PUT", "/profiles/{name:path}", self._put_profile),
            ("DELETE", "/profiles/{name:path}", self._delete_profile),
            ("GET", "/replicas", self._replicas),
            ("GET", "/replicas/{replica_id:path}/logs", self._logs),
            ("GET", "/explain/{name:path}", self._explain),
            ("GET", "/keys", self._keys),
            ("POST", "/keys", self._add_key),
            ("DELETE", "/keys/{name}", self._delete_key),
        ]
        return [Route(base + path, handler, methods=[method]) for method, path, handler in table]

    def _seen(self) -> Outlook:
        return self._parts.deploy.outlook()

    def _standing(self, name: str) -> Standing:
        for standing in self._seen().standings:
            if name in (standing.profile.name, *standing.profile.aliases):
                return standing
        raise _missing("profile", name, "`llmgw ctl profiles` lists them")

    async def _status(self, _: Request) -> Response:
        parts = self._parts
        seen = self._seen()
        return JSONResponse(
            {
                "version": __version__,
                "server_id": parts.state.server_id,
                "started": parts.started,
                "epoch": parts.state.epoch,
                "nodes": answers.presences(seen.nodes),
                "models": {item.profile.name: item.state for item in seen.standings},
                "certificates": to_full_json(await run_in_threadpool(parts.own)),
                "gateways": [
                    {
                        "pid": item.pid,
                        "listen": item.listen,
                        "version": item.version,
                        "index": item.index,
                        "in_flight": dict(item.in_flight),
                        "requests": item.requests,
                    }
                    for item in parts.control.gateways()
                ],
            }
        )

    async def _nodes(self, _: Request) -> Response:
        def answer() -> Response:
            seen = self._seen()
            notes = _notes(seen)
            found = [answers.node(view, seen.assignments, notes) for view in self._parts.fleet.views()]
            return JSONResponse({"nodes": found})

        # thousands of nodes take a while, and others ask too
        return await run_in_threadpool(answer)

    async def _node(self, request: Request) -> Response:
        node_id = request.path_params["node_id"]
        for view in self._parts.fleet.views():
            if view.node_id == node_id:
                return JSONResponse(answers.node(view, self._seen().assignments, _notes(self._seen())))
        raise no_node(node_id)

    async def _forget(self, request: Request) -> Response:
        node_id = request.path_params["node_id"]
        if not self._parts.fleet.knows(node_id):
            raise no_node(node_id)
        held = sorted(i.spec.replica_id for i in self._seen().assignments if i.node_id == node_id)
        if held:
            raise UsageError(
                f"node `{node_id}` is not forgotten",
                cause=f"it is still to serve {', '.join(held)}",
                hint=f"`llmgw ctl drain {node_id} --wait`, or scale down or delete what no other node takes",
            )
        if not await run_in_threadpool(self._parts.deploy.forget, node_id):
            hint = f"stop its agent first, as `llmgw ctl offboard {node_id}` does"
            raise UsageError(f"node `{node_id}` is not forgotten", cause="it is connected", hint=hint)
        await run_in_threadpool(self._parts.deploy.settle)
        return JSONResponse({"node_id": node_id, "words": "is forgotten; its certificate is good until it is revoked"})

    async def _drain(self, request: Request) -> Response:
        return await self._set_draining(request.path_params["node_id"], True)

    async def _undrain(self, request: Request) -> Response:
        return await self._set_draining(request.path_params["node_id"], False)

    async def _set_draining(self, node_id: str, draining: bool) -> Response:
        if not await run_in_threadpool(self._parts.deploy.drain, node_id, draining):
            raise no_node(node_id)
        await run_in_threadpool(self._parts.deploy.settle)
        seen = self._seen()
        here = (view for view in seen.nodes if view.node_id == node_id)
        words = next((drain_words(view, seen.assignments, _notes(seen)) for view in here), "")
        return JSONResponse({"node_id": node_id, "draining": draining, "words": words or "takes replicas"})

    async def _recheck(self, request: Request) -> Response:
        node_id = request.path_params["node_id"]
        if not any(view.node_id == node_id for view in self._parts.fleet.views()):
            raise no_node(node_id)
        await run_in_threadpool(self._parts.fleet.ask, node_id, "recheck", {}, _ASK_S)
        return JSONResponse({"node_id": node_id, "words": "looks at every engine again, every byte of it"})

    async def _events(self, request: Request) -> Response:
        after = _number(request, "after", 0, 0, 1 << 53)
        limit = _number(request, "limit", EVENTS_KEPT, 1, EVENTS_KEPT)
        wait_s = _number(request, "wait", 0, 0, _EVENTS_WAIT_S)
        events = self._parts.deploy.events
        if wait_s:
            found = (await run_in_threadpool(events.wait, after, float(wait_s)))[-limit:]
        else:
            found = events.since(after, limit)
        return JSONResponse({"events": [answers.event(item) for item in found]})

    async def _engines(self, _: Request) -> Response:
        wanted = to_full_json(self._parts.deploy.engines)
        return JSONResponse({"wanted": wanted, "engines": answers.engines(self._seen())})

    async def _profiles(self, _: Request) -> Response:
        return JSONResponse({"profiles": [answers.profile(item) for item in self._seen().standings]})

    async def _profile(self, request: Request) -> Response:
        return JSONResponse(answers.profile(self._standing(request.path_params["name"])))

    async def _put_profile(self, request: Request) -> Response:
        name = check_model_name(request.path_params["name"])
        profile = profile_from_json(await _body(request), name)
        changed = await run_in_threadpool(self._parts.deploy.apply, profile)
        await run_in_threadpool(self._parts.deploy.settle)
        return JSONResponse({"changed": changed, "profile": profile_to_json(profile)})

    async def _scale(self, request: Request) -> Response:
        name, body = request.path_params["name"], await _body(request)
        replicas = body.get("replicas") if isinstance(body, dict) else None
        if type(replicas) is not int or not 0 <= replicas <= _REPLICAS_MAX:
            raise UsageError(f"`replicas` must be a number from 0 to {_REPLICAS_MAX}")
        profile = await run_in_threadpool(self._parts.deploy.scale, name, replicas)
        if profile is None:
            raise _missing("profile", name, "`llmgw ctl profiles` lists them")
        await run_in_threadpool(self._parts.deploy.settle)
        return JSONResponse(answers.profile(self._standing(profile.name)))

    async def _delete_profile(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not await run_in_threadpool(self._parts.deploy.delete, name):
            raise _missing("profile", name, "`llmgw ctl profiles` lists them")
        await run_in_threadpool(self._parts.deploy.settle)
        return JSONResponse({"deleted": name})

    async def _replicas(self, _: Request) -> Response:
        return JSONResponse({"replicas": answers.replicas(self._seen())})

    async def _explain(self, request: Request) -> Response:
        return JSONResponse(answers.explain(self._standing(request.path_params["name"])))

    async def _logs(self, request: Request) -> Response:
        replica_id = request.path_params["replica_id"]
        text = str(_number(request, "lines", _LOG_LINES, 1, _LOG_LINES_MAX))
        node_id = self._where(replica_id)
        asked = {"replica_id": replica_id, "lines": text}
        if request.query_params.get("previous") == "true":
            asked["previous"] = "true"
        elif cursor := request.query_params.get("cursor", "")[:64]:
            asked["cursor"] = cursor
        result = await run_in_threadpool(self._parts.fleet.ask, node_id, "logs", asked, _ASK_S)
        lines = result.get("lines") if isinstance(result, dict) else None
        if not isinstance(lines, list):
            raise LinkError(f"node {node_id} gave an answer that holds no log lines")
        kinds = {"cursor": str, "more": bool, "new_run": bool, "missed_bytes": int}
        further = {name: result[name] for name, kind in kinds.items() if isinstance(result.get(name), kind)}
        return JSONResponse({"node_id": node_id, "lines": [str(line) for line in lines], **further})

    def _where(self, replica_id: str) -> str:
        seen = self._seen()
        for standing in seen.standings:
            if standing.profile.name == replica_id:
                ids = ", ".join(f"`{item.assignment.spec.replica_id}`" for item in standing.replicas)
                hint = f"it has {ids}" if ids else f"it has none: see `llmgw ctl explain {replica_id}`"
                raise LlmgwError(f"`{replica_id}` is a profile, a log is a replica's", hint=hint, code="not-found")
            for item in standing.replicas:
                if item.assignment.spec.replica_id == replica_id:
                    return item.assignment.node_id
        for view in seen.nodes:
            kept: tuple[ReplicaStatus, ...] = view.report.replicas if view.report is not None else ()
            if any(status.replica_id == replica_id for status in kept):
                return view.node_id
        raise _missing("replica", replica_id, "`llmgw ctl replicas` lists them; one without a node has no log")

    async def _keys(self, _: Request) -> Response:
        stored = await run_in_threadpool(self._parts.state.client_keys)
        return JSONResponse({"keys": [answers.key(item) for item in stored]})

    async def _add_key(self, request: Request) -> Response:
        body = await _body(request)
        fields = read_fields(body, self._parts.clock.now())
        name, models = fields.name, fields.models
        made = f"sk-llmgw-{secrets.token_urlsafe(32)}"
        digest = hashlib.sha256(made.encode()).hexdigest()
        key = RouteKey(name, digest, models, fields.rpm, fields.tpm, fields.expires)
        if not await run_in_threadpool(self._parts.state.add_key, key, self._parts.clock.now()):
            raise UsageError(f"there is a key `{name}` already", hint="choose another name", code="name-taken")
        await run_in_threadpool(self._parts.deploy.settle)
        answer = {"name": name, "key": made, "models": list(models)}
        if not self._seen().routes.keys_required:
            answer["warning"] = (
                "clients without any key are served too: `gateway.keys_required: true` in server.yaml refuses them"
            )
        return JSONResponse(answer, 201)

    async def _delete_key(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not await run_in_threadpool(self._parts.state.delete_key, name):
            raise _missing("key", name, "`llmgw ctl keys list` lists them")
        await run_in_threadpool(self._parts.deploy.settle)
        return JSONResponse({"deleted": name})


def on_error(_: Request, error: Exception) -> Response:
    """Any exception as the documented error body; what was not raised on purpose is logged and not told."""
    if isinstance(error, HTTPException):
        known = {404: ("not-found", "there is no such path"), 405: ("method-not-allowed", "not this way")}
        code, message = known.get(error.status_code, ("request-failed", str(error.detail)))
        told = LlmgwError(message, hint="docs/architecture.md lists the paths", code=code)
        return JSONResponse(error_body(told), error.status_code, dict(error.headers or {}))
    if isinstance(error, ConfigError):
        return JSONResponse(error_body(error, error.problems), 400)
    if isinstance(error, LlmgwError):
        return JSONResponse(error_body(error), _status_of(error))
    log.error("a request failed", exc_info=error)
    told = LlmgwError("the server failed on this request", hint="its log says why", code="internal")
    return JSONResponse(error_body(told), 500)


def _status_of(error: LlmgwError) -> int:
    for code, status in _STATUSES:
        if error.code == code:
            return status
    if isinstance(error, (UsageError, NameInvalid)):
        return 400
    if isinstance(error, (LinkError, ApiError)):
        return 502
    return 500


def _number(request: Request, name: str, default: int, lowest: int, highest: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and lowest <= int(text) <= highest):
        raise UsageError(f"`{name}` must be a number from {lowest} to {highest}")
    return int(text)


def _notes(seen: Outlook) -> dict[str, str]:
    return {standing.profile.name: standing.note for standing in seen.standings if standing.note}


def _missing(kind: str, name: str, hint: str) -> LlmgwError:
    return LlmgwError(f"there is no {kind} `{name[:253]}`", hint=hint, code="not-found")


async def _body(request: Request) -> Any:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_LIMIT:
            raise too_large()
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON", cause=str(error)[:200]) from error
