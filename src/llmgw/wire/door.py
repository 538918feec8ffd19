"""Listening sockets: who may come in, and how many."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from OpenSSL import SSL

from llmgw.errors import AddressInUse, LinkError, LlmgwError
from llmgw.system.clock import Clock
from llmgw.wire.codec import Codec
from llmgw.wire.conn import Budget, Conn, ConnState, LinkLimits, Outbox, show_address, tune
from llmgw.wire.stream import PlainStream, Stream, TlsStream, os_words

log = logging.getLogger(__name__)

ContextSource = Callable[[], SSL.Context]

_ACCEPTS_PER_TURN = 64
_DEAF_S = 1.0


def open_listening(host: str, port: int) -> socket.socket:
    """A listening, non-blocking socket; port 0 lets the kernel choose.

    Raises:
        AddressInUse, LinkError: the address cannot be listened on.
    """
    where = f"{host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"cannot listen on `{where}`",
                cause="the address is taken",
                hint="stop the other program or choose another port",
            ) from error
        raise LinkError(f"cannot listen on `{where}`", cause=os_words(error)) from error
    sock.setblocking(False)
    return sock


class Door:
    """Accepts connections for a link's loop; used by the loop thread only."""

    def __init__(self, selector: selectors.BaseSelector, clock: Clock, limits: LinkLimits) -> None:
        self._selector = selector
        self._clock = clock
        self._limits = limits
        self._inside = 0
        self._per_ip: Counter[str] = Counter()
        self._listening: dict[socket.socket, ContextSource | None] = {}
        self._deaf_until: float | None = None

    def add(self, sock: socket.socket, context: ContextSource | None) -> None:
        """Listen on one more socket."""
        self._listening[sock] = context
        self._selector.register(sock, selectors.EVENT_READ)

    def accept(self, listening: socket.socket) -> Iterator[Conn]:
        """Those who came in, each counted until `left`."""
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of file descriptors: the socket stays readable, so look away for a moment instead of spinning.
                log.error("cannot accept a connection: %s", os_words(error))
                self._hear(False)
                return
            conn = self._take_in(sock, peer, self._listening[listening])
            if conn is not None:
                yield conn

    def left(self, conn: Conn) -> None:
        """One of them is gone."""
        if conn.ip:
            self._inside -= 1
            self._per_ip[conn.ip] -= 1
            if not self._per_ip[conn.ip]:
                del self._per_ip[conn.ip]

    def tick(self, now: float) -> None:
        """Listen again after a pause."""
        if self._deaf_until is not None and now >= self._deaf_until:
            self._hear(True)

    def close(self) -> None:
        """Listen no more."""
        for sock in self._listening:
            sock.close()
        self._listening.clear()

    def _take_in(self, sock: socket.socket, peer: Any, context: ContextSource | None) -> Conn | None:
        ip = str(peer[0]) if isinstance(peer, tuple) else "local"
        address = show_address(peer)
        if self._inside >= self._limits.connections or self._per_ip[ip] >= self._limits.per_address:
            whose = "in all" if self._inside >= self._limits.connections else f"from {ip}"
            log.warning("connection from %s turned away: too many connections %s", address, whose)
            sock.close()
            return None
        try:
            tune(sock, self._limits.user_timeout_s)
            stream: Stream = PlainStream(sock) if context is None else TlsStream(sock, context(), None)
        except (LlmgwError, OSError, SSL.Error) as error:
            log.error("connection from %s turned away: %s", address, error)
            sock.close()
            return None
        self._inside += 1
        self._per_ip[ip] += 1
        now = self._clock.monotonic()
        deadline = now + self._limits.handshake_s
        return Conn(
            sock, stream, Codec(), address, True, ConnState.HANDSHAKE, deadline, Outbox(), ip=ip,
            secure=context is not None, budget=Budget(self._limits, now),
        )  # fmt: skip

    def _hear(self, hearing: bool) -> None:
        if hearing == (self._deaf_until is None):
            return
        self._deaf_until = None if hearing else self._clock.monotonic() + _DEAF_S
        for sock in self._listening:
            if hearing:
                self._selector.register(sock, selectors.EVENT_READ)
            else:
                self._selector.unregister(sock)
