"""Connections to engines (and to the admin socket): pooled, watched, closed at once when nobody wants the answer."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from llmgw.gateway.settings import Options

_HEAD_LIMIT = 64 << 10
_HEAD_TOO_LARGE = f"the head of its answer is larger than {_HEAD_LIMIT} bytes"
_NO_BODY = (204, 304)


class Receiver(Protocol):
    """Who asked: gets the answer piece by piece."""

    def received(self, upstream: Upstream) -> None:
        """There is news: `headed`, `pieces`, `complete` or `fault` have changed."""
        ...

    def lost(self, words: str) -> None:
        """The connection ended before the answer did."""
        ...

    def may_end_by_close(self) -> bool:
        """Whether an answer of unannounced length is complete when its connection ends."""
        ...


class Upstream(asyncio.Protocol):
    """One connection. The response parser only watches the framing; body bytes pass through as they are.

    Attributes:
        headed: the head of the answer is complete: `status`, `headers` (names in lower case) and `length` are set.
        length: the announced size of the body, None for a chunked one or one that ends with the connection.
        pieces: body bytes nobody has taken yet.
        complete: the answer has ended. fault: why it cannot be read any further.
    """

    def __init__(self, address: tuple[str, int], sock: socket.socket, forget: Callable[[Upstream], None]) -> None:
        self.address = address
        self.sock = sock
        self.receiver: Receiver | None = None
        self.idle_since = 0.0
        self.headed = self.complete = self.head_only = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.length: int | None = None
        self.pieces: list[bytes] = []
        self.fault = ""
        self._forget = forget
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = self._field_bytes = 0
        self._interim = self._until_close = self._surplus = self._lives_on = False
        self._paused = False
        self.gone = False

    def ask(self, receiver: Receiver, head: bytes, body: bytes | bytearray, head_only: bool = False) -> None:
        """Send a request; the answer goes to `receiver`. `head_only`: the answer to HEAD has no body."""
        self.receiver = receiver
        self.headed = self.complete = self._surplus = self._until_close = False
        self.head_only = head_only
        self.headers = []
        self.length = None
        self._head_bytes = self._field_bytes = 0
        if len(body) <= 65536:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def take(self) -> list[bytes]:
        """The body bytes that came since the last call."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def reusable(self) -> bool:
        """Whether another request may follow on this connection."""
        return (
            self.complete
            and self._lives_on
            and not (self.fault or self._surplus or self._until_close or self.head_only or self.gone)
        )

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine."""
        self._paused = True
        if not self.gone:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and not self.gone:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once: the engine must notice that nobody listens any more."""
        self.receiver = None
        self.gone = True
        self._transport.abort()

    def alive(self) -> bool:
        """Whether an idle connection can take a request: nothing has arrived on it, not even its end."""
        if self.gone:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        receiver = self.receiver
        if receiver is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                self.fault = f"it sent what is not HTTP ({str(error)[:120]!a})"
        if not self.headed:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_LIMIT:
                self.fault = _HEAD_TOO_LARGE
        receiver.received(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._forget(self)
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        if self.headed and self._until_close and exc is None and receiver.may_end_by_close():
            self.complete = True
            receiver.received(self)
        else:
            receiver.lost(f"it closed the connection ({exc})" if exc else "it closed the connection")

    def on_message_begin(self) -> None:
        if self.complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers.append((name.lower(), value))
            self._field_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self._interim = True
            self.headers = []
            return
        if self._field_bytes > _HEAD_LIMIT:
            self.fault = _HEAD_TOO_LARGE
            return
        self.headed = True
        chunked = False
        for name, value in self.headers:
            if name == b"content-length":
                self.length = int(value)
            elif name == b"transfer-encoding":
                chunked = True
        if self.head_only:
            self.complete = True
        elif self.length is None and not chunked and self.status not in _NO_BODY:
            self._until_close = True

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.pieces.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self.complete:
            self.complete = True
            self._lives_on = bool(self._parser.should_keep_alive())


class Pool:
    """Idle connections by address, the last used first, and the making of new ones."""

    def __init__(self, options: Options, now: Callable[[], float]) -> None:
        self._options = options
        self._now = now
        self._idle: dict[tuple[str, int], list[Upstream]] = {}

    def take(self, address: tuple[str, int]) -> Upstream | None:
        """An idle connection that is certainly still open, so that no request is lost to a closed one."""
        idle = self._idle.get(address)
        oldest = self._now() - self._options.pool_idle_s
        while idle:
            upstream = idle.pop()
            if upstream.idle_since >= oldest and upstream.alive():
                return upstream
            upstream.abort()
        return None

    def give(self, upstream: Upstream) -> None:
        """Keep the connection for the next request if it can take one, else close it."""
        if not upstream.reusable():
            upstream.abort()
            return
        upstream.receiver = None
        upstream.resume()
        upstream.idle_since = self._now()
        self._idle.setdefault(upstream.address, []).append(upstream)

    async def connect(self, address: tuple[str, int]) -> Upstream:
        """Open a connection to an engine.

        Raises:
            OSError: refused, unreachable, or not within the connect timeout.
        """
        host, port = address
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._options.connect_timeout_s):
            failure: OSError | None = None
            for family, target in await _resolve(host, port):
                sock = socket.socket(family, socket.SOCK_STREAM)
                try:
                    sock.setblocking(False)
                    await loop.sock_connect(sock, target)
                    return await self._adopt(sock, address)
                except OSError as error:
                    sock.close()
                    failure = error
                except BaseException:
                    sock.close()
                    raise
            raise failure or OSError(f"`{host}` has no address")

    async def connect_unix(self, path: str) -> Upstream:
        """Open a connection to a unix socket; it is never pooled.

        Raises:
            OSError: nobody listens there.
        """
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self._options.connect_timeout_s):
                await loop.sock_connect(sock, path)
                _, upstream = await loop.create_unix_connection(
                    lambda: Upstream((path, 0), sock, self._forget), sock=sock
                )
        except BaseException:
            sock.close()
            raise
        return upstream

    def sweep(self) -> None:
        """Close what has been idle too long: the engine's own server is about to do the same."""
        oldest = self._now() - self._options.pool_idle_s
        for address, idle in list(self._idle.items()):
            while idle and idle[0].idle_since < oldest:
                idle.pop(0).abort()
            if not idle:
                del self._idle[address]

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()

    async def _adopt(self, sock: socket.socket, address: tuple[str, int]) -> Upstream:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(address, sock, self._forget), sock=sock)
        return upstream

    def _forget(self, upstream: Upstream) -> None:
        idle = self._idle.get(upstream.address)
        if idle and upstream in idle:
            idle.remove(upstream)


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(info[0], info[4]) for info in found]
    if literal.version == 4:
        return [(socket.AF_INET, (host, port))]
    return [(socket.AF_INET6, (host, port, 0, 0))]
