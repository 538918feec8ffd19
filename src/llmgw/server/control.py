"""The socket between this server and its gateways: routes out on every change, counts in every second.

JSON lines over a unix socket; the format is in docs/architecture.md. A gateway that reads slowly gets the newest routes
when it is ready for them, never a pile of old ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import define, evolve, field, frozen

from llmgw.domain.routing import RouteTable
from llmgw.errors import StateError
from llmgw.wire.shapes import to_json

log = logging.getLogger(__name__)

_LINE_LIMIT = 1 << 20
_HELLO_S = 10.0


@frozen
class GatewayInfo:
    """One connected gateway process: who it is and its last counts, by model and by replica."""

    pid: int
    listen: str
    version: str
    index: int
    in_flight: Mapping[str, int] = field(factory=dict)
    requests: int | None = None
    replicas: Mapping[str, int] = field(factory=dict)
    settings: str = ""


@define(eq=False)
class _Peer:
    """One connection; touched by the loop's thread only, except `info`, which is replaced whole."""

    info: GatewayInfo
    writer: asyncio.StreamWriter
    wake: asyncio.Event = field(factory=asyncio.Event)
    draining: bool = False
    sent_seq: int = -1
    watched: bool = False


class Books(Protocol):
    """Where usage is kept (`server.usage.Usage`)."""

    def keep(self, run: str, batch: int, rows: Sequence[Any]) -> bool: ...


class Live(Protocol):
    """Who looks at the requests (`server.usage.Requests`)."""

    def hear(self, pid: int, said: dict[str, Any]) -> bool: ...

    def forget(self, pid: int) -> None: ...


class Control:
    """Listens for gateways. Any thread may call.

    Args:
        path: of the unix socket; an old one is replaced (the state's lock says that its server is gone).
        on_change: called on the control thread when a gateway connected or went; must not block.
        usage: keeps what gateways say that clients used, None to leave it with them.
        requests: gets what they are doing while `watch` is on.
    """

    def __init__(
        self, path: Path, on_change: Callable[[], None], usage: Books | None = None, requests: Live | None = None
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._usage = usage
        self._requests = requests
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._started = threading.Event()
        self._failed: OSError | None = None
        self._peers: dict[int, _Peer] = {}
        self._table: RouteTable | None = None
        self._line = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to listen.

        Raises:
            StateError: the socket cannot be made.
        """
        self._thread.start()
        self._started.wait()
        if self._failed is not None:
            self._thread.join()
            raise StateError(
                f"cannot listen on the control socket `{self._path}`",
                cause=self._failed.strerror or str(self._failed),
                hint="keep the state in a directory that is writable and whose path is short (sockets allow 107 bytes)",
            )

    def stop(self) -> None:
        """Close all connections; gateways go on with what they know."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)

    def publish(self, table: RouteTable) -> None:
        """Give every gateway these routes, now and when it connects later."""
        line = json.dumps({"type": "routes", **to_json(table)}, separators=(",", ":")).encode() + b"\n"

        def keep() -> None:
            self._table, self._line = table, line
            for peer in self._peers.values():
                peer.wake.set()

        self._call(keep)

    def drain(self, pid: int | None = None) -> None:
        """Tell one gateway, or all (None), to finish its answers and exit."""

        def tell() -> None:
            for peer in self._peers.values():
                if pid is None or peer.info.pid == pid:
                    peer.draining = True
                    peer.wake.set()

        self._call(tell)

    def gateways(self) -> tuple[GatewayInfo, ...]:
        """The connected gateways by index."""
        return tuple(
            sorted((peer.info for peer in list(self._peers.values())), key=lambda item: (item.index, item.pid))
        )

    def in_flight(self) -> dict[str, int] | None:
        """Requests at each replica by the gateways' last counts; None when no gateway is connected."""
        gateways = self.gateways()
        if not gateways:
            return None
        found: dict[str, int] = {}
        for gateway in gateways:
            for name, count in gateway.replicas.items():
                found[name] = found.get(name, 0) + count
        return found

    def _call(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server: asyncio.Server | None = None
        try:
            self._path.unlink(missing_ok=True)
            server = self._loop.run_until_complete(
                asyncio.start_unix_server(self._serve, path=str(self._path), limit=_LINE_LIMIT)
            )
            self._path.chmod(0o600)
        except OSError as error:
            self._failed = error
        self._started.set()
        try:
            if self._failed is None:
                self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._close(server))
            self._loop.close()

    async def _close(self, server: asyncio.Server | None) -> None:
        if server is not None:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(_HELLO_S):
                info = _hello(await reader.readline())
            if info is None:
                log.warning("somebody on the control socket is not a gateway: disconnected")
                return
            await self._attend(reader, _Peer(info, writer))
        except (OSError, ValueError, TimeoutError, asyncio.CancelledError) as error:
            log.debug("a gateway connection ended: %s", error)
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _attend(self, reader: asyncio.StreamReader, peer: _Peer) -> None:
        self._peers[id(peer)] = peer
        log.info("gateway %d (pid %d) on %s is connected", peer.info.index, peer.info.pid, peer.info.listen)
        sender = asyncio.ensure_future(self._send(peer))
        self._on_change()
        try:
            while line := await reader.readline():
                await self._hear(peer, line)
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sender
            del self._peers[id(peer)]
            if self._requests is not None:
                self._requests.forget(peer.info.pid)
            log.info("gateway %d (pid %d) is gone", peer.info.index, peer.info.pid)
            self._on_change()

    def watch(self, on: bool) -> None:
        """Have the gateways tell what they are doing, each second, or no longer."""
        line = b'{"type":"watch","on":true}\n' if on else b'{"type":"watch","on":false}\n'

        def tell() -> None:
            for peer in self._peers.values():
                if peer.watched != on:
                    peer.watched = on
                    peer.writer.write(line)

        self._call(tell)

    async def _hear(self, peer: _Peer, line: bytes) -> None:
        said = _parse(line)
        kind = said.get("type")
        if kind == "stats":
            _count(peer, said)
        elif kind == "usage" and self._usage is not None:
            run, batch, rows = said.get("run"), said.get("batch"), said.get("rows")
            await self._keep(peer, self._usage, run, batch, rows)
        elif kind == "requests" and self._requests is not None and not self._requests.hear(peer.info.pid, said):
            self.watch(False)

    @staticmethod
    async def _keep(peer: _Peer, usage: Books, run: Any, batch: Any, rows: Any) -> None:
        if not isinstance(run, str) or type(batch) is not int or not isinstance(rows, list):
            return
        if await asyncio.to_thread(usage.keep, run, batch, rows):
            peer.writer.write(b'{"type":"usage-kept","batch":%d}\n' % batch)

    async def _send(self, peer: _Peer) -> None:
        told_to_drain = False
        while True:
            if self._table is not None and peer.sent_seq != self._table.seq:
                peer.sent_seq = self._table.seq
                peer.writer.write(self._line)
            if peer.draining and not told_to_drain:
                told_to_drain = True
                peer.writer.write(b'{"type":"drain"}\n')
            await peer.writer.drain()
            await peer.wake.wait()
            peer.wake.clear()


def _hello(line: bytes) -> GatewayInfo | None:
    said = _parse(line)
    if said.get("type") != "gateway":
        return None
    pid, listen, version, index = (said.get(key) for key in ("pid", "listen", "version", "index"))
    if type(pid) is not int or type(index) is not int or not isinstance(listen, str) or not isinstance(version, str):
        return None
    settings = said.get("settings")
    return GatewayInfo(pid, listen, version, index, settings=settings if isinstance(settings, str) else "")


def _count(peer: _Peer, said: dict[str, Any]) -> None:
    requests = said.get("requests")
    peer.info = evolve(
        peer.info,
        in_flight=_counts(said.get("in_flight")),
        requests=requests if type(requests) is int else None,
        replicas=_counts(said.get("replicas")),
    )


def _counts(said: Any) -> dict[str, int]:
    return {str(k): v for k, v in said.items() if type(v) is int} if isinstance(said, dict) else {}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
