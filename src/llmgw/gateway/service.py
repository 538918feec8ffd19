"""One gateway process: its listening socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

from llmgw import __version__
from llmgw.errors import AddressInUse
from llmgw.gateway.control import ControlLink
from llmgw.gateway.plane import Plane
from llmgw.gateway.protocol import Client
from llmgw.gateway.settings import Options
from llmgw.gateway.shared import Shared
from llmgw.gateway.tls import FrontFiles, FrontTls

_LOG = logging.getLogger("llmgw.gateway")
_SEND_BUFFER = 64 << 10
_BACKLOG = 1024
_LAST_WORDS_S = 3.0
_POLL_S = 0.02


class Service:
    """Builds the data plane and runs it.

    Args:
        control, admin: unix sockets of the control process.
        listen: host and port for clients; several processes may share it (SO_REUSEPORT).
        tls: certificate, key and who may show one; None for plain HTTP.

    Raises:
        AddressInUse: the address is taken, or cannot be listened on.
        TlsError: the certificate or the key cannot be loaded.
    """

    def __init__(
        self,
        control: str,
        admin: str,
        listen: tuple[str, int],
        tls: FrontFiles | None,
        index: int,
        options: Options,
    ) -> None:
        self._control = control
        self._admin = admin
        self._index = index
        self._options = options
        self._tls = FrontTls(tls) if tls else None
        self._plane: Plane | None = None
        self._socket = _bind(*listen)

    async def run(self) -> None:
        """Serve until told to drain, then until the last answer is finished."""
        loop = asyncio.get_running_loop()
        _raise_file_limit()
        plane = self._plane = Plane(self._options, self._admin, time.monotonic, self._shared())
        drain = asyncio.Event()
        killed = asyncio.Event()

        def stop() -> None:
            (killed if drain.is_set() else drain).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        server = await loop.create_server(
            lambda: Client(plane),
            sock=self._socket,
            ssl=self._tls.context if self._tls else None,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self._options.head_timeout_s if self._tls else None,
            ssl_shutdown_timeout=5.0 if self._tls else None,
        )
        host, port = self._socket.getsockname()[:2]
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        hello = {"type": "gateway", "pid": os.getpid(), "listen": listen, "version": __version__, "index": self._index}
        hello["settings"] = self._options.settings

        def linked(connected: bool) -> None:
            plane.control_connected = connected
            if not connected:
                plane.hear("watch", {})  # whoever looked does so no longer

        link = ControlLink(self._control, hello, plane.report, plane.apply, drain.set, linked, plane.hear)
        tasks = [loop.create_task(link.run()), loop.create_task(_sweep(plane))]
        _LOG.info("listening on %s", listen)
        try:
            await drain.wait()
            await self._drain(plane, server, killed)
            await _settle_usage(plane, link)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            plane.pool.close()
            for client in list(plane.clients):
                client.abort()
            plane.ledger.settle()
            plane.books.log.flush()
            if left := plane.books.pending():
                _LOG.error("usage of %d requests is lost: the control process did not take it over", left)

    async def _drain(self, plane: Plane, server: asyncio.Server, killed: asyncio.Event) -> None:
        _LOG.info("draining: %d answers are open", len(plane.active))
        plane.draining = True
        _accept_waiting(self._socket)
        server.close()
        for client in list(plane.clients):
            client.drain()
        deadline = plane.now() + self._options.drain_timeout_s
        while plane.clients and plane.now() < deadline and not killed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(killed.wait(), 0.05)
        if plane.active:
            _LOG.warning("%d answers are cut off: the deadline for draining has passed", len(plane.active))
        for relay in list(plane.active):
            relay.give_up("this gateway process ends and the deadline for open answers has passed")
        await asyncio.sleep(0.05 if plane.clients else 0)

    def _reload(self) -> None:
        """SIGHUP: begin a new access log, and look at the TLS files now; a new connection does so anyway."""
        if self._plane is not None:
            self._plane.ledger.settle()
            self._plane.books.log.reopen()
        if self._tls is not None:
            self._tls.refresh()

    def _shared(self) -> Shared | None:
        if self._options.workers < 2:
            return None
        port = self._socket.getsockname()[1]
        path = Path(self._control).with_name(f"gateways-{port}.shared")
        try:
            return Shared(path, self._options.workers)
        except OSError as error:
            _LOG.warning("each gateway counts its own requests only: `%s` cannot be used: %s", path, error)
            return None


def _accept_waiting(sock: socket.socket) -> None:
    """Connections that only the kernel has accepted so far would be reset by closing."""
    loop: Any = asyncio.get_running_loop()
    handle = loop._selector.get_key(sock).data[0]
    handle._callback(*handle._args)


async def _settle_usage(plane: Plane, link: ControlLink) -> None:
    """The usage of the last answers goes to the control process, if that is there and keeps it soon."""
    deadline = plane.now() + _LAST_WORDS_S
    plane.ledger.settle()
    while plane.books.pending() and plane.control_connected and plane.now() < deadline:
        link.tell()
        batch = plane.books.batch
        for _ in range(50):
            if plane.books.batch is not batch or not plane.control_connected:
                break
            await asyncio.sleep(0.01)


async def _sweep(plane: Plane) -> None:
    due = plane.now() + plane.pause_s()
    while True:
        left = due - plane.now()
        await asyncio.sleep(max(0.0, min(left, _POLL_S) if plane.balance.polls() else left))
        try:
            if plane.now() < due:
                plane.balance.expire()
            else:
                due = plane.now() + plane.pause_s()
                plane.sweep()
        except Exception:
            _LOG.exception("a deadline could not be judged")


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise AddressInUse(
            f"`{host}:{port}` cannot be listened on", cause=str(error), code="address-invalid"
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"`{host}:{port}` is taken by another program",
                cause=error.strerror or str(error),
                hint=f"`ss -ltnp 'sport = :{port}'` says which; or set `http.listen` to another address",
            ) from error
        raise AddressInUse(
            f"`{host}:{port}` cannot be listened on", cause=error.strerror or str(error), code="address-invalid"
        ) from error
    return sock


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
