"""The admin API and the page on a unix socket: uvicorn in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from llmgw.errors import LlmgwError, StateError
from llmgw.server.admin import Admin, Parts, on_error
from llmgw.server.auth import Gate, Guard
from llmgw.server.page.site import Site
from llmgw.server.page.view import Tree, build

_STOP_S = 5.0


def make_app(parts: Parts, gate: Gate, stopping: Callable[[], bool], further: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The whole application behind the gate.

    Args:
        further: doors that are rooms of their own.
    """

    def page() -> Tree:
        worries = [item.warning() for item in parts.own() if item.worry]
        return build(parts.deploy.outlook(), parts.control.gateways(), worries)

    site = Site(gate, page, stopping)
    return Starlette(
        routes=[*further, *Admin(parts).routes(), *site.routes()],
        middleware=[Middleware(Guard, gate=gate)],
        exception_handlers={HTTPException: on_error, LlmgwError: on_error, Exception: on_error},
    )


class Web:
    """Serves an application on a unix socket (mode 0600).

    Args:
        make: makes the application; it is given a function that says whether the server is ending.
    """

    def __init__(self, path: Path, make: Callable[[Callable[[], bool]], ASGIApp]) -> None:
        self._path = path
        self._stopping = False
        config = uvicorn.Config(
            make(lambda: self._stopping),
            http="h11",
            ws="none",
            lifespan="off",
            loop="asyncio",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)

    def start(self) -> None:
        """Listen and serve.

        Raises:
            StateError: the socket cannot be made.
        """
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
            # nobody can connect before `listen`, so there is no moment in which others could
            self._path.chmod(0o600)
            self._socket.listen(256)
        except OSError as error:
            self._socket.close()
            raise StateError(
                f"cannot listen on the admin socket `{self._path}`",
                cause=error.strerror or str(error),
                hint="keep the state in a directory that is writable and whose path is short (sockets allow 107 bytes)",
            ) from error
        self._thread.start()

    def stop(self) -> None:
        """End; answers under way get two seconds."""
        self._stopping = True
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
