"""The pool of connections to engines: kept, rested, looked at before use; and the making of new ones."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from llmgw.gateway.reply import Replies
from llmgw.gateway.settings import Options
from llmgw.gateway.upstream import Upstream

_REST_S = 0.5
_FRESH_S = 0.005


class Cancellable(Protocol):
    """Something under way that can be given up."""

    def cancel(self) -> object:
        """Give it up: nobody is told any more."""
        ...


class Dial:
    """A connection being made to a literal address, without a task of its own. Exactly one of the two is called.

    Args:
        made: gets the connected socket, which is its own from then on.
        failed: gets the reason.
    """

    def __init__(
        self,
        where: tuple[int, Any],
        timeout_s: float,
        made: Callable[[socket.socket], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._made = made
        self._failed = failed
        self._sock: socket.socket | None = None
        family, target = where
        try:
            sock = self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            code = sock.connect_ex(target)
        except (OSError, ValueError, OverflowError) as error:
            self._timer: asyncio.Handle = self._loop.call_soon(self._end, OSError(str(error)))
            return
        if code in (0, errno.EINPROGRESS):
            self._loop.add_writer(sock.fileno(), self._writable)
            self._timer = self._loop.call_later(timeout_s, self._late, timeout_s)
        else:
            self._timer = self._loop.call_soon(self._end, OSError(code, os.strerror(code)))

    def cancel(self) -> None:
        """See `Cancellable`."""
        self._timer.cancel()
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_writer(sock.fileno())
            # its number must not be another's while the loop may still hold an event for this one (see `loop`)
            self._loop.call_soon(sock.close)

    def _writable(self) -> None:
        sock = self._sock
        assert sock is not None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(OSError(code, os.strerror(code)))
            return
        self._timer.cancel()
        self._loop.remove_writer(sock.fileno())
        self._sock = None
        self._made(sock)

    def _late(self, timeout_s: float) -> None:
        self._end(TimeoutError(f"no connection within {timeout_s:g} s"))

    def _end(self, error: OSError) -> None:
        self.cancel()
        self._failed(error)


class Pool:
    """Idle connections by address, the last used first, and the making of new ones.

    llama-server announces keep-alive and closes the connection after every answer in chunks, some microseconds after
    its end. A request sent in between would be lost, so such a connection rests first; an address whose connections
    outlive that is steady, and its connections are used again at once.
    """

    def __init__(self, options: Options, now: Callable[[], float]) -> None:
        self._options = options
        self._now = now
        self._idle: dict[tuple[str, int], list[Upstream]] = {}
        self._replies = Replies()
        self._resting: dict[Upstream, None] = {}
        self._steady: set[tuple[str, int]] = set()

    def take(self, address: tuple[str, int], now: float) -> Upstream | None:
        """An idle connection that is still open, so that no request is lost to a closed one.

        One that has just given a whole answer and announced no end is not looked at again.
        """
        idle = self._idle.get(address)
        if not idle:
            return None
        oldest = now - self._options.pool_idle_s
        fresh = now - _FRESH_S
        while idle:
            upstream = idle.pop()
            if upstream.idle_since >= fresh and not upstream.framed and not upstream.gone:
                return upstream
            if upstream.idle_since >= oldest and upstream.alive():
                return upstream
            upstream.abort()
        return None

    def give(self, upstream: Upstream, now: float) -> None:
        """Keep the connection for the next request if it can take one, else close it."""
        if not upstream.reusable():
            upstream.abort()
            return
        upstream.receiver = None
        if upstream.paused:
            upstream.resume()
        upstream.idle_since = now
        if upstream.framed and upstream.address not in self._steady:
            self._resting[upstream] = None
            return
        self._keep(upstream)

    def _keep(self, upstream: Upstream) -> None:
        idle = self._idle.get(upstream.address)
        if idle is None:
            idle = self._idle[upstream.address] = []
        idle.append(upstream)

    def dial(
        self, address: tuple[str, int], made: Callable[[Upstream], None], failed: Callable[[OSError], None]
    ) -> Cancellable:
        """Open a connection to an engine; exactly one of the two is called, and not before this has returned.

        Args:
            failed: gets the reason: refused, unreachable, or not within the connect timeout.
        """
        where = _literal(*address)
        if where is None:
            return asyncio.get_running_loop().create_task(self._dial_name(address, made, failed))
        return Dial(where, self._options.connect_timeout_s, lambda sock: made(self._adopt(sock, address)), failed)

    async def _dial_name(
        self, address: tuple[str, int], made: Callable[[Upstream], None], failed: Callable[[OSError], None]
    ) -> None:
        try:
            upstream = await self._connect(address)
        except (OSError, ValueError, OverflowError) as error:
            words = str(error) or f"no connection within {self._options.connect_timeout_s:g} s"
            failed(error if isinstance(error, OSError) and str(error) else OSError(words))
            return
        made(upstream)

    async def _connect(self, address: tuple[str, int]) -> Upstream:
        host, port = address
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._options.connect_timeout_s):
            failure: OSError | None = None
            for family, _, _, _, target in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                sock = socket.socket(family, socket.SOCK_STREAM)
                try:
                    sock.setblocking(False)
                    await loop.sock_connect(sock, target)
                    return self._adopt(sock, address)
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
                    lambda: Upstream((path, 0), sock, self._replies, self._forget), sock=sock
                )
        except BaseException:
            sock.close()
            raise
        return upstream

    def sweep(self) -> None:
        """Close what has been idle too long: the engine's own server is about to do the same."""
        now = self._now()
        while self._resting:
            upstream = next(iter(self._resting))
            if upstream.idle_since > now - _REST_S:
                break
            del self._resting[upstream]
            if upstream.alive():
                self._steady.add(upstream.address)
                upstream.idle_since = now
                self._keep(upstream)
            else:
                upstream.abort()
        oldest = now - self._options.pool_idle_s
        for address, idle in list(self._idle.items()):
            while idle and idle[0].idle_since < oldest:
                idle.pop(0).abort()
            if not idle:
                del self._idle[address]

    def close(self) -> None:
        """Close every idle connection."""
        while self._resting:
            self._resting.popitem()[0].abort()
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()

    def _adopt(self, sock: socket.socket, address: tuple[str, int]) -> Upstream:
        loop: Any = asyncio.get_running_loop()
        upstream = Upstream(address, sock, self._replies, self._forget)
        # at once, so it can be asked at once; what is read comes with the loop's next turn
        upstream.connection_made(loop.adopt(sock, upstream))
        return upstream

    def _forget(self, upstream: Upstream) -> None:
        self._resting.pop(upstream, None)
        idle = self._idle.get(upstream.address)
        if idle and upstream in idle:
            # closed by the engine while nothing was asked
            idle.remove(upstream)
            self._steady.discard(upstream.address)


@lru_cache(1024)
def _literal(host: str, port: int) -> tuple[int, Any] | None:
    """Family and socket address of a literal address; None for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return (socket.AF_INET, (host, port)) if version == 4 else (socket.AF_INET6, (host, port, 0, 0))
