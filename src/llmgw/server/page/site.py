"""The page's addresses: `/`, the event stream, its style and script, and the login."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from urllib.parse import parse_qs

import jinja2
from attrs import frozen
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from llmgw.errors import LlmgwError
from llmgw.server.auth import COOKIE, SESSION_S, Gate, error_body, session_of
from llmgw.server.page.view import Cell, Tree, cells, shape

_TYPES = {"page.css": "text/css", "page.js": "text/javascript"}
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="#2f6fde"/>'
    '<path d="M3 5h10M3 8h10M3 11h6" stroke="#fff" stroke-width="1.6" stroke-linecap="round"/></svg>'
)
_TURN_S = 0.5
_PING_S = 15.0
_SHARE = 10
_LOGIN_LIMIT = 4096
_FRESH = {"Cache-Control": "no-store"}


@frozen
class _Look:
    """The page as it was at one moment, for all who look at it; `until`: before this it is not made anew."""

    tree: Tree
    cells: dict[str, Cell]
    shape: str
    until: float


class Site:
    """The handlers. All viewers share one look at the cluster, and making it takes at most a tenth of a core.


    Args:
        build: makes the page's content as it is now.
        stopping: true once the server ends, so that event streams end too.
    """

    def __init__(self, gate: Gate, build: Callable[[], Tree], stopping: Callable[[], bool]) -> None:
        self._gate = gate
        self._build = build
        self._stopping = stopping
        self._last: _Look | None = None
        self._jinja = jinja2.Environment(
            autoescape=True,
            loader=jinja2.FunctionLoader(_read),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def routes(self) -> list[Route]:
        """Every address of the page."""
        return [
            Route("/", self._page),
            Route("/page/live", self._live),
            Route("/page/icon.svg", self._icon),
            Route("/page/login", self._login, methods=["POST"]),
            Route("/page/logout", self._logout, methods=["POST"]),
            *(Route(f"/page/{name}", self._asset) for name in _TYPES),
        ]

    async def _page(self, request: Request) -> Response:
        if not self._gate.may_read(request.headers):
            return self._login_form("", 200)
        look = self._look()
        html = self._jinja.get_template("page.html").render(
            page=look.tree, shape=look.shape, logged_in=session_of(request.headers) is not None
        )
        return HTMLResponse(html, headers=_FRESH)

    def _look(self) -> _Look:
        began = time.monotonic()
        if self._last is None or began >= self._last.until:
            tree = self._build()
            made = {cell.key: cell for cell in cells(tree)}
            signature = shape(tree)
            took = time.monotonic() - began
            self._last = _Look(tree, made, signature, began + _SHARE * took)
        return self._last

    async def _icon(self, _: Request) -> Response:
        return Response(_ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=300"})

    async def _asset(self, request: Request) -> Response:
        name = request.url.path.rsplit("/", 1)[-1]
        return Response(_read(name), media_type=_TYPES[name], headers={"Cache-Control": "max-age=300"})

    async def _live(self, request: Request) -> Response:
        if not self._gate.may_read(request.headers):
            error = LlmgwError("the page needs a login", hint="load `/` and log in", code="unauthorized")
            return JSONResponse(error_body(error), 401)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=_FRESH)

    async def _events(self) -> AsyncIterator[str]:
        """First all cells, then those that changed, at most twice a second; a comment now and then: still alive."""
        last: _Look | None = None
        told_at = 0.0
        while not self._stopping():
            look, now = self._look(), time.monotonic()
            before = last.cells if last is not None else {}
            changed = [] if look is last else [cell for key, cell in look.cells.items() if before.get(key) != cell]
            if changed or last is None or look.shape != last.shape:
                told_at = now
                told = [[cell.key, cell.text, cell.state, cell.value] for cell in changed]
                yield f"data: {json.dumps({'shape': look.shape, 'cells': told})}\n\n"
            elif now - told_at >= _PING_S:
                told_at = now
                yield ": still here\n\n"
            last = look
            await asyncio.sleep(_TURN_S)

    async def _login(self, request: Request) -> Response:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > _LOGIN_LIMIT:
                return self._login_form("That is too long for a token", 413)
        token = parse_qs(data.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not self._gate.token.accepts(token):
            return self._login_form("That is not the admin token", 403)
        answer = RedirectResponse("/", 303, headers=_FRESH)
        answer.set_cookie(
            COOKIE,
            self._gate.sessions.create(),
            max_age=int(SESSION_S),
            httponly=True,
            samesite="strict",
            secure=self._gate.secure,
        )
        return answer

    async def _logout(self, request: Request) -> Response:
        session = session_of(request.headers)
        if session is not None:
            self._gate.sessions.end(session)
        answer = RedirectResponse("/", 303, headers=_FRESH)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=self._gate.secure)
        return answer

    def _login_form(self, words: str, status: int) -> Response:
        return HTMLResponse(self._jinja.get_template("login.html").render(words=words), status, headers=_FRESH)


def _read(name: str) -> str:
    return files("llmgw.server.page").joinpath(name).read_text("utf-8")
