"""The admin API's door to join tokens: `POST /api/v1/join-tokens`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmgw.errors import PkiError, UsageError
from llmgw.server.auth import BODY_LIMIT, too_large
from llmgw.server.join import JoinToken, Registrar

_DEFAULT_TTL_S = 3600.0


class JoinDoor:
    """The handler.

    Args:
        registrar: None: agents connect without TLS, and nobody can join.
        port: of the agents' socket, once it listens.
    """

    def __init__(self, registrar: Registrar | None, port: Callable[[], int]) -> None:
        self._registrar = registrar
        self._port = port

    def routes(self) -> list[Route]:
        """The path."""
        return [Route("/api/v1/join-tokens", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        body = await _body(request)
        made = await run_in_threadpool(self._make, body)
        told = {"line": made.line, "node_id": made.node_id, "expires": made.expires}
        return JSONResponse(told, 201, {"Cache-Control": "no-store"})

    def _make(self, body: dict[str, Any]) -> JoinToken:
        if self._registrar is None:
            raise PkiError(
                "nobody can join this server",
                cause="agents connect without TLS: `agents.tls` is not set",
                hint="docs/security.md says how to set it up",
                code="join-refused",
            )
        node_id, address, ttl_s = body.get("node_id"), body.get("address"), body.get("ttl_s", _DEFAULT_TTL_S)
        for name, value in (("node_id", node_id), ("address", address)):
            if value is not None and not isinstance(value, str):
                raise UsageError(f"`{name}` must be text")
        if type(ttl_s) not in (int, float):
            raise UsageError("`ttl_s` must be a number of seconds")
        return self._registrar.create_token(node_id, float(ttl_s), address, self._port())


async def _body(request: Request) -> dict[str, Any]:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_LIMIT:
            raise too_large()
    try:
        read = json.loads(bytes(data) or b"{}")
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON", cause=str(error)[:200]) from error
    if not isinstance(read, dict):
        raise UsageError("the body is not a JSON object")
    return read
